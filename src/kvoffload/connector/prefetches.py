# SPDX-License-Identifier: Apache-2.0
"""Prefixes that are promoted before a request needs them. Scheduler thread only."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from kvoffload.base import OffloadingManager, ReqContext
from kvoffload.connector.engine import EngineRequest
from kvoffload.connector.epochs import Epoch
from kvoffload.connector.groups import GroupGeometry
from kvoffload.connector.hits import Hits
from kvoffload.connector.requests import Keys, Request
from kvoffload.metrics import PREFETCH_OUTCOMES, Stats

MOST_OPEN = 16
"""Prefetches that may be open. Each asks in every step."""


class Prefetches:
    """Requests that the connector makes itself, asks for in each step until they have an answer, and never admits.

    So a prefetch has the patience and the limits of a request that waits, and begins nothing while other requests wait
    for reads (``ReqContext.is_prefetch``). What it promotes stays in host memory as long as the policy keeps it.
    """

    def __init__(self, manager: OffloadingManager, geometry: Sequence[GroupGeometry], hits: Hits) -> None:
        self._manager = manager
        self._geometry = geometry
        self._hits = hits
        self.open: list[Request] = []
        """Others only read it."""
        self._ids = itertools.count()
        self._outcomes: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"Prefetches({len(self.open)} open)"

    def begin(self, request: EngineRequest, epoch: Epoch) -> None:
        """Promotes what lower tiers have of the prefix, from the next step on. Dropped while too many are open."""
        if len(self.open) >= MOST_OPEN:
            self._outcomes["dropped"] += 1
            return
        context = ReqContext(f"kvoffload:prefetch:{next(self._ids)}", is_prefetch=True)
        policy = self._manager.on_new_request(context).policy
        self.open.append(Request(request, context, policy, tuple(map(Keys, self._geometry)), epoch))

    def step(self) -> None:
        """Asks for all that are open. To be called before the manager's ``on_schedule_end``."""
        for request in list(self.open):
            tokens = self._hits.search(request, 0, request.of_engine.num_tokens)
            if tokens is not None:
                self._end(request, "found" if tokens else "missed")

    def reset(self) -> None:
        """The cache was reset: what is open is dropped."""
        for request in list(self.open):
            self._end(request, "dropped")

    def _end(self, request: Request, outcome: str) -> None:
        self._outcomes[outcome] += 1
        self.open.remove(request)
        self._manager.on_request_finished(request.context)

    def get_stats(self) -> Stats:
        return {("prefetches", outcome): self._outcomes[outcome] for outcome in PREFETCH_OUTCOMES}
