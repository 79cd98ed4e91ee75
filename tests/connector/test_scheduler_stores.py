# SPDX-License-Identifier: Apache-2.0
"""Offers, stores and fences."""

from __future__ import annotations

import pytest
from tests.connector.rig import BT, FULL, SLIDING, STATE, Request, Rig, key
from tests.sizes import by_size

from kvoffload.base import OffloadPolicy, ReqContext
from kvoffload.config import GroupKind, KVGroupLayout
from kvoffload.connector import NO_BLOCK, BoundaryState
from kvoffload.cpu.common import CPULoadStoreSpec


def stored(meta: object) -> list[list[int]]:
    return sources(meta.stores)


def sources(stores: object) -> list[list[int]]:
    return [job.source.block_ids.tolist() for job in stores]


# ------------------------------------------------------------------------------------------------- offers


def test_blocks_are_stored_in_the_step_that_fills_them() -> None:
    rig = Rig()
    request = rig.arrive(Request("r", 14))
    rig.ask(request)
    rig.alloc(request, [0, 1, 2, 3])
    assert stored(rig.step(rig.run(request, [0, 1, 2, 3], tokens=7))) == [[0]]
    assert stored(rig.step(rig.run(request, [], computed=7, tokens=8, new=False))) == [[1]]
    assert stored(rig.step(rig.run(request, [], computed=8, new=False))) == [[2]]
    assert rig.manager.offered == [[key(0)], [key(1)], [key(2)]]


def test_generated_tokens_fill_blocks_that_are_stored_too() -> None:
    rig = Rig()
    request = Request("r", 7)
    rig.admit(request, [0, 1])
    request.num_tokens = 8
    assert stored(rig.step(rig.run(request, [], computed=7, new=False))) == [[1]]


