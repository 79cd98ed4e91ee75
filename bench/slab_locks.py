# SPDX-License-Identifier: Apache-2.0
"""How long one call of the ``disk`` tier holds the lock that its reads take, while blocks are evicted and written.

The slabs are tables in memory, so nothing is read or written. The figure is processor time of the thread that holds the
lock: the longest hold, and that of one in a thousand, each the least of three rounds, as other work on the machine only
lengthens them.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.core import Row
from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.disk.allocator import Run
from kvoffload.tiering.stores.disk.format import ENTRY, SlabFormat
from kvoffload.tiering.stores.disk.slabs import NewBlock, Slabs

SLAB_SLOTS = (1 << 20) - 1
BATCH = 64
LAYOUT = SlabFormat("=", 4096)


def run(short: bool) -> list[Row]:
    rows = list[Row]()
    for num_slots in [50_000] if short else [1 << 20, 4 << 20, 17_000_000]:
        rows += _rows(num_slots, 10_000 if short else 100_000)
    return rows


def _rows(num_slots: int, num_evictions: int) -> Iterator[Row]:
    slabs, lock = Slabs("-", LAYOUT), _TimedLock()
    slabs._lock = lock  # type: ignore[assignment]
    rng = np.random.default_rng(0)
    for number in range(-(-num_slots // SLAB_SLOTS)):
        slabs.register(_Table(number, min(SLAB_SLOTS, num_slots - number * SLAB_SLOTS), rng), is_own=True)  # type: ignore[arg-type]
    rounds = [_holds(slabs, lock, number * num_evictions, num_evictions) for number in range(3)]
    for what, milliseconds in (
        ("longest", 1e3 * min(holds[-1] for holds in rounds)),
        ("one in a thousand", 1e3 * min(holds[-1 - len(holds) // 1000] for holds in rounds)),
    ):
        case = f"{num_slots:,} slots, {len(rounds[0]):,} holds, {what}"
        yield Row("slab_locks", case, milliseconds, "ms", "1 ms", milliseconds, "<= 1")


def _holds(slabs: Slabs, lock: _TimedLock, first: int, num_blocks: int) -> list[float]:
    """How long the lock was held each time, sorted, while blocks from this number on were written."""
    gc.disable()  # it would count to whom it interrupts
    lock.holds_s.clear()
    done = 0
    while done < num_blocks:
        keys = [LAYOUT.hashed(OffloadKey(b"block %d" % (first + done + at))) for at in range(BATCH)]
        new = [NewBlock(key, memoryview(b""), time.time_ns()) for key in keys]
        slabs.contains(keys)
        while not (runs := slabs.take(new)):
            slabs.release(slabs.evict(BATCH, time.time_ns()))
        for one in runs:
            one.entries = b"".join(LAYOUT.entry(block.key, block.payload, block.stamp_ns) for block in one.blocks)
            one.good = [Run(0, one.slots.count)]
        slabs.record(runs)
        done += sum(one.slots.count for one in runs)
    gc.enable()
    return sorted(lock.holds_s)


class _Table:
    """A slab's files, full of blocks that were used in a random order over a day."""

    def __init__(self, number: int, num_slots: int, rng: np.random.Generator) -> None:
        self.name, self.num_slots = f"{number:016x}", num_slots
        table = np.zeros(num_slots, ENTRY)
        table["hash"] = rng.integers(1, 1 << 32, num_slots, np.uint32)
        table["length"] = 36
        table["key"] = rng.bytes(39)
        self._entries = bytearray(table.tobytes())
        # Prompts of a hundred blocks, each used at a time of its own.
        prompts = rng.integers(1, 86_400, -(-num_slots // 100))
        self._uses = (int(time.time()) - np.repeat(prompts, 100)[:num_slots]).astype(np.uint32)

    def read_changes(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.zeros(-(-self.num_slots // 64), np.uint32)

    def read_entries(self, first: int, count: int) -> bytearray:
        return self._entries

    def read_uses(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return self._uses

    def close(self) -> None:
        pass


class _TimedLock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.holds_s: list[float] = []
        self._since_s = 0.0

    def acquire(self) -> bool:
        got = self._lock.acquire()
        self._since_s = time.thread_time()
        return got

    def release(self) -> None:
        self.holds_s.append(time.thread_time() - self._since_s)
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
