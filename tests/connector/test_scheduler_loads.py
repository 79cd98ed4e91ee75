# SPDX-License-Identifier: Apache-2.0
"""Hits and loads."""

from __future__ import annotations

from typing import Any

import pytest
from tests.connector.rig import FULL, SLIDING, STATE, Request, Rig, key

from kvoffload.base import ReqContext
from kvoffload.config import GroupKind, KVGroupLayout
from kvoffload.connector import NO_BLOCK, BoundaryState, LoadOutcome, TransferJob
from kvoffload.errors import TransferError


def start_load(rig: Rig, request: Request, ids: list[int], external: int) -> TransferJob:
    rig.arrive(request)
    assert rig.ask(request) == (external, True)
    rig.alloc(request, ids, external=external)
    (load,) = rig.step().loads
    return load


def test_a_stored_prefix_comes_back_by_an_asynchronous_load() -> None:
    rig = Rig()
    rig.store_prefix(12)
    request = rig.arrive(Request("r", 14))
    assert rig.ask(request) == (12, True)
    rig.alloc(request, [7, 8, 9, 10], external=12)
    meta = rig.step()
    (load,) = meta.loads
    assert load.request_id == "r"
    assert load.source.medium() == "CPU"
    assert load.destination.block_ids.tolist() == [7, 8, 9]
    assert load.destination.group_sizes == (3,)
    assert load.destination.block_indices == (0,)
    assert rig.step().loads == ()
    assert rig.end(load) == LoadOutcome(frozenset({"r"}), {})
    rig.finish(request)
    rig.assert_drained()


def test_blocks_that_come_after_a_load_are_no_second_admission() -> None:
    rig = Rig()
    rig.store_prefix(12)
    request = Request("r", 14)
    rig.end(start_load(rig, request, [7, 8, 9], 12))
    stats, touches = rig.scheduler.get_stats(), len(rig.manager.touched)
    rig.alloc(request, [7, 8, 9, 10])
    assert rig.scheduler.get_stats() == stats
    assert len(rig.manager.touched) == touches
    assert rig.scheduler.hit_tokens_by_tier(request) == {"CPU": 12}
    rig.finish(request)
    rig.assert_drained()


def test_tokens_at_which_no_hit_can_end_are_a_failed_load() -> None:
    """An engine has room for fewer tokens than the hit: two of the last ten would not be in any loaded block."""
    rig = Rig()
    rig.store_prefix(12)
    request = rig.arrive(Request("r", 14))
    assert rig.ask(request) == (12, True)
    rig.alloc(request, [7, 8, 9], external=10)
    meta = rig.step()
    assert [load.source for load in meta.loads] == [None]
    assert rig.end(*meta.loads, success=False) == LoadOutcome(frozenset(), {"r": frozenset({7, 8})})
    rig.finish(request)
    rig.assert_drained()


