# SPDX-License-Identifier: Apache-2.0
"""Drawings and HTML pages of sweeps, fleets and explanations. A page needs nothing else, for screens of any width."""

from __future__ import annotations

import html
import importlib
import io
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from kvoffload.errors import MissingExtraError
from kvoffload.sim.config import Prices
from kvoffload.sim.explain import Explanations, WhatIf, where_names
from kvoffload.sim.report import (
    NO_FORECAST,
    best_policy,
    curve,
    explanation_tables,
    fleet_table,
    format_seconds,
    frontier,
    handovers,
    knee_of,
    moved_blocks,
    names_of,
    outage_table,
    server_table,
    sweep_table,
)
from kvoffload.sim.result import Result
from kvoffload.sim.sweep import Report
from kvoffload.sim.table import Table
from kvoffload.sim.trace import Trace
from kvoffload.units import counted, format_bytes

_COLOURS = ("#1f6fb4", "#d9730d", "#2f9e44", "#8b5cf6", "#c2255c", "#0b7285", "#868e96")
_GREY, _LINES, _COMPUTED = "#495057", "#e9ecef", "#ced4da"
_STYLE = """
:root{color-scheme:light dark;--ink:#212529;--soft:#6c757d;--line:#dee2e6;--paper:#fff;--card:#f8f9fa}
@media(prefers-color-scheme:dark){:root{--ink:#e9ecef;--soft:#adb5bd;--line:#495057;--paper:#16191d;--card:#212529}}
*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:0 auto;padding:1.2em;
color:var(--ink);background:var(--paper)}h1{font-size:1.5em;margin:.2em 0}h2{font-size:1.15em;margin:1.8em 0 .4em}
p.lead{color:var(--soft);margin:.2em 0 1em}.cards{display:grid;gap:.7em;grid-template-columns:repeat(auto-fit,
minmax(9.5em,1fr))}.card{background:var(--card);border:1px solid var(--line);border-radius:.5em;padding:.6em .8em}
.card b{display:block;font-size:1.5em}.card span{color:var(--soft);font-size:.88em}
.bar{display:flex;height:1.9em;border-radius:.4em;overflow:hidden;margin:.5em 0}.bar i{display:block}
.legend{display:flex;flex-wrap:wrap;gap:.2em 1.1em;color:var(--soft);font-size:.9em}.legend i{display:inline-block;
width:.8em;height:.8em;border-radius:.15em;margin-right:.4em}.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35em .6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:600;font-size:.88em}th:first-child,td:first-child,.text{text-align:left}
td.text{color:var(--soft);min-width:14em;white-space:normal}
svg{width:100%;height:auto;background:#fff;border-radius:.5em}summary{padding:.3em 0}
"""


def pyplot() -> Any:
    """Raises ``MissingExtraError`` without matplotlib."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as exc:
        raise MissingExtraError("Plots need kvoffload's extra 'sim': pip install matplotlib.") from exc


def _png(figure: Any) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    pyplot().close(figure)
    return drawn.getvalue()


def _svg(figure: Any) -> str:
    """As an element of a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    pyplot().close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _page(title: str, parts: Sequence[str]) -> bytes:
    head = (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
    )
    return "".join([head, *parts, "</body></html>\n"]).encode()


def _table(table: Table, sentences: str = "") -> str:
    """``sentences``: the heading of a column that has some."""
    kinds = [" class=text" if heading == sentences else "" for heading in table.headings]

    def line(cells: Sequence[str], tag: str) -> str:
        filled = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(filled)}</tr>"

    rows = "".join(line(row, "td") for row in table.rows)
    return f"<div class=wide><table>{line(table.headings, 'th')}{rows}</table></div>"


def _bare(axis: Any, title: str) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color=_LINES, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")


# -------------------------------------------------------------------------------------------------------------- sweeps


