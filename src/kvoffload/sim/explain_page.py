# SPDX-License-Identifier: Apache-2.0
"""The page of ``kvoffload explain``: one HTML file that needs nothing else, for screens of any width; and its plots."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvoffload.sim.explain import Explanations, WhatIf, advice_on, percentiles, where_names
from kvoffload.sim.page import COLOURS, check_target, page, pyplot, save_small_png, svg_of, table, whole_file
from kvoffload.units import format_bytes

__all__ = ["as_page", "what_if_text", "write_explanation"]

_COMPUTED = "#ced4da"


def write_explanation(
    path: Path, name: str, summary: Explanations, asked: Sequence[WhatIf], prefill_speed: float
) -> None:
    """Writes the page (.html) or its plots side by side (.png). The whole file or nothing."""
    check_target(path)
    with whole_file(path) as file:
        if path.suffix.lower() == ".html":
            file.write_text(as_page(name, summary, asked, prefill_speed))
        else:
            plots = _plots(summary, asked)
            figure, axes = pyplot().subplots(1, len(plots), figsize=(6.2 * len(plots), 3.8), layout="constrained")
            for axis, draw in zip(axes, plots, strict=True):
                draw(axis)
            save_small_png(figure, file)
            pyplot().close(figure)


def as_page(name: str, summary: Explanations, asked: Sequence[WhatIf], prefill_speed: float) -> str:
    """The whole page."""
    found = sum(tokens for where, tokens in summary.found.items())
    avoidable_s = summary.avoidable / prefill_speed
    title = f"Why prompts were computed: {name}"
    best = next((each for each in asked[1:] if each.more_tokens > 0), None)
    cards = [
        (f"{100 * found / summary.tokens:.1f} %", "of the prompt tokens were found"),
        (f"{summary.tokens:,}", f"prompt tokens of {summary.explained:,} requests"),
        (f"{summary.avoidable:,}", "computed tokens that could have been found"),
        (_seconds(avoidable_s), f"of prefill they cost, at {prefill_speed:,.0f} tokens/s"),
    ]
    if best is not None:
        cards.append((f"+{100 * best.more_tokens / summary.tokens:.1f} %", f"most, with {best.change}"))
    parts = [
        f"<p class=lead>{summary.requests:,} requests, {summary.explained:,} of them explained. What was found ",
        "came from the device, host memory or a tier; the rest was computed.</p><div class=cards>",
        *(f"<div class=card><b>{html.escape(big)}</b><span>{html.escape(small)}</span></div>" for big, small in cards),
        "</div><h2>Where the tokens came from</h2>",
        *_bar(summary),
        "<h2>Why the rest was computed</h2>",
        table(
            ("cause", "tokens", "share", "lost before", "what it means"),
            [
                (
                    cause,
                    f"{tokens:,}",
                    f"{100 * tokens / summary.tokens:.1f} %",
                    _seconds(summary.lost_s[cause]) if cause in summary.lost_s else "",
                    advice_on(cause),
                )
                for cause, tokens in summary.missed.items()
            ],
            sentences="what it means",
        ),
        "<h2>What would have saved most</h2><p class=lead>The simulator's figures for the same trace. ",
        "It serves one request at a time, so compare its lines with each other.</p>",
        table(
            ("change", "found", "more tokens", "saved prefill", ""),
            [what_if_text(each, summary.tokens) for each in asked],
        ),
        "<h2>What requests waited for</h2>",
        table(
            ("for", "requests", "p50", "p90", "longest"),
            [
                (phase, f"{len(seconds):,}", *map(_seconds, percentiles(seconds).values()))
                for phase, seconds in sorted(summary.waits_s.items(), key=lambda item: -sum(item[1]))
            ],
        ),
        "<h2>Plots</h2><div class=plots>",
        *(f"<div>{_svg(draw)}</div>" for draw in _plots(summary, asked)),
        "</div>",
    ]
    return page(title, *parts)


def what_if_text(asked: WhatIf, tokens: int) -> tuple[str, str, str, str, str]:
    """A row: the change, what is found, how much more, the prefill saved, the sizes."""
    config = asked.config
    sizes = format_bytes(config.cpu_blocks * config.block_bytes)
    if config.disk_blocks:
        sizes += f" + {format_bytes(config.disk_blocks * config.block_bytes)} disk"
    more = f"{asked.more_tokens:+,} ({100 * asked.more_tokens / max(tokens, 1):+.1f} %)" if asked.more_tokens else "0"
    return (
        asked.change,
        f"{100 * asked.result.token_hit_rate:.1f} %",
        more,
        _seconds(asked.saved_s) if asked.more_tokens else "",
        f"{sizes}, {config.policy}",
    )


def _bar(summary: Explanations) -> list[str]:
    pieces = [
        (word, summary.found[key], colour) for (key, word), colour in zip(where_names(summary.found), COLOURS * 3)
    ]
    pieces.append(("computed", sum(summary.missed.values()), _COMPUTED))
    parts = ["<div class=bar role=img aria-label='shares of the prompt tokens'>"]
    parts += [
        f'<i style="width:{100 * tokens / summary.tokens:.4f}%;background:{colour}"></i>'
        for _, tokens, colour in pieces
    ]
    parts.append("</div><div class=legend>")
    parts += [
        f'<span><i style="background:{colour}"></i>{html.escape(word)} {100 * tokens / summary.tokens:.1f} %</span>'
        for word, tokens, colour in pieces
    ]
    return [*parts, "</div>"]


def _seconds(value: float) -> str:
    if abs(value) >= 3600:
        return f"{value / 3600:,.1f} h"
    return f"{value:,.0f} s" if abs(value) >= 100 else f"{value:.3g} s" if abs(value) >= 1 else f"{1000 * value:.3g} ms"


# --------------------------------------------------------------------------------------------------------------- plots


def _plots(summary: Explanations, asked: Sequence[WhatIf]) -> list[Callable[[Any], None]]:
    return [
        lambda axis: _draw_course(axis, summary),
        lambda axis: _draw_causes(axis, summary),
        lambda axis: _draw_what_ifs(axis, summary, asked),
    ]


def _svg(draw: Callable[[Any], None]) -> str:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.2, 3.8), layout="constrained")
    draw(axis)
    svg = svg_of(figure)
    plt.close(figure)
    return svg


def _plain(axis: Any, title: str) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")


def _draw_course(axis: Any, summary: Explanations) -> None:
    keys = where_names(summary.found)
    ends = [end_s for end_s, _ in summary.course]
    unit, name = (3600.0, "hours") if ends[-1] >= 7200 else (60.0, "minutes") if ends[-1] >= 120 else (1.0, "seconds")
    totals = [max(sum(tokens.values()), 1) for _, tokens in summary.course]
    shares = [
        [100 * tokens.get(key, 0) / total for (_, tokens), total in zip(summary.course, totals, strict=True)]
        for key in (*(key for key, _ in keys), "computed")
    ]
    axis.stackplot(
        [end / unit for end in ends],
        shares,
        colors=[*(COLOURS * 3)[: len(keys)], _COMPUTED],
        labels=[*(word for _, word in keys), "computed"],
        step="pre",
    )
    axis.set_ylim(0, 100)
    axis.set_xlim(0, ends[-1] / unit)
    axis.set_xlabel(f"{name} since the first request")
    axis.set_ylabel("% of the prompt tokens")
    axis.legend(fontsize=8, loc="lower right")
    _plain(axis, "where tokens came from")


def _draw_causes(axis: Any, summary: Explanations) -> None:
    shown = list(summary.missed.items())[:9][::-1]
    axis.barh([cause for cause, _ in shown], [100 * tokens / summary.tokens for _, tokens in shown], color=COLOURS[1])
    axis.grid(axis="x", color="#e9ecef")
    axis.set_xlabel("% of the prompt tokens")
    _plain(axis, "why the rest was computed")


def _draw_what_ifs(axis: Any, summary: Explanations, asked: Sequence[WhatIf]) -> None:
    shown = list(asked[1:])[::-1]
    values = [100 * each.more_tokens / summary.tokens for each in shown]
    colours = [COLOURS[2] if value >= 0 else COLOURS[4] for value in values]
    axis.barh([each.change for each in shown], values, color=colours)
    axis.axvline(0, color="#495057", linewidth=0.8)
    axis.grid(axis="x", color="#e9ecef")
    axis.set_xlabel("more tokens found, % of the prompt tokens")
    _plain(axis, "what would have saved most")
