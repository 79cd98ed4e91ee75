# SPDX-License-Identifier: Apache-2.0
"""Plots a sweep: hit rate, bytes moved and saved prefill over host memory."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.sim.page import COLOURS, check_target, pyplot, write_drawing
from kvoffload.sim.report import as_page, best_policy, curve, knee_of
from kvoffload.sim.sweep import Report
from kvoffload.units import format_bytes

__all__ = ["write_plot"]

_GREY = "#495057"


def write_plot(reports: Sequence[Report], path: Path) -> None:
    """Draws the reports to ``path``, a PNG or an HTML page. Writes the whole file or nothing."""
    check_target(path)
    write_drawing(_draw(reports), path, lambda svg: as_page(reports, svg))


def _draw(reports: Sequence[Report]) -> Any:
    plt = pyplot()
    figure, grid = plt.subplots(
        len(reports), 3, figsize=(15, 4.4 * len(reports)), squeeze=False, layout="constrained", width_ratios=(1.3, 1, 1)
    )
    for axes, report in zip(grid, reports, strict=True):
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(color="#e9ecef", linewidth=0.8)
            axis.set_axisbelow(True)
        _draw_hits(axes[0], report)
        _draw_bytes(axes[1], report)
        _draw_saved(axes[2], report)
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
    axis.set_xlabel("host memory for KV blocks")


def _draw_hits(axis: Any, report: Report) -> None:
    best = best_policy(report)
    for colour, policy in zip(COLOURS * 9, _policies(report)):
        rates = [100 * run.hit_rate for run, _ in curve(report, policy)]
        axis.plot(_sizes_gib(report, policy), rates, "o-", color=colour, markersize=4, label=policy)
    bounds = [100 * bound for _, bound in curve(report, best)]
    axis.plot(_sizes_gib(report, best), bounds, "--", color=_GREY, label="optimum (knows the future)")
    axis.axhline(100 * report.reachable_rate, color="#adb5bd", linewidth=1)
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
    axis.set_title(f"{report.trace.name}: hit rate", loc="left", fontsize=11, fontweight="bold")
    axis.legend(frameon=False, fontsize=9, loc="lower right")


def _draw_bytes(axis: Any, report: Report) -> None:
    best = best_policy(report)
    runs = [run for run, _ in curve(report, best)]
    sizes = _sizes_gib(report, best)
    kinds: list[tuple[str, list[int]]] = [
        ("loaded to the device", [run.loaded_bytes for run in runs]),
        ("stored from the device", [run.stored_bytes for run in runs]),
    ]
    if any(run.disk_blocks for run in runs):
        kinds.append(("read from disk", [run.disk_read_bytes for run in runs]))
        kinds.append(("written to disk", [run.disk_written_bytes for run in runs]))
    unit, name = (2**40, "TiB") if max(max(values) for _, values in kinds) >= 2**40 else (2**30, "GiB")
    for colour, (label, values) in zip(COLOURS, kinds):
        axis.plot(sizes, [value / unit for value in values], "o-", color=colour, markersize=4, label=label)
    _size_axis(axis, report, best)
    axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{name} over the whole trace")
    axis.set_title(f"bytes moved ({best})", loc="left", fontsize=11, fontweight="bold")
    axis.legend(frameon=False, fontsize=9)


def _draw_saved(axis: Any, report: Report) -> None:
    for colour, policy in zip(COLOURS * 9, _policies(report)):
        shares = [
            100 * run.saved_prefill_s / (run.saved_prefill_s + run.prefill_s or 1) for run, _ in curve(report, policy)
        ]
        axis.plot(_sizes_gib(report, policy), shares, "o-", color=colour, markersize=4, label=policy)
    _size_axis(axis, report, best_policy(report))
    axis.set_ylim(bottom=0)
    axis.set_ylabel("% of the prefill time without offloading")
    axis.set_title("prefill saved", loc="left", fontsize=11, fontweight="bold")
