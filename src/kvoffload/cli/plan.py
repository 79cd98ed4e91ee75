# SPDX-License-Identifier: Apache-2.0
"""``kvoffload plan``: how much memory and disk are worth buying?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.cli.output import check_json_target, positive, progress, write_json
from kvoffload.cli.simulate import CASCADE_DEFAULT, GPU_BLOCKS_HELP, TRACE_HELP, assumption, load_one, model_sizes
from kvoffload.config import DEFAULTS
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.errors import ConfigError
from kvoffload.sim.driver import SPEEDS, SimConfig
from kvoffload.sim.kv_size import ModelKV, kv_bytes_per_token
from kvoffload.sim.plan import Goal, Plan, Prices, make_plan
from kvoffload.sim.plot import check_target, write_plot
from kvoffload.sim.report import as_json
from kvoffload.tiering.base import CascadeMode
from kvoffload.units import format_bytes, parse_bytes

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help=TRACE_HELP)],
    hit_rate: Annotated[float | None, typer.Option(help="Goal: percent of blocks hit, on the device or below.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Goal: seconds to the first token, at --quantile.")] = None,
    quantile: Annotated[str, typer.Option(help="Quantile of the time to first token: p50, p90 or p99.")] = "p90",
    model: Annotated[Path | None, typer.Option(help="Model's config.json, which gives the size of a block.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model, in place of --model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of the model; with --layers.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head size of the model; with --layers.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Data type of the KV cache. By default the model's; with --layers bfloat16.")
    ] = None,
    kv_bytes: Annotated[
        str | None, typer.Option("--kv-bytes-per-token", help="KV bytes per token, in place of --model.")
    ] = None,
    max_cpu: Annotated[str | None, typer.Option(help="Largest host memory to consider.")] = None,
    max_disk: Annotated[str, typer.Option(help="Largest disk to consider; 0 for no disk.")] = "0",
    cpu_price: Annotated[float, typer.Option(help="Price of a GiB of host memory.")] = 4.0,
    disk_price: Annotated[float, typer.Option(help="Price of a GiB of disk.")] = 0.1,
    gpu_blocks: Annotated[int | None, typer.Option(min=0, help=GPU_BLOCKS_HELP)] = None,
    policy: Annotated[str, typer.Option(help="Cache policy of host memory.")] = DEFAULTS.eviction_policy,
    store_threshold: Annotated[
        int, typer.Option(min=0, help="Store a block at the n-th request that asks for it.")
    ] = DEFAULTS.store_threshold,
    cascade: Annotated[
        str | None, typer.Option(help=f"When to write blocks to disk: on_store or on_evict. {CASCADE_DEFAULT}")
    ] = None,
    prefill_speed: Annotated[
        float, typer.Option(help="Tokens that the device prefills per second.")
    ] = SPEEDS.prefill_tokens_per_s,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per hash id, if that is ambiguous.")] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Requests to read, from the first on.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes to use. By default one per core.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write the choice and all figures to.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File to draw the curve to: .png or .html.")] = None,
) -> None:
    """Find the cheapest tiers that reach a hit rate or a time to first token, and show every size tried."""
    if quantile not in ("p50", "p90", "p99"):
        raise ConfigError(f"--quantile is p50, p90 or p99, not {quantile!r}.")
    goal = Goal(None if hit_rate is None else hit_rate / 100, ttft, quantile)
    prices = Prices(cpu_price, disk_price)
    POLICIES.get(policy)
    if cascade is not None and cascade not in get_args(CascadeMode):
        raise ConfigError(f"--cascade is {' or '.join(get_args(CascadeMode))}, not {cascade!r}.")
    positive(prefill_speed, "--prefill-speed")
    check_json_target(json_file)
    if plot is not None:
        check_target(plot)
    if layers is not None and kv_heads is not None and head_dim is not None:
        if model is not None or kv_bytes is not None:
            raise ConfigError(
                "Give --model, --kv-bytes-per-token, or --layers with --kv-heads and --head-dim: one of them."
            )
        sizes, assumed = ModelKV(kv_bytes_per_token(layers, kv_heads, head_dim, dtype or "bfloat16")), ""
    elif layers is not None or kv_heads is not None or head_dim is not None:
        raise ConfigError("--layers, --kv-heads and --head-dim belong together.")
    else:
        sizes, assumed = model_sizes(model, kv_bytes, dtype), assumption(model, kv_bytes)
    loaded = load_one(trace, block_tokens, max_requests)
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
        loaded.device_blocks if gpu_blocks is None else gpu_blocks,
        policy=policy,
        store_threshold=store_threshold,
        prefill_tokens_per_s=prefill_speed,
        cascade=cast("CascadeMode | None", cascade),
        state_slots=sizes.state_slots(block_bytes),
    )
    name = loaded.name
    with progress({name: None}, "runs") as advance:
        made = make_plan(
            loaded, base, goal, prices, max_cpu_blocks, max_disk_blocks, processes, lambda _: advance(name)
        )
    _print(made, goal, prices, assumed)
    write_json(_as_json(made, goal, prices), json_file)
    if plot is not None:
        write_plot([made.report], plot)


def _as_json(made: Plan, goal: Goal, prices: Prices) -> dict[str, Any]:
    """The goal, the choice and its price, and what ``simulate --json`` has of every run."""
    (report,) = as_json([made.report])
    chosen = report["runs"][made.report.results.index(made.chosen)]
    return {"goal": asdict(goal), "prices": asdict(prices), "chosen": chosen, "price": made.price, **report}


def _print(made: Plan, goal: Goal, prices: Prices, assumed: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if assumed:
        console.print(assumed, highlight=False)
    block_bytes = made.report.block_bytes
    table = Table("host memory", "disk", "hits %", goal.quantile, "saved prefill", "price", "")
    for column in table.columns:
        column.justify = "right"
    for result in sorted(made.report.results, key=lambda each: prices.of(each, block_bytes)):
        table.add_row(
            format_bytes(result.cpu_blocks * block_bytes),
            format_bytes(result.disk_blocks * block_bytes) if result.disk_blocks else "-",
            f"{100 * result.hit_rate:.2f}",
            f"{result.ttft_s[goal.quantile]:.3g} s",
            f"{result.saved_prefill_s:,.0f} s",
            f"{prices.of(result, block_bytes):,.2f}",
            "<- chosen" if result is made.chosen else "meets it" if goal.is_met(result) else "",
        )
    console.print(table)
    chosen = made.chosen
    bought = f"{format_bytes(chosen.cpu_blocks * block_bytes)} of host memory"
    if chosen.disk_blocks:
        bought += f" and {format_bytes(chosen.disk_blocks * block_bytes)} of disk"
    console.print(
        f"Buy {bought}: {100 * chosen.hit_rate:.1f} % hits, "
        f"{goal.quantile} {chosen.ttft_s[goal.quantile]:.3g} s, price {made.price:,.2f}."
    )
