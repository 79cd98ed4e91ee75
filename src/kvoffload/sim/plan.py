# SPDX-License-Identifier: Apache-2.0
"""Finds the cheapest tiers, or the cheapest fleet, that reach a goal, by simulating a grid of sizes.

A run is only chosen if it does no harm: it keeps up with the load, and its time to first token is not above the time
without tiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import FleetConfig, Prices, SimConfig
from kvoffload.sim.report import knee_of
from kvoffload.sim.result import MOST_BEHIND, SATURATED, Result
from kvoffload.sim.sweep import Report, num_processes, report_of, runner, sweep
from kvoffload.sim.trace import HOUR_S, Trace

_CPU_SIZES = 5
_LEAST_SHARE = 0.01
"""The smallest host memory that is tried, as a share of the trace's footprint, unless the GPU's cache is larger."""
_DISK_SHARES = (0.25, 1.0)
_SERVER_SHARES = (0.01, 0.05, 0.2, 0.5)
_REFINEMENTS = 2
_NEAR = 0.05
"""Runs that reach so much less than the best one count as equal, and the cheapest of them is proposed."""
_CAPACITY_REQUESTS = 2000
"""Requests of the trace's busiest hour that a search for the highest load replays, and the most runs of it."""
_CAPACITY_RUNS = 10
_CLOSE = 1.05
"""A search ends when the ratio of the loads that a server does not carry, and carries, is below this."""
_AIM, _LEAST = 0.98 * SATURATED, 0.1
"""A next try aims at this utilisation, and lowers the load at most to such a share."""
_IDLE, _SLOW = 0.1, 1e-3
"""If a server is less busy than ``_IDLE`` and misses the goal, the next try lowers the load to the share ``_SLOW``, so
that requests hardly meet. A server that misses the goal even then always misses it."""


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
            raise ConfigError("A plan needs one goal: a hit rate (--hit-rate) or a time to first token (--ttft).")
        if self.hit_rate is not None and not 0 < self.hit_rate <= 1:
            raise ConfigError(f"A hit rate must be above 0% and at most 100%, not {100 * self.hit_rate:g}%.")
        if self.ttft_s is not None and not 0 < self.ttft_s < math.inf:
            raise ConfigError(f"A time to first token must be positive, not {self.ttft_s:g} s.")

    def is_met(self, result: Result) -> bool:
        """Return whether the run reaches the goal and keeps up with the load."""
        return self.is_reached(result) and not result.is_overloaded

    def is_reached(self, result: Result) -> bool:
        """Return whether the run reaches the goal, even if it does not keep up."""
        if self.hit_rate is not None:
            return result.hit_rate >= self.hit_rate
        return result.ttft_s[self.quantile] <= (self.ttft_s or 0.0)

    def is_soon_enough(self, result: Result) -> bool:
        """Return whether the run keeps up, and has its first tokens in the time of the goal, if that is a time."""
        return not result.is_overloaded and (self.ttft_s is None or self.is_reached(result))

    def is_harmless(self, result: Result, without: Result) -> bool:
        """Return whether a run with tiers keeps up, and has its first tokens no later than the run without tiers."""
        return not result.is_overloaded and self.is_no_later(result, without)

    def is_no_later(self, result: Result, without: Result) -> bool:
        """Return whether a run with tiers has its first tokens no later than the run without tiers."""
        return all(result.ttft_s[name] <= without.ttft_s[name] for name in ("mean", self.quantile))

    def reached(self, result: Result) -> float:
        """Return how close a run comes to the goal; more is better."""
        return result.hit_rate if self.hit_rate is not None else -result.ttft_s[self.quantile]


