# SPDX-License-Identifier: Apache-2.0
"""Tests that every ``SecondaryTierManager`` must pass. Subclass the contract in a test module::

class TestMyTier(SecondaryTierContract):
    def make_tier(self, primary_kv_view):
        return MyTier(primary_kv_view, ...)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import numpy as np

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.testing.keys import keys
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager

NUM_SLOTS = 16
BLOCK_BYTES = 512


def _content(key: OffloadKey) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


class _Primary:
    """Host memory, and jobs for one tier."""

    def __init__(self) -> None:
        self.memory = bytearray(NUM_SLOTS * BLOCK_BYTES)
        self.view = memoryview(self.memory).cast("B", (NUM_SLOTS, BLOCK_BYTES))
        self._job_ids = count(1)

    def row(self, slot: int) -> bytes:
        return bytes(self.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES])

    def fill(self, slots: Sequence[int], blocks: Iterable[bytes]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            self.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = block

    def job(
        self, names: Sequence[OffloadKey], slots: Sequence[int], is_promotion: bool, context: ReqContext
    ) -> JobMetadata:
        ids = np.asarray(slots, dtype=np.int64)
        return JobMetadata(next(self._job_ids), tuple(names), ids, is_promotion, context)


class SecondaryTierContract:
    """The tests, which store and load real bytes through the tier.

    No wait takes longer than ``timeout_s``, and no test measures time. ``wants_whole_requests`` says whether the tier
    asks for ``REQUEST_LEVEL``.
    """

    timeout_s = 30.0
    wants_whole_requests = False

    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        """Return a new, empty tier over ``primary_kv_view`` (slots of 512 bytes)."""
        raise NotImplementedError

    def forget(self, tier: SecondaryTierManager, names: Sequence[OffloadKey]) -> bool:
        """Make blocks unreadable without calling the tier. Returns ``False`` if that is impossible with this tier."""
        return False

    def progress(self, tier: SecondaryTierManager) -> None:
        """Let the tier work for a moment. The default suffices for a tier with threads."""
        time.sleep(0.001)

    # ------------------------------------------------------------------------------------------------- helpers

    @contextmanager
    def _opened(self) -> Iterator[tuple[_Primary, SecondaryTierManager]]:
        primary = _Primary()
        tier = self.make_tier(primary.view)
        try:
            yield primary, tier
        finally:
            tier.shutdown()

    def _await(self, tier: SecondaryTierManager, job_ids: Iterable[int]) -> dict[int, JobResult]:
        """Step until each of these jobs has its result, and return the results. No other job may have one."""
        wanted, results = set(job_ids), dict[int, JobResult]()
        deadline = time.monotonic() + self.timeout_s
        while wanted - results.keys():
            tier.on_schedule_end()
            for result in tier.get_finished_jobs():
                assert result.job_id in wanted, f"a result for job {result.job_id}, which is not in flight"
                assert result.job_id not in results, f"two results for job {result.job_id}"
                results[result.job_id] = result
            assert time.monotonic() < deadline, f"jobs {wanted - results.keys()} did not end in {self.timeout_s} s"
            if wanted - results.keys():
                assert tier.has_pending_work(), "a tier with jobs in flight has pending work"
                self.progress(tier)
        return results

    def _find(self, tier: SecondaryTierManager, key: OffloadKey, context: ReqContext) -> bool:
        """Ask in each step until the answer is not ``None``, and return it."""
        deadline = time.monotonic() + self.timeout_s
        while (found := tier.lookup(key, context)) is None:
            tier.on_schedule_end()
            self.progress(tier)
            assert time.monotonic() < deadline, "lookup stays None"
        assert found is True or found is False
        return found

    def _store(
        self, primary: _Primary, tier: SecondaryTierManager, names: Sequence[OffloadKey], context: ReqContext
    ) -> None:
        slots = list(range(len(names)))
        primary.fill(slots, map(_content, names))
        job = primary.job(names, slots, is_promotion=False, context=context)
        tier.submit_store(job)
        result = self._await(tier, [job.job_id])[job.job_id]
        assert result.success

    def _load(
        self, primary: _Primary, tier: SecondaryTierManager, names: Sequence[OffloadKey], context: ReqContext
    ) -> set[OffloadKey]:
        """Load blocks into the upper half of the slots. Verifies and returns the blocks whose load succeeded."""
        slots = [NUM_SLOTS // 2 + n for n in range(len(names))]
        primary.fill(slots, [b"\xee" * BLOCK_BYTES] * len(names))
        job = primary.job(names, slots, is_promotion=True, context=context)
        tier.submit_load(job)
        result = self._await(tier, [job.job_id])[job.job_id]
        assert set(result.successful_keys or ()) <= set(names)
        good = set(result.succeeded(names))
        for key, slot in zip(names, slots, strict=True):
            assert key not in good or primary.row(slot) == _content(key), f"wrong bytes for {key.hex()}"
        return good

    def _context(self, tier: SecondaryTierManager, req_id: str = "r") -> ReqContext:
        context = ReqContext(req_id)
        tier.on_new_request(context)
        return context

    # --------------------------------------------------------------------------------------------------- the contract

    def test_stored_blocks_are_found_and_loaded(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(5))
            self._store(primary, tier, names, context)
            assert all(self._find(tier, key, context) for key in names)
            assert self._load(primary, tier, names, context) == set(names)

    def test_blocks_load_in_any_order_and_again(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(4))
            self._store(primary, tier, names, context)
            for chosen in (names[::-1], names[1:3], names[:1], names):
                assert self._load(primary, tier, chosen, context) == set(chosen)

    def test_a_prefix_is_answered_as_its_blocks_one_by_one_up_to_a_miss(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(6))
            self._store(primary, tier, names[:3] + names[4:], context)
            found = [self._find(tier, key, context) for key in names]
            assert tier.lookup_prefix(names, context) == found[: found.index(False) + 1]
            assert tier.lookup_prefix(names[4:], context) == found[4:]

    def test_absent_blocks_are_not_found(self) -> None:
        with self._opened() as (_, tier):
            assert not self._find(tier, keys(1)[0], self._context(tier))

    def test_a_load_fails_for_absent_blocks_alone(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(4))
            self._store(primary, tier, names[:2], context)
            assert self._load(primary, tier, names, context) == set(names[:2])
            assert self._load(primary, tier, names[2:], context) == set()

    def test_blocks_that_the_store_lost_are_misses(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(4))
            self._store(primary, tier, names, context)
            if not self.forget(tier, names[1:2]):
                return
            assert self._load(primary, tier, names, context) == set(names) - {names[1]}

    def test_a_block_stored_twice_is_one_block(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(3))
            self._store(primary, tier, names, context)
            self._store(primary, tier, names, self._context(tier, "other"))
            assert self._load(primary, tier, names, context) == set(names)

    def test_each_of_many_jobs_has_one_result(self) -> None:
        with self._opened() as (primary, tier):
            context = self._context(tier)
            slots = list(range(NUM_SLOTS))
            names = keys(*slots)
            primary.fill(slots, map(_content, names))
            jobs = [primary.job([names[n]], [n], is_promotion=False, context=context) for n in slots]
            for job in jobs:
                tier.submit_store(job)
            results = self._await(tier, [job.job_id for job in jobs])
            assert all(result.success for result in results.values())
            assert not list(tier.get_finished_jobs())
            assert self._load(primary, tier, names[:8], context) == set(names[:8])

    def test_slots_may_be_reused_after_the_result(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(4))
            self._store(primary, tier, names, context)
            primary.fill(range(4), [b"\x00" * BLOCK_BYTES] * 4)
            assert self._load(primary, tier, names, context) == set(names)

    def test_after_a_drain_no_io_touches_primary_memory_and_results_still_come(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(8))
            primary.fill(range(8), map(_content, names))
            job = primary.job(names, range(8), is_promotion=False, context=context)
            tier.submit_store(job)
            tier.drain_jobs()
            primary.fill(range(8), [b"\x00" * BLOCK_BYTES] * 8)
            assert self._await(tier, [job.job_id])[job.job_id].success
            assert self._load(primary, tier, names, context) == set(names)

    def test_an_idle_tier_has_no_pending_work(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(2))
            assert not tier.has_pending_work()
            self._store(primary, tier, names, context)
            tier.on_request_finished(context)
            assert not list(tier.get_finished_jobs())
            assert not tier.has_pending_work()

    def test_the_policy_it_wants(self) -> None:
        with self._opened() as (_, tier):
            policy = tier.on_new_request(ReqContext("r")).policy
            assert (policy is OffloadPolicy.REQUEST_LEVEL) == self.wants_whole_requests

    def test_touch_of_anything_is_harmless(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(3))
            tier.touch(names, context)
            self._store(primary, tier, names, context)
            tier.touch([*names, *keys(99)], context)
            tier.touch([])
            assert self._load(primary, tier, names, context) == set(names)

    def test_shutdown_may_come_twice_and_with_jobs_in_flight(self) -> None:
        with self._opened() as (primary, tier):
            context, names = self._context(tier), keys(*range(4))
            primary.fill(range(4), map(_content, names))
            tier.submit_store(primary.job(names, range(4), is_promotion=False, context=context))
            tier.shutdown()
            tier.shutdown()

    def test_stats_belong_to_declared_metrics(self) -> None:
        from kvoffload.metrics import METRICS

        with self._opened() as (primary, tier):
            self._store(primary, tier, keys(1), self._context(tier))
            for sample, value in tier.get_stats().items():
                assert METRICS[sample[0]].fits(sample)
                assert value >= 0
