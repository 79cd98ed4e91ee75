# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the benchmarks of stores: links of a bounded speed, and ``fio``."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.wrappers import StoreWrapper

THREADS = 4


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


def fio(file: Path, direction: str, size: int, total: int) -> tuple[float, float] | None:
    """Return the GB/s and the CPU seconds per GB of moving ``total`` bytes at random places in a file.

    fio uses ``THREADS`` threads and direct I/O. Returns ``None`` if it is not installed.
    """
    if not shutil.which("fio"):
        return None
    command = ["fio", "--name=kv", f"--filename={file}", f"--rw=rand{direction}", "--direct=1", "--ioengine=psync"]
    command += [f"--numjobs={THREADS}", "--thread", "--group_reporting", "--output-format=json", "--randrepeat=0"]
    command += [f"--bs={size}", f"--size={total}", f"--io_size={total // THREADS}"]
    job = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["jobs"][0]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return job[direction]["bw_bytes"] / 1e9, cpu_s / total * 1e9
