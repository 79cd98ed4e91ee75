# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: lower tiers read the blocks of requests that wait for their turn. Scheduler thread only."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.base import OffloadingManager
from kvoffload.connector.epochs import Epochs
from kvoffload.connector.hits import Hits
from kvoffload.connector.requests import Request

MOST_BLOCKS = 2048
"""Blocks that are looked up per step for requests that wait for their turn. A longer request uses up the limit of later
steps, so no blocks are looked up in those steps."""
MOST_REQUESTS = 64
"""The number of requests at the head of the queue whose blocks may be looked up in a step."""
REST_STEPS = 31
"""The most steps in which a request that has found nothing is not looked up again. Otherwise, a long queue without hits
costs more time than all other work of a step."""
_NEVER = 1 << 40
"""The tokens ahead of a request that only has its blocks read: all of them arrive before the engine needs them."""


@dataclass(slots=True, eq=False)
class _Place:
    """A request's place in the queue."""

    request: Request
    only_reads: bool
    """Whether the client only wants the request's blocks in host memory, so that its turn comes after they arrive."""
    rank: tuple[bool, int, int]
    """Requests with a turn come first, then those with a smaller priority, then those that arrived first."""
    is_reading: bool = False
    """Whether blocks were found for it when it was last looked up, or are awaited."""
    until_s: float = 0.0
    """When a request that only has its blocks read gets its turn at the latest."""
    num_tokens: int = 0
    """The tokens that it will probably compute."""
    rest_steps: int = 0
    """The number of steps in which it is not looked up after a lookup that found nothing."""
    rests_until: int = 0
    """The step before which it is not looked up."""

    def rest(self, step: int) -> None:
        """Postpone the next lookup, because the lookup in ``step`` found nothing. Each such lookup postpones it for
        longer."""
        self.rest_steps = min(2 * self.rest_steps + 1, REST_STEPS)
        self.rests_until = step + self.rest_steps


_RANK = operator.attrgetter("rank")


