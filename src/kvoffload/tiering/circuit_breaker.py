# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker, which prevents calls to something that keeps failing, except for an occasional probe."""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """A breaker that is closed while calls succeed. It opens after ``threshold`` failures in a row, or one grave
    failure.

    While it is open, callers make only probes, one at a time. The first probe is due after ``first_wait_s``, and each
    further one after twice the previous wait, up to ``longest_wait_s``. A success closes the breaker. ``name`` names
    the guarded object in messages. One thread.
    """

    def __init__(
        self,
        name: str,
        *,
        threshold: int = 3,
        first_wait_s: float = 1.0,
        longest_wait_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.is_closed = True
        self._threshold = threshold
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self.failures = 0
        """The number of failures in a row. While it is 0, a success changes nothing and need not be recorded."""
        self._wait_s = first_wait_s
        self._next_probe_s = 0.0
        self._is_probing = False

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "probing" if self._is_probing else "open"
        return f"CircuitBreaker({self.name!r}, {state}, failures={self.failures})"

    @property
    def is_probe_due(self) -> bool:
        """Whether the breaker is open and ``begin_probe`` would return ``True``."""
        return not self.is_closed and not self._is_probing and self._clock() >= self._next_probe_s

    def begin_probe(self) -> bool:
        """Return whether the breaker is open and a probe is due.

        If so, the caller makes a probe, and records its result or cancels it. Until then, no other probe is due.
        """
        if not self.is_probe_due:
            return False
        self._is_probing = True
        return True

    def cancel_probe(self) -> None:
        """Cancel a probe that was never made, so that another is due at once. Does nothing if there is none."""
        self._is_probing = False

    def record_success(self) -> bool:
        """Record that a call succeeded. Returns whether that closed the breaker."""
        was_open = not self.is_closed
        self.is_closed = True
        self.failures = 0
        self._is_probing = False
        self._wait_s = self._first_wait_s
        return was_open

    def record_failure(self, *, is_grave: bool = False) -> bool:
        """Record that a call failed. A grave failure opens the breaker at once. Returns whether this call opened it."""
        self.failures += 1
        if self.is_closed and not is_grave and self.failures < self._threshold:
            return False
        was_closed = self.is_closed
        if self._is_probing:
            self._wait_s = min(2 * self._wait_s, self._longest_wait_s)
        if was_closed or self._is_probing:
            # Other failures do not delay the next probe, because calls that started before the breaker opened may
            # still fail and provide no new information.
            self._next_probe_s = self._clock() + self._wait_s
        self.is_closed = False
        self._is_probing = False
        return was_closed