def decode_together(rig: Rig, num_requests: int, steps: int) -> tuple[list[Request], list[list[list[int]]]]:
    """Let requests with a prompt of one block decode, one token per step. Return them, and the sources of the stores of
    each step."""
    requests = [Request(f"r{n}", BT, f"p{n}") for n in range(num_requests)]
    tables = [range(n * 100, n * 100 + steps // BT + 2) for n in range(num_requests)]
    for request, table in zip(requests, tables, strict=True):
        rig.arrive(request)
        rig.ask(request)
        rig.alloc(request, *[table for _ in rig.groups])
    ids = [[table for _ in rig.groups] for table in tables]
    metas = [rig.step(*[rig.run(request, *own) for request, own in zip(requests, ids, strict=True)])]
    rig.end(*metas[-1].stores)
    for _ in range(steps):
        for request in requests:
            request.num_tokens += 1
        metas.append(rig.step(*[rig.run(request, computed=request.num_tokens - 1, new=False) for request in requests]))
        rig.end(*metas[-1].stores)
    return requests, [stored(meta) for meta in metas]


def test_a_few_requests_store_each_generated_block_in_the_step_that_fills_it() -> None:
    _, stores = decode_together(Rig(num_blocks=4096), 8, 10 * BT)
    for step, sources_of_step in enumerate(stores):
        block = step // BT
        assert sources_of_step == ([[n * 100 + block] for n in range(8)] if step % BT == 0 else [])


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATE)])
@pytest.mark.parametrize("num_requests", [16, 64, by_size(96, 200)])
def test_many_requests_gather_generated_blocks_and_lose_none(
    num_requests: int, groups: tuple[KVGroupLayout, ...]
) -> None:
    rig, steps = Rig(groups=groups, num_blocks=1 << 15), by_size(24, 64) * BT
    requests, stores = decode_together(rig, num_requests, steps)
    gathered = [len(ids) for of_step in stores[1:] for ids in of_step]
    assert {len(ids) for ids in stores[0]} == {len(groups)}, "a prompt's blocks and its state do not wait"
    assert set(gathered) == {min(num_requests // 8, 128 // BT)}
    # Work per step: on average, no more stores than of 16 requests, unless they would gather too many tokens.
    assert len(gathered) <= max(16 * steps // BT, num_requests * steps // 128)
    for request in requests:
        rig.finish(request)
    rig.end(*rig.step().final_stores)
    keys = [key(block, stem=f"p{n}") for n in range(num_requests) for block in range(steps // BT)]
    assert all(rig.manager.slots.get(each) for each in keys), "at its end, a request has stored all of its blocks"


def test_a_preemption_loses_at_most_the_gathered_tokens() -> None:
    size = 8 * BT  # so that eight blocks would be more than the limit
    rig = Rig(num_blocks=1 << 11, block_size=size)
    requests, _ = decode_together(rig, 64, 15 * size + size // 2)
    rig.step(preempted=[request.request_id for request in requests])
    for request in requests:
        tokens, _ = rig.ask(request)
        assert tokens is not None
        assert request.num_tokens - tokens <= 128 + size


def test_blocks_of_a_prompt_do_not_wait_for_others() -> None:
    rig = Rig(num_blocks=1 << 10)
    decode_together(rig, 64, 1)
    request = rig.arrive(Request("long", 10 * BT, "long"))
    rig.ask(request)
    rig.alloc(request, range(10_000, 10_010))
    for block in range(10):
        others = [rig.run(Request(f"r{n}", BT + 1, f"p{n}"), computed=BT, new=False) for n in range(64)]
        ids = [range(10_000, 10_010)] if block == 0 else []
        own = rig.run(request, *ids, computed=block * BT, tokens=(block + 1) * BT, new=block == 0)
        meta = rig.step(*others, own)
        assert [10_000 + block] in stored(meta)
        rig.end(*meta.stores)


def test_a_running_request_stores_again_after_a_reset_was_undone() -> None:
    rig = Rig()
    request = Request("r", 4 * BT, "p")
    rig.end(*rig.admit(request, range(4)).stores)
    request.num_prompt_tokens = 4 * BT
    rig.scheduler.reset_cache(device_is_empty=False)
    stores = 0
    for computed in range(4 * BT, 12 * BT):
        if computed == 6 * BT:
            rig.scheduler.undo_reset()
            assert not stores, "the epoch is over"
        request.num_tokens = computed + 1
        new_blocks = [[computed // BT]] if computed % BT == 0 else []
        meta = rig.step(rig.run(request, *new_blocks, computed=computed, new=False))
        rig.end(*meta.stores)
        stores += len(meta.stores)
    assert stores >= 5


def test_models_with_windows_gather_nothing() -> None:
    _, stores = decode_together(Rig(groups=(FULL, SLIDING), num_blocks=1 << 12), 32, 8 * BT)
    assert [len(of_step) for of_step in stores] == [32 if step % BT == 0 else 0 for step in range(8 * BT + 1)]


def test_prompt_only_leaves_out_blocks_with_generated_tokens() -> None:
    rig = Rig(prompt_only=True)
    request = Request("r", 7)
    assert stored(rig.admit(request, [0, 1])) == [[0]]
    for tokens in range(8, 20):
        request.num_tokens = tokens
        assert rig.step(rig.run(request, [tokens], computed=tokens - 1, new=False)).stores == ()


def test_prompt_only_holds_when_generated_tokens_are_computed_again() -> None:
    rig = Rig(prompt_only=True)
    request = Request("r", 7)
    stores = rig.admit(request, [0, 1]).stores
    request.num_tokens = 13
    rig.step(preempted=["r"])
    rig.end(*stores, success=False)
    rig.ask(request)
    rig.alloc(request, range(4))
    assert stored(rig.step(rig.run(request, range(4)))) == [[0]]


def test_the_least_of_tokens_keys_and_gpu_blocks_bounds_an_offer() -> None:
    rig = Rig()
    request = rig.arrive(Request("r", 16))
    rig.ask(request)
    rig.alloc(request, [0, 1])
    assert stored(rig.step(rig.run(request, [0, 1], tokens=12))) == [[0, 1]], "the third has no GPU block"
    request.num_tokens = 14  # draft tokens were scheduled and are not accepted
    assert stored(rig.step(rig.run(request, [2, 3], computed=12, tokens=16, new=False))) == [[2]]
    request.num_tokens = 16
    assert stored(rig.step(rig.run(request, [], computed=15, new=False))) == [[3]], "offered as soon as it has a key"


def test_block_level_does_not_offer_what_came_from_a_hit() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 16))
    assert rig.ask(request, computed=4) == (4, True)
    rig.alloc(request, range(4), external=4)
    rig.end(*rig.step().loads)
    rig.alloc(request, range(4))
    rig.step(rig.run(request, range(4), computed=8))
    assert rig.manager.offered == [[key(2), key(3)]]


def test_a_block_that_the_hit_ends_in_is_offered_whole() -> None:
    rig = Rig(block_size=8)
    request = rig.arrive(Request("r", 16))
    rig.ask(request, computed=4)
    rig.alloc(request, range(4))
    assert stored(rig.step(rig.run(request, range(4), computed=4))) == [[0, 1, 2, 3]]


def test_request_level_offers_everything_once() -> None:
    rig = Rig(policy=OffloadPolicy.REQUEST_LEVEL)
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 16))
    assert rig.ask(request, computed=4) == (4, True)
    rig.alloc(request, range(4), external=4)
    rig.end(*rig.step().loads)
    assert rig.manager.offered == [], "not before the load has ended"
    rig.alloc(request, range(4))
    meta = rig.step(rig.run(request, range(4), computed=8))
    assert rig.manager.offered == [[key(0), key(1), key(2), key(3)]]
    assert stored(meta) == [[2, 3]]


def test_a_resumed_request_offers_again_what_it_computes_again() -> None:
    rig = Rig()
    request = Request("r", 9)
    meta = rig.admit(request, [0, 1, 2])
    rig.step(preempted=["r"])
    rig.end(*meta.stores, success=False)
    rig.ask(request)
    rig.alloc(request, [5, 6, 7])
    assert stored(rig.step(rig.run(request, [5, 6, 7]))) == [[5, 6]]


def test_nothing_is_offered_while_the_load_is_in_flight() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 16))
    rig.ask(request)
    rig.alloc(request, range(4), external=8)
    (load,) = rig.step().loads
    assert rig.step(rig.run(request, range(4), computed=8)).stores == ()
    rig.end(load)


def test_window_and_state_blocks_are_stored_while_they_are_there() -> None:
    rig = Rig(groups=(SLIDING, STATE), block_size=8)
    request = rig.arrive(Request("r", 17))
    rig.ask(request)
    rig.alloc(request, range(5), range(10, 15))
    meta = rig.step(rig.run(request, range(5), range(10, 15), tokens=16))
    # A window of 6 tokens at the end of a block of 8 needs both GPU blocks; of states there is only the named one.
    assert stored(meta) == [[0, 1, 2, 3, 13]]
    assert meta.stores[0].source.group_sizes == (4, 1)
    assert meta.stores[0].source.block_indices == (0, 3)


def test_a_state_is_stored_in_the_step_that_names_it_or_never() -> None:
    rig = Rig(groups=(FULL, STATE))
    request = rig.arrive(Request("r", 13))
    rig.ask(request)
    rig.alloc(request, range(4), [NO_BLOCK, 11, NO_BLOCK, NO_BLOCK])
    step = rig.run(request, range(4), [NO_BLOCK, 11, NO_BLOCK, NO_BLOCK], tokens=8)
    assert stored(rig.step(step, states=[BoundaryState("r", 1, 11, 8)])) == [[0, 1, 11]]
    step = rig.run(request, [], [13], computed=8, tokens=12, new=False)
    assert stored(rig.step(step, states=[])) == [[2]]
    # Asynchronous scheduling: named a step later, when the block's last token is known.
    step = rig.run(request, [], [], computed=12, tokens=13, new=False)
    assert stored(rig.step(step, states=[BoundaryState("r", 1, 13, 12)])) == [[13]]
    rig.finish(request)
    assert rig.step().final_stores == ()


def test_states_that_no_hit_can_need_are_not_stored() -> None:
    rig = Rig(groups=(KVGroupLayout(GroupKind.FULL_ATTENTION, 2 * BT, 64), STATE))
    request = rig.arrive(Request("r", 13))
    rig.ask(request)
    tables = range(2), [NO_BLOCK, 11, 12, NO_BLOCK]
    rig.alloc(request, *tables)
    named = [BoundaryState("r", 1, 12, 12), BoundaryState("gone", 1, 5, 8), BoundaryState("r", 1, 13, 13)]
    assert stored(rig.step(rig.run(request, *tables, tokens=13), states=named)) == [[0]], "12 is no end of attention"


def test_a_state_inside_a_larger_block_of_attention_is_stored_before_that_is_full() -> None:
    rig = Rig(groups=(FULL, STATE), block_size=8)
    request = rig.arrive(Request("r", 17))
    rig.ask(request)
    rig.alloc(request, range(5), [NO_BLOCK, NO_BLOCK, 12, NO_BLOCK, NO_BLOCK])
    step = rig.run(request, range(5), [NO_BLOCK, NO_BLOCK, 12, NO_BLOCK, NO_BLOCK], tokens=12)
    first = rig.step(step).stores
    assert sources(first) == [[0, 1, 12]]
    second = rig.step(rig.run(request, [], [14], computed=12, tokens=16, new=False)).stores
    assert sources(second) == [[2, 3]]
    rig.end(*first, *second)
    assert rig.ask(rig.arrive(Request("o", 17))) == (12, True)


def test_a_refused_state_is_not_offered_again() -> None:
    rig = Rig(groups=(FULL, STATE), num_blocks=4)
    stores = rig.admit(Request("full", 16, "f"), range(500, 504), [NO_BLOCK] * 4).stores
    rig.admit(Request("r", 9), [0, 1, 2], [NO_BLOCK, 11, NO_BLOCK])
    rig.end(*stores)
    assert stored(rig.step()) == [[0], [1]], "the engine may have written over it since"


def test_a_state_waits_for_the_blocks_that_a_hit_needs_with_it() -> None:
    rig = Rig(groups=(STATE, FULL), num_blocks=3)
    tables = [NO_BLOCK, NO_BLOCK, NO_BLOCK, 9], range(4)
    meta = rig.admit(Request("r", 17), *tables)
    assert stored(meta) == [[0]], "of the first portions that fit, none reaches the state's end"


def test_the_states_of_a_hit_are_not_stored_again() -> None:
    rig = Rig(groups=(FULL, STATE))
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 13))
    assert rig.ask(request) == (8, True)
    rig.alloc(request, range(2), [NO_BLOCK, 11], external=8)
    rig.end(*rig.step().loads)
    rig.alloc(request, range(4), [NO_BLOCK, 11, 12, 13])
    step = rig.run(request, range(4), [NO_BLOCK, 11, 12, 13], computed=8, tokens=12)
    named = [BoundaryState("r", 1, 11, 8), BoundaryState("r", 1, 12, 12)]
    assert stored(rig.step(step, states=named)) == [[2, 12]]


