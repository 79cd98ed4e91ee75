# SPDX-License-Identifier: Apache-2.0
"""A clock that a test advances by hand."""

from __future__ import annotations


class ManualClock:
    """A replacement for ``time.monotonic``.

    Calling it returns the time in seconds, and ``advance`` moves it forward.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __repr__(self) -> str:
        return f"ManualClock({self.now_s})"

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("seconds must not be negative")
        self.now_s += seconds
