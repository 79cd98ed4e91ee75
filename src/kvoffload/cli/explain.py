# SPDX-License-Identifier: Apache-2.0
"""``kvoffload explain``: why prompts were computed although they might have been found."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.cli.machine import GpuBlocks, GpuKVTokens, device_blocks, model_sizes
from kvoffload.cli.output import check_out, positive, progress, write_json
from kvoffload.errors import ConfigError
from kvoffload.sim.driver import SPEEDS
from kvoffload.sim.explain import (
    Explanations,
    WhatIf,
    advice_on,
    ask_what_if,
    base_config,
    percentiles,
    read_explanations,
    what_ifs,
    where_names,
)
from kvoffload.sim.explain_page import what_if_text, write_explanation
from kvoffload.sim.page import check_target
from kvoffload.sim.report import format_seconds
from kvoffload.sim.trace_files import load_trace
from kvoffload.units import parse_bytes

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command()(explain)


def explain(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="File that a server wrote with record_trace.")],
    cpu: Annotated[str | None, typer.Option(help="Host memory of the server, if the trace does not say it.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk of the server, if the trace does not say it; 0: none.")] = None,
    gpu_kv_tokens: GpuKVTokens = None,
    gpu_blocks: GpuBlocks = None,
    model: Annotated[
        str | None, typer.Option(help="The model, if the trace does not say the size of its blocks.")
    ] = None,
    kv_bytes: Annotated[
        str | None, typer.Option("--kv-bytes-per-token", help="KV bytes per token, if the trace does not say them.")
    ] = None,
    prefill_speed: Annotated[
        float, typer.Option(help="Tokens that the device prefills per second.")
    ] = SPEEDS.prefill_tokens_per_s,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes to use. By default one per core.")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="File to write the same to as a web page.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File to draw the plots to: .png.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Say why prompts of a recorded trace were computed.

    Sums up what was found where, why the rest was computed, and what would save most.
    """
    positive(prefill_speed, "--prefill-speed")
    check_out(json_file)
    for path, option, suffix in ((page, "--html", ".html"), (plot, "--plot", ".png")):
        if path is not None:
            if path.suffix.lower() != suffix:
                raise ConfigError(f"{option} is a {suffix} file, not {path.name!r}.")
            check_target(path)
    sizes = None if model is None and kv_bytes is None else model_sizes(model, kv_bytes)
    summary = read_explanations(trace)
    loaded = load_trace(trace)
    base = base_config(
        summary.machine,
        cpu_bytes=None if cpu is None else parse_bytes(cpu, "--cpu"),
        disk_bytes=None if disk is None else 0 if disk == "0" else parse_bytes(disk, "--disk"),
        block_bytes=None if sizes is None else sizes.bytes_per_token * loaded.block_tokens,
        gpu_blocks=device_blocks(loaded, gpu_blocks, gpu_kv_tokens),
        footprint_blocks=loaded.whole_blocks().num_unique,
        prefill_tokens_per_s=prefill_speed,
    )
    has_unbounded_disk = disk is None and summary.machine is not None and summary.machine.has_unbounded_tier
    changes = what_ifs(base, has_unbounded_disk=has_unbounded_disk)
    with progress({loaded.name: len(changes)}, "runs") as advance:
        asked = ask_what_if(loaded, changes, processes, lambda _: advance(loaded.name))
    _print(loaded.name, summary, asked, prefill_speed)
    write_json(_as_json(summary, asked), json_file)
    for path in (page, plot):
        if path is not None:
            write_explanation(path, loaded.name, summary, asked, prefill_speed)


def _as_json(summary: Explanations, asked: list[WhatIf]) -> dict[str, Any]:
    return {
        "requests": summary.requests,
        "with_story": summary.explained,
        "tokens": summary.tokens,
        "found": summary.found,
        "missed": summary.missed,
        "avoidable": summary.avoidable,
        "hints": summary.hints,
        "lost_s": summary.lost_s,
        "waits_s": {
            phase: {"requests": len(seconds), **percentiles(seconds)} for phase, seconds in summary.waits_s.items()
        },
        "what_if": [
            {"change": each.change, "more_tokens": each.more_tokens, "saved_s": each.saved_s, **asdict(each.result)}
            for each in asked
        ],
    }


def _print(name: str, summary: Explanations, asked: list[WhatIf], prefill_speed: float) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)

    def percent(tokens: int) -> str:
        return f"{100 * tokens / summary.tokens:.1f} %"

    console.print(
        f"{name}: {summary.requests:,} requests, {summary.explained:,} explained; {summary.tokens:,} prompt tokens.",
        highlight=False,
    )
    where = Table(title="Where the tokens came from", title_justify="left")
    for heading in ("", "tokens", "share", ""):
        where.add_column(heading, justify="right" if heading else "left")
    rows = [(word, summary.found[key]) for key, word in where_names(summary.found)]
    for word, tokens in (*rows, ("computed", sum(summary.missed.values()))):
        where.add_row(word, f"{tokens:,}", percent(tokens), "█" * round(40 * tokens / summary.tokens))
    console.print(where)
    if summary.hints_text:
        console.print(summary.hints_text, highlight=False)
    why = Table(title="Why the rest was computed", title_justify="left")
    for heading in ("cause", "tokens", "share", "lost before", "what it means"):
        why.add_column(heading, justify="left" if heading in ("cause", "what it means") else "right")
    for cause, tokens in summary.missed.items():
        lost = f"{summary.lost_s[cause]:,.0f} s" if cause in summary.lost_s else ""
        why.add_row(cause, f"{tokens:,}", percent(tokens), lost, advice_on(cause))
    console.print(why)
    console.print(
        f"{summary.avoidable:,} of these tokens could have been found: {summary.avoidable / prefill_speed:,.0f} s of "
        f"prefill at {prefill_speed:,.0f} tokens/s.",
        highlight=False,
    )
    save = Table(title="What would have saved most, by the simulator on this trace", title_justify="left")
    for heading in ("change", "found", "more tokens", "saved prefill", "machine"):
        save.add_column(heading, justify="left" if heading in ("change", "machine") else "right")
    for each in asked:
        save.add_row(*what_if_text(each, summary.tokens))
    console.print(save)
    waits = Table(title="What requests waited for", title_justify="left")
    for heading in ("for", "requests", "p50", "p90", "longest"):
        waits.add_column(heading, justify="left" if heading == "for" else "right")
    for phase, seconds in sorted(summary.waits_s.items(), key=lambda item: -sum(item[1])):
        shown = [format_seconds(value) for value in percentiles(seconds).values()]
        waits.add_row(phase, f"{len(seconds):,}", *shown)
    console.print(waits)
