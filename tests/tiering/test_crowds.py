# SPDX-License-Identifier: Apache-2.0
"""Crowds cost nothing: the work of one call does not grow with the requests, jobs or claims that it does not concern.

Work is counted in lines of the control plane that run, or in calls, never in seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.connector.rig import BT, FULL
from tests.connector.rig import Request as EngineRequest
from tests.tiering.rig import Memory, Rig, prefix
from tests.tiering.store_rig import Rig as StoreRig
from tests.tiering.test_waits import HOST_ROOM, lines_run

from kvoffload.base import OffloadKey, ReqContext, make_offload_key
from kvoffload.config import EngineLayout, OffloadingConfig
from kvoffload.connector import EngineStep, OffloadingConnectorScheduler
from kvoffload.connector.guard import GuardedManager
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager, SlotTable
from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.testing import keys as numbered
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.load_policy import BlockWorth
from kvoffload.tiering.manager import TieringOffloadingManager

POLICIES = pytest.mark.parametrize("policy", ["lru", "arc", "density"])


def lines_of_both(call: Callable[[], object]) -> int:
    return lines_run(call, HOST_ROOM.removesuffix("cpu"))


def test_the_end_of_a_step_is_linear_in_the_prompts_whose_reads_it_submits() -> None:
    """Each job was compared with all that were outstanding: 14.6 s for 64 prompts of 2,048 blocks."""
    lines = []
    for num_prompts in (8, 32):
        rig = Rig(num_prompts * 60, promotion_share=1.0, block_worth=BlockWorth(5 << 20))
        for number in range(num_prompts):
            blocks = prefix(50, of=f"{number}-")
            rig.below(blocks)
            rig.manager.lookup_prefix(blocks, rig.start(f"r{number}"))
        lines.append(lines_run(rig.manager.on_schedule_end))
        assert len(rig.tier.jobs) == 50 * num_prompts
    assert lines[1] < 5 * lines[0]


def test_a_promotion_of_large_blocks_has_a_bounded_number_of_jobs() -> None:
    rig = Rig(1200, promotion_share=1.0, block_worth=BlockWorth(5 << 20))
    blocks = prefix(1000)
    rig.below(blocks)
    rig.manager.lookup_prefix(blocks, rig.start("r"))
    rig.step()
    assert 32 <= len(rig.tier.jobs) <= 64


def claimed_or_pinned(policy: str, num_slots: int, state: str) -> Rig:
    """Return host memory that is full of blocks that are claimed, being read from a tier, or pinned."""
    rig = Rig(num_slots, cache_policy=policy, promotion_share=1.0)
    blocks = prefix(num_slots, of="old")
    if state == "pinned":
        writer = rig.start("writer")
        rig.store(blocks, writer)
        rig.manager.prepare_load(blocks, writer)
        return rig
    rig.below(blocks)
    rig.manager.lookup_prefix(blocks, rig.start("waiting"))
    rig.step()
    if state == "claimed":
        rig.finish()
        rig.manager.lookup_prefix(blocks, rig.manager._requests["waiting"].context)
    return rig


@POLICIES
@pytest.mark.parametrize("state", ["claimed", "promoting", "pinned"])
def test_storing_one_block_costs_the_same_however_many_are_claimed_or_pinned(policy: str, state: str) -> None:
    """25 to 40 ms with 131,072 slots, and 200 to 500 ms with 65,536 that were all in flight."""
    lines = []
    for num_slots in (100, 2000):
        rig = claimed_or_pinned(policy, num_slots, state)
        running = rig.start("running")
        for number in range(3):  # the first one may step over pinned blocks, once
            count = lines_of_both(
                lambda: rig.manager.prepare_store(numbered(number), running)  # noqa: B023 - called here
            )
        rig.manager.check_invariants()
        lines.append(count)
    assert lines[1] < 1.5 * lines[0]


@POLICIES
def test_claims_give_way_one_by_one_newest_first(policy: str) -> None:
    rig = claimed_or_pinned(policy, 8, "claimed")
    running, waiting = rig.start("running"), rig.manager._requests["waiting"].context
    for number in range(3):
        assert rig.manager.prepare_store(numbered(number), running) is not None
        rig.manager.check_invariants()
        left = 7 - number
        assert rig.manager.lookup_prefix(prefix(8, of="old"), waiting) == [*[True] * left, False]


def test_a_reset_of_an_idle_table_does_not_visit_its_slots() -> None:
    """A million slots took 0.2 s."""
    lines = []
    for num_blocks in (10, 1000):
        table = SlotTable(num_blocks, LRUCachePolicy)
        for _ in range(2):
            assert table.reserve(numbered(*range(num_blocks))) is not None
            table.end_write(numbered(*range(num_blocks)), success=True)
            lines.append(lines_run(table.reset, HOST_ROOM))
            table.check_invariants()
            assert table.num_free == num_blocks
    assert len({*lines}) == 1


def test_a_waiting_request_counts_its_blocks_for_the_reuse_filter_once() -> None:
    lines = []
    for num_blocks in (10, 1000):
        primary = CPUPrimaryTierOffloadingManager(2000, Memory(2000), store_threshold=2)
        waiting, writer = ReqContext("waiting"), ReqContext("writer")
        primary.on_new_request(waiting)
        primary.on_new_request(writer)
        blocks = prefix(num_blocks)
        primary.count_lookups(blocks, waiting)
        assert primary.prepare_store(blocks, writer) is not None, "the second request stores them"
        assert primary.lookup_prefix(blocks, waiting) == [None] * num_blocks
        lines.append(lines_run(lambda: primary.count_lookups(blocks, waiting), HOST_ROOM))  # noqa: B023
    assert lines[0] == lines[1]


def test_a_tier_that_raises_in_submit_after_it_ended_the_job_leaves_an_idle_engine_idle() -> None:
    rig = Rig(4)
    submit = rig.tier.submit_store

    def end_and_raise(job: JobMetadata) -> None:
        submit(job)
        rig.tier.finish()
        raise RuntimeError("too late")

    rig.tier.submit_store = end_and_raise  # type: ignore[method-assign]
    rig.store(prefix(1), rig.start("r"), finish=False)
    assert rig.tier.has_pending_work()
    rig.step()
    assert not rig.manager.has_pending_work()


def crowd(num_requests: int, num_blocks: int = 2, *, shared: bool = False) -> tuple[Rig, list[OffloadKey]]:
    """Make requests that wait for a tier that must find out which blocks it contains, and reports its answers in the
    list."""
    rig, news = Rig(64), list[OffloadKey]()

    def take_news() -> list[OffloadKey]:
        taken = [*news]
        news.clear()
        return taken

    rig.tier.take_news = take_news  # type: ignore[method-assign]
    for number in range(num_requests):
        blocks = prefix(num_blocks, of="" if shared else f"{number}-")
        rig.tier.answers |= dict.fromkeys(blocks)
        assert rig.manager.lookup_prefix(blocks, rig.start(f"r{number}")) == [None] * num_blocks
    rig.step()
    return rig, news


def test_the_end_of_a_store_costs_the_same_however_many_requests_wait() -> None:
    """128 of them took 0.5 s while 10,000 requests waited."""
    lines = []
    for num_requests in (3, 300):
        rig, _ = crowd(num_requests)
        running = rig.start("running")
        stored = rig.write(numbered(1, 2), running)
        lines.append(lines_of_both(lambda: rig.manager.complete_store(stored, running)))  # noqa: B023
        rig.manager.check_invariants()
    assert lines[0] == lines[1]


@pytest.mark.parametrize("succeed", [True, False])
def test_the_blocks_of_a_shared_prefix_that_arrive_together_concern_each_request_once(succeed: bool) -> None:
    calls = []
    for num_blocks in (1, 16):
        rig = Rig(64, promotion_share=1.0)
        blocks = prefix(num_blocks)
        rig.below(blocks)
        for number in range(100):
            rig.manager.lookup_prefix(blocks, rig.start(f"r{number}"))
        rig.step()
        rig.tier.finish(success=succeed)
        calls.append(lines_run(rig.manager.on_schedule_end, counted="call"))
        rig.manager.check_invariants()
    assert calls[1] < 2 * calls[0]


def test_requests_that_share_more_than_the_limit_of_claims_are_not_searched_for_again_until_there_is_room() -> None:
    """50 requests for one prefix of 800 blocks took seconds in each step."""
    rig = Rig(40, promotion_share=0.5)
    rig.tier.take_news = list  # type: ignore[method-assign]
    blocks, others = prefix(60), prefix(10, of="other")
    rig.below([*blocks, *others])
    first = rig.start("first")
    rig.manager.lookup_prefix(others, first)
    requests = [rig.start(f"r{number}") for number in range(20)]
    for request in requests:
        assert rig.manager.lookup_prefix(blocks, request) == [*[None] * 10, False]
    rig.step()
    rig.tier.finish([job_id for job_id, job in rig.tier.jobs.items() if not {*others}.isdisjoint(job.keys)])
    rig.step()
    assert all(map(rig.manager.is_unchanged, requests))
    rig.manager.on_request_finished(first)
    assert not any(map(rig.manager.is_unchanged, requests))
    for request in requests:
        assert rig.manager.lookup_prefix(blocks, request) == [*[None] * 20, False]
    rig.step()
    rig.finish()
    assert not any(map(rig.manager.is_unchanged, requests))
    for request in requests:
        assert rig.manager.lookup_prefix(blocks, request) == [*[True] * 20, False]


def test_one_answer_of_a_tier_costs_the_same_however_many_requests_wait_for_others() -> None:
    """Each of 10,000 waiting requests was looked up again: 0.6 s in the step."""
    extra = []
    for num_requests in (3, 300):
        rig, news = crowd(num_requests)

        def step() -> None:
            for number, request in enumerate([*rig.manager._requests.values()]):  # noqa: B023
                rig.manager.lookup_prefix(prefix(2, of=f"{number}-"), request.context)  # noqa: B023
            rig.manager.on_schedule_end()  # noqa: B023

        step()
        quiet = lines_of_both(step)
        key = prefix(1, of="0-")[0]
        rig.tier.answers[key] = False
        news.append(key)
        extra.append(lines_of_both(step) - quiet)
        assert rig.manager.lookup_prefix([key], rig.manager._requests["r0"].context) == [False]
    assert abs(extra[1] - extra[0]) < 10


def test_a_request_that_waits_costs_the_same_in_each_step_however_long_its_prefix_is() -> None:
    lines = []
    for num_blocks in (10, 1000):
        rig, _ = crowd(1, num_blocks)
        guarded, context = GuardedManager(rig.manager), rig.manager._requests["r0"].context
        assert guarded.is_unchanged(context)
        lines.append(lines_of_both(lambda: guarded.is_unchanged(context)))  # noqa: B023
    assert lines[0] == lines[1]


def test_many_requests_with_one_unknown_prefix_are_not_looked_up_block_by_block(
    make: Callable[..., StoreRig],
) -> None:
    """500 of them with 2,048 blocks took 1.5 s in one step, and 172 MB."""
    lines = []
    for num_blocks in (60, 1000):
        store = make(num_blocks=64)
        store.gate.close_gate("scan", "contains")
        store.start()
        manager = TieringOffloadingManager(
            CPUPrimaryTierOffloadingManager(2000, Memory(2000)), [store.tier], clock=store.clock
        )
        contexts, blocks = [ReqContext(f"r{number}") for number in range(20)], prefix(num_blocks)
        for context in contexts:
            manager.on_new_request(context)
        manager.lookup_prefix(blocks, contexts[0])
        lines.append(
            lines_of_both(lambda: [manager.lookup_prefix(blocks, context) for context in contexts])  # noqa: B023
        )
        manager.on_schedule_end()
        assert len(store.tier._questions._asking) == num_blocks
        assert sum(len(each.keys) for each in manager._requests["r1"].wait.asked.values()) == num_blocks  # type: ignore[union-attr]
        assert len(manager._waits.watched) == 1, "each request watches one block"
        store.gate.open_gate("scan", "contains")
    assert lines[1] < 2 * lines[0]


def test_a_waiting_request_is_not_searched_for_again_before_something_happens() -> None:
    rig, news = crowd(0)
    layout = EngineLayout((FULL,), BT, "crowd")
    scheduler = OffloadingConnectorScheduler(rig.manager, layout, OffloadingConfig(cpu_bytes_to_use=1 << 20))
    request = EngineRequest("r", 40 * BT)
    hashes = [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]
    rig.tier.answers |= dict.fromkeys(hashes)
    calls: list[int] = []
    ask = rig.manager.lookup_prefix
    rig.manager.lookup_prefix = lambda keys, *more, **named: calls.append(len(keys)) or ask(keys, *more, **named)  # type: ignore[method-assign, func-returns-value]
    for _ in range(5):
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        scheduler.build_connector_meta(EngineStep())
    assert len(calls) == 1
    assert scheduler.get_num_new_matched_tokens(request, BT) == (None, False)
    assert len(calls) == 2, "the engine's own cache has another block"
    rig.tier.answers |= dict.fromkeys(hashes, False)
    news.extend(hashes)
    assert scheduler.get_num_new_matched_tokens(request, BT) == (0, False)
