# SPDX-License-Identifier: Apache-2.0
"""Compare the local disk's store with ``fio``, in turn, with the same disk, block size, threads and direct I/O.

Checksums are on, and the quota is full. ``fio`` reads and writes at random in one existing file, as the store does in
its slabs. *Single* blocks are scattered, one per call. *Runs* are parts of a prefix as ``StoreTier`` passes them, up to
64 blocks or 4 MiB per call. CPU time is the time of the whole process, per block. The file store, and this store
without checksums, do the same work in the same run. Startup is measured for a store with a million slots, and memory
for such a store and its tier. ``KVOFFLOAD_BENCH_DIR`` chooses the disk (default: the working directory).
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np

from bench.core import Row, bench_directory
from bench.stores import THREADS, Blocks, Speed, batches_of, fio_in_file, in_threads
from kvoffload.base import OffloadKey, ReqContext
from kvoffload.testing.keys import keys as make_keys
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.format import ENTRY_BYTES, PAGE_BYTES, PAYLOAD_SUFFIX, TABLE_SUFFIX, SlabFormat
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.root import directory_of
from kvoffload.tiering.tier import StoreTier

RUN_BLOCKS, RUN_BYTES = 64, 4 << 20
TARGETS = {
    64 << 10: ("0.8", "0.7", "2.0", "1.2"),
    256 << 10: ("0.9", "0.9", "1.1", "1.0"),
    1 << 20: ("0.95", "0.95", "1.0", "1.0"),
    4 << 20: ("0.95", "0.95", "1.0", "1.0"),
}
"""The least ratios for single writes and reads, and for writes and reads in runs."""


def run(short: bool) -> list[Row]:
    sizes = [64 << 10] if short else list(TARGETS)
    with bench_directory() as name:
        rows = [
            row for size in sizes for row in _against_fio(Path(name), size, 16 << 20 if short else 256 << 20, short)
        ]
        return rows + _start(Path(name) / "start", 10_000 if short else 1_000_000)


def _no_digest(payload: memoryview, seed: int) -> bytes:
    return seed.to_bytes(16, "little")


@dataclass(frozen=True)
class _Case:
    direction: str
    label: str
    batch: int

    @property
    def is_scattered(self) -> bool:
        return self.direction == "read" and self.batch == 1


def _against_fio(place: Path, size: int, span: int, short: bool) -> list[Row]:
    blocks, label = Blocks(size, span // 2), f"{size >> 10} KiB"
    total, run_blocks = blocks.count * size, max(1, min(RUN_BLOCKS, RUN_BYTES // size))
    max_bytes = span + (span >> 6)
    stores: dict[str, DiskStore | FileSystemStore] = {
        "slabs": DiskStore(place / f"slabs{size}", size, max_bytes=max_bytes),
        "unchecked": DiskStore(place / f"unchecked{size}", size, max_bytes=max_bytes),
        "files": FileSystemStore(place / f"files{size}", size, max_bytes=max_bytes),
    }

    def measure(name: str, keys: list[OffloadKey], direction: str, batch: int, *, is_scattered: bool) -> Speed:
        store = stores[name]
        batches = batches_of(keys, blocks.rows, batch, is_scattered=is_scattered)
        digest = patch("kvoffload.tiering.stores.disk.format.xxhash.xxh3_128_digest", _no_digest)
        with digest if name == "unchecked" else nullcontext():
            return in_threads(store.write if direction == "write" else store.read_into, batches)

    for _ in range(3):  # until the quota is full, and every slot was written once
        keys = {name: blocks.keys() for name in stores}
        for name in stores:
            measure(name, keys[name], "write", run_blocks, is_scattered=False)
    reference = place / f"fio{size}"
    fio_in_file(reference, "write", 1 << 20, span, span * THREADS)
    cases = [
        _Case(direction, f"{direction} {what}, {label}", batch)
        for what, batch in (("single blocks", 1), ("runs", run_blocks))
        for direction in ("write", "read")
    ]
    found: dict[str, list[dict[str, Speed]]] = {case.label: [] for case in cases}
    for _ in range(1 if short else 5):
        for case in cases:
            speeds = {}
            if (theirs := fio_in_file(reference, f"rand{case.direction}", size, span, total)) is not None:
                speeds["fio"] = theirs
            for name in stores:
                if case.direction == "write":
                    keys[name] = blocks.keys()
                scattered = case.is_scattered
                speeds[name] = measure(name, keys[name], case.direction, case.batch, is_scattered=scattered)
            found[case.label].append(speeds)
    for store in stores.values():
        store.close()
    reference.unlink(missing_ok=True)
    rows = [
        _rows(case, found[case.label], blocks.count, target) for case, target in zip(cases, TARGETS[size], strict=True)
    ]
    return [row for part in rows for row in part]


def _rows(case: _Case, found: list[dict[str, Speed]], num_blocks: int, target: str) -> list[Row]:
    speed = statistics.median(one["slabs"].bytes_per_s for one in found) / 1e9
    micros = statistics.median(one["slabs"].cpu_s for one in found) / num_blocks * 1e6
    rows = []
    references = {"fio": "fio", "files": "the file store", "unchecked": "without checksums"}
    for other, name in references.items():
        goal = f">= {target}" if other == "fio" else ""
        ratios = sorted(one["slabs"].bytes_per_s / one[other].bytes_per_s for one in found if other in one)
        if not ratios:
            continue
        reference = f"{name} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append(Row(case.label, speed, "GB/s", reference, statistics.median(ratios), goal))
        cpu = statistics.median(one["slabs"].cpu_s / max(one[other].cpu_s, 1e-9) for one in found)
        rows.append(Row(f"  processor time, {case.label}", micros, "us/block", name, cpu))
    return rows


def _start(root: Path, num_slots: int) -> list[Row]:
    """Open a store whose tables are full. The payloads are holes in files, because startup does not read them."""
    layout, per_slab = SlabFormat(directory_of(""), 65536), min(num_slots, 16_000)
    DiskStore(root, 65536, max_bytes=1 << 30).close()
    rng = np.random.default_rng(0)
    for number in range(num_slots // per_slab):
        entries = rng.integers(0, 256, (per_slab, ENTRY_BYTES), np.uint8)
        entries[:, -40] = 36  # the length of a key
        slab = root / layout.directory / f"{number:016x}"
        columns = bytes(layout.entries_at(per_slab) - PAGE_BYTES)
        slab.with_suffix(TABLE_SUFFIX).write_bytes(layout.header(per_slab) + columns + entries.tobytes())
        with slab.with_suffix(PAYLOAD_SUFFIX).open("wb") as payloads:
            payloads.truncate(per_slab * layout.block_bytes)
    begun = time.perf_counter()
    store = DiskStore(root, 65536, max_bytes=1 << 40)
    opened_s = time.perf_counter() - begun
    num_blocks = (
        sum(len(keys) for keys in islice(filter(None, store.scan()), 1))
        and store.stats().used_bytes // layout.block_bytes
    )
    seconds = time.perf_counter() - begun
    store.close()
    case = f"start with {num_blocks:,} blocks, lookups from {opened_s:.2f} s on"
    is_large = num_slots >= 1_000_000
    return [
        Row(case, seconds, "s", "1 s", seconds, "<= 1" if is_large else ""),
        *_memory(root, num_blocks, "<= 1" if is_large else ""),
    ]


def _memory(root: Path, num_blocks: int, target: str) -> list[Row]:
    """Measure the memory of a store and its tier for blocks that existed at startup, and the time of lookups."""
    view = memoryview(bytearray(65536)).cast("B", (1, 65536))
    names, context = make_keys(*range(20_000)), ReqContext("memory")
    tracemalloc.start()
    tier = StoreTier(view, "disk", store := DiskStore(root, 65536, max_bytes=1 << 40))
    while store.stats().used_bytes < num_blocks * 65536:
        time.sleep(0.01)
    for key in names:
        assert not tier.lookup(key, context)
    tier.on_schedule_end()
    gc.collect()
    per_block = tracemalloc.get_traced_memory()[0] / num_blocks
    tracemalloc.stop()
    begun = time.process_time()
    for key in names:
        tier.lookup(key, context)
    micros = (time.process_time() - begun) / len(names) * 1e6
    tier.shutdown()
    return [
        Row("memory per block, store and tier", per_block, "bytes", "150 bytes", per_block / 150, target),
        Row("lookup of one block in the tier", micros, "us"),
    ]
