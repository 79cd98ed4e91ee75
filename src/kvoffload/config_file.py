# SPDX-License-Identifier: Apache-2.0
"""The configuration in a file of its own, JSON or YAML, instead of on the engine's command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError, MissingExtraError

ENVIRONMENT = "KVOFFLOAD_CONFIG"
"""The environment variable that names the file where the configuration has no ``config_file``."""

_WRAPPERS = ("kv-transfer-config", "kv_transfer_config", "kv_connector_extra_config")
"""Keys of vLLM's own files and of its option, from the outermost: the configuration lies in the innermost."""

_MOST_VALUES = 100_000
"""In a file of YAML, aliases written out: no configuration has as many, and a few lines can stand for billions."""


def with_config_file(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """``values``, and below them what the file has that ``config_file`` or else ``KVOFFLOAD_CONFIG`` names.

    A key in ``values`` wins over the file's. Raises ``ConfigError`` if the file cannot be read.
    """
    own = dict(values)
    path = own.pop("config_file", None) or environ.get(ENVIRONMENT)
    if path is None:
        return own
    if not isinstance(path, str):
        raise ConfigError(f"config_file must be the path of a file, not a {type(path).__name__}.")
    return load_config_file(Path(path)) | own


def load_config_file(path: Path) -> dict[str, Any]:
    """The keys in the file ``path``: kvoffload's own, or those within a ``--kv-transfer-config`` or a file of vLLM.

    A name that ends in ``.yaml`` or ``.yml`` is YAML, any other JSON. Raises ``ConfigError`` if it cannot be read.
    """
    return load_wrapped(path)[0]


def load_wrapped(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``load_config_file``, and what the file has around these keys: arguments of vLLM's own."""
    wrappers: dict[str, Any] = {}
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    try:
        text = path.read_text(encoding="utf-8")
        found = _yaml(text) if is_yaml else _json(text)
        for wrapper in _WRAPPERS:
            if isinstance(found, dict) and wrapper in found:
                wrappers |= {str(name): None if name == wrapper else value for name, value in found.items()}
                found = found[wrapper]
                if isinstance(found, str):  # vLLM's files have its option as text, too
                    found = _json(found)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}.") from exc
    except ConfigError as exc:
        raise ConfigError(f"{path} {exc}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{path} is nested too deep for a configuration.") from exc
    except ValueError as exc:
        line = exc.lineno if isinstance(exc, json.JSONDecodeError) else exc.args[0]
        place = f": see line {line}" if isinstance(line, int) else ""
        raise ConfigError(f"{path} is not valid {'YAML' if is_yaml else 'JSON'}{place}.") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must have a mapping of keys to values, such as cpu_bytes_to_use: 64GiB.")
    return {str(name): value for name, value in found.items()}, wrappers


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_mapping)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"has the key {twice!r} twice; keep one.")
    return found


def _yaml(text: str) -> Any:
    """Raises ``ValueError`` with the number of the line, from 1, if that is known; ``ConfigError`` for a key that is
    there twice, and for aliases that make much of little."""
    try:
        import yaml
    except ImportError as exc:
        raise MissingExtraError("A configuration in YAML needs kvoffload's extra 'cli': pip install pyyaml.") from exc
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        _check_node(node, {})
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        raise ValueError("" if mark is None else mark.line + 1) from exc
    except (AttributeError, LookupError, TypeError) as exc:  # of a value that its own !!tag does not fit
        raise ValueError("") from exc
    finally:
        loader.dispose()


def _check_node(node: Any, sizes: dict[int, int]) -> int:
    """The values in a node of YAML, those of each alias counted again; ``sizes`` has those of the nodes seen.

    Raises ``ConfigError`` for a mapping that has a key twice, and for aliases that make much of little.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = _MOST_VALUES  # for an alias to what it is in
    inner = getattr(node, "value", None)
    total = 1
    seen = set[tuple[str, str]]()
    for part in inner if isinstance(inner, list) else ():
        for each in part if isinstance(part, tuple) else (part,):
            total += _check_node(each, sizes)
        if isinstance(part, tuple) and isinstance(part[0].value, str):
            name = part[0].tag, part[0].value
            if name in seen:
                line = part[0].start_mark.line + 1
                raise ConfigError(f"has the key {name[1]!r} twice: see line {line}, and keep one.")
            seen.add(name)
    if total >= _MOST_VALUES:
        raise ConfigError("has aliases (*) that repeat too much; write out what is meant.")
    sizes[id(node)] = total
    return total
