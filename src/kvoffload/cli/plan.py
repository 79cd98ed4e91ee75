# SPDX-License-Identifier: Apache-2.0
"""``kvoffload plan``: how much memory and disk are worth buying?"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.cli import fleet, machine
from kvoffload.cli.output import check_out, positive, progress, write_json
from kvoffload.config import DEFAULTS
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.errors import ConfigError
from kvoffload.sim.driver import SPEEDS, SimConfig, SimResult
from kvoffload.sim.fleet.traffic import crowd
from kvoffload.sim.kv_size import ModelKV, kv_bytes_per_token
from kvoffload.sim.page import check_target
from kvoffload.sim.plan import Goal, Plan, Prices, machines, make_plan
from kvoffload.sim.plot import write_plot
from kvoffload.sim.report import as_json, format_seconds, saturation
from kvoffload.tiering.base import CascadeMode
from kvoffload.units import format_bytes, parse_bytes

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help=machine.TRACE_HELP)],
    hit_rate: Annotated[str | None, typer.Option(help="Goal: percent of blocks hit, on the device or below.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Goal: seconds to the first token, at --quantile.")] = None,
    quantile: Annotated[str, typer.Option(help="Quantile of the time to first token: p50, p90 or p99.")] = "p90",
    model: machine.Model = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model, in place of --model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of the model; with --layers.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head size of the model; with --layers.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Data type of the KV cache. By default the model's; with --layers bfloat16.")
    ] = None,
    kv_bytes: machine.KVBytes = None,
    max_cpu: Annotated[str | None, typer.Option(help="Largest host memory to consider.")] = None,
    max_disk: Annotated[str, typer.Option(help="Largest disk to consider; 0 for no disk.")] = "0",
    cpu_price: Annotated[float, typer.Option(help="Price of a GiB of host memory.")] = 4.0,
    disk_price: Annotated[float, typer.Option(help="Price of a GiB of disk.")] = 0.1,
    gpu_kv_tokens: machine.GpuKVTokens = None,
    gpu_blocks: machine.GpuBlocks = None,
    policy: Annotated[str, typer.Option(help="Cache policy of host memory.")] = DEFAULTS.eviction_policy,
    store_threshold: machine.StoreThreshold = DEFAULTS.store_threshold,
    cascade: Annotated[
        str | None, typer.Option(help=f"When to write blocks to disk: on_store or on_evict. {machine.CASCADE_DEFAULT}")
    ] = None,
    load_policy: machine.LoadPolicyOption = DEFAULTS.load_policy,
    prefill_speed: machine.PrefillSpeed = SPEEDS.prefill_tokens_per_s,
    load_speed: machine.LoadSpeed = machine.LOAD_SPEED,
    disk_read_speed: machine.DiskReadSpeed = machine.DISK_READ_SPEED,
    disk_write_speed: machine.DiskWriteSpeed = machine.DISK_WRITE_SPEED,
    servers: fleet.Servers = None,
    router: fleet.Routers = "least-tokens",
    shared: fleet.Shared = None,
    copies: fleet.Copies = 1,
    stretch: Annotated[float, typer.Option(help="Factor by which requests arrive more slowly.")] = 1.0,
    hour_prices: fleet.HourPrices = "",
    block_tokens: machine.BlockTokens = None,
    max_requests: machine.MaxRequests = None,
    processes: machine.Processes = None,
    wide: Annotated[bool, typer.Option("--wide", help="Show every size tried, and the saved prefill.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write the choice and all figures to.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File to draw the curve to: .png or .html.")] = None,
) -> None:
    """Find the cheapest tiers that reach a goal.

    The goal is a hit rate or a time to first token. The table shows what more would bring.

    Exit codes: 0, something reaches the goal, perhaps the device alone; 1, nothing does; 2, a mistake in the options.
    """
    if quantile not in ("p50", "p90", "p99"):
        raise ConfigError(f"--quantile is p50, p90 or p99, not {quantile!r}.")
    goal = Goal(None if hit_rate is None else _share(hit_rate), ttft, quantile)
    prices = Prices(cpu_price, disk_price)
    POLICIES.get(policy)
    if cascade is not None and cascade not in get_args(CascadeMode):
        raise ConfigError(f"--cascade is {' or '.join(get_args(CascadeMode))}, not {cascade!r}.")
    speeds = machine.speeds_of(prefill_speed, load_speed, disk_read_speed, disk_write_speed)
    chosen_load_policy = machine.load_policy_of(load_policy)
    check_out(json_file)
    if plot is not None:
        check_target(plot)
    if layers is not None and kv_heads is not None and head_dim is not None:
        if model is not None or kv_bytes is not None:
            raise ConfigError(
                "Give --model, --kv-bytes-per-token, or --layers with --kv-heads and --head-dim: one of them."
            )
        sizes = ModelKV(kv_bytes_per_token(layers, kv_heads, head_dim, dtype or "bfloat16"))
    elif layers is not None or kv_heads is not None or head_dim is not None:
        raise ConfigError("--layers, --kv-heads and --head-dim belong together.")
    else:
        sizes = machine.model_sizes(model, kv_bytes, dtype)
    ends = None if servers is None else fleet.server_range(servers)
    prices_an_hour = fleet.hour_prices(hour_prices)
    loaded = crowd(machine.load_one(trace, block_tokens, max_requests), copies).stretched(
        positive(stretch, "--stretch")
    )
    block_bytes = sizes.bytes_per_token * loaded.block_tokens
    max_cpu_blocks = None if max_cpu is None else parse_bytes(max_cpu, "--max-cpu") // block_bytes
    if max_cpu_blocks == 0:
        raise ConfigError(f"--max-cpu: {max_cpu} is less than one block of {format_bytes(block_bytes)}.")
    max_disk_blocks = 0 if max_disk == "0" else parse_bytes(max_disk, "--max-disk") // block_bytes
    if max_disk_blocks == 0 and max_disk != "0":
        raise ConfigError(f"--max-disk: {max_disk} is less than one block of {format_bytes(block_bytes)}.")
    base = SimConfig(
        1,
        block_bytes,
        machine.device_blocks(loaded, gpu_blocks, gpu_kv_tokens),
        policy=policy,
        store_threshold=store_threshold,
        load_policy=chosen_load_policy,
        **speeds._asdict(),
        cascade=cast("CascadeMode | None", cascade),
        state_slots=sizes.state_slots(block_bytes),
    )
    if ends is not None:
        tiers = machines(loaded, base, max_cpu_blocks, max_disk_blocks)
        fleets = fleet.fleet_configs(loaded, tiers, router, shared, None, 1, 0, None, "", ends[:1])
        if not fleet.plan_fleets(loaded, fleets, goal, prices_an_hour, ends, processes, wide, json_file, plot):
            sys.exit(1)
        return
    name = loaded.name
    with progress({name: None}, "runs") as advance:
        made = make_plan(
            loaded, base, goal, prices, max_cpu_blocks, max_disk_blocks, processes, lambda _: advance(name)
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    is_kv_given = model is not None or kv_bytes is not None or layers is not None
    console.print(machine.assumptions(replace(base, disk_blocks=max_disk_blocks), loaded, is_kv_given), highlight=False)
    _print(console, made, goal, prices, wide)
    write_json(_as_json(made, goal, prices), json_file)
    if plot is not None:
        write_plot([made.report], plot)
    if made.chosen is None:
        sys.exit(1)


def _as_json(made: Plan, goal: Goal, prices: Prices) -> dict[str, Any]:
    """The goal, the choice and its price, and what ``simulate --json`` has of every run."""
    (report,) = as_json([made.report])
    chosen = None if made.chosen is None else report["without_offloading"]
    if made.chosen in made.report.results:
        chosen = report["runs"][made.report.results.index(made.chosen)]
    return {"goal": asdict(goal), "prices": asdict(prices), "chosen": chosen, "price": made.price, **report}


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


def _print(console: Console, made: Plan, goal: Goal, prices: Prices, is_wide: bool) -> None:
    report, alone = made.report, made.report.without
    assert alone is not None
    headings = ("memory", "disk", "hits %", goal.quantile, "gained", "price", "saved prefill", "")
    table = Table(*(heading for heading in headings if is_wide or heading != "saved prefill"))
    for column in table.columns:
        column.justify = "right"
    tried = [alone, *sorted(report.results, key=lambda each: prices.of(each, report.block_bytes))]
    shown = tried if is_wide else _worth_showing(tried, made, goal)
    for result in shown:
        gained = alone.ttft_s[goal.quantile] - result.ttft_s[goal.quantile]
        table.add_row(
            format_bytes(result.cpu_blocks * report.block_bytes) if result.cpu_blocks else "none",
            format_bytes(result.disk_blocks * report.block_bytes) if result.disk_blocks else "-",
            f"{100 * result.hit_rate:.2f}",
            format_seconds(result.ttft_s[goal.quantile]),
            "-" if result is alone else format_seconds(gained),
            f"{prices.of(result, report.block_bytes):,.2f}",
            *([format_seconds(result.saved_prefill_s)] if is_wide else []),
            "<- chosen" if result is made.chosen else "meets it" if goal.is_met(result) else "",
        )
    console.print(table)
    if hidden := len(tried) - len(shown):
        console.print(f"Not shown: {hidden:,} that cost more and bring no more (--wide).", highlight=False)
    console.print(_advice(made, goal), highlight=False)
    if said := saturation([alone, *report.results]):
        console.print(said, highlight=False)


def _worth_showing(tried: list[SimResult], made: Plan, goal: Goal) -> list[SimResult]:
    """Of ``tried``, cheapest first, the choice and those that come closer to the goal than all that are cheaper."""
    shown: list[SimResult] = []
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
            f"Nothing within the limits reaches the goal. The best has {figures}; a cache that keeps everything hits "
            f"{100 * report.reachable_rate:.1f} %, which is all that this trace offers."
        )
    if not chosen.cpu_blocks:
        return f"Buy nothing: the GPU's own cache reaches the goal, with {figures}."
    bought = f"{format_bytes(chosen.cpu_blocks * report.block_bytes)} of host memory"
    if chosen.disk_blocks:
        bought += f" and {format_bytes(chosen.disk_blocks * report.block_bytes)} of disk"
    return f"Buy {bought}: {figures}, price {made.price:,.2f}."
