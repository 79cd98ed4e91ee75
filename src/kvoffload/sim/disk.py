# SPDX-License-Identifier: Apache-2.0
"""A disk, or a store that machines share, in virtual time: a tier that tracks its blocks and moves no bytes."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.base import OffloadKey, ReqContext, RequestOffloadingContext
from kvoffload.cpu.manager import SlotTable
from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvoffload.tiering.presence import ABSENT_TTL_S, MAX_ABSENT


class VirtualClock:
    """The simulation's time in seconds. Only the driver and its server advance it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


@dataclass(slots=True)
class Link:
    """One direction of one device. Transfers queue; each takes ``latency_s``, then its bytes at ``bytes_per_s``."""

    bytes_per_s: float
    latency_s: float
    free_at_s: float = 0.0

    def queue(self, now_s: float, num_bytes: int) -> float:
        """Queue a transfer. Return the time of its end."""
        seconds = self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0
        self.free_at_s = max(now_s, self.free_at_s) + seconds
        return self.free_at_s


class VirtualMemory:
    """A primary region without bytes, so that a simulated terabyte costs nothing."""

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(1)).cast("B", (1, 1))


class _Read(NamedTuple):
    end_s: float
    job: JobMetadata
    keys: list[OffloadKey]
    """Blocks that the disk has."""


class _Write(NamedTuple):
    end_s: float
    job: JobMetadata
    wanted: Sequence[OffloadKey]
    """Blocks that cross the links. They include blocks that another machine is writing, and blocks that are too old."""


class Contents:
    """The content of a disk or a store. Machines that share one share its ``Contents``, with ``is_shared``.

    It evicts the least recently used blocks. A block expires ``ttl_s`` after it was written, and takes
    room until it is evicted. It is there from the end of its write on, whether or not the writer has polled.
    """

    def __init__(self, num_blocks: int, ttl_s: float = math.inf, *, is_shared: bool = False) -> None:
        self.index = SlotTable(num_blocks, LRUCachePolicy)
        self._ttl_s, self.is_shared = ttl_s, is_shared
        self._written_s: dict[OffloadKey, float] = {}
        self._arrivals: list[tuple[float, int, _Write]] = []
        self._order = 0

    def has(self, keys: Sequence[OffloadKey], now_s: float) -> list[bool]:
        """Return for each of ``keys`` whether it is there."""
        if self.is_shared:
            self.settle(now_s)
        found = [block is not None and block.pins >= 0 for block in self.index.get_all(keys)]
        if self._ttl_s != math.inf:
            written_s, ttl_s = self._written_s, self._ttl_s
            found = [is_here and now_s < written_s[key] + ttl_s for key, is_here in zip(keys, found)]
        return found

    def expect(self, write: _Write) -> None:
        self._order += 1
        heapq.heappush(self._arrivals, (write.end_s, self._order, write))

    def forget(self, evicted: Sequence[OffloadKey]) -> None:
        if self._written_s:
            for key in evicted:
                self._written_s.pop(key, None)

    def settle(self, now_s: float) -> None:
        """Take in the blocks that have arrived by ``now_s``."""
        while self._arrivals and self._arrivals[0][0] <= now_s:
            end_s, _, write = heapq.heappop(self._arrivals)
            self.index.end_write(write.wanted, True)
            if self._ttl_s != math.inf:
                self._written_s.update(dict.fromkeys(write.wanted, end_s))