def test_the_engines_own_copies_are_fenced() -> None:
    rig = Rig(groups=(FULL, STATE))
    (store,) = rig.admit(Request("r", 8), [0, 1], [NO_BLOCK, 11]).stores
    assert rig.step(copied=[7]).flush_job_ids == frozenset()
    assert rig.step(copied=[7, 11]).flush_job_ids == {store.job_id}
    rig.end(store)


def test_what_fell_out_of_the_window_is_passed_over() -> None:
    rig = Rig(groups=(SLIDING,))
    request = rig.arrive(Request("r", 17))
    rig.ask(request)
    rig.alloc(request, [NO_BLOCK, NO_BLOCK, 2, 3, 4])
    assert stored(rig.step(rig.run(request, [NO_BLOCK, NO_BLOCK, 2, 3, 4], computed=0))) == [[2, 3]]


COARSE = KVGroupLayout(GroupKind.FULL_ATTENTION, 16, 64)
NARROW = KVGroupLayout(GroupKind.SLIDING_WINDOW, 4, 64, sliding_window_tokens=8)


@pytest.mark.parametrize("policy", OffloadPolicy)
def test_window_blocks_that_no_hit_can_use_are_not_stored(policy: OffloadPolicy) -> None:
    rig = Rig(groups=(COARSE, NARROW), policy=policy)
    request = rig.arrive(Request("r", 37))
    rig.ask(request)
    tables = [0, 1, 2], list(range(10, 20))
    rig.alloc(request, *tables)
    for tokens in range(4, 37, 4):
        # In chunks, so that windows are there while their blocks are offered.
        meta = rig.step(rig.run(request, *tables, computed=tokens - 4, tokens=tokens, new=tokens == 4))
        rig.end(*meta.stores)
    # Hits end at 16 and 32, and look back at tokens 9 to 15 and 25 to 31.
    window = [key(n, group=1) for n in (2, 3, 6, 7)]
    offered = [each for keys in rig.manager.offered for each in keys]
    assert [each for each in offered if each in [key(n, group=1) for n in range(9)]] == window
    assert len(offered) == 2 + 4
    rig.finish(request)
    other = rig.arrive(Request("o", 40))
    assert rig.ask(other) == (32, True)
    rig.alloc(other, [0, 1, 2], list(range(10, 20)), external=32)
    (load,) = rig.step().loads
    assert load.destination.group_sizes == (2, 2)
    rig.end(load)
    rig.finish(other)
    rig.assert_drained()


# --------------------------------------------------------------------------------------------------------- refusals


def fill_and_pin(rig: Rig, blocks: int) -> object:
    """Fills the tier with blocks in flight."""
    return rig.admit(Request("full", 4 * blocks, "f"), range(500, 500 + blocks)).stores


def decode(rig: Rig, request: Request) -> list[list[int]]:
    """Make a step that generates one token into existing GPU blocks of the request.

    Returns the blocks that it stores.
    """
    request.num_tokens += 1
    return stored(rig.step(rig.run(request, [], computed=request.num_tokens - 1, new=False)))


