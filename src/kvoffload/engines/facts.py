# SPDX-License-Identifier: Apache-2.0
"""Find the parts of an engine's configuration that change the bytes of a block. The rule is closed: every value that is
not the default counts unless a table lists it as harmless.

This module loads neither an engine nor torch.
"""

from __future__ import annotations

import dataclasses
import fractions
import json
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, cast

from kvoffload.errors import KVOffloadError

Table = Mapping[str, Mapping[str, str]]
"""Maps the name of a class to reasons, and each reason to the names of the harmless fields to which it applies."""

_NOT_OF_A_MODEL = frozenset({"transformers_version", "_name_or_path", "_commit_hash", "_auto_class"})
"""The entries that transformers adds to a model's configuration: its path and its reader. No other entry is
excluded."""


class UnclearError(KVOffloadError, ValueError):
    """A value cannot be expressed as text that is the same in each process."""


def facts_of(part: Any, table: Table, prefix: str = "") -> dict[str, str]:
    """Return the fields of ``part`` that count, as text, by ``prefix`` and name: those that ``table`` does not list and
    that differ from their default.

    Raises ``UnclearError`` for a value that another process could not distinguish from others.
    """
    facts = {}
    for name, value in _counted(part, table):
        try:
            facts[prefix + name] = _text(value, table)
        except UnclearError as exc:
            raise UnclearError(f"{prefix}{name} {exc}") from exc
    return facts


def text_of(value: Any) -> str:
    """Return ``value``, a plain value or a model's configuration, as text that is the same in each process. Raises
    ``UnclearError`` if that is impossible."""
    return _text(value, {})


def ropes_in(config: Any, is_rope: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield the descriptions of rotary embeddings in a model's configuration, including its parts and kinds of layers:
    each mapping with a ``rope_type``, and the innermost mappings below a name that contains ``rope`` (``is_rope``)."""
    if isinstance(config, Mapping):
        is_innermost = not any(isinstance(each, Mapping) for each in config.values())
        if "rope_type" in config or (is_rope and ("type" in config or is_innermost)):
            yield config
        for name, value in config.items():
            yield from ropes_in(value, is_rope or "rope" in str(name))
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from ropes_in(value, is_rope)


def rope_types_in(config: Any) -> set[str]:
    """Return the types of all rotary embeddings in a model's configuration."""
    return {str(rope.get("rope_type", rope.get("type", "default"))) for rope in ropes_in(config)}


def of_model(config: Any) -> Any:
    """Return a model's configuration and its parts, without entries that do not belong to the model."""
    if isinstance(config, Mapping):
        return {name: of_model(value) for name, value in config.items() if name not in _NOT_OF_A_MODEL}
    if isinstance(config, (list, tuple)):
        return [of_model(value) for value in config]
    return of_model(config.to_dict()) if hasattr(config, "to_dict") else config


def _counted(part: Any, table: Table) -> Iterator[tuple[str, Any]]:
    rows = [names.split() for kind in type(part).__mro__ for names in table.get(kind.__name__, {}).values()]
    harmless = {name for names in rows for name in names}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name, None)
        if field.name not in harmless and not _is_default(field, value, table):
            yield field.name, value


def _is_default(field: dataclasses.Field[Any], value: Any, table: Table) -> bool:
    default = cast(Any, field.default)
    try:
        if hasattr(default, "get_default"):  # pydantic's FieldInfo
            default = default.get_default(call_default_factory=True)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        return default is value or _text(default, table) == _text(value, table)
    except Exception:  # noqa: BLE001 - a foreign factory; the value is then not known to be the default
        return False


def _text(value: Any, table: Table) -> str:
    return json.dumps(_plain(value, table), sort_keys=True)


def _plain(value: Any, table: Table) -> Any:
    """Return ``value`` in a form that JSON can express and that is the same in each process. A JSON object is a tag: it
    contains a value of a kind that JSON lacks, by the kind's name. The only exception is a tuple, which becomes a
    list."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    kind = type(value).__name__
    if isinstance(value, Enum):
        return {"enum": [kind, value.name]}
    if isinstance(value, (fractions.Fraction, PurePath, range)):
        return {kind: str(value)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        pairs = [[_plain(key, table), _plain(each, table)] for key, each in value.items()]
        return {"mapping": sorted(pairs, key=json.dumps)}
    if isinstance(value, (list, tuple)):
        return [_plain(each, table) for each in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((_plain(each, table) for each in value), key=json.dumps)}
    return _plain_object(value, table)


def _plain_object(value: Any, table: Table) -> Any:
    kind = type(value)
    if f"{kind.__module__}.{kind.__name__}" in ("torch.dtype", "torch.device"):
        return {kind.__name__: str(value)}
    if _is_imported(value):
        return {"imported": f"{value.__module__}.{value.__qualname__}"}
    if hasattr(value, "to_dict"):  # a model's configuration, whose class may be a dataclass without some of its entries
        return {"model": _plain(of_model(value.to_dict()), table)}
    if dataclasses.is_dataclass(value):
        return {"dataclass": [kind.__name__, *([name, _plain(each, table)] for name, each in _counted(value, table))]}
    raise UnclearError(f"has a value of type {kind.__name__}, which other processes cannot tell from another")


def _is_imported(value: Any) -> bool:
    """Return whether ``value`` is a class or function that every process imports by its name. Callable objects have
    other names, and methods share their names with other objects' methods."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value
