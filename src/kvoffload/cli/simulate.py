# SPDX-License-Identifier: Apache-2.0
"""``kvoffload simulate``: compare tiers, policies and fleets on recorded traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvoffload.cli import scenario
from kvoffload.cli.output import DrawnOut, Json, check_drawn, print_json, print_table, progress, write_drawn
from kvoffload.cli.scenario import Scenario, capacities
from kvoffload.config import DEFAULTS
from kvoffload.sim.cluster import simulate as replay
from kvoffload.sim.config import FleetConfig, Prices, SimConfig
from kvoffload.sim.page import draw_reports
from kvoffload.sim.report import (
    best_policy,
    common_of,
    knee_of,
    report_as_json,
    runs_table,
    saturation,
)
from kvoffload.sim.sweep import Report, report_of, sweep, without_advice
from kvoffload.sim.trace import Trace
from kvoffload.units import format_bytes

_CPU_SIZES = "1%,2%,5%,10%,20%,50%"
_POLICIES = ["lru", "arc", "density"]


def simulate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help=scenario.TRACE_HELP)],
    cpu: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Sizes of host memory, such as 64GiB, or 10% of the trace's distinct blocks. "
            f"Default: {_CPU_SIZES}, and 5% for each server of a fleet.",
        ),
    ] = None,
    disk: Annotated[
        str, typer.Option(metavar="SIZES", help="Sizes of the disk tier, in the same form; 0 for no disk.")
    ] = "0",
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Cache policies to compare. Default: {','.join(_POLICIES)}; for a fleet {DEFAULTS.eviction_policy}.",
        ),
    ] = None,
    model: scenario.Model = None,
    kv_bytes: scenario.KVBytes = None,
    gpu_kv_tokens: scenario.GpuKVTokens = None,
    prefill_speed: scenario.PrefillSpeed = None,
    fleet: scenario.Fleet = None,
    max_requests: scenario.MaxRequests = None,
    processes: scenario.Processes = None,
    wide: Annotated[bool, typer.Option("--wide", help="Show all columns.")] = False,
    as_json: Json = False,
    out: DrawnOut = None,
) -> None:
    """Replay traces on machines of other sizes.

    Runs the production managers and policies with a virtual clock and without data. If the file of --fleet describes
    servers, simulates this fleet and its router.
    """
    read = Scenario(fleet, model, kv_bytes, gpu_kv_tokens, prefill_speed, max_requests)
    policies = read.policies(policy) or ([DEFAULTS.eviction_policy] if read.is_fleet else _POLICIES)
    check_drawn(out)
    numbers = read.server_numbers() if read.is_fleet else []
    jobs: list[tuple[Trace, Sequence[SimConfig | FleetConfig], list[str]]] = []
    for path in traces:
        trace = read.load(path)
        machines = _machines(read, trace, policies, cpu, disk)
        notes = read.assumptions(max(machines, key=lambda config: config.disk_blocks), trace)
        configs = read.fleets(trace, machines, numbers, "round-robin") if numbers else [read.alone(trace), *machines]
        jobs.append((trace, configs, notes))
    reports = [_sweep(trace, configs, processes) for trace, configs, _ in jobs]
    warnings = [
        list(filter(None, [saturation([*filter(None, [report.without]), *report.results])])) for report in reports
    ]
    figures = [
        {"assumptions": notes, "warnings": said} | report_as_json(report, read.prices)
        for (_, _, notes), said, report in zip(jobs, warnings, reports, strict=True)
    ]
    if as_json:
        print_json(figures)
    else:
        for (_, _, notes), said, report in zip(jobs, warnings, reports, strict=True):
            print("\n".join([*notes, ""]))
            _print(report, read.prices, said, wide)
    told, assumed = [text for said in warnings for text in said], [line for _, _, notes in jobs for line in notes]
    write_drawn(out, figures, lambda is_page: draw_reports(reports, read.prices, is_page, told, assumed))


def _machines(read: Scenario, trace: Trace, policies: Sequence[str], cpu: str | None, disk: str) -> list[SimConfig]:
    """Return every combination of sizes, policies and cascades, each with host memory."""
    block_bytes, alone = read.block_bytes(trace), read.alone(trace)
    return [
        replace(alone, cpu_blocks=cpu_blocks, disk_blocks=disk_blocks, policy=name, cascade=mode)
        for name in policies
        for mode in read.cascades()
        for disk_blocks in capacities(disk, "--disk", trace, block_bytes)
        for cpu_blocks in capacities(cpu or ("5%" if read.is_fleet else _CPU_SIZES), "--cpu", trace, block_bytes)
    ]


def _sweep(trace: Trace, configs: Sequence[SimConfig | FleetConfig], processes: int | None) -> Report:
    """In the order of the configurations. A single one reports its progress by requests."""
    if len(configs) > 1:
        unit = "fleets" if isinstance(configs[0], FleetConfig) else "runs"
        with progress(trace.name, len(configs), unit) as advance:
            return sweep(trace, configs, processes, advance)
    trace = trace.whole_blocks()
    with without_advice(), progress(trace.name, len(trace), "requests") as advance:
        result = replay(trace, configs[0], progress=advance)
    return report_of(trace, [result], are_fleets=isinstance(configs[0], FleetConfig))


def _print(report: Report, prices: Prices, warnings: Sequence[str], is_wide: bool) -> None:
    trace, results, best = report.trace, report.results, best_policy(report)
    print(
        f"{trace.name}: {len(trace):,} requests, {trace.num_accesses:,} blocks of {trace.block_tokens} tokens "
        f"({format_bytes(results[0].server.block_bytes)}), {trace.num_unique:,} distinct; "
        f"a cache without limits hits {100 * report.reachable_rate:.2f}%"
    )
    if common := common_of([*results, *filter(None, [report.without])]):
        print(f"Each run: {common}")
    print_table(runs_table(report, prices), is_wide=is_wide)
    bend = knee_of([result for result in results if result.server.policy == best])
    if report.without is not None and bend.hit_rate <= report.without.hit_rate:
        device = format_bytes(bend.server.gpu_bytes)
        print(f"{trace.name}: the smaller sizes add nothing to the GPU's own cache of {device}.")
    elif not report.is_fleet and len({result.server.cpu_blocks for result in results}) > 2:
        bend_text = f"{format_bytes(bend.server.cpu_bytes)} ({100 * bend.hit_rate:.2f}% hits)"
        print(f"{trace.name}: best overall is {best}; its curve bends at {bend_text}.")
    print(*warnings, sep="\n", end="\n" if warnings else "")
