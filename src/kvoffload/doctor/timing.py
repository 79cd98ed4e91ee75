# SPDX-License-Identifier: Apache-2.0
"""Compare times on a noisy machine."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence


def interleaved_medians(*work: Callable[[], object], repeats: int) -> list[float]:
    """Return the median seconds of each callable. They run in turn ``repeats`` times, so that a slow minute affects all
    of them."""
    return _medians(work, repeats, time.perf_counter)


def thread_medians(*work: Callable[[], object], repeats: int) -> list[float]:
    """Return the same in CPU time of this thread, which other processes disturb less. Use it for work that only this
    thread does."""
    return _medians(work, repeats, time.thread_time)


def _medians(work: Sequence[Callable[[], object]], repeats: int, clock: Callable[[], float]) -> list[float]:
    times: list[list[float]] = [[] for _ in work]
    gc_was_on = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that a collection visits only objects of the work, and not those of all libraries
    try:
        for _ in range(repeats):
            for log, call in zip(times, work, strict=True):
                start = clock()
                call()
                log.append(clock() - start)
            gc.collect()
    finally:
        gc.unfreeze()
        if gc_was_on:
            gc.enable()
    return [statistics.median(log) for log in times]
