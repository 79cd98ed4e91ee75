# SPDX-License-Identifier: Apache-2.0
"""``kvoffload plan``: find out how much memory and disk to buy."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvoffload.cli import scenario
from kvoffload.cli.output import DrawnOut, Json, check_drawn, print_json, print_table, progress, write_drawn
from kvoffload.cli.scenario import Scenario
from kvoffload.config import DEFAULTS
from kvoffload.errors import ConfigError
from kvoffload.sim.page import draw_fleets, draw_sweeps
from kvoffload.sim.plan import FleetPlan, Goal, Plan, machines, make_fleet_plan, make_plan
from kvoffload.sim.report import figures_of, fleet_table, fleets_as_json, sweep_as_json, sweep_table
from kvoffload.sim.trace import Trace
from kvoffload.sim.verdict import Verdict, fleet_verdict_of, verdict_of


def plan(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help=scenario.TRACE_HELP)],
    hit_rate: Annotated[str | None, typer.Option(help="Goal: percent of blocks hit, on the GPU or below.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Goal: seconds to the first token, at --quantile.")] = None,
    quantile: Annotated[str, typer.Option(help="Quantile of the time to first token: p50, p90 or p99.")] = "p90",
    rate: Annotated[
        float | None, typer.Option(help="Load: requests per second. Default: as the trace arrives.")
    ] = None,
    max_cpu: Annotated[str | None, typer.Option(help="Largest host memory to consider.")] = None,
    max_disk: Annotated[str, typer.Option(help="Largest disk to consider; 0 for no disk.")] = "0",
    model: scenario.Model = None,
    kv_bytes: scenario.KVBytes = None,
    gpu_kv_tokens: scenario.GpuKVTokens = None,
    prefill_speed: scenario.PrefillSpeed = None,
    fleet: scenario.Fleet = None,
    max_requests: scenario.MaxRequests = None,
    processes: scenario.Processes = None,
    wide: Annotated[bool, typer.Option("--wide", help="Also show all sizes that were tried.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also show all assumptions and warnings.")] = False,
    as_json: Json = False,
    out: DrawnOut = None,
) -> None:
    """Find the cheapest tiers that reach a goal, if any.

    The goal is a hit rate or a time to first token. With a file of --fleet that has servers, finds the cheapest fleet.

    Exit codes: 0, something reaches the goal, perhaps without offloading; 1, nothing does; 2, a mistake in the options.
    """
    if quantile not in ("p50", "p90", "p99"):
        raise ConfigError(f"--quantile is p50, p90 or p99, not {quantile!r}.")
    goal = Goal(None if hit_rate is None else _share(hit_rate), ttft, quantile)
    read = Scenario.read(fleet, model, kv_bytes, gpu_kv_tokens, prefill_speed, max_requests, rate)
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
    notes = read.assumptions(replace(base, disk_blocks=max_disk_blocks), trace)
    unknown = read.warnings(base)
    if ends is not None:
        fleets = read.fleets(trace, machines(trace, base, max_cpu_blocks, max_disk_blocks), ends[:1], "least-load")
        whole = trace.whole_blocks()
        with progress({trace.name: None}, "fleets") as advance:
            for_fleets = make_fleet_plan(
                whole, fleets, goal, read.prices, *ends, processes, lambda: advance(trace.name)
            )
        verdict = fleet_verdict_of(for_fleets, read.prices, unknown)
        table = fleet_table(for_fleets.results, read.prices)
        figures = _fleet_json(for_fleets, whole, read, verdict, notes)
        is_met = for_fleets.chosen is not None
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
        verdict = verdict_of(made, trace, read.prices, unknown)
        table = sweep_table(made.report)
        figures = _as_json(made, read, verdict, notes)
        is_met = made.chosen is not None
    if as_json:
        print_json(figures)
    else:
        _print(verdict, notes, verbose)
        if wide:
            print_table(table, "\nAll sizes that were tried", is_wide=True)

    def draw(is_page: bool) -> bytes:
        said = [verdict.answer, *(f"Warning: {each}" for each in verdict.warnings)]
        if ends is not None:
            return draw_fleets([(trace, for_fleets.results)], read.prices, is_page, said, notes)
        return draw_sweeps([made.report], is_page, said, notes)

    write_drawn(out, figures, draw)
    if not is_met:
        sys.exit(1)


def _share(hit_rate: str) -> float:
    """Return 0.6 for ``"60"`` or ``"60%"``."""
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


def _print(verdict: Verdict, notes: list[str], verbose: bool) -> None:
    print("\n".join(verdict.lines()))
    if verbose:
        print("\n" + "\n".join([*(f"Warning: {each}" for each in verdict.warnings), *notes]))


def _as_json(made: Plan, read: Scenario, verdict: Verdict, notes: list[str]) -> dict[str, Any]:
    """Return the verdict, the goal, the choice and its price, and the figures of ``simulate --json`` for every run."""
    return {
        "verdict": verdict.as_json(),
        "assumptions": notes,
        "goal": asdict(made.goal),
        "prices": asdict(read.prices),
        "chosen": None if made.chosen is None else _chosen(made, sweep_as_json(made.report)),
        "price": made.price,
        "requests_per_s": {each.what: each.requests_per_s for each in made.capacities},
        **sweep_as_json(made.report),
    }


def _chosen(made: Plan, report: dict[str, Any]) -> dict[str, Any]:
    if made.chosen in made.report.results:
        found: dict[str, Any] = report["runs"][made.report.results.index(made.chosen)]
        return found
    return figures_of(made.without)


def _fleet_json(made: FleetPlan, trace: Trace, read: Scenario, verdict: Verdict, notes: list[str]) -> dict[str, Any]:
    figures = fleets_as_json(trace, made.results, read.prices)
    return {"advice": made.advice, "verdict": verdict.as_json(), "assumptions": notes, **figures}
