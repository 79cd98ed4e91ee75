# SPDX-License-Identifier: Apache-2.0
"""Output of the subcommands: tables and JSON on stdout, progress on stderr, and files."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvoffload.errors import ConfigError
from kvoffload.units import format_bytes

if TYPE_CHECKING:
    from kvoffload.sim.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print all figures as JSON instead of text.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all figures to this file as JSON.")]
DrawnOut = Annotated[
    list[Path] | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Also write to this file (.json, .html or .png). Repeat the option for several files.",
    ),
]

_LEAST_BYTES = 1 << 20
_LINES = 10
"""Number of lines if the output is not a terminal."""


@contextmanager
def progress(name: str, total: int | None, unit: str) -> Iterator[Callable[[], None]]:
    """Show how many of a task's ``unit`` are done. Yields a function for the caller to call after each unit.

    A terminal gets a bar that disappears at the end. Any other output, a log for example, gets lines: ten with an
    estimate of the time left, or without a total one for each tenth unit.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, name, total, unit)
        return
    columns = (
        TextColumn("{task.description:12}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit, markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def _lines(console: Console, name: str, total: int | None, unit: str) -> Callable[[], None]:
    begin_s, counts = time.monotonic(), itertools.count(1)

    def advance() -> None:
        count = next(counts)
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
    """Return ``value``. Raises ``ConfigError``, which names ``option``, unless it is a finite number above 0."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"{option} must be positive, not {value:g}.")
    return value


def check_unit(name: str, size_bytes: int) -> None:
    """Raise ``ConfigError`` for a size that is too small for a block of any model: somebody forgot the unit."""
    if size_bytes < _LEAST_BYTES:
        raise ConfigError(
            f"{name} is {format_bytes(size_bytes)}, too little for a block of any model. A number without a unit is in "
            "bytes: write for example '8GiB'."
        )


def check_out(*paths: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` if a file of ``--out`` could not be written, or ends with none of ``suffixes``. Creates
    nothing."""
    for path in filter(None, paths):
        folder = Path(os.path.realpath(path)).parent  # ``Path.resolve`` raises for a loop of links
        if suffixes and path.suffix.lower() not in suffixes:
            raise ConfigError(f"--out must name a file that ends with {', '.join(suffixes)}, not {path.name!r}.")
        if not folder.is_dir():
            raise ConfigError(
                f"--out: {path.name!r} cannot be written, because there is no folder {str(folder)!r}; create it."
            )
        if path.is_dir():
            raise ConfigError(f"--out: {str(path)!r} is a folder; name a file in it.")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(
                f"--out: This user may not write {path.name!r} in the folder {str(folder)!r}; choose another folder."
            )


def check_drawn(paths: Sequence[Path] | None) -> None:
    """Check the files of ``DrawnOut`` as ``check_out`` does. Raises ``MissingExtraError`` if a requested drawing needs
    a missing package."""
    check_out(*paths or (), suffixes=(".json", ".html", ".png"))
    if any(path.suffix.lower() != ".json" for path in paths or ()):
        from kvoffload.sim.page import pyplot

        pyplot()


def write_drawn(paths: Sequence[Path] | None, figures: Any, draw: Callable[[bool], bytes]) -> None:
    """Write each of the files: ``figures`` as JSON, or the result of ``draw``, which is a page or a PNG."""
    for path in paths or ():
        suffix = path.suffix.lower()
        path.write_bytes(_as_json(figures) if suffix == ".json" else draw(suffix == ".html"))


def write_json(value: Any, path: Path | None) -> None:
    """Write the file of ``--out``, if one was requested."""
    if path is not None:
        path.write_bytes(_as_json(value))


def _as_json(value: Any) -> bytes:
    return f"{json.dumps(value, indent=1)}\n".encode()


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def print_table(table: Table, title: str = "", *, is_wide: bool = False) -> None:
    """Print a table that fits the terminal, or 80 columns without one. It drops its last columns first, and a line
    names the dropped columns."""
    if title:
        print(title)
    if not is_wide:
        kept, most, widths = len(table.headings), shutil.get_terminal_size().columns, table.widths
        while kept > 2 and sum(widths[:kept]) + 2 * (kept - 1) > most:
            kept -= 1
        table = table.without(table.headings[kept:])
    head, *rows = table.lines()
    rule = "─" if can_print("─") else "-"
    print(head, "  ".join(rule * width for width in table.widths), *rows, sep="\n")
    if table.left_out:
        print(f"Not shown: {', '.join(dict.fromkeys(table.left_out))}. --json has all.")


def can_print(text: str) -> bool:
    """Return whether standard output can print the characters of ``text``."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")  # there may be no standard output
    except (LookupError, UnicodeEncodeError):
        return False
    return True