@pytest.mark.parametrize("groups", [(FULL,), (STATE,), (FULL, STATE)])
@pytest.mark.parametrize("are_on_disk", [False, True])
def test_more_tokens_than_the_request_has_blocks_for_are_a_failed_load(
    groups: tuple[KVGroupLayout, ...], are_on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(groups=groups)
    rig.store_prefix(12)
    request = rig.arrive(Request("r", 14))
    monkeypatch.setattr(rig.manager, "sources", lambda req_context: {key(0): "disk"} if are_on_disk else {})
    assert rig.ask(request) == (12, True)
    rig.alloc(request, *[range(10, 14)] * len(groups), external=16)
    meta = rig.step()
    assert [load.source for load in meta.loads] == [None]
    assert "r" in rig.end(*meta.loads, success=False).failed_loads
    rig.finish(request)
    rig.assert_drained()


def test_the_last_token_is_never_part_of_a_hit() -> None:
    rig = Rig()
    rig.store_prefix(12)
    assert rig.ask(rig.arrive(Request("exact", 12))) == (8, True)
    assert rig.ask(rig.arrive(Request("longer", 13))) == (12, True)


def test_the_device_hit_is_not_loaded_again_but_touched() -> None:
    rig = Rig()
    rig.store_prefix(12)
    request = rig.arrive(Request("r", 14))
    assert rig.ask(request, computed=8) == (4, True)
    rig.alloc(request, [100, 101, 9, 10], external=4)
    (load,) = rig.step().loads
    assert load.destination.block_ids.tolist() == [9]
    assert load.destination.block_indices == (2,)
    assert rig.manager.touched == [[key(0), key(1), key(2)]]


def test_a_load_starts_inside_an_offloaded_block() -> None:
    rig = Rig(block_size=16)
    rig.store_prefix(32)
    request = rig.arrive(Request("r", 33))
    assert rig.ask(request, computed=8) == (24, True)
    rig.alloc(request, range(8), external=24)
    (load,) = rig.step().loads
    assert load.destination.block_ids.tolist() == [2, 3, 4, 5, 6, 7]
    assert load.destination.block_indices == (2,)
    assert len(load.source.block_ids) == 2


def test_groups_are_loaded_by_their_own_needs() -> None:
    rig = Rig(groups=(FULL, SLIDING, STATE))
    rig.store_prefix(16)
    request = rig.arrive(Request("r", 17))
    assert rig.ask(request) == (16, True)
    tables = [0, 1, 2, 3], [NO_BLOCK, NO_BLOCK, 12, 13], [NO_BLOCK, NO_BLOCK, NO_BLOCK, 23]
    rig.alloc(request, *tables, external=16)
    (load,) = rig.step().loads
    assert load.destination.block_ids.tolist() == [0, 1, 2, 3, 12, 13, 23]
    assert load.destination.group_sizes == (4, 2, 1)
    assert load.destination.block_indices == (0, 2, 3)
    assert rig.manager.touched == [[key(0), key(1), key(2), key(2, 1), key(3), key(3, 1), key(3, 2)]]


def test_a_deferred_block_makes_the_request_wait() -> None:
    rig = Rig()
    meta = rig.admit(Request("a", 8), [0, 1])  # its store is in flight
    request = rig.arrive(Request("b", 9))
    assert rig.ask(request) == (None, False)
    rig.end(*meta.stores)
    assert rig.ask(request) == (8, True)


def test_loads_go_out_on_steps_without_a_forward_pass() -> None:
    rig = Rig()
    rig.store_prefix(8)
    ends = rig.manager.schedule_ends
    assert start_load(rig, Request("r", 9), [0, 1, 2], 8).request_id == "r"
    rig.step()
    assert rig.manager.schedule_ends == ends + 2


def test_readmission_waits_for_the_old_jobs() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = Request("r", 20)
    load = start_load(rig, request, [0, 1], 8)
    assert rig.end(load).loaded_request_ids == {"r"}
    rig.alloc(request, range(5))
    (store,) = rig.step(rig.run(request, range(5), computed=8)).stores
    rig.step(preempted=["r"])
    assert rig.ask(request) == (None, False)
    rig.end(store)
    assert rig.ask(request) == (16, True)


def test_a_request_that_is_preempted_and_admitted_in_one_step_gets_its_load() -> None:
    """vLLM does so when its prefix cache is reset together with running requests."""
    rig = Rig()
    request = Request("r", 14)
    rig.end(*rig.admit(request, range(4)).stores)
    assert rig.ask(request) == (12, True)
    rig.alloc(request, [10, 11, 12, 13], external=12)
    (load,) = rig.step(preempted=["r"]).loads
    assert load.destination.block_ids.tolist() == [10, 11, 12]
    assert rig.end(load).loaded_request_ids == {"r"}
    rig.alloc(request, [10, 11, 12, 13])
    request.num_tokens = 16
    (store,) = rig.step(rig.run(request, [10, 11, 12, 13], computed=12)).stores
    assert store.source.block_ids.tolist() == [13]


def test_readmission_waits_although_the_hit_is_ready() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 12))
    assert rig.ask(request, computed=8) == (0, False)
    rig.alloc(request, range(3))
    (store,) = rig.step(rig.run(request, range(3), computed=8)).stores
    rig.step(preempted=["r"])
    # The hit of 8 tokens is independent of the store, but a load must not run at the same time.
    assert rig.ask(request) == (None, False)
    rig.end(store)
    assert rig.ask(request) == (8, True)


def test_a_failed_load_names_its_gpu_blocks_and_is_not_tried_again() -> None:
    rig = Rig()
    rig.store_prefix(12)
    request = Request("r", 14)
    load = start_load(rig, request, [7, 8, 9], 12)
    assert rig.end(load, success=False) == LoadOutcome(frozenset(), {"r": frozenset({7, 8, 9})})
    assert rig.ask(request) == (0, False)
    # It is this request's verdict alone.
    assert rig.ask(rig.arrive(Request("other", 14))) == (12, True)
    # The tokens that it computes instead are offered as usual.
    rig.alloc(request, [7, 8, 9, 10])
    rig.step(rig.run(request, [7, 8, 9, 10]))
    assert rig.manager.offered[-1] == [key(0), key(1), key(2)]
    rig.finish(request)
    assert rig.scheduler.get_stats()["primary_blocks_pinned",] == 0


