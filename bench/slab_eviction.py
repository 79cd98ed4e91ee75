# SPDX-License-Identifier: Apache-2.0
"""Compare the hit rates of the ``disk`` tier's eviction in runs with LRU by block, and measure the length of its runs.

Nothing is read or written, so the figures are the same on every machine.

A hit is the longest prefix that is present when a request arrives. Then all its blocks are used from tail to head, and
absent blocks are written, 64 per call. ``KVOFFLOAD_TRACES`` is a directory of traces (``*.jsonl``, ``*.jsonl.zst``).
Without it, synthetic traces are replayed.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np

from bench.core import Row
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace
from kvoffload.sim.trace_files import load_trace
from kvoffload.tiering.stores.disk.allocator import Allocator, free_runs, runs_of

BATCH = 64
SLABS = 16


def run(short: bool) -> list[Row]:
    if (directory := os.environ.get("KVOFFLOAD_TRACES")) and not short:
        traces = {path.name.split(".")[0]: load_trace(path) for path in sorted(Path(directory).glob("*.jsonl*"))}
    else:
        traces = {kind: synthesize(kind, 100 if short else 3000) for kind in ("chat", "agents")}
    return [_compare(name, trace, share) for name, trace in traces.items() for share in (1, 5, 10, 20)]


def _compare(name: str, trace: Trace, percent: int) -> Row:
    ids = trace.ids.tolist()
    requests = [ids[start:end] for start, end in itertools.pairwise(trace.offsets.tolist())]
    capacity = max(SLABS, len(set(ids)) * percent // 100)
    by_block, in_runs = _lru(requests, capacity), _SlabReplay(capacity)
    hits = sum(in_runs.request(request) for request in requests)
    points = 100 * (hits - by_block) / len(ids)
    case = (
        f"{name}, {percent} % = {capacity:,} slots: {100 * hits / len(ids):.2f} % hits ({points:+.2f} points), "
        f"runs of {in_runs.run_blocks():.1f} blocks"
    )
    reference = f"LRU by block: {100 * by_block / len(ids):.2f} %"
    return Row(case, max(1e-9, 100 * hits / len(ids)), "%", reference)


def _lru(requests: list[list[int]], capacity: int) -> int:
    order, hits = OrderedDict[int, None](), 0
    for request in requests:
        hits += sum(1 for _ in itertools.takewhile(order.__contains__, request))
        for block in reversed(request):
            if block not in order and len(order) >= capacity:
                order.popitem(last=False)
            order[block] = None
            order.move_to_end(block)
    return hits


class _SlabReplay:
    """An ``Allocator`` that is used as in the store."""

    def __init__(self, capacity: int) -> None:
        self._allocator = Allocator()
        for slab, part in enumerate(np.array_split(np.zeros(capacity, np.int64), SLABS), 1):
            used_ns = part.copy()
            self._allocator.add_slab(slab, used_ns)
            self._allocator.add_free(used_ns, free_runs(slab, used_ns))
        self._slots: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        self._now = 1
        self._num_runs = self._num_written = 0

    def run_blocks(self) -> float:
        return self._num_written / max(1, self._num_runs)

    def request(self, blocks: list[int]) -> int:
        hits = sum(1 for _ in itertools.takewhile(self._slots.__contains__, blocks))
        backwards = blocks[::-1]
        for first in range(0, len(backwards), BATCH):
            self._call(backwards[first : first + BATCH])
        return hits

    def _call(self, blocks: list[int]) -> None:
        before, stamps = self._now, {block: self._now + 1 + at for at, block in enumerate(blocks)}
        self._now += len(blocks) + 1
        for block in blocks:
            if block in self._slots:
                self._allocator.use(self._slots[block], stamps[block])
        new = [block for block in stamps if block not in self._slots]
        lacking = len(new) - self._allocator.free.num_slots
        lacking = self._allocator.grain_of(lacking) if lacking > 0 else 0
        while lacking > 0 and (evicted := self._allocator.evict(lacking, before)):
            for run in evicted:
                for slot in range(run.start, run.stop):
                    del self._slots[self._blocks.pop(slot)]
                self._allocator.release(run)
                lacking -= run.count
        runs = self._allocator.take(len(new))
        slots = [slot for run in runs for slot in range(run.start, run.stop)]
        self._num_runs += len(runs_of(sorted(slots)))
        self._num_written += len(slots)
        for block, slot in zip(new[len(new) - len(slots) :], reversed(slots), strict=True):
            self._slots[block], self._blocks[slot] = slot, block
            self._allocator.use(slot, stamps[block])