@dataclass(frozen=True, slots=True)
class Row:
    """A run that the first screen shows."""

    name: str
    run: Result
    requests_per_s: float | None = None
    """The highest load at which such a server still has its first tokens in time; 0: no load is low enough. ``None``:
    nobody searched for it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen run, and every run it was chosen from."""

    goal: Goal
    chosen: Result | None
    """The server without tiers if that meets the goal; ``None`` if no run may be chosen."""
    report: Report
    """All runs."""
    best: Result
    """Of the harmless runs that come about as close to the goal as any, the cheapest; the server without tiers if all
    others do harm."""
    rows: tuple[Row, ...] = ()
    """Of a server: *today* (or *no cache*, if the size of the GPU's cache is not known), *goal*, *knee*, *ceiling*, and
    *disk* if no other row has one. Of fleets: *goal* or *closest*, and *cheaper* ones."""
    may_share: bool = False
    """Whether a shared tier was among the choices of a fleet."""

    @property
    def without(self) -> Result:
        """The server without tiers. Only a plan for one server has it."""
        assert self.report.without is not None
        return self.report.without

    @property
    def is_hopeless(self) -> bool:
        """Whether no run keeps up with the load."""
        without = self.report.without
        return all(run.is_overloaded for run in (*self.report.results, *([without] if without is not None else [])))

    def price(self, prices: Prices) -> float:
        """Return the price of the choice; 0 without one."""
        return 0.0 if self.chosen is None else self.report.price(self.chosen, prices)

    def is_harmless(self, result: Result) -> bool:
        if self.report.is_fleet:
            return not result.is_overloaded
        return result is self.without or self.goal.is_harmless(result, self.without)


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
    """Return the cheapest machine that meets ``goal`` and does no harm.

    Chooses nothing if an engine rejects every request. Chooses the device alone if that meets the goal. Else tries
    sizes between the GPU's own cache and the trace's footprint (its blocks and states), within the limits, then lowers
    the host memory of the cheapest that meets the goal by bisection. Tries disks by rising price, until one meets the
    goal. ``base`` has everything of the machine but its sizes. A ``max_disk_blocks`` of 0 leaves disks out.
    """
    alone = sweep(trace, [replace(base, cpu_blocks=0, disk_blocks=0)], 1, progress)
    without = alone.without
    assert without is not None
    if num_rejected(trace, base) == len(trace) > 0:
        return Plan(goal, None, alone, without)
    footprint = _footprint(trace, base.state_slots)
    cpu_sizes = _cpu_sizes(footprint, base.gpu_blocks, max_cpu_blocks)
    disk_sizes = _sizes(footprint, _DISK_SHARES, max_disk_blocks)
    if goal.is_met(without):
        # Tiers may still save servers: the largest host memory tells, and a disk below it, or below less of it if the
        # largest holds all blocks.
        below = cpu_sizes[-1:] if cpu_sizes and cpu_sizes[-1] < footprint else cpu_sizes[:3][-1:]
        largest = [replace(base, cpu_blocks=cpu) for cpu in cpu_sizes[-1:]]
        largest += [replace(base, cpu_blocks=cpu, disk_blocks=disk) for cpu in below for disk in disk_sizes[-1:]]
        with runner(simulate, alone.trace, num_processes(processes, len(largest)), progress) as run_each:
            report = report_of(alone.trace, [without, *run_each(largest)])
        return _with_rows(trace, Plan(goal, without, report, without), prices, processes, progress)
    grid = [replace(base, cpu_blocks=cpu) for cpu in cpu_sizes]
    with_disk = [replace(base, cpu_blocks=cpu, disk_blocks=disk) for disk in disk_sizes for cpu in cpu_sizes[:3:2]]
    if cpu_sizes and cpu_sizes[-1] < footprint:
        grid += with_disk[-1:]  # only with a disk is there room for everything
    with_disk = sorted(set(with_disk).difference(grid), key=prices.of_tiers)

    def may_choose(result: Result) -> bool:
        return goal.is_met(result) and goal.is_harmless(result, without)

    def price(result: Result) -> float:
        return prices.of_tiers(result.server)

    wave = num_processes(processes, max(len(grid), len(with_disk)))
    with runner(simulate, alone.trace, wave, progress) as run_each:
        results = run_each(grid)
        for first in range(0, len(with_disk), wave):
            more = run_each(with_disk[first : first + wave])
            met = next((at for at, each in enumerate(more) if may_choose(each)), len(more))
            results += more[: met + 1]
            if met < len(more):
                break
        chosen = min(filter(may_choose, results), key=price, default=None)
        if chosen is not None:
            low = max((size for size in cpu_sizes if size < chosen.server.cpu_blocks), default=chosen.server.cpu_blocks)
            for _ in range(_REFINEMENTS):
                middle = (low + chosen.server.cpu_blocks) // 2
                if middle in (low, chosen.server.cpu_blocks):
                    break
                results += run_each([replace(chosen.server, cpu_blocks=middle)])
                if may_choose(results[-1]):
                    chosen = results[-1]
                else:
                    low = middle
    best = _closest(goal, [without, *(each for each in results if goal.is_harmless(each, without))], price)
    plan = Plan(goal, chosen, report_of(alone.trace, [without, *results]), best)
    return _with_rows(trace, plan, prices, processes, progress)


