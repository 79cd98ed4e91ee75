# SPDX-License-Identifier: Apache-2.0
"""``kvoffload simulate``: what would which tiers and policies have done for this traffic?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.cli import fleet, machine
from kvoffload.cli.output import check_out, positive, progress, write_json
from kvoffload.config import DEFAULTS
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.errors import ConfigError, UnknownNameError, suggest
from kvoffload.sim.driver import SPEEDS, SimConfig
from kvoffload.sim.fleet.traffic import crowd
from kvoffload.sim.hints import hinter
from kvoffload.sim.page import check_target
from kvoffload.sim.plot import write_plot
from kvoffload.sim.report import as_json, best_policy, knee_of, saturation, table
from kvoffload.sim.sweep import Report, sweep
from kvoffload.sim.trace import Trace
from kvoffload.tiering.base import CascadeMode
from kvoffload.units import format_bytes

__all__ = ["register"]

_CPU_SIZES = "1%,2%,5%,10%,20%,50%"
_POLICIES = "lru,arc,density"


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help=machine.TRACE_HELP)],
    cpu: Annotated[
        str | None,
        typer.Option(
            help="Sizes of host memory: bytes, or % of the trace's footprint. "
            f"Default: {_CPU_SIZES}, and 5% for each server of a fleet."
        ),
    ] = None,
    disk: Annotated[str, typer.Option(help="Sizes of the disk tier, written likewise; 0 for no disk.")] = "0",
    gpu_kv_tokens: machine.GpuKVTokens = None,
    gpu_blocks: machine.GpuBlocks = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"Cache policies to compare. Default: {_POLICIES}, and {DEFAULTS.eviction_policy}, that of serving, "
            "for a fleet."
        ),
    ] = None,
    model: machine.Model = None,
    kv_bytes: machine.KVBytes = None,
    store_threshold: machine.StoreThreshold = DEFAULTS.store_threshold,
    prefill_speed: machine.PrefillSpeed = SPEEDS.prefill_tokens_per_s,
    load_speed: machine.LoadSpeed = machine.LOAD_SPEED,
    disk_read_speed: machine.DiskReadSpeed = machine.DISK_READ_SPEED,
    disk_write_speed: machine.DiskWriteSpeed = machine.DISK_WRITE_SPEED,
    cascade: Annotated[
        str | None,
        typer.Option(
            help=f"When to write blocks to disk: on_store, on_evict, or both to compare. {machine.CASCADE_DEFAULT}"
        ),
    ] = None,
    load_policy: machine.LoadPolicyOption = DEFAULTS.load_policy,
    hints: Annotated[
        str | None,
        typer.Option(
            help="What clients say of their next use: oracle, or noisy:P with a share P of wrong hints. "
            "By default what the trace says."
        ),
    ] = None,
    servers: fleet.Servers = None,
    router: fleet.Routers = "round-robin",
    shared: fleet.Shared = None,
    pool: fleet.Pool = None,
    servers_per_machine: fleet.PerMachine = 1,
    prefill_servers: fleet.PrefillServers = 0,
    death: fleet.Deaths = None,
    events: fleet.Events = "",
    copies: fleet.Copies = 1,
    hour_prices: fleet.HourPrices = "",
    stretch: Annotated[float, typer.Option(help="Factor by which requests arrive more slowly.")] = 1.0,
    block_tokens: machine.BlockTokens = None,
    max_requests: machine.MaxRequests = None,
    processes: machine.Processes = None,
    wide: Annotated[bool, typer.Option("--wide", help="Show all columns.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File to draw the curves to: .png or .html.")] = None,
) -> None:
    """Replay traces on machines of other sizes.

    Runs the production managers and policies with a virtual clock instead of bytes. With --servers, through a
    fleet of servers and their router.
    """
    policies = _policies(policy or (_POLICIES if servers is None else DEFAULTS.eviction_policy))
    cpu = cpu or (_CPU_SIZES if servers is None else "5%")
    numbers = None if servers is None else fleet.server_numbers(servers)
    if numbers is not None and len(traces) > 1 and (json_file is not None or plot is not None):
        raise ConfigError("--json and --plot with --servers are of one trace at a time; give one.")
    prices = fleet.hour_prices(hour_prices)
    modes = _modes(cascade)
    chosen_load_policy = machine.load_policy_of(load_policy)
    check_out(json_file)
    if plot is not None:
        check_target(plot)
    sizes = machine.model_sizes(model, kv_bytes)
    positive(stretch, "--stretch")
    speeds = machine.speeds_of(prefill_speed, load_speed, disk_read_speed, disk_write_speed)
    hinted = hinter(hints) if hints is not None else None
    loaded = [machine.load_one(trace, block_tokens, max_requests).stretched(stretch) for trace in traces]
    loaded = [crowd(trace, copies) for trace in loaded]
    if hinted is not None:
        loaded = [hinted(trace) for trace in loaded]
    jobs: list[tuple[Trace, list[SimConfig]]] = []
    for trace in loaded:
        block_bytes = sizes.bytes_per_token * trace.block_tokens
        alone = SimConfig(
            cpu_blocks=0,
            block_bytes=block_bytes,
            gpu_blocks=machine.device_blocks(trace, gpu_blocks, gpu_kv_tokens),
            store_threshold=store_threshold,
            load_policy=chosen_load_policy,
            state_slots=sizes.state_slots(block_bytes),
            **speeds._asdict(),
        )
        tiers = [
            replace(alone, cpu_blocks=cpu_blocks, disk_blocks=disk_blocks, policy=name, cascade=mode)
            for name in policies
            for mode in modes
            for disk_blocks in machine.capacities(disk, "--disk", trace, block_bytes)
            for cpu_blocks in machine.capacities(cpu, "--cpu", trace, block_bytes)
        ]
        if numbers is not None:
            fleets = fleet.fleet_configs(
                trace, tiers, router, shared, pool, servers_per_machine, prefill_servers, death, events, numbers
            )
            fleet.simulate_fleets(trace, fleets, prices, processes, wide, json_file, plot)
        jobs.append((trace, [alone, *tiers]))
    if numbers is not None:
        return
    reports = _run_sweeps(jobs, processes)
    _print(jobs, reports, model is not None or kv_bytes is not None, wide)
    write_json(as_json(reports), json_file)
    if plot is not None:
        write_plot(reports, plot)


def _modes(text: str | None) -> list[CascadeMode] | list[None]:
    """The modes to try; ``None`` is the default, which depends on the sizes."""
    if text is None:
        return [None]
    choices: tuple[CascadeMode, ...] = get_args(CascadeMode)
    if text == "both":
        return list(choices)
    chosen = {part.strip() for part in text.split(",")}
    if not chosen <= {*choices}:
        raise ConfigError(f"--cascade is {', '.join(choices)} or both, not {text!r}.")
    return [mode for mode in choices if mode in chosen]


def _run_sweeps(jobs: Sequence[tuple[Trace, list[SimConfig]]], processes: int | None) -> list[Report]:
    """Runs one sweep after the other, and shows the progress."""
    reports = []
    for trace, configs in jobs:
        with progress({trace.name: len(configs)}, "runs") as advance:
            name = trace.name
            reports.append(sweep(trace, configs, processes, lambda _, name=name: advance(name)))  # type: ignore[misc]
    return reports


def _policies(text: str) -> list[str]:
    names = [name for name in map(str.strip, text.split(",")) if name]
    for name in names:
        if name not in POLICIES.names():
            raise UnknownNameError(f"Unknown cache policy: {name!r}.{suggest(name, POLICIES.names())}")
    if not names:
        raise ConfigError("--policy needs at least one policy.")
    return list(dict.fromkeys(names))


def _print(
    jobs: Sequence[tuple[Trace, list[SimConfig]]], reports: Sequence[Report], is_kv_given: bool, is_wide: bool
) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    for (trace, configs), report in zip(jobs, reports, strict=True):
        largest = max(configs, key=lambda config: config.disk_blocks)
        console.print(machine.assumptions(largest, trace, is_kv_given), highlight=False)
        headings, rows = table(report, is_wide)
        console.print(_title(report), highlight=False)
        drawn = Table()
        for at, heading in enumerate(headings):
            drawn.add_column(heading, justify="left" if at == 0 else "right", no_wrap=True)
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)
        best = best_policy(report)
        bend = knee_of(report, best)
        if report.without is not None and bend.hit_rate <= report.without.hit_rate:
            device = format_bytes(bend.gpu_blocks * report.block_bytes)
            console.print(f"{trace.name}: the GPU's own cache of {device} has what the smaller sizes hold.")
        elif len({result.cpu_blocks for result in report.results}) > 2:
            bend_text = f"{format_bytes(bend.cpu_blocks * report.block_bytes)} ({100 * bend.hit_rate:.2f} % hits)"
            console.print(f"{trace.name}: best overall is {best}; its curve bends at {bend_text}.")
        if said := saturation(report.results):
            console.print(said, highlight=False)


def _title(report: Report) -> str:
    trace = report.trace
    return (
        f"{trace.name}: {len(trace):,} requests, {trace.num_accesses:,} blocks of {trace.block_tokens} tokens "
        f"({format_bytes(report.block_bytes)}), {trace.num_unique:,} different, "
        f"{100 * report.reachable_rate:.2f} % within reach"
    )
