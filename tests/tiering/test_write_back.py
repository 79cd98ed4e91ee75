# SPDX-License-Identifier: Apache-2.0
"""Test tiers to which blocks are written shortly before host memory evicts them: which blocks, when, and the cost of a
burst."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cpu.policies.test_outsiders import FIFO
from tests.tiering.rig import BLOCK_BYTES, Memory, Rig, content, keys, prefix, quiesce

from kvoffload.base import OffloadPolicy, ReqContext
from kvoffload.cpu import POLICIES
from kvoffload.errors import ConfigError
from kvoffload.testing import FakeTier
from kvoffload.tiering import CPUPrimaryTierOffloadingManager, TieringOffloadingManager, build_tier
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.cascades import Cascades
from kvoffload.tiering.tier_jobs import GuardedTier, TierJobs
from kvoffload.tiering.write_back import WriteBack

BLOCK, REQUEST = OffloadPolicy.BLOCK_LEVEL, OffloadPolicy.REQUEST_LEVEL


def rig_of(num_blocks: int = 64, policies: tuple[OffloadPolicy, ...] = (BLOCK,), **options: Any) -> Rig:
    return Rig(num_blocks, policies, cascade=["on_evict"] * len(policies), **options)


def fill(rig: Rig, first: int, last: int) -> None:
    """Stores blocks one by one, the first being the least recently used, without letting jobs end."""
    request = rig.start(f"fill{first}-{last}")
    for number in range(first, last):
        rig.store(keys(number), request, finish=False)
    rig.manager.on_request_finished(request)


def settle(rig: Rig) -> None:
    """Make a step that submits jobs, and a step that handles their ends."""
    rig.step()
    rig.finish()


def written(rig: Rig) -> list[bytes]:
    return [key for call in rig.tier.calls("submit_store") for key in call.keys]


def dropped(rig: Rig) -> float:
    return rig.manager.get_stats()["cascades", "dropped"]


def test_nothing_goes_down_while_there_is_room() -> None:
    rig = rig_of()
    fill(rig, 0, 60)
    rig.finish()
    assert not rig.tier.jobs and not rig.tier.blocks
    assert not rig.manager.has_pending_work()


def test_what_is_next_to_go_is_written_in_that_order_and_pinned_meanwhile() -> None:
    rig = rig_of()
    fill(rig, 0, 64)
    rig.step()
    (job,) = rig.tier.jobs.values()
    assert list(job.keys) == keys(0, 1), "the window of 64 blocks is 2; what is evicted last is the most recent below"
    assert rig.primary.get_stats()["primary_blocks_pinned",] == 2
    rig.finish()
    assert rig.tier.blocks == {key: content(key) for key in keys(0, 1)}
    assert rig.primary.get_stats()["primary_blocks_pinned",] == 0
    fill(rig, 64, 66)
    assert dropped(rig) == 0
    assert rig.wait_for_prefix(keys(0, 1), rig.start("back")) == 2


def test_a_block_is_written_once_while_it_is_watched_and_not_if_it_is_below() -> None:
    rig = rig_of()
    rig.below(keys(0))
    fill(rig, 0, 64)
    for _ in range(6):
        rig.step()
        rig.finish()
    assert written(rig) == keys(1)
    fill(rig, 64, 65)
    rig.finish()
    assert written(rig) == keys(1, 2)
    assert dropped(rig) == 0


def test_a_promoted_block_stays_below_and_is_not_written_again() -> None:
    rig = rig_of()
    fill(rig, 0, 64)
    settle(rig)
    fill(rig, 64, 66)
    settle(rig)
    back = rig.start("back")
    assert rig.wait_for_prefix(keys(0), back) == 1
    rig.manager.on_request_finished(back)
    before = len(rig.tier.calls("submit_store"))
    rig.tier.log.clear()
    for number in range(100, 170):
        fill(rig, number, number + 1)
        settle(rig)
    assert before and keys(0)[0] in rig.tier.blocks
    assert keys(0)[0] not in written(rig)
    assert rig.primary.slots.get(keys(0)[0]) is None


def test_what_leaves_and_is_below_already_is_used_there_head_last() -> None:
    """Otherwise it would be as old in the tier as its last use there, and be evicted before blocks written long ago."""
    rig = rig_of()
    rig.below(keys(0, 1))
    fill(rig, 0, 64)
    rig.step()
    own = [call for call in rig.tier.calls("touch") if call.req_id == "kvoffload:write-back"]
    assert [list(call.keys) for call in own] == [keys(1, 0)]
    assert not written(rig)


def test_many_blocks_go_down_in_small_jobs_the_first_to_be_evicted_first() -> None:
    """A job's pins last until the whole job has ended."""
    rig = rig_of(num_blocks=8192)
    fill(rig, 0, 8192)
    rig.step()
    jobs = [list(job.keys) for job in rig.tier.jobs.values()]
    assert jobs == [keys(*range(start, start + 64)) for start in (0, 64, 128, 192)]


