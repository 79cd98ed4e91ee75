# SPDX-License-Identifier: Apache-2.0
"""The boundary where a manager's exceptions and wrong answers become cache misses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from kvoffload.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    StepWork,
)
from kvoffload.errors import TransferError
from kvoffload.logs import RateLimitedLog
from kvoffload.lost_blocks import Loss
from kvoffload.metrics import Stats

__all__ = ["GuardedManager"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class GuardedManager(OffloadingManager):
    """Wraps any manager, and turns every exception, and every answer that is none, into the one that costs a
    recomputation and nothing else.

    For engine adapters: an engine step must survive a broken manager or plug-in. Tests use the bare manager, so that
    faults show. ``prepare_load`` has no harmless answer; it raises ``TransferError``, which the scheduler side treats
    as a failed load. Logs a traceback at most every ``log_every_s`` seconds.
    """

    def __init__(
        self, manager: OffloadingManager, log_every_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.manager = manager
        self.lost = manager.lost
        self._log = RateLimitedLog(logger, log_every_s, clock)

    def __repr__(self) -> str:
        return f"GuardedManager({self.manager!r})"

    def _guard(
        self, otherwise: T, call: Callable[..., T], *args: object, is_answer: Callable[[T], object] | None = None
    ) -> T:
        try:
            answer = call(*args)
            if is_answer is not None and not is_answer(answer):
                raise TypeError(f"this is not an answer: {answer!r:.100}")
            return answer
        except Exception:  # noqa: BLE001 - this is the boundary
            self._log.exception(f"{getattr(call, '__qualname__', call)} failed; taken as a cache miss")
            return otherwise

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        miss: bool | None = False
        return self._guard(miss, self.manager.lookup, key, req_context)

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, ends: Collection[OffloadKey] | None = None
    ) -> list[bool | None]:
        misses: list[bool | None] = [False] if keys else []
        answers = self._guard(
            misses,
            self.manager.lookup_prefix,
            keys,
            req_context,
            *([] if ends is None else [ends]),
            is_answer=lambda answers: _reaches_a_miss(answers, keys),
        )
        return _up_to_a_miss(answers)

    def peek(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        unknown: list[bool | None] = [None] * len(keys)
        answers = self._guard(
            unknown,
            self.manager.peek,
            keys,
            req_context,
            is_answer=lambda answers: _reaches_a_miss(answers, keys),
        )
        return _up_to_a_miss(answers)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        try:
            spec = self.manager.prepare_load(keys, req_context)
            if not isinstance(spec, LoadStoreSpec):
                raise TypeError(f"this is not an answer: {spec!r:.100}")
            return spec
        except Exception as exc:
            self._log.exception("prepare_load failed; taken as a failed load")
            raise TransferError(f"{len(keys)} blocks could not be prepared for a load.") from exc

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self._guard(None, self.manager.complete_load, keys, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self._guard(None, self.manager.touch, keys, req_context)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        return self._guard(None, self.manager.prepare_store, keys, req_context, is_answer=_is_store)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        self._guard(None, self.manager.complete_store, keys, req_context, success)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self._guard(
            RequestOffloadingContext(), self.manager.on_new_request, req_context, is_answer=_is_request_context
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._guard(None, self.manager.on_request_finished, req_context)

    def note_step(self, work: StepWork) -> None:
        self._guard(None, self.manager.note_step, work)

    def on_schedule_end(self) -> None:
        self._guard(None, self.manager.on_schedule_end)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._guard((), lambda: tuple(self.manager.take_events()))

    def has_pending_work(self) -> bool:
        return self._guard(False, self.manager.has_pending_work)

    def reset_cache(self) -> None:
        self._guard(None, self.manager.reset_cache)

    def get_stats(self) -> Stats:
        return self._guard({}, self.manager.get_stats)

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._guard([False] * len(keys), self.manager.holds, keys, is_answer=lambda held: len(held) == len(keys))

    def sources(self, req_context: ReqContext) -> Mapping[OffloadKey, str]:
        return self._guard({}, self.manager.sources, req_context)

    def explain(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[Loss | None]:
        return self._guard(
            [None] * len(keys),
            self.manager.explain,
            keys,
            req_context,
            is_answer=lambda losses: len(losses) == len(keys),
        )

    def shutdown(self) -> None:
        self._guard(None, self.manager.shutdown)


def _reaches_a_miss(answers: Sequence[bool | None], keys: Sequence[OffloadKey]) -> bool:
    """Whether there is an answer for each key up to the first ``False``."""
    return len(answers) >= len(keys) or (bool(answers) and answers[-1] is False)


def _up_to_a_miss(answers: Iterable[bool | None]) -> list[bool | None]:
    """What a manager answers after a miss must not make a hit of it."""
    found = [*answers]
    return found[: found.index(False) + 1] if False in found else found


def _is_store(answer: object) -> bool:
    return answer is None or isinstance(answer, PrepareStoreOutput)


def _is_request_context(answer: object) -> bool:
    return isinstance(answer, RequestOffloadingContext)
