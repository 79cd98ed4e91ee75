# SPDX-License-Identifier: Apache-2.0
"""How many requests are in flight at a service that asks for fewer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """At most ``most`` requests at once: half as many after each time that the service asked to slow down, and one more
    after as many good answers as there are requests in flight. Any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._running = 0
        self.num_slowed = 0
        """How often the limit was halved."""
        self._may_begin = threading.Condition()

    @property
    def limit(self) -> int:
        return max(1, int(self._limit))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, in which the caller sends one request after the other. The wait may be as long as several
        requests take, so check afterwards whether there is still a reason to send one."""
        with self._may_begin:
            self._may_begin.wait_for(lambda: self._running < self.limit)
            self._running += 1
        try:
            yield
        finally:
            with self._may_begin:
                self._running -= 1
                self._may_begin.notify_all()

    def slow_down(self, num_slowed: int) -> None:
        """Halve the limit because the service asked for fewer requests in answer to one that began at ``num_slowed``.
        Of requests that were in flight together, one counts."""
        with self._may_begin:
            if num_slowed == self.num_slowed:
                self.num_slowed += 1
                self._limit = max(1.0, self._limit / 2)

    def go_on(self) -> None:
        """A request was answered."""
        with self._may_begin:
            if self._limit < self._most:
                self._limit = min(self._most, self._limit + 1 / self._limit)
                self._may_begin.notify_all()
