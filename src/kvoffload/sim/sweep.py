# SPDX-License-Identifier: Apache-2.0
"""Replays one trace on many servers or fleets, on all cores, and computes the optimum beside them."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import FleetConfig, Prices, SimConfig
from kvoffload.sim.optimum import optimum
from kvoffload.sim.result import Result
from kvoffload.sim.trace import Trace

_Ran = TypeVar("_Ran")
_ADVICE = logging.getLogger("kvoffload.tiering.load_policy")
"""Logs advice to operators, which is of use only for machines that exist."""


@dataclass(frozen=True, slots=True)
class Report:
    """The runs of one trace on servers or on fleets."""

    trace: Trace
    results: tuple[Result, ...]
    """In the order of the configurations."""
    optimum_rates: tuple[float, ...]
    """For each result: the best block hit rate of a single cache as large as all its tiers together."""
    reachable_rate: float
    """The hit rate of a cache that keeps everything."""
    without: Result | None = None
    """A single server without host memory, if there was one. It is not one of the results."""
    is_fleet: bool = False

    def price(self, result: Result, prices: Prices) -> float:
        """Return the price of an hour: of a fleet, or of one server's tiers alone."""
        return prices.of_fleet(result.config) if self.is_fleet else prices.of_tiers(result.server)


def report_of(trace: Trace, results: Sequence[Result], *, are_fleets: bool = False) -> Report:
    """Return the report of runs of ``trace``, which has whole blocks only. Fleets have no run without tiers of their
    own."""
    without = None if are_fleets else next((each for each in results if not each.server.cpu_blocks), None)
    kept = tuple(each for each in results if each is not without)
    totals = [each.config.total_blocks for each in kept]
    bounds = optimum(trace, [*totals, max(trace.num_unique, 1)])
    rates = [bound / max(trace.num_accesses, 1) for bound in bounds]
    return Report(trace, kept, tuple(rates[:-1]), rates[-1], without, are_fleets)


def sweep(
    trace: Trace,
    configs: Sequence[SimConfig | FleetConfig],
    processes: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Report:
    """Run every configuration on the whole blocks of ``trace``. One of them may have no host memory.

    ``progress`` is called after each run. ``processes`` is the number of runs at a time, by default one per core; with
    1 everything runs in this process. It changes neither the results nor their order.
    """
    trace = trace.whole_blocks()
    with runner(simulate, trace, num_processes(processes, len(configs)), progress) as run_each:
        are_fleets = any(isinstance(config, FleetConfig) for config in configs)
        return report_of(trace, run_each(configs), are_fleets=are_fleets)


def knee(capacities: Sequence[float], rates: Sequence[float]) -> int:
    """Return the index at which a curve of hit rates bends most, which is furthest above the straight line between its
    ends. Returns the first index if the curve does not rise.

    ``capacities`` rise. (V. Satopää et al., "Finding a 'Kneedle' in a Haystack", ICDCSW 2011.)
    """
    if rates[-1] <= rates[0]:
        return 0
    if len(capacities) < 3:
        return len(capacities) - 1
    across, up = capacities[-1] - capacities[0], rates[-1] - rates[0]
    heights = [
        (rate - rates[0]) / up - (size - capacities[0]) / across for size, rate in zip(capacities, rates, strict=True)
    ]
    return max(range(len(heights)), key=heights.__getitem__)


def num_processes(processes: int | None, num_configs: int) -> int:
    """As many as there are cores by default, and no more than there are configurations."""
    return max(min(processes or os.cpu_count() or 1, num_configs), 1)


@contextmanager
def runner(
    run: Callable[..., _Ran], trace: Trace, processes: int, progress: Callable[[], object]
) -> Iterator[Callable[[Sequence[object]], list[_Ran]]]:
    """Yield a function that returns ``run(trace, config, hashes=...)`` of each configuration, always in the same
    processes. ``run`` is a function of a module. ``progress`` is called as each run ends."""

    def noted(result: _Ran) -> _Ran:
        progress()
        return result

    if processes == 1:
        hashes = trace.hashes()
        with without_advice():
            yield lambda configs: [noted(run(trace, config, hashes=hashes)) for config in configs]
        return
    # Spawned, since a fork would copy the lock that a progress bar's thread may hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=(trace,)) as pool:

        def run_each(configs: Sequence[object]) -> list[_Ran]:
            return [noted(result) for result in pool.map(partial(_replay, run), configs)]

        try:
            yield run_each
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def without_advice() -> Iterator[None]:
    """For replays in this process: the processes of ``runner`` log none."""
    _ADVICE.disabled = True
    try:
        yield
    finally:
        _ADVICE.disabled = False


_REPLAYED: tuple[Trace, list[bytes]] | None = None
"""The trace of a worker process and its hashes, set once at its start."""


def _start_worker(trace: Trace) -> None:
    global _REPLAYED
    _ADVICE.disabled = True
    _REPLAYED = trace, trace.hashes()


def _replay(run: Callable[..., Any], config: object) -> Any:
    assert _REPLAYED is not None
    return run(_REPLAYED[0], config, hashes=_REPLAYED[1])