def test_a_block_that_the_tier_dropped_meanwhile_is_written_when_it_comes_to_the_window_again() -> None:
    rig = rig_of()
    fill(rig, 0, 64)
    settle(rig)
    rig.manager.touch(keys(0), None)
    rig.tier.blocks.clear()
    for number in range(64, 127):
        fill(rig, number, number + 1)
        settle(rig)
    assert written(rig).count(keys(0)[0]) == 2
    assert keys(0)[0] in rig.tier.blocks


def test_a_burst_is_not_held_up_but_dropped_and_counted_and_the_window_grows() -> None:
    rig = rig_of()
    fill(rig, 0, 64)
    settle(rig)
    request = rig.start("burst")
    output = rig.manager.prepare_store(prefix(32, of="q"), request)
    assert output is not None and len(output.evicted_keys) == 32
    assert dropped(rig) == 30
    rig.manager.complete_store(output.keys_to_store, request)
    for burst in range(4):
        settle(rig)
        rig.store(prefix(16, of=f"more{burst}"), request, finish=False)
    before = dropped(rig)
    for burst in range(4, 8):
        settle(rig)
        rig.store(prefix(16, of=f"more{burst}"), request, finish=False)
    assert dropped(rig) == before, "it has grown to what comes at once"


def test_a_block_that_two_tiers_lose_counts_twice() -> None:
    rig = rig_of(policies=(BLOCK, BLOCK))
    fill(rig, 0, 64)
    settle(rig)
    fill(rig, 64, 70)
    assert dropped(rig) == 2 * 4, "the two that were watched are below"


def test_a_tier_that_does_not_come_to_an_end_holds_no_more_than_its_window() -> None:
    rig = rig_of()
    fill(rig, 0, 64)
    for number in range(100, 300):
        fill(rig, number, number + 1)
        rig.step()
    assert rig.primary.get_stats()["primary_stores_refused",] == 0
    assert 2 <= sum(len(job.keys) for job in rig.tier.jobs.values()) <= 32
    assert dropped(rig) > 100


@pytest.mark.parametrize("room", [40, 43])
def test_the_head_of_a_prefix_outlives_its_tail_in_a_real_store(room: int) -> None:
    """Blocks that went down in one job: the first of it was once the head, which stores take for the oldest."""
    memory = Memory(128)
    primary = CPUPrimaryTierOffloadingManager(128, memory)
    tier = build_tier({"type": "memory", "threads": 1, "max_bytes": room * BLOCK_BYTES}, primary.kv_view)
    manager = TieringOffloadingManager(primary, [tier], cascade=["on_evict"])
    context = ReqContext("r")
    manager.prepare_store(prefix(100), context)
    manager.complete_store(prefix(100), context)
    manager.touch(prefix(100), context)
    for burst in range(16):  # the window grows to the size of a burst
        for _ in range(3):
            manager.on_schedule_end()
            quiesce(tier)
        manager.prepare_store(prefix(8, of=f"{burst:03}"), context)
        manager.complete_store(prefix(8, of=f"{burst:03}"), context)
    below = [key for key in prefix(100) if tier.lookup(key, context)]
    assert room / 2 < len(below) < 50
    assert below == prefix(len(below))
    manager.shutdown()


