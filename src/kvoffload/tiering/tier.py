# SPDX-License-Identifier: Apache-2.0
"""A secondary tier over any block store."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

import msgspec

from kvoffload.base import OffloadingEvent, OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext
from kvoffload.errors import Problems
from kvoffload.logs import RateLimitedLog
from kvoffload.lost_blocks import NO_LOSSES, LostBlocks
from kvoffload.metrics import Stats
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvoffload.tiering.health import StoreHealth
from kvoffload.tiering.losses import StoreLosses
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.questions import Questions
from kvoffload.tiering.runner import IoQueue, IoResult, IoTask, TierRunner
from kvoffload.tiering.scan import StoreScan
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.transfers import StoreTransfers

_log = logging.getLogger(__name__)

_MAX_TOUCHED = 65_536
"""Maximum number of keys whose use was not reported to the store. Further uses are forgotten."""
_TOUCH_INTERVAL_S = 1.0
"""Seconds between reports of uses. The upkeep thread reports them in one call."""
MOST_THREADS = 1024
"""Maximum number of a tier's threads for reads, and again for writes. No device supports such a deep queue, and each
thread uses the engine's memory."""


class TierLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a ``StoreTier`` on concurrent work and on waiting. ``StoreOptions`` makes them configuration keys."""

    server_evicts: ClassVar[bool] = False
    """Whether the store is a service that evicts by its own policy, and reports neither its size nor its evictions."""

    threads: int | None = None
    """Number of concurrent reads, and of concurrent writes: the queue depths that the device sees. Default: depends on
    the type, 2 to 8."""
    timeout_s: float = 30.0
    """Time after which a store call counts as hung. While half of the threads for reading hang, the tier is not read;
    while half of the threads for writing hang, it is not written. Work that is queued for longer is dropped."""
    drain_timeout_s: float = 10.0
    """Seconds that a cache reset or a shutdown waits for the tier's I/O, in real time."""
    max_backlog_blocks: int | None = None
    """Maximum number of blocks that wait to be written or are being written, pinned in host memory. More blocks are
    dropped. Default: a quarter of host memory, but at least 64 blocks."""
    max_index_blocks: int = 1_000_000
    """Maximum number of blocks that the tier remembers as present, at about 120 bytes each. It asks the store about
    others. A ``disk`` tier remembers none, because the store itself knows its blocks."""

    def check_limits(self, tier_type: str) -> None:
        """Raise ``ConfigError``, which names the tier by ``tier_type``, for numbers that no tier can work with."""
        problems = Problems()
        for name in ("threads", "max_backlog_blocks", "max_index_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.add(f"{name} of the {tier_type!r} tier must be at least 1, not {value}.")
        if self.threads is not None and self.threads > MOST_THREADS:
            problems.add(f"threads of the {tier_type!r} tier must be at most {MOST_THREADS:,}, not {self.threads}.")
        for name in ("timeout_s", "drain_timeout_s"):
            if not getattr(self, name) > 0:
                problems.add(f"{name} of the {tier_type!r} tier must be positive, not {getattr(self, name)}.")
        if self.drain_timeout_s > (most_s := threading.TIMEOUT_MAX):
            problems.add(
                f"drain_timeout_s of the {tier_type!r} tier must be at most {most_s:.3g} s, not {self.drain_timeout_s}."
            )
        problems.raise_found()


def close_store(store: BlockStore, label: str, timeout_s: float) -> bool:
    """Close ``store``, and return whether that ended in time, even with an error. If not, a thread continues to close
    it."""

    def close() -> None:
        try:
            store.close()
        except BaseException as exc:  # noqa: BLE001 - in a thread of its own, where nothing else would report it
            _log.warning("Tier %r: its store failed to close: %s", label, exc)

    closing = threading.Thread(target=close, name=f"kvoffload-{label}-close", daemon=True)
    closing.start()
    closing.join(timeout_s)
    return not closing.is_alive()


class StoreTier(SecondaryTierManager):
    """A secondary tier over a synchronous ``store``, which it owns.

    Every method runs on the scheduler's thread, and so does every change of the state here. Only the runner's threads
    call the store for anything that may take long; their results wait in queues for the scheduler's thread.

    * Lookups are answered from the presence index. An unknown key is ``None``, and the store is asked for it when the
      step ends (``Questions``). An absent key is ``False``; after a while the store is asked for
      it again in the background. ``exclusive`` says that no other process writes to the store's namespace: once the
      store has been scanned, an unknown key is ``False`` at once.
    * While the circuit breaker of reads is open, lookups are ``False`` and loads fail. While the circuit breaker of
      writes is open, stores are dropped. The tier probes reads with its own call, and writes with a job's first slice.
    * A hanging call blocks its thread and its job. The blocks of a read that hangs are absent until it returns.
    * A store that declares its ``resident`` keys answers each lookup itself, at once. It is scanned only with
      ``enable_events``, so that all of its blocks are announced.
    """

    def __init__(
        self,
        primary_kv_view: memoryview,
        tier_type: str,
        store: BlockStore,
        limits: TierLimits | None = None,
        *,
        offload_policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL,
        exclusive: bool = False,
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        lost: LostBlocks = NO_LOSSES,
    ) -> None:
        super().__init__(primary_kv_view, tier_type)
        limits = limits or TierLimits()
        limits.check_limits(tier_type)
        self._store = store
        self.max_backlog_blocks = limits.max_backlog_blocks
        self._drain_timeout_s = limits.drain_timeout_s
        self._policy = offload_policy
        self._exclusive = exclusive
        self._clock = clock
        threads = limits.threads or store.requests_in_flight
        self._runner = TierRunner(tier_type, threads, timeout_s=limits.timeout_s, clock=clock)
        self._index = PresenceIndex(
            tier_type, limits.max_index_blocks, resident=store.resident, enable_events=enable_events, clock=clock
        )
        self._reads = StoreHealth(tier_type, "read", self._runner, clock)
        self._writes = StoreHealth(tier_type, "write", self._runner, clock)
        is_asked = not self._index.is_exact
        self._questions = Questions(store, self._index, self._runner, self._reads) if is_asked else None
        self._losses = StoreLosses(tier_type, store, self._index, lost, server_evicts=limits.server_evicts, clock=clock)
        is_scanned = is_asked or enable_events
        self._scan: StoreScan | None = None
        if is_scanned:
            self._scan = StoreScan(tier_type, store, self._index, self._runner, clock, self._note_found)
        self._transfers = StoreTransfers(
            tier_type,
            primary_kv_view,
            store,
            self._index,
            self._runner,
            self._losses,
            reads=self._reads,
            writes=self._writes,
        )
        self._touched: list[Sequence[OffloadKey]] = []
        self._num_touched = 0
        self._next_touch_s = 0.0
        self._news: list[OffloadKey] | None = None
        """The keys that ``take_news`` will return; ``None`` before its first call, because some callers never call
        it."""
        self._num_lookups = {"hit": 0, "miss": 0, "pending": 0}
        self._is_shut_down = False
        self._log = RateLimitedLog(_log, clock=clock)
        if self._scan is not None:
            self._scan.begin()

    def __repr__(self) -> str:
        return f"StoreTier({self.tier_type!r}, {self._store!r}, present={len(self._index)}, {self._runner!r})"

    # ---------------------------------------------------------------------------------------------------- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.lookup_prefix((key,), req_context)[0]

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        answers: list[bool | None] = [False]
        if self._reads.breaker.is_closed:
            is_complete = self._exclusive and self._scan is not None and self._scan.is_complete
            is_asked = self._questions is not None and self._questions.is_asking_all(keys)
            if is_asked and not is_complete and not self._runner.ended:
                self._num_lookups["pending"] += len(keys)
                return [None] * len(keys)
            answers = self._index.lookup_prefix(keys, is_complete)
            if self._questions is not None and None in answers:
                self._ask(keys, answers, req_context)
                if self._runner.ended and None in answers:
                    # The store may have answered since the last step. Otherwise the request would wait for one more
                    # step.
                    self._take_results()
                    return self.lookup_prefix(keys, req_context)
        counts = self._num_lookups
        counts["hit"] += answers.count(True)
        counts["miss"] += answers.count(False)
        counts["pending"] += answers.count(None)
        return answers

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if not self._reads.breaker.is_closed:
            return [False] * len(keys)
        is_complete = self._exclusive and self._scan is not None and self._scan.is_complete
        answers = self._index.lookup_each(keys, is_complete)
        if self._questions is not None and None in answers:
            ask = self._questions.ask
            answers = [ask(key, req_context) if answer is None else answer for key, answer in zip(keys, answers)]
        return answers

    def _ask(self, keys: Sequence[OffloadKey], answers: list[bool | None], req_context: ReqContext) -> None:
        """Ask the store about the unknown ``keys``, and update ``answers``. A key beyond the limit is answered with
        ``False``, which ends the list."""
        assert self._questions is not None
        for at, answer in enumerate(answers):
            if answer is None:
                answers[at] = self._questions.ask(keys[at], req_context)
                if answers[at] is False:
                    del answers[at + 1 :]
                    return

    def take_news(self) -> Collection[OffloadKey]:
        if self._runner.ended:
            self._take_results()
        news, self._news = self._news, []
        return news or ()

    def _note_found(self, keys: Collection[OffloadKey]) -> None:
        """Record that the scan has found ``keys``, so that the store's answers about them no longer matter."""
        self._note_news(keys)
        if self._questions is not None:
            self._questions.forget(keys)

    def _note_news(self, keys: Collection[OffloadKey] | None) -> None:
        """Record that more may be known about the ``keys`` that requests are asking for; ``None`` means about all of
        them."""
        if self._news is not None and self._questions is not None:
            self._news += self._questions.asked_of(keys)

    # -------------------------------------------------------------------------------------------------- transfers

    def submit_store(self, job: JobMetadata) -> None:
        self._transfers.submit_store(job)

    def submit_load(self, job: JobMetadata) -> None:
        self._transfers.submit_load(job)

    # ------------------------------------------------------------------------------------------------------ steps

    def on_schedule_end(self) -> None:
        self._losses.begin_step()
        self._take_results()
        self._transfers.submit_stores()
        if self._scan is not None and (gone := self._scan.step()):
            self._losses.record(gone, "removed")
        if self._questions is not None and self._questions.are_pending:
            self._questions.submit()
        if self._touched and self._clock() >= self._next_touch_s:
            self._submit_touches()
        if not self._reads.breaker.is_closed and self._reads.begin_probe():
            self._submit_probe()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if self._runner.ended:
            self._take_results()
        return self._transfers.take_results()

    def has_pending_work(self) -> bool:
        return self._transfers.is_pending or (self._questions is not None and self._questions.are_pending)

    def call_on_progress(self, call: Callable[[], None]) -> None:
        self._runner.on_ended = call

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._index.lost_events and self._scan is not None:
            self._scan.begin()
        return self._index.take_events()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        if keys and self._num_touched < _MAX_TOUCHED:
            self._touched.append(list(keys))
            self._num_touched += len(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(self._policy)

    def drain_jobs(self) -> None:
        self._transfers.submit_stores()
        if not self._runner.drain(self._drain_timeout_s):
            _log.warning(
                "Tier %r: I/O still runs after %g s; its slots stay reserved until it ends.",
                self.tier_type,
                self._drain_timeout_s,
            )
        self._take_results()

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self.drain_jobs()
        num_hung = self._runner.shutdown(self._drain_timeout_s)
        self._take_results()
        if self._scan is not None:
            self._scan.stop()
        self._transfers.release()
        if not num_hung:
            num_hung = int(not close_store(self._store, self.tier_type, self._drain_timeout_s))
        if num_hung:
            _log.warning(
                "Tier %r: %d threads hang in the store and are abandoned; its memory stays mapped.",
                self.tier_type,
                num_hung,
            )

    def is_readable(self) -> bool:
        return self._reads.breaker.is_closed

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return [*map(self._index.__contains__, keys)]

    def note_losses(self) -> None:
        # A store may lose blocks without a call.
        self._losses.queue()
        self._losses.take_in()

    def get_stats(self) -> Stats:
        tier, store = self.tier_type, self._store.stats()
        quota_bytes = math.inf if store.max_bytes is None else store.max_bytes
        used_bytes = len(self._index) * self.block_bytes if store.used_bytes is None else store.used_bytes
        free_bytes = math.inf if store.free_bytes is None else store.free_bytes
        stats: Stats = {("tier_lookups", tier, answer): count for answer, count in self._num_lookups.items()}
        stats |= {
            ("tier_blocks", tier): len(self._index),
            ("tier_bytes", tier): used_bytes,
            ("tier_quota_bytes", tier): quota_bytes,
            ("tier_free_bytes", tier): max(min(quota_bytes - used_bytes, free_bytes), 0),
            ("tier_healthy", tier): int(self._reads.breaker.is_closed and self._writes.breaker.is_closed),
            ("tier_corrupt_blocks", tier): store.corrupt_blocks,
            ("tier_evicted_blocks", tier): store.evicted_blocks,
            ("tier_queued_blocks", tier, "lookup"): self._runner.backlog(IoQueue.LOOKUP),
            ("tier_queued_blocks", tier, "load"): self._runner.backlog(IoQueue.LOAD),
            ("tier_queued_blocks", tier, "store"): self._runner.backlog(IoQueue.STORE),
        }
        for disk in store.disks:
            stats |= {
                ("tier_disk_bytes", tier, disk.path): disk.used_bytes,
                ("tier_disk_out", tier, disk.path): int(disk.is_out),
                ("tier_disk_failures", tier, disk.path): disk.failed_calls,
            }
        return stats | self._transfers.stats(tier) | self._reads.stats() | self._writes.stats()

    # --------------------------------------------------------------------------------------------- results of I/O

    def _take_results(self) -> None:
        # Losses before results, because a block whose loss is known must not be announced as present. A loss that is
        # queued later, or exceeds this step's limit, is kept; a later call removes the key.
        self._losses.take_in()
        if not self._runner.num_open_slices:
            return
        is_changed = False
        for result in self._runner.take_results():
            try:
                is_changed |= self._take_result(result)
            except Exception:  # noqa: BLE001 - a store's own collections are foreign; the other results are still taken
                self._log.exception(f"tier {self.tier_type!r} could not process the result of a call")
        if is_changed:
            self._note_news(None)

    def _take_result(self, result: IoResult) -> bool:
        """Process the result, and return whether more may be known about any block."""
        queue, was_on = result.task.queue, self._reads.breaker.is_closed
        if queue is IoQueue.LOOKUP:
            self._note_news(result.keys)
        result.task.on_result(result)
        # While reads are off, all blocks are misses. After a scan has ended, blocks that it did not find may also be
        # misses.
        return queue is IoQueue.UPKEEP or not (was_on and self._reads.breaker.is_closed)

    # ----------------------------------------------------------------------------------------------------- upkeep

    def _submit_probe(self) -> None:
        """Ask for a few blocks, and read the ones that are present into the probe's own memory. One good block is
        enough, so that a bad block does not keep reading off."""
        store, num_bytes = self._store, self.block_bytes
        try:
            keys = self._reads.keys_to_probe(self._index)
        except Exception:  # a store's own collection is foreign, and may change while it is listed
            self._reads.breaker.cancel_probe()  # so that the next step tries again
            raise

        def probe(start: int, stop: int) -> list[bool]:
            found = [key for key, is_here in zip(keys, store.contains(keys), strict=True) if is_here]
            for last, key in enumerate(found, 1 - len(found)):
                try:
                    store.read_into([key], [memoryview(bytearray(num_bytes))])
                    break
                except Exception:
                    if not last:
                        raise
            self._losses.queue()
            return [True]

        self._runner.submit(IoTask(IoQueue.LOAD, 1, probe, on_result=self._reads.record), 1)

    def _submit_touches(self) -> None:
        self._next_touch_s = self._clock() + _TOUCH_INTERVAL_S
        if self._runner.backlog(IoQueue.UPKEEP):
            return  # The scan runs, or the store is slower at touches than requests come. A later step tries again.
        store, touched = self._store, self._touched
        self._touched, self._num_touched = [], 0

        def touch(start: int, stop: int) -> list[bool]:
            for keys in touched:
                store.touch(keys)
            return [True]

        self._runner.submit(IoTask(IoQueue.UPKEEP, 1, touch), 1)
