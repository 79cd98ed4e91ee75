# SPDX-License-Identifier: Apache-2.0
"""Whether to go on asking something that fails."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """Closed while calls succeed. Opens after ``threshold`` failures in a row, or at once when told so; then one
    probe at a time is let through, first after ``first_wait_s``, then after twice as long each, up to
    ``longest_wait_s``. A success closes it. One thread.
    """

    def __init__(
        self,
        *,
        threshold: int = 3,
        first_wait_s: float = 1.0,
        longest_wait_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._failures = 0
        self._wait_s = first_wait_s
        self._probe_at_s = 0.0
        self._is_probing = False
        self.is_closed = True

    def __repr__(self) -> str:
        return f"Breaker({'closed' if self.is_closed else 'open'}, failures={self._failures})"

    def may_probe(self) -> bool:
        """Whether it is open and a probe is due; the caller then makes one, and the next has to wait for its end."""
        if self.is_closed or self._is_probing or self._clock() < self._probe_at_s:
            return False
        self._is_probing = True
        return True

    def succeeded(self) -> bool:
        """A call worked; whether that closed the breaker."""
        was_open = not self.is_closed
        self.is_closed = True
        self._failures = 0
        self._is_probing = False
        self._wait_s = self._first_wait_s
        return was_open

    def failed(self, *, at_once: bool = False) -> bool:
        """A call did not work (``at_once``: once is enough); whether that opened the breaker."""
        self._failures += 1
        if self.is_closed and not at_once and self._failures < self._threshold:
            return False
        was_closed = self.is_closed
        if self._is_probing:
            self._wait_s = min(2 * self._wait_s, self._longest_wait_s)
        if was_closed or self._is_probing:
            # Calls that were under way when it opened say nothing new.
            self._probe_at_s = self._clock() + self._wait_s
        self.is_closed = False
        self._is_probing = False
        return was_closed

    def withdraw_probe(self) -> None:
        """The probe was called off before it told anything; another may be made at once."""
        self._is_probing = False