def test_a_failed_write_unpins_and_is_tried_again_at_the_next_review() -> None:
    rig = rig_of()
    fill(rig, 0, 64)
    rig.step()
    rig.finish(success=False)
    assert rig.primary.get_stats()["primary_blocks_pinned",] == 0
    tries = len(rig.tier.calls("submit_store"))
    for number in range(100, 200):
        fill(rig, number, number + 1)
        rig.finish(success=False)
    assert 13 <= len(rig.tier.calls("submit_store")) - tries <= 100
    assert dropped(rig) >= 100
    for number in range(200, 280):
        fill(rig, number, number + 1)
        settle(rig)
    before = dropped(rig)
    fill(rig, 280, 281)
    settle(rig)
    assert rig.tier.blocks and dropped(rig) == before, "it is back to writing everything"


def test_a_tier_that_never_answers_is_not_asked_for_ever() -> None:
    rig = rig_of()
    for key in prefix(64):
        rig.tier.answers[key] = None
    fill(rig, 0, 64)
    for _ in range(10):
        rig.step()
    assert not rig.manager.has_pending_work() and not rig.tier.jobs


def test_a_tier_that_raises_costs_nothing_but_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: JobMetadata) -> None:
        raise OSError("gone")

    rig = rig_of()
    monkeypatch.setattr(rig.tier, "submit_store", broken)
    fill(rig, 0, 64)
    rig.step()
    fill(rig, 64, 80)
    assert rig.primary.get_stats()["primary_blocks_pinned",] == 0
    assert dropped(rig) == 16


def test_a_reset_forgets_what_was_watched_and_waits_for_late_writes() -> None:
    rig = rig_of()
    fill(rig, 0, 64)
    rig.step()
    rig.tier.hangs = True
    rig.manager.reset_cache()
    rig.manager.check_invariants()
    assert dropped(rig) == 0
    fill(rig, 64, 126)
    assert rig.primary.get_stats()["primary_blocks_used",] == 64, "slots under a late read are nobody else's"
    rig.finish()
    rig.tier.hangs = False
    assert not rig.tier.jobs or all(job.req_context.req_id == "kvoffload:write-back" for job in rig.tier.jobs.values())
    rig.finish()
    assert rig.primary.get_stats()["primary_blocks_pinned",] == 0


def test_whole_requests_go_down_at_once_to_the_tiers_that_asked() -> None:
    rig = rig_of(policies=(REQUEST, BLOCK))
    request = rig.start("r")
    rig.store(prefix(3), request, finish=False)
    assert [list(job.keys) for job in rig.tiers[0].jobs.values()] == [prefix(3)]
    assert not rig.tiers[1].jobs


def test_two_tiers_get_a_block_at_the_same_time() -> None:
    """The pin of the first tier's job must not count as a use that keeps the block in host memory."""
    rig = rig_of(policies=(BLOCK, BLOCK))
    fill(rig, 0, 64)
    rig.step()
    assert [[list(job.keys) for job in tier.jobs.values()] for tier in rig.tiers] == [[keys(0, 1)]] * 2


def test_modes_are_per_tier() -> None:
    rig = Rig(64, (BLOCK, BLOCK), cascade=["on_store", "on_evict"])
    fill(rig, 0, 4)
    rig.finish()
    assert len(rig.tiers[0].blocks) == 4 and not rig.tiers[1].blocks


