# SPDX-License-Identifier: Apache-2.0
"""Measure the longest time for which each operation of the ``disk`` tier holds the lock that its reads need.

The slabs are tables in memory, so nothing is read or written. A figure is the CPU time of the thread that holds the
lock. If there are three rounds, it is the shortest of them, because other work on the machine can only lengthen it.
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
from kvoffload.tiering.stores.disk.format import ENTRY, PROBE_AT, HashedKey, SlabFormat
from kvoffload.tiering.stores.disk.open_slab import NewBlock
from kvoffload.tiering.stores.disk.slabs import Slabs

SLAB_SLOTS = (1 << 20) - 1
BATCH = 64
LAYOUT = SlabFormat("=", 4096)


def run(short: bool) -> list[Row]:
    rows = list[Row]()
    for num_slots in [50_000] if short else [1 << 20, 4 << 20, 17_000_000]:
        rows += _rows(num_slots, 10_000 if short else 100_000)
    return rows


def _rows(num_slots: int, num_blocks: int) -> Iterator[Row]:
    slabs, lock = Slabs("-", LAYOUT), _TimedLock()
    slabs._lock = lock  # type: ignore[assignment]
    tables = [
        _Table(number, min(SLAB_SLOTS, num_slots - number * SLAB_SLOTS), np.random.default_rng(number))
        for number in range(-(-num_slots // SLAB_SLOTS))
    ]

    def row(what: str, *rounds: list[float]) -> Iterator[Row]:
        case = f"{num_slots:,} slots, {what}"
        ordered = min((sorted(holds) for holds in rounds), key=lambda holds: holds[-1])
        longest, usual = 1e3 * ordered[-1], 1e3 * ordered[-1 - len(ordered) // 1000]
        yield Row(case, longest, "ms", f"1 ms; one in a thousand {usual:.2f}", longest, "<= 1")

    slabs.expect(LAYOUT.slab_bytes(table.num_slots) for table in tables)  # before anybody reads
    lock.take()
    gc.disable()  # a collection would count towards the operation that it interrupts
    for table in tables:
        slabs.register(table, is_own=True)  # type: ignore[arg-type]
    yield from row("slabs are taken in", lock.take())
    rounds = list[list[float]]()
    for number in range(3):
        _write(slabs, number * num_blocks, num_blocks)
        rounds.append(lock.take())
    yield from row("blocks are written over", *rounds)
    scattered = _keys_of(slabs, 2 * num_blocks)[::2]
    lock.take()
    for begin in range(0, len(scattered), BATCH):
        slabs.release(slabs.discard(scattered[begin : begin + BATCH]))
    yield from row(f"every other block is discarded, {len(slabs._allocator.free):,} free runs are left", lock.take())
    _write(slabs, 4 * num_blocks, len(scattered))
    yield from row("blocks are written to single free slots", lock.take())
    _write(slabs, 3 * num_blocks, 1)  # a plan is there, of which the next call uses all
    used = _keys_of(slabs)
    lock.take()
    slabs.touch(used)
    yield from row("a prefix of 20,000 blocks is used", lock.take())
    for slab in slabs.snapshot():
        assert slab.used_ns is not None
        slab.used_ns[slab.used_ns > 0] = time.time_ns()
    _write(slabs, 3 * num_blocks + 1, 1)
    yield from row("all of a plan was used meanwhile", lock.take())
    num_cells, number = len(slabs._index._cells), len(tables)
    while len(slabs._index._cells) == num_cells:
        slabs.register(_Table(number, tables[0].num_slots, np.random.default_rng(number)), is_own=True)  # type: ignore[arg-type]
        number += 1
    yield from row("the index grows", lock.take())
    first, *others = slabs.snapshot()
    rounds = list[list[float]]()
    for _ in range(3):
        slabs.merge_uses(first, tables[0].read_uses())
        rounds.append(lock.take())
    yield from row("times of use are written down", *rounds)
    slabs.give(first)
    lock.take()
    slabs.adopt(first, bytes(first.entries), tables[0].read_uses())
    yield from row("a slab is adopted", lock.take())
    slabs.drop([first], "removed")
    yield from row("a slab is dropped", lock.take())
    slabs.drop(others, "removed")
    slabs.take_lost()
    yield from row("all slabs are dropped", lock.take())
    slabs.register(tables[0], is_own=True)  # type: ignore[arg-type]
    yield from row("their cells are removed", lock.take())
    gc.enable()


def _keys_of(slabs: Slabs, count: int = 20_000) -> list[HashedKey]:
    """Return keys of blocks in a large slab."""
    slab = max(slabs.snapshot(), key=lambda slab: slab.file.num_slots)
    entries = [bytes(slab.entry(index)) for index in range(min(count, slab.file.num_slots))]
    return [HashedKey(int.from_bytes(entry[PROBE_AT : PROBE_AT + 4], "little"), entry[PROBE_AT:]) for entry in entries]


def _write(slabs: Slabs, first: int, num_blocks: int) -> None:
    """Overwrite other blocks with ``num_blocks`` new blocks, numbered from ``first``."""
    done = 0
    while done < num_blocks:
        keys = [LAYOUT.hashed(OffloadKey(b"block %d" % (first + done + at))) for at in range(BATCH)]
        new = [NewBlock(key, memoryview(b""), time.time_ns()) for key in keys]
        slabs.contains(keys)
        while not (runs := slabs.take(new)):
            slabs.release(slabs.evict(BATCH, time.time_ns()))
        for one in runs:
            one.entries = b"".join(LAYOUT.entry(block.key, bytes(16), block.stamp_ns) for block in one.blocks)
            one.good = [Run(0, one.slots.count)]
        slabs.record(runs)
        done += sum(one.slots.count for one in runs)


class _Table:
    """A slab's files, full of blocks that were used in a random order over a day."""

    def __init__(self, number: int, num_slots: int, rng: np.random.Generator) -> None:
        self.name, self.num_slots = f"{number:016x}", num_slots
        table = np.zeros(num_slots, ENTRY)
        table["hash"] = rng.integers(1, 1 << 32, num_slots, np.uint32)
        table["length"] = 36
        table["key"] = rng.bytes(39)
        self._entries = bytearray(table.tobytes())
        # Prompts consist of a hundred blocks, and each prompt has its own time of use.
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

    def take(self) -> list[float]:
        holds_s, self.holds_s = self.holds_s, []
        return holds_s or [0.0]

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
