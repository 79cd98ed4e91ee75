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
from kvoffload.sim.page import draw_fleets, draw_sweeps
from kvoffload.sim.report import (
    best_policy,
    common_of,
    fleet_table,
    fleets_as_json,
    frontier,
    handovers,
    knee_of,
    names_of,
    outage_table,
    saturation,
    sweep_as_json,
    sweep_table,
)
from kvoffload.sim.result import Result
from kvoffload.sim.sweep import Report, run_all, sweep, without_advice
from kvoffload.sim.trace import Trace
from kvoffload.units import format_bytes

_CPU_SIZES = "1%,2%,5%,10%,20%,50%"
_POLICIES = ["lru", "arc", "density"]


def simulate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help=scenario.TRACE_HELP)],
    cpu: Annotated[
        str | None,
        typer.Option(
            help="Sizes of host memory, such as 64GiB, or 10% of the trace's different blocks. "
            f"Default: {_CPU_SIZES}, and 5% for each server of a fleet."
        ),
    ] = None,
    disk: Annotated[str, typer.Option(help="Sizes of the disk tier, written likewise; 0 for no disk.")] = "0",
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"Cache policies to compare. Default: {','.join(_POLICIES)}; for a fleet {DEFAULTS.eviction_policy}."
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

    Runs the production managers and policies with a virtual clock instead of bytes; with a file of --fleet that has
    servers, a fleet of them and their router.
    """
    read = Scenario.read(fleet, model, kv_bytes, gpu_kv_tokens, prefill_speed, max_requests)
    policies = read.policies(policy) or ([DEFAULTS.eviction_policy] if read.is_fleet else _POLICIES)
    check_drawn(out)
    numbers = read.server_numbers() if read.is_fleet else []
    loaded = [read.load(path) for path in traces]
    jobs = [(trace, _machines(read, trace, policies, cpu, disk)) for trace in loaded]
    if read.is_fleet:
        fleets = [(trace, read.fleets(trace, tiers, numbers, "round-robin")) for trace, tiers in jobs]
        replayed = [(trace.whole_blocks(), replay_fleets(trace, configs, processes)) for trace, configs in fleets]
        notes = {trace.name: _notes(read, tiers, trace) for trace, tiers in jobs}
        warned = {trace.name: list(filter(None, [saturation(results)])) for trace, results in replayed}
        figures = [
            {"assumptions": notes[trace.name], "warnings": warned[trace.name]}
            | fleets_as_json(trace, results, read.prices)
            for trace, results in replayed
        ]
        for (trace, results), (_, tiers) in zip(replayed, jobs, strict=True) if not as_json else ():
            print(_head(read, tiers, trace))
            print_fleets(trace, results, read.prices, is_wide=wide)
        shown = [line for lines in notes.values() for line in lines]
        said = [line for lines in warned.values() for line in lines]
        write_drawn(out, figures, lambda is_page: draw_fleets(replayed, read.prices, is_page, said, shown))
    else:
        runs = [(trace, [read.alone(trace), *tiers]) for trace, tiers in jobs]
        reports = [_sweep(trace, configs, processes) for trace, configs in runs]
        every = [_notes(read, configs, trace) for trace, configs in runs]
        warnings = [list(filter(None, [saturation(report.results)])) for report in reports]
        figures = [
            {"assumptions": notes, "warnings": said} | sweep_as_json(report)
            for notes, said, report in zip(every, warnings, reports, strict=True)
        ]
        for (trace, configs), report in zip(runs, reports, strict=True) if not as_json else ():
            print(_head(read, configs, trace))
            _print(report, wide)
        told, assumed = [text for said in warnings for text in said], [line for notes in every for line in notes]
        write_drawn(out, figures, lambda is_page: draw_sweeps(reports, is_page, told, assumed))
    if as_json:
        print_json(figures)


def _notes(read: Scenario, configs: Sequence[SimConfig], trace: Trace) -> list[str]:
    return read.assumptions(max(configs, key=lambda config: config.disk_blocks), trace)


def _head(read: Scenario, configs: Sequence[SimConfig], trace: Trace) -> str:
    return "\n".join([*_notes(read, configs, trace), ""])


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


def _sweep(trace: Trace, configs: Sequence[SimConfig], processes: int | None) -> Report:
    with progress({trace.name: len(configs)}, "runs") as advance:
        return sweep(trace, configs, processes, lambda: advance(trace.name))


def _print(report: Report, is_wide: bool) -> None:
    trace, best = report.trace, best_policy(report)
    print(
        f"{trace.name}: {len(trace):,} requests, {trace.num_accesses:,} blocks of {trace.block_tokens} tokens "
        f"({format_bytes(report.block_bytes)}), {trace.num_unique:,} different, "
        f"{100 * report.reachable_rate:.2f} % within reach"
    )
    print_table(sweep_table(report), is_wide=is_wide)
    bend = knee_of(report, best)
    if report.without is not None and bend.hit_rate <= report.without.hit_rate:
        device = format_bytes(bend.gpu_blocks * report.block_bytes)
        print(f"{trace.name}: the GPU's own cache of {device} has what the smaller sizes hold.")
    elif len({result.cpu_blocks for result in report.results}) > 2:
        bend_text = f"{format_bytes(bend.cpu_blocks * report.block_bytes)} ({100 * bend.hit_rate:.2f} % hits)"
        print(f"{trace.name}: best overall is {best}; its curve bends at {bend_text}.")
    if said := saturation(report.results):
        print(said)


def replay_fleets(trace: Trace, configs: Sequence[FleetConfig], processes: int | None) -> list[Result]:
    """Return the results in the order of the configurations. A single replay reports its progress."""
    trace = trace.whole_blocks()
    if len(configs) == 1:
        with without_advice(), progress({trace.name: len(trace)}, "requests") as advance:
            return [replay(trace, configs[0], progress=lambda: advance(trace.name))]
    with progress({trace.name: len(configs)}, "fleets") as advance:
        return run_all(replay, trace, configs, processes, lambda: advance(trace.name))


def print_fleets(trace: Trace, results: Sequence[Result], prices: Prices, *, is_wide: bool = False) -> None:
    print(f"{trace.name}: {len(trace):,} requests; each fleet: {common_of(results) or 'nothing in common'}")
    print_table(fleet_table(results, prices), is_wide=is_wide)
    if outages := outage_table(results):
        print("\nOutages: before / during / after")
        for fleet, away, hits, p90, recovered in outages.rows:
            print(f"{fleet}\n  {away} away: hits {hits} %, p90 {p90}, recovered after {recovered}")
    for text in handovers(results):
        print(text)
    if said := saturation(results):
        print(said)
    if len(results) > 2:
        names = dict(zip(map(id, results), names_of(results), strict=True))
        best = "\n".join(f"  {names[id(result)]}" for result in frontier(results, prices))
        print(f"Frontier of cost and first token:\n{best or '  no fleet keeps up'}")
