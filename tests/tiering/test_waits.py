# SPDX-License-Identifier: Apache-2.0
"""Test the cost of a step while requests wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.tiering.plan_rig import PlanRig
from tests.tiering.rig import Rig, keys, prefix
from tests.tiering.store_rig import Region
from tests.tiering.store_rig import Rig as StoreRig
from tests.tiering.test_promotions import Parts

import kvoffload.cpu
import kvoffload.tiering
from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.load_tiers import LoadTiers, TierMatcher
from kvoffload.tiering.manager import TieringOffloadingManager

ROOM = str(Path(kvoffload.tiering.__file__).parent)
HOST_ROOM = str(Path(kvoffload.cpu.__file__).parent)


def lines_run(call: Callable[[], object], room: str = ROOM, counted: str = "line") -> int:
    """How many lines of ``tiering/``, or another ``room``, it runs. Counts calls instead if ``counted`` is "call"."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(room):
            return None
        count += event == counted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def waiting(num_requests: int, *, groups: int = 2, unknown: bool = False) -> Rig:
    """Requests that wait, each for two blocks of every group; with ``unknown``, no tier has found out whether it has
    them."""
    rig = Rig(2 * groups * num_requests + 8, promotion_share=1.0)
    for number in range(num_requests):
        request = rig.start(f"r{number}")
        for group in range(groups):
            blocks = prefix(2, of=f"{number}-{group}-")
            if unknown:
                rig.tier.answers |= dict.fromkeys(blocks)
            else:
                rig.below(blocks)
            assert rig.manager.lookup_prefix(blocks, request) == [None, None]
    rig.step()
    return rig


@pytest.mark.parametrize("have_arrived", [False, True])
def test_an_idle_step_costs_the_same_however_many_requests_wait(have_arrived: bool) -> None:
    counts = []
    for num_requests in (1, 50):
        rig = waiting(num_requests)
        if have_arrived:
            rig.finish()
        counts.append(lines_run(rig.manager.on_schedule_end))
    assert counts[0] == counts[1]


def test_only_ranges_without_an_answer_are_looked_at_in_each_step() -> None:
    rig = waiting(3, unknown=True)
    base = lines_run(rig.manager.on_schedule_end)
    one_more = lines_run(waiting(4, unknown=True).manager.on_schedule_end) - base
    assert one_more > 0
    rig.tier.answers |= dict.fromkeys(prefix(2, of="0-0-") + prefix(2, of="0-1-"), False)
    rig.step()
    assert lines_run(rig.manager.on_schedule_end) == base - one_more


def test_an_ask_for_unknown_blocks_costs_the_same_for_each_where_few_may_be_claimed() -> None:
    """It asks in runs of 64 blocks, and a run must not look at all blocks to the end."""
    lines = []
    for num_blocks in (1000, 4000):
        rig, blocks = Rig(64), prefix(num_blocks)
        rig.tier.answers |= dict.fromkeys(blocks)
        request = rig.start("r")
        lines.append(lines_run(lambda: rig.manager.lookup_prefix(blocks, request)))  # noqa: B023
    assert lines[1] < 5 * lines[0]


def test_a_tier_that_knows_no_more_is_asked_for_no_waiting_request() -> None:
    rig = Rig()
    news: list[OffloadKey] = []
    rig.tier.take_news = lambda: news  # type: ignore[method-assign]
    blocks = prefix(3)
    rig.tier.answers |= dict.fromkeys(blocks)
    assert rig.ask(blocks, rig.start("r")) == [None, None, None]
    asked: list[OffloadKey] = []
    rig.tier.lookup = lambda key, _: asked.append(key)  # type: ignore[method-assign, misc]
    rig.clock.advance(1.0)
    rig.step()
    assert asked == []
    news += blocks[:1]
    rig.step()
    assert asked[:1] == blocks[:1]


