# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker: no calls to something that keeps failing, but now and then a probe."""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed while calls succeed. It opens after ``threshold`` failures in a row, or at a single grave one.

    While it is open, callers make no calls but probes, one at a time: the first after ``first_wait_s``, each further
    one after twice the wait of the last, up to ``longest_wait_s``. A success closes it. ``name`` says in messages what
    it guards. One thread.
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
        """In a row. While there are none, a success changes nothing and need not be recorded."""
        self._wait_s = first_wait_s
        self._next_probe_s = 0.0
        self._is_probing = False

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "probing" if self._is_probing else "open"
        return f"CircuitBreaker({self.name!r}, {state}, failures={self.failures})"

    @property
    def is_probe_due(self) -> bool:
        """The breaker is open, and ``begin_probe`` would be true."""
        return not self.is_closed and not self._is_probing and self._clock() >= self._next_probe_s

    def begin_probe(self) -> bool:
        """Whether the breaker is open and a probe is due. If so, the caller makes one, and records its end or cancels
        it. Until then no other is due."""
        if not self.is_probe_due:
            return False
        self._is_probing = True
        return True

    def cancel_probe(self) -> None:
        """The probe was never made, so another is due at once. Does nothing if there is none."""
        self._is_probing = False

    def record_success(self) -> bool:
        """A call succeeded. Returns whether that closed the breaker."""
        was_open = not self.is_closed
        self.is_closed = True
        self.failures = 0
        self._is_probing = False
        self._wait_s = self._first_wait_s
        return was_open

    def record_failure(self, *, is_grave: bool = False) -> bool:
        """A call failed. Returns whether that opened the breaker. A grave failure opens it at once."""
        self.failures += 1
        if self.is_closed and not is_grave and self.failures < self._threshold:
            return False
        was_closed = self.is_closed
        if self._is_probing:
            self._wait_s = min(2 * self._wait_s, self._longest_wait_s)
        if was_closed or self._is_probing:
            # Only these delay the next probe: calls that began before the breaker opened may still fail, and say
            # nothing new.
            self._next_probe_s = self._clock() + self._wait_s
        self.is_closed = False
        self._is_probing = False
        return was_closed
