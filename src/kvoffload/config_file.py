# SPDX-License-Identifier: Apache-2.0
"""The configuration in a file of its own, JSON or YAML, instead of on the engine's command line.

Each value is used literally or rejected, never changed silently: ``12:00`` is not read as a number, and an unset
variable is an error.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError, MissingExtraError, Problems
from kvoffload.files import read_file

ENVIRONMENT = "KVOFFLOAD_CONFIG"
"""The environment variable that names the file if the configuration contains no ``config_file``."""

_WRAPPERS = ("kv-transfer-config", "kv_transfer_config", "kv_connector_extra_config")
"""Keys of vLLM's own files and of its option, from the outermost: the innermost contains the configuration."""

_MOST_VALUES = 100_000
"""Limit on the values in a YAML file, with aliases expanded. No real configuration has as many, but a few lines of
aliases can expand to billions."""

_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
"""Byte order marks, with their encodings. Windows editors write them, and PowerShell writes UTF-16."""

_VARIABLE = re.compile(r"\$(?:\{([^{}$]*)\}|\(([^()$]*)\))")
"""A variable: ``${NAME}`` as in shells and Compose, or ``$(NAME)`` as in Kubernetes."""

_SECRET = re.compile("password|secret|token|key$", re.IGNORECASE)
"""Keys whose values are secrets, or paths of secrets."""


def file_in_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the file that ``KVOFFLOAD_CONFIG`` names, with variables replaced by their values; ``None`` if it is not
    set, or blank. Raises ``ConfigError`` if it contains a variable that is not set, or is not a path."""
    path: str = _all_expanded({ENVIRONMENT: environ.get(ENVIRONMENT, "")}, environ)[ENVIRONMENT].strip()
    _check_path(path, ENVIRONMENT)
    return path or None


def with_config_file(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return ``values`` merged into the file that ``config_file`` or else ``KVOFFLOAD_CONFIG`` names. A key in
    ``values`` overrides the file's. Variables are replaced by their values (``expanded``). Raises ``ConfigError`` if
    the file cannot be read, or a variable is not set."""
    own = dict(values)
    path = _all_expanded({"config_file": own.pop("config_file", None)}, environ)["config_file"]
    if path and not isinstance(path, str):
        raise ConfigError(f"config_file must be the path of a file, not a {type(path).__name__}.")
    _check_path(path or "", "config_file")
    path = (path or "").strip() or file_in_environment(environ)
    if path is None:
        return _all_expanded(own, environ)
    return _all_expanded(load_config_file(Path(os.path.expanduser(path))) | own, environ)


def _check_path(path: str, source: str) -> None:
    if re.match("\\s*([\"']|[a-z]+://)", path):
        raise ConfigError(f"{source} is {path!r}: write the path alone, without quotes or file://.")


def load_config_file(path: Path) -> dict[str, Any]:
    """Return the keys in the file ``path``: kvoffload's own, or those within a ``--kv-transfer-config`` or a file of
    vLLM.

    A file whose name ends in ``.yaml`` or ``.yml`` is read as YAML, any other as JSON. Raises ``ConfigError`` if it
    cannot be read.
    """
    return load_wrapped(path)[0]


def load_wrapped(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys as ``load_config_file`` does, and vLLM's own arguments that surround them in the file."""
    wrappers: dict[str, Any] = {}
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    try:
        text = _text_of(read_file(path))
        found = _yaml(text) if is_yaml else _json(text)
        for wrapper in _WRAPPERS:
            if isinstance(found, dict) and wrapper in found:
                wrappers |= {str(name): None if name == wrapper else value for name, value in found.items()}
                found = found[wrapper]
                if isinstance(found, str):  # vLLM's files may contain its option as text
                    found = _json(found)
    except OSError as exc:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {exc.strerror}; check its path and permissions."
        ) from exc
    except ConfigError as exc:
        raise ConfigError(f"{path} {exc}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{path} is nested too deeply for a configuration.") from exc
    except ValueError as exc:
        kind = "YAML" if is_yaml else "JSON"
        hint = "" if is_yaml or path.suffix.lower() == ".json" else " A file of YAML needs a name that ends in .yaml."
        raise ConfigError(f"{path} is not valid {kind}: {str(exc).rstrip('.')}.{hint}") from exc
    if found is None:
        raise ConfigError(f"{path} is empty; write at least cpu_bytes_to_use, for example 'cpu_bytes_to_use: 64GiB'.")
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must contain a mapping of keys to values, such as cpu_bytes_to_use: 64GiB.")
    return {str(name): value for name, value in found.items()}, wrappers


def has_variable(text: str) -> bool:
    return _VARIABLE.search(text) is not None


