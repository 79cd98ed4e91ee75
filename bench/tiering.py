# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of tiering on the scheduler's thread: an idle step per tier, and hits and reads per block.

For hits and reads, fake tiers answer at once and copy nothing, so that the figures show only the manager's cost. The
last rows compare reading a long prefix from a real disk tier, as a waiting request sees it, with the store's own read
speed. ``KVOFFLOAD_BENCH_DIR`` chooses the disk (default: the working directory). Files are written once and read many
times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.core import Row, bench_directory, interleaved_medians
from kvoffload.base import OffloadKey, ReqContext, RequestOffloadingContext, make_offload_key
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.tiering import (
    CPUPrimaryTierOffloadingManager,
    JobMetadata,
    JobResult,
    SecondaryTierManager,
    TieringOffloadingManager,
    build_tier,
)
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.tier import StoreTier, TierLimits

MAX_IDLE_STEP_US = 10.0
THREADS = 4
BATCH = 16
STEP_S = 0.01
"""The duration of a step of an engine with a waiting request."""


class NoMemory:
    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(self._num_blocks)).cast("B", (self._num_blocks, 1))


class InstantTier(SecondaryTierManager):
    """A tier that contains every block, and ends each job when it is next asked for results."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(view, "instant")
        self._results: list[JobResult] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return True

    def submit_store(self, job: JobMetadata) -> None:
        self._results.append(JobResult(job.job_id, True))

    def submit_load(self, job: JobMetadata) -> None:
        self._results.append(JobResult(job.job_id, True))

    def get_finished_jobs(self) -> Sequence[JobResult]:
        results, self._results = self._results, []
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def make_manager(num_blocks: int, num_tiers: int) -> TieringOffloadingManager:
    memory = NoMemory(num_blocks)
    primary = CPUPrimaryTierOffloadingManager(num_blocks, memory)
    return TieringOffloadingManager(primary, [InstantTier(memory.create_kv_memoryview()) for _ in range(num_tiers)])


def keys(first: int, n: int) -> list[OffloadKey]:
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(first, first + n)]


def run(short: bool) -> list[Row]:
    sizes = [64 << 10] if short else [64 << 10, 256 << 10]
    return [_idle_step(short), _hits(short), _promotions(short), *(_from_disk(short, size) for size in sizes)]


def _idle_step(short: bool) -> Row:
    """Measure an idle step with real store tiers, which have threads and queues."""
    steps, num_tiers = (100 if short else 20_000), 4
    bare, memory = make_manager(64, 0), NoMemory(64)
    primary = CPUPrimaryTierOffloadingManager(64, memory)
    tiers = [build_tier({"type": "memory"}, primary.kv_view) for _ in range(num_tiers)]
    tiered = TieringOffloadingManager(primary, tiers)
    tiered.reset_cache()  # waits for the initial scans of the tiers
    tiered.on_schedule_end()

    def walk(manager: TieringOffloadingManager) -> None:
        for _ in range(steps):
            manager.on_schedule_end()
            manager.has_pending_work()

    without, with_tiers = interleaved_medians(lambda: walk(bare), lambda: walk(tiered), repeats=3 if short else 15)
    tiered.shutdown()
    per_tier_us = max(with_tiers - without, 1e-12) / steps / num_tiers * 1e6
    budget = f"budget of {MAX_IDLE_STEP_US:g} us"
    return Row("idle step, per tier", per_tier_us, "us", budget, per_tier_us / MAX_IDLE_STEP_US, "<= 1")


def _hits(short: bool) -> Row:
    """Compare lookup, load and unpin of resident prefixes with the manager of host memory alone."""
    blocks = keys(0, 64 if short else 4_000)
    tiered = make_manager(len(blocks), 2)
    context = ReqContext("r")
    primary = tiered.primary_tier
    primary.prepare_store(blocks, context)
    primary.complete_store(blocks, context)

    def walk(manager: TieringOffloadingManager | CPUPrimaryTierOffloadingManager) -> None:
        assert False not in manager.lookup_prefix(blocks, context)
        manager.prepare_load(blocks, context)
        manager.complete_load(blocks, context)

    alone, through = interleaved_medians(lambda: walk(primary), lambda: walk(tiered), repeats=3 if short else 25)
    per_block_us = through / len(blocks) * 1e6
    return Row("hit, per block", per_block_us, "us", "primary tier alone", through / alone)


def _promotions(short: bool) -> Row:
    """Measure reads of prefixes from a tier into full host memory, where each prefix evicts the previous one.

    The time is for one block's lookups, reservation, eviction, job and load on the scheduler's thread.
    """
    length, rounds = (32, 3) if short else (4_000, 10)
    manager = make_manager(2 * length, 1)
    seconds = []
    for n in range(rounds):
        context = ReqContext(f"r{n}")
        blocks = keys(n * length, length)
        start = time.perf_counter()
        manager.on_new_request(context)
        assert True not in manager.lookup_prefix(blocks, context)
        manager.on_schedule_end()
        manager.on_schedule_end()
        answers = manager.lookup_prefix(blocks, context)
        manager.prepare_load(blocks, context)
        manager.complete_load(blocks, context)
        manager.on_request_finished(context)
        seconds.append(time.perf_counter() - start)
        assert answers == [True] * length
    steady = sorted(seconds[2:])[len(seconds[2:]) // 2]
    return Row(f"promotion of {length} blocks, per block", steady / length * 1e6, "us")


def _from_disk(short: bool, block_bytes: int) -> Row:
    blocks = keys(0, 32 if short else 4_000)
    num_slots = len(blocks) * 3 // 2  # one request may claim three quarters
    with bench_directory() as root:
        region = SharedOffloadRegion.anonymous(num_slots, block_bytes)
        primary = CPUPrimaryTierOffloadingManager(num_slots, region)
        rows = [memoryview(row) for row in np.asarray(primary.kv_view)[: len(blocks)]]
        # Touch all memory, because the first reads would otherwise also allocate its pages.
        np.asarray(primary.kv_view).view(np.int64)[:] = np.arange(num_slots)[:, None]
        store = DiskStore(root, block_bytes, max_bytes=2 * len(blocks) * block_bytes)
        tier = StoreTier(primary.kv_view, "disk", store, TierLimits(threads=THREADS))
        manager = TieringOffloadingManager(primary, [tier])
        with ThreadPoolExecutor(THREADS) as pool:
            batches = [slice(first, first + BATCH) for first in range(0, len(blocks), BATCH)]

            def alone(call: Callable[[list[OffloadKey], list[memoryview]], list[bool]]) -> float:
                begun = time.perf_counter()
                assert all(map(all, pool.map(lambda part: call(blocks[part], rows[part]), batches)))
                return time.perf_counter() - begun

            alone(store.write)
            _promote(manager, blocks)  # a warm-up
            pairs = [(_promote(manager, blocks), alone(store.read_into)) for _ in range(3 if short else 9)]
        rows.clear()
        manager.shutdown()
    seconds = statistics.median(mine for mine, _ in pairs)
    # Consecutive measurements are compared, because a disk's speed drifts.
    ratio = statistics.median(mine / its for mine, its in pairs)
    case = f"{len(blocks):,} blocks of {block_bytes >> 10} KiB up from disk, {THREADS} threads"
    return Row(case, seconds, "s", "the store alone", ratio, "<= 1.1")


def _promote(manager: TieringOffloadingManager, blocks: list[OffloadKey]) -> float:
    """Return the seconds from a request's first lookup until its whole prefix is in host memory, which starts empty."""
    manager.reset_cache()
    context = ReqContext("waiting")
    begun = time.perf_counter()
    manager.on_new_request(context)
    while None in (answers := manager.lookup_prefix(blocks, context)):
        manager.on_schedule_end()
        time.sleep(STEP_S)
    seconds = time.perf_counter() - begun
    assert answers == [True] * len(blocks)
    manager.prepare_load(blocks, context)
    manager.complete_load(blocks, context)
    manager.on_request_finished(context)
    return seconds
