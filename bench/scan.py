# SPDX-License-Identifier: Apache-2.0
"""What the scan of a disk tier costs the scheduler's thread: a tier over 10^6 files, stepped every 2 ms.

Processor time of that thread per step, as others on the machine do not count in it. ``KVOFFLOAD_BENCH_DIR`` chooses the
disk (default: the working directory). The files are sparse, and made anew in each run, which takes most of its time.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.core import Row
from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import BlockFormat
from kvoffload.tiering.stores.root import directory_of
from kvoffload.tiering.tier import StoreTier

SIZE = 100
STEP_S = 0.002
MAX_STEP_MS = 1.0


def run(short: bool) -> list[Row]:
    num_files = 2_000 if short else 1_000_000
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVOFFLOAD_BENCH_DIR") or os.getcwd()) as place:
        make_files(Path(place), num_files)
        times_ms = np.array(step_times_s(place, num_files)) * 1e3
    return [
        Row(
            "scan",
            f"{num_files:,} files: a step, {name}",
            float(value),
            "ms",
            f"{MAX_STEP_MS:g} ms",
            float(value) / MAX_STEP_MS,
            "<= 1",
        )
        for name, value in (
            ("median", np.median(times_ms)),
            ("99th percentile", np.percentile(times_ms, 99)),
            ("longest", times_ms.max()),
        )
    ]


def make_files(root: Path, num_files: int) -> None:
    """Files with the names and the size of blocks, and no content."""
    layout = BlockFormat(directory_of(""), SIZE)
    for fan in range(256):
        (root / layout.directory / f"{fan:02x}").mkdir(parents=True)
    for number in range(num_files):
        fd = os.open(root / layout.path_of(OffloadKey(number.to_bytes(32))), os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(fd, layout.file_bytes)
        os.close(fd)


def step_times_s(root: str, num_files: int) -> list[float]:
    """Processor time of each step until the tier knows all files."""
    store = FileSystemStore(root, SIZE, max_bytes=1 << 40)
    tier = StoreTier(memoryview(np.zeros((4, SIZE), np.uint8)), "fs", store, enable_events=True)
    times_s, num_found = list[float](), 0
    while num_found < num_files:
        start_s = time.thread_time()
        tier.on_schedule_end()
        tier.get_finished_jobs()
        num_found += sum(len(event.keys) for event in tier.take_events())
        times_s.append(time.thread_time() - start_s)
        time.sleep(STEP_S)
    tier.shutdown()
    return times_s
