# SPDX-License-Identifier: Apache-2.0
"""Test laws 1, 3 and 4: which blocks are written to tiers, for which request, and when a tier learns of a request's
end."""

from __future__ import annotations

import pytest
from tests.tiering.rig import Rig, content, keys, prefix

from kvoffload.base import OffloadPolicy, ReqContext

BLOCK, REQUEST = OffloadPolicy.BLOCK_LEVEL, OffloadPolicy.REQUEST_LEVEL


# ------------------------------------------------------------------------------------------------------ 1 cascade


def test_a_completed_store_goes_down_to_every_tier_with_its_bytes() -> None:
    rig = Rig(policies=(BLOCK, BLOCK))
    request = rig.start("r")
    blocks = prefix(3)
    rig.store(blocks, request, finish=False)
    for tier in rig.tiers:
        (job,) = tier.jobs.values()
        assert list(job.keys) == blocks
        assert [rig.memory.read(slot) for slot in job.block_ids.tolist()] == [content(key) for key in blocks]
        assert job.req_context.req_id == "r" and not job.is_promotion
    rig.finish()
    assert [tier.blocks for tier in rig.tiers] == [{key: content(key) for key in blocks}] * 2


def test_blocks_stay_pinned_until_the_last_tier_is_done() -> None:
    rig = Rig(num_blocks=2, policies=(BLOCK, BLOCK))
    request = rig.start("r")
    rig.store(prefix(2), request, finish=False)
    others = prefix(2, of="q")
    assert rig.manager.prepare_store(others, request) is None
    rig.tiers[0].finish()
    assert rig.manager.prepare_store(others, request) is None
    rig.tiers[1].finish()
    assert rig.manager.prepare_store(others, request) is not None


@pytest.mark.parametrize("how", [{"success": False}, {"lose": keys(0)}])
def test_a_failed_cascade_unpins_and_is_counted(how: dict[str, object]) -> None:
    rig = Rig(num_blocks=2)
    request = rig.start("r")
    rig.store(prefix(2), request, finish=False)
    rig.finish(**how)
    stats = rig.manager.get_stats()
    assert stats["cascades", "failed"] == (2 if "success" in how else 1)
    assert rig.manager.prepare_store(prefix(2, of="q"), request) is not None
    assert not rig.manager.has_pending_work()


def test_a_failed_store_cascades_nothing() -> None:
    rig = Rig()
    request = rig.start("r")
    rig.manager.complete_store(rig.write(prefix(2), request), request, success=False)
    assert not rig.tier.jobs
    assert rig.ask(prefix(1), request) == [False]


def test_a_store_completed_without_its_context_cascades_in_the_storing_requests_name() -> None:
    rig = Rig()
    first, second = rig.start("a"), rig.start("b")
    one, two = rig.write(keys(1), first), rig.write(keys(2), second)
    rig.manager.complete_store(one + two)
    assert [(call.req_id, list(call.keys)) for call in rig.tier.calls("submit_store")] == [("a", one), ("b", two)]


def test_a_tier_that_takes_every_job_and_ends_none_holds_a_quarter_of_the_primary_tier() -> None:
    """It must not hold all slots, because then nothing could be stored, and the other tiers would get no blocks
    either."""
    rig = Rig(num_blocks=400, policies=(BLOCK, BLOCK))
    stuck, good = rig.tiers
    for number in range(100):
        request = rig.start(f"r{number}")
        blocks = prefix(30, of=f"r{number}-")
        rig.store(blocks, request, finish=False)
        good.finish()
        rig.step()
        rig.manager.on_request_finished(request)
    assert sum(len(job.keys) for job in stuck.jobs.values()) == 100
    assert len(good.blocks) == 3000
    assert rig.manager.get_stats()["tier_dropped_blocks", "tier0"] == 2900
    stuck.finish()
    rig.step()
    rig.store(prefix(30, of="again"), rig.start("again"))
    assert len(stuck.blocks) == 130


def test_a_store_beyond_a_tiers_backlog_is_written_in_part() -> None:
    rig = Rig(policies=(BLOCK, BLOCK), backlogs=(5, None))
    request = rig.start("r")
    rig.store(prefix(3), request, finish=False)
    rig.store(prefix(4, of="q"), request, finish=False)
    rig.finish()
    first, second = rig.tiers
    assert set(first.blocks) == {*prefix(3), *prefix(2, of="q")}
    assert len(second.blocks) == 7
    stats = rig.manager.get_stats()
    assert stats["tier_dropped_blocks", "tier0"] == stats["cascades", "dropped"] == 2
    assert stats["cascades", "failed"] == 0


