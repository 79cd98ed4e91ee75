# SPDX-License-Identifier: Apache-2.0
"""A ``StoreTier`` over a store that fails and waits as a test says, and the actions of a manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.testing import FaultyStore, GatedStore, ManualClock
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobMetadata, JobResult
from kvoffload.tiering.runner import IoQueue, TierRunner
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.tier import StoreTier, TierLimits

BLOCK_BYTES = 64
CONTEXT = ReqContext("r")


def is_scanned(tier: StoreTier) -> bool:
    """Return whether the tier's initial scan has ended."""
    return tier._scan.is_complete


class Region:
    """A region of host memory."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def create_kv_memoryview(self) -> memoryview:
        return self._view


class Rig:
    """A tier over a faulty, gated ``MemoryStore``, and memory whose slots the tests fill and read."""

    def __init__(self, num_blocks: int = 64, limits: TierLimits | None = None, max_blocks: int = 1000, **options):
        self.memory = bytearray(num_blocks * BLOCK_BYTES)
        self.view = memoryview(self.memory).cast("B", (num_blocks, BLOCK_BYTES))
        self.clock = ManualClock()
        self.inner = MemoryStore(BLOCK_BYTES, max_blocks * BLOCK_BYTES)
        self.gate = GatedStore(self.inner)
        self.store = FaultyStore(self.gate)
        self.limits = limits or TierLimits(threads=2, drain_timeout_s=5.0)
        self.options = options
        self.results: dict[int, JobResult] = {}
        self.resident: set[OffloadKey] = set()
        self._last_id = 0

    def start(self) -> Rig:
        self.tier = StoreTier(
            self.view, "mem", self.store, self.limits, enable_events=True, clock=self.clock, **self.options
        )
        return self

    def fill(self, slots: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            self.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = block_of(key, BLOCK_BYTES)

    def read(self, slot: int) -> bytes:
        return bytes(self.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES])

    def below(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.write(keys, [memoryview(block_of(key, BLOCK_BYTES)) for key in keys])

    def submit(self, keys: Sequence[OffloadKey], slots: Sequence[int], *, load: bool) -> int:
        self._last_id += 1
        job = JobMetadata(self._last_id, keys, np.asarray(slots, np.int64), load, CONTEXT)
        if load:
            self.tier.submit_load(job)
        else:
            self.tier.submit_store(job)
            self.tier.on_schedule_end()  # stores begin when the step ends
        return job.job_id

    def store_blocks(self, keys: Sequence[OffloadKey]) -> JobResult:
        self.fill(range(len(keys)), keys)
        return self.wait(self.submit(keys, range(len(keys)), load=False))

    def load_blocks(self, keys: Sequence[OffloadKey]) -> JobResult:
        return self.wait(self.submit(keys, range(len(keys)), load=True))

    def step(self) -> None:
        self.tier.on_schedule_end()
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self.results, "a job ended twice"
            self.results[result.job_id] = result
        for event in self.tier.take_events():
            for key in event.keys:
                assert (key in self.resident) == event.removed, "an event without a change"
            self.resident = self.resident - set(event.keys) if event.removed else self.resident | set(event.keys)

    def until(self, condition: Callable[[], bool]) -> None:
        """Steps until ``condition``. The threads are real, so that only a hang takes long."""
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "the tier hangs"
            self.step()
            time.sleep(0.001)

    @property
    def runner(self) -> TierRunner:
        """The tier's threads and their calls."""
        return self.tier._runner

    def until_idle(self) -> None:
        """Until no call of the store runs or waits."""
        self.until(lambda: not self.runner.num_open_slices)

    def until_answered(self) -> None:
        """Until the store was asked all that it was to be asked."""
        self.until(lambda: not self.tier._questions.are_pending)

    @property
    def is_scanned(self) -> bool:
        return is_scanned(self.tier)

    @property
    def has_threads(self) -> bool:
        return any(thread.is_alive() for thread in self.runner._threads)

    def until_scanned(self) -> None:
        self.until(lambda: self.is_scanned)

    def wait_for_results(self) -> None:
        """Waits until the result of a submitted lookup or load, if there is any, can be taken, and does not take it."""
        runner, end = self.runner, time.monotonic() + 120
        while not runner.ended and runner.backlog(IoQueue.LOOKUP) + runner.backlog(IoQueue.LOAD):
            assert time.monotonic() < end, "the store hangs"
            time.sleep(0.001)

    def wait(self, job_id: int) -> JobResult:
        self.until(lambda: job_id in self.results)
        return self.results[job_id]

    def ask(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        return [self.tier.lookup(key, CONTEXT) for key in keys]

    def ask_until_answered(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        self.until(lambda: None not in self.ask(keys))
        return self.ask(keys)

    def stat(self, name: str, *labels: str) -> float:
        return self.tier.get_stats()[(name, "mem", *labels)]

    @property
    def is_in_use(self) -> bool:
        return self.stat("tier_healthy") == 1
