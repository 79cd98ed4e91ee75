# SPDX-License-Identifier: Apache-2.0
"""Test that the contract of tiers fails tiers that break it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from tests.testing.broken import EndsOnce, failures_of

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.metrics import Stats
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.testing.tier_contract import SecondaryTierContract
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager


class Tier(FakeTier):
    """A right one. Each job ends at the next question for ends."""

    def get_finished_jobs(self) -> Sequence[JobResult]:
        self.finish()
        return super().get_finished_jobs()


class FindsAll(Tier):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return True


class FindsNothing(Tier):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return False


class NeverFindsOut(Tier):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return super().lookup(key, req_context) or None


class SaysOne(Tier):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return int(super().lookup(key, req_context) or 0)  # type: ignore[return-value]


class LooksOn(Tier):
    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return [self.lookup(key, req_context) for key in keys]


class LooksNowhere(Tier):
    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return [False]


class CopiesNothing(Tier):
    def _copy(self, job: JobMetadata, failed_keys: Collection[OffloadKey], tear: bool) -> None:
        if not job.is_promotion:
            super()._copy(job, failed_keys, tear)


class KeepsTheNewest(Tier):
    def _copy(self, job: JobMetadata, failed_keys: Collection[OffloadKey], tear: bool) -> None:
        super()._copy(job, failed_keys, tear)
        for key in [*self.blocks][:-4]:
            del self.blocks[key]


class LoadsOnce(Tier):
    def _copy(self, job: JobMetadata, failed_keys: Collection[OffloadKey], tear: bool) -> None:
        super()._copy(job, failed_keys, tear)
        for key in job.keys if job.is_promotion else ():
            self.blocks.pop(key, None)


class AllOrNothing(Tier):
    def get_finished_jobs(self) -> Sequence[JobResult]:
        return [JobResult(each.job_id, each.success) for each in super().get_finished_jobs()]


class SaysThatAllWent(Tier):
    def get_finished_jobs(self) -> Sequence[JobResult]:
        return [JobResult(each.job_id, True) for each in super().get_finished_jobs()]


class NamesOthers(Tier):
    def get_finished_jobs(self) -> Sequence[JobResult]:
        return [JobResult(each.job_id, False, [OffloadKey(b"other")]) for each in super().get_finished_jobs()]


class EndsTwice(Tier):
    def get_finished_jobs(self) -> Sequence[JobResult]:
        return [*super().get_finished_jobs()] * 2


class EndsNothing(Tier):
    def get_finished_jobs(self) -> Sequence[JobResult]:
        return ()


class EndsOthers(Tier):
    def get_finished_jobs(self) -> Sequence[JobResult]:
        return [*super().get_finished_jobs(), JobResult(999, True)]


class Late(Tier):
    """Reads the slots of a store only when something is to be loaded."""

    def finish(self, *arguments: object, **options: object) -> list[int]:  # type: ignore[override]
        stores = [job for job in self.jobs.values() if not job.is_promotion]
        self._late = [*getattr(self, "_late", ()), *stores]
        if len(stores) < len(self.jobs):
            for job in self._late:
                self._copy(job, set(), False)
            self._late = []
        for job in stores:
            del self.jobs[job.job_id]
            self._results.append(JobResult(job.job_id, True))
        return super().finish()


class DrainsNothing(Tier):
    def drain_jobs(self) -> None:
        return


class IsNeverDone(Tier):
    def has_pending_work(self) -> bool:
        return True


class IsNeverBusy(Tier):
    """Its jobs take two questions."""

    asked = 0

    def get_finished_jobs(self) -> Sequence[JobResult]:
        self.asked += 1
        return super().get_finished_jobs() if self.asked % 2 == 0 else ()

    def has_pending_work(self) -> bool:
        return False


class WantsAll(Tier):
    def __init__(self, view: memoryview) -> None:
        super().__init__(view, policy=OffloadPolicy.REQUEST_LEVEL)


class NoTouch(Tier):
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        assert {*keys} <= {*self.blocks}


class NoEmptyTouch(Tier):
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        assert keys


class TouchForgets(Tier):
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.blocks.clear()


class OneEnd(EndsOnce, Tier):
    pass


class EndsWhenIdle(Tier):
    def shutdown(self) -> None:
        assert not self.jobs


class CountsWhatNobodyKnows(Tier):
    def get_stats(self) -> Stats:
        return {("tier_blocks",): 1}


class CountsBackwards(Tier):
    def get_stats(self) -> Stats:
        return {("tier_blocks", "fake"): -1}


def failures(make: type[Tier]) -> set[str]:
    class Contract(SecondaryTierContract):
        timeout_s = 0.02 if make in (NeverFindsOut, EndsNothing) else 60.0
        wants_whole_requests = False

        def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
            return make(primary_kv_view)

        def forget(self, tier: SecondaryTierManager, names: Sequence[OffloadKey]) -> bool:
            assert isinstance(tier, Tier)
            for name in names:
                del tier.blocks[name]
            return True

        def progress(self, tier: SecondaryTierManager) -> None:
            return

    return failures_of(Contract)


FOUND, AGAIN = "test_stored_blocks_are_found_and_loaded", "test_blocks_load_in_any_order_and_again"
PREFIX = "test_a_prefix_is_answered_as_its_blocks_one_by_one_up_to_a_miss"
ABSENT, ALONE = "test_absent_blocks_are_not_found", "test_a_load_fails_for_absent_blocks_alone"
LOST, TWICE = "test_blocks_that_the_store_lost_are_misses", "test_a_block_stored_twice_is_one_block"
MANY, REUSED = "test_each_of_many_jobs_has_one_result", "test_slots_may_be_reused_after_the_result"
DRAIN = "test_after_a_drain_no_io_touches_primary_memory_and_results_still_come"
IDLE, WANTS, TOUCH = (
    "test_an_idle_tier_has_no_pending_work", "test_the_policy_it_wants", "test_touch_of_anything_is_harmless",
)  # fmt: skip
END, STATS = "test_shutdown_may_come_twice_and_with_jobs_in_flight", "test_stats_belong_to_declared_metrics"


def test_a_right_tier_passes() -> None:
    assert failures(Tier) == set()


@pytest.mark.parametrize(
    ("make", "tests"),
    [
        (FindsAll, {PREFIX, ABSENT}), (FindsNothing, {FOUND, PREFIX}), (NeverFindsOut, {ABSENT, PREFIX}),
        (SaysOne, {FOUND, ABSENT}), (LooksOn, {PREFIX}), (LooksNowhere, {PREFIX}),
        (CopiesNothing, {FOUND, AGAIN, ALONE, LOST, TWICE, MANY, REUSED, DRAIN, TOUCH}),
        (KeepsTheNewest, {FOUND, MANY}),
        (LoadsOnce, {AGAIN}), (AllOrNothing, {ALONE, LOST}), (SaysThatAllWent, {ALONE, LOST}), (NamesOthers, {FOUND}),
        (EndsTwice, {FOUND, MANY, IDLE}), (EndsNothing, {FOUND, MANY, DRAIN}), (EndsOthers, {FOUND, MANY}),
        (Late, {REUSED, DRAIN}), (DrainsNothing, {DRAIN}), (IsNeverDone, {IDLE}), (IsNeverBusy, {FOUND, MANY}),
        (WantsAll, {WANTS}), (NoTouch, {TOUCH}), (NoEmptyTouch, {TOUCH}), (TouchForgets, {TOUCH}), (OneEnd, {END}),
        (EndsWhenIdle, {END}), (CountsWhatNobodyKnows, {STATS}), (CountsBackwards, {STATS}),
    ],
)  # fmt: skip
def test_wrong_tiers_fail(make: type[Tier], tests: set[str]) -> None:
    assert tests <= failures(make)
