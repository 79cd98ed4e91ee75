# SPDX-License-Identifier: Apache-2.0
"""Copies runs within host memory without holding the GIL: the backend for CPU engines.

With numba installed, a whole plan is one native call (``native.py``). Without it, every run is one ``memmove`` through
ctypes, which costs about a microsecond and so matters below 64 KiB a run. ``bench/host_copies.py`` measures both.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvoffload.cpu.copy.native import native_mover
from kvoffload.cpu.copy.plan import Runs

__all__ = ["copy_to_device", "copy_to_host", "move_one_by_one"]

Int64s = npt.NDArray[np.int64]


def copy_to_host(runs: Runs) -> None:
    """Device to region; the caller keeps both sides alive."""
    _move(runs.host, runs.device, runs.lengths)


def copy_to_device(runs: Runs) -> None:
    """Region to device; the caller keeps both sides alive."""
    _move(runs.device, runs.host, runs.lengths)


def _move(destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
    if not len(lengths):
        return
    (native_mover() or move_one_by_one)(destinations, sources, lengths)


def move_one_by_one(destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
    """One ctypes call per run. Each releases the GIL."""
    for destination, source, length in zip(destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(destination, source, length)
