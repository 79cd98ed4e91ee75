# SPDX-License-Identifier: Apache-2.0
"""The one exception tree of kvoffload.

A miss, a full cache, a throttled tier are *values* (``False``, ``None``), never exceptions. An exception is one of two
things. A caller's mistake is a ``ConfigError``: one sentence that says what to change, raised before anything is
touched. A failure of the machine is a ``TransferError`` or ``StoreError``: the nearest tier or handler turns it into a
miss.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator


class KVOffloadError(Exception):
    """Root of everything kvoffload raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """The caller's configuration cannot work. Its arguments are sentences, one for each problem, that say what to
    change."""

    def __str__(self) -> str:
        if len(self.args) < 2:
            return super().__str__()
        return "\n".join([f"{len(self.args)} problems:", *(f"- {problem}" for problem in self.args)])


class UnknownNameError(ConfigError):
    """An unknown policy, store, spec or key; the message lists the choices."""


class LayoutError(ConfigError):
    """A KV cache layout that cannot be offloaded correctly."""


class CapacityError(ConfigError):
    """The configuration asks for more memory, shared memory or disk than the host has."""


class MissingExtraError(KVOffloadError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class TransferError(KVOffloadError):
    """A copy between device and host failed. Handlers report it as a failed transfer; it never leaves a step."""


class StoreError(KVOffloadError):
    """A block store failed as a whole. One bad block is a value instead."""


class Problems:
    """Collects the problems of several checks, so that a caller learns all of them at once.

    ``with problems:`` around a check keeps the ``ConfigError`` or ``MissingExtraError`` that it raises; ``raise_found``
    raises all of them as one.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._extras: list[str] = []

    def __enter__(self) -> Problems:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, ConfigError | MissingExtraError):
            return False
        for problem in error.args:
            self.add(str(problem))
        if isinstance(error, MissingExtraError):
            self._extras += map(str, error.args)
        return True

    def add(self, problem: str) -> None:
        if problem not in self.found:
            self.found.append(problem)

    def raise_found(self) -> None:
        """Raise what was collected as one ``ConfigError``, or as ``MissingExtraError`` if that is all; return if there
        are no problems."""
        if self.found:
            raise (MissingExtraError if self.found == self._extras[:1] else ConfigError)(*self.found)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, what it was raised from, and so on, each once: ``raise error from error`` makes a circle."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def errno_of(error: BaseException | None) -> int | None:
    """The operating system's number for ``error`` or its first cause that has one."""
    numbers = (each.errno for each in causes(error) if isinstance(each, OSError))
    return next((number for number in numbers if number in errno.errorcode), None)


def text_of(error: BaseException) -> str:
    """What ``error`` says, its class if it says nothing, or cannot: it may be foreign."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - its ``__str__`` is foreign too
        text = ""
    return text or type(error).__name__


def suggest(name: str, choices: Iterable[str]) -> str:
    """The end of an error message: ``" Did you mean 'lru'?"``, or all choices where none is near."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Choices: {', '.join(known) or 'none'}."
