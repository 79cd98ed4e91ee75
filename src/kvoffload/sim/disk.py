# SPDX-License-Identifier: Apache-2.0
"""A disk in virtual time: a secondary tier that tracks its blocks and moves no bytes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.base import OffloadKey, ReqContext, RequestOffloadingContext
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager

__all__ = ["Link", "SimDisk", "VirtualClock", "VirtualMemory"]


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
    slow: tuple[tuple[float, float, float], ...] = ()
    """Times in which others use the link too: (begin_s, end_s, share of its speed that is left)."""

    def seconds(self, num_bytes: int, begin_s: float = 0.0) -> float:
        """How long a transfer takes that begins at ``begin_s``. It keeps the speed that it began with."""
        share = math.prod(left for begin, end, left in self.slow if begin <= begin_s < end)
        return self.latency_s + num_bytes / (self.bytes_per_s * share) if num_bytes else 0.0

    def queue(self, now_s: float, num_bytes: int) -> float:
        """Queues a transfer and returns the time of its end."""
        begin_s = max(now_s, self.free_at_s)
        self.free_at_s = begin_s + self.seconds(num_bytes, begin_s)
        return self.free_at_s


class VirtualMemory:
    """A primary region without bytes, so that a simulated terabyte costs nothing."""

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(1)).cast("B", (1, 1))


class _Write(NamedTuple):
    end_s: float
    job: JobMetadata
    keys: list[OffloadKey]
    """Blocks that the disk did not have."""
    num_admitted: int
    """The job's first blocks that were not dropped."""


class SimDisk(SecondaryTierManager):
    """Reads and writes on two ``Link``s and evicts its least recently used blocks.

    A ``CPUOffloadingManager`` serves as the index of its blocks. As in real stores, reads and writes are uses in a
    job's order, so a job's last block is the most recent. As in ``StoreTier``, at most ``max_backlog_blocks`` wait to
    be written or are being written, and the rest of a job is dropped.

    A job ends when the virtual clock has passed its end. ``read_blocks`` and ``written_blocks`` count successes,
    ``ever_written`` collects the keys of written blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        read_link: Link,
        write_link: Link,
        clock: VirtualClock,
        max_backlog_blocks: int,
    ) -> None:
        super().__init__(VirtualMemory().create_kv_memoryview(), "disk")
        self._index = CPUOffloadingManager(num_blocks, "lru")
        self._block_size_bytes = block_bytes
        self._read_link, self._write_link, self._clock = read_link, write_link, clock
        self._reads: deque[tuple[float, JobMetadata, list[OffloadKey]]] = deque()
        self._writes: deque[_Write] = deque()
        self._refused: list[JobResult] = []
        self._max_backlog, self._backlog = max_backlog_blocks, 0
        self.read_blocks = self.written_blocks = 0
        self.ever_written: set[OffloadKey] = set()

    def next_end_s(self) -> float | None:
        """The time at which the next job in flight ends."""
        ends = [queue[0][0] for queue in (self._reads, self._writes) if queue]
        return min(ends) if ends else None

    @property
    def evicted_blocks(self) -> int:
        return int(self._index.get_stats()["primary_blocks_evicted",])

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self._index.lookup(key, req_context) is True

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self._index.touch(keys)

    def submit_store(self, job: JobMetadata) -> None:
        keys = job.keys[: self._max_backlog - self._backlog][::-1]
        self._index.touch(keys)
        reserved = self._index.prepare_store(keys, job.req_context) if keys else None
        if reserved is None:
            self._refused.append(JobResult(job.job_id, success=False))
            return
        self._backlog += len(keys)
        wanted = reserved.keys_to_store
        end_s = self._write_link.queue(self._clock(), len(wanted) * self._block_size_bytes)
        self._writes.append(_Write(end_s, job, wanted, len(keys)))

    def submit_load(self, job: JobMetadata) -> None:
        found = [key for key in job.keys if self._index.lookup(key, job.req_context) is True]
        self._index.prepare_load(found, job.req_context)
        self._index.touch(found[::-1])
        end_s = self._read_link.queue(self._clock(), len(found) * self._block_size_bytes)
        self._reads.append((end_s, job, found))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self._refused = self._refused, []
        while self._reads and self._reads[0][0] <= self._clock():
            end_s, job, keys = self._reads.popleft()
            self._index.complete_load(keys)
            self.read_blocks += len(keys)
            finished.append(JobResult(job.job_id, len(keys) == len(job.keys), keys, end_s))
        while self._writes and self._writes[0][0] <= self._clock():
            end_s, job, keys, num_admitted = self._writes.popleft()
            self._index.complete_store(keys)
            self._backlog -= num_admitted
            self.written_blocks += len(keys)
            self.ever_written.update(keys)
            is_whole = num_admitted == len(job.keys)
            finished.append(JobResult(job.job_id, is_whole, None if is_whole else job.keys[:num_admitted], end_s))
        return finished

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def has_pending_work(self) -> bool:
        return bool(self._reads or self._writes or self._refused)

    def drain_jobs(self) -> None:
        if (end_s := self.next_end_s()) is not None:
            self._clock.advance_to(end_s)

    def shutdown(self) -> None:
        self._reads.clear()
        self._writes.clear()
