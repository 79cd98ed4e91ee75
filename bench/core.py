# SPDX-License-Identifier: Apache-2.0
"""The rows of a report, and how their times are taken."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.doctor.timing import interleaved_medians, thread_medians

__all__ = ["Row", "interleaved_medians", "thread_medians"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report."""

    bench: str
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
