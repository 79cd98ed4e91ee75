# SPDX-License-Identifier: Apache-2.0
"""The results of a sweep as rows, JSON and an HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvoffload.sim.driver import SimResult
from kvoffload.sim.sweep import Report, knee
from kvoffload.units import format_bytes

__all__ = ["as_json", "as_page", "best_policy", "curve", "knee_of", "table"]

_HEADINGS = (
    "policy",
    "cpu",
    "disk",
    "hits %",
    "gpu %",
    "cpu %",
    "disk %",
    "declined %",
    "optimum %",
    "loaded",
    "stored",
    "disk written",
    "saved prefill",
    "TTFT p50",
    "p99",
    "busy %",
)


def table(report: Report) -> tuple[list[str], list[list[str]]]:
    """The headings and one row per run, without the columns of tiers that no run has."""
    full = [_row(report, result, bound) for result, bound in zip(report.results, report.optimum_rates, strict=True)]
    unused = set()
    if not any(result.gpu_blocks for result in report.results):
        unused.add("gpu %")
    if not any(result.disk_blocks for result in report.results):
        unused |= {"disk", "disk %", "declined %", "disk written"}
    if len(unused) == 5:
        unused.add("cpu %")  # all hits are
    kept = [at for at, heading in enumerate(_HEADINGS) if heading not in unused]
    return [_HEADINGS[at] for at in kept], [[row[at] for at in kept] for row in full]


def _row(report: Report, result: SimResult, bound: float) -> tuple[str, ...]:
    def percent(blocks: int) -> str:
        return f"{100 * blocks / max(result.accesses, 1):.2f}"

    return (
        f"{result.policy}, {result.cascade}" if result.disk_blocks else result.policy,
        format_bytes(result.cpu_blocks * report.block_bytes),
        format_bytes(result.disk_blocks * report.block_bytes) if result.disk_blocks else "-",
        f"{100 * result.hit_rate:.2f}",
        percent(result.gpu_hit_blocks),
        percent(result.cpu_hit_blocks),
        percent(result.disk_hit_blocks),
        percent(result.declined_blocks),
        f"{100 * bound:.2f}",
        format_bytes(result.loaded_bytes),
        format_bytes(result.stored_bytes),
        format_bytes(result.disk_written_bytes) if result.disk_blocks else "-",
        _seconds(result.saved_prefill_s),
        _seconds(result.ttft_s["p50"]),
        _seconds(result.ttft_s["p99"]),
        f"{100 * result.utilisation:.0f}",
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def as_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """All figures in plain values."""
    return [
        {
            "trace": report.trace.name,
            "requests": len(report.trace),
            "accesses": report.trace.num_accesses,
            "unique_blocks": report.trace.num_unique,
            "block_tokens": report.trace.block_tokens,
            "block_bytes": report.block_bytes,
            "reachable_hit_rate": report.reachable_rate,
            "runs": [
                asdict(result)
                | {
                    "hit_rate": result.hit_rate,
                    "token_hit_rate": result.token_hit_rate,
                    "optimum_hit_rate": bound,
                }
                for result, bound in zip(report.results, report.optimum_rates, strict=True)
            ],
        }
        for report in reports
    ]


def curve(report: Report, policy: str) -> list[tuple[SimResult, float]]:
    """(run, optimum) of one policy by rising host memory; of several disks the largest, of two cascades the better."""
    found: dict[int, tuple[SimResult, float]] = {}
    for result, bound in zip(report.results, report.optimum_rates, strict=True):
        if result.policy == policy:
            known = found.get(result.cpu_blocks)
            if known is None or _rank(known[0]) <= _rank(result):
                found[result.cpu_blocks] = result, bound
    return [found[size] for size in sorted(found)]


def _rank(result: SimResult) -> tuple[int, float]:
    return result.disk_blocks, result.hit_rate


def best_policy(report: Report) -> str:
    """The policy with the most hits, summed over all runs."""
    names = dict.fromkeys(result.policy for result in report.results)
    return max(names, key=lambda name: sum(result.hit_rate for result in report.results if result.policy == name))


def knee_of(report: Report, policy: str) -> SimResult:
    """The run at the curve's knee: beyond it more host memory brings less and less."""
    runs = [result for result, _ in curve(report, policy)]
    return runs[knee([run.cpu_blocks for run in runs], [run.hit_rate for run in runs])]


def as_page(reports: Sequence[Report], svg: str) -> str:
    """A self-contained HTML page: the plot, then the tables."""
    style = (
        "<!doctype html><html lang=en><meta charset=utf-8><title>kvoffload simulate</title><style>"
        "body{font:14px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}"
        "svg{width:100%;height:auto}table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}"
        "th,td{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}"
        "th:first-child,td:first-child{text-align:left}div{overflow-x:auto}</style>"
    )
    parts = [style, svg[svg.index("<svg") :]]
    for report in reports:
        parts.append(f"<h2>{html.escape(report.trace.name)}</h2><div><table><tr>")
        headings, rows = table(report)
        parts += [f"<th>{html.escape(heading)}</th>" for heading in headings]
        for row in rows:
            parts.append("</tr><tr>")
            parts += [f"<td>{html.escape(cell)}</td>" for cell in row]
        parts.append("</tr></table></div>")
    return "".join(parts) + "</html>\n"
