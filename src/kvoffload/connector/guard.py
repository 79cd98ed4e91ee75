# SPDX-License-Identifier: Apache-2.0
"""Turn a manager's exceptions and invalid answers into cache misses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from kvoffload.base import (
    LoadStoreSpec,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    Weighed,
)
from kvoffload.boundary import Boundary, guarded, up_to_a_miss
from kvoffload.errors import TransferError
from kvoffload.events import checked_events
from kvoffload.logs import RateLimitedLog
from kvoffload.metrics import checked_stats

logger = logging.getLogger(__name__)
T = TypeVar("T")


def _lost_load(keys: Collection[OffloadKey], *_: object) -> LoadStoreSpec:
    raise TransferError(f"{len(keys)} blocks could not be prepared for a load.")


def _miss(keys: Sequence[OffloadKey], *_: object) -> list[bool | None]:
    return [False] if keys else []


def _for_each(answers: Sequence[T], keys: Sequence[OffloadKey], *_: object) -> list[T]:
    if len(answers) != len(keys):
        raise TypeError(f"this is not an answer for {len(keys)} blocks: {answers!r:.100}")
    return [*answers]


def _nothing(*_: object) -> Any:
    return None


class GuardedManager(Boundary, OffloadingManager):
    """Wraps any manager, and replaces exceptions and invalid answers by answers that cost only a recomputation.

    Engine adapters use it, because an engine step must survive a broken manager or plug-in. Tests use the bare manager,
    so that faults show. No answer to ``prepare_load`` would be harmless, so it raises ``TransferError``, which the
    scheduler side treats as a failed load. Logs a traceback at most every ``log_every_s`` seconds.
    """

    def __init__(
        self, manager: OffloadingManager, log_every_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inner = manager
        self.lost = manager.lost
        self._log = RateLimitedLog(logger, log_every_s, clock)

    def __repr__(self) -> str:
        return f"GuardedManager({self.inner!r})"

    def failed(self, name: str, exc: BaseException) -> None:
        self._log.exception(f"{name} failed; kvoffload treats this as a cache miss")

    lookup = guarded(OffloadingManager.lookup, lambda *_: False, kind=(bool, type(None)))
    lookup_prefix = guarded(OffloadingManager.lookup_prefix, _miss, up_to_a_miss)
    reads_ahead = guarded(OffloadingManager.reads_ahead, lambda: False, bool)
    is_unchanged = guarded(OffloadingManager.is_unchanged, lambda *_: False, kind=bool)
    where = guarded(
        OffloadingManager.where,
        lambda keys, *_: [None] * len(keys),
        lambda found, keys, *_: [None if answer is None else bool(answer) for answer in _for_each(found, keys)],
    )
    prepare_load = guarded(OffloadingManager.prepare_load, _lost_load, kind=LoadStoreSpec)
    release = guarded(OffloadingManager.release, _nothing)
    complete_load = guarded(OffloadingManager.complete_load, _nothing)
    touch = guarded(OffloadingManager.touch, _nothing)
    prepare_store = guarded(OffloadingManager.prepare_store, _nothing, kind=(PrepareStoreOutput, type(None)))
    on_new_request = guarded(
        OffloadingManager.on_new_request, lambda *_: RequestOffloadingContext(), kind=RequestOffloadingContext
    )
    on_request_finished = guarded(OffloadingManager.on_request_finished, _nothing)
    note_step = guarded(OffloadingManager.note_step, _nothing)
    on_schedule_end = guarded(OffloadingManager.on_schedule_end, _nothing)
    take_events = guarded(OffloadingManager.take_events, lambda: (), checked_events)
    has_pending_work = guarded(OffloadingManager.has_pending_work, lambda: False, bool)
    reset_cache = guarded(OffloadingManager.reset_cache, _nothing)
    get_stats = guarded(OffloadingManager.get_stats, dict, checked_stats)
    sources = guarded(OffloadingManager.sources, lambda *_: {}, lambda found, *_: dict(found))
    weighed = guarded(OffloadingManager.weighed, lambda *_: [], lambda found, *_: [*map(Weighed._make, found)])
    explain = guarded(OffloadingManager.explain, lambda keys, *_: [None] * len(keys), _for_each)
    shutdown = guarded(OffloadingManager.shutdown, _nothing)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        """Complete a store, as failed if its success cannot be recorded.

        Otherwise its blocks would stay in flight forever.
        """
        for outcome in (success, False):
            try:
                self.inner.complete_store(keys, req_context, outcome)
                return
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as exc:  # noqa: BLE001 - this is the boundary
                self.failed("complete_store", exc)