def test_refused_blocks_are_offered_again_in_their_turn() -> None:
    rig = Rig(num_blocks=4)
    stores = fill_and_pin(rig, 4)
    request = Request("r", 9)
    assert rig.admit(request, [0, 1, 2]).stores == ()
    for _ in range(2):
        rig.manager.offered.clear()
        assert decode(rig, request) == []
        assert rig.manager.offered == [[key(0)]], "one block, once a step"
    rig.end(*stores)
    assert decode(rig, request) == [[0], [1, 2]]


def test_refused_blocks_find_room_in_a_step_that_fills_none() -> None:
    rig = Rig(num_blocks=4)
    stores = fill_and_pin(rig, 4)
    request = Request("r", 9)
    rig.admit(request, [0, 1, 2])
    rig.end(*stores)
    assert decode(rig, request) == [[0], [1]]
    assert decode(rig, request) == []
    assert decode(rig, request) == [[2]], "then as ever"


def test_refused_blocks_find_room_in_a_step_without_their_request() -> None:
    rig = Rig(num_blocks=4)
    stores = fill_and_pin(rig, 4)
    rig.admit(Request("r", 9), [0, 1, 2])
    rig.end(*stores)
    assert stored(rig.step()) == [[0], [1]]


@pytest.mark.parametrize("ends", [False, True])
def test_refused_blocks_that_others_may_have_by_now_are_not_stored(*, ends: bool) -> None:
    """When an engine tries to schedule a request, it frees blocks that left the request's window, even if scheduling
    fails.

    It may give these blocks to another request in the same step.
    """
    rig = Rig(groups=(SLIDING,), num_blocks=4)
    (store,) = fill_and_pin(rig, 4)
    request = rig.arrive(Request("r", 17))
    rig.ask(request)
    rig.alloc(request, range(5))
    rig.step(rig.run(request, range(5), tokens=16))
    other = rig.arrive(Request("o", 3, "o"))
    rig.ask(other)
    rig.alloc(other, [0])  # of 17 tokens, a window of 6 no longer has the first ten
    if ends:
        rig.step(rig.run(other, [0]))
        rig.end(store)
        rig.finish(request)
        meta = rig.step()
    else:
        rig.end(store)
        meta = rig.step(rig.run(other, [0]))
    assert sources((*meta.stores, *meta.final_stores)) == [[2, 3]]


def test_a_full_tier_costs_one_call_a_step_however_many_requests_it_refused() -> None:
    rig = Rig(num_blocks=4)
    stores = fill_and_pin(rig, 4)
    requests = [Request(f"r{n}", 9, f"s{n}") for n in range(3)]
    for n, request in enumerate(requests):
        rig.admit(request, range(10 * n, 10 * n + 3))
    tried = []
    for _ in range(6):
        rig.manager.offered.clear()
        rig.step(*(rig.run(request, [], computed=8, new=False) for request in requests))
        tried += rig.manager.offered
    assert tried == [[key(0, stem=f"s{n % 3}")] for n in range(6)], "oldest refusal first"
    rig.end(*stores)
    assert stored(rig.step()) == [[0], [1], [10], [11]], "until one is refused"


def test_a_request_that_can_never_find_room_does_not_keep_others_from_being_tried() -> None:
    rig = Rig(groups=(FULL, SLIDING, SLIDING), num_blocks=2)
    (full,) = rig.admit(Request("full", 8, "f"), [20, 21], [NO_BLOCK] * 2, [NO_BLOCK] * 2).stores
    rig.admit(Request("wide", 5), [0, 1], [2, 3], [4, 5])  # a block of each group is more than the tier has
    rig.admit(Request("narrow", 5, "n"), [6, 7], [NO_BLOCK, 8], [NO_BLOCK, 9])
    rig.end(full)
    assert rig.step().stores == ()
    assert stored(rig.step()) == [[6]]


def test_refused_blocks_are_offered_at_the_end_too() -> None:
    rig = Rig(num_blocks=4)
    stores = fill_and_pin(rig, 4)
    request = Request("r", 9)
    rig.admit(request, [0, 1, 2])
    rig.end(*stores)
    rig.finish(request)
    meta = rig.step()
    assert meta.stores == ()
    assert sources(meta.final_stores) == [[0], [1]]
    rig.end(*meta.final_stores)
    assert rig.ask(rig.arrive(Request("again", 9))) == (8, True)


@pytest.mark.parametrize("how", ["preempted", "finished", "reset"])
def test_refused_blocks_that_are_gone_are_not_offered_again(how: str) -> None:
    rig = Rig(num_blocks=4)
    stores = fill_and_pin(rig, 4)
    request = Request("r", 9)
    rig.admit(request, [0, 1, 2])
    rig.manager.offered.clear()
    match how:
        case "preempted":
            rig.step(preempted=["r"])
        case "finished":
            rig.finish(request)
            rig.manager.offered.clear()
        case "reset":
            rig.scheduler.reset_cache()
    rig.end(*stores)
    rig.step()
    rig.finish(request)
    assert rig.step().is_empty()
    assert rig.manager.offered == []


# ------------------------------------------------------------------------------------------------- the last offer


def run_ahead(rig: Rig, prompt: int, new_tokens: int, *ids: list[int], extra_steps: int = 0) -> Request:
    """Serves a request as asynchronous scheduling does: a step is scheduled before the last one's token is known.

    ``extra_steps``: scheduled before the engine sees that the request has ended. The GPU blocks are given at once.
    """
    request = rig.arrive(Request("r", prompt))
    assert rig.ask(request) == (0, False)
    rig.alloc(request, *ids)
    rig.end(*rig.step(rig.run(request, *ids)).stores)
    for n in range(1, new_tokens + extra_steps):
        rig.end(*rig.step(rig.run(request, computed=prompt + n - 1, tokens=prompt + n, new=False)).stores)
        if n <= new_tokens:
            request.num_tokens = prompt + n
    request.num_tokens = prompt + new_tokens
    return request


