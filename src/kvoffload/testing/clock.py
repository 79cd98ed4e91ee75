# SPDX-License-Identifier: Apache-2.0
"""Time that passes when the test says so."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """Stands in for ``time.monotonic``: call it for the time in seconds, ``advance`` it by hand."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __repr__(self) -> str:
        return f"ManualClock({self.now_s})"

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not go back")
        self.now_s += seconds
