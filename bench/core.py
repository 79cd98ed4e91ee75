# SPDX-License-Identifier: Apache-2.0
"""The rows of a report, and how their times are taken."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvoffload.doctor.timing import interleaved_medians, thread_medians
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace
from kvoffload.sim.trace_files import load_trace

__all__ = ["TRACES", "Row", "bench_directory", "interleaved_medians", "thread_medians", "trace_of"]

TRACES = Path(os.environ.get("KVOFFLOAD_BENCH_TRACES", Path(__file__).parents[2] / "shared" / "traces"))


def bench_directory() -> tempfile.TemporaryDirectory[str]:
    """On the disk that ``KVOFFLOAD_BENCH_DIR`` chooses, by default that of the working directory."""
    return tempfile.TemporaryDirectory(dir=os.environ.get("KVOFFLOAD_BENCH_DIR") or os.getcwd())


def trace_of(name: str, kind: str, max_requests: int | None, short: bool) -> Trace:
    """The trace of this name in ``TRACES``, or where it is not there or for a short run one of this kind, made up."""
    path = TRACES / f"{name}.jsonl.zst"
    if short or not path.exists():
        return synthesize(kind, 40 if short else max_requests or 2000, seed=1).whole_blocks()
    return load_trace(path, max_requests=max_requests).whole_blocks()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report."""

    case: str
    value: float
    unit: str
    reference: str = ""
    """What it is compared with."""
    ratio: float | None = None
    """value / reference, in the unit's own sense."""
    target: str = ""
    """For example ``"<= 2"`` or ``">= 0.9"``; empty where none is set."""

    @property
    def meets_target(self) -> bool | None:
        if not self.target or self.ratio is None:
            return None
        sign, bound = self.target.split()
        return self.ratio <= float(bound) if sign == "<=" else self.ratio >= float(bound)