@pytest.mark.parametrize("extra_steps", [0, 1])
@pytest.mark.parametrize(("prompt", "new_tokens", "last"), [(3, 2, 0), (7, 2, 1), (3, 6, 1)])
def test_the_block_that_the_last_step_fills_is_stored(
    prompt: int, new_tokens: int, last: int, extra_steps: int
) -> None:
    rig = Rig()
    request = run_ahead(rig, prompt, new_tokens, [0, 1, 2], extra_steps=extra_steps)
    rig.finish(request)
    # One more step is scheduled when the last token of the block is known, and stores the block as usual.
    assert rig.scheduler.has_pending_work() == (not extra_steps)
    meta = rig.step()
    assert sources(meta.final_stores) == ([] if extra_steps else [[last]])
    assert meta.stores == ()
    rig.end(*meta.final_stores)
    assert rig.ask(rig.arrive(Request("again", 4 * last + 5))) == (4 * last + 4, True)


def test_the_last_offer_comes_before_the_end_of_the_request() -> None:
    rig = Rig()
    request = run_ahead(rig, 3, 2, [0, 1])
    rig.finish(request)
    assert [name for name, _ in rig.manager.calls] == ["on_new_request", "prepare_store", "on_request_finished"]
    rig.end(*rig.step().final_stores)
    rig.assert_drained()


def test_a_final_store_whose_gpu_blocks_are_handed_out_in_the_next_step_is_flushed_there() -> None:
    rig = Rig()
    rig.finish(run_ahead(rig, 3, 2, [0, 1]))
    other = Request("o", 6, "q")
    meta = rig.admit(other, [0, 5])
    (store,) = meta.final_stores
    assert meta.flush_job_ids == {store.job_id}
    assert rig.step(rig.run(other, [1], computed=6, new=False)).flush_job_ids == frozenset()
    rig.end(store, *meta.stores)


def test_a_final_store_is_flushed_for_a_load_into_its_gpu_blocks() -> None:
    rig = Rig()
    rig.store_prefix(8, stem="q")
    rig.finish(run_ahead(rig, 3, 2, [0, 1]))
    other = rig.arrive(Request("o", 9, "q"))
    assert rig.ask(other) == (8, True)
    rig.alloc(other, [0, 5, 6], external=8)
    meta = rig.step()
    assert meta.flush_job_ids == {meta.final_stores[0].job_id}


def test_a_final_store_is_flushed_in_a_later_step_as_any_other() -> None:
    rig = Rig()
    rig.finish(run_ahead(rig, 3, 2, [0, 1]))
    (store,) = rig.step().final_stores
    assert rig.admit(Request("o", 6, "q"), [0, 5]).flush_job_ids == {store.job_id}


def test_nothing_is_stored_that_was_not_computed() -> None:
    rig = Rig()
    request = rig.arrive(Request("r", 16))
    rig.ask(request)
    rig.alloc(request, range(4))
    rig.end(*rig.step(rig.run(request, range(4), tokens=6)).stores)
    rig.finish(request)  # aborted in its prefill
    assert rig.step().is_empty()
    assert rig.manager.offered == [[key(0)]]


def test_rejected_drafts_are_not_stored() -> None:
    rig = Rig()
    request = rig.arrive(Request("r", 6))
    rig.ask(request)
    rig.alloc(request, [0, 1, 2])
    rig.end(*rig.step(rig.run(request, [0, 1, 2])).stores)
    request.num_tokens = 7
    rig.end(*rig.step(rig.run(request, computed=6, tokens=10, new=False)).stores)  # 3 drafts
    request.num_tokens = 8  # all drafts are rejected: the eighth token was sampled, and its KV does not exist
    rig.finish(request)
    assert rig.step().is_empty()


@pytest.mark.parametrize("stage", ["arrived", "asked", "allocated", "loading", "lost", "loaded", "failed", "preempted"])
@pytest.mark.parametrize("policy", list(OffloadPolicy))
def test_a_request_that_computed_nothing_stores_nothing(policy: OffloadPolicy, stage: str) -> None:
    rig = Rig(policy=policy)
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 16))
    stages = ["arrived", "asked", "allocated", "loading", "loaded"]
    until = stages.index(stage) if stage in stages else 9
    if until > 0:
        assert rig.ask(request) == (8, True)
    if until > 1:
        rig.alloc(request, range(4), external=8)
    if until > 2 and stage != "lost":
        (load,) = rig.step().loads
        if until > 3:
            rig.end(load, success=stage != "failed")
    if stage == "preempted":
        rig.alloc(request, range(4))
        rig.end(*rig.step(rig.run(request, range(4), computed=8, tokens=10)).stores)
        request.num_tokens = 17
        rig.step(preempted=["r"])
    rig.manager.offered.clear()
    rig.finish(request)
    assert rig.step().final_stores == ()
    assert rig.manager.offered == []


def test_an_id_used_again_without_an_end_stores_nothing_of_the_old_request() -> None:
    rig = Rig()
    run_ahead(rig, 3, 2, [0, 1])
    rig.arrive(Request("r", 5, "q"))
    assert rig.step().is_empty(), "its GPU blocks may have been written since"


def test_after_a_reset_nothing_older_is_stored_at_the_end() -> None:
    rig = Rig()
    request = run_ahead(rig, 3, 2, [0, 1])
    rig.scheduler.reset_cache()
    rig.finish(request)
    assert rig.step().is_empty()


def test_a_final_store_that_a_reset_overtakes_publishes_nothing() -> None:
    rig = Rig()
    rig.finish(run_ahead(rig, 3, 2, [0, 1]))
    rig.scheduler.reset_cache()
    rig.end(*rig.step().final_stores)
    assert rig.scheduler.get_stats()["stale_jobs",] == 1
    assert rig.ask(rig.arrive(Request("again", 5))) == (0, False)


def test_prompt_only_holds_at_the_end() -> None:
    rig = Rig(prompt_only=True)
    rig.finish(run_ahead(rig, 3, 2, [0, 1]))
    assert rig.step().is_empty()