def test_a_failed_load_leaves_what_the_device_had() -> None:
    rig = Rig()
    rig.store_prefix(12)
    request = rig.arrive(Request("r", 14))
    rig.ask(request, computed=4)
    assert rig.scheduler._requests["r"].context.tokens_before == 4
    rig.alloc(request, [100, 8, 9], external=8)
    (load,) = rig.step().loads
    assert rig.end(load, success=False).failed_loads == {"r": {8, 9}}
    assert rig.ask(request, computed=4) == (0, False)
    assert rig.ask(request, computed=0) == (0, False), "nor is another load tried when the device has lost that"
    lookups = rig.scheduler.get_stats()["lookup_tokens",]
    rig.finish(request)
    assert rig.scheduler.get_stats()["lookup_tokens",] == lookups


def test_a_failed_load_gives_way_to_requests_that_hold_their_blocks() -> None:
    """vLLM takes the blocks of the first, and may be unable to allocate them again before the second one ends."""
    rig = Rig()
    rig.store_prefix(8)
    rig.store_prefix(8, stem="other")
    first, second = rig.arrive(Request("r", 9)), rig.arrive(Request("second", 9, "other"))
    for request, blocks in ((first, [0, 1, 2]), (second, [3, 4, 5])):
        assert rig.ask(request) == (8, True)
        rig.alloc(request, blocks, external=8)
    failed, good = rig.step().loads
    assert rig.end(failed, success=False).failed_loads == {"r": {0, 1}}
    assert rig.ask(first) == (0, False), "nothing holds blocks"
    assert rig.end(good).loaded_request_ids == {"second"}
    assert [rig.ask(first) for _ in range(4)] == [(None, False), (0, False)] * 2, "each second time"
    rig.step(rig.run(second, [3, 4, 5], computed=8))
    assert [rig.ask(first) for _ in range(2)] == [(0, False)] * 2


def test_a_request_without_gpu_blocks_gives_way_to_requests_that_hold_theirs() -> None:
    """If vLLM undoes a step, preempted requests come before requests whose load has ended, and which hold blocks that
    vLLM may be unable to do without. No request was scheduled any longer."""
    rig = Rig()
    rig.store_prefix(8, stem="other")
    first, second = rig.arrive(Request("r", 9)), rig.arrive(Request("second", 9, "other"))
    assert rig.ask(second) == (8, True)
    rig.alloc(second, [3, 4, 5], external=8)
    (load,) = rig.step().loads
    assert [rig.ask(first) for _ in range(2)] == [(0, False)] * 2, "the other load runs"
    assert rig.end(load).loaded_request_ids == {"second"}
    assert [rig.ask(first) for _ in range(4)] == [(None, False), (0, False)] * 2, "each second time"
    rig.step(rig.run(second, [3, 4, 5], computed=8))
    assert [rig.ask(first) for _ in range(2)] == [(0, False)] * 2


def test_every_rank_must_report_and_one_failure_fails() -> None:
    rig = Rig(num_ranks=3)
    rig.store_prefix(8)
    load = start_load(rig, Request("r", 9), [0, 1, 2], 8)
    assert rig.end(load, ranks=[0]) == LoadOutcome()
    assert rig.end(load, ranks=[0, 0]) == LoadOutcome(), "a rank reported twice"
    assert rig.end(load, ranks=[1], success=False) == LoadOutcome()
    assert rig.scheduler.has_pending_work()
    assert rig.end(load, ranks=[2]).failed_loads == {"r": {0, 1}}
    assert rig.end(load) == LoadOutcome(), "an end after the end"
    assert rig.scheduler.get_stats()["load_bytes",] == 30, "each rank is counted once"


def test_an_abort_before_anything_else() -> None:
    rig = Rig()
    rig.finish(Request("never seen", 9))
    request = rig.arrive(Request("r", 9))
    rig.finish(request)
    rig.finish(request)
    assert rig.manager.calls == [("on_new_request", "r"), ("on_request_finished", "r")]
    rig.assert_drained()


