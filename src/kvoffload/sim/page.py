# SPDX-License-Identifier: Apache-2.0
"""Pictures and HTML pages of runs and of explanations. A page needs no other file, and fits screens of any width."""

from __future__ import annotations

import html
import importlib
import io
from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import Any

from kvoffload.errors import MissingExtraError
from kvoffload.sim.config import Prices
from kvoffload.sim.explain import Explanations, WhatIf, recommendation, where_names
from kvoffload.sim.report import NO_FORECAST, explanation_tables, format_seconds, runs_table
from kvoffload.sim.result import Result
from kvoffload.sim.sweep import Report
from kvoffload.sim.table import Table
from kvoffload.units import counted

_COLOURS = ("#1f6fb4", "#d9730d", "#2f9e44", "#8b5cf6", "#c2255c", "#0b7285", "#868e96")
_GREY, _LINES, _COMPUTED = "#495057", "#e9ecef", "#ced4da"
_STYLE = """
:root{color-scheme:light dark;--soft:#6c757d;--line:#8884}
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:0 auto;padding:1.2em}
h1{font-size:1.5em;margin:.2em 0}h2{font-size:1.15em;margin:1.8em 0 .4em}p.lead{color:var(--soft);margin:.2em 0 1em}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35em .6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:600;font-size:.88em}th:first-child,td:first-child,.text{text-align:left}
td.text{color:var(--soft);min-width:14em;white-space:normal}svg{width:100%;height:auto;background:#fff}
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


# ---------------------------------------------------------------------------------------------------------------- runs


def draw_reports(
    reports: Sequence[Report], prices: Prices, is_page: bool, said: Sequence[str] = (), notes: Sequence[str] = ()
) -> bytes:
    """Hit rate and time to first token against the price of an hour: as a PNG, or as a page with the tables.

    ``said`` (the verdict and warnings) comes first, ``notes`` (the assumptions) last."""
    height = 4.4 * len(reports)
    figure, grid = pyplot().subplots(len(reports), 2, figsize=(12, height), squeeze=False, layout="constrained")
    for (left, right), report in zip(grid, reports, strict=True):
        _draw_runs(left, report, prices, "blocks hit, %", lambda run: 100 * run.hit_rate)
        _draw_runs(right, report, prices, "first token, p90 (logarithmic)", lambda run: run.ttft_s["p90"])
        left.axhline(100 * report.reachable_rate, color=_GREY, linewidth=1, label="everything kept")
        left.set_ylim(bottom=0)
        right.set_yscale("log")
        ticker = importlib.import_module("matplotlib.ticker")
        right.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        right.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
        right.yaxis.set_minor_formatter(ticker.NullFormatter())
        left.legend(frameon=False, fontsize=8, loc="lower right")
    if not is_page:
        if said:
            figure.suptitle("\n".join(line for text in said for line in wrap(text, 110)), fontsize=10, ha="center")
        if notes:
            figure.supxlabel("\n".join(notes), fontsize=7, x=0.01, ha="left", family="monospace", color=_GREY)
        return _png(figure)
    parts = [f"<p><b>{html.escape(text)}</b></p>" for text in said]
    parts += [f"<p class=lead>{NO_FORECAST}</p>", _svg(figure)]
    for report in reports:
        parts += [f"<h2>{html.escape(report.trace.name)}</h2>", _table(runs_table(report, prices))]
    if notes:
        parts.append(f"<pre>{html.escape(chr(10).join(notes))}</pre>")
    return _page("kvoffload simulate", parts)


def _draw_runs(axis: Any, report: Report, prices: Prices, what: str, figure: Callable[[Result], float]) -> None:
    """Draw a line for each kind of run, by rising price. The server without tiers is a dotted line across."""
    _bare(axis, f"{report.trace.name}: {len(report.trace):,} requests")
    kinds: dict[str, list[Result]] = {}
    for run in report.results:
        router = f", {run.config.router}" if run.config.servers > 1 else ""
        below = "".join(f", {name}" for name in ("disk", "pool", "shared") if _has(run, name))
        kinds.setdefault(f"{run.server.policy}{router}{below}", []).append(run)
    for colour, (kind, runs) in zip(_COLOURS * 9, kinds.items()):
        runs = sorted(runs, key=lambda run: prices.of_fleet(run.config))
        axis.plot([prices.of_fleet(run.config) for run in runs], [*map(figure, runs)], "o-", color=colour, label=kind)
    if report.without is not None:
        axis.axhline(figure(report.without), color=_GREY, linewidth=1, linestyle=":", label="without tiers")
    axis.set_xlabel(f"{prices.unit} of an hour, servers included")
    axis.set_ylabel(what)


def _has(run: Result, tier: str) -> bool:
    return bool(run.server.disk_blocks if tier == "disk" else getattr(run.config, tier))


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
    lost = format_seconds(summary.avoidable / prefill_speed)
    lead = (
        f"{counted(len(summary.trace), 'request')}, {summary.explained:,} explained. Found tokens came from the "
        f"device, host memory or a tier; the rest was computed. {html.escape(summary.hints_text)} {NO_FORECAST}"
    )
    parts = [
        f"<p><b>{html.escape(recommendation(asked, summary.tokens))}</b></p>",
        f"<p class=lead>{lead}</p>",
        f"<p>{summary.avoidable:,} computed tokens could have been found. They cost {lost} of prefill.</p>",
        svg,
    ]
    for title, table in explanation_tables(summary, asked).items():
        parts += [f"<h2>{title}</h2>", _table(table, sentences="meaning")]
    return _page(f"Why prompts were computed: {name}", parts)


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
