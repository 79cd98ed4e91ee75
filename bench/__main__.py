# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench import BENCHES
from bench.core import Row, report


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Any of: {', '.join(BENCHES)}. Default: all.")] = None,
    short: Annotated[bool, typer.Option(help="Only check that everything runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file.")] = None,
) -> None:
    """Run the benchmarks and print each figure as a ratio against its reference."""
    unknown = [name for name in names or () if name not in BENCHES]
    if unknown:
        raise typer.BadParameter(f"No benchmark {unknown[0]!r}. Choices: {', '.join(BENCHES)}.")
    report(_rows(names or BENCHES, short), json_file)
    print(f"{platform.machine()}, Python {platform.python_version()}" + (", short run" if short else ""))


def _rows(names: Sequence[str], short: bool) -> Iterator[Row]:
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        yield from importlib.import_module(f"bench.{name}").run(short)


if __name__ == "__main__":
    typer.run(main)
