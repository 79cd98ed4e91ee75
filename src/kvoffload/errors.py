# SPDX-License-Identifier: Apache-2.0
"""All exceptions of kvoffload.

A miss, a full cache and a throttled tier are *values* (``False``, ``None``), never exceptions. There are two kinds of
exceptions. A caller's mistake raises ``ConfigError``, with one sentence that names a remedy, before anything is
touched. A failure of the machine raises ``TransferError`` or ``StoreError``, and the nearest tier or handler turns it
into a miss.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator


class KVOffloadError(Exception):
    """The base class of everything that kvoffload raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """The caller's configuration cannot work. Its arguments are one sentence per problem, with a remedy."""

    def __str__(self) -> str:
        if len(self.args) < 2:
            return super().__str__()
        return "\n".join([f"{len(self.args)} problems:", *(f"- {problem}" for problem in self.args)])


class UnknownNameError(ConfigError):
    """A policy, store, spec or key is unknown. The message lists the choices."""


class LayoutError(ConfigError):
    """kvoffload cannot correctly offload a KV cache of this layout."""


class CapacityError(ConfigError):
    """The configuration asks for more memory, shared memory or disk than the host has."""


class MissingExtraError(KVOffloadError, ImportError):
    """An optional dependency is not installed. The message names the extra that installs it."""


class TransferError(KVOffloadError):
    """A copy between device and host failed.

    Handlers report a failed transfer, and an engine's step never raises this.
    """


class StoreError(KVOffloadError):
    """A block store failed as a whole. A single bad block is reported as a value instead."""


class Problems:
    """Collects the problems of several checks, so that a caller learns all of them at once.

    ``with problems:`` around a check catches its ``ConfigError`` or ``MissingExtraError``, and ``raise_found`` raises
    all problems as one error.
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
        """Raise the collected problems as one ``ConfigError``. Does nothing if there are none.

        Raises ``MissingExtraError`` instead if a missing extra is the only problem.
        """
        if self.found:
            raise (MissingExtraError if self.found == self._extras[:1] else ConfigError)(*self.found)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error``, its cause, the cause's cause and so on, each once, because causes can form a circle."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def errno_of(error: BaseException | None) -> int | None:
    """Return the operating system's number for ``error`` or its first cause that has one, or ``None``."""
    numbers = (each.errno for each in causes(error) if isinstance(each, OSError))
    return next((number for number in numbers if number in errno.errorcode), None)


def text_of(error: BaseException) -> str:
    """Return the text of ``error``, or its class name if the text is empty or foreign code fails to make it."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - its ``__str__`` may be foreign code
        text = ""
    return text or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Return the text of ``error`` for people. Errors of the operating system lose their ``[Errno 2]``."""
    return getattr(error, "strerror", None) or text_of(error)


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return the end of an error message: ``" Did you mean 'lru'?"``, or all choices if none is similar."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Choices: {', '.join(known) or 'none'}."
