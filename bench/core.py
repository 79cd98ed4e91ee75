# SPDX-License-Identifier: Apache-2.0
"""The rows of a report, and functions that measure times."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvoffload.doctor.timing import interleaved_medians, thread_medians

__all__ = ["Row", "bench_directory", "interleaved_medians", "leave_page_cache", "report", "thread_medians"]


def bench_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory under ``KVOFFLOAD_BENCH_DIR``, or by default under the working directory."""
    return tempfile.TemporaryDirectory(dir=os.path.abspath(os.environ.get("KVOFFLOAD_BENCH_DIR") or "."))


def leave_page_cache(directory: Path) -> None:
    """Drop the page cache, so that reads come from the disk, as for blocks that were not used for a long time."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report."""

    case: str
    value: float
    unit: str
    reference: str = ""
    """The reference that the value is compared with."""
    ratio: float | None = None
    """The value divided by the reference."""
    target: str = ""
    """The target for the ratio, for example ``"<= 2"`` or ``">= 0.9"``, or an empty string."""

    @property
    def meets_target(self) -> bool | None:
        if not self.target or self.ratio is None:
            return None
        sign, bound = self.target.split()
        return self.ratio <= float(bound) if sign == "<=" else self.ratio >= float(bound)


def report(rows: Iterable[Row], json_file: Path | None) -> None:
    """Print each row as soon as it is there, and write all of them to ``json_file`` too."""
    written = []
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        verdict = {None: "", True: "ok", False: "MISSED"}[row.meets_target]
        text = f"{row.case:70} {row.value:10,.4g} {row.unit:6} {ratio:>7} {row.reference:30} {row.target} {verdict}"
        print(text.rstrip(), flush=True)
        written.append(asdict(row))
    if json_file:
        json_file.write_text(json.dumps(written, indent=1) + "\n")
