# SPDX-License-Identifier: Apache-2.0
"""What the subcommands write: progress on stderr, JSON on stdout, files of figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvoffload.errors import ConfigError
from kvoffload.sim.page import check_folder, whole_file

__all__ = ["Json", "Out", "check_out", "positive", "print_json", "progress", "write_json"]

Json = Annotated[bool, typer.Option("--json", help="Print all figures as JSON instead.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all figures to this file, as JSON.")]

_LINES = 10
"""Lines per task where the output is not a terminal."""


@contextmanager
def progress(totals: Mapping[str, int | None], unit: str) -> Iterator[Callable[[str], None]]:
    """Shows how many of each task's ``unit`` are done. Yields what the caller calls, with the task's name, for each.

    A terminal gets bars that disappear at the end. Any other output, a log for example, gets lines: at most ten for
    each task with a total, with an estimate of the time left, and one for each tenth unit of a task without one.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, totals, unit)
        return
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {name: bars.add_task(name, total=total, start=False) for name, total in totals.items()}

        def advance(name: str) -> None:
            bars.start_task(tasks[name])
            bars.advance(tasks[name])

        yield advance


def _lines(console: Console, totals: Mapping[str, int | None], unit: str) -> Callable[[str], None]:
    done = dict.fromkeys(totals, 0)
    begin_s = time.monotonic()

    def advance(name: str) -> None:
        done[name] += 1
        count, total = done[name], totals[name]
        if total is None:
            is_due, text = count % 10 == 0, f"{count:,}"
        else:
            is_due, text = count * _LINES // total > (count - 1) * _LINES // total, f"{count:,} of {total:,}"
        if is_due:
            seconds = time.monotonic() - begin_s
            left = f" ({seconds * (total - count) / count:.0f} s left)" if total and count < total else ""
            line = f"{name}: {text} {unit}, {seconds:.0f} s{left}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return advance


def positive(value: float, option: str) -> float:
    """``value``. Raises ``ConfigError``, which names ``option``, unless it is a finite number above 0."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"{option} must be positive, not {value:g}.")
    return value


def check_out(path: Path | None) -> None:
    """Raises ``ConfigError`` if the file of ``--out`` could not be written. Creates nothing."""
    try:
        if path is not None:
            check_folder(path)
    except ConfigError as exc:
        raise ConfigError(f"--out: {exc}") from exc


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def write_json(value: Any, path: Path | None) -> None:
    """Writes the file of ``--out``, if there is to be one: the whole of it or nothing."""
    if path is None:
        return
    with whole_file(path) as file:
        file.write_text(json.dumps(value, indent=1) + "\n")
