# SPDX-License-Identifier: Apache-2.0
"""Limit the requests in flight at a service that asks for fewer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """A limit of at most ``most`` requests at once. It is halved each time that the service asks to slow down, and
    grows by one after as many good answers as the limit. Any thread may use it."""

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
        """Wait for a turn, in which the caller sends one request after the other. The wait may last as long as several
        requests, so check afterwards whether a request is still needed."""
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
        """Halve the limit, because the service asked for fewer requests in its answer to a request that began at
        ``num_slowed``. Several such answers to requests in flight together count once."""
        with self._may_begin:
            if num_slowed == self.num_slowed:
                self.num_slowed += 1
                self._limit = max(1.0, self._limit / 2)

    def go_on(self) -> None:
        """Raise the limit a little, after a good answer."""
        with self._may_begin:
            if self._limit < self._most:
                self._limit = min(self._most, self._limit + 1 / self._limit)
                self._may_begin.notify_all()
