# SPDX-License-Identifier: Apache-2.0
"""Plots a sweep: hit rate, bytes moved and saved prefill over host memory."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError, MissingExtraError
from kvoffload.sim.report import as_page, best_policy, curve, knee_of
from kvoffload.sim.sweep import Report
from kvoffload.units import format_bytes

__all__ = ["COLOURS", "check_folder", "check_target", "pyplot", "save_small_png", "write_plot"]

COLOURS = ("#1f6fb4", "#d9730d", "#2f9e44", "#8b5cf6", "#c2255c", "#0b7285", "#868e96")
_GREY = "#495057"


def check_target(path: Path) -> None:
    """Raises ``ConfigError`` or ``MissingExtraError`` if ``write_plot`` could not write to ``path``. Call it first."""
    if path.suffix.lower() not in {".png", ".html"}:
        raise ConfigError(f"A plot is a .png or .html file, not {path.name!r}.")
    check_folder(path)
    pyplot()


def check_folder(path: Path) -> None:
    """Raises ``ConfigError`` if the file ``path`` could not be written. Creates nothing."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {str(folder)!r} to write {path.name!r} to.")
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; name a file in it.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"This user may not write to the folder {str(folder)!r}.")


def write_plot(reports: Sequence[Report], path: Path) -> None:
    """Draws the reports to ``path``, a PNG or an HTML page. Writes the whole file or nothing."""
    check_target(path)
    figure = _draw(reports)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.suffix.lower() == ".png":
            save_small_png(figure, temporary)
        else:
            text = io.StringIO()
            figure.savefig(text, format="svg")
            temporary.write_text(as_page(reports, text.getvalue()))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
        pyplot().close(figure)


def save_small_png(figure: Any, path: Path) -> None:
    """Saves with a palette, which takes a third of the bytes."""
    image = importlib.import_module("PIL.Image")  # matplotlib needs it too
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    image.open(drawn).convert("RGB").quantize(128).save(path, format="PNG", optimize=True)


def pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as exc:
        raise MissingExtraError("Plots need kvoffload's extra 'sim': pip install matplotlib.") from exc


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
