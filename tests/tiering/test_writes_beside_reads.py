# SPDX-License-Identifier: Apache-2.0
"""Writes to a tier delay its reads by no more than the writes that have begun, which are few and short: one for each
thread, and 4 MiB or one block each; and by one more for eight reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.wrappers import StoreWrapper
from kvoffload.tiering.tier import StoreTier, TierLimits

THREADS = 2
LIMITS = TierLimits(threads=THREADS)


class OneByOne(StoreWrapper):
    """Reads and writes wait until they are let through, each kind for itself. ``begun`` has (call, blocks, reads that
    had been let through when it began)."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.begun: list[tuple[str, int, int]] = []
        self.num_read = 0
        self.let = {"read": threading.Semaphore(0), "write": threading.Semaphore(0)}

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._wait("write", len(keys))
        return self.inner.write(keys, blocks)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._wait("read", len(keys))
        self.num_read += 1
        return self.inner.read_into(keys, blocks)

    def _wait(self, call: str, num_blocks: int) -> None:
        self.begun.append((call, num_blocks, self.num_read))
        assert self.let[call].acquire(timeout=60)


class Rig:
    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        self.inner = MemoryStore(block_bytes)
        self.store = OneByOne(self.inner)
        view = memoryview(bytearray(num_blocks * block_bytes)).cast("B", (num_blocks, block_bytes))
        self.tier = StoreTier(view, "mem", self.store, LIMITS)
        self.ended: set[int] = set()
        self._last_id = 0

    def submit(self, keys: Sequence[OffloadKey], *, load: bool) -> int:
        self._last_id += 1
        job = JobMetadata(self._last_id, keys, np.arange(len(keys)), load, ReqContext("r"))
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self._last_id

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, self.store.begun
            self.tier.on_schedule_end()
            self.ended |= {result.job_id for result in self.tier.get_finished_jobs()}
            time.sleep(0.001)

    def begun(self, call: str) -> list[int]:
        """Blocks of each call."""
        return [num_blocks for name, num_blocks, _ in list(self.store.begun) if name == call]


@pytest.fixture
def make() -> Iterator[Callable[[int, int], Rig]]:
    rigs: list[Rig] = []

    def make(block_bytes: int, num_blocks: int) -> Rig:
        rigs.append(Rig(block_bytes, num_blocks))
        return rigs[-1]

    yield make
    for rig in rigs:
        for let in rig.store.let.values():
            let.release(1000)
        rig.tier.shutdown()


def test_one_write_begins_for_eight_reads_while_reads_are_queued(make: Callable[[int, int], Rig]) -> None:
    rig = make(1 << 20, 16)
    there = keys_of(*range(100, 130))
    rig.inner.write(there, [memoryview(block_of(key, 1 << 20)) for key in there])
    stores = [rig.submit(keys_of(*range(16 * job, 16 * job + 16)), load=False) for job in range(2)]
    rig.until(lambda: len(rig.begun("write")) == THREADS)

    loads = [rig.submit([key], load=True) for key in there]
    rig.until(lambda: len(rig.begun("read")) == THREADS)  # although all threads for writing are busy

    rig.store.let["write"].release(1000)  # from here on no write waits for anything but reads
    for num_read in range(1, len(loads) + 1):
        rig.store.let["read"].release()
        rig.until(lambda num_read=num_read: len(rig.ended & set(loads)) == num_read)
        num_writes = THREADS + min((num_read + THREADS) // 8, 3)  # the number of writes for all reads that have started
        rig.until(lambda num_writes=num_writes: len(rig.begun("write")) >= num_writes)
        assert num_read >= len(loads) - THREADS or len(rig.begun("write")) == num_writes
    rig.until(lambda: set(stores) <= rig.ended)

    assert rig.begun("write") == [4] * 8, "4 MiB each"


@pytest.mark.parametrize(("block_mib", "most"), [(0.75, 5), (1.5, 2), (6, 1)])
def test_a_write_that_has_begun_is_4_mib_or_one_block(
    block_mib: float, most: int, make: Callable[[int, int], Rig]
) -> None:
    rig = make(int(block_mib * 2**20), 12)
    rig.store.let["write"].release(1000)
    store = rig.submit(keys_of(*range(12)), load=False)
    rig.until(lambda: store in rig.ended)
    assert max(rig.begun("write")) == most
    assert sum(rig.begun("write")) == 12
