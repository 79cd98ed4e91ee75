# SPDX-License-Identifier: Apache-2.0
"""Laws 7 and 8: every wait ends in a hit or a part of one, running requests find room, resets are safe."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from tests.tiering.rig import Rig, content, keys, prefix

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.cpu.policies.arc import ARCCachePolicy

BLOCK, REQUEST = OffloadPolicy.BLOCK_LEVEL, OffloadPolicy.REQUEST_LEVEL


@pytest.fixture(params=["lru", "arc"])
def cache_policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ----------------------------------------------------------------------------------------------------- 7 progress


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_a_prefix_about_as_long_as_the_primary_tier_ends_in_a_partial_hit(cache_policy: str, length: int) -> None:
    rig = Rig(num_blocks=64, cache_policy=cache_policy)
    rig.below(prefix(length))
    request = rig.start("r")
    hit = rig.wait_for_prefix(prefix(length), request, max_steps=4)
    assert hit == 48, "three quarters of the primary tier"
    rig.load(prefix(hit), request)
    assert len(rig.tier.calls("submit_load")) == 1


def test_a_prefix_with_a_resident_head_ends_in_a_partial_hit(cache_policy: str) -> None:
    # Eviction would remove the resident head first. Reading the tail must not cause that.
    rig = Rig(num_blocks=64, cache_policy=cache_policy)
    writer = rig.start("w")
    rig.store(prefix(40), writer)
    rig.store(prefix(24, of="q"), writer)
    rig.below(prefix(100))
    request = rig.start("r")
    hit = rig.wait_for_prefix(prefix(100), request, max_steps=4)
    assert hit == 48
    rig.load(prefix(hit), request)


def test_a_resident_prefix_beyond_the_share_is_a_hit_all_the_same(cache_policy: str) -> None:
    rig = Rig(num_blocks=16, cache_policy=cache_policy)
    rig.store(prefix(16), rig.start("w"))
    request = rig.start("r")
    assert rig.wait_for_prefix(prefix(16), request) == 16
    rig.load(prefix(16), request)


def run_all(rig: Rig, wanted: dict[str, list[OffloadKey]], max_steps: int, io_steps: int = 1) -> dict[str, int]:
    """Serve requests that arrive at once and ask in each step.

    Requests that may run load and finish. Returns hits by request id.
    """
    waiting = {req_id: rig.start(req_id) for req_id in wanted}
    hits: dict[str, int] = {}
    for step in range(max_steps):
        for req_id, request in list(waiting.items()):
            answers = rig.ask(wanted[req_id], request)
            if None in answers:
                continue
            hits[req_id] = answers.index(False) if False in answers else len(answers)
            if hits[req_id]:
                rig.load(wanted[req_id][: hits[req_id]], request)
            rig.manager.on_request_finished(request)
            del waiting[req_id]
        rig.step()
        if step % io_steps == io_steps - 1:
            rig.finish()
        if not waiting:
            return hits
    raise AssertionError(f"still waiting after {max_steps} steps: {sorted(waiting)}")


@pytest.mark.parametrize("io_steps", [1, 3])
@pytest.mark.parametrize("length", [10, 30, 65])
def test_many_waiting_requests_with_different_prefixes_all_make_progress(
    cache_policy: str, length: int, io_steps: int
) -> None:
    rig = Rig(num_blocks=64, cache_policy=cache_policy)
    wanted = {f"r{i}": prefix(length, of=f"{i}-") for i in range(20)}
    for blocks in wanted.values():
        rig.below(blocks)
    hits = run_all(rig, wanted, max_steps=4 * io_steps, io_steps=io_steps)
    assert sum(hits.values()) >= 48, "what may be promoted at once is promoted and used"
    assert max(hits.values()) == min(length, 48)


def test_many_waiting_requests_with_one_prefix_and_different_tails_all_make_progress(cache_policy: str) -> None:
    rig = Rig(num_blocks=64, cache_policy=cache_policy)
    shared = prefix(30)
    wanted = {f"r{i}": shared + prefix(10, of=f"{i}-") for i in range(20)}
    for blocks in wanted.values():
        rig.below(blocks)
    hits = run_all(rig, wanted, max_steps=4)
    assert min(hits.values()) >= 30, "the shared blocks serve everybody"
    loads = [key for call in rig.tier.calls("submit_load") for key in call.keys]
    assert len(loads) == len(set(loads))


def test_stores_of_running_requests_go_on_while_others_wait(cache_policy: str) -> None:
    # Everything that may be claimed is claimed by a request that is never admitted.
    rig = Rig(num_blocks=16, cache_policy=cache_policy)
    rig.below(prefix(100))
    waiting, running = rig.start("waiting"), rig.start("running")
    rig.ask(prefix(100), waiting)
    assert rig.manager.prepare_store(keys(1, 2, 3, 4, of="own"), running) is not None, (
        "room beside promotions in flight"
    )
    rig.manager.complete_store(keys(1, 2, 3, 4, of="own"), running)
    rig.finish()
    rig.finish()
    assert rig.manager.prepare_store(prefix(16, of="big"), running) is not None, "claims yield, pins do not"


def test_running_stores_take_unclaimed_blocks_first(cache_policy: str) -> None:
    rig = Rig(num_blocks=16, cache_policy=cache_policy)
    rig.below(prefix(10))
    rig.store(prefix(6, of="old"), rig.start("w"))
    waiting, running = rig.start("waiting"), rig.start("running")
    rig.ask(prefix(10), waiting)
    rig.step()
    rig.finish()
    rig.manager.touch(prefix(6, of="old"), running)  # the claimed blocks are now the least recently used
    rig.store(prefix(6, of="new"), running)
    assert rig.ask(prefix(10), waiting) == [True] * 10


def test_a_running_store_takes_no_more_claimed_blocks_than_it_must(cache_policy: str) -> None:
    rig = Rig(num_blocks=8, cache_policy=cache_policy, promotion_share=0.9)
    rig.below(prefix(4))
    rig.store(prefix(4, of="old"), rig.start("w"))
    waiting, running = rig.start("waiting"), rig.start("running")
    rig.ask(prefix(4), waiting)
    rig.step()
    rig.finish()
    rig.manager.touch(prefix(4, of="old"), running)  # the claimed blocks are now the least recently used
    rig.store([*prefix(1, of="old"), *prefix(4, of="new")], running)
    assert rig.ask(prefix(4), waiting) == [True, True, True, False], "one was lacking, and the tail is worth least"
    assert rig.primary.where(prefix(4, of="old"), running) == [True, False, False, False]


def test_a_waiting_request_whose_blocks_are_taken_again_and_again_still_ends(cache_policy: str) -> None:
    rig = Rig(num_blocks=16, cache_policy=cache_policy)
    rig.below(prefix(10))
    waiting, running = rig.start("waiting"), rig.start("running")
    for step in range(5):
        answers = rig.ask(prefix(10), waiting)
        if None not in answers:
            break
        rig.step()
        rig.finish()
        rig.store(prefix(16, of=f"{step}-"), running)  # takes every slot, claimed ones too
    else:
        raise AssertionError("promoted again and again, and evicted every time")
    assert answers == [False]


def test_what_a_request_hit_is_not_evicted_for_another_ones_promotion() -> None:
    rig = Rig(num_blocks=20)
    rig.store(keys(0), rig.start("w"))
    rig.below(keys(1))
    rig.store(prefix(18, of="old"), rig.start("w2"))
    first, second = rig.start("first"), rig.start("second")
    assert rig.ask(prefix(2), first) == [True, None]
    rig.step()
    rig.finish()
    rig.manager.touch(prefix(18, of="old"), second)  # its hits are the least recently used now
    rig.below(keys(0, of="q"))
    assert rig.ask(keys(0, of="q"), second) == [None]
    rig.step()
    rig.finish()
    assert rig.ask(prefix(2), first) == [True, True]
    rig.load(prefix(2), first)


@pytest.mark.parametrize("how", ["load", "store", "finish", "patience", "reset"])
def test_claims_end(how: str) -> None:
    rig = Rig(num_blocks=4, max_wait_s=5.0)
    rig.below(prefix(3))
    rig.below(prefix(3, of="q"))
    first, second = rig.start("first"), rig.start("second")
    rig.ask(prefix(3), first)
    rig.step()
    rig.finish()
    assert rig.ask(prefix(3), first) == [True] * 3
    assert rig.ask(prefix(3, of="q"), second) == [False], "all that may be claimed is claimed"
    match how:
        case "load":
            rig.load(prefix(3), first)
        case "store":
            rig.store(keys(9), first)
        case "finish":
            rig.manager.on_request_finished(first)
        case "patience":
            rig.clock.advance(5.0)
            rig.step()
        case "reset":
            rig.manager.reset_cache()
    assert rig.ask(prefix(3, of="q"), second) == [None] * 3


def test_the_share_bounds_one_request_and_all_of_them() -> None:
    rig = Rig(num_blocks=20, promotion_share=0.5)
    found = []
    for name, num_blocks in (("a", 7), ("b", 20), ("c", 20)):
        rig.below(prefix(num_blocks, of=name))
        found.append(rig.ask(prefix(num_blocks, of=name), rig.start(name)))
    assert found == [[None] * 7, [None] * 3 + [False], [False]]
    assert rig.manager.get_stats()["promotions_refused", "promotion_share"] == 2
    alone = Rig(num_blocks=20, promotion_share=0.5)
    alone.below(prefix(20))
    assert alone.ask(prefix(20), alone.start("r")) == [None] * 10 + [False]


def test_a_block_that_a_waiting_request_is_refused_in_each_step_counts_once() -> None:
    rig = Rig(num_blocks=20, promotion_share=0.25)
    rig.below(prefix(20))
    request = rig.start("r")
    for _ in range(10):
        assert rig.ask(prefix(20), request) == [None] * 5 + [False]
        rig.step()
    rig.ask(prefix(20), rig.start("another"))
    stats = rig.manager.get_stats()
    assert stats["promotions_refused", "promotion_share"] == 2


def test_a_promotion_that_nobody_waits_for_any_more_still_counts() -> None:
    rig = Rig(num_blocks=4, promotion_share=0.5)
    rig.below(prefix(2))
    rig.below(prefix(2, of="q"))
    gone = rig.start("gone")
    rig.ask(prefix(2), gone)
    rig.step()
    rig.manager.on_request_finished(gone)
    second = rig.start("second")
    assert rig.ask(prefix(2, of="q"), second) == [False], "its slots are not to be had before its I/O ends"
    rig.finish()
    assert rig.ask(prefix(2, of="q"), second) == [None, None]


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_tiny_primary_tiers_promote_too(cache_policy: str, num_blocks: int) -> None:
    rig = Rig(num_blocks=num_blocks, cache_policy=cache_policy)
    rig.below(prefix(5))
    request = rig.start("r")
    assert rig.wait_for_prefix(prefix(5), request) == max(1, int(0.75 * num_blocks))


def test_promoting_a_long_prefix_does_not_step_over_its_head_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half of the prefix is resident and would be evicted next; each eviction for the other half must not walk past it.
    asked = 0

    class Counted(Collection[OffloadKey]):
        def __contains__(self, key: object) -> bool:
            nonlocal asked
            asked += 1
            return key in claimed

        def __iter__(self) -> Iterator[OffloadKey]:
            return iter(claimed)

        def __len__(self) -> int:
            return len(claimed)

    rig = Rig(num_blocks=2000)
    writer = rig.start("w")
    rig.store(prefix(700), writer)
    rig.store(prefix(1300, of="q"), writer)
    rig.below(prefix(1400))
    claimed = rig.manager._waits.claimed
    monkeypatch.setattr(rig.manager._waits, "claimed", Counted())
    answers = rig.manager.lookup_prefix(prefix(1400), rig.start("r"))
    assert answers.count(None) == 700
    assert asked < 20 * 1400


def test_what_was_answered_in_a_step_outlives_a_promotion_that_found_no_room() -> None:
    rig = Rig(num_blocks=4, promotion_share=1.0)
    writer, request = rig.start("w"), rig.start("r")
    rig.store(prefix(1), writer)
    rig.below(prefix(2))
    rig.below(prefix(4, of="c"))
    busy = rig.write(prefix(3, of="b"), writer)
    assert rig.ask(prefix(2), request) == [True, False], "no room for the second block"
    rig.manager.complete_store(busy, writer, success=False)
    assert rig.ask(prefix(4, of="c"), request) == [None, None, None, False]
    rig.load(prefix(1), request)  # was answered in this step, so was not evicted for the others


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_hit_that_another_request_evicted_in_the_same_step_is_not_claimed(comes_back: bool) -> None:
    """It was, and answered True ever after."""
    rig = Rig(num_blocks=4, max_wait_s=20.0, promotion_share=1.0)
    rig.store(keys(0), rig.start("w"))
    rig.store(prefix(3, of="old"), rig.start("w2"))
    rig.below(prefix(2))
    rig.below(keys(0, of="q"))
    request, other = rig.start("r"), rig.start("other")
    assert rig.ask(keys(0), request) == [True]
    assert rig.ask(keys(0, of="q"), other) == [None], "which evicts the oldest block"
    if comes_back:
        assert rig.ask(keys(0), other) == [None]
    assert rig.ask(keys(1), request) == [None]
    assert rig.ask(keys(0), request) == [None]
    rig.finish()
    rig.finish()
    assert rig.ask(prefix(2), request) == [True, True]
    rig.load(prefix(2), request)


# ------------------------------------------------------------------------------------------------------- 8 resets


def test_a_reset_drains_the_tiers_and_forgets_the_primary_tier() -> None:
    rig = Rig(num_blocks=8, policies=(BLOCK, BLOCK))
    rig.below(prefix(2, of="b"), tier=1)
    writer, waiting = rig.start("w"), rig.start("waiting")
    rig.store(prefix(2), writer, finish=False)
    rig.ask(prefix(2, of="b"), waiting)
    rig.step()
    rig.ask(prefix(2, of="c"), waiting)
    rig.manager.reset_cache()
    rig.manager.check_invariants()
    assert not any(tier.jobs for tier in rig.tiers)
    assert set(rig.tiers[0].blocks) == set(prefix(2)), "drained, not dropped"
    assert rig.manager.get_stats()["primary_blocks_used",] == 0
    assert rig.primary.lookup(keys(0)[0], writer) is False
    assert rig.wait_for_prefix(prefix(2), rig.start("after")) == 2, "the tiers below keep what they have"


def test_queued_promotions_do_not_survive_a_reset() -> None:
    rig = Rig(num_blocks=4)
    rig.below(prefix(3))
    request = rig.start("r")
    rig.ask(prefix(3), request)
    rig.manager.reset_cache()
    rig.step()
    assert not rig.tier.calls("submit_load") and not rig.manager.has_pending_work()
    assert rig.wait_for_prefix(prefix(3), request) == 3


def test_a_reset_gives_no_patience_back_and_takes_none() -> None:
    rig = Rig(num_blocks=4, max_wait_s=5.0)
    rig.below(prefix(2))
    request = rig.start("r")
    assert rig.ask(prefix(2), request) == [None, None]
    rig.clock.advance(2.0)
    rig.manager.reset_cache()
    rig.manager.check_invariants()
    rig.clock.advance(2.0)  # the request has not asked again: nothing is on its way to it
    assert rig.ask(prefix(2), request) == [None, None]
    rig.clock.advance(2.9)
    assert rig.ask(prefix(2), request) == [None, None]
    rig.clock.advance(0.1)
    assert rig.ask(prefix(2), request) == [False], "five seconds of waiting"
    rig.manager.check_invariants()


def test_a_reset_does_not_make_patience_of_the_time_after_all_had_arrived() -> None:
    rig = Rig(num_blocks=4, max_wait_s=5.0)
    rig.below(prefix(1))
    request = rig.start("r")
    assert rig.ask(prefix(1), request) == [None]
    rig.step()
    rig.tier.finish()
    rig.step()
    rig.clock.advance(5.0)
    rig.manager.reset_cache()
    assert rig.ask(prefix(1), request) == [None], "its patience was not spent"


@pytest.mark.parametrize("direction", ["promotion", "cascade"])
def test_slots_under_a_hung_tiers_io_stay_reserved_after_a_reset(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(num_blocks=4)
    monkeypatch.setattr(rig.tier, "drain_jobs", lambda: None)  # gives up: its I/O hangs
    request = rig.start("r")
    if direction == "promotion":
        rig.below(prefix(3))
        rig.ask(prefix(3), request)
        rig.step()
    else:
        rig.store(prefix(3), request, finish=False)
    rig.manager.reset_cache()
    rig.manager.check_invariants()
    assert rig.manager.prepare_store(prefix(2, of="q"), request) is None
    rig.store(prefix(1, of="q"), request, finish=False)
    late = min(rig.tier.jobs)
    rig.finish(job_ids=[late], tear=direction == "promotion", success=False)
    assert rig.ask(prefix(1, of="q"), request) == [True]
    rig.load(prefix(1, of="q"), request)
    rig.finish()
    assert rig.manager.prepare_store(prefix(4, of="z"), request) is not None


def test_a_block_is_promoted_and_stored_again_once_its_late_read_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_blocks=8)
    monkeypatch.setattr(rig.tier, "drain_jobs", lambda: None)
    rig.below(prefix(3))
    rig.ask(prefix(3)[1:], rig.start("before"))
    rig.step()
    rig.manager.reset_cache()
    meanwhile = rig.start("meanwhile")
    assert rig.ask(prefix(3), meanwhile) == [None, False]
    assert rig.manager.prepare_store(prefix(3)[1:], meanwhile) is None
    rig.manager.on_request_finished(meanwhile)
    rig.step()
    rig.finish()
    after = rig.start("after")
    assert rig.ask(prefix(3), after) == [True, None, None]
    rig.step()
    rig.finish()
    rig.load(prefix(3), after)
    rig.manager.check_invariants()


@pytest.mark.parametrize("old_succeeds", [True, False])
def test_stores_from_before_a_reset_publish_and_cascade_nothing(old_succeeds: bool) -> None:
    rig = Rig(num_blocks=8)
    before, after = rig.start("before"), rig.start("after")
    old = rig.write(keys(0), before)
    rig.manager.on_request_finished(before)
    rig.manager.reset_cache()
    assert [call.name for call in rig.tier.log if call.req_id == "before"] == ["on_new_request", "on_request_finished"]
    assert rig.manager.prepare_store(keys(0), after) is None
    rig.manager.complete_store(old, before, success=old_succeeds)
    rig.manager.check_invariants()
    assert not rig.tier.jobs
    rig.manager.complete_store(rig.write(keys(0), after), after)
    rig.manager.check_invariants()
    assert [call.req_id for call in rig.tier.calls("submit_store")] == ["after"]
    assert rig.ask(keys(0), after) == [True]
    rig.load(keys(0), after)


def test_a_reset_ends_finished_requests_that_waited_for_a_parked_cascade() -> None:
    rig = Rig(policies=(REQUEST,))
    writer, request = rig.start("w"), rig.start("r")
    pending = rig.write(keys(0), writer)
    rig.write(keys(0), request)
    rig.manager.on_request_finished(request)
    rig.manager.reset_cache()
    rig.manager.check_invariants()
    rig.manager.complete_store(pending, writer)
    rig.step()
    assert [call.name for call in rig.tier.log if call.req_id == "r"] == ["on_new_request", "on_request_finished"]
    assert not rig.manager.has_pending_work()


# ------------------------------------------------------------------------------------------------ the rest of it


def test_touch_reaches_every_tier_and_keeps_blocks() -> None:
    rig = Rig(num_blocks=3, policies=(BLOCK, BLOCK))
    request = rig.start("r")
    rig.store(keys(0), request)
    rig.store(keys(1), request)
    rig.store(keys(2), request)
    rig.manager.touch(keys(0), request)
    rig.store(keys(3), request)
    assert [rig.primary.lookup(key, request) for key in prefix(4)] == [True, False, True, True]
    assert all([list(call.keys) for call in tier.calls("touch")] == [keys(0)] for tier in rig.tiers)


def test_events_of_all_tiers_fold_to_what_each_holds() -> None:
    rig = Rig(num_blocks=3, policies=(BLOCK,))
    rig.tier.capacity = 4
    request = rig.start("r")
    held: dict[str, set[OffloadKey]] = {}
    for first in range(0, 12, 3):
        rig.store(keys(first, first + 1, first + 2), request)
        for event in rig.manager.take_events():
            medium = held.setdefault(event.medium, set())
            assert medium.isdisjoint(event.keys) is not event.removed
            medium.symmetric_difference_update(event.keys)
    assert held == {"CPU": set(keys(9, 10, 11)), "tier0": set(rig.tier.blocks)}


def test_a_manager_without_tiers_is_the_primary_tier() -> None:
    rig = Rig(num_blocks=2, policies=())
    request = rig.start("r")
    pending = rig.write(keys(0), request)
    assert rig.ask(prefix(2), request) == [None, False]
    rig.manager.complete_store(pending, request)
    assert rig.ask(prefix(2), request) == [True, False]
    rig.load(keys(0), request)
    rig.manager.on_request_finished(request)
    assert not rig.manager.has_pending_work()


def test_contexts_that_were_never_announced_work_too() -> None:
    rig = Rig()
    rig.below(keys(0))
    assert rig.wait_for_prefix(keys(0), ReqContext("guest")) == 1
    rig.store(keys(1), ReqContext("other"))
    assert content(keys(1)[0]) == rig.tier.blocks[keys(1)[0]]


def test_has_pending_work_until_every_job_is_taken() -> None:
    rig = Rig()
    request = rig.start("r")
    rig.store(keys(0), request, finish=False)
    assert rig.manager.has_pending_work()
    rig.tier.finish()
    assert rig.manager.has_pending_work(), "ended, but not taken"
    rig.step()
    assert not rig.manager.has_pending_work()


def test_shutdown_ends_the_tiers_before_the_memory() -> None:
    rig = Rig(policies=(BLOCK, BLOCK))
    rig.store(keys(0), rig.start("r"), finish=False)
    rig.manager.shutdown()
    assert all(tier.is_shut_down and tier.blocks for tier in rig.tiers)
    with pytest.raises(ValueError, match="released"):
        len(rig.primary.kv_view)
    rig.manager.shutdown()


def test_holding_a_block_back_is_no_use_of_it() -> None:
    """Claims are moved away from evictions; policies that count uses do not count that."""
    rig = Rig(8, cache_policy="arc")
    rig.store(prefix(8), rig.start("before"))
    rig.below(prefix(3, of="q"))
    waiting = rig.start("r")
    assert rig.ask([*prefix(2), *prefix(3, of="q")], waiting) == [True, True, None, None, None]
    policy = rig.primary.slots.policy
    assert isinstance(policy, ARCCachePolicy)
    assert set(prefix(2)) <= set(policy.recent)
    assert len(policy.frequent) == 0
