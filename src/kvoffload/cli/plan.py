# SPDX-License-Identifier: Apache-2.0
"""``kvoffload plan``: how much memory and disk are worth buying?"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvoffload.cli import scenario
from kvoffload.cli.output import DrawnOut, Json, check_drawn, print_json, print_table, progress, write_drawn
from kvoffload.cli.scenario import Scenario
from kvoffload.cli.simulate import print_fleets
from kvoffload.config import DEFAULTS
from kvoffload.errors import ConfigError
from kvoffload.sim.config import USUAL, Prices, SimConfig
from kvoffload.sim.fleet_plan import make_fleet_plan
from kvoffload.sim.page import draw_fleets, draw_sweeps
from kvoffload.sim.plan import Goal, Plan, machines, make_plan
from kvoffload.sim.report import fleets_as_json, format_seconds, saturation, sweep_as_json
from kvoffload.sim.result import Result
from kvoffload.sim.table import Table
from kvoffload.sim.trace import Trace
from kvoffload.units import format_bytes


def plan(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help=scenario.TRACE_HELP)],
    hit_rate: Annotated[str | None, typer.Option(help="Goal: percent of blocks hit, on the GPU or below.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Goal: seconds to the first token, at --quantile.")] = None,
    quantile: Annotated[str, typer.Option(help="Quantile of the time to first token: p50, p90 or p99.")] = "p90",
    max_cpu: Annotated[str | None, typer.Option(help="Largest host memory to consider.")] = None,
    max_disk: Annotated[str, typer.Option(help="Largest disk to consider; 0 for no disk.")] = "0",
    model: scenario.Model = None,
    kv_bytes: scenario.KVBytes = None,
    gpu_kv_tokens: scenario.GpuKVTokens = None,
    prefill_speed: scenario.PrefillSpeed = USUAL.prefill_tokens_per_s,
    fleet: scenario.Fleet = None,
    max_requests: scenario.MaxRequests = None,
    processes: scenario.Processes = None,
    as_json: Json = False,
    out: DrawnOut = None,
) -> None:
    """Find the cheapest tiers that reach a goal.

    The goal is a hit rate or a time to first token. With a file of --fleet that has servers, finds the cheapest fleet.

    Exit codes: 0, something reaches the goal, perhaps without offloading; 1, nothing does; 2, a mistake in the options.
    """
    if quantile not in ("p50", "p90", "p99"):
        raise ConfigError(f"--quantile is p50, p90 or p99, not {quantile!r}.")
    goal = Goal(None if hit_rate is None else _share(hit_rate), ttft, quantile)
    read = Scenario.read(fleet, model, kv_bytes, gpu_kv_tokens, prefill_speed, max_requests)
    policies, cascades = read.policies(None) or [DEFAULTS.eviction_policy], read.cascades()
    if len(policies) > 1 or len(cascades) > 1:
        raise ConfigError("A plan has one policy and one cascade; simulate compares several.")
    check_drawn(out)
    ends = read.server_range() if read.is_fleet else None
    trace = read.load(path)
    block_bytes = read.block_bytes(trace)
    max_cpu_blocks = None if max_cpu is None else scenario.capacity(max_cpu, "--max-cpu", trace, block_bytes)
    max_disk_blocks = 0 if max_disk == "0" else scenario.capacity(max_disk, "--max-disk", trace, block_bytes)
    base = replace(read.alone(trace), cpu_blocks=1, policy=policies[0], cascade=cascades[0])
    if not as_json:
        print(scenario.assumptions(replace(base, disk_blocks=max_disk_blocks), trace, read.is_kv_given))
    if ends is not None:
        tiers = machines(trace, base, max_cpu_blocks, max_disk_blocks)
        is_met = _plan_fleets(read, trace, tiers, goal, ends, processes, as_json, out)
    else:
        with progress({trace.name: None}, "runs") as advance:
            made = make_plan(
                trace,
                base,
                goal,
                read.prices,
                max_cpu_blocks,
                max_disk_blocks,
                processes,
                lambda: advance(trace.name),
            )
        figures = _as_json(made, goal, read.prices)
        if as_json:
            print_json(figures)
        else:
            _print(made, goal, read.prices)
        write_drawn(out, figures, lambda is_page: draw_sweeps([made.report], is_page))
        is_met = made.chosen is not None
    if not is_met:
        sys.exit(1)


def _share(hit_rate: str) -> float:
    """``"60"`` or ``"60%"`` as 0.6."""
    try:
        percent = float(hit_rate.removesuffix("%"))
    except ValueError as exc:
        raise ConfigError(f"--hit-rate is a number of percent such as 60, not {hit_rate!r}.") from exc
    if 0 < percent < 1 and not hit_rate.endswith("%"):
        raise ConfigError(
            f"--hit-rate {hit_rate} is less than one percent: write {100 * percent:g} for {100 * percent:g} %, or "
            f"{hit_rate}% if that is meant."
        )
    return percent / 100


def _plan_fleets(
    read: Scenario,
    trace: Trace,
    tiers: Sequence[SimConfig],
    goal: Goal,
    ends: tuple[int, int],
    processes: int | None,
    as_json: bool,
    out: list[Path] | None,
) -> bool:
    """Whether a fleet reaches the goal."""
    fleets, prices = read.fleets(trace, tiers, ends[:1], "least-load"), read.prices
    trace = trace.whole_blocks()
    with progress({trace.name: None}, "fleets") as advance:
        made = make_fleet_plan(trace, fleets, goal, prices, *ends, processes, lambda: advance(trace.name))
    figures = {"advice": made.advice, **fleets_as_json(trace, made.results, prices)}
    if as_json:
        print_json(figures)
    else:
        print_fleets(trace, made.results, prices)
        reached = made.chosen or made.best
        said = f"{100 * reached.hit_rate:.1f} % hits, {goal.quantile} {format_seconds(reached.ttft_s[goal.quantile])}"
        print(f"{made.advice} {said}, {prices.of_fleet(reached.config):,.2f} an hour.")
    write_drawn(out, figures, lambda is_page: draw_fleets([(trace, made.results)], prices, is_page))
    return made.chosen is not None


def _as_json(made: Plan, goal: Goal, prices: Prices) -> dict[str, Any]:
    """The goal, the choice and its price, and what ``simulate --json`` has of every run."""
    report = sweep_as_json(made.report)
    chosen = None if made.chosen is None else report["without_offloading"]
    if made.chosen in made.report.results:
        chosen = report["runs"][made.report.results.index(made.chosen)]
    return {"goal": asdict(goal), "prices": asdict(prices), "chosen": chosen, "price": made.price, **report}


def _print(made: Plan, goal: Goal, prices: Prices) -> None:
    report, alone = made.report, made.report.without
    assert alone is not None

    def price(result: Result) -> float:
        return prices.of_tiers(result.cpu_blocks, result.disk_blocks, report.block_bytes)

    tried = [alone, *sorted(report.results, key=price)]
    shown = _worth_showing(tried, made, goal)
    rows = []
    for result in shown:
        gained = alone.ttft_s[goal.quantile] - result.ttft_s[goal.quantile]
        rows.append(
            [
                format_bytes(result.cpu_blocks * report.block_bytes) if result.cpu_blocks else "none",
                format_bytes(result.disk_blocks * report.block_bytes) if result.disk_blocks else "-",
                f"{100 * result.hit_rate:.2f}",
                format_seconds(result.ttft_s[goal.quantile]),
                "-" if result is alone else format_seconds(gained),
                f"{price(result):,.3g}",
                "<- chosen" if result is made.chosen else "meets it" if goal.is_met(result) else "",
            ]
        )
    print_table(Table(["memory", "disk", "hits %", goal.quantile, "gained", "price/h", ""], rows))
    if hidden := len(tried) - len(shown):
        print(f"Not shown: {hidden:,} that cost more and bring no more. --json has all.")
    print(_advice(made, goal))
    if said := saturation([alone, *report.results]):
        print(said)


def _worth_showing(tried: Sequence[Result], made: Plan, goal: Goal) -> list[Result]:
    """Of ``tried``, cheapest first, the choice and those that come closer to the goal than all that are cheaper."""
    shown: list[Result] = []
    closest = -math.inf
    for result in tried:
        reached = goal.reached(result)
        if reached > closest or result is made.chosen:
            shown.append(result)
        closest = max(closest, reached)
    return shown


def _advice(made: Plan, goal: Goal) -> str:
    report, chosen = made.report, made.chosen
    reached = made.best if chosen is None else chosen
    figures = f"{100 * reached.hit_rate:.1f} % hits, {goal.quantile} {format_seconds(reached.ttft_s[goal.quantile])}"
    if chosen is None:
        return (
            f"Nothing within the limits reaches the goal. The best has {figures}. A cache that keeps everything hits "
            f"{100 * report.reachable_rate:.1f} %."
        )
    if not chosen.cpu_blocks:
        what = "the GPU's own cache" if chosen.gpu_blocks else "computing every prompt"
        return f"Buy nothing: {what} reaches the goal, with {figures}."
    bought = f"{format_bytes(chosen.cpu_blocks * report.block_bytes)} of host memory"
    if chosen.disk_blocks:
        bought += f" and {format_bytes(chosen.disk_blocks * report.block_bytes)} of disk"
    return f"Buy {bought}: {figures}, {made.price:,.3g} an hour."