def test_the_late_end_of_a_request_leaves_the_one_that_has_its_id_alone() -> None:
    rig = Rig()
    rig.store_prefix(8)
    rig.store_prefix(8, "q", 200)
    earlier, request = Request("x", 9), Request("x", 9, "q")
    load = start_load(rig, earlier, [0, 1, 2], 8)
    rig.arrive(request)  # the engine uses the id again
    assert rig.ask(request) == (8, True)
    rig.alloc(request, [5, 6, 7], external=8)
    (own,) = rig.step().loads
    rig.finish(earlier)
    assert rig.scheduler.hit_tokens_by_tier(earlier) == {}
    assert rig.scheduler.hit_tokens_by_tier(request) == {"CPU": 8}
    assert rig.end(load) == LoadOutcome(), "nobody waits for it"
    assert rig.end(own).loaded_request_ids == {"x"}
    rig.finish(request)
    assert [name for name, _ in rig.manager.calls].count("on_request_finished") == 2
    rig.assert_drained()


def test_an_abort_between_the_decision_and_the_step_calls_the_load_back() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 9))
    rig.ask(request)
    rig.alloc(request, [0, 1, 2], external=8)
    rig.finish(request)
    assert rig.step().is_empty()
    rig.assert_drained()


def test_an_abort_while_loading_keeps_the_blocks_fenced() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = Request("r", 9)
    load = start_load(rig, request, [0, 1, 2], 8)
    rig.finish(request)
    assert rig.scheduler.has_pending_work()
    other = rig.arrive(Request("o", 9, "q"))
    rig.ask(other)
    rig.alloc(other, [1, 5, 6])
    assert rig.step(rig.run(other, [1, 5, 6])).flush_job_ids == {load.job_id}
    assert rig.end(load) == LoadOutcome(), "nobody waits for it any more"
    assert rig.scheduler.get_stats()["primary_blocks_pinned",] == 2, "only the other request's own store"


def test_an_abort_while_deferred() -> None:
    rig = Rig()
    meta = rig.admit(Request("a", 8), [0, 1])
    request = rig.arrive(Request("b", 9))
    rig.ask(request)
    rig.finish(request)
    rig.end(*meta.stores)
    assert rig.manager.calls[-1] == ("on_request_finished", "b")


def test_a_request_waits_for_one_load_of_the_same_prefix_only() -> None:
    rig = Rig()
    rig.store_prefix(16)
    first = start_load(rig, Request("a", 17), [0, 1, 2, 3], 16)
    others = [rig.arrive(Request(f"b{n}", 17)) for n in range(3)]
    assert [rig.ask(each) for each in others] == [(None, False)] * 3
    rig.end(first)
    # The device does not have it after all: all of them load at once, none behind another.
    for n, each in enumerate(others):
        assert rig.ask(each) == (16, True)
        rig.alloc(each, range(10 * n, 10 * n + 4), external=16)
    assert len(rig.step().loads) == 3


def test_a_request_does_not_wait_for_a_load_that_brings_less_than_half() -> None:
    rig = Rig()
    rig.store_prefix(16)
    start_load(rig, Request("short", 5), [0, 1], 4)
    assert rig.ask(rig.arrive(Request("long", 17))) == (16, True)


def test_a_load_in_flight_at_a_reset_still_brings_its_blocks() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = Request("r", 9)
    load = start_load(rig, request, [0, 1, 2], 8)
    rig.scheduler.reset_cache()
    rig.check()
    assert rig.end(load).loaded_request_ids == {"r"}
    assert rig.scheduler.get_stats()["stale_jobs",] == 1
    rig.finish(request)
    rig.assert_drained()


def test_blocks_that_vanish_before_they_are_pinned_are_a_failed_load() -> None:
    rig = Rig()
    rig.store_prefix(8)

    def lost(keys: Any, req_context: ReqContext) -> Any:
        raise TransferError("gone")

    rig.manager.prepare_load = lost  # type: ignore[method-assign]
    request = rig.arrive(Request("r", 9))
    assert rig.ask(request) == (8, True)
    rig.alloc(request, [0, 1, 2], external=8)
    (job,) = rig.step().loads
    assert job.source is None
    assert rig.end(job, success=False).failed_loads == {"r": {0, 1}}
    assert rig.ask(request) == (0, False)
    rig.finish(request)
    rig.assert_drained()


def test_too_few_gpu_blocks_for_a_load_is_a_failed_load() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 9))
    rig.ask(request)
    rig.alloc(request, [5], external=8)
    (job,) = rig.step().loads
    assert job.source is None
    assert rig.end(job, success=False).failed_loads == {"r": {5}}


