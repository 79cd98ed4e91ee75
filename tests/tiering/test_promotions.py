# SPDX-License-Identifier: Apache-2.0
"""Promotions alone: slots, batches, limits and ends. ``test_laws_promotion.py`` has them in the manager."""

from __future__ import annotations

from tests.tiering.rig import Memory, content, keys

from kvoffload.base import ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.testing import FakeTier
from kvoffload.tiering.promotions import Claims, Promotions, RequestState
from kvoffload.tiering.tier_jobs import GuardedTier, TierJobs


class Parts:
    """Promotions from one fake tier into eight slots, of which one request may claim three and all together four."""

    def __init__(self) -> None:
        self.memory = Memory(8)
        self.primary = CPUPrimaryTierOffloadingManager(8, self.memory)
        self.fake = FakeTier(self.primary.kv_view)
        self.tier = GuardedTier(0, self.fake)
        self.jobs = TierJobs()
        self.claims = Claims(8, claim_share=3 / 8, promotion_share=4 / 8)
        self.promotions = Promotions(self.primary, self.claims, self.jobs)
        self.fake.put(keys(*range(10)), map(content, keys(*range(10))))

    def begin(self, request: RequestState, *numbers: int) -> list[bool]:
        return [self.promotions.begin(request, key, self.tier) for key in keys(*numbers)]

    def finish(self, **how: object) -> None:
        self.fake.finish(**how)  # type: ignore[arg-type]
        for job in self.jobs.take_finished():
            self.promotions.end(job)
        self.promotions.check_invariants()


def request(name: str) -> RequestState:
    return RequestState(ReqContext(name), patience_s=1.0)


def test_one_batch_per_request_reserves_at_once_and_publishes_what_arrives() -> None:
    parts = Parts()
    first, second = request("a"), request("b")
    assert parts.begin(first, 1, 2) == [True, True]
    assert parts.begin(second, 3) == [True]
    assert parts.primary.slots.num_in_flight == 3
    assert not parts.fake.jobs
    parts.promotions.submit()
    assert [len(job.keys) for job in parts.fake.jobs.values()] == [2, 1]
    parts.finish()
    assert [parts.primary.lookup(key, first.context) for key in keys(1, 2, 3)] == [True] * 3
    assert parts.memory.read(parts.primary.slots.pin(keys(2))[0]) == content(keys(2)[0])
    assert parts.promotions.outcomes == {"ok": 3, "failed": 0}


def test_limits_refuse_by_reason() -> None:
    parts = Parts()
    assert parts.begin(request("a"), 1, 2, 3, 4) == [True, True, True, False]
    assert parts.begin(request("b"), 5, 6) == [True, False]
    assert parts.promotions.refused == {"claim_share": 1, "promotion_share": 1, "no_room": 0}


def test_without_room_nothing_is_begun() -> None:
    parts = Parts()
    parts.primary.prepare_store(keys(*range(10, 18)), ReqContext("writer"))
    assert parts.begin(request("a"), 1) == [False]
    assert parts.promotions.refused["no_room"] == 1
    assert len(parts.promotions) == len(parts.claims) == 0


def test_a_block_that_does_not_arrive_is_a_miss_for_every_waiter() -> None:
    parts = Parts()
    first, second = request("a"), request("b")
    parts.begin(first, 1, 2)
    parts.claims.claim(second, keys(1)[0])
    parts.promotions.submit()
    parts.finish(lose=keys(1), tear=True)
    assert first.failed == second.failed == {*keys(1)}
    assert parts.primary.slots.num_in_flight == 0
    assert parts.primary.lookup(keys(1)[0], first.context) is False


def test_a_reset_begins_nothing_that_was_queued_and_waits_for_what_was_submitted() -> None:
    parts = Parts()
    asking = request("a")
    parts.begin(asking, 1)
    parts.promotions.submit()
    parts.begin(asking, 2)
    parts.claims.clear()
    parts.promotions.reset()
    parts.primary.reset_cache()
    parts.jobs.mark_stale()
    parts.promotions.submit()
    assert len(parts.fake.jobs) == 1
    assert parts.primary.slots.num_free == 7, "the tier may still write to the slot of its job"
    parts.finish()
    assert parts.primary.slots.num_free == 8
    assert parts.primary.lookup(keys(1)[0], asking.context) is False