class SimDisk(SecondaryTierManager):
    """A machine's disk, or its way to a store that others share.

    A ``SlotTable`` serves as the index of its ``contents``. As in real stores, reads and writes are uses in
    a job's order, so a job's last block is the most recent.

    A block that a shared store lacks is absent for a second, or until this machine has written it. The first lookup
    after that asks the store, and later ones have its answer.

    A transfer crosses all of ``read_links`` or ``write_links`` at the speed of the slowest. Its job ends when the
    virtual clock has passed its end. ``read_blocks`` and ``written_blocks`` count blocks. Each transfer takes
    ``steps_s`` longer, and holds up no other meanwhile: order and answer wait for steps of the engine.
    """

    def __init__(
        self,
        contents: Contents,
        block_bytes: int,
        read_links: Sequence[Link],
        write_links: Sequence[Link],
        clock: VirtualClock,
        *,
        label: str = "disk",
        steps_s: float = 0.0,
    ) -> None:
        super().__init__(VirtualMemory().create_kv_memoryview(), label)
        self.contents, self._index = contents, contents.index
        self._block_size_bytes = block_bytes
        self._read_links, self._write_links, self._clock = read_links, write_links, clock
        self._reads: deque[_Read] = deque()
        self._writes: deque[_Write] = deque()
        self._refused: list[JobResult] = []
        self._absent: OrderedDict[OffloadKey, float] = OrderedDict()
        """Blocks that a shared store lacked, and from when on it is asked again."""
        self._steps_s = steps_s
        self.read_blocks = self.written_blocks = 0

    def next_end_s(self) -> float | None:
        """Return the time at which the next job in flight ends."""
        ends = [queue[0].end_s for queue in (self._reads, self._writes) if queue]
        return min(ends) if ends else None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.lookup_prefix((key,), req_context)[0]

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        now_s, absent = self._clock.now_s, self._absent
        answers: list[bool | None] = []
        for key, is_here in zip(keys, self.contents.has(keys, now_s)):
            is_found = is_here and key not in absent
            answers.append(is_found)
            if not is_found:
                if self.contents.is_shared:
                    self._note_absent(key, is_here, now_s)
                break
        return answers

    def _note_absent(self, key: OffloadKey, is_here: bool, now_s: float) -> None:
        """Record that the answer for a block was ``False``. If it is time, ask the store again."""
        absent = self._absent
        if now_s >= absent.get(key, now_s):
            # The answer is False meanwhile, as in ``PresenceIndex``.
            absent.pop(key, None)
            if not is_here:
                absent[key] = now_s + ABSENT_TTL_S
            if len(absent) > MAX_ABSENT:
                absent.popitem(last=False)

    def take_news(self) -> Collection[OffloadKey]:
        """Nothing: each lookup has its final answer at once."""
        return ()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self._index.touch(keys)

    def _transfer(self, links: Sequence[Link], num_blocks: int) -> float:
        """Queue a transfer. Return the time of its end."""
        now_s = self._clock.now_s
        return max([link.queue(now_s, num_blocks * self._block_size_bytes) for link in links]) + self._steps_s

    def submit_store(self, job: JobMetadata) -> None:
        keys = job.keys[::-1]
        now_s, wanted = self._clock.now_s, keys
        if self.contents.is_shared:
            self.contents.settle(now_s)
        if any(self._index.get_all(keys)):
            wanted = [key for key, is_here in zip(keys, self.contents.has(keys, now_s)) if not is_here]
            self._index.touch(keys)
        reserved = self._index.reserve(keys)
        if reserved is None:
            self._refused.append(JobResult(job.job_id, success=False))
            return
        self.contents.forget(reserved.evicted_keys)
        write = _Write(self._transfer(self._write_links, len(wanted)), job, wanted)
        self.contents.expect(write)
        self._writes.append(write)

    def submit_load(self, job: JobMetadata) -> None:
        now_s = self._clock.now_s
        found = [key for key, is_here in zip(job.keys, self.contents.has(job.keys, now_s)) if is_here]
        self._index.pin(found)
        self._index.touch(found[::-1])
        self._reads.append(_Read(self._transfer(self._read_links, len(found)), job, found))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, reads, writes, now_s = self._refused, self._reads, self._writes, self._clock.now_s
        while reads and reads[0].end_s <= now_s:
            finished.append(self._end_read(reads.popleft()))
        self.contents.settle(now_s)
        while writes and writes[0].end_s <= now_s:
            finished.append(self._end_write(writes.popleft()))
        if finished:
            self._refused = []
        return finished

    def _end_read(self, read: _Read) -> JobResult:
        self._index.unpin(read.keys)
        self.read_blocks += len(read.keys)
        return JobResult(read.job.job_id, len(read.keys) == len(read.job.keys), read.keys, read.end_s)

    def _end_write(self, write: _Write) -> JobResult:
        self.written_blocks += len(write.wanted)
        for key in write.job.keys if self._absent else ():
            self._absent.pop(key, None)
        return JobResult(write.job.job_id, success=True, ended_s=write.end_s)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def has_pending_work(self) -> bool:
        return bool(self._reads or self._writes or self._refused)

    def drain_jobs(self) -> None:
        if (end_s := self.next_end_s()) is not None:
            self._clock.advance_to(end_s)
