# SPDX-License-Identifier: Apache-2.0
"""The production spec with a manager that is watched: exceptions that it raised, and how long it put requests off."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvoffload.base import LoadStoreSpec, OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.connector import GuardedManager
from kvoffload.tiering.spec import TieringOffloadingSpec

__all__ = ["LONGEST_PAUSE_S", "WatchedManager", "WatchedSpec"]


LONGEST_PAUSE_S = 0.5
"""Longer than a step, unless the machine is overloaded."""


@dataclass(slots=True)
class Wait:
    """The wait of one request that has only been answered ``None`` so far."""

    seconds: float = 0.0
    asked_s: float = 0.0
    """When the last of these answers ended."""


class WatchedManager(GuardedManager):
    """Counts the exceptions that the guard hides from the engine, and measures each wait: the time between answers
    ``None``.

    The measure is never too long. An answer counts from its end to the start of the next one. If the engine pauses its
    questions, at most ``LONGEST_PAUSE_S`` of the pause count, because in that time the request may have been answered,
    computed from the device's own cache and preempted, or delayed by a busy engine.
    """

    def __init__(self, manager: OffloadingManager, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(manager)
        self._clock = clock
        self.exceptions: list[str] = []
        self.longest_wait_s = 0.0
        self.num_waits = 0
        self._waits: dict[str, Wait] = {}

    def failed(self, name: str, exc: BaseException) -> None:
        self.exceptions.append(repr(exc))
        raise exc

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        begin_s = self._clock()
        answer = super().lookup(key, req_context)
        self._record([answer], req_context, begin_s)
        return answer

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        begin_s = self._clock()
        answers = super().lookup_prefix(keys, req_context)
        self._record(answers, req_context, begin_s)
        return answers

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._waits.pop(req_context.req_id, None)
        return super().prepare_load(keys, req_context)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        self._waits.pop(req_context.req_id, None)
        return super().prepare_store(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._waits.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    def _record(self, answers: Sequence[bool | None], req_context: ReqContext, begin_s: float) -> None:
        if None not in answers:
            self._waits.pop(req_context.req_id, None)
            return
        wait = self._waits.get(req_context.req_id)
        if wait is None:
            wait = self._waits[req_context.req_id] = Wait()
            self.num_waits += 1
        else:
            wait.seconds += min(begin_s - wait.asked_s, LONGEST_PAUSE_S)
            self.longest_wait_s = max(self.longest_wait_s, wait.seconds)
        wait.asked_s = self._clock()


class WatchedSpec(TieringOffloadingSpec):
    """``WatchedSpec.manager`` is the manager of the spec that was made last."""

    manager: WatchedManager

    def _make_manager(self) -> OffloadingManager:
        type(self).manager = WatchedManager(super()._make_manager())
        return self.manager
