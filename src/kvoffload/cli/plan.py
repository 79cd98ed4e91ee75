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
from kvoffload.sim.config import Prices
from kvoffload.sim.page import draw_reports
from kvoffload.sim.plan import Goal, Plan, machines, make_fleet_plan, make_plan
from kvoffload.sim.report import report_as_json, runs_table
from kvoffload.sim.verdict import Verdict, verdict_of


def plan(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help=scenario.TRACE_HELP)],
    hit_rate: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Goal: percent of blocks hit, on the GPU or below.")
    ] = None,
    ttft: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Goal: seconds to the first token, at --quantile.")
    ] = None,
    quantile: Annotated[
        str, typer.Option(metavar="QUANTILE", help="Quantile of the time to first token: p50, p90 or p99.")
    ] = "p90",
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="Requests per second on average. Default: the trace's own rate.")
    ] = None,
    max_cpu: Annotated[str | None, typer.Option(metavar="SIZE", help="Largest host memory to consider.")] = None,
    max_disk: Annotated[str, typer.Option(metavar="SIZE", help="Largest disk to consider; 0 for no disk.")] = "0",
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
    """Find the cheapest tiers that reach a goal.

    The goal is a hit rate or a time to first token. If the file of --fleet describes servers, finds the cheapest fleet.

    Exit codes: 0, something reaches the goal, perhaps without offloading; 1, nothing does; 2, a mistake in the options.
    """
    if quantile not in ("p50", "p90", "p99"):
        raise ConfigError(f"--quantile must be p50, p90 or p99, not {quantile!r}.")
    goal = Goal(None if hit_rate is None else _share(hit_rate), ttft, quantile)
    read = Scenario(fleet, model, kv_bytes, gpu_kv_tokens, prefill_speed, max_requests, rate)
    policies, cascades = read.policies(None) or [DEFAULTS.eviction_policy], read.cascades()
    if len(policies) > 1 or len(cascades) > 1:
        raise ConfigError("plan accepts one policy and one cascade; use simulate to compare several.")
    check_drawn(out)
    ends = read.server_range() if read.is_fleet else None
    trace = read.load(path)
    block_bytes = read.block_bytes(trace)
    max_cpu_blocks = None if max_cpu is None else scenario.capacity(max_cpu, "--max-cpu", trace, block_bytes)
    max_disk_blocks = 0 if max_disk == "0" else scenario.capacity(max_disk, "--max-disk", trace, block_bytes)
    base = replace(read.alone(trace), cpu_blocks=1, policy=policies[0], cascade=cascades[0])
    notes = read.assumptions(replace(base, disk_blocks=max_disk_blocks), trace)
    guesses, warnings = read.guesses(base, trace), read.warnings()
    unit = "fleets" if ends is not None else "runs"
    with progress(trace.name, None, unit) as advance:
        options: dict[str, Any] = {"processes": processes, "progress": advance}
        if ends is not None:
            fleets = read.fleets(trace, machines(trace, base, max_cpu_blocks, max_disk_blocks), ends[:1], "least-load")
            made = make_fleet_plan(trace.whole_blocks(), fleets, goal, read.prices, *ends, **options)
        else:
            made = make_plan(trace, base, goal, read.prices, max_cpu_blocks, max_disk_blocks, **options)
    verdict = verdict_of(made, read.prices, guesses, warnings)
    figures = _as_json(made, read.prices, verdict, notes)
    if as_json:
        print_json(figures)
    else:
        print("\n".join(verdict.lines()))
        if verbose:
            shown = " ".join(" ".join(verdict.lines()).split())
            print("", *(f"Warning: {each}" for each in verdict.warnings if each not in shown), *notes, sep="\n")
        if wide:
            print_table(runs_table(made.report, read.prices), "\nAll sizes that were tried", is_wide=True)
    said = [verdict.answer, *(f"Warning: {each}" for each in verdict.warnings)]
    write_drawn(out, figures, lambda is_page: draw_reports([made.report], read.prices, is_page, said, notes))
    if made.chosen is None:
        sys.exit(1)


def _share(hit_rate: str) -> float:
    """Return 0.6 for ``"60"`` or ``"60%"``."""
    try:
        percent = float(hit_rate.removesuffix("%"))
    except ValueError as exc:
        raise ConfigError(f"--hit-rate must be a percentage such as 60, not {hit_rate!r}.") from exc
    if 0 < percent < 1 and not hit_rate.endswith("%"):
        raise ConfigError(
            f"--hit-rate {hit_rate} means less than 1%. Write {100 * percent:g} if you mean {100 * percent:g}%, or "
            f"{hit_rate}% if you mean that."
        )
    return percent / 100


def _as_json(made: Plan, prices: Prices, verdict: Verdict, notes: list[str]) -> dict[str, Any]:
    """Return the verdict, the goal, the choice and its price, and the figures of ``simulate --json`` for every run."""
    report = report_as_json(made.report, prices)
    chosen = None
    if made.chosen in made.report.results:
        chosen = report["runs"][made.report.results.index(made.chosen)]
    elif made.chosen is not None:
        chosen = report["without_offloading"]
    return {
        "verdict": verdict.as_json(),
        "assumptions": notes,
        "goal": asdict(made.goal),
        "chosen": chosen,
        "price": made.price(prices),
        "requests_per_s": {row.name: row.requests_per_s for row in made.rows},
        **report,
    }