class ReadAhead:
    """The queue of requests that wait for GPU blocks, in the order of their turns.

    At the end of each step, the manager looks up the blocks of the requests at the head of the queue, one request after
    the other, as if each asked. It learns how many tokens the engine computes before each request's turn
    (``ReqContext.tokens_ahead``); blocks that arrive by then cost no time. The first request in the queue is the first
    at a tier, because a request is looked up only after the reads of earlier requests have begun. A request whose
    answers still hold is not looked up again.

    A request that only prepares another one is the last in the queue. The engine gets no answer for it until its blocks
    are in host memory, or ``most_s`` have passed since it arrived.
    """

    def __init__(
        self, manager: OffloadingManager, hits: Hits, epochs: Epochs, clock: Callable[[], float], most_s: float
    ) -> None:
        self._manager = manager
        self._hits = hits
        self._epochs = epochs
        self._clock = clock
        self._most_s = most_s
        self._queue: list[_Place] = []
        self._places: dict[Request, _Place] = {}
        self._num_arrived = 0
        self._num_tokens = 0
        """The tokens that the engine will probably compute for the requests in the queue."""
        self._computed_share = 1.0
        """The share of their tokens that recent requests computed."""
        self._num_steps = 0
        self._left = 0
        """Blocks that may still be looked up in this step. Below zero after a long request."""

    def __repr__(self) -> str:
        return f"ReadAhead({len(self._queue)} requests queue)"

    def arrive(self, request: Request, *, comes_first: bool = False, only_reads: bool = False) -> None:
        """Add a request to the queue. A preempted request comes first among the requests with its priority.
        ``only_reads``: it only prepares another one."""
        if not request.context.reads_cache or request in self._places:
            return
        self._num_arrived += 1
        number = -self._num_arrived if comes_first else self._num_arrived
        rank = only_reads, getattr(request.of_engine, "priority", 0), number
        place = _Place(request, only_reads, rank)
        insort(self._queue, place, key=_RANK)
        self._places[request] = place
        if only_reads:
            place.until_s = self._clock() + self._most_s
            request.context.tokens_ahead = _NEVER
        else:
            self._count(place, max(1, int(self._computed_share * request.of_engine.num_tokens)))

    def ask(self, request: Request) -> None:
        """Record that the engine has asked for the request, whose turn has come. A request whose blocks are only read
        leaves when its time for this is over."""
        place = self._places.get(request)
        if place is None or not place.only_reads:
            request.context.tokens_ahead = None
            request.context.tokens_behind = self._num_tokens - (0 if place is None else place.num_tokens)
        elif self._clock() >= place.until_s:
            self.leave(request)

    def finds(self, request: Request, hit_tokens: int) -> None:
        """Record that the request will probably load ``hit_tokens`` of its tokens, or has them on the GPU."""
        place = self._places.get(request)
        if place is not None and not place.only_reads:
            self._count(place, max(request.of_engine.num_tokens - hit_tokens, 1))

    def admit(self, request: Request, *, loads: bool) -> None:
        """Remove a request that was admitted. If it ``loads`` nothing, the manager releases its blocks."""
        place = self._places.get(request)
        if place is not None and place.is_reading and not loads:
            self._manager.release(request.context)
        if place is not None and not place.only_reads:
            share = place.num_tokens / max(request.of_engine.num_tokens, 1)
            self._computed_share += (share - self._computed_share) / 16
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Remove a request."""
        place = self._places.pop(request, None)
        if place is not None:
            del self._queue[bisect_left(self._queue, place.rank, key=_RANK)]
            self._count(place, 0)
            request.context.tokens_ahead = None

    def _count(self, place: _Place, num_tokens: int) -> None:
        """Record that the engine will compute ``num_tokens`` for a request in the queue."""
        self._num_tokens += num_tokens - place.num_tokens
        place.num_tokens = num_tokens

    def step(self, step_tokens: int, queued_tokens: int) -> None:
        """Look up blocks for the requests at the head of the queue, while a tier can begin to read.

        The engine computes ``step_tokens`` in this step, and leaves ``queued_tokens`` of running prompts for later
        ones.
        """
        ahead, behind = step_tokens + queued_tokens, self._num_tokens
        self._num_steps += 1
        self._left = min(self._left + MOST_BLOCKS, MOST_BLOCKS)
        if not self._queue:
            return
        may_read: bool | None = None
        for place in self._queue[:MOST_REQUESTS]:
            request = place.request
            behind -= place.num_tokens
            if place.rests_until <= self._num_steps and self._may_look(place):
                if may_read is None:
                    may_read = self._manager.reads_ahead()
                if not may_read and not (place.is_reading and place.only_reads):
                    if not self._queue[-1].only_reads:
                        break
                    ahead += place.num_tokens
                    continue  # such requests come last, and their reads have begun
                # Its turn comes at the end of a step.
                at_turn = ahead - ahead % step_tokens if step_tokens else ahead
                request.context.tokens_ahead = _NEVER if place.only_reads else at_turn
                request.context.tokens_behind = behind
                if self._manager.is_unchanged(request.context):
                    if not place.is_reading:
                        place.rest(self._num_steps)
                else:
                    if self._left <= 0:
                        break
                    may_read = None
                    if request.epoch is not (epoch := self._epochs.use()):
                        request.enter(epoch)
                    hit_tokens, is_coming = self._hits.search(request, 0)
                    place.is_reading = hit_tokens > 0 or is_coming
                    if place.is_reading:
                        place.rest_steps = 0
                    else:
                        place.rest(self._num_steps)
                    self.finds(request, hit_tokens)
                    self._left -= sum(len(own.keys) for own in request.groups)
                    if place.only_reads and not is_coming:
                        self.leave(request)
            ahead += place.num_tokens

    def _may_look(self, place: _Place) -> bool:
        """Return whether the request still waits for its turn, and lacks transfers that forbid a lookup."""
        request, has_asked = place.request, not place.only_reads and self._hits.has_asked(place.request)
        return not (has_asked or request.job_ids or request.is_prefilled_elsewhere)

    def check_invariants(self) -> None:
        """For tests."""
        assert sorted(self._queue, key=_RANK) == self._queue
        assert {place.request for place in self._queue} == self._places.keys()
        assert self._num_tokens == sum(place.num_tokens for place in self._queue)
        assert not any(place.num_tokens for place in self._queue if place.only_reads)