def test_request_level_stores_the_last_block_too() -> None:
    rig = Rig(policy=OffloadPolicy.REQUEST_LEVEL)
    rig.finish(run_ahead(rig, 7, 2, [0, 1, 2]))
    assert sources(rig.step().final_stores) == [[1]]


def test_the_last_blocks_of_several_groups_and_not_what_left_the_window() -> None:
    rig = Rig(groups=(FULL, SLIDING, STATE))
    request = run_ahead(rig, 7, 2, [0, 1, 2], [10, 11, 12], [NO_BLOCK, 21, 22])
    rig.finish(request)
    assert sources(rig.step().final_stores) == [[1, 11]], "nor a state that was never named"
    # Blocks that were refused, and that the window has passed since, may have been handed to others.
    rig = Rig(groups=(SLIDING,), num_blocks=4)
    stores = fill_and_pin(rig, 4)
    request = Request("r", 9)
    rig.admit(request, [0, 1, 2, 3])
    for _ in range(3):
        decode(rig, request)
    rig.end(*stores)
    rig.finish(request)
    assert sources(rig.step().final_stores) == [[1], [2]], "with 11 tokens computed, a window of 6 begins at token 6"


def test_a_prompt_larger_than_the_tier_is_stored_from_its_head() -> None:
    rig = Rig(num_blocks=10)
    meta = rig.admit(Request("r", 4 * 32), range(32))
    assert stored(meta) == [list(range(8))], "32 refused, 8 accepted, the rest refused for now"


def test_a_prompt_larger_than_the_tier_does_not_drive_out_its_own_head() -> None:
    rig = Rig(num_blocks=10)
    request = rig.arrive(Request("r", 4 * 32))
    rig.ask(request)
    rig.alloc(request, range(32))
    for tokens in range(16, 4 * 32 + 1, 16):  # prefill in chunks, stores end at once
        rig.end(*rig.step(rig.run(request, range(32), computed=tokens - 16, tokens=tokens)).stores)
    rig.finish(request)
    # The third chunk of four drove out two blocks of the second, from its tail; after that no more were offered.
    assert len(rig.manager.offered) == 3
    assert rig.ask(rig.arrive(Request("again", 4 * 32))) == (4 * 6, True)


def test_the_next_admission_offers_again() -> None:
    rig = Rig(num_blocks=4)
    request = Request("r", 16)
    rig.end(*rig.admit(request, range(4)).stores)
    request.num_tokens = 20
    (store,) = rig.step(rig.run(request, [4], computed=16, new=False)).stores
    rig.end(store)
    request.num_tokens = 24
    assert rig.step(rig.run(request, [5], computed=20, new=False)).stores == ()
    rig.step(preempted=["r"])
    assert rig.ask(request) == (12, True), "what its fifth block drove out was its fourth"
    rig.alloc(request, range(6), external=12)
    rig.end(*rig.step().loads)
    rig.alloc(request, range(6))
    rig.step(rig.run(request, range(6), computed=12))
    assert rig.manager.offered[-1] == [key(3), key(4), key(5)]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)])
def test_refused_blocks_are_offered_after_a_preemption_although_the_device_still_has_them(
    groups: tuple[KVGroupLayout, ...],
) -> None:
    rig = Rig(groups=groups, num_blocks=8)
    others, keys = ReqContext("others"), [key(n, stem="other") for n in range(8)]
    rig.manager.prepare_store(keys, others)
    request = Request("r", 14)
    tables = [range(10 * n, 10 * n + 4) for n in range(len(groups))]
    rig.admit(request, *tables)
    rig.step(preempted=["r"])
    rig.manager.complete_store(keys, others, success=False)
    assert rig.ask(request, computed=12) == (0, False)
    rig.alloc(request, *tables)
    stores = rig.step(rig.run(request, *tables, computed=12)).stores
    assert sorted(each for ids in sources(stores) for each in ids) == [0, 1, 2, *[11, 12][: 2 * len(groups) - 2]]
    rig.end(*stores)
    rig.finish(request)
    later = rig.arrive(Request("later", 14))
    assert rig.ask(later) == (12, True)


def test_a_device_hit_that_the_request_did_not_compute_is_not_offered_after_a_preemption_either() -> None:
    rig = Rig()
    request = Request("r", 14)
    rig.admit(request, range(4), computed=8)
    rig.step(preempted=["r"])
    rig.ask(request, computed=12)
    rig.alloc(request, range(4))
    rig.step(rig.run(request, range(4), computed=12))
    assert rig.manager.offered == [[key(2)]]


def test_a_full_tier_costs_few_calls_each_of_one_block() -> None:
    rig = Rig(num_blocks=4)
    fill_and_pin(rig, 4)
    rig.manager.offered.clear()
    request = Request("r", 4 * 64)
    rig.admit(request, range(64))
    assert [len(keys) for keys in rig.manager.offered] == [64, 16, 4, 1]
    request.num_tokens += 4
    rig.step(rig.run(request, [64], computed=4 * 64, new=False))
    assert [len(keys) for keys in rig.manager.offered[4:]] == [1]


def test_a_manager_that_prepares_what_was_not_offered_loses_nothing_but_the_store() -> None:
    rig = Rig()
    prepare = rig.manager.prepare_store
    rig.manager.prepare_store = lambda keys, req_context: prepare([*keys, key(7)], req_context)  # type: ignore
    request = Request("r", 12)
    assert rig.admit(request, [0, 1, 2]).stores == ()
    rig.finish(request)
    rig.assert_drained()


@pytest.mark.parametrize("num_slots", [2, 5])
def test_a_manager_that_names_another_number_of_slots_loses_nothing_but_the_store(num_slots: int) -> None:
    rig = Rig(groups=(FULL, SLIDING))
    prepare = rig.manager.prepare_store

    def prepare_store(keys: object, req_context: object) -> object:
        output = prepare(keys, req_context)
        output.store_spec = CPULoadStoreSpec(range(num_slots))
        return output

    rig.manager.prepare_store = prepare_store  # type: ignore[method-assign]
    request = Request("r", 8)
    assert rig.admit(request, [0, 1], [10, 11]).stores == ()
    rig.finish(request)
    rig.assert_drained()