def draw_sweeps(reports: Sequence[Report], is_page: bool, said: Sequence[str] = (), notes: Sequence[str] = ()) -> bytes:
    """Hit rate, bytes moved and prefill saved over host memory: as a PNG, or as a page with the tables.

    ``said`` (the verdict and warnings) comes first, ``notes`` (the assumptions) last."""
    figure, grid = pyplot().subplots(
        len(reports), 3, figsize=(15, 4.4 * len(reports)), squeeze=False, layout="constrained", width_ratios=(1.3, 1, 1)
    )
    for axes, report in zip(grid, reports, strict=True):
        _draw_hits(axes[0], report)
        _draw_bytes(axes[1], report)
        _draw_saved(axes[2], report)
    if not is_page:
        return _png(_captioned(figure, said, notes))
    parts = [*_paragraphs(said), f"<p class=lead>{NO_FORECAST}</p>", _svg(figure)]
    for report in reports:
        parts += [f"<h2>{html.escape(report.trace.name)}</h2>", _table(sweep_table(report))]
    return _page("kvoffload simulate", [*parts, *_assumed(notes)])


def _paragraphs(said: Sequence[str]) -> list[str]:
    return [f"<p><b>{html.escape(text)}</b></p>" for text in said]


def _assumed(notes: Sequence[str]) -> list[str]:
    text = html.escape("\n".join(notes))
    return [f"<pre>{text}</pre>"] if notes else []


def _captioned(figure: Any, said: Sequence[str], notes: Sequence[str]) -> Any:
    """The figure with the verdict above it and the assumptions below."""
    if said:
        figure.suptitle("\n".join(line for text in said for line in wrap(text, 110)), fontsize=10, ha="center")
    if notes:
        figure.supxlabel("\n".join(notes), fontsize=7, x=0.01, ha="left", family="monospace", color=_GREY)
    return figure


def _policies(report: Report) -> list[str]:
    return list(dict.fromkeys(result.policy for result in report.results))


def _sizes_gib(report: Report, policy: str) -> list[float]:
    return [run.cpu_blocks * report.block_bytes / 2**30 for run, _ in curve(report, policy)]


def _size_axis(axis: Any, report: Report, policy: str) -> None:
    ticker = importlib.import_module("matplotlib.ticker")
    sizes = _sizes_gib(report, policy)
    axis.set_xscale("log")
    shown = [size for at, size in enumerate(sizes) if at == 0 or size > 1.4 * sizes[at - 1]]
    axis.set_xticks(shown, [format_bytes(size * 2**30) for size in shown], rotation=30, ha="right")
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlabel("host memory for KV blocks (logarithmic)")


def _draw_hits(axis: Any, report: Report) -> None:
    best = best_policy(report)
    _bare(axis, f"{report.trace.name}: hit rate")
    for colour, policy in zip(_COLOURS * 9, _policies(report)):
        rates = [100 * run.hit_rate for run, _ in curve(report, policy)]
        axis.plot(_sizes_gib(report, policy), rates, "o-", color=colour, markersize=4, label=policy)
    bounds = [100 * bound for _, bound in curve(report, best)]
    axis.plot(_sizes_gib(report, best), bounds, "--", color=_GREY, label="optimum (knows the future)")
    axis.axhline(100 * report.reachable_rate, color="#adb5bd", linewidth=1)
    if report.without is not None:
        axis.axhline(100 * report.without.hit_rate, color=_GREY, linewidth=1, linestyle=":", label="without tiers")
    axis.annotate(
        f"everything kept: {100 * report.reachable_rate:.1f} %",
        (1, 100 * report.reachable_rate),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color=_GREY,
        fontsize=9,
    )
    bend = knee_of(report, best)
    point = bend.cpu_blocks * report.block_bytes / 2**30, 100 * bend.hit_rate
    axis.plot(*point, "o", markersize=13, markerfacecolor="none", markeredgecolor=_GREY)
    axis.annotate(
        f"knee: {format_bytes(bend.cpu_blocks * report.block_bytes)}, {point[1]:.1f} %",
        point,
        xytext=(14, -22),
        textcoords="offset points",
        color=_GREY,
        fontsize=9,
    )
    _size_axis(axis, report, best)
    axis.set_ylim(0, min(105, 115 * max(report.reachable_rate, 0.01)))
    axis.set_ylabel("blocks hit, %")
    axis.legend(frameon=False, fontsize=9, loc="lower right")


