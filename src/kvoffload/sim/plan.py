# SPDX-License-Identifier: Apache-2.0
"""Finds the cheapest tiers that reach a goal, by simulating a grid of sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.sim.config import Prices, SimConfig
from kvoffload.sim.result import Result
from kvoffload.sim.sweep import Report, sweep
from kvoffload.sim.trace import Trace

_GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0)
_DISK_GRID = (0.1, 0.25, 0.5, 1.0)
_SERVER_GRID = (0.01, 0.05, 0.2, 0.5)
_REFINEMENTS = 4


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal: a share of blocks hit, or a time to first token at a quantile. Exactly one of them is set.

    Raises ``ConfigError`` otherwise, and for values that no run can have.
    """

    hit_rate: float | None = None
    ttft_s: float | None = None
    quantile: str = "p90"

    def __post_init__(self) -> None:
        if (self.hit_rate is None) == (self.ttft_s is None):
            raise ConfigError("Give one goal: a hit rate or a time to first token.")
        if self.hit_rate is not None and not 0 < self.hit_rate <= 1:
            raise ConfigError(f"A hit rate lies between 0 and 100 %, and {100 * self.hit_rate:g} does not.")
        if self.ttft_s is not None and not 0 < self.ttft_s < math.inf:
            raise ConfigError(f"A time to first token must be positive, not {self.ttft_s:g} s.")

    def is_met(self, result: Result) -> bool:
        if self.hit_rate is not None:
            return result.hit_rate >= self.hit_rate
        assert self.ttft_s is not None
        return result.ttft_s[self.quantile] <= self.ttft_s

    def reached(self, result: Result) -> float:
        """How close a run comes to the goal; more is better."""
        return result.hit_rate if self.hit_rate is not None else -result.ttft_s[self.quantile]


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen run, its price, and every run it was chosen from."""

    chosen: Result | None
    """The device alone where that meets the goal; ``None`` where no run does."""
    price: float
    report: Report
    """All runs, those of the bisection included."""
    best: Result
    """The run that comes closest to the goal."""


def make_plan(
    trace: Trace,
    base: SimConfig,
    goal: Goal,
    prices: Prices,
    max_cpu_blocks: int | None = None,
    max_disk_blocks: int | None = None,
    processes: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Plan:
    """The cheapest machine that meets ``goal``.

    Stops at the device alone if that meets it. Else tries a grid of sizes, shares of the trace's footprint (its blocks
    and states) within the limits, then lowers the host memory of the cheapest that meets the goal by bisection.
    ``base`` has everything of the machine but its sizes. A ``max_disk_blocks`` of 0 leaves disks out.
    """
    alone = sweep(trace, [replace(base, cpu_blocks=0, disk_blocks=0)], 1, progress)
    without = alone.without
    assert without is not None
    if goal.is_met(without):
        return Plan(without, 0.0, alone, without)
    footprint = _footprint(trace, base.state_slots)
    cpu_sizes = _sizes(footprint, _GRID, max_cpu_blocks)
    disk_sizes = [0, *_sizes(footprint, _DISK_GRID, max_disk_blocks)]
    grid = [replace(base, cpu_blocks=cpu, disk_blocks=disk) for disk in disk_sizes for cpu in cpu_sizes]
    report = replace(sweep(trace, grid, processes, progress), without=without)
    best = max([*report.results, without], key=goal.reached)

    def price(result: Result) -> float:
        return prices.of_tiers(result.cpu_blocks, result.disk_blocks, base.block_bytes)

    meeting = [result for result in report.results if goal.is_met(result)]
    if not meeting:
        return Plan(None, 0.0, report, best)
    chosen = min(meeting, key=price)
    smaller = [size for size in cpu_sizes if size < chosen.cpu_blocks]
    low, results, bounds = (smaller[-1] if smaller else 0), list(report.results), list(report.optimum_rates)
    for _ in range(_REFINEMENTS):
        middle = (low + chosen.cpu_blocks) // 2
        if middle in (low, chosen.cpu_blocks):
            break
        tried = sweep(trace, [replace(base, cpu_blocks=middle, disk_blocks=chosen.disk_blocks)], 1)
        results += tried.results
        bounds += tried.optimum_rates
        if goal.is_met(tried.results[0]):
            chosen = tried.results[0]
        else:
            low = middle
    all_runs = replace(report, results=tuple(results), optimum_rates=tuple(bounds))
    return Plan(chosen, price(chosen), all_runs, best)


def machines(trace: Trace, base: SimConfig, max_cpu_blocks: int | None, max_disk_blocks: int | None) -> list[SimConfig]:
    """Servers of a fleet to choose from: without host memory, and with a few sizes of it, with and without a disk."""
    footprint = _footprint(trace, base.state_slots)
    disks = [0, *([_sizes(footprint, (0.5,), max_disk_blocks)[-1]] if max_disk_blocks else [])]
    sizes = _sizes(footprint, _SERVER_GRID, max_cpu_blocks)
    alone = replace(base, cpu_blocks=0, disk_blocks=0)
    return [alone, *(replace(base, cpu_blocks=cpu, disk_blocks=disk) for disk in disks for cpu in sizes)]


def _footprint(trace: Trace, state_slots: int) -> int:
    """Slots of the whole trace: its distinct blocks, and a state wherever a prompt ends."""
    whole = trace.whole_blocks()
    ends = whole.ids[whole.offsets[1:][np.diff(whole.offsets) > 0] - 1]
    return max(whole.num_unique + state_slots * len(np.unique(ends)), 1)


def _sizes(footprint: int, shares: tuple[float, ...], most: int | None) -> list[int]:
    sizes = {max(1, int(footprint * share)) for share in shares}
    if most is not None:
        sizes = {min(size, most) for size in sizes if most > 0}
    return sorted(sizes)