def test_a_tier_that_refuses_a_job_by_raising_does_not_keep_its_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_blocks=1)
    request = rig.start("r")

    def broken(job: object) -> None:
        raise OSError("no such tier")

    monkeypatch.setattr(rig.tier, "submit_store", broken)
    rig.store(keys(0), request)
    assert not rig.manager.has_pending_work()
    assert rig.manager.prepare_store(keys(1), request) is not None


# ------------------------------------------------------------------------------------------------ 3 request level


@pytest.mark.parametrize(
    ("policies", "expected"),
    [((BLOCK, BLOCK), BLOCK), ((BLOCK, REQUEST), REQUEST), ((REQUEST, REQUEST), REQUEST), ((), BLOCK)],
)
def test_the_request_is_request_level_if_any_tier_wants_it(
    policies: tuple[OffloadPolicy, ...], expected: OffloadPolicy
) -> None:
    rig = Rig(policies=policies)
    assert rig.manager.on_new_request(ReqContext("r")).policy is expected
    assert all(len(tier.calls("on_new_request")) == 1 for tier in rig.tiers), "every tier is asked"


def test_resident_blocks_go_at_once_to_exactly_the_tiers_that_asked() -> None:
    rig = Rig(policies=(BLOCK, REQUEST, REQUEST))
    rig.store(prefix(2), rig.start("before"))
    request = rig.start("r")
    new = rig.write(prefix(4), request)
    assert new == keys(2, 3)
    for tier, expected in zip(rig.tiers, ([], prefix(2), prefix(2)), strict=True):
        found = [list(call.keys) for call in tier.calls("submit_store") if call.req_id == "r"]
        assert found == ([expected] if expected else [])
    rig.manager.complete_store(new, request)
    for tier in rig.tiers:
        assert list(tier.calls("submit_store")[-1].keys) == new


def test_resident_blocks_are_not_cascaded_for_a_block_level_request() -> None:
    rig = Rig(policies=(BLOCK,))
    rig.store(prefix(2), rig.start("before"))
    rig.write(prefix(2), rig.start("r"))
    assert [call.req_id for call in rig.tier.calls("submit_store")] == ["before"]


def test_a_block_still_being_written_is_parked_and_follows_when_it_is_ready() -> None:
    rig = Rig(policies=(BLOCK, REQUEST))
    writer, request = rig.start("writer"), rig.start("r")
    pending = rig.write(keys(0), writer)
    assert rig.write(keys(0), request) == []
    assert not rig.tiers[1].jobs
    assert rig.manager.get_stats()["cascades_parked",] == 1
    assert not rig.manager.has_pending_work(), "the end of its store needs no step"
    rig.step()
    assert not rig.tiers[1].jobs, "not before it is ready"
    rig.manager.complete_store(pending, writer)
    rig.manager.check_invariants()
    assert [(call.req_id, list(call.keys)) for call in rig.tiers[1].calls("submit_store")] == [
        ("writer", pending),
        ("r", pending),
    ]
    assert [call.req_id for call in rig.tiers[0].calls("submit_store")] == ["writer"]


def test_a_parked_block_whose_store_fails_is_forgotten() -> None:
    rig = Rig(policies=(REQUEST,))
    writer, request = rig.start("writer"), rig.start("r")
    pending = rig.write(keys(0), writer)
    rig.write(keys(0), request)
    rig.manager.complete_store(pending, writer, success=False)
    rig.manager.check_invariants()
    assert not rig.tier.jobs and not rig.manager.has_pending_work()


def test_a_block_that_is_being_promoted_is_parked_too() -> None:
    rig = Rig(policies=(REQUEST,))
    rig.below(keys(0))
    assert rig.ask(keys(0), rig.start("reader")) == [None]
    rig.step()
    request = rig.start("r")
    rig.write(keys(0), request)
    assert rig.tier.calls("submit_store") == []
    rig.finish()
    assert [(call.req_id, list(call.keys)) for call in rig.tier.calls("submit_store")] == [("r", keys(0))]


def test_a_block_the_request_itself_is_writing_is_not_sent_twice() -> None:
    rig = Rig(policies=(REQUEST,))
    request = rig.start("r")
    pending = rig.write(keys(0), request)
    assert rig.write(keys(0), request) == []
    rig.manager.complete_store(pending, request)
    assert len(rig.tier.calls("submit_store")) == 1


