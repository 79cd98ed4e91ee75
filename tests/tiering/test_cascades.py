# SPDX-License-Identifier: Apache-2.0
"""Cascades alone: pins per tier, and blocks that are parked until they are written."""

from __future__ import annotations

from tests.tiering.rig import Memory, content, keys

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.testing import FakeTier
from kvoffload.tiering.cascades import Cascades
from kvoffload.tiering.requests import TierRequest
from kvoffload.tiering.tier_jobs import GuardedTier, TierJobs

REQUEST = ReqContext("r")


class Parts:
    """Cascades to two fake tiers, and a request whose blocks the first of them wants as a whole."""

    def __init__(self) -> None:
        self.memory = Memory(8)
        self.primary = CPUPrimaryTierOffloadingManager(8, self.memory)
        self.fakes = [FakeTier(self.primary.kv_view, f"tier{index}") for index in range(2)]
        self.tiers = [GuardedTier(index, fake) for index, fake in enumerate(self.fakes)]
        self.jobs = TierJobs(self.tiers)
        self.cascades = Cascades(self.primary, self.jobs, self.tiers[1:])
        self.request = TierRequest(REQUEST, 1.0, whole_request_tiers=(self.tiers[0],))

    def reserve(self, *numbers: int) -> None:
        output = self.primary.prepare_store(keys(*numbers), REQUEST)
        assert output is not None
        for key, slot in zip(keys(*numbers), output.store_spec.block_ids.tolist(), strict=True):  # type: ignore[attr-defined]
            self.memory.write(slot, content(key))

    def publish(self, *numbers: int, success: bool = True) -> None:
        self.primary.complete_store(keys(*numbers), REQUEST, success)

    def finish(self) -> None:
        for fake in self.fakes:
            fake.finish()
        self.cascades.end(self.jobs.take_finished())
        self.cascades.check_invariants([self.request], [])


def test_a_block_is_pinned_once_per_tier_until_each_job_has_ended() -> None:
    parts = Parts()
    parts.reserve(1, 2)
    parts.publish(1, 2)
    assert parts.cascades.submit(parts.tiers, keys(1, 2), REQUEST) == []
    assert parts.primary.slots.num_busy == 2
    parts.fakes[0].finish()
    parts.cascades.end(parts.jobs.take_finished())
    assert parts.primary.slots.num_busy == 2
    parts.finish()
    assert parts.primary.slots.num_busy == 0
    assert parts.cascades.outcomes == {"ok": 4, "failed": 0, "dropped": 0}
    assert parts.fakes[1].blocks == {key: content(key) for key in keys(1, 2)}


def test_a_block_that_a_tier_holds_is_touched_and_not_written_again() -> None:
    parts = Parts()
    fake, touched = parts.fakes[1], list[OffloadKey]()
    fake.holds = lambda names: [name in fake.blocks for name in names]  # type: ignore[method-assign]
    fake.touch = lambda names, context: touched.extend(names)  # type: ignore[method-assign]
    fake.blocks.update({key: content(key) for key in keys(1, 3)})
    parts.reserve(1, 2, 3, 4)
    parts.publish(1, 2, 3, 4)
    assert parts.cascades.submit(parts.tiers, keys(1, 2, 3, 4), REQUEST) == []
    assert [list(job.keys) for job in parts.jobs.in_flight.values()] == [keys(1, 2, 3, 4), keys(2, 4)]
    assert touched == keys(1, 3)
    parts.finish()
    assert parts.cascades.outcomes == {"ok": 6, "failed": 0, "dropped": 0}
    assert parts.cascades.submit(parts.tiers[1:], keys(1, 2), REQUEST) == []
    assert not parts.jobs.in_flight


def test_a_block_being_written_is_parked_and_cascaded_once_it_is_ready() -> None:
    parts = Parts()
    parts.reserve(1)
    parts.cascades.submit_or_park(parts.request, keys(1, 9))
    assert (parts.cascades.num_parked, parts.request.may_submit) == (1, 1)
    assert parts.cascades.retry_parked() == []
    parts.publish(1)
    assert parts.cascades.retry_parked(keys(1)) == [parts.request]
    assert parts.request.may_submit == 0
    parts.finish()
    assert set(parts.fakes[0].blocks) == {*keys(1)}
    assert not parts.fakes[1].blocks


def test_a_parked_block_that_is_never_written_is_dropped() -> None:
    parts = Parts()
    parts.reserve(1, 2)
    parts.cascades.submit_or_park(parts.request, keys(1, 2))
    parts.publish(1, success=False)
    assert parts.cascades.retry_parked() == [parts.request]
    assert len(parts.jobs.in_flight) == 0
    assert parts.cascades.reset() == [parts.request]
    assert not parts.cascades.parked
    parts.publish(2)


def test_a_stored_block_goes_to_the_tiers_of_all_stores_and_to_those_that_want_the_request() -> None:
    parts = Parts()
    other = TierRequest(ReqContext("other"), 1.0)
    parts.reserve(1, 2, 3)
    parts.cascades.begin_stores(parts.request, keys(1, 2), keys(1, 2))
    parts.cascades.begin_stores(other, keys(3), keys(3))
    assert (parts.request.may_submit, other.may_submit) == (2, 1)
    parts.publish(1, 3)
    parts.publish(2, success=False)
    assert parts.cascades.end_stores(keys(1, 2, 3)) == [parts.request, other]
    assert (parts.request.may_submit, other.may_submit) == (0, 0)
    parts.finish()
    assert [list(fake.blocks) for fake in parts.fakes] == [keys(1), keys(1, 3)]


def test_a_request_that_offers_what_another_one_stores_has_it_cascaded_when_it_is_ready() -> None:
    parts = Parts()
    other = TierRequest(ReqContext("other"), 1.0)
    parts.reserve(1)
    parts.cascades.begin_stores(other, keys(1), keys(1))
    parts.cascades.begin_stores(parts.request, [], keys(1))
    assert (parts.cascades.num_parked, parts.request.may_submit) == (1, 1)
    parts.publish(1)
    assert parts.cascades.end_stores(keys(1)) == [other, parts.request]
    parts.finish()
    assert [list(fake.blocks) for fake in parts.fakes] == [keys(1), keys(1)]


def test_a_reset_forgets_what_is_stored() -> None:
    parts = Parts()
    parts.reserve(1, 2)
    parts.cascades.begin_stores(parts.request, keys(1, 2), keys(1, 2))
    assert parts.cascades.reset() == [parts.request] * 2
    assert parts.request.may_submit == 0
    parts.publish(1, 2)
    assert parts.cascades.end_stores(keys(1, 2)) == []
    assert not parts.jobs.in_flight
