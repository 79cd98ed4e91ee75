# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench import BENCHES
from bench.core import Row


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Any of: {', '.join(BENCHES)}. Default: all.")] = None,
    short: Annotated[bool, typer.Option(help="Only check that everything runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file.")] = None,
) -> None:
    """Run the benchmarks and print each figure as a ratio against its reference."""
    unknown = [name for name in names or () if name not in BENCHES]
    if unknown:
        raise typer.BadParameter(f"No benchmark {unknown[0]!r}. Choices: {', '.join(BENCHES)}.")
    console = Console(width=max(110, Console().width))
    rows: list[dict[str, Any]] = []
    for name in names or BENCHES:
        with console.status(f"{name} ..."):
            found: list[Row] = importlib.import_module(f"bench.{name}").run(short)
        rows += [{"bench": name, **asdict(row)} for row in found]
        console.print(_table(name, found))
    console.print(f"{platform.machine()}, Python {platform.python_version()}" + (", short run" if short else ""))
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


def _table(name: str, rows: list[Row]) -> Table:
    table = Table(title=name, title_justify="left")
    for heading in ("case", "value", "reference", "ratio", "target"):
        table.add_column(heading, justify="left" if heading in ("case", "reference") else "right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = {None: "", True: " ok", False: " MISSED"}[row.meets_target]
        table.add_row(row.case, f"{row.value:,.4g} {row.unit}", row.reference, ratio, f"{row.target}{verdict}")
    return table


if __name__ == "__main__":
    typer.run(main)