def _closest(goal: Goal, results: Sequence[Result], price: Callable[[Result], float]) -> Result:
    """Return the cheapest of the results that come about as close to the goal as any."""
    best = max(map(goal.reached, results))
    return min((each for each in results if goal.reached(each) >= best - _NEAR * abs(best)), key=price)


def num_rejected(trace: Trace, server: SimConfig) -> int:
    """Return the number of requests that an engine rejects, because they have more tokens than the GPU's cache. Its
    size is known in whole blocks of the trace, so a request counts if it needs another whole block."""
    most = (server.gpu_blocks + 1) * trace.block_tokens
    return int((trace.input_tokens + trace.output_tokens >= most).sum()) if server.gpu_blocks else 0


def _with_rows(trace: Trace, plan: Plan, prices: Prices, processes: int | None, progress: Callable[[], object]) -> Plan:
    """Return the plan for one server with its rows."""
    goal, without, results = plan.goal, plan.without, plan.report.results

    def price(run: Result) -> float:
        return plan.report.price(run, prices)

    named = [("today" if without.server.gpu_blocks else "no cache", without)]
    reaching = [each for each in results if goal.hit_rate is not None and goal.is_reached(each)]
    if plan.chosen is not None and plan.chosen is not without:
        named.append(("goal", plan.chosen))
    elif reaching and plan.is_hopeless:
        named.append(("goal", min(reaching, key=price)))
    with_disk = [each for each in results if each.server.disk_blocks]
    if len(results) - len(with_disk) > 2:
        named.append(("knee", knee_of([each for each in results if not each.server.disk_blocks])))
    if results:
        harmless = [each for each in results if plan.is_harmless(each)]
        named.append(("ceiling", max(harmless or results, key=goal.reached)))
    if with_disk and not any(run.server.disk_blocks for _, run in named):
        harmless = [each for each in with_disk if plan.is_harmless(each)]
        named.append(("disk", _closest(goal, harmless or with_disk, price)))
    loads = _highest_loads(trace, goal, [run for _, run in named], processes, progress)
    rows = (Row(name, run, load) for (name, run), load in zip(named, loads, strict=True))
    return replace(plan, rows=tuple(rows))


def _highest_loads(
    trace: Trace, goal: Goal, runs: Sequence[Result], processes: int | None, progress: Callable[[], object]
) -> list[float]:
    """Return the highest load of each server. The first one has no tiers."""
    busiest = trace.busiest_hour()
    short = busiest.part(0, _CAPACITY_REQUESTS)
    # If its first requests arrive at once, they do so at any rate.
    short = trace if short.requests_per_s == math.inf else short.at_rate(busiest.requests_per_s)
    distinct = [run for at, run in enumerate(runs) if run not in runs[:at]]
    distinct.sort(key=lambda run: bool(run.server.disk_blocks))  # a replay with a disk takes longer
    with runner(highest_load, short.whole_blocks(), num_processes(processes, len(distinct)), progress) as run_each:
        loads = run_each([(run, goal, None) for run in distinct[:2]])
        # Servers with tiers differ little in the loads that they carry.
        loads += run_each([(run, goal, loads[1]) for run in distinct[2:]])
    return [loads[distinct.index(run)] for run in runs]