def _draw_bytes(axis: Any, report: Report) -> None:
    best = best_policy(report)
    _bare(axis, f"bytes moved ({best})")
    runs = [run for run, _ in curve(report, best)]
    kinds: list[tuple[str, list[int]]] = [
        ("loaded to the device", [run.sum_of("loaded_blocks") for run in runs]),
        ("stored from the device", [run.sum_of("stored_blocks") for run in runs]),
    ]
    if any(run.disk_blocks for run in runs):
        kinds.append(("read from disk", [moved_blocks(run, "read") for run in runs]))
        kinds.append(("written to disk", [moved_blocks(run, "written") for run in runs]))
    most = max(max(values) for _, values in kinds) * report.block_bytes
    unit, name = (2**40, "TiB") if most >= 2**40 else (2**30, "GiB")
    for colour, (label, values) in zip(_COLOURS, kinds):
        shown = [value * report.block_bytes / unit for value in values]
        axis.plot(_sizes_gib(report, best), shown, "o-", color=colour, markersize=4, label=label)
    _size_axis(axis, report, best)
    axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{name} over the whole trace")
    axis.legend(frameon=False, fontsize=9)


def _draw_saved(axis: Any, report: Report) -> None:
    _bare(axis, "prefill saved")
    for colour, policy in zip(_COLOURS * 9, _policies(report)):
        shares = [
            100 * run.saved_prefill_s / (run.saved_prefill_s + run.sum_of("prefill_s") or 1)
            for run, _ in curve(report, policy)
        ]
        axis.plot(_sizes_gib(report, policy), shares, "o-", color=colour, markersize=4, label=policy)
    _size_axis(axis, report, best_policy(report))
    axis.set_ylim(bottom=0)
    axis.set_ylabel("% of the prefill time without offloading")


# -------------------------------------------------------------------------------------------------------------- fleets


