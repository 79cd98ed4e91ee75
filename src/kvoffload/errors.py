# SPDX-License-Identifier: Apache-2.0
"""The one exception tree of kvoffload.

A miss, a full cache, a throttled tier are *values* (``False``, ``None``), never exceptions. An exception is one of two
things. A caller's mistake is a ``ConfigError``: one sentence that says what to change, raised before anything is
touched. A failure of the machine is a ``TransferError`` or ``StoreError``: the nearest tier or handler turns it into a
miss.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CapacityError",
    "ConfigError",
    "KVOffloadError",
    "LayoutError",
    "MissingExtraError",
    "StoreError",
    "TransferError",
    "UnknownNameError",
    "suggest",
]


class KVOffloadError(Exception):
    """Root of everything kvoffload raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """The caller's configuration cannot work; the message says what to change."""


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


def suggest(name: str, choices: Iterable[str]) -> str:
    """The end of an error message: ``" Did you mean 'lru'? Choices: arc, lru."``."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Choices: {', '.join(known) or 'none'}."
