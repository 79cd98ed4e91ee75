# SPDX-License-Identifier: Apache-2.0
"""A secondary tier over any block store."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadingEvent, OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext
from kvoffload.errors import ConfigError
from kvoffload.logs import RateLimitedLog
from kvoffload.lost_blocks import NO_LOSSES, LostBlocks
from kvoffload.metrics import Histogram, Sample, Stats
from kvoffload.miss import Miss
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvoffload.tiering.circuit_breaker import CircuitBreaker
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.runner import READS, IoQueue, IoResult, IoStatus, IoTask, TierRunner
from kvoffload.tiering.stores.base import BlockStore, LossCause

__all__ = ["StoreTier", "TierLimits", "default_max_backlog"]

_log = logging.getLogger(__name__)

_LOOKUP_SLICE = 256
_MAX_TOUCHED = 65_536
_TOUCH_INTERVAL_S = 1.0
_SCANNED_PER_STEP = 64
_MAX_SCANNED = 64
"""Batches of so many keys that wait to be taken in. A scan that has found more rests until half of them are."""
_SCAN_SHARE = 4
"""A store is not scanned again before this many times the duration of the last scan."""
_PROBED_BLOCKS = 3
_SLICE_BYTES = 4 << 20
_MAX_SLICE_BLOCKS = 64
_MISSES: dict[LossCause, Miss] = {"evicted": Miss.EVICTED, "corrupt": Miss.CORRUPT, "removed": Miss.REMOVED}


def default_max_backlog(num_slots: int) -> int:
    """``TierLimits.max_backlog_blocks`` for host memory of so many blocks."""
    return max(64, num_slots // 4)


class TierLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a ``StoreTier`` does at once, and how long it waits. ``StoreOptions`` makes them configuration keys."""

    server_evicts: ClassVar[bool] = False
    """The store is a service with a size of its own, which it does not tell: it evicts by a policy of its own, and does
    not say what."""

    threads: int | None = None
    """Reads at once, and writes at once: the queue depths that the device sees. Default: what the store declares as
    ``requests_in_flight``, 4 unless it says otherwise."""
    timeout_s: float = 30.0
    """A store call that takes longer counts as hung. While half of the threads for reading hang, or half of those for
    writing, the tier is not used for that. Work that is queued for longer is cancelled."""
    drain_timeout_s: float = 10.0
    """How long a reset of the cache and the shutdown wait for the tier's I/O, in real time."""
    max_backlog_blocks: int | None = None
    """Blocks that wait to be written or are being written, pinned in host memory; the tier drops more. Default: a
    quarter of host memory, but at least 64 blocks."""
    max_index_blocks: int = 1_000_000
    """Blocks that the tier remembers as present, at some 150 bytes each. It asks the store for others. A ``disk`` tier
    remembers none, as the store itself knows what it has."""

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
    """A secondary tier over a synchronous ``store``, which it owns from here on.

    Every method runs on the scheduler's thread, and so does every change of the state here. Only the runner's threads
    call the store for anything that may take long; what they find waits in queues until the scheduler's thread takes it
    in.

    * Lookups are answered from the presence index. An unknown key is ``None``, and the store is asked for it once,
      together with the other unknown keys of the step. An absent key is ``False``; after a while the store is asked for
      it again in the background. ``exclusive`` says that no other process writes to the store's namespace: once the
      store has been scanned, an unknown key is ``False`` at once.
    * Two circuit breakers, one for reads and one for writes, stop the calls to a store that keeps failing or hangs.
      There are two because a full disk can still be read. While reads are off, lookups are ``False`` and loads fail;
      while writes are off, stores are dropped. The tier probes reads by a call of its own, for other blocks than those
      that failed, and writes by the first slice of a job.
    * A call that hangs costs its thread and its job. The job has no result, because its slots may still be written, and
      the blocks of the call are absent until it returns. The tier goes on while more than half of the threads are left.
    * A store that declares its ``resident`` keys answers each lookup itself, at once. It is scanned only for events: as
      soon as somebody takes them, all that is there follows as events.
    * A store that declares ``rescan_s`` is scanned again and again. Blocks that were deleted from outside are forgotten
      then. One step takes in a bounded number of the keys that a scan has found. A scan rests while some thousand wait,
      if the store lets it, and the upkeep thread is free meanwhile.
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
        lost: LostBlocks = NO_LOSSES,
    ) -> None:
        super().__init__(primary_kv_view, tier_type)
        limits = limits or TierLimits()
        limits.check_limits(tier_type)
        self._limits = limits
        self._store = store
        store.attach(primary_kv_view)
        self._policy = offload_policy
        self._exclusive = exclusive
        self._clock = clock
        self._slots: npt.NDArray[np.uint8] | None = np.asarray(primary_kv_view)
        self._max_backlog = limits.max_backlog_blocks or default_max_backlog(len(self._slots))
        self._max_slice_blocks = store.batch_blocks or max(1, min(_MAX_SLICE_BLOCKS, _SLICE_BYTES // self.block_bytes))
        threads = limits.threads or store.requests_in_flight
        self._runner = TierRunner(tier_type, threads, timeout_s=limits.timeout_s, clock=clock)
        self._reads = CircuitBreaker("reading", clock=clock)
        self._writes = CircuitBreaker("writing", clock=clock)
        self._failed: Sequence[OffloadKey] = ()
        """The blocks whose read failed last."""
        self._load_failures = 0
        """How many loads, probes included, failed in a row."""
        self._num_probes = 0

        self._index = PresenceIndex(tier_type, limits.max_index_blocks, resident=store.resident, clock=clock)
        self._callbacks: dict[IoTask, Callable[[IoResult], None]] = {}
        self._results: list[JobResult] = []
        self._transfers: dict[IoTask, None] = {}
        """Tasks of jobs without a result, oldest first."""
        self._num_storing = 0
        """Blocks of store jobs whose slices have not ended."""
        self._touched: list[Sequence[OffloadKey]] = []
        self._num_touched = 0
        self._next_touch_s = 0.0
        # Filled by I/O threads: keys that the scan found, and keys that the store lost.
        self._scanned: deque[Sequence[OffloadKey]] = deque()
        self._lost: deque[dict[OffloadKey, LossCause]] = deque()
        self._scan_is_done = False
        """A scan has ended, and found everything."""
        self._scan_budget = _SCANNED_PER_STEP
        """Scanned keys that this step may still take in."""
        self._scan: Iterator[None] | None = None
        """The scan that has not ended. Only the upkeep thread goes on with it."""
        self._scan_rests = False
        self._scan_duration_s = 0.0
        """Without its rests."""
        self._next_scan_s = math.inf
        self._is_shut_down = False

        self._num_lookups = {"hit": 0, "miss": 0, "pending": 0}
        self._num_stored = self._num_loaded = self._num_dropped = 0
        self._num_store_failures = self._num_load_failures = self._num_corrupt = 0
        self._io = {direction: _IoCounts(tier_type, direction) for direction in ("read", "write")}
        self._corruption_log = RateLimitedLog(_log, clock=clock)
        self._lost_blocks = lost
        if not self._index.is_exact:
            self._submit_scan()

    def __repr__(self) -> str:
        return f"StoreTier({self.tier_type!r}, {self._store!r}, present={len(self._index)}, {self._runner!r})"

    # ---------------------------------------------------------------------------------------------------- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer: bool | None = False
        if self._reads.is_closed:
            answer = self._index.lookup(key, self._exclusive and self._scan_is_done and not self._scanned)
            if answer is None and self._runner.ended:
                # The store may have answered since the last step; otherwise the request would wait for one step more.
                self._take_results()
                return self.lookup(key, req_context)
        self._num_lookups["pending" if answer is None else "hit" if answer else "miss"] += 1
        return answer

    def _submit_lookups(self) -> None:
        keys = self._index.take_keys_to_ask()

        def ended(result: IoResult) -> None:
            self._record(self._reads, result)
            self._index.end_hang(result.keys)
            if result.status is not IoStatus.DONE:
                self._index.record_no_answer(result.keys)
                return
            for key, is_present in zip(result.keys, result.outcomes, strict=True):
                self._index.record_answer(key, is_present)

        task = IoTask(IoQueue.LOOKUP, len(keys), lambda start, stop: self._store.contains(keys[start:stop]), keys)
        self._submit(task, _LOOKUP_SLICE, ended)

    # -------------------------------------------------------------------------------------------------- transfers

    def submit_store(self, job: JobMetadata) -> None:
        num_admitted = self._num_admitted(len(job.keys))
        self._num_dropped += len(job.keys) - num_admitted
        if not num_admitted:
            self._results.append(JobResult(job.job_id, success=False))
            return
        self._num_storing += num_admitted
        self._index.begin_store(job.keys[:num_admitted])
        task = IoTask(IoQueue.STORE, num_admitted, self._transfer_of(job, self._store.write), job.keys)
        self._submit_transfer(job, task, self._store_slice_ended)

    def _num_admitted(self, num_blocks: int) -> int:
        """How many of a job's blocks are to be written, from its first block on."""
        num_admitted = min(num_blocks, self._max_backlog - self._num_storing)
        if num_admitted <= 0:
            return 0
        if self._writes.is_closed:
            return num_admitted
        # Calls that hang are their own probe: no other thread is risked before they return.
        if self._too_many_hang(IoQueue.STORE) or not self._writes.begin_probe():
            return 0
        return min(num_admitted, self._slice_blocks_of(num_blocks))

    def submit_load(self, job: JobMetadata) -> None:
        if not self._reads.is_closed:
            self._num_load_failures += len(job.keys)
            self._results.append(JobResult(job.job_id, success=False))
            return
        task = IoTask(IoQueue.LOAD, len(job.keys), self._transfer_of(job, self._store.read_into), job.keys)
        self._submit_transfer(job, task, self._load_slice_ended)

    def _submit_transfer(self, job: JobMetadata, task: IoTask, slice_ended: Callable[[IoResult], None]) -> None:
        self._transfers[task] = None

        def ended(result: IoResult) -> None:
            slice_ended(result)
            if result.is_last:
                del self._transfers[task]
                # The outcomes are fewer than the keys where a part of the job was dropped.
                good = [key for key, is_good in zip(job.keys, task.outcomes, strict=False) if is_good]
                all_good = len(good) == len(job.keys)
                some_good = good if good and not all_good else None
                self._results.append(JobResult(job.job_id, all_good, some_good, result.ended_s))

        self._submit(task, self._slice_blocks_of(task.num_items), ended)

    def _slice_blocks_of(self, num_blocks: int) -> int:
        """Blocks per slice of a job: so few that all threads share the job, and that no slice delays the next one
        long."""
        return min(self._max_slice_blocks, -(-num_blocks // self._runner.num_threads))

    def _transfer_of(
        self, job: JobMetadata, call: Callable[[Sequence[OffloadKey], Sequence[memoryview]], list[bool]]
    ) -> Callable[[int, int], list[bool]]:
        """``job`` as work for the I/O threads. It refers to the slots itself, so that a call which hangs beyond
        ``shutdown`` keeps them mapped."""
        slots, keys, block_ids = self._slots, job.keys, job.block_ids
        assert slots is not None

        def transfer(start: int, stop: int) -> list[bool]:
            try:
                return call(keys[start:stop], [memoryview(slots[slot]) for slot in block_ids[start:stop].tolist()])
            finally:
                self._queue_lost()

        return transfer

    def _queue_lost(self) -> None:
        if lost := self._store.take_lost():
            self._lost.append(lost)

    def _store_slice_ended(self, result: IoResult) -> None:
        keys, outcomes = result.keys, result.outcomes
        self._num_storing -= len(keys)
        self._record(self._writes, result)
        self._index.end_store(keys, outcomes)
        num_stored = outcomes.count(True)
        self._num_stored += num_stored
        self._io["write"].count(result, num_stored * self.block_bytes)
        if result.status is IoStatus.CANCELLED:
            self._num_dropped += len(keys)
        else:
            self._num_store_failures += outcomes.count(False)

    def _load_slice_ended(self, result: IoResult) -> None:
        keys = result.keys
        self._record(self._reads, result)
        self._index.end_hang(keys)
        missing = [key for key, is_loaded in zip(keys, result.outcomes, strict=True) if not is_loaded]
        num_loaded = len(keys) - len(missing)
        self._num_loaded += num_loaded
        self._io["read"].count(result, num_loaded * self.block_bytes)
        self._num_load_failures += len(missing)
        if result.status is IoStatus.DONE:
            if not self._index.is_exact:  # those that the store lost itself are not in the index any more
                self._record_loss([key for key in missing if key in self._index], "removed")
            # The store lacks them, whatever the index says: the next lookup asks the store.
            self._index.remove(missing)
        if missing:
            self._log_corruption(missing)

    def _record_loss(self, keys: Collection[OffloadKey], cause: LossCause) -> None:
        if cause == "removed" and self._limits.server_evicts:
            cause = "evicted"
        self._lost_blocks.record(keys, _MISSES[cause], self.tier_type)

    def _log_corruption(self, missing: Sequence[OffloadKey]) -> None:
        """``missing`` could not be read; whether a block was corrupt, the store's count says."""
        num_corrupt = self._store.stats().corrupt_blocks
        if num_corrupt > self._num_corrupt:
            self._num_corrupt = num_corrupt
            self._corruption_log.warning(
                f"Tier {self.tier_type!r} found corrupt blocks, {num_corrupt} since its start; each is a miss. Last "
                f"while reading {missing[-1].hex()} in {self._store!r}."
            )

    # ------------------------------------------------------------------------------------------------------ steps

    def on_schedule_end(self) -> None:
        self._scan_budget = _SCANNED_PER_STEP
        self._poll()
        if not self._scanned and (gone := self._index.forget_unseen()):
            self._record_loss(gone, "removed")
        if self._index.to_ask:
            self._submit_lookups()
        if self._touched and (now_s := self._clock()) >= self._next_touch_s:
            self._next_touch_s = now_s + _TOUCH_INTERVAL_S
            self._submit_touches()
        if self._scan_rests and len(self._scanned) <= _MAX_SCANNED // 2:
            self._go_on_with_scan()
        if not self._reads.is_closed and not self._too_many_hang(*READS) and self._reads.begin_probe():
            self._submit_probe()
        if self._clock() >= self._next_scan_s and not self._scanned and not self._runner.backlog(IoQueue.UPKEEP):
            self._submit_scan()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._poll()
        if not self._results:
            return ()
        results, self._results = self._results, []
        return results

    def has_pending_work(self) -> bool:
        # Oldest first: all that are looked at before the first that goes on hang.
        goes_on = any(not task.hangs for task in self._transfers)
        return bool(goes_on or self._results or self._index.is_asking)

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._index.has_events:
            self._index.begin_events()
            self._submit_scan()
        return self._index.take_events()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        if keys and self._num_touched < _MAX_TOUCHED:
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
        self._scan, self._scan_rests = None, False
        self._slots = None
        if not num_hung:
            closing = threading.Thread(target=self._close_store, name=f"kvoffload-{self.tier_type}-close", daemon=True)
            closing.start()
            closing.join(self._limits.drain_timeout_s)
            num_hung = int(closing.is_alive())
        if num_hung:
            _log.warning(
                "Tier %r: %d threads hang in the store and are left behind; its memory stays mapped.",
                self.tier_type,
                num_hung,
            )

    def _close_store(self) -> None:
        try:
            self._store.close()
        except BaseException as exc:  # noqa: BLE001 - in a thread of its own, where nobody else would report it
            _log.warning("Tier %r: its store failed to close: %s", self.tier_type, exc)

    def is_readable(self) -> bool:
        return self._reads.is_closed

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        # A store may lose blocks without a call: what is explained next shall have the cause.
        self._queue_lost()
        self._take_lost()
        return [key in self._index for key in keys]

    def get_stats(self) -> Stats:
        tier, store = self.tier_type, self._store.stats()
        quota_bytes = math.inf if store.max_bytes is None else store.max_bytes
        used_bytes = len(self._index) * self.block_bytes if store.used_bytes is None else store.used_bytes
        stats: Stats = {("tier_lookups", tier, answer): count for answer, count in self._num_lookups.items()}
        stats |= {
            ("tier_blocks", tier): len(self._index),
            ("tier_bytes", tier): used_bytes,
            ("tier_quota_bytes", tier): quota_bytes,
            ("tier_free_bytes", tier): max(quota_bytes - used_bytes, 0),
            ("tier_healthy", tier): int(self._reads.is_closed and self._writes.is_closed),
            ("tier_breaker_open", tier, "read"): int(not self._reads.is_closed),
            ("tier_breaker_open", tier, "write"): int(not self._writes.is_closed),
            ("tier_blocks_stored", tier): self._num_stored,
            ("tier_blocks_loaded", tier): self._num_loaded,
            ("tier_store_failures", tier): self._num_store_failures,
            ("tier_load_failures", tier): self._num_load_failures,
            ("tier_corrupt_blocks", tier): store.corrupt_blocks,
            ("tier_evicted_blocks", tier): store.evicted_blocks,
            ("tier_dropped_blocks", tier): self._num_dropped,
            ("tier_queued_jobs", tier): len(self._transfers),
            ("tier_queued_blocks", tier, "lookup"): self._runner.backlog(IoQueue.LOOKUP),
            ("tier_queued_blocks", tier, "load"): self._runner.backlog(IoQueue.LOAD),
            ("tier_queued_blocks", tier, "store"): self._runner.backlog(IoQueue.STORE),
        }
        for counts in self._io.values():
            stats |= counts.stats()
        return stats

    # --------------------------------------------------------------------------------------------- results of I/O

    def _submit(self, task: IoTask, slice_items: int, ended: Callable[[IoResult], None]) -> None:
        self._callbacks[task] = ended
        self._runner.submit(task, slice_items)

    def _poll(self) -> None:
        """Takes in what the I/O threads have found. Cheap if they are idle."""
        self._take_results()
        while self._scanned and self._scan_budget >= len(self._scanned[0]):
            batch = self._scanned.popleft()
            self._index.add(batch)
            self._scan_budget -= len(batch)

    def _take_results(self) -> None:
        # Losses before results: a block whose loss is known must not be announced as present. A loss that a thread
        # queues after this is not forgotten; the next call removes the key.
        self._take_lost()
        for result in self._runner.take_results() if self._runner.num_open_slices else ():
            if result.status is IoStatus.OVERDUE:
                self._call_hangs(result)
                continue
            self._callbacks[result.task](result)
            if result.is_last:
                del self._callbacks[result.task]

    def _take_lost(self) -> None:
        while self._lost:
            lost = self._lost.popleft()
            self._index.remove(list(lost))
            for cause in dict.fromkeys(lost.values()):
                self._record_loss([key for key in lost if lost[key] == cause], cause)

    def _call_hangs(self, result: IoResult) -> None:
        is_read = result.task.queue in READS
        _log.warning(
            "Tier %r: a call for %s has been running for more than %g s; its thread is lost until it returns.",
            self.tier_type,
            "reading" if is_read else "writing",
            self._limits.timeout_s,
        )
        if is_read:
            self._index.begin_hang(result.keys)
        breaker = self._reads if is_read else self._writes
        if self._too_many_hang(*(READS if is_read else (IoQueue.STORE,))):
            self._record_failure(breaker, "hang", "Too many calls hang.", is_grave=True)
        elif not breaker.is_closed:
            # It may be the probe, without whose end there would be no other. If it returns after all, that counts too.
            self._record_failure(breaker, "hang", "A probe hangs.")

    def _too_many_hang(self, *queues: IoQueue) -> bool:
        """Whether half of the threads that serve ``queues`` hang."""
        return 2 * self._runner.num_overdue(queues) >= self._runner.num_threads

    # ------------------------------------------------------------------------------------------- circuit breakers

    def _record(self, breaker: CircuitBreaker, result: IoResult) -> None:
        is_load = result.task.queue is IoQueue.LOAD
        if is_load and result.status in (IoStatus.DONE, IoStatus.FAILED):
            self._load_failures = self._load_failures + 1 if result.status is IoStatus.FAILED else 0
        match result.status:
            case IoStatus.DONE:
                if breaker is self._reads and self._load_failures:
                    # A lookup, which shows nothing of loads.
                    if breaker.is_closed:
                        breaker.failures = min(breaker.failures, self._load_failures)
                    return
                if breaker.failures and breaker.record_success():
                    why = self._io["read" if breaker is self._reads else "write"].why_off
                    _log.warning("Tier %r is used for %s again. It was off: %s", self.tier_type, breaker.name, why)
            case IoStatus.FAILED:
                if breaker is self._reads and result.keys:
                    self._failed = result.keys
                self._record_failure(breaker, _reason_of(result.error), str(result.error))
            case IoStatus.CANCELLED:
                breaker.cancel_probe()

    def _record_failure(self, breaker: CircuitBreaker, reason: str, text: str, *, is_grave: bool = False) -> None:
        counts = self._io["read" if breaker is self._reads else "write"]
        if breaker.record_failure(is_grave=is_grave):
            counts.count_trip(reason, text)
            _log.warning("Tier %r is not used for %s until it recovers: %s", self.tier_type, breaker.name, text)
            # Queued slices would only fail one by one, and meanwhile hold slots.
            self._runner.cancel_queued(*(READS if breaker is self._reads else (IoQueue.STORE,)))
        elif not breaker.is_closed and reason != counts.reason:
            counts.set_reason(reason, text)
            _log.warning("Tier %r is still not used for %s: %s", self.tier_type, breaker.name, text)

    def _submit_probe(self) -> None:
        """Asks for a few blocks other than those that failed last, and reads those that are there, into memory of the
        probe's own. One of them is enough: a bad block does not keep reading off."""
        keys = self._index.sample(_PROBED_BLOCKS, self._num_probes, self._failed) or [OffloadKey(b"probe")]
        self._num_probes += 1
        store, num_bytes = self._store, self.block_bytes

        def probe(start: int, stop: int) -> list[bool]:
            found = [key for key, is_here in zip(keys, store.contains(keys), strict=True) if is_here]
            for last, key in enumerate(found, 1 - len(found)):
                try:
                    store.read_into([key], [memoryview(bytearray(num_bytes))])
                    break
                except Exception:
                    if not last:
                        raise
            self._queue_lost()
            return [True]

        self._submit(IoTask(IoQueue.LOAD, 1, probe), 1, lambda result: self._record(self._reads, result))

    # ----------------------------------------------------------------------------------------------------- upkeep

    def _submit_scan(self) -> None:
        """Begins a scan, in place of one that has not ended."""
        self._scan, self._scan_duration_s, self._next_scan_s = self._find_keys(), 0.0, math.inf
        self._index.begin_scan()
        self._go_on_with_scan()

    def _go_on_with_scan(self) -> None:
        scan, self._scan_rests = self._scan, False
        assert scan is not None

        def go_on(start: int, stop: int) -> list[bool]:
            for _ in scan:
                is_full = self._store.scan_may_rest and len(self._scanned) >= _MAX_SCANNED
                if is_full or self._runner.is_closing:
                    return [False]
            return [True]

        self._submit(IoTask(IoQueue.UPKEEP, 1, go_on), 1, lambda result: self._scan_stopped(scan, result))

    def _find_keys(self) -> Iterator[None]:
        """In the upkeep thread. The keys of the store come in batches small enough for one step."""
        for batch in self._store.scan():
            for first in range(0, len(batch), _SCANNED_PER_STEP):
                self._scanned.append(batch[first : first + _SCANNED_PER_STEP])
            yield

    def _scan_stopped(self, scan: Iterator[None], result: IoResult) -> None:
        """It rests, has ended or has failed."""
        if scan is not self._scan:
            return  # another one has begun
        self._scan_duration_s += result.seconds
        if result.status is IoStatus.DONE and not all(result.outcomes):
            self._scan_rests = True
            return
        self._scan = None
        if result.status is IoStatus.DONE:
            self._scan_is_done = True
            self._index.end_scan()
        elif result.status is IoStatus.FAILED:
            _log.warning(
                "Tier %r could not be scanned, so unknown blocks are asked for: %s", self.tier_type, result.error
            )
        if self._store.rescan_s is not None:
            self._next_scan_s = self._clock() + max(self._store.rescan_s, _SCAN_SHARE * self._scan_duration_s)

    def _submit_touches(self) -> None:
        if self._runner.backlog(IoQueue.UPKEEP):
            return  # The scan runs, or the store is slower at touches than requests come. A later step tries again.
        touched, self._touched, self._num_touched = self._touched, [], 0

        def touch(start: int, stop: int) -> list[bool]:
            for keys in touched:
                self._store.touch(keys)
            return [True]

        self._submit(IoTask(IoQueue.UPKEEP, 1, touch), 1, lambda result: None)


class _IoCounts:
    """Reads of blocks from a tier's store, or writes to it, and the trips of the circuit breaker that stops them."""

    def __init__(self, tier: str, direction: str) -> None:
        self._labels = tier, direction
        self._num_bytes = self._num_trips = 0
        self._seconds = 0.0
        self._batches = Histogram("tier_batch_seconds", tier, direction)
        self._open_since_s: dict[str, float] = {}
        self.reason = self.why_off = ""
        """Why the circuit breaker is open, or was last: in one word, and for people."""

    def count(self, result: IoResult, num_bytes: int) -> None:
        """A call of the store has ended, or was cancelled, and moved ``num_bytes``."""
        self._num_bytes += num_bytes
        if result.status is IoStatus.DONE:
            self._seconds += result.seconds
            self._batches.observe(result.seconds)

    def count_trip(self, reason: str, text: str) -> None:
        """The circuit breaker opened."""
        self._num_trips += 1
        self.set_reason(reason, text)

    def set_reason(self, reason: str, text: str) -> None:
        """The circuit breaker is open for this reason from now on."""
        self.reason, self.why_off = reason, text
        self._open_since_s[reason] = time.time()

    def stats(self) -> Stats:
        stats: dict[Sample, float] = {
            ("tier_io_bytes", *self._labels): self._num_bytes,
            ("tier_io_seconds", *self._labels): self._seconds,
            ("tier_breaker_trips", *self._labels): self._num_trips,
        }
        for reason, at_s in self._open_since_s.items():
            stats["tier_breaker_last_trip_timestamp_seconds", *self._labels, reason] = at_s
        return stats | self._batches.stats()


def _reason_of(error: BaseException | None) -> str:
    """One of few words for a failure, without any of its text: an errno's name, or the class."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
            return errno.errorcode[error.errno]
        if error.__cause__ is None:
            break
        error = error.__cause__
    return type(error).__name__
