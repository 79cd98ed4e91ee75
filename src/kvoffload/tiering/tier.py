# SPDX-License-Identifier: Apache-2.0
"""A secondary tier out of any block store."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadingEvent, OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext
from kvoffload.errors import ConfigError
from kvoffload.metrics import Stats
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvoffload.tiering.circuit_breaker import CircuitBreaker
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.runner import IoQueue, IoResult, IoStatus, IoTask, TierRunner
from kvoffload.tiering.stores.base import BlockStore

__all__ = ["StoreTier", "TierLimits"]

_log = logging.getLogger(__name__)

_READ_QUEUES = (IoQueue.LOOKUP, IoQueue.LOAD)
_LOOKUP_SLICE = 256
_MOST_TOUCHED = 65_536
_TOUCH_EVERY_S = 1.0
_NEWS_PER_POLL = 2_048
_SLICE_BYTES = 4 << 20
_MAX_SLICE_BLOCKS = 64


class TierLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a ``StoreTier`` does at once, and how long it waits. ``StoreOptions`` makes them configuration keys."""

    threads: int = 4
    """Store calls at once: the queue depth that the device sees."""
    timeout_s: float = 30.0
    """A store call that takes longer counts as hung, and the tier is not used until it returns. Work that is queued for
    longer is cancelled."""
    drain_timeout_s: float = 10.0
    """How long a reset of the cache and the shutdown wait for the tier's I/O, in real time."""
    max_backlog_blocks: int | None = None
    """Blocks that wait to be written or are being written, pinned in host memory; the tier drops more. Default: a
    quarter of host memory, but at least 64 blocks."""
    max_index_blocks: int = 1_000_000
    """Blocks that the tier remembers as present, at some 150 bytes each. It asks the store for others."""

    def check_limits(self, tier_type: str) -> None:
        """Raises ``ConfigError``, which names the tier by ``tier_type``, for numbers that no tier can work with."""
        for name in ("threads", "max_backlog_blocks", "max_index_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of the {tier_type!r} tier must be at least 1, not {value}.")
        for name in ("timeout_s", "drain_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of the {tier_type!r} tier must be positive, not {getattr(self, name)}.")