def draw_fleets(
    replayed: Sequence[tuple[Trace, Sequence[Result]]],
    prices: Prices,
    is_page: bool,
    said: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> bytes:
    """Time to first token against cost, of each trace: as a PNG, or as a page with the tables. ``said`` and ``notes``
    as in ``draw_sweeps``."""
    height = 5.4 * len(replayed)
    figure, grid = pyplot().subplots(len(replayed), 1, figsize=(9, height), squeeze=False, layout="constrained")
    for (axis,), (trace, results) in zip(grid, replayed, strict=True):
        _draw_costs(axis, trace, results, prices)
    if not is_page:
        return _png(_captioned(figure, said, notes))
    parts = [*_paragraphs(said), f"<p class=lead>{NO_FORECAST}</p>", _svg(figure)]
    for trace, results in replayed:
        parts += [f"<h2>{html.escape(trace.name)}</h2>", _table(fleet_table(results, prices))]
        parts += [f"<p>{html.escape(text)}</p>" for text in handovers(results)]
        if outages := outage_table(results):
            parts += ["<h2>Outages: before / during / after</h2>", _table(outages)]
        parts.append("<h2>Servers</h2>")
        for name, result in zip(names_of(results), results, strict=True):
            title = html.escape(name)
            parts.append(f"<details><summary>{title}</summary>{_table(server_table(result))}</details>")
    return _page("kvoffload simulate", [*parts, *_assumed(notes)])


def _draw_costs(axis: Any, trace: Trace, results: Sequence[Result], prices: Prices) -> None:
    """Fleets at one place are rings around each other, with one label."""
    _bare(axis, f"{trace.name}: {len(trace):,} requests; numbers are servers")

    def place(result: Result) -> tuple[float, float]:
        return result.cost_per_million_tokens(prices), result.ttft_s["p90"]

    routers = dict(zip(dict.fromkeys(result.config.router for result in results), _COLOURS * 9))
    places: dict[tuple[str, ...], tuple[tuple[float, float], list[str]]] = {}
    kinds = set[str]()
    for result in results:
        at = place(result)
        _, here = places.setdefault(tuple(f"{value:.2g}" for value in at), (at, []))
        is_shared = result.config.shared is not None
        kind = f"{result.config.router}, {'shared tier' if is_shared else 'no shared tier'}"
        axis.scatter(
            *at,
            s=30 * (1 + 2 * len(here)),
            facecolors="none",
            edgecolors=routers[result.config.router],
            marker="o" if is_shared else "s",
            label=None if kind in kinds else kind,
        )
        kinds.add(kind)
        here.append(str(result.config.servers))
    for at, here in places.values():
        axis.annotate(", ".join(dict.fromkeys(here)), at, xytext=(7, 5), textcoords="offset points", fontsize=8)
    best = frontier(results, prices)
    if best:
        costs, firsts = zip(*map(place, best))
        axis.plot(costs, firsts, color=_GREY, linewidth=1, drawstyle="steps-post", label="frontier")
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_minor_locator(ticker.LogLocator(subs="all"))
    axis.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    axis.grid(which="minor", axis="y", color=_LINES, linewidth=0.4)
    axis.set_xlabel("cost of a million prompt tokens")
    axis.set_ylabel("first token, p90 (logarithmic)")
    axis.legend(fontsize=8)


# -------------------------------------------------------------------------------------------------------- explanations


def draw_explanation(
    name: str, summary: Explanations, asked: Sequence[WhatIf], prefill_speed: float, is_page: bool
) -> bytes:
    """Where tokens came from over time as a PNG, or the whole page."""
    figure, axis = pyplot().subplots(figsize=(9, 3.8), layout="constrained")
    _draw_course(axis, summary)
    return _explanation_page(name, summary, asked, prefill_speed, _svg(figure)) if is_page else _png(figure)


def _explanation_page(
    name: str, summary: Explanations, asked: Sequence[WhatIf], prefill_speed: float, svg: str
) -> bytes:
    best = next((each for each in asked[1:] if each.more_tokens > 0), None)
    cards = [
        (f"{100 * sum(summary.found.values()) / summary.tokens:.1f} %", "of the prompt tokens were found"),
        (f"{summary.tokens:,}", f"prompt tokens of {counted(summary.explained, 'request')}"),
        (f"{summary.avoidable:,}", "computed tokens that could have been found"),
        (format_seconds(summary.avoidable / prefill_speed), f"of prefill they cost, at {prefill_speed:,.0f} tokens/s"),
    ]
    if best is not None:
        cards.append((f"+{100 * best.more_tokens / summary.tokens:.1f} %", f"most, with {best.change}"))
    lead = (
        f"{counted(summary.requests, 'request')}, {summary.explained:,} explained. What was found came from the "
        f"device, host memory or a tier; the rest was computed. {html.escape(summary.hints_text)} {NO_FORECAST}"
    )
    parts = [
        f"<p class=lead>{lead}</p><div class=cards>",
        *(f"<div class=card><b>{html.escape(big)}</b><span>{html.escape(small)}</span></div>" for big, small in cards),
        "</div>",
        *_bar(summary),
    ]
    for title, table in explanation_tables(summary, asked).items():
        parts += [f"<h2>{title}</h2>", _table(table, sentences="what it means")]
    parts += ["<h2>Over time</h2>", svg]
    return _page(f"Why prompts were computed: {name}", parts)


def _bar(summary: Explanations) -> list[str]:
    pieces = [
        (word, summary.found[key], colour) for (key, word), colour in zip(where_names(summary.found), _COLOURS * 3)
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


def _draw_course(axis: Any, summary: Explanations) -> None:
    _bare(axis, "where tokens came from")
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
        colors=[*(_COLOURS * 3)[: len(keys)], _COMPUTED],
        labels=[*(word for _, word in keys), "computed"],
        step="pre",
    )
    axis.set_ylim(0, 100)
    axis.set_xlim(0, ends[-1] / unit)
    axis.set_xlabel(f"{name} since the first request")
    axis.set_ylabel("% of the prompt tokens")
    axis.legend(fontsize=8, loc="lower right")
