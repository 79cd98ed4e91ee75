# SPDX-License-Identifier: Apache-2.0
"""The cheapest fleet that reaches a goal: how many servers, with how much memory, disk and shared tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import FleetConfig, Prices
from kvoffload.sim.plan import Goal
from kvoffload.sim.result import Result
from kvoffload.sim.sweep import num_processes, runner
from kvoffload.sim.trace import Trace


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The chosen fleet, and every one it was chosen from."""

    chosen: Result | None
    """``None`` where no fleet meets the goal."""
    results: tuple[Result, ...]
    best: Result
    """The one that comes closest to the goal."""
    may_share: bool
    """Whether a shared tier was among the choices."""

    @property
    def advice(self) -> str:
        """The choice in words."""
        if self.chosen is None:
            return "No fleet within the limits reaches the goal."
        servers = self.chosen.config.servers
        lines = [f"{servers} server" + "s" * (servers > 1)]
        if self.may_share:
            lines.append("a shared tier" if self.chosen.config.shared is not None else "no shared tier")
        memory = self.chosen.config.server.cpu_blocks
        larger = [each.config.server.cpu_blocks for each in self.results if each.config.servers > servers]
        if larger and memory > min(larger):
            lines.append("fewer servers with more memory")
        return ", ".join(lines) + "."


def make_fleet_plan(
    trace: Trace,
    fleets: Sequence[FleetConfig],
    goal: Goal,
    prices: Prices,
    least: int,
    most: int,
    processes: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> FleetPlan:
    """The cheapest fleet that meets ``goal``: of ``fleets``, each with ``least`` to ``most`` servers, in powers of two.

    The number of servers is then lowered by bisection, for the cheapest. What costs more than a fleet that meets the
    goal is not replayed: cells run by rising price, a wave of one for each process at a time.
    """
    numbers = sorted({least, most, *(1 << bits for bits in range(12) if least < 1 << bits < most)})
    cells = sorted((replace(fleet, servers=number) for fleet in fleets for number in numbers), key=prices.of_fleet)
    results: list[Result] = []
    chosen: Result | None = None
    wave = num_processes(processes, len(cells))
    with runner(simulate, trace, wave, progress) as run_each:
        while cells and chosen is None:
            results += run_each(cells[:wave])
            cells = cells[wave:]
            chosen = next(filter(goal.is_met, results), None)  # the cheapest, as they run by rising price
        if chosen is not None:
            low = max((number for number in numbers if number < chosen.config.servers), default=least - 1)
            while chosen.config.servers - low > 1:
                middle = (low + chosen.config.servers) // 2
                results += run_each([replace(chosen.config, servers=middle)])
                if goal.is_met(results[-1]):
                    chosen = results[-1]
                else:
                    low = middle
    best = max(results, key=goal.reached)
    return FleetPlan(chosen, tuple(results), best, any(fleet.shared is not None for fleet in fleets))
