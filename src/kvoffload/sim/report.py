# SPDX-License-Identifier: Apache-2.0
"""The results of a sweep as rows, JSON and an HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from kvoffload.sim import page
from kvoffload.sim.driver import SimResult
from kvoffload.sim.sweep import Report, knee
from kvoffload.units import format_bytes

__all__ = ["as_json", "as_page", "best_policy", "curve", "format_seconds", "knee_of", "saturation", "table"]

_HEADINGS = (
    "policy",
    "memory",
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
    "gained",
    "busy %",
)
_NARROW = ("policy", "memory", "disk", "hits %", "TTFT p50", "gained")
SATURATED = 0.9
"""The utilisation above which times only say that the server is too slow."""


def table(report: Report, is_wide: bool = True) -> tuple[list[str], list[list[str]]]:
    """The headings and one row per run, the one without offloading first, without the columns of tiers that no run has.

    *gained* is the mean time to first token that the run saves against the one without offloading. Otherwise than
    ``is_wide`` a terminal of 80 columns holds the table.
    """
    runs = list(zip(report.results, report.optimum_rates, strict=True))
    full = [_row(report, result, bound) for result, bound in runs]
    if report.without is not None:
        full.insert(0, _row(report, report.without, None))
    unused = set() if is_wide else {*_HEADINGS} - {*_NARROW}
    if report.without is None:
        unused.add("gained")
    if not any(result.gpu_blocks for result in report.results):
        unused.add("gpu %")
    if not any(result.disk_blocks for result in report.results):
        unused |= {"disk", "disk %", "declined %", "disk written"}
        if "gpu %" in unused:
            unused.add("cpu %")  # all hits are
    kept = [at for at, heading in enumerate(_HEADINGS) if heading not in unused]
    return [_HEADINGS[at] for at in kept], [[row[at] for at in kept] for row in full]


def _row(report: Report, result: SimResult, bound: float | None) -> tuple[str, ...]:
    def percent(blocks: int) -> str:
        return f"{100 * blocks / max(result.accesses, 1):.2f}"

    without = report.without
    policy = f"{result.policy}, {result.cascade}" if result.disk_blocks else result.policy
    return (
        policy if result.cpu_blocks else "none",
        format_bytes(result.cpu_blocks * report.block_bytes) if result.cpu_blocks else "-",
        format_bytes(result.disk_blocks * report.block_bytes) if result.disk_blocks else "-",
        f"{100 * result.hit_rate:.2f}",
        percent(result.gpu_hit_blocks),
        percent(result.cpu_hit_blocks),
        percent(result.disk_hit_blocks),
        percent(result.declined_blocks),
        f"{100 * bound:.2f}" if bound is not None else "-",
        format_bytes(result.loaded_bytes),
        format_bytes(result.stored_bytes),
        format_bytes(result.disk_written_bytes) if result.disk_blocks else "-",
        format_seconds(result.saved_prefill_s),
        format_seconds(result.ttft_s["p50"]),
        format_seconds(result.ttft_s["p99"]),
        format_seconds(without.ttft_s["mean"] - result.ttft_s["mean"]) if without and result is not without else "-",
        f"{100 * result.utilisation:.0f}",
    )


def format_seconds(value: float) -> str:
    """Three digits, of milliseconds below a second."""
    if abs(value) < 1:
        return f"{1000 * value:.3g} ms" if abs(value) >= 1e-4 else "0 ms"
    return f"{value:,.0f} s" if abs(value) >= 100 else f"{value:.3g} s"


def saturation(results: Iterable[SimResult]) -> str:
    """What to say of runs whose server cannot keep up; empty if there is none."""
    busy = [result.utilisation for result in results if result.utilisation > SATURATED]
    if not busy:
        return ""
    return (
        f"{len(busy)} of the runs cannot keep up with this trace: their one server is busy {100 * min(busy):.0f} % of "
        "the time or more, and requests queue. Their hit rates hold; their times only say that the server is too slow. "
        "--stretch of simulate, or a higher --prefill-speed, gives a load that one server can carry."
    )


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
            "without_offloading": None if report.without is None else asdict(report.without),
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
    parts = [svg]
    for report in reports:
        parts += [f"<h2>{html.escape(report.trace.name)}</h2>", page.table(*table(report))]
    return page.page("kvoffload simulate", *parts)
