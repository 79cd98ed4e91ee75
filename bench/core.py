# SPDX-License-Identifier: Apache-2.0
"""The rows of a report, and functions that measure times."""

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
    """Return a temporary directory under ``KVOFFLOAD_BENCH_DIR``, or by default under the working directory."""
    return tempfile.TemporaryDirectory(dir=os.environ.get("KVOFFLOAD_BENCH_DIR") or os.getcwd())


def trace_of(name: str, kind: str, max_requests: int | None, short: bool) -> Trace:
    """Return this trace of ``TRACES``, or a synthetic one of this kind if it is missing or for a short run."""
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
