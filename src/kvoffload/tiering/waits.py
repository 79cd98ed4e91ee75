# SPDX-License-Identifier: Apache-2.0
"""Which requests wait, and for how long they still may."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvoffload.base import OffloadKey
from kvoffload.tiering.requests import RequestState
from kvoffload.tiering.waiting import Claims

__all__ = ["Waits"]


class Waits:
    """A request waits from its first answer ``None`` until it loads, runs, ends or has no patience left.

    What it was told in the step it began to wait, and what it is told while it waits, are its claims. Patience is
    one budget for the whole life of a request: each wait is taken off it.
    """

    def __init__(self, claims: Claims, clock: Callable[[], float]) -> None:
        self._claims = claims
        self._clock = clock
        # In the order their waits began, so that the longest waits are in front.
        self._waiting: dict[int, RequestState] = {}
        self._step = 0

    def __repr__(self) -> str:
        return f"Waits(waiting={len(self._waiting)})"

    def next_step(self) -> None:
        self._step += 1

    def told_ready(self, request: RequestState, key: OffloadKey) -> None:
        """``request`` is told that ``key`` is ready: a claim if it waits, else remembered in case it will."""
        if request.waiting_since is None:
            request.remember_told(key, self._step)
        else:
            self._claims.claim(request, key)

    def is_over(self, request: RequestState) -> bool:
        """Whether ``request`` may not wait, or not any longer."""
        return request.has_waited_enough(self._clock())

    def begin(self, request: RequestState) -> None:
        """No change if it waits already."""
        if request.waiting_since is not None:
            return
        request.waiting_since = self._clock()
        self._waiting[id(request)] = request
        if request.told_step == self._step:
            for key in request.told:
                self._claims.claim(request, key)
        request.told.clear()

    def end(self, request: RequestState) -> None:
        """Its claims end with it. No change to a request that does not wait, but that what it was told is forgotten."""
        request.told.clear()
        if request.waiting_since is None:
            return
        request.patience_s -= self._clock() - request.waiting_since
        request.waiting_since = None
        request.promoted.clear()
        del self._waiting[id(request)]
        self._claims.release(request)

    def end_all(self) -> None:
        for request in list(self._waiting.values()):
            self.end(request)

    def give_up(self, request: RequestState) -> None:
        """It has no patience left, for good."""
        self.end(request)
        request.patience_s = 0.0

    def expire(self) -> None:
        """Ends the waits that nobody comes back for, so that their claims end too."""
        while self._waiting:
            longest = next(iter(self._waiting.values()))
            if not self.is_over(longest):
                return
            self.give_up(longest)

    def check_invariants(self, requests: Collection[RequestState]) -> None:
        """``requests``: all there are."""
        assert self._waiting.keys() <= {id(request) for request in requests}
        for request in requests:
            assert (request.waiting_since is not None) == (id(request) in self._waiting)