def test_a_clean_end_leaves_below_what_was_above() -> None:
    rig = rig_of()
    fill(rig, 0, 10)
    rig.manager.shutdown()
    rig.manager.shutdown()
    assert set(rig.tier.blocks) == {*keys(*range(10))}
    assert written(rig).count(keys(9)[0]) == 1
    own = [call.name for call in rig.tier.log if call.req_id == "kvoffload:write-back"]
    assert [own[0], own[-1]] == ["on_new_request", "on_request_finished"]
    assert own.count("on_new_request") == own.count("on_request_finished") == 1, "a second end announces nothing"


@pytest.mark.parametrize("store", ["fs", "memory", "disk"])
def test_a_clean_end_writes_to_tiers_that_must_find_out_what_they_have(store: str, tmp_path: Path) -> None:
    """There is no further step in which their threads could ask the store."""
    memory = Memory(64)
    primary = CPUPrimaryTierOffloadingManager(64, memory)
    options: dict[str, Any] = {"type": store, "max_bytes": "8MiB"}
    if store != "memory":
        options["path"] = str(tmp_path)
    tier = build_tier(options, primary.kv_view)
    manager = TieringOffloadingManager(primary, [tier], cascade=["on_evict"])
    context = ReqContext("r")
    manager.prepare_store(prefix(40), context)
    manager.complete_store(prefix(40), context)
    manager.shutdown()
    assert tier.get_stats()["tier_blocks_stored", tier.tier_type] == 40


def test_the_end_writes_the_most_recently_used_first() -> None:
    rig = rig_of(num_blocks=256)
    fill(rig, 0, 150)
    rig.manager.shutdown()
    jobs = [list(call.keys) for call in rig.tier.calls("submit_store")]
    assert jobs == [keys(*part) for part in (range(86, 150), range(22, 86), range(22))], (
        "out of time: the heads are kept"
    )


def test_a_hung_tier_does_not_hold_up_the_end() -> None:
    rig = rig_of(num_blocks=256)
    fill(rig, 0, 200)
    rig.tier.hangs = True
    rig.manager.shutdown()
    assert len(rig.tier.calls("submit_store")) == 1


def test_a_policy_that_cannot_tell_what_goes_next_means_on_store(caplog: pytest.LogCaptureFixture) -> None:
    POLICIES.register("test-fifo", FIFO)
    try:
        rig = rig_of(cache_policy="test-fifo")
    finally:
        POLICIES.unregister("test-fifo")
    assert "cannot name its next victims" in caplog.text
    fill(rig, 0, 3)
    rig.finish()
    assert len(rig.tier.blocks) == 3


@pytest.mark.parametrize("cascade", [[], ["on_store", "on_evict"], ["sometimes"]])
def test_a_mistaken_mode_is_refused(cascade: list[Any]) -> None:
    with pytest.raises(ConfigError, match="on_store, on_evict"):
        Rig(4, cascade=cascade)


@pytest.mark.parametrize("cache_policy", ["lru", "arc", "density"])
def test_every_policy_writes_what_it_evicts(cache_policy: str) -> None:
    rig = rig_of(cache_policy=cache_policy)
    fill(rig, 0, 64)
    rig.manager.touch(keys(*range(0, 64, 2)), None)
    settle(rig)
    for number in range(64, 164):
        fill(rig, number, number + 1)
        settle(rig)
    assert dropped(rig) == 0
    assert len(rig.tier.blocks) >= 100


def test_an_eviction_of_an_unwritten_block_is_counted_for_each_tier_that_lacks_it() -> None:
    rig = Rig(64)
    tiers = [GuardedTier(index, FakeTier(rig.primary.kv_view)) for index in range(2)]
    write_back = WriteBack(rig.primary, tiers, Cascades(rig.primary, TierJobs(tiers), ()))
    write_back.on_reserved(2, keys(1, 2))
    assert write_back.dropped == 4
    assert not write_back.has_queued
    assert [tier.inner.log[0].name for tier in tiers] == ["on_new_request"] * 2
