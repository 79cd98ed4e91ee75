# SPDX-License-Identifier: Apache-2.0
"""``kvoffload simulate``: what would which tiers and policies have done for this traffic?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.cli.output import check_json_target, positive, progress, write_json
from kvoffload.config import DEFAULTS
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.errors import ConfigError, UnknownNameError, suggest
from kvoffload.sim.driver import SPEEDS, SimConfig
from kvoffload.sim.kv_size import ModelKV, model_kv
from kvoffload.sim.plot import check_target, write_plot
from kvoffload.sim.report import as_json, best_policy, knee_of, table
from kvoffload.sim.sweep import Report, sweep
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace
from kvoffload.sim.trace_files import load_trace
from kvoffload.tiering.base import CascadeMode
from kvoffload.tiering.load_policy import LoadPolicy
from kvoffload.units import format_bytes, parse_bytes

__all__ = [
    "CASCADE_DEFAULT",
    "GPU_BLOCKS_HELP",
    "TRACE_HELP",
    "assumption",
    "capacities",
    "load_one",
    "model_sizes",
    "register",
]

TRACE_HELP = "File of JSON lines, plain, gzip or zstd; or synthetic:KIND or synthetic:KIND:SEED."
GPU_BLOCKS_HELP = "Blocks of the trace that the device's own cache holds. By default what the trace says, or 0."
_DEFAULT_KV_BYTES = 131_072
"""Per token: a dense model of some 8 billion parameters with grouped-query attention in 16 bits."""
CASCADE_DEFAULT = "By default on_evict if the disk is less than twice as large as host memory, as in serving."


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help=TRACE_HELP)],
    cpu: Annotated[str, typer.Option(help="Sizes of host memory: bytes, or % of the trace's footprint.")] = (
        "1%,2%,5%,10%,20%,50%"
    ),
    disk: Annotated[str, typer.Option(help="Sizes of the disk tier, written likewise; 0 for no disk.")] = "0",
    gpu_blocks: Annotated[int | None, typer.Option(min=0, help=GPU_BLOCKS_HELP)] = None,
    policy: Annotated[
        str, typer.Option(help=f"Cache policies to compare. The default of serving is {DEFAULTS.eviction_policy}.")
    ] = "lru,arc,density",
    model: Annotated[
        Path | None, typer.Option(help="Model's config.json, which gives the sizes of blocks and states.")
    ] = None,
    kv_bytes: Annotated[
        str | None, typer.Option("--kv-bytes-per-token", help="KV bytes per token, in place of --model.")
    ] = None,
    store_threshold: Annotated[
        int, typer.Option(min=0, help="Store a block at the n-th request that asks for it.")
    ] = DEFAULTS.store_threshold,
    prefill_speed: Annotated[
        float, typer.Option(help="Tokens that the device prefills per second.")
    ] = SPEEDS.prefill_tokens_per_s,
    load_speed: Annotated[
        str, typer.Option(help="Bytes loaded from host memory to the device per second.")
    ] = f"{SPEEDS.load_bytes_per_s / 1e9:g}GB",
    disk_read_speed: Annotated[
        str, typer.Option(help="Bytes read from disk per second.")
    ] = f"{SPEEDS.disk_read_bytes_per_s / 1e9:g}GB",
    disk_write_speed: Annotated[
        str, typer.Option(help="Bytes written to disk per second.")
    ] = f"{SPEEDS.disk_write_bytes_per_s / 1e9:g}GB",
    cascade: Annotated[
        str | None,
        typer.Option(help=f"When to write blocks to disk: on_store, on_evict, or both to compare. {CASCADE_DEFAULT}"),
    ] = None,
    load_policy: Annotated[
        str, typer.Option(help="Hits on disk to load: cost, those that are faster than computing; or always.")
    ] = DEFAULTS.load_policy,
    stretch: Annotated[float, typer.Option(help="Factor by which requests arrive more slowly.")] = 1.0,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per hash id, if that is ambiguous.")] = None,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests to read of each trace, from the first on.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes to use. By default one per core.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File to draw the curves to: .png or .html.")] = None,
) -> None:
    """Replay request traces through the production managers and policies, with a virtual clock instead of bytes."""
    policies = _policies(policy)
    modes = _modes(cascade)
    chosen_load_policy = _load_policy(load_policy)
    check_json_target(json_file)
    if plot is not None:
        check_target(plot)
    sizes = model_sizes(model, kv_bytes)
    positive(stretch, "--stretch")
    positive(prefill_speed, "--prefill-speed")
    load_bytes_per_s = parse_bytes(load_speed, "--load-speed")
    disk_read_bytes_per_s = parse_bytes(disk_read_speed, "--disk-read-speed")
    disk_write_bytes_per_s = parse_bytes(disk_write_speed, "--disk-write-speed")
    loaded = [load_one(trace, block_tokens, max_requests) for trace in traces]
    jobs: list[tuple[Trace, list[SimConfig]]] = []
    for trace in loaded:
        block_bytes = sizes.bytes_per_token * trace.block_tokens
        jobs.append(
            (
                trace.stretched(stretch),
                [
                    SimConfig(
                        cpu_blocks=cpu_blocks,
                        block_bytes=block_bytes,
                        gpu_blocks=trace.device_blocks if gpu_blocks is None else gpu_blocks,
                        disk_blocks=disk_blocks,
                        policy=name,
                        store_threshold=store_threshold,
                        prefill_tokens_per_s=prefill_speed,
                        load_bytes_per_s=load_bytes_per_s,
                        disk_read_bytes_per_s=disk_read_bytes_per_s,
                        disk_write_bytes_per_s=disk_write_bytes_per_s,
                        load_policy=chosen_load_policy,
                        cascade=mode,
                        state_slots=sizes.state_slots(block_bytes),
                    )
                    for name in policies
                    for mode in modes
                    for disk_blocks in capacities(disk, "--disk", trace, block_bytes)
                    for cpu_blocks in capacities(cpu, "--cpu", trace, block_bytes)
                ],
            )
        )
    reports = _run_sweeps(jobs, processes)
    _print(reports, assumption(model, kv_bytes))
    write_json(as_json(reports), json_file)
    if plot is not None:
        write_plot(reports, plot)


def _load_policy(text: str) -> LoadPolicy:
    choices: tuple[LoadPolicy, ...] = get_args(LoadPolicy)
    for choice in choices:
        if text == choice:
            return choice
    raise ConfigError(f"--load-policy is {' or '.join(choices)}, not {text!r}.")


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


def model_sizes(model: Path | None, kv_bytes: str | None, dtype: str | None = None) -> ModelKV:
    """Of the model in ``model``, its KV cache in ``dtype``; or ``kv_bytes`` per token, or a default, and no states."""
    if model is not None and kv_bytes is not None:
        raise ConfigError("--model and --kv-bytes-per-token both give the KV size; choose one of them.")
    if model is not None:
        return model_kv(model, dtype)
    if dtype is not None:
        raise ConfigError("--dtype belongs to --model or --layers; --kv-bytes-per-token gives the size as it is.")
    return ModelKV(parse_bytes(kv_bytes, "--kv-bytes-per-token") if kv_bytes is not None else _DEFAULT_KV_BYTES)


def assumption(model: Path | None, kv_bytes: str | None) -> str:
    """What to say of the KV size if neither option gave it; otherwise nothing."""
    if model is not None or kv_bytes is not None:
        return ""
    return (
        f"Assumes {format_bytes(_DEFAULT_KV_BYTES)} of KV per token, as of a dense model of 8 billion parameters in 16 "
        "bits; --model or --kv-bytes-per-token gives your model's."
    )


def load_one(path: Path, block_tokens: int | None, max_requests: int | None) -> Trace:
    """The trace in a file, or a synthetic one for the name ``synthetic:KIND`` or ``synthetic:KIND:SEED``."""
    word, _, rest = str(path).partition(":")
    if word != "synthetic":
        return load_trace(path, block_tokens, max_requests)
    if block_tokens is not None:
        raise ConfigError(f"--block-tokens is for traces in files; {path} has blocks of its own size.")
    kind, _, seed = rest.partition(":")
    if not seed.isdecimal() and seed:
        raise ConfigError(f"{path}: the seed is a number, as in 'synthetic:chat:7'.")
    return synthesize(kind, max_requests or 4000, int(seed or 0))


def capacities(text: str, option: str, trace: Trace, block_bytes: int) -> list[int]:
    """The number of blocks for each size in a list like ``"64GiB,10%"``, without repetitions.

    A percentage is of the trace's different whole blocks. Only ``--disk`` may be 0. Raises ``ConfigError``, which names
    ``option``, for a size of less than one block.
    """
    footprint = trace.whole_blocks().num_unique
    sizes = []
    for part in filter(None, map(str.strip, text.split(","))):
        if part == "0" and option == "--disk":
            sizes.append(0)
            continue
        if part.endswith("%"):
            try:
                blocks = int(footprint * float(part[:-1]) / 100)
            except (ValueError, OverflowError) as exc:
                raise ConfigError(f"{option}: {part!r} is not a share; write for example '10%'.") from exc
        else:
            blocks = parse_bytes(part, option) // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"{option}: {part} is less than one block of {format_bytes(block_bytes)} "
                f"({trace.block_tokens} tokens) of {trace.name}."
            )
        sizes.append(blocks)
    if not sizes:
        raise ConfigError(f"{option} needs at least one size.")
    return list(dict.fromkeys(sizes))


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


def _print(reports: Sequence[Report], assumed: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    if assumed:
        console.print(assumed, highlight=False)
    for report in reports:
        trace = report.trace
        headings, rows = table(report)
        drawn = Table(title=_title(report), title_justify="left")
        for at, heading in enumerate(headings):
            drawn.add_column(heading, justify="left" if at == 0 else "right", no_wrap=True)
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)
        best = best_policy(report)
        bend = knee_of(report, best)
        if len({result.cpu_blocks for result in report.results}) > 2:
            bend_text = f"{format_bytes(bend.cpu_blocks * report.block_bytes)} ({100 * bend.hit_rate:.2f} % hits)"
            console.print(f"{trace.name}: best overall is {best}; its curve bends at {bend_text}.\n")


def _title(report: Report) -> str:
    trace = report.trace
    return (
        f"{trace.name}: {len(trace):,} requests, {trace.num_accesses:,} blocks of {trace.block_tokens} tokens "
        f"({format_bytes(report.block_bytes)}), {trace.num_unique:,} different, "
        f"{100 * report.reachable_rate:.2f} % within reach"
    )
