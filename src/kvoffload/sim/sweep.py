# SPDX-License-Identifier: Apache-2.0
"""Many machines on one trace, on all cores, with the optimum beside them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from kvoffload.base import OffloadKey
from kvoffload.sim.driver import SimConfig, SimResult, simulate
from kvoffload.sim.optimum import optimum
from kvoffload.sim.trace import Trace

__all__ = ["Report", "knee", "sweep"]


@dataclass(frozen=True, slots=True)
class Report:
    """The runs on one trace."""

    trace: Trace
    block_bytes: int
    results: tuple[SimResult, ...]
    """In the order of the configurations."""
    optimum_rates: tuple[float, ...]
    """For each result the best block hit rate that a single cache of all its tiers' blocks could have."""
    reachable_rate: float
    """The hit rate of a cache that holds everything."""


def sweep(
    trace: Trace,
    configs: Sequence[SimConfig],
    processes: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Runs every configuration on ``trace``. ``progress`` is told each run's number of accesses when it is done.

    ``processes``: how many at a time, one per core unless given; with 1 everything runs in this process. The order
    of the results, and the results, do not depend on it.
    """
    trace = trace.whole_blocks()
    results: list[SimResult | None] = [None] * len(configs)
    for at, result in _run(trace, configs, min(processes or os.cpu_count() or 1, len(configs))):
        results[at] = result
        if progress is not None:
            progress(trace.num_accesses)
    done = tuple(result for result in results if result is not None)
    assert len(done) == len(configs)
    totals = [config.gpu_blocks + config.cpu_blocks + config.disk_blocks for config in configs]
    bounds = optimum(trace, [*totals, max(trace.num_unique, 1)])
    rates = [bound.hit_blocks / max(trace.num_accesses, 1) for bound in bounds]
    return Report(trace, configs[0].block_bytes if configs else 0, done, tuple(rates[:-1]), rates[-1])


def knee(capacities: Sequence[float], rates: Sequence[float]) -> int:
    """Where a curve of hit rates bends most: the index furthest above the straight line between its ends.

    (V. Satopää et al., "Finding a 'Kneedle' in a Haystack", ICDCSW 2011.) ``capacities`` rise.
    """
    if len(capacities) < 3 or rates[-1] <= rates[0]:
        return len(capacities) - 1
    across, up = capacities[-1] - capacities[0], rates[-1] - rates[0]
    heights = [
        (rate - rates[0]) / up - (size - capacities[0]) / across for size, rate in zip(capacities, rates, strict=True)
    ]
    return max(range(len(heights)), key=heights.__getitem__)


def _run(trace: Trace, configs: Sequence[SimConfig], processes: int) -> Iterator[tuple[int, SimResult]]:
    if processes <= 1:
        keys = trace.keys()
        for at, config in enumerate(configs):
            yield at, simulate(trace, config, keys=keys)
        return
    # Not forked: a progress bar's thread would be forked along.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_take, initargs=(trace,)) as pool:
        futures = {pool.submit(_one, config): at for at, config in enumerate(configs)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_TAKEN: tuple[Trace, list[OffloadKey]] | None = None
"""What a worker process replays, set once at its start."""


def _take(trace: Trace) -> None:
    global _TAKEN
    _TAKEN = trace, trace.keys()


def _one(config: SimConfig) -> SimResult:
    assert _TAKEN is not None
    return simulate(_TAKEN[0], config, keys=_TAKEN[1])