def test_absent_blocks_are_skipped() -> None:
    # The filter keeps a block out of host memory: it is neither stored nor resident nor in flight.
    rig = Rig(policies=(REQUEST,), primary_options={"store_threshold": 2})
    request = rig.start("r")
    assert rig.write(prefix(3), request) == []
    assert not rig.tier.jobs and not rig.manager.has_pending_work()


def test_nothing_is_cascaded_when_the_store_finds_no_room() -> None:
    rig = Rig(num_blocks=2, policies=(REQUEST,))
    writer, request = rig.start("writer"), rig.start("r")
    rig.store(keys(0), writer)
    rig.write(keys(1), writer)
    assert rig.manager.prepare_store(keys(0, 2), request) is None
    assert [call.req_id for call in rig.tier.calls("submit_store")] == ["writer"]


# ---------------------------------------------------------------------------------------------------------- 4 end


def names(rig: Rig, req_id: str, tier: int = 0) -> list[str]:
    return [call.name for call in rig.tiers[tier].log if call.req_id == req_id and call.name != "touch"]


def test_the_end_comes_after_the_cascade_of_a_store_that_outlives_its_request() -> None:
    rig = Rig(policies=(BLOCK, BLOCK))
    request = rig.start("r")
    pending = rig.write(prefix(2), request)
    rig.manager.on_request_finished(request)
    rig.step()
    assert names(rig, "r") == ["on_new_request"]
    rig.manager.complete_store(pending, request)
    for tier in range(2):
        assert names(rig, "r", tier) == ["on_new_request", "submit_store", "on_request_finished"]


def test_the_end_comes_after_a_failed_store_too() -> None:
    rig = Rig()
    request = rig.start("r")
    pending = rig.write(prefix(2), request)
    rig.manager.on_request_finished(request)
    rig.manager.complete_store(pending, request, success=False)
    assert names(rig, "r") == ["on_new_request", "on_request_finished"]


def test_the_end_waits_for_every_one_of_several_stores() -> None:
    rig = Rig()
    request = rig.start("r")
    one, two = rig.write(keys(1), request), rig.write(keys(2), request)
    rig.manager.on_request_finished(request)
    rig.manager.complete_store(two, request)
    assert "on_request_finished" not in names(rig, "r")
    rig.manager.complete_store(one, request)
    assert names(rig, "r")[-1] == "on_request_finished"


def test_the_end_comes_after_parked_cascades() -> None:
    rig = Rig(policies=(REQUEST,))
    writer, request = rig.start("writer"), rig.start("r")
    pending = rig.write(keys(0), writer)
    rig.write(keys(0), request)
    rig.manager.on_request_finished(request)
    rig.step()
    assert "on_request_finished" not in names(rig, "r")
    rig.manager.complete_store(pending, writer)
    assert names(rig, "r") == ["on_new_request", "submit_store", "on_request_finished"]


@pytest.mark.parametrize("is_same_object", [True, False])
def test_the_end_comes_after_queued_promotions(is_same_object: bool) -> None:
    rig = Rig()
    rig.below(prefix(2))
    request = rig.start("r")
    assert rig.ask(prefix(2), request) == [None, None]
    rig.manager.on_request_finished(request if is_same_object else ReqContext("r"))
    rig.step()
    assert names(rig, "r") == ["on_new_request", "submit_load", "on_request_finished"]


def test_a_tier_is_informed_once_also_for_a_request_that_never_ran() -> None:
    rig = Rig(policies=(BLOCK, REQUEST))
    request = rig.start("r")
    rig.manager.on_request_finished(request)
    rig.manager.on_request_finished(request)
    rig.step()
    for tier in range(2):
        assert names(rig, "r", tier) == ["on_new_request", "on_request_finished"]


def test_the_end_of_an_unknown_request_is_no_news() -> None:
    rig = Rig()
    rig.manager.on_request_finished(ReqContext("nobody"))
    assert rig.tier.log == []


def test_an_id_may_be_used_again_while_the_first_requests_store_is_in_flight() -> None:
    rig = Rig()
    first = rig.start("r")
    pending = rig.write(keys(0), first)
    rig.manager.on_request_finished(first)
    second = rig.start("r")
    rig.manager.complete_store(pending, first)
    assert names(rig, "r") == ["on_new_request", "on_new_request", "submit_store", "on_request_finished"]
    rig.manager.on_request_finished(second)
    assert names(rig, "r").count("on_request_finished") == 2
