# SPDX-License-Identifier: Apache-2.0
"""What of an engine's configuration changes the bytes of a block, in a closed world: what a table does not call
harmless counts.

Loads neither an engine nor torch.
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

COUNTS = "changes bytes"
"""The reason in a ``Table`` under which the fields stand that count."""

Table = Mapping[str, Mapping[str, str]]
"""By name of a class: reasons, each with the names of its fields. Under ``COUNTS`` stand those that change bytes, under
any other reason those that do not, and why."""

_NOT_OF_A_MODEL = frozenset({"transformers_version", "_name_or_path", "_commit_hash", "_auto_class"})
"""What transformers adds to a model's configuration: where it lay and who read it. Nothing else is left out."""


class UnclearError(KVOffloadError, ValueError):
    """A value has no text that is the same in each process."""


def facts_of(part: Any, table: Table, prefix: str = "") -> dict[str, str]:
    """The fields of ``part`` that count, as text by ``prefix`` and name.

    A field counts that ``table`` says changes bytes; so does one that the table lacks and that is not at its default.
    Raises ``UnclearError`` for a value that cannot be told from others in another process.
    """
    facts = {}
    for name, value in _counted(part, table):
        try:
            facts[prefix + name] = _text(value, table)
        except UnclearError as exc:
            raise UnclearError(f"{prefix}{name} {exc}") from exc
    return facts


def text_of(value: Any) -> str:
    """``value`` as text that is the same in each process: plain values, or a model's configuration. Raises
    ``UnclearError``."""
    return _text(value, {})


def unknown_fields(part: Any, table: Table, prefix: str = "") -> list[str]:
    """Fields that count because the table lacks them, those of the parts within ``part`` too."""
    names = []
    for name, value in _counted(part, table):
        if _reason(type(part), name, table) is None:
            names.append(prefix + name)
        elif dataclasses.is_dataclass(value) and not hasattr(value, "to_dict"):
            names += unknown_fields(value, table, f"{prefix}{name}.")
    return names


def ropes_in(config: Any, is_rope: bool = False) -> Iterator[Mapping[str, Any]]:
    """The descriptions of rotary embeddings in a model's configuration, those of its parts and of kinds of layers too:
    whatever names a ``rope_type``, and the innermost of what has ``rope`` in the name above (``is_rope``)."""
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
    """Those of ``ropes_in``."""
    return {str(rope.get("rope_type", rope.get("type", "default"))) for rope in ropes_in(config)}


def _reason(kind: type, name: str, table: Table) -> str | None:
    for each in kind.__mro__:
        for reason, names in table.get(each.__name__, {}).items():
            if name in names.split():
                return reason
    return None


def _counted(part: Any, table: Table) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name, None)
        reason = _reason(type(part), field.name, table)
        if reason == COUNTS or (reason is None and not _is_default(field, value, table)):
            yield field.name, value


def _is_default(field: dataclasses.Field[Any], value: Any, table: Table) -> bool:
    default = cast(Any, field.default)
    try:
        if hasattr(default, "get_default"):  # pydantic's FieldInfo
            default = default.get_default(call_default_factory=True)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        return default is value or _text(default, table) == _text(value, table)
    except Exception:  # noqa: BLE001 - of a factory that is not ours; then it is not known to be the default
        return False


def _text(value: Any, table: Table) -> str:
    return json.dumps(_plain(value, table), sort_keys=True)


def _plain(value: Any, table: Table) -> Any:
    """``value`` in what JSON can express, the same in each process. A JSON object is a tag: what is not JSON's own
    stands in one, by its kind. Tuples alone are as lists."""
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
    if hasattr(value, "to_dict"):  # a model's configuration, whose class may be a dataclass that lacks some of it
        return {"model": _plain(_of_model(value.to_dict()), table)}
    if dataclasses.is_dataclass(value):
        return {"dataclass": [kind.__name__, *([name, _plain(each, table)] for name, each in _counted(value, table))]}
    raise UnclearError(f"has a value of type {kind.__name__}, which other processes cannot tell from another")


def _is_imported(value: Any) -> bool:
    """A class or function that every process imports by its name. Objects that can be called have other names, and
    methods have the name of any object's."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _of_model(config: Any) -> Any:
    """A model's configuration, its parts too, without what is not of the model."""
    if isinstance(config, Mapping):
        return {name: _of_model(value) for name, value in config.items() if name not in _NOT_OF_A_MODEL}
    if isinstance(config, (list, tuple)):
        return [_of_model(value) for value in config]
    return _of_model(config.to_dict()) if hasattr(config, "to_dict") else config
