# SPDX-License-Identifier: Apache-2.0
"""Crowds cost nothing: the work of one call does not grow with the requests, jobs or claims that it does not concern.

Work is counted in lines of the control plane that run, or in calls, never in seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.tiering.rig import Memory, Rig, prefix
from tests.tiering.test_waits import HOST_ROOM, lines_run

from kvoffload.base import ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager, SlotTable
from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.testing import keys as numbered
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.load_policy import BlockWorth

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
    """Host memory that is full of blocks which are claimed, being promoted, or pinned."""
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
        for number in range(3):  # the first one may step over what is pinned, once
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