def highest_load(trace: Trace, asked: tuple[Result, Goal, float | None], *, hashes: list[bytes]) -> float:
    """Return the most requests per second that a server carries (``Goal.is_soon_enough``), or up to about 5% less.

    The search replays the trace faster or slower than it was recorded. ``asked`` contains a run of the server, the
    goal, and the load that a similar server carries, if that is known. The search tries this load second, after the
    run. A replay ends as soon as the server can no longer carry its load.
    """
    run, goal, expected = asked
    if not run.arriving_s:  # all requests arrive at once, at any rate
        return run.requests / max(run.answering_s, 1e-9) if goal.is_soon_enough(run) else 0.0
    # Loads as factors of the trace's, with their strains.
    carried: tuple[float, float] | None = None
    failed: tuple[float, float] | None = None
    guesses = [expected / trace.requests_per_s * more for more in (_CLOSE - 0.005, 1.0)] if expected else []
    factor, same, is_slow = 1.0, 0, False
    for tries_left in range(_CAPACITY_RUNS, -1, -1):
        strain = _strain(run, goal)
        if is_carried := strain <= 1:
            same = max(same, 0) + 1
            carried = max(carried or (0.0, 0.0), (factor, strain))
        else:
            same = min(same, 0) - 1
            failed = min(failed or (math.inf, 0.0), (factor, strain))
        low, high = carried[0] if carried else 0.0, failed[0] if failed else math.inf
        is_idle = not is_carried and run.utilisation < _IDLE and run.lateness <= 1
        if not tries_left or (is_idle and is_slow) or high < _CLOSE * low or 1 / _CLOSE < strain <= 1:
            break
        is_slow = is_idle and carried is None
        while guesses and not low < guesses[-1] < high:
            guesses.pop()
        change = _change(run, goal, is_carried=is_carried)
        if guesses:
            factor = guesses.pop()
        elif carried is None or failed is None:
            factor *= _SLOW if is_slow else change
        else:
            if abs(same) > 2:
                share = 0.5 if high < 4 * low else 1 - math.log(2) / math.log(high / low)
            elif is_carried:  # strains grow about as powers of the load
                share = min(math.log(max(strain, 1e-9)) / math.log(max(strain, 1e-9) / failed[1]), 0.8)
            else:
                share = 1 + math.log(change) / math.log(high / low)
            factor = low * (high / low) ** max(share, 0.2)
        run = simulate(
            trace.stretched(1 / factor),
            run.server,
            hashes=hashes,
            is_hopeless=lambda so_far: not goal.is_soon_enough(so_far),
        )
    return low * trace.requests_per_s


def _strain(run: Result, goal: Goal) -> float:
    """Return how hard the load is for the server: above 1, it does not carry it."""
    in_time = run.ttft_s[goal.quantile] / goal.ttft_s if goal.ttft_s is not None else 0.0
    return max(run.utilisation / SATURATED, run.lateness, in_time)


def _change(run: Result, goal: Goal, *, is_carried: bool) -> float:
    """Return a factor that brings the load of a run close to the highest load that the server carries."""
    spent_s = max(run.answering_s, 1e-9)
    # The busy share of the time grows about as the load does, and a time to first token as 1 / (1 - busy).
    busy: float = min(max(run.sum_of("busy_s") / spent_s, 1e-9), 1.0)
    aim = _AIM
    if goal.ttft_s is not None:
        aim = min(max(1 - (1 - busy) * run.ttft_s[goal.quantile] / goal.ttft_s, 0.0), aim)
    change = aim / busy
    if is_carried:
        return max(change, _CLOSE)
    # A server that is behind shows how many requests it answers at most.
    answers: float = run.sum_of("requests") / run.requests * run.arriving_s / spent_s
    if run.utilisation <= SATURATED and run.lateness > 1:
        # If the server is seldom busy, most of its work arrives at the end. If all of it did, the queue would last as
        # long at any load, and only a longer trace may have such a queue.
        late_s = spent_s - run.arriving_s - run.longest_prompt_s
        at_end = MOST_BEHIND * min(run.arriving_s, HOUR_S) / late_s
        answers *= (at_end / answers) ** (1 - run.utilisation / SATURATED)
    return min(max(min(change, (_AIM if goal.ttft_s is not None else 1.0) * answers), _LEAST), 1 / _CLOSE)


