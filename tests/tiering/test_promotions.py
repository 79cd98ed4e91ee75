# SPDX-License-Identifier: Apache-2.0
"""Promotions alone: slots, batches, limits and ends. ``test_laws_promotion.py`` has them in the manager."""

from __future__ import annotations

from tests.tiering.rig import BLOCK_BYTES, Memory, content, keys

from kvoffload.base import PrepareStoreOutput, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.miss import Miss
from kvoffload.testing import FakeTier
from kvoffload.testing.clock import ManualClock
from kvoffload.tiering.load_policy import BlockWorth, LoadPlanner
from kvoffload.tiering.promotions import Promotions
from kvoffload.tiering.requests import TierRequest
from kvoffload.tiering.tier_jobs import GuardedTier, TierJobs
from kvoffload.tiering.waits import Waits


class Parts:
    """Reads from one fake tier into eight slots. Waiting requests may claim four of them."""

    def __init__(self) -> None:
        self.memory = Memory(8)
        self.primary = CPUPrimaryTierOffloadingManager(8, self.memory)
        self.fake = FakeTier(self.primary.kv_view)
        self.tier = GuardedTier(0, self.fake)
        self.jobs = TierJobs([self.tier])
        self.clock = ManualClock()
        self.waits = Waits(self.primary.slots, 4 / 8, self.clock)
        self.requests: list[TierRequest] = []
        self.promotions = Promotions(self.primary, self.waits, self.jobs, self.planner(), self.note_reservation)
        self.fake.put(keys(*range(10)), map(content, keys(*range(10))))

    def planner(self) -> LoadPlanner:
        return LoadPlanner(["fake"], BlockWorth(BLOCK_BYTES), self.clock)

    def note_reservation(self, output: PrepareStoreOutput) -> None:
        self.waits.gone(output.evicted_keys)

    def request(self, name: str) -> TierRequest:
        self.requests.append(TierRequest(ReqContext(name), budget_s=1.0))
        return self.requests[-1]

    def begin(self, request: TierRequest, *numbers: int) -> int:
        """How many of these blocks are begun."""
        begun = self.promotions.begin(self.tier, self.waits.of(request), keys(*numbers))
        self.check_invariants()
        return begun

    def finish(self, **how: object) -> None:
        self.fake.finish(**how)  # type: ignore[arg-type]
        for job in self.jobs.take_finished():
            self.promotions.end(job)
        self.check_invariants()

    def check_invariants(self) -> None:
        self.promotions.check_invariants()
        self.waits.check_invariants(self.requests)


def test_one_batch_per_request_reserves_at_once_and_publishes_what_arrives() -> None:
    parts = Parts()
    first, second = parts.request("a"), parts.request("b")
    assert parts.begin(first, 1, 2) == 2
    assert parts.begin(second, 3) == 1
    assert parts.primary.slots.num_in_flight == 3
    assert not parts.fake.jobs
    parts.promotions.submit()
    assert [len(job.keys) for job in parts.fake.jobs.values()] == [2, 1]
    parts.clock.advance(0.5)
    parts.finish()
    assert [parts.primary.lookup(key, first.context) for key in keys(1, 2, 3)] == [True] * 3
    assert parts.memory.read(parts.primary.slots.pin(keys(2))[0]) == content(keys(2)[0])
    assert parts.promotions.outcomes == {"ok": 3, "failed": 0}
    assert first.wait is not None
    assert first.wait.claims == dict.fromkeys(keys(1, 2), True)
    parts.clock.advance(9.0)
    assert first.wait.waited_s(parts.clock()) == 0.5, "it was answered when its blocks arrived"


def test_a_job_is_gathered_block_by_block_without_copies_and_is_its_tiers_then() -> None:
    """If every second block of a prompt is present, the keys must not be copied for each of the others."""
    parts = Parts()
    request = parts.request("a")
    parts.begin(request, 1)
    (job,) = parts.promotions.queue.values()
    gathered = job.keys
    parts.begin(request, 3)
    assert gathered == keys(1, 3)
    parts.promotions.submit()
    assert [submitted.keys for submitted in parts.fake.jobs.values()] == [tuple(keys(1, 3))]
    parts.finish()


def test_the_share_refuses_and_as_much_of_the_head_as_fits_is_begun() -> None:
    parts = Parts()
    first, second = parts.request("a"), parts.request("b")
    assert parts.begin(first, 1, 2, 3) == 3
    assert parts.begin(second, 5, 6) == 1
    assert parts.promotions.refused == {"promotion_share": 1, "no_room": 0}
    assert first.verdicts == {}
    assert second.verdicts == {keys(6)[0]: Miss.PROMOTION_SHARE}


def test_without_room_nothing_is_begun() -> None:
    parts = Parts()
    parts.primary.prepare_store(keys(*range(10, 18)), ReqContext("writer"))
    request = parts.request("a")
    assert parts.begin(request, 1) == 0
    assert parts.promotions.refused["no_room"] == 1
    assert request.wait is None
    assert len(parts.promotions) == len(parts.waits.claimed) == 0


def test_a_block_that_does_not_arrive_is_a_miss_for_every_waiter() -> None:
    parts = Parts()
    first, second = parts.request("a"), parts.request("b")
    parts.begin(first, 1, 2)
    parts.begin(second, 3)
    assert second.wait is not None
    assert parts.waits.found(second.wait, keys(1)) == [None]
    parts.promotions.submit()
    parts.finish(lose=keys(1), tear=True)
    assert first.verdicts == second.verdicts == {keys(1)[0]: Miss.PROMOTION_FAILED}
    assert second.wait.claims == {keys(3)[0]: True}
    assert parts.primary.slots.num_in_flight == 0
    assert parts.primary.lookup(keys(1)[0], first.context) is False


def test_a_probe_has_no_waiter_and_what_it_brings_may_be_evicted() -> None:
    parts = Parts()
    parts.promotions.probe(parts.tier, keys(1, 2), parts.waits.of(parts.request("a")))
    parts.check_invariants()
    assert len(parts.waits.claimed) == 2, "while it is in flight"
    parts.promotions.submit()
    parts.finish()
    assert len(parts.waits.claimed) == 0
    assert parts.primary.lookup(keys(1)[0], ReqContext("b")) is True
    parts.promotions.close()
    assert [call.req_id for call in parts.fake.calls("on_request_finished")] == ["kvoffload:probe"]


def test_a_reset_begins_nothing_that_was_queued_and_waits_for_what_was_submitted() -> None:
    parts = Parts()
    asking = parts.request("a")
    parts.begin(asking, 1)
    parts.promotions.submit()
    parts.begin(asking, 2)
    parts.waits.reset()
    parts.promotions.reset()
    parts.primary.reset_cache()
    parts.jobs.mark_stale()
    parts.promotions.submit()
    assert len(parts.fake.jobs) == 1
    assert parts.primary.slots.num_free == 7, "the tier may still write to the slot of its job"
    parts.finish()
    assert parts.primary.slots.num_free == 8
    assert parts.primary.lookup(keys(1)[0], asking.context) is False
