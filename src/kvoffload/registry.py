# SPDX-License-Identifier: Apache-2.0
"""A registry of values that users choose by name. Other packages add values through entry points."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from kvoffload.errors import ConfigError, UnknownNameError, suggest

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to values of one kind (cache policies, block stores, offloading specs).

    A value comes from one of three sources: the value itself (``register``); a dotted ``"module:attribute"``, which is
    imported on first use, so that a registry can name code that needs torch without importing torch; or an installed
    distribution, through an entry point. A name registered in code hides an entry point of the same name. A broken
    entry point raises only if its own name is requested.

    Not thread-safe: fill it at import time.
    """

    def __init__(self, kind: str, group: str) -> None:
        """Create an empty registry. ``kind`` names a value in error messages; ``group`` is the entry-point group."""
        self._kind = kind
        self._group = group
        self._values: dict[str, T | str] = {}

    def __repr__(self) -> str:
        return f"Registry({self._kind!r}, names={self.names()})"

    def register(self, name: str, value: T | str) -> None:
        """Add ``value``, or its ``"module:attribute"``. Raises ``ConfigError`` if ``name`` has another value."""
        if name in self._values and self._values[name] != value:
            raise ConfigError(f"{self._kind} {name!r} is already registered; choose another name.")
        self._values[name] = value

    def unregister(self, name: str) -> None:
        """Remove a name registered in code. Ignores unknown names."""
        self._values.pop(name, None)

    def names(self) -> list[str]:
        """Return all available names, sorted, including entry points."""
        return sorted({*self._values, *(point.name for point in entry_points(group=self._group))})

    def get(self, name: str) -> T:
        """Return the value registered as ``name``.

        Raises ``UnknownNameError`` (a ``ValueError``), which lists the choices, for an unknown name, and
        ``ConfigError`` if the value's module or entry point cannot be imported.
        """
        if name not in self._values:
            return self._from_entry_point(name)
        value = self._values[name]
        if isinstance(value, str):
            value = self._import(name, value)
            self._values[name] = value
        return value

    def _from_entry_point(self, name: str) -> T:
        for point in entry_points(group=self._group, name=name):
            try:
                loaded: T = point.load()
            except Exception as exc:
                raise ConfigError(
                    f"{self._kind} {name!r} comes from the entry point {point.value!r}, which cannot be "
                    f"imported: {exc}; repair or uninstall its package."
                ) from exc
            return loaded
        raise UnknownNameError(f"Unknown {self._kind}: {name!r}.{suggest(name, self.names())}")

    def _import(self, name: str, path: str) -> T:
        module, _, attribute = path.partition(":")
        try:
            found: T = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as exc:
            raise ConfigError(f"{self._kind} {name!r} is {path!r}, which cannot be imported: {exc}") from exc
        return found