# --------------------------------------------------------------------------------------------------- several groups


def test_each_block_of_several_groups_is_stored_in_its_own_slot() -> None:
    """Blocks are offered by position, and copied group after group."""
    rig = Rig(groups=(FULL, SLIDING, STATE))
    (store,) = rig.admit(Request("r", 12), [0, 1, 2], [10, 11, 12], [NO_BLOCK, NO_BLOCK, 22]).stores
    offered = [key(0), key(0, 1), key(1), key(1, 1), key(2), key(2, 1), key(2, 2)]
    assert rig.manager.offered == [offered]
    gpu = store.source.block_ids.tolist()
    slots = store.destination.block_ids.tolist()
    assert gpu == [0, 1, 2, 10, 11, 12, 22]
    keys_of_gpu_blocks = [key(0), key(1), key(2), key(0, 1), key(1, 1), key(2, 1), key(2, 2)]
    assert [rig.manager.slots.get(each).block_id for each in keys_of_gpu_blocks] == slots


@pytest.mark.parametrize("groups", [(FULL, *[SLIDING] * 5), (*[SLIDING] * 5, FULL)])
@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "running"])
def test_eviction_shortens_the_hit_of_a_model_with_several_groups_instead_of_ending_it(
    groups: tuple[KVGroupLayout, ...], is_finished: bool
) -> None:
    rig = Rig(groups=groups, num_blocks=96, eviction_policy="lru")
    request = Request("r", 64)
    rig.end(*rig.admit(request, *[range(100 * n, 100 * n + 16) for n in range(6)]).stores)
    if is_finished:
        rig.finish(request)
    others = ReqContext("others")
    for n in range(4):  # 24 of the 96 blocks, at the last four positions
        keys = [key(each, stem=f"other{n}") for each in range(6)]
        rig.manager.complete_store(rig.manager.prepare_store(keys, others).keys_to_store)
    later = rig.arrive(Request("later", 65))
    assert rig.ask(later) == (48, True)


# ------------------------------------------------------------------------------------------------------------ fences


def test_a_gpu_block_handed_out_again_flushes_the_store_that_reads_it() -> None:
    rig = Rig()
    request = Request("r", 8)
    (store,) = rig.admit(request, [0, 1]).stores
    rig.finish(request)
    other = rig.arrive(Request("o", 9, "q"))
    rig.ask(other)
    rig.alloc(other, [1, 5, 6])
    assert rig.step(rig.run(other, [1, 5, 6])).flush_job_ids == {store.job_id}
    assert rig.step(rig.run(other, [0], computed=9, new=False)).flush_job_ids == frozenset(), "flushed once, for good"
    assert rig.scheduler.get_stats()["fenced_jobs",] == 1


def test_blocks_of_a_running_request_are_fenced_too() -> None:
    rig = Rig()
    (store,) = rig.admit(Request("r", 8), [0, 1]).stores
    other = Request("o", 6, "q")
    rig.admit(other, [5, 6])
    assert rig.step(rig.run(other, [1], computed=6, new=False)).flush_job_ids == {store.job_id}


def test_blocks_given_to_strangers_and_without_external_tokens_are_fenced() -> None:
    rig = Rig()
    (store,) = rig.admit(Request("r", 8), [0, 1]).stores
    # Another connector loads into it: this one only learns of the allocation.
    stranger = Request("s", 9, "q")
    rig.alloc(stranger, [0, 7, 8])
    assert rig.step().flush_job_ids == {store.job_id}
    # Nor need a scheduled request be known.
    (store,) = rig.admit(Request("t", 8, "t"), [2, 3]).stores
    assert rig.step(rig.run(Request("unknown", 4, "u"), [3])).flush_job_ids == {store.job_id}


def test_a_shared_prefix_is_read_only_and_needs_no_flush() -> None:
    rig = Rig()
    rig.admit(Request("r", 8), [0, 1])
    other = rig.arrive(Request("o", 10))
    assert rig.ask(other, computed=8) == (0, False)
    rig.alloc(other, [0, 1, 2])
    assert rig.step(rig.run(other, [0, 1, 2], computed=8)).flush_job_ids == frozenset()


def test_preemption_flushes_the_requests_stores() -> None:
    rig = Rig()
    (store,) = rig.admit(Request("r", 8), [0, 1]).stores
    assert rig.step(preempted=["r"]).flush_job_ids == {store.job_id}
    assert rig.step(preempted=["r", "unknown"]).flush_job_ids == frozenset()


def test_a_load_into_blocks_a_store_still_reads_flushes_it_first() -> None:
    rig = Rig()
    rig.store_prefix(8)
    (store,) = rig.admit(Request("r", 8, "q"), [0, 1]).stores
    request = rig.arrive(Request("o", 9))
    assert rig.ask(request) == (8, True)
    rig.alloc(request, [1, 0, 2], external=8)
    meta = rig.step()
    assert meta.flush_job_ids == {store.job_id}
    assert len(meta.loads) == 1


def test_the_same_gpu_block_twice_in_one_job() -> None:
    rig = Rig(groups=(SLIDING,), block_size=16)
    (store,) = rig.admit(Request("r", 16), [NO_BLOCK, NO_BLOCK, 2, 1]).stores
    assert store.source.block_ids.tolist() == [1, 1, 2, 1]
    rig.end(store)
    rig.check()


# ------------------------------------------------------------------------------------------------------------- ends


def test_a_failed_store_is_a_miss() -> None:
    rig = Rig()
    (store,) = rig.admit(Request("r", 8), [0, 1]).stores
    rig.end(store, success=False)
    assert rig.ask(rig.arrive(Request("o", 9))) == (0, False)
    assert rig.scheduler.get_stats()["store_jobs", "failed"] == 1


