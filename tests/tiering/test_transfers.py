# SPDX-License-Identifier: Apache-2.0
"""Jobs of a tier: slices, results of parts, backlog and counts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.tiering.store_rig import BLOCK_BYTES, CONTEXT

from kvoffload.lost_blocks import NO_LOSSES
from kvoffload.testing import FaultyStore, ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobMetadata, JobResult
from kvoffload.tiering.health import StoreHealth
from kvoffload.tiering.losses import StoreLosses
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.runner import IoQueue, TierRunner
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.tier import TierLimits
from kvoffload.tiering.transfers import StoreTransfers


def test_a_load_fails_for_the_blocks_alone_that_cannot_be_read(make) -> None:
    rig = make().start()
    keys = keys_of(1, 2, 3, 4)
    rig.store_blocks(keys)
    rig.inner.discard(keys[1:2])
    rig.store.torn = {keys[2]}
    result = rig.load_blocks(keys)
    assert not result.success
    assert set(result.successful_keys) == {keys[0], keys[3]}
    assert rig.read(3) == block_of(keys[3], BLOCK_BYTES)
    assert rig.ask(keys)[0::3] == [True, True]
    assert rig.ask_until_answered(keys)[1] is False
    assert rig.is_in_use


def test_a_store_job_fails_for_the_blocks_alone_that_were_not_written(make) -> None:
    rig = make().start()
    keys = keys_of(1, 2, 3)
    rig.store.lost = {keys[1]}
    result = rig.store_blocks(keys)
    assert set(result.successful_keys) == {keys[0], keys[2]}
    assert rig.resident == {keys[0], keys[2]}


def test_loads_overtake_stores(make) -> None:
    rig = make(limits=TierLimits(threads=1)).start()
    rig.store_blocks(keys_of(1))
    rig.gate.close_gate("write")
    stores = [rig.submit(keys_of(10 + index), [index], load=False) for index in range(3)]
    rig.gate.wait_for_arrivals(1)
    load = rig.submit(keys_of(1), [9], load=True)
    rig.gate.open_gate()
    for job in [*stores, load]:
        rig.wait(job)
    order = [call for call, _ in rig.store.calls if call in ("write", "read_into")]
    assert order == ["write", "write", "read_into", "write", "write"]


class PatientStore(MemoryStore):
    """Likes few large requests."""

    batch_blocks = 100
    requests_in_flight = 1


def test_a_store_declares_its_batches_and_how_many_requests_it_serves_at_once(make) -> None:
    rig = make(num_blocks=256, limits=TierLimits())
    rig.inner = PatientStore(BLOCK_BYTES)
    rig.store = FaultyStore(rig.inner)
    rig.start()
    keys = keys_of(*range(250))
    rig.store_blocks(keys)
    rig.load_blocks(keys)
    for call in ("write", "read_into"):
        assert [len(keys) for name, keys in rig.store.calls if name == call] == [100, 100, 50]
    assert rig.runner.num_threads == 1


def test_the_threads_of_a_tier_overrule_its_store(make) -> None:
    rig = make(limits=TierLimits(threads=3)).start()
    assert rig.store.requests_in_flight == 4
    assert rig.runner.num_threads == 3


def test_bytes_seconds_and_room_are_counted(make) -> None:
    rig = make(max_blocks=8).start()
    assert rig.store_blocks(keys_of(1, 2, 3)).success
    assert rig.load_blocks(keys_of(2, 3)).success
    assert not rig.load_blocks(keys_of(9)).success
    assert rig.stat("tier_io_bytes", "write") == 3 * BLOCK_BYTES
    assert rig.stat("tier_io_bytes", "read") == 2 * BLOCK_BYTES
    stats = rig.tier.get_stats()
    for direction in ("read", "write"):
        batches = {
            sample[3:]: value
            for sample, value in stats.items()
            if sample[:3] == ("tier_batch_seconds", "mem", direction)
        }
        total = sum(value for (part, _), value in batches.items() if part == "sum")
        assert total == pytest.approx(stats["tier_io_seconds", "mem", direction])
        # Two threads share a job of several blocks.
        num_calls = len(
            [call for call in rig.store.calls if call[0] == ("read_into" if direction == "read" else "write")]
        )
        assert sum(value for (part, _), value in batches.items() if part == "count") == num_calls
    assert rig.stat("tier_quota_bytes") == 8 * BLOCK_BYTES
    assert rig.stat("tier_free_bytes") == 5 * BLOCK_BYTES


def test_work_that_is_queued_for_too_long_is_cancelled(make) -> None:
    rig = make(limits=TierLimits(threads=1, timeout_s=10)).start()
    rig.gate.close_gate("write")
    rig.submit(keys_of(1), [1], load=False)
    rig.gate.wait_for_arrivals(1)
    store = rig.submit(keys_of(2), [2], load=False)
    rig.clock.advance(11)
    assert not rig.wait(store).success
    assert rig.stat("tier_dropped_blocks") == 1


def test_memory_with_gaps_between_its_rows(make) -> None:
    rig = make()
    backing = np.zeros((8, 2 * BLOCK_BYTES), np.uint8)
    rig.view.release()
    rig.view = memoryview(backing[:, :BLOCK_BYTES])
    rig.start()
    (key,) = keys_of(1)
    backing[3, :BLOCK_BYTES] = np.frombuffer(block_of(key, BLOCK_BYTES), np.uint8)
    assert rig.wait(rig.submit([key], [3], load=False)).success
    assert rig.wait(rig.submit([key], [6], load=True)).success
    assert bytes(backing[6, :BLOCK_BYTES]) == block_of(key, BLOCK_BYTES)
    assert not backing[:, BLOCK_BYTES:].any()


def test_a_slice_has_four_mebibytes_at_most() -> None:
    block_bytes, clock, keys = 1 << 20, ManualClock(), keys_of(*range(6))
    store, index = FaultyStore(MemoryStore(block_bytes)), PresenceIndex("mem", 100)
    runner = TierRunner("mem", 1, timeout_s=10, clock=clock)
    reads, writes = (StoreHealth("mem", direction, runner, clock) for direction in ("read", "write"))
    losses = StoreLosses("mem", store, index, NO_LOSSES, server_evicts=False, clock=clock)
    view = memoryview(np.zeros((6, block_bytes), np.uint8))
    transfers = StoreTransfers("mem", view, store, index, runner, losses, reads=reads, writes=writes)
    transfers.submit_store(JobMetadata(1, keys, np.arange(6), False, CONTEXT))
    assert transfers.is_pending
    assert not runner.backlog(IoQueue.STORE)
    transfers.submit_stores()
    assert runner.drain(60)
    for result in runner.take_results():
        result.task.on_result(result)
    assert [len(written) for call, written in store.calls if call == "write"] == [4, 2]
    assert transfers.take_results() == [JobResult(1, True)]
    assert not transfers.is_pending
    assert runner.shutdown(30) == 0


def gathered(rig, jobs) -> list[int]:
    """Submit jobs with these keys in one step, each in its own slots, and return their ids."""
    ids, slot = [], 0
    for keys in jobs:
        rig.fill(range(slot, slot + len(keys)), keys)
        rig.tier.submit_store(JobMetadata(1000 + len(ids), keys, np.arange(slot, slot + len(keys)), False, CONTEXT))
        ids.append(1000 + len(ids))
        slot += len(keys)
    return ids


def writes_of(rig) -> list[list]:
    return [list(keys) for call, keys in rig.store.calls if call == "write"]


def test_the_stores_of_a_step_are_one_call_and_each_job_has_its_own_result(make) -> None:
    rig = make().start()
    jobs = [keys_of(1), keys_of(2, 3), keys_of(4), keys_of(5, 6)]
    rig.store.lost = set(keys_of(3, 4))
    ids = gathered(rig, jobs)
    assert rig.tier.has_pending_work()
    assert not rig.tier.get_finished_jobs()
    assert not writes_of(rig), "nothing begins before the step ends"
    assert rig.stat("tier_queued_jobs") == 4
    results = [rig.wait(job) for job in ids]
    assert writes_of(rig) == [keys_of(*range(1, 7))]
    assert [result.success for result in results] == [True, False, False, True]
    assert list(results[1].successful_keys) == keys_of(2)
    assert results[2].successful_keys is None
    assert rig.ask_until_answered(keys_of(1, 2))[:2] == [True, True]
    assert rig.stat("tier_queued_jobs") == 0


def test_a_call_that_fails_fails_the_jobs_that_have_blocks_in_it(make) -> None:
    rig = make(num_blocks=256, limits=TierLimits(threads=1)).start()
    rig.gate.close_gate("write")
    jobs = gathered(rig, [keys_of(*range(60)), keys_of(*range(60, 70)), keys_of(*range(70, 80))])
    rig.tier.on_schedule_end()
    rig.gate.wait_for_arrivals(1)
    rig.gate.open_gate()
    rig.store.broken = {"write": OSError("gone")}  # from the second call on
    results = [rig.wait(job) for job in jobs]
    assert [len(keys) for keys in writes_of(rig)] == [64, 16]
    assert [result.success for result in results] == [True, False, False]
    assert list(results[1].successful_keys) == keys_of(60, 61, 62, 63)


def test_a_block_that_two_jobs_of_a_step_store_is_in_two_calls(make) -> None:
    rig = make().start()
    jobs = gathered(rig, [keys_of(1, 2), keys_of(2, 3)])
    assert all(rig.wait(job).success for job in jobs)
    assert sorted(writes_of(rig)) == [keys_of(1, 2), keys_of(2, 3)]


@pytest.mark.parametrize("end", ["drain_jobs", "shutdown"])
def test_what_was_gathered_is_written_before_a_drain_ends(make, end: str) -> None:
    rig = make().start()
    job = gathered(rig, [keys_of(1)])[0]
    getattr(rig.tier, end)()
    assert writes_of(rig) == [keys_of(1)]
    assert [result.job_id for result in rig.tier.get_finished_jobs()] == [job]


def test_in_any_mixture_each_job_ends_once_with_the_outcomes_of_its_blocks(make) -> None:
    rng = random.Random(5)
    rig = make(num_blocks=256, limits=TierLimits(threads=2)).start()
    rig.store.lost = set(keys_of(*range(0, 10_000, 7)))
    expected: dict[int, set] = {}
    next_key = 0
    for _ in range(20):
        jobs = [
            keys_of(*range(next_key + 10 * n, next_key + 10 * n + rng.randint(1, 10)))
            for n in range(rng.randint(1, 12))
        ]
        next_key += 200
        for job, keys in zip(gathered(rig, jobs), jobs):
            expected[job] = set(keys) - rig.store.lost
        rig.until(lambda: expected.keys() <= rig.results.keys())
        for (job, good), keys in zip(expected.items(), jobs):
            result = rig.results.pop(job)
            assert result.success == (good == set(keys))
            assert set(result.successful_keys or (keys if result.success else ())) == good
        expected.clear()
