# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the benchmarks of stores: blocks in memory, threads that move them, and ``fio``."""

from __future__ import annotations

import json
import mmap
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as make_keys
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.wrappers import StoreWrapper

THREADS = 4

Batch = tuple[list[OffloadKey], list[memoryview]]
Call = Callable[[Sequence[OffloadKey], Sequence[memoryview]], list[bool]]


@dataclass
class Speed:
    bytes_per_s: float
    cpu_s: float
    """The CPU time of the whole process."""


class Blocks:
    """Page-aligned memory with random blocks, and keys that no store contains yet."""

    def __init__(self, size: int, total: int) -> None:
        self.size = size
        self.count = max(2 * THREADS, total // size)
        self.memory = mmap.mmap(-1, self.count * size)
        self.view = memoryview(self.memory).cast("B", (self.count, size))
        flat = np.frombuffer(self.memory, np.uint64)
        flat[:] = np.random.default_rng(0).integers(0, 1 << 63, flat.size, np.uint64)
        self.rows = [memoryview(row) for row in np.asarray(self.view)]
        self._numbers = count()

    def keys(self) -> list[OffloadKey]:
        return make_keys(*(next(self._numbers) for _ in range(self.count)))


class Link:
    """A link of ``bytes_per_s`` in total. The speed may be changed at any time."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def move(self, num_bytes: int) -> None:
        """Return when this many bytes would have been moved, after all earlier requests."""
        with self._lock:
            end_s = max(self._free_at_s, time.monotonic()) + num_bytes / self.bytes_per_s
            self._free_at_s = end_s
        time.sleep(max(0.0, end_s - time.monotonic()))


class Linked(StoreWrapper):
    """A store behind a ``Link``, which its reads and writes share. A store writes no block that it has."""

    def __init__(self, inner: BlockStore, link: Link) -> None:
        super().__init__(inner)
        self._link = link

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        here = self.inner.contains(keys)
        answers = self.inner.write(keys, blocks)
        self._link.move(sum(block.nbytes for block, is_here in zip(blocks, here, strict=True) if not is_here))
        return answers

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        answers = self.inner.read_into(keys, blocks)
        self._link.move(sum(block.nbytes for block in blocks))
        return answers


def batches_of(
    keys: list[OffloadKey], rows: list[memoryview], batch: int, *, is_scattered: bool = False
) -> list[Batch]:
    order = list(range(len(keys)))
    if is_scattered:
        random.Random(0).shuffle(order)
    parts = [order[first : first + batch] for first in range(0, len(order), batch)]
    return [([keys[at] for at in part], [rows[at] for at in part]) for part in parts]


def in_threads(call: Call, batches: list[Batch], num_threads: int = THREADS) -> Speed:
    """Call ``call`` for all batches in several threads, and return the speed."""
    left, lock = iter(batches), threading.Lock()
    start, failed = threading.Barrier(num_threads + 1), []

    def work() -> None:
        start.wait()
        while True:
            with lock:
                batch = next(left, None)
            if batch is None:
                return
            if not all(call(*batch)):
                failed.append(batch)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    start.wait()
    begun, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    assert not failed, "the store lost blocks"
    return Speed(sum(row.nbytes for _, rows in batches for row in rows) / seconds, cpu)


def fio(direction: str, *options: str) -> Speed | None:
    """Run fio with ``THREADS`` threads and direct I/O. Returns its speed, or ``None`` if it is not installed."""
    if not shutil.which("fio"):
        return None
    command = ["fio", "--name=kv", f"--rw={direction}", "--direct=1", "--ioengine=psync", f"--numjobs={THREADS}"]
    command += ["--thread", "--group_reporting", "--output-format=json", *options]
    job = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["jobs"][0]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Speed(float(job[direction.removeprefix("rand")]["bw_bytes"]), cpu_s)


def fio_in_file(file: Path, direction: str, size: int, span: int, total: int) -> Speed | None:
    """Run fio over ``total`` bytes of a file of ``span`` bytes."""
    sizes = f"--bs={size}", f"--size={span}", f"--io_size={total // THREADS}"
    return fio(direction, f"--filename={file}", *sizes, "--randrepeat=0")