@pytest.mark.parametrize("is_own", [False, True], ids=["of another connector", "own"])
def test_what_was_computed_beside_a_failed_load_is_not_stored(*, is_own: bool) -> None:
    """Requests may have run on blocks that another connector failed to load.

    No request runs before its own load has ended.
    """
    rig = Rig(num_blocks=5)
    rig.store_prefix(8, stem="q")
    loading = rig.arrive(Request("loading", 9, "q"))
    assert rig.ask(loading) == (8, True)
    rig.alloc(loading, [50, 51, 52], external=8)
    stores = rig.admit(Request("r", 13), [0, 1, 2, 3]).stores
    refused = Request("refused", 9, "s")
    assert rig.admit(refused, [10, 11, 12]).stores == ()
    rig.scheduler.blocks_are_undefined([50, 51] if is_own else [1, 51])
    rig.end(*stores)
    assert rig.manager.where([key(n) for n in range(3)], ReqContext("other")) == [is_own] * 3
    assert bool(rig.step().stores) is is_own
    rig.finish(refused)
    assert rig.step().final_stores == ()


def test_the_end_comes_after_the_last_offer_and_once() -> None:
    rig = Rig()
    request = Request("r", 8)
    (store,) = rig.admit(request, [0, 1]).stores
    rig.finish(request)
    rig.end(store)
    assert [name for name, _ in rig.manager.calls] == ["on_new_request", "prepare_store", "on_request_finished"]
    rig.assert_drained()


def test_an_id_used_again_is_a_new_request() -> None:
    rig = Rig()
    (store,) = rig.admit(Request("r", 8), [0, 1]).stores
    again = rig.arrive(Request("r", 5, "q"))
    assert rig.ask(again) == (0, False), "it does not wait for its namesake's jobs"
    rig.end(store)
    rig.finish(again)
    assert [name for name, _ in rig.manager.calls].count("on_request_finished") == 2
    rig.assert_drained()


def test_a_store_in_flight_at_a_reset_publishes_nothing() -> None:
    rig = Rig()
    request = Request("r", 8)
    (store,) = rig.admit(request, [0, 1]).stores
    rig.scheduler.reset_cache()
    rig.end(store)
    assert rig.scheduler.get_stats()["stale_jobs",] == 1
    assert list(rig.scheduler.take_events()) == []
    assert rig.ask(rig.arrive(Request("o", 9))) == (0, False)


def test_steps_with_nothing_to_do_are_empty() -> None:
    rig = Rig()
    request = Request("r", 9)
    rig.end(*rig.admit(request, [0, 1, 2]).stores)
    calls = len(rig.manager.calls)
    for tokens in (10, 11):
        request.num_tokens = tokens
        assert rig.step(rig.run(request, [], computed=tokens - 1, new=False)).is_empty()
    assert len(rig.manager.calls) == calls


# ------------------------------------------------------------------------------------------------- running requests


def run_on(rig: Rig, request: Request, num_blocks: int) -> None:
    """Generates tokens until the request has ``num_blocks`` full blocks. Each is stored before the next step."""
    first = request.num_tokens // 4
    for block in range(first, num_blocks):
        request.num_tokens = 4 * (block + 1)
        stores = rig.step(rig.run(request, [100 + block], computed=request.num_tokens - 1, new=False)).stores
        rig.end(*stores)


def held(rig: Rig, stem: str, num_blocks: int) -> list[bool]:
    return [rig.manager.lookup(key(n, stem=stem), ReqContext("probe")) is True for n in range(num_blocks)]


@pytest.mark.parametrize("eviction_policy", ["lru", "arc", "density"])
def test_a_running_request_keeps_its_head(eviction_policy: str) -> None:
    rig = Rig(num_blocks=6, eviction_policy=eviction_policy)
    request = Request("r", 8)
    rig.end(*rig.admit(request, [0, 1]).stores)
    run_on(rig, request, 4)
    rig.end(*rig.admit(Request("other", 16, "o"), [10, 11, 12, 13]).stores)
    found = held(rig, "p", 4)
    assert found[0] and found == sorted(found, reverse=True), "what is left of the request is a prefix"


def test_while_it_stores_a_request_that_reads_no_cache_touches_only_what_it_stored() -> None:
    rig = Rig(num_blocks=6)
    rig.store_prefix(8)
    request = Request("r", 8)
    request.skip_reading_prefix_cache = True
    rig.admit(request, [4, 5])
    rig.manager.touched.clear()
    run_on(rig, request, 3)
    assert rig.manager.touched == [[key(2)]]


def test_a_long_request_in_a_large_cache_is_touched_once_per_half_of_it() -> None:
    rig = Rig(num_blocks=160)
    request = Request("r", 8)
    rig.end(*rig.admit(request, [0, 1]).stores)
    run_on(rig, request, 170)
    assert [len(keys) for keys in rig.manager.touched] == [80, 160]


@pytest.mark.parametrize("eviction_policy", ["lru", "arc", "density"])
def test_in_a_large_cache_what_others_drive_out_is_the_tail(eviction_policy: str) -> None:
    """Others store three times the cache while the request decodes, and never half of it between two of its stores."""
    rig = Rig(num_blocks=160, eviction_policy=eviction_policy)
    request = Request("r", 8)
    rig.end(*rig.admit(request, [0, 1]).stores)
    for number in range(16):
        run_on(rig, request, 3 + number)
        for part in "ab":
            other = rig.arrive(Request(f"o{number}{part}", 60, f"o{number}{part}"))
            rig.end(*rig.admit(other, range(15)).stores)
            rig.finish(other)
        found = held(rig, "p", 3 + number)
        assert found[0] and found == sorted(found, reverse=True), "what is left of the request is a prefix"


def test_small_states_do_not_let_a_request_gather_more_tokens() -> None:
    rig = Rig(groups=(FULL, STATE), num_blocks=1 << 13, block_size=16 * BT)
    _, stores = decode_together(rig, 64, 8 * 16 * BT)
    assert max(len(ids) for of_step in stores for ids in of_step) <= 128 // BT