def machines(trace: Trace, base: SimConfig, max_cpu_blocks: int | None, max_disk_blocks: int | None) -> list[SimConfig]:
    """Servers of a fleet to choose from: without host memory, and with a few sizes of it, with and without a disk."""
    footprint = _footprint(trace, base.state_slots)
    disks = [0, *([_sizes(footprint, (0.5,), max_disk_blocks)[-1]] if max_disk_blocks else [])]
    sizes = _sizes(footprint, _SERVER_SHARES, max_cpu_blocks)
    worth_it = [size for size in sizes if size >= base.gpu_blocks] or sizes[-1:]
    alone = replace(base, cpu_blocks=0, disk_blocks=0)
    return [alone, *(replace(base, cpu_blocks=cpu, disk_blocks=disk) for disk in disks for cpu in worth_it)]


def _footprint(trace: Trace, state_slots: int) -> int:
    """Slots of the whole trace: its distinct blocks, and a state wherever a prompt ends."""
    whole = trace.whole_blocks()
    ends = whole.ids[whole.offsets[1:][np.diff(whole.offsets) > 0] - 1]
    return max(whole.num_unique + state_slots * len(np.unique(ends)), 1)


def _cpu_sizes(footprint: int, gpu_blocks: int, most: int | None) -> list[int]:
    """Sizes of host memory, each larger than the one before by the same factor. All blocks pass through host memory, so
    less than the GPU's own cache holds little that the GPU does not."""
    largest = footprint if most is None else min(most, footprint)
    least = max(int(footprint * _LEAST_SHARE), gpu_blocks, 1)
    if least > largest:
        return [] if gpu_blocks > largest else [largest]
    return sorted({round(least * (largest / least) ** (at / (_CPU_SIZES - 1))) for at in range(_CPU_SIZES)})


def _sizes(footprint: int, shares: tuple[float, ...], most: int | None) -> list[int]:
    sizes = {max(1, int(footprint * share)) for share in shares}
    if most is not None:
        sizes = {min(size, most) for size in sizes if most > 0}
    return sorted(sizes)


# -------------------------------------------------------------------------------------------------------------- fleets


def make_fleet_plan(
    trace: Trace,
    fleets: Sequence[FleetConfig],
    goal: Goal,
    prices: Prices,
    least: int,
    most: int,
    processes: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Plan:
    """Return the cheapest fleet that meets ``goal``: of ``fleets``, each with ``least`` to ``most`` servers, in powers
    of two.

    Chooses none if an engine rejects every request. The number of servers is then lowered by bisection, for the
    cheapest. Fleets that cost more than one that meets the goal are not replayed: cells run by rising price, a wave of
    one for each process at a time.
    """
    numbers = sorted({least, most, *(1 << bits for bits in range(12) if least < 1 << bits < most)})
    cells = sorted((replace(fleet, servers=number) for fleet in fleets for number in numbers), key=prices.of_fleet)
    results: list[Result] = []
    chosen: Result | None = None
    if is_useless := num_rejected(trace, fleets[0].server) == len(trace) > 0:
        cells = cells[:1]
    wave = num_processes(processes, len(cells))
    with runner(simulate, trace, wave, progress) as run_each:
        while cells and chosen is None:
            results += run_each(cells[:wave])
            cells = cells[wave:]
            if not is_useless:
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
    report = report_of(trace, results, are_fleets=True)

    def price(run: Result) -> float:
        return report.price(run, prices)

    best = _closest(goal, results, price)
    shown = chosen or best
    cheaper = [each for each in results if price(each) < price(shown)]
    named = [("goal" if chosen else "closest", shown)]
    named += [("cheaper", each) for each in sorted(cheaper, key=price)[-2:]]
    rows = tuple(Row(name, run) for name, run in named)
    return Plan(goal, chosen, report, best, rows, may_share=any(fleet.shared is not None for fleet in fleets))
