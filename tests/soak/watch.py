# SPDX-License-Identifier: Apache-2.0
"""The production spec with a manager that is watched: exceptions that it raised, and how long it put requests off."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from kvoffload.base import LoadStoreSpec, OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.connector import GuardedManager
from kvoffload.tiering.spec import TieringOffloadingSpec

__all__ = ["WatchedManager", "WatchedSpec"]

T = TypeVar("T")


class WatchedManager(GuardedManager):
    """Counts what the guard keeps from the engine, and measures each wait from its first answer ``None`` to its last.

    The measure is never too long: the first answer counts from its end, the last from its beginning.
    """

    def __init__(self, manager: OffloadingManager) -> None:
        super().__init__(manager)
        self.exceptions: list[str] = []
        self.longest_wait_s = 0.0
        self.num_waits = 0
        self._first_s: dict[str, float] = {}

    def _guard(
        self, otherwise: T, call: Callable[..., T], *args: object, is_answer: Callable[[T], object] | None = None
    ) -> T:
        try:
            answer = call(*args)
            assert is_answer is None or is_answer(answer), answer
            return answer
        except Exception as exc:
            self.exceptions.append(repr(exc))
            raise

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        begin_s = time.monotonic()
        answer = super().lookup(key, req_context)
        self._record([answer], req_context, begin_s)
        return answer

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        begin_s = time.monotonic()
        answers = super().lookup_prefix(keys, req_context)
        self._record(answers, req_context, begin_s)
        return answers

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._first_s.pop(req_context.req_id, None)
        return super().prepare_load(keys, req_context)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        self._first_s.pop(req_context.req_id, None)
        return super().prepare_store(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._first_s.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    def _record(self, answers: Sequence[bool | None], req_context: ReqContext, begin_s: float) -> None:
        if None not in answers:
            self._first_s.pop(req_context.req_id, None)
            return
        first_s = self._first_s.get(req_context.req_id)
        if first_s is None:
            self._first_s[req_context.req_id] = time.monotonic()
            self.num_waits += 1
        else:
            self.longest_wait_s = max(self.longest_wait_s, begin_s - first_s)


class WatchedSpec(TieringOffloadingSpec):
    """``WatchedSpec.manager`` is the manager of the spec that was made last."""

    manager: WatchedManager

    def _make_manager(self) -> OffloadingManager:
        type(self).manager = WatchedManager(super()._make_manager())
        return self.manager