def test_different_block_sizes() -> None:
    fine = KVGroupLayout(GroupKind.FULL_ATTENTION, 4, 8)
    coarse = KVGroupLayout(GroupKind.FULL_ATTENTION, 8, 8)
    rig = Rig(groups=(fine, coarse), block_size=8)
    rig.store_prefix(32)
    request = rig.arrive(Request("r", 31))
    # 28 full tokens in blocks of 8 and 16: the coarse group has one key.
    assert rig.ask(request) == (16, True)
    rig.alloc(request, range(8), range(20, 24), external=16)
    (load,) = rig.step().loads
    assert load.destination.block_ids.tolist() == [0, 1, 2, 3, 20, 21]
    assert len(load.source.block_ids) == 3


def test_a_hit_that_queued_until_the_manager_forgot_its_sources_counts_for_its_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 9))
    monkeypatch.setattr(rig.manager, "sources", lambda req_context: {key(1): "disk"})
    assert rig.ask(request) == (8, True)  # the engine has not allocated blocks for it yet
    monkeypatch.setattr(rig.manager, "sources", lambda req_context: {})
    assert rig.ask(request) == (8, True)
    rig.alloc(request, [0, 1, 2], external=8)
    assert rig.scheduler.hit_tokens_by_tier(request) == {"CPU": 4, "disk": 4}


@pytest.mark.parametrize(("groups", "on_disk"), [((STATE, FULL), 4), ((STATE,), 8)])
def test_blocks_are_counted_by_kind_and_hits_by_the_tier_of_attention(
    groups: tuple[KVGroupLayout, ...], on_disk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(groups=groups)
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 9))
    last_group = len(groups) - 1
    monkeypatch.setattr(rig.manager, "sources", lambda req_context: {key(1, last_group): "disk"})
    assert rig.ask(request) == (8, True)
    assert rig.scheduler.hit_tokens_by_tier(request) == {}, "not admitted yet"
    rig.alloc(request, *([NO_BLOCK, 1], [2, 3])[: len(groups)], external=8)
    expected = {"disk": on_disk} | ({"CPU": 8 - on_disk} if on_disk < 8 else {})
    assert rig.scheduler.hit_tokens_by_tier(request) == expected
    rig.end(*rig.step().loads)
    stats = rig.scheduler.get_stats()
    assert stats["tier_hit_tokens", "disk"] == on_disk, "a state alone stands for all tokens"
    assert stats["load_blocks", "single_state"] == stats["store_blocks", "single_state"] == 1
    assert stats.get(("load_blocks", "full_attention"), 0) == 2 * last_group


def test_hit_tokens_are_counted_once_an_admission() -> None:
    rig = Rig()
    rig.store_prefix(8)
    before = rig.scheduler.get_stats()["lookup_tokens",]
    request = Request("r", 14)
    load = start_load(rig, request, [0, 1, 2, 3], 8)
    rig.end(load)
    rig.alloc(request, [0, 1, 2, 3])  # engines call it again after a load
    stats = rig.scheduler.get_stats()
    assert stats["hit_tokens",] == 8
    assert stats["lookup_tokens",] - before == 14
    assert stats["load_jobs", "ok"] == 1
    assert stats["load_bytes",] == 10
    assert stats["load_seconds",] == 0.5


def with_a_stored_state() -> Rig:
    """Return a model with states, and a finished request of 16 tokens whose blocks are stored."""
    rig = Rig(groups=(FULL, STATE))
    seed = rig.arrive(Request("seed", 16))
    rig.ask(seed)
    tables = range(4), range(10, 14)
    rig.alloc(seed, *tables)
    stores = [*rig.step(rig.run(seed, *tables, tokens=8)).stores]
    stores += rig.step(rig.run(seed, computed=8, new=False), states=[BoundaryState("seed", 1, 13, 16)]).stores
    rig.end(*stores)
    rig.finish(seed)
    return rig


def test_whoever_promotes_a_part_of_a_hit_knows_where_it_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = with_a_stored_state()
    known: list[Any] = []
    lookup_prefix = rig.manager.lookup_prefix

    def record(keys: Any, req_context: ReqContext, ends: Any = None) -> list[bool | None]:
        known.append(ends)
        return lookup_prefix(keys, req_context, ends)

    monkeypatch.setattr(rig.manager, "lookup_prefix", record)
    request = rig.arrive(Request("r", 17))
    assert rig.ask(request) == (16, True)
    assert known == [{key(1), key(3)}] * 2, "for attention, and for the state"