@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
def test_stores_do_not_step_over_the_claimed_blocks_again_and_again(policy: str) -> None:
    """While a request waits that has hit the 8,192 oldest blocks, a running request's store must stay cheap."""
    counts = []
    for num_claimed in (10, 200):
        rig = Rig(400, cache_policy=policy)
        hits, below, before = prefix(num_claimed, of="hit"), keys(0, of="below"), rig.start("before")
        for blocks in keys(0, of="oldest"), hits, prefix(399 - num_claimed, of="newer"):
            rig.store(blocks, before)
        rig.below(below)
        assert rig.ask(below, rig.start("first")) == [None]
        assert rig.ask([*hits, *below], rig.start("second")) == [*[True] * num_claimed, None]
        running = rig.start("running")
        rig.write(keys(0, of="mine"), running)
        counts.append(lines_run(lambda: rig.write(keys(1, of="mine"), running), HOST_ROOM))  # noqa: B023
    assert counts[1] <= counts[0] + 20


@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
def test_stores_step_over_claimed_blocks_now_and_then_where_there_are_few_others(policy: str) -> None:
    lines = []
    for is_claimed in (False, True):
        rig = Rig(400, cache_policy=policy)
        hits, below, before = prefix(280, of="hit"), keys(0, of="below"), rig.start("before")
        for blocks in keys(0, of="oldest"), hits, prefix(39, of="newer"):
            rig.store(blocks, before)
        rig.store(prefix(80, of="pinned"), before, finish=False)
        rig.below(below)
        assert rig.ask(below, rig.start("first")) == [None]
        if is_claimed:
            assert rig.ask([*hits, *below], rig.start("second")) == [*[True] * len(hits), None]
        running, count = rig.start("running"), 0
        for blocks in ([key] for key in prefix(80, of="mine")):
            count += lines_run(lambda: rig.write(blocks, running), HOST_ROOM)  # noqa: B023
            rig.manager.complete_store(blocks, running)
        lines.append(count)
    assert lines[1] <= 3 * lines[0]


def test_what_a_request_was_told_before_it_waits_becomes_a_claim_if_it_is_still_there() -> None:
    parts = Parts()
    request = parts.request("r")
    for key in keys(10, 11):
        parts.primary.prepare_store([key], request.context)
        parts.primary.complete_store([key], request.context)
    wait = parts.waits.of(request)
    assert parts.waits.found(wait, keys(10, 11, 12)) == [True, True]
    assert len(parts.waits.claimed) == 0
    parts.primary.slots.reserve(keys(20, 21, 22, 23, 24, 25, 26))  # another request's store evicts the first of them
    parts.waits.begin(wait)
    assert list(parts.waits.claimed) == keys(11)
    parts.check_invariants()


def test_a_request_that_waits_asks_again_at_no_cost_until_a_tier_knows_more(make: Callable[..., StoreRig]) -> None:
    """A store must be asked for thousands of blocks. They must not be looked up again in each step of the wait."""
    counts = []
    for num_blocks in (10, 100):
        rig = make(num_blocks=512)
        rig.gate.close_gate("scan", "contains")
        rig.start()
        blocks = prefix(num_blocks)
        rig.below(blocks)
        primary = CPUPrimaryTierOffloadingManager(512, Region(rig.view))
        manager = TieringOffloadingManager(primary, [rig.tier], clock=rig.clock)
        request = ReqContext("r")
        manager.on_new_request(request)

        def ask() -> None:
            if not manager.is_unchanged(request):  # noqa: B023 - called here
                assert manager.lookup_prefix(blocks, request) == [None] * num_blocks  # noqa: B023
            manager.on_schedule_end()  # noqa: B023
            manager.check_invariants()  # noqa: B023

        for _ in range(3):
            ask()
        counts.append(lines_run(lambda: manager.is_unchanged(request)))  # noqa: B023
        assert manager.is_unchanged(request)
        rig.clock.advance(5.0)
        rig.gate.open_gate("contains")
        while not primary.slots.num_in_flight:  # all are asked for again once the store has answered
            ask()
        while None in manager.lookup_prefix(blocks, request):
            manager.on_schedule_end()
        assert manager.lookup_prefix(blocks, request) == [True] * num_blocks
        manager.on_request_finished(request)
    assert counts[0] == counts[1]