class StoreTier(SecondaryTierManager):
    """Asynchronous lookups, stores and loads over a synchronous ``store``, which it owns from here on.

    Every method runs on the scheduler's thread, which owns all state here. The store is called from the runner's
    threads alone; what they find comes back through queues that are emptied when the tier is polled.

    * A key is looked up in the index; one that is not there is asked of the store, once, with the others of its step,
      and answers ``None`` meanwhile. What was found absent is ``False`` for a while, and asked again in the
      background then. With ``exclusive`` nobody else writes to the store's namespace, and once it has been scanned
      what the index lacks is ``False`` at once.
    * A store that keeps failing, or hangs, is not asked any more: for reads (lookups are ``False``, loads fail) and
      writes (stores are dropped) separately, since a full disk still reads. A probe now and then finds out when
      it is back: for reads one of the tier's own, for writes the first slice of a job.
    * A job whose I/O hangs is not told as ended, because its slots may still be written.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(primary_kv_view, tier_type)
        limits = limits or TierLimits()
        limits.check_limits(tier_type)
        self._limits = limits
        self._store = store
        self._policy = offload_policy
        self._exclusive = exclusive
        self._clock = clock
        self._rows: npt.NDArray[np.uint8] | None = np.asarray(primary_kv_view)
        num_blocks = self._rows.shape[0]
        self._max_backlog = limits.max_backlog_blocks or max(64, num_blocks // 4)
        self._slice_blocks = max(1, min(_MAX_SLICE_BLOCKS, _SLICE_BYTES // self.block_bytes))
        self._runner = TierRunner(tier_type, limits.threads, timeout_s=limits.timeout_s, clock=clock)
        self._reads = CircuitBreaker("reading", clock=clock)
        self._writes = CircuitBreaker("writing", clock=clock)
        self._probe_key = OffloadKey(b"probe")

        self._index = PresenceIndex(tier_type, limits.max_index_blocks, clock=clock)
        self._callbacks: dict[IoTask, Callable[[IoResult], None]] = {}
        self._results: list[JobResult] = []
        self._num_transfers = 0
        self._touched: list[Sequence[OffloadKey]] = []
        self._num_touched = 0
        self._next_touch_s = 0.0
        # From I/O threads: keys seen by the scan, keys evicted by the store.
        self._seen: deque[Sequence[OffloadKey]] = deque()
        self._evicted: deque[Sequence[OffloadKey]] = deque()
        self._was_scanned = False
        self._is_shut_down = False

        self._answers = {"hit": 0, "miss": 0, "pending": 0}
        self._num_stored = self._num_loaded = self._num_dropped = 0
        self._num_store_failures = self._num_load_failures = 0
        self._submit(IoTask(IoQueue.UPKEEP, 1, self._scan), 1, self._scan_ended)

    def __repr__(self) -> str:
        return f"StoreTier({self.tier_type!r}, {self._store!r}, present={len(self._index)}, {self._runner!r})"

    # -------------------------------------------------------------------------------------------------- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer = self._answer(key)
        if answer is None and self._runner.has_results:
            # The store may have answered since the last step; otherwise the request would wait for one step more.
            self._take_results()
            answer = self._answer(key)
        self._answers["pending" if answer is None else "hit" if answer else "miss"] += 1
        return answer

    def _answer(self, key: OffloadKey) -> bool | None:
        if not self._reads.is_closed:
            return False
        return self._index.lookup(key, self._exclusive and self._was_scanned and not self._seen)

    def _submit_lookups(self) -> None:
        keys = self._index.take_keys_to_ask()

        def ended(result: IoResult) -> None:
            asked = keys[result.start : result.stop]
            self._note_health(self._reads, result, asked[0])
            if result.status is not IoStatus.DONE:
                self._index.record_no_answer(asked)
                return
            for key, is_present in zip(asked, result.outcomes, strict=True):
                self._index.record_answer(key, is_present)

        task = IoTask(IoQueue.LOOKUP, len(keys), lambda start, stop: self._store.contains(keys[start:stop]))
        self._submit(task, _LOOKUP_SLICE, ended)

    # ------------------------------------------------------------------------------------------------ transfers

    def submit_store(self, job: JobMetadata) -> None:
        admitted = min(len(job.keys), self._max_backlog - self._runner.backlog(IoQueue.STORE))
        if not self._writes.is_closed:
            is_probe = not self._runner.num_overdue((IoQueue.STORE,)) and self._writes.begin_probe()
            admitted = min(admitted, self._slice_of(len(job.keys))) if is_probe else 0
            if is_probe and admitted <= 0:
                self._writes.cancel_probe()
        admitted = max(0, admitted)
        self._num_dropped += len(job.keys) - admitted
        if not admitted:
            self._results.append(JobResult(job.job_id, success=False))
            return
        keys = job.keys[:admitted]
        self._index.begin_store(keys)
        assert self._rows is not None
        work = partial(self._transfer, self._store.write, keys, job.block_ids, self._rows)
        self._submit_transfer(job, IoTask(IoQueue.STORE, admitted, work), self._store_slice_ended)

    def submit_load(self, job: JobMetadata) -> None:
        if not self._reads.is_closed:
            self._num_load_failures += len(job.keys)
            self._results.append(JobResult(job.job_id, success=False))
            return
        assert self._rows is not None
        work = partial(self._transfer, self._store.read_into, job.keys, job.block_ids, self._rows)
        self._submit_transfer(job, IoTask(IoQueue.LOAD, len(job.keys), work), self._load_slice_ended)

    def _submit_transfer(
        self, job: JobMetadata, task: IoTask, slice_ended: Callable[[JobMetadata, IoResult], None]
    ) -> None:
        self._num_transfers += 1

        def ended(result: IoResult) -> None:
            slice_ended(job, result)
            if result.is_last:
                self._num_transfers -= 1
                # The outcomes are fewer than the keys where a part of the job was dropped.
                good = [key for key, is_good in zip(job.keys, task.outcomes, strict=False) if is_good]
                all_good = len(good) == len(job.keys)
                self._results.append(JobResult(job.job_id, all_good, good if good and not all_good else None))

        self._submit(task, self._slice_of(task.num_items), ended)

    def _slice_of(self, num_blocks: int) -> int:
        """Small enough for all threads to share a job, and for the next in line not to wait long."""
        return min(self._slice_blocks, -(-num_blocks // self._runner.num_threads))

    def _transfer(
        self,
        call: Callable[[Sequence[OffloadKey], Sequence[memoryview]], list[bool]],
        keys: Sequence[OffloadKey],
        block_ids: npt.NDArray[np.int64],
        rows: npt.NDArray[np.uint8],
        start: int,
        stop: int,
    ) -> list[bool]:
        """In an I/O thread: moves some blocks between ``rows`` and the store."""
        try:
            return call(keys[start:stop], [memoryview(rows[slot]) for slot in block_ids[start:stop].tolist()])
        finally:
            self._pass_on_evicted()

    def _pass_on_evicted(self) -> None:
        if evicted := self._store.take_evicted():
            self._evicted.append(evicted)

    def _store_slice_ended(self, job: JobMetadata, result: IoResult) -> None:
        keys, outcomes = job.keys[result.start : result.stop], result.outcomes
        self._note_health(self._writes, result, keys[0])
        written = []
        for key, is_written in zip(keys, outcomes, strict=True):
            is_present = self._index.end_store(key)
            if is_written and is_present:
                written.append(key)
        self._index.add(written)
        self._num_stored += outcomes.count(True)
        if result.status is IoStatus.CANCELLED:
            self._num_dropped += len(keys)
        else:
            self._num_store_failures += outcomes.count(False)

    def _load_slice_ended(self, job: JobMetadata, result: IoResult) -> None:
        keys = job.keys[result.start : result.stop]
        self._note_health(self._reads, result, keys[0])
        missing = [key for key, is_loaded in zip(keys, result.outcomes, strict=True) if not is_loaded]
        self._num_loaded += len(keys) - len(missing)
        self._num_load_failures += len(missing)
        if result.status is IoStatus.DONE:
            # The store said no: what we thought to know is forgotten, and asked for next time.
            self._index.remove(missing)

    # ---------------------------------------------------------------------------------------------------- steps

    def on_schedule_end(self) -> None:
        self._poll()
        if self._index.has_keys_to_ask:
            self._submit_lookups()
        if self._touched and (now_s := self._clock()) >= self._next_touch_s:
            self._next_touch_s = now_s + _TOUCH_EVERY_S
            self._submit_touches()
        if not self._reads.is_closed and not self._runner.num_overdue(_READ_QUEUES) and self._reads.begin_probe():
            self._submit_probe()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._poll()
        if not self._results:
            return ()
        results, self._results = self._results, []
        return results

    def has_pending_work(self) -> bool:
        return bool(self._num_transfers or self._results or self._index.is_asking)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._index.take_events()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        if keys and self._num_touched < _MOST_TOUCHED:
            self._touched.append(list(keys))
            self._num_touched += len(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(self._policy)

    def drain_jobs(self) -> None:
        if not self._runner.drain(self._limits.drain_timeout_s):
            _log.warning(
                "Tier %r: I/O still runs after %g s; its slots stay reserved until it ends.",
                self.tier_type,
                self._limits.drain_timeout_s,
            )
        self._poll()

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self.drain_jobs()
        num_hung = self._runner.shutdown(self._limits.drain_timeout_s)
        self._poll()
        self._rows = None
        if not num_hung:
            closing = threading.Thread(target=self._store.close, name=f"kvoffload-{self.tier_type}-close", daemon=True)
            closing.start()
            closing.join(self._limits.drain_timeout_s)
            num_hung = int(closing.is_alive())
        if num_hung:
            _log.warning(
                "Tier %r: %d threads hang in the store and are left behind; its memory stays mapped.",
                self.tier_type,
                num_hung,
            )

    def get_stats(self) -> Stats:
        tier, store = self.tier_type, self._store.stats()
        stats: Stats = {("tier_lookups", tier, answer): count for answer, count in self._answers.items()}
        stats |= {
            ("tier_blocks", tier): len(self._index),
            ("tier_bytes", tier): store.used_bytes,
            ("tier_healthy", tier): int(self._reads.is_closed and self._writes.is_closed),
            ("tier_blocks_stored", tier): self._num_stored,
            ("tier_blocks_loaded", tier): self._num_loaded,
            ("tier_store_failures", tier): self._num_store_failures,
            ("tier_load_failures", tier): self._num_load_failures,
            ("tier_corrupt_blocks", tier): store.corrupt_blocks,
            ("tier_evicted_blocks", tier): store.evicted_blocks,
            ("tier_dropped_blocks", tier): self._num_dropped,
            ("tier_queued_jobs", tier): self._num_transfers,
        }
        return stats

    # ------------------------------------------------------------------------------------------- what has ended

    def _submit(self, task: IoTask, slice_items: int, ended: Callable[[IoResult], None]) -> None:
        self._callbacks[task] = ended
        self._runner.submit(task, slice_items)

    def _poll(self) -> None:
        """Takes in what the I/O threads have found."""
        if self._runner.is_idle and not self._seen:
            return
        self._take_results()
        num_seen = 0
        while self._seen and num_seen < _NEWS_PER_POLL:
            batch = self._seen.popleft()
            self._index.add(batch)
            num_seen += len(batch)
        for task in self._runner.check_deadlines():
            breaker = self._reads if task.queue in _READ_QUEUES else self._writes
            self._note_failure(breaker, "does not come to an end", True)

    def _take_results(self) -> None:
        # Evictions before results: a block whose eviction is known must not be announced as present. An eviction that a
        # thread queues after this loop is not lost; the next call removes the key.
        while self._evicted:
            self._index.remove(self._evicted.popleft())
        for result in self._runner.take_results():
            self._callbacks[result.task](result)
            if result.is_last:
                del self._callbacks[result.task]

    # --------------------------------------------------------------------------------------------------- health

    def _note_health(self, breaker: CircuitBreaker, result: IoResult, key: OffloadKey) -> None:
        match result.status:
            case IoStatus.DONE:
                if breaker.record_success():
                    _log.warning("Tier %r is used for %s again.", self.tier_type, breaker.name)
            case IoStatus.FAILED:
                if breaker is self._reads:
                    self._probe_key = key
                self._note_failure(breaker, str(result.error), False)
            case IoStatus.CANCELLED:
                breaker.cancel_probe()

    def _note_failure(self, breaker: CircuitBreaker, reason: str, is_grave: bool) -> None:
        if breaker.record_failure(is_grave=is_grave):
            _log.warning("Tier %r is not used for %s until it recovers: %s", self.tier_type, breaker.name, reason)
            # What waits would only fail one by one, and holds slots.
            self._runner.cancel_queued(*(_READ_QUEUES if breaker is self._reads else (IoQueue.STORE,)))

    def _submit_probe(self) -> None:
        """Asks for, and reads if it is there, the block that failed last, into memory of the probe's own."""
        key, num_bytes = self._probe_key, self.block_bytes

        def probe(start: int, stop: int) -> list[bool]:
            if self._store.contains([key]) == [True]:
                self._store.read_into([key], [memoryview(bytearray(num_bytes))])
                self._pass_on_evicted()
            return [True]

        self._submit(IoTask(IoQueue.LOAD, 1, probe), 1, lambda result: self._note_health(self._reads, result, key))

    # ------------------------------------------------------------------------------------- upkeep, in its thread

    def _scan(self, start: int, stop: int) -> list[bool]:
        for batch in self._store.scan():
            for first in range(0, len(batch), _NEWS_PER_POLL // 4):
                self._seen.append(batch[first : first + _NEWS_PER_POLL // 4])
            if self._runner.is_closing:
                return [False]
        return [True]

    def _scan_ended(self, result: IoResult) -> None:
        self._was_scanned = result.outcomes == [True]
        if result.status is IoStatus.FAILED:
            _log.warning("Tier %r could not be scanned, so each block is asked for: %s", self.tier_type, result.error)

    def _submit_touches(self) -> None:
        if self._runner.backlog(IoQueue.UPKEEP):
            return  # the scan, or a store that is slower at this than requests come
        touched, self._touched, self._num_touched = self._touched, [], 0

        def touch(start: int, stop: int) -> list[bool]:
            for keys in touched:
                self._store.touch(keys)
            return [True]

        self._submit(IoTask(IoQueue.UPKEEP, 1, touch), 1, lambda result: None)
