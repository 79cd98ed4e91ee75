# SPDX-License-Identifier: Apache-2.0
"""The file store against ``fio``: same directory, block size, threads and direct I/O, checksums on, in turn.

``fio`` reads and writes one large file per thread, which a file per block can at best equal. The last two rows go
through ``StoreTier``, as a promotion and a cascade do, and compare with the store's own speed.
``KVOFFLOAD_BENCH_DIR`` chooses the disk (default: the working directory).
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

from bench.core import Row
from kvoffload.base import OffloadKey, ReqContext
from kvoffload.testing.keys import keys as make_keys
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.tier import StoreTier, TierLimits

THREADS = 4
BATCH = 16
_REQ = ReqContext("bench")


def run(short: bool) -> list[Row]:
    sizes = [64 << 10] if short else [64 << 10, 256 << 10, 1 << 20, 4 << 20]
    total, repeats = (4 << 20, 1) if short else (128 << 20, 5)
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVOFFLOAD_BENCH_DIR", ".")) as name:
        place = Path(name)
        rows = [row for size in sizes for row in _against_fio(place, size, total, repeats)]
        rows += [_overwriting(place, size, total, repeats) for size in sizes]
        return rows + _through_the_tier(place, 256 << 10, total, repeats)


class _Blocks:
    """A page-aligned memory of random blocks, and keys that no file has yet."""

    def __init__(self, size: int, total: int) -> None:
        self.count = max(THREADS, total // size)
        self.memory = mmap.mmap(-1, self.count * size)
        self.view = memoryview(self.memory).cast("B", (self.count, size))
        flat = np.frombuffer(self.memory, np.uint64)
        flat[:] = np.random.default_rng(0).integers(0, 1 << 63, flat.size, np.uint64)
        self.rows = [memoryview(row) for row in np.asarray(self.view)]
        self._numbers = count()

    def keys(self) -> list[OffloadKey]:
        return make_keys(*(next(self._numbers) for _ in range(self.count)))


def _in_threads(call: Callable[..., list[bool]], keys: list[OffloadKey], rows: list[memoryview]) -> float:
    """Seconds for ``call`` over all blocks, in batches that ``THREADS`` threads take in turn."""
    step = max(1, min(BATCH, len(keys) // (4 * THREADS)))
    batches = iter(range(0, len(keys), step))
    lock, start, failed = threading.Lock(), threading.Barrier(THREADS + 1), []

    def work() -> None:
        start.wait()
        while True:
            with lock:
                first = next(batches, None)
            if first is None:
                return
            if not all(call(keys[first : first + step], rows[first : first + step])):
                failed.append(first)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    start.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    assert not failed, "the store lost blocks"
    return seconds


def _fio(place: Path, size: int, total: int, direction: str) -> float | None:
    """Bytes per second of fio, or ``None`` if it is not installed. Files of a write are kept for the read."""
    if not shutil.which("fio"):
        return None
    command = f"fio --name=kv --directory={place} --rw={direction} --bs={size} --size={total // THREADS} --direct=1 "
    command += f"--ioengine=psync --numjobs={THREADS} --thread --group_reporting --output-format=json --fallocate=none"
    done = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"])


def _overwriting(place: Path, size: int, total: int, repeats: int) -> Row:
    """Writes into a store whose quota is full, so that each block pushes another out: the state a cache lives in."""
    blocks = _Blocks(size, total)
    store = FileSystemStore(place / "full", size, max_bytes=blocks.count * (size + 4096) + 4096)
    _in_threads(store.write, blocks.keys(), blocks.rows)
    ratios, speeds = [], []
    for _ in range(repeats):
        theirs = _fio(place, size, total, "write")
        speeds.append(blocks.count * size / _in_threads(store.write, blocks.keys(), blocks.rows))
        ratios += [speeds[-1] / theirs] if theirs is not None else []
    store.close()
    shutil.rmtree(place / "full")
    case, speed = f"write, quota full, {size >> 10} KiB, {THREADS} threads", statistics.median(speeds) / 1e9
    if not ratios:
        return Row("fs_store", case, speed, "GB/s", "fio is not installed")
    return Row("fs_store", case, speed, "GB/s", "fio", statistics.median(ratios), ">= 0.9")


def _against_fio(place: Path, size: int, total: int, repeats: int) -> list[Row]:
    blocks, speeds = _Blocks(size, total), {"write": [], "read": []}
    reference: dict[str, list[float]] = {"write": [], "read": []}
    for number in range(repeats):
        root = place / str(number)
        store, keys = FileSystemStore(root, size, max_bytes=1 << 40), blocks.keys()
        for direction, call in (("write", store.write), ("read", store.read_into)):
            if (bytes_per_s := _fio(place, size, total, direction)) is not None:
                reference[direction].append(bytes_per_s)
            speeds[direction].append(blocks.count * size / _in_threads(call, keys, blocks.rows))
        store.close()
        shutil.rmtree(root)
        for file in place.glob("kv.*"):
            file.unlink()
    rows = []
    for direction, found in speeds.items():
        case = f"{direction}, blocks of {size >> 10} KiB, {THREADS} threads"
        if not reference[direction]:
            rows.append(Row("fs_store", case, statistics.median(found) / 1e9, "GB/s", "fio is not installed"))
            continue
        # Pairs of neighbours in time: a disk's speed wanders.
        ratio = statistics.median(ours / theirs for ours, theirs in zip(found, reference[direction], strict=True))
        rows.append(Row("fs_store", case, statistics.median(found) / 1e9, "GB/s", "fio", ratio, ">= 0.9"))
    return rows


def _through_the_tier(place: Path, size: int, total: int, repeats: int) -> list[Row]:
    blocks, speeds, own = _Blocks(size, total), {"write": [], "read": []}, {"write": [], "read": []}
    for number in range(repeats):
        root = place / f"tier{number}"
        store, keys = FileSystemStore(root, size, max_bytes=1 << 40), blocks.keys()
        limits = TierLimits(threads=THREADS, max_backlog_blocks=len(keys))
        tier = StoreTier(blocks.view, "fs", store, limits)
        more = blocks.keys()
        for direction, call in (("write", store.write), ("read", store.read_into)):
            own[direction].append(_in_threads(call, more, blocks.rows))
            job = JobMetadata(1, keys, np.arange(len(keys)), direction == "read", _REQ)
            begun = time.perf_counter()
            (tier.submit_load if direction == "read" else tier.submit_store)(job)
            tier.drain_jobs()
            speeds[direction].append(time.perf_counter() - begun)
            assert [result.success for result in tier.get_finished_jobs()] == [True]
        tier.shutdown()
        shutil.rmtree(root)
    return [
        Row(
            "fs_store",
            f"{direction} {blocks.count:,} blocks of {size >> 10} KiB through StoreTier",
            statistics.median(seconds),
            "s",
            "the store alone",
            statistics.median(mine / its for mine, its in zip(seconds, own[direction], strict=True)),
            "<= 1.15",
        )
        for direction, seconds in speeds.items()
    ]