def expanded(values: Mapping[str, Any], environ: Mapping[str, str], problems: Problems) -> dict[str, Any]:
    """Return ``values`` with each ``${NAME}`` and ``$(NAME)`` in a text replaced by that environment variable. Add a
    problem for each variable that is not set; its text stays."""

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, str):
            return _VARIABLE.sub(lambda found: replaced(found, key, value), value)
        if isinstance(value, Mapping):
            return {name: walk(inner, str(name)) for name, inner in value.items()}
        return [walk(inner, key) for inner in value] if isinstance(value, list | tuple) else value

    def replaced(found: re.Match[str], key: str, text: str) -> str:
        name = found[1] or found[2] or ""
        if name not in environ and _may_be_secret(found, key, text):
            problems.add(
                f"{key} contains a variable in ${{}} or $(), but no such environment variable is set: set it, or put a "
                'secret that contains these characters itself into a file, as {"file": path}.'
            )
        elif name not in environ:
            problems.add(
                f"{key} contains {found[0]}, but no such environment variable is set: set it, or write a value."
            )
        return environ.get(name, found[0])

    return {name: walk(value, name) for name, value in values.items()}


def _may_be_secret(found: re.Match[str], key: str, text: str) -> bool:
    """Return whether a variable found in ``text`` may be a part of a secret that contains these characters itself."""
    before, after = text[: found.start()], text[found.end() :]
    if "@" in after:  # user and password of a URL
        return not (before.endswith((":", "/")) and after.startswith((":", "@")))
    return bool(before or after) and _SECRET.search(key) is not None


def _all_expanded(values: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    problems = Problems()
    found = expanded(values, environ, problems)
    problems.raise_found()
    return found


def _text_of(data: bytes) -> str:
    """Decode ``data``. Raises ``ValueError`` with the line of the first byte that is not text."""
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as exc:
        line, byte = data.count(b"\n", 0, exc.start) + 1, data[exc.start]
        raise ValueError(f"line {line} has the byte 0x{byte:02x}, which is not UTF-8; save the file as UTF-8") from exc


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_mapping)
    except json.JSONDecodeError as exc:
        raise ValueError(f"line {exc.lineno}: {exc.msg[0].lower()}{exc.msg[1:]}") from exc


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"has the key {twice!r} twice; keep one.")
    return found


def _yaml(text: str) -> Any:
    """Parse YAML. Raises ``ValueError`` with the line (from 1) and the reason, and ``ConfigError`` for a key that
    occurs twice, for a number that YAML changes, and for aliases that repeat too much."""
    try:
        import yaml
    except ImportError as exc:
        raise MissingExtraError("A configuration in YAML needs kvoffload's extra 'cli': pip install pyyaml.") from exc
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_node(node, {})
        return None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        raise ValueError(f"line {line} has the character U+{ord(text[exc.position]):04X}, which YAML forbids") from exc
    except yaml.MarkedYAMLError as exc:
        raise ValueError(_reason(exc, text)) from exc
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc
    except (AttributeError, LookupError, TypeError) as exc:
        raise ValueError("a value does not fit its !!tag") from exc
    finally:
        if loader is not None:
            loader.dispose()


def _reason(exc: Any, text: str) -> str:
    """Return the line and the reason of a PyYAML error, for people."""
    mark = exc.problem_mark or exc.context_mark
    number = 0 if mark is None else mark.line + 1
    lines = text.splitlines()
    # PyYAML may notice a tab only at the end of the value that it interrupts.
    for near in (number, number + 1):
        if 0 < near <= len(lines) and lines[near - 1].lstrip(" ").startswith("\t"):
            return f"line {near} is indented with a tab; use spaces"
    if "single document" in str(exc.context or ""):
        return f"line {number} begins a second document; keep one"
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    if _VARIABLE.search(line) and "{" in line:
        return f"line {number}: put quotes around a value with ${{...}}"
    hint = "; check the indentation" if "not allowed here" in str(exc.problem or "") else ""
    return f"line {number}: {exc.problem or exc.context or 'it cannot be read'}{hint}"


_CHANGED = re.compile(r"[-+]?([0-9_]+(:[0-5]?[0-9])+(\.[0-9_]*)?|0[0-7_]+|0[bx][0-9a-fA-F_]+)")
"""Numbers that YAML reads in base 60, 8, 2 or 16: ``12:00`` becomes 720, and ``010`` becomes 8."""


def _check_node(node: Any, sizes: dict[int, int]) -> int:
    """Return the number of values in a YAML node, counting the values of each alias again. ``sizes`` remembers the
    nodes seen.

    Raises ``ConfigError`` for a mapping with a key twice, for a number that YAML changes, and for aliases that repeat
    too much.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = _MOST_VALUES  # an alias to the node that contains it
    inner = getattr(node, "value", None)
    if isinstance(inner, str) and node.tag.endswith((":int", ":float")) and _CHANGED.fullmatch(inner):
        line = node.start_mark.line + 1
        raise ConfigError(f"has {inner} in line {line}, which YAML reads as another number: put quotes around it.")
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
        raise ConfigError("has aliases (*) that repeat too much; write the values out.")
    sizes[id(node)] = total
    return total
