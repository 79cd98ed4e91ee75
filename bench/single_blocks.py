# SPDX-License-Identifier: Apache-2.0
"""Measure writes of single blocks to a disk tier, as decoding makes them: four blocks per step, each in its own job.

*Scheduler's step* is the time of such a step's calls on the scheduler's thread, with and without the tier. *CPU time*
is the time of the whole process for one block. *Blocks per second* is measured with jobs of one block, as fast as the
tier accepts them. ``KVOFFLOAD_BENCH_DIR`` chooses the disk (default: the working directory).
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from bench.core import Row, bench_directory
from kvoffload.base import OffloadKey, ReqContext, make_offload_key
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.tiering import (
    CPUPrimaryTierOffloadingManager,
    JobMetadata,
    SecondaryTierManager,
    TieringOffloadingManager,
    build_tier,
)

PER_STEP = 4
PAUSE_S = 0.004
"""The time between two steps, in which the engine computes."""
JOBS_PER_STEP = 16
MOST_IN_FLIGHT = 64
MAX_STEP_MS = 0.1
NUM_SLOTS = 512


class Server:
    """An engine whose running requests each fill a block in every step, over a disk tier or over host memory alone."""

    def __init__(self, block_bytes: int, root: str | None, **options: str) -> None:
        region = SharedOffloadRegion.anonymous(NUM_SLOTS, block_bytes)
        primary = CPUPrimaryTierOffloadingManager(NUM_SLOTS, region)
        np.asarray(primary.kv_view)[:] = 1
        self.tiers: list[SecondaryTierManager] = []
        if root is not None:
            tier = {"type": "disk", "path": root, "max_bytes": 2 << 30, **options}
            self.tiers = [build_tier(tier, primary.kv_view, "bench")]
        self.manager = TieringOffloadingManager(primary, self.tiers)
        self.contexts = [ReqContext(f"r{number}") for number in range(PER_STEP)]
        for context in self.contexts:
            self.manager.on_new_request(context)
        self.num_blocks = 0

    def new_key(self) -> OffloadKey:
        self.num_blocks += 1
        return make_offload_key(self.num_blocks.to_bytes(32, "big"), 0)

    def step(self) -> float:
        """Make a step, and return the seconds of its calls on the scheduler's thread."""
        wanted = [[self.new_key()] for _ in self.contexts]
        begun_s = time.perf_counter()
        for context, keys in zip(self.contexts, wanted, strict=True):
            self.manager.prepare_store(keys, context)
        for context, keys in zip(self.contexts, wanted, strict=True):
            self.manager.complete_store(keys, context)
        self.manager.on_schedule_end()
        self.manager.has_pending_work()
        return time.perf_counter() - begun_s

    def decode(self, num_steps: int) -> tuple[float, float]:
        """Return the median seconds of a step's calls, and the CPU seconds per block."""
        steps, begun_s = [], time.process_time()
        for _ in range(num_steps):
            steps.append(self.step())
            time.sleep(PAUSE_S)
        return statistics.median(steps), (time.process_time() - begun_s) / num_steps / PER_STEP

    def store_singly(self, num_blocks: int) -> float:
        """Store blocks in jobs of one block, and return the seconds per block."""
        (tier,) = self.tiers
        context, in_flight, num_stored, begun_s = self.contexts[0], 0, 0, time.perf_counter()
        for number in range(num_blocks):
            slot = np.array([number % NUM_SLOTS], np.int64)
            tier.submit_store(JobMetadata(-1 - number, (self.new_key(),), slot, False, context))
            in_flight += 1
            if number % JOBS_PER_STEP == JOBS_PER_STEP - 1 or number == num_blocks - 1:
                tier.on_schedule_end()
                most = MOST_IN_FLIGHT if number < num_blocks - 1 else 0
                while True:
                    ended = list(tier.get_finished_jobs())
                    in_flight -= len(ended)
                    num_stored += sum(result.success for result in ended)
                    if in_flight <= most:
                        break
                    time.sleep(0.0002)
        if not num_stored:
            raise RuntimeError(f"{tier!r} stored none of {num_blocks} blocks; check the room on its disk and the log.")
        return (time.perf_counter() - begun_s) / num_stored


def run(short: bool) -> list[Row]:
    sizes = [64 << 10] if short else [64 << 10, 256 << 10, 1 << 20]
    return [row for size in sizes for row in _rows(size, short)]


def _rows(block_bytes: int, short: bool) -> list[Row]:
    steps, repeats, many = (5, 1, 32) if short else (150, 3, 500)
    with bench_directory() as root:
        alone, tiered = Server(block_bytes, None), Server(block_bytes, root)
        try:
            tiered.store_singly(many)  # creates its files
            pairs = [(alone.decode(steps), tiered.decode(steps)) for _ in range(repeats)]
            seconds = statistics.median(tiered.store_singly(many) for _ in range(repeats))
        finally:
            alone.manager.shutdown()
            tiered.manager.shutdown()
    size = f"blocks of {block_bytes >> 10} KiB"
    added_ms = max(statistics.median(with_tier[0] - without[0] for without, with_tier in pairs), 1e-9) * 1e3
    added_us = max(statistics.median(with_tier[1] - without[1] for without, with_tier in pairs), 1e-9) * 1e6
    budget = f"budget of {MAX_STEP_MS:g} ms"
    step = f"added to a step that stores {PER_STEP} {size}"
    return [
        Row(step, added_ms, "ms", budget, added_ms / MAX_STEP_MS, "<= 1"),
        Row(f"processor time, {size}", added_us, "us/block"),
        Row(f"jobs of one block, {size}", 1 / seconds, "blocks/s"),
    ]
