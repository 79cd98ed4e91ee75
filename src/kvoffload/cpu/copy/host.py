# SPDX-License-Identifier: Apache-2.0
"""Copies runs within host memory, without holding the GIL: the backend where the "device" is a CPU engine.

With numba installed (vLLM brings it) a whole plan is one native call; without it every run is one ``memmove`` through
ctypes, which costs about a microsecond each and so matters below 64 KiB a run. ``bench/host_copies.py`` has figures.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.cpu.copy.plan import Runs

__all__ = ["copy_to_device", "copy_to_host"]

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
MoveRuns = Callable[[Int64s, Int64s, Int64s], None]

_NATIVE_BELOW_BYTES = 128 << 10
"""Mean run length from which one ctypes call per run costs nothing that can be measured."""


def copy_to_host(runs: Runs) -> None:
    """Device to region; the caller keeps both sides alive."""
    _move(runs.host, runs.device, runs.lengths)


def copy_to_device(runs: Runs) -> None:
    """Region to device; the caller keeps both sides alive."""
    _move(runs.device, runs.host, runs.lengths)


def _move(destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
    if not len(lengths):
        return
    if len(lengths) > 1 and int(lengths.sum()) < _NATIVE_BELOW_BYTES * len(lengths):
        _native_mover()(destinations, sources, lengths)
    else:
        _move_one_by_one(destinations, sources, lengths)


def _move_one_by_one(destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
    for destination, source, length in zip(destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(destination, source, length)


@functools.cache
def _native_mover() -> MoveRuns:
    """Compiled on first use (under a second), then the same function for the life of the process."""
    try:
        from numba import njit, types  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return _move_one_by_one
    try:
        return _compile(njit, types)
    except Exception:
        # numba and numpy releases can disagree; the plain way is always right.
        logger.warning("numba could not compile the copy loop; small pages will be copied slower.", exc_info=True)
        return _move_one_by_one


def _compile(njit: Any, types: Any) -> MoveRuns:
    memmove = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))
    addresses = types.Array(types.int64, 1, "C")

    def move(destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
        for i in range(len(lengths)):
            memmove(destinations[i], sources[i], lengths[i])

    compiled: MoveRuns = njit(types.void(addresses, addresses, addresses), nogil=True)(move)
    return compiled