def test_a_block_that_another_request_stores_is_found_though_the_tier_has_not_answered(
    make: Callable[..., StoreRig],
) -> None:
    rig = make(num_blocks=64)
    rig.gate.close_gate("scan", "contains")
    rig.start()
    blocks = prefix(3)
    primary = CPUPrimaryTierOffloadingManager(64, Region(rig.view))
    manager = TieringOffloadingManager(primary, [rig.tier], clock=rig.clock)
    waiting_request, other = ReqContext("waiting"), ReqContext("other")
    manager.on_new_request(waiting_request)
    manager.on_new_request(other)
    for _ in range(3):
        assert manager.lookup_prefix(blocks, waiting_request) == [None, None, None]
        manager.on_schedule_end()
    stored = manager.prepare_store(blocks, other)
    assert stored is not None
    manager.complete_store(stored.keys_to_store, other)
    assert manager.lookup_prefix(blocks, waiting_request) == [True, True, True]
    manager.check_invariants()
    rig.gate.open_gate("contains")


@pytest.mark.parametrize("asks_where", [False, True])
def test_a_block_that_another_request_promotes_is_found_though_a_tier_has_not_answered(asks_where: bool) -> None:
    """The read's end is noticed while the waiting request asks.

    That request must not get the answer ``None`` forever.
    """
    rig = PlanRig([(1.0, None), (0.01, None)], step_s=20.0, policy="always")
    manager, (slow, mute) = rig.manager, rig.tiers
    slow.medium, mute.medium, mute.answer_s = "STORAGE", "CPU", 1e9
    blocks = prefix(3)
    slow.keys = {*blocks}
    waiting_request = ReqContext("waiting")
    other = ReqContext("other", load_tiers=LoadTiers((TierMatcher("STORAGE"),)))
    for request in (waiting_request, other):
        manager.on_new_request(request)
        assert manager.lookup_prefix(blocks, request) == [None, None, None]
    manager.on_schedule_end()
    rig.clock.advance(3.1)
    if asks_where:
        manager.where(blocks, waiting_request)
    assert manager.lookup_prefix(blocks, waiting_request) == [True, True, True]
    manager.check_invariants()


def test_a_tier_that_knows_a_block_only_while_nobody_asks_costs_no_more_than_the_patience() -> None:
    rig = Rig(max_wait_s=10.0)
    (block,) = prefix(1)
    request = rig.start("r")
    for _ in range(12):
        rig.tier.answers[block] = None
        if rig.ask([block], request) == [False]:
            break
        rig.tier.answers[block] = True
        rig.step()
        rig.clock.advance(1.0)
    else:
        pytest.fail("it waits for ever")


@pytest.mark.parametrize("num_blocks", [100, 400])
def test_unknown_blocks_beyond_what_may_be_claimed_are_looked_at_once_in_an_ask(num_blocks: int) -> None:
    """There was a survey for each of them, over all that follow."""
    rig = Rig(40)
    rig.below(prefix(30))
    assert rig.ask(prefix(30), rig.start("has all that may be claimed")) == [None] * 30
    blocks, request = prefix(num_blocks, of="u"), rig.start("r")
    rig.tier.answers |= dict.fromkeys(blocks)
    slots, num_keys = rig.primary.slots, 0

    def get_all(keys: Collection[OffloadKey]) -> Any:
        nonlocal num_keys
        num_keys += len(keys)
        return slots.policy.get_all(keys)

    slots.get_all = get_all  # type: ignore[method-assign]
    calls, ask = [0], rig.tier.lookup_prefix

    def lookup_prefix(keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        calls[0] += 1
        return ask(keys, req_context)

    rig.tier.lookup_prefix = lookup_prefix  # type: ignore[method-assign]
    assert rig.manager.lookup_prefix(blocks, request) == [None] * num_blocks
    assert num_keys <= 2 * num_blocks
    assert calls[0] <= 2 + num_blocks // 50
