# SPDX-License-Identifier: Apache-2.0
"""``kvoffload explain``: why prompts were computed although they might have been found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer

from kvoffload.cli import scenario
from kvoffload.cli.output import DrawnOut, Json, check_drawn, positive, print_json, print_table, progress, write_drawn
from kvoffload.cli.scenario import GpuKVTokens, PrefillSpeed, Processes, device_blocks
from kvoffload.sim.explain import (
    Explanations,
    WhatIf,
    advice_on,
    ask_what_if,
    base_config,
    read_explanations,
    recommendation,
    what_ifs,
)
from kvoffload.sim.page import draw_explanation
from kvoffload.sim.report import NO_FORECAST, explanation_tables, figures_of, format_seconds
from kvoffload.sim.result import quantiles
from kvoffload.units import counted, parse_bytes


def explain(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="File that a server wrote with record_trace.")],
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Total size of all tiers below host memory, if the trace does not contain it; 0 for none.",
        ),
    ] = None,
    gpu_kv_tokens: GpuKVTokens = None,
    prefill_speed: PrefillSpeed = None,
    processes: Processes = None,
    as_json: Json = False,
    out: DrawnOut = None,
) -> None:
    """Say why prompts of a recorded trace were computed.

    Summarises where tokens were found, why the others were computed, and which change would save most.
    """
    if prefill_speed is not None:
        positive(prefill_speed, "--prefill-speed")
    check_drawn(out)
    summary = read_explanations(trace)
    loaded = summary.trace
    scenario.warn_if_cut(trace, loaded)
    speed, source = scenario.prefill_speed(prefill_speed, loaded)
    read_s = summary.read_blocks_per_s
    base = base_config(
        summary.machine,
        disk_bytes=None if disk is None else 0 if disk == "0" else parse_bytes(disk, "--disk"),
        gpu_blocks=device_blocks(loaded, gpu_kv_tokens),
        footprint_blocks=loaded.whole_blocks().num_unique,
        prefill_tokens_per_s=speed,
        disk_read_bytes_per_s=read_s * summary.machine.block_bytes if read_s and summary.machine else None,
    )
    base = replace(base, step_s=loaded.step_s, decode_s=loaded.decode_s)
    has_unbounded_disk = disk is None and summary.machine is not None and summary.machine.has_unbounded_tier
    changes = what_ifs(base, has_unbounded_disk=has_unbounded_disk)
    with progress(loaded.name, len(changes), "runs") as advance:
        asked = ask_what_if(loaded, changes, processes, advance)
    figures = _as_json(summary, asked)
    if as_json:
        print_json(figures)
    else:
        _print(loaded.name, summary, asked, speed, source)
    write_drawn(out, figures, lambda is_page: draw_explanation(loaded.name, summary, asked, speed, is_page))


def _as_json(summary: Explanations, asked: list[WhatIf]) -> dict[str, Any]:
    return {
        "requests": len(summary.trace),
        "with_story": summary.explained,
        "tokens": summary.tokens,
        "found": summary.found,
        "missed": summary.missed,
        "avoidable": summary.avoidable,
        "hints": summary.hints,
        "recommendation": recommendation(asked, summary.tokens),
        "lost_s": summary.lost_s,
        "waits_s": {
            phase: {"requests": len(seconds), **quantiles(seconds)} for phase, seconds in summary.waits_s.items()
        },
        "weighed_s": {
            tier: {place: quantiles(seconds) for place, seconds in by_place.items()}
            for tier, by_place in summary.weighed_s.items()
        },
        "what_if": [
            {"change": each.change, "more_tokens": each.more_tokens, "saved_s": each.saved_s, **figures_of(each.result)}
            for each in asked
        ],
    }


def _print(name: str, summary: Explanations, asked: list[WhatIf], prefill_speed: float, source: str) -> None:
    print(
        f"{name}: {counted(len(summary.trace), 'request')}, {summary.explained:,} explained; "
        f"{summary.tokens:,} prompt tokens."
    )
    if summary.hints_text:
        print(summary.hints_text)
    for title, table in explanation_tables(summary, asked).items():
        sentences = "meaning"
        print_table(table.without([sentences])._replace(left_out=()), f"\n{title}")
        for cause in summary.missed if sentences in table.headings else ():
            print(fill(f"{cause}: {advice_on(cause)}", 80, subsequent_indent="  "))
    lost = format_seconds(summary.avoidable / prefill_speed)
    print(f"\n{summary.avoidable:,} computed tokens could have been found.")
    print(f"They cost {lost} of prefill, at {prefill_speed:,.0f} tokens/s ({source}).")
    print(NO_FORECAST)
    print(fill(f"Recommendation: {recommendation(asked, summary.tokens)}", 80))
