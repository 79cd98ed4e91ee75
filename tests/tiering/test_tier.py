# SPDX-License-Identifier: Apache-2.0
"""StoreTier over real stores that are late, broken, hung or lossy. No call reaches them on the scheduler's thread."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.errors import StoreError
from kvoffload.lost_blocks import LostBlocks
from kvoffload.testing import FaultyStore, GatedStore, ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobMetadata, JobResult
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.runner import IoQueue
from kvoffload.tiering.stores.base import BlockStore, StoreStats
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.wrappers import StoreWrapper
from kvoffload.tiering.tier import StoreTier, TierLimits

BLOCK_BYTES = 64


class Region:
    """Memory for a primary tier."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def create_kv_memoryview(self) -> memoryview:
        return self._view


CONTEXT = ReqContext("r")


class Rig:
    """A tier over a faulty, gated ``MemoryStore``, and memory whose slots the tests fill and read."""

    def __init__(self, num_blocks: int = 64, limits: TierLimits | None = None, max_blocks: int = 1000, **options):
        self.memory = bytearray(num_blocks * BLOCK_BYTES)
        self.view = memoryview(self.memory).cast("B", (num_blocks, BLOCK_BYTES))
        self.clock = ManualClock()
        self.inner = MemoryStore(BLOCK_BYTES, max_blocks * BLOCK_BYTES)
        self.gate = GatedStore(self.inner)
        self.store = FaultyStore(self.gate)
        self.limits = limits or TierLimits(threads=2, drain_timeout_s=5.0)
        self.options = options
        self.results: dict[int, JobResult] = {}
        self.resident: set[OffloadKey] = set()
        self._last_id = 0

    def start(self) -> Rig:
        self.tier = StoreTier(self.view, "mem", self.store, self.limits, clock=self.clock, **self.options)
        return self

    def fill(self, slots: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            self.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = block_of(key, BLOCK_BYTES)

    def read(self, slot: int) -> bytes:
        return bytes(self.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES])

    def below(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.write(keys, [memoryview(block_of(key, BLOCK_BYTES)) for key in keys])

    def submit(self, keys: Sequence[OffloadKey], slots: Sequence[int], *, load: bool) -> int:
        self._last_id += 1
        job = JobMetadata(self._last_id, keys, np.asarray(slots, np.int64), load, CONTEXT)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return job.job_id

    def store_blocks(self, keys: Sequence[OffloadKey]) -> JobResult:
        self.fill(range(len(keys)), keys)
        return self.wait(self.submit(keys, range(len(keys)), load=False))

    def load_blocks(self, keys: Sequence[OffloadKey]) -> JobResult:
        return self.wait(self.submit(keys, range(len(keys)), load=True))

    def step(self) -> None:
        self.tier.on_schedule_end()
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self.results, "a job ended twice"
            self.results[result.job_id] = result
        for event in self.tier.take_events():
            for key in event.keys:
                assert (key in self.resident) == event.removed, "an event without a change"
            self.resident = self.resident - set(event.keys) if event.removed else self.resident | set(event.keys)

    def until(self, condition: Callable[[], bool]) -> None:
        """Steps until ``condition``. The threads are real, so that only a hang takes long."""
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "the tier hangs"
            self.step()
            time.sleep(0.001)

    def wait_for_results(self) -> None:
        """Waits until the result of a submitted lookup or load, if there is any, can be taken, and does not take it."""
        runner, end = self.tier._runner, time.monotonic() + 120
        while not runner.ended and runner.backlog(IoQueue.LOOKUP) + runner.backlog(IoQueue.LOAD):
            assert time.monotonic() < end, "the store hangs"
            time.sleep(0.001)

    def wait(self, job_id: int) -> JobResult:
        self.until(lambda: job_id in self.results)
        return self.results[job_id]

    def ask(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        return [self.tier.lookup(key, CONTEXT) for key in keys]

    def ask_until_answered(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        self.until(lambda: None not in self.ask(keys))
        return self.ask(keys)

    def stat(self, name: str, *labels: str) -> float:
        return self.tier.get_stats()[(name, "mem", *labels)]

    @property
    def is_in_use(self) -> bool:
        return self.stat("tier_healthy") == 1


class Panic(BaseException):
    """As a native client raises it: no ``Exception``."""


class PanickingStore(StoreWrapper):
    """Panics in one method, while ``method`` names it."""

    method = ""

    def __getattribute__(self, name: str) -> Any:
        return self.panic if name == super().__getattribute__("method") else super().__getattribute__(name)

    def panic(self, *arguments: object) -> Any:
        raise Panic(self.method)


class Uncounted(StoreWrapper):
    """Only the server knows what it has."""

    def stats(self) -> StoreStats:
        return StoreStats()


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs = []
    before = set(threading.enumerate())

    def make(**options) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.gate.open_gate()
        rig.tier.shutdown()
        gc.collect()
        rig.view.release()  # raises if a thread or a job still refers to it
    deadline = time.monotonic() + 120
    while left := [t for t in threading.enumerate() if t not in before]:
        assert time.monotonic() < deadline, f"threads left behind: {left}"
        time.sleep(0.01)


def test_blocks_are_stored_and_loaded(make) -> None:
    rig = make().start()
    keys = keys_of(*range(20))
    assert rig.store_blocks(keys) == JobResult(1, True, None)
    rig.memory[:] = bytes(len(rig.memory))
    assert rig.ask(keys) == [True] * 20
    assert rig.load_blocks(keys).success
    assert [rig.read(slot) for slot in range(20)] == [block_of(key, BLOCK_BYTES) for key in keys]
    assert rig.resident == set(keys)
    assert rig.stat("tier_blocks_stored") == rig.stat("tier_blocks_loaded") == rig.stat("tier_blocks") == 20


def test_the_store_is_only_called_from_the_tiers_threads(make) -> None:
    rig = make().start()
    keys = keys_of(*range(8))
    rig.store_blocks(keys)
    rig.ask_until_answered(keys_of(100))
    rig.load_blocks(keys)
    rig.tier.touch(keys)
    rig.clock.advance(5)
    rig.step()
    rig.tier.drain_jobs()
    rig.until(lambda: any(call == "touch" for call, _ in rig.store.calls))
    assert rig.gate.threads
    assert threading.get_ident() not in rig.gate.threads


def test_each_unknown_key_is_asked_for_once_and_in_one_batch(make) -> None:
    rig = make()
    rig.gate.close_gate("scan", "contains")
    rig.below(keys_of(1, 2))
    rig.start()
    asked = keys_of(1, 2, 3, 4)
    for _ in range(3):
        assert rig.ask(asked) == [None] * 4
        rig.step()
    rig.gate.open_gate("contains")
    assert rig.ask_until_answered(asked) == [True, True, False, False]
    for _ in range(5):
        rig.step()
        assert rig.ask(asked) == [True, True, False, False]
    assert [keys for call, keys in rig.store.calls if call == "contains"] == [tuple(asked)]


def test_a_lookup_is_answered_once_the_store_has_answered(make) -> None:
    rig = make()
    rig.gate.close_gate("scan")
    rig.below(keys_of(1))
    rig.start()
    assert rig.ask(keys_of(1, 2)) == [None, None]
    rig.tier.on_schedule_end()
    rig.wait_for_results()
    assert rig.ask(keys_of(1, 2)) == [True, False], "without another step"
    assert rig.resident == set()
    rig.step()
    assert rig.resident == set(keys_of(1))


def test_a_lookup_that_takes_in_the_last_failure_is_a_miss(make) -> None:
    rig = make()
    rig.gate.close_gate("scan")
    rig.start()
    rig.store.broken = {"contains": StoreError("no")}
    for number in range(3):
        assert rig.ask(keys_of(number)) == [None]
        rig.step()
        rig.wait_for_results()
    assert rig.ask(keys_of(2)) == [False]
    assert not rig.is_in_use
    assert rig.stat("tier_lookups", "miss") == 1


def test_a_block_that_a_request_peeks_at_and_looks_up_counts_once(make) -> None:
    rig = make(exclusive=True)
    rig.below(keys_of(1, 2))
    rig.start()
    rig.until(lambda: rig.stat("tier_blocks") == 2 and rig.tier._scan_is_done)
    primary = CPUPrimaryTierOffloadingManager(64, Region(rig.view))
    manager = TieringOffloadingManager(primary, [rig.tier], clock=rig.clock)
    manager.on_new_request(CONTEXT)
    asked = keys_of(1, 2, 3)
    assert manager.peek(asked, CONTEXT) == [True, True, False]
    assert manager.lookup_prefix(asked, CONTEXT) == [None, None, False]
    assert [rig.stat("tier_lookups", answer) for answer in ("hit", "miss", "pending")] == [2, 1, 0]


def test_a_request_with_a_block_in_the_store_is_put_off_twice(make) -> None:
    """In the step that asks the store, and in the step that promotes the block."""
    rig = make()
    rig.gate.close_gate("scan")
    (key,) = keys_of(1)
    rig.below([key])
    rig.start()
    primary = CPUPrimaryTierOffloadingManager(64, Region(rig.view))
    manager = TieringOffloadingManager(primary, [rig.tier], clock=rig.clock)
    manager.on_new_request(CONTEXT)
    answers = []
    while not answers or answers[-1] is None:
        answers.append(manager.lookup(key, CONTEXT))
        manager.on_schedule_end()
        if answers[-1] is None:
            rig.wait_for_results()
    assert answers == [None, None, True]
    (slot,) = manager.prepare_load([key], CONTEXT).block_ids.tolist()
    assert rig.read(slot) == block_of(key, BLOCK_BYTES)


def test_absent_keys_are_asked_for_again_in_the_background(make) -> None:
    rig = make().start()
    (key,) = keys_of(5)
    assert rig.ask_until_answered([key]) == [False]
    rig.below([key])  # by another process
    rig.clock.advance(2)
    assert rig.ask([key]) == [False]
    rig.until(lambda: rig.ask([key]) == [True])


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_restart_serves_hits_before_and_after_its_scan(make, exclusive: bool) -> None:
    rig = make(exclusive=exclusive)
    rig.gate.close_gate("scan")
    keys = keys_of(*range(30))
    rig.below(keys)
    rig.start()
    assert rig.ask_until_answered(keys[:3]) == [True] * 3
    rig.gate.open_gate("scan")
    rig.until(lambda: rig.stat("tier_blocks") == 30)
    assert rig.ask(keys) == [True] * 30
    assert rig.resident == set(keys)


def test_an_exclusive_tier_answers_absent_keys_at_once(make) -> None:
    rig = make(exclusive=True)
    rig.below(keys_of(1))
    rig.start()
    rig.until(lambda: rig.stat("tier_blocks") == 1 and rig.tier._scan_is_done)
    assert rig.ask(keys_of(1, 2)) == [True, False]


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


def test_corruption_is_logged_once_a_minute(make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = make()
    rig.store = FileSystemStore(tmp_path, BLOCK_BYTES)
    rig.start()
    keys = keys_of(*range(3))
    rig.store_blocks(keys)
    for path in tmp_path.rglob("*.kvb"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    # One block a job: the blocks of a job may be read by several threads, each of which counts.
    rig.load_blocks(keys[:1])
    assert "'mem' found corrupt blocks" in caplog.text
    assert "1 since its start" in caplog.text
    assert keys[0].hex() in caplog.text
    assert str(tmp_path) in caplog.text
    rig.load_blocks(keys[1:2])
    rig.load_blocks([*keys[:2], *keys_of(99)])  # absent is not corrupt
    assert len(caplog.records) == 1
    rig.clock.advance(61)
    rig.load_blocks(keys_of(99))
    assert len(caplog.records) == 1
    rig.load_blocks(keys[2:3])
    assert "3 since its start" in caplog.records[-1].getMessage()
    assert "(1 earlier warnings were not logged)" in caplog.records[-1].getMessage()


def test_a_store_job_fails_for_the_blocks_alone_that_were_not_written(make) -> None:
    rig = make().start()
    keys = keys_of(1, 2, 3)
    rig.store.lost = {keys[1]}
    result = rig.store_blocks(keys)
    assert set(result.successful_keys) == {keys[0], keys[2]}
    assert rig.resident == {keys[0], keys[2]}


def test_blocks_that_the_store_evicts_are_removed(make) -> None:
    rig = make(max_blocks=10).start()
    for start in range(0, 40, 5):
        rig.store_blocks(keys_of(*range(start, start + 5)))
    rig.until(lambda: len(rig.resident) == 10)
    assert rig.resident == {key for batch in rig.inner.scan() for key in batch}
    assert rig.stat("tier_evicted_blocks") == 30


def test_losses_are_recorded_with_their_causes(make) -> None:
    rig = make(max_blocks=2).start()
    lost = rig.tier._lost_blocks = LostBlocks(clock=rig.clock)

    def causes(keys: Sequence[OffloadKey]) -> list[str | None]:
        return [loss and loss.cause for loss in lost.find(keys)]

    for number in (1, 2, 3):
        rig.store_blocks(keys_of(number))
    assert causes(keys_of(1, 2, 3)) == ["evicted mem", None, None]
    assert rig.tier.holds(keys_of(1, 2, 3)) == [False, True, True]
    rig.load_blocks(keys_of(1))
    assert causes(keys_of(1)) == ["evicted mem"], "a read that comes too late does not make it somebody else's deletion"
    rig.inner.discard(keys_of(2))
    rig.load_blocks(keys_of(2))
    assert causes(keys_of(2)) == ["removed mem"]


def test_what_a_server_with_a_policy_of_its_own_no_longer_has_was_evicted(make) -> None:
    class ServerLimits(TierLimits, frozen=True, kw_only=True):
        server_evicts = True

    rig = make(limits=ServerLimits()).start()
    lost = rig.tier._lost_blocks = LostBlocks(clock=rig.clock)
    rig.store_blocks(keys_of(1, 2))
    rig.inner.discard(keys_of(1))
    rig.load_blocks(keys_of(1))
    assert [loss and loss.cause for loss in lost.find(keys_of(1, 2))] == ["evicted mem", None]


def test_a_block_evicted_by_the_next_of_its_own_job_is_not_present(make) -> None:
    rig = make(max_blocks=1, limits=TierLimits(threads=2)).start()
    keys = keys_of(1, 2)
    rig.fill(range(2), keys)
    rig.submit(keys, range(2), load=False)  # a slice each
    rig.tier.drain_jobs()  # so that one step takes in both results and the eviction between them
    rig.step()
    assert rig.resident == {key for batch in rig.inner.scan() for key in batch}
    assert len(rig.resident) == 1


def test_an_eviction_queued_while_results_are_taken_is_not_lost(make, monkeypatch) -> None:
    rig = make(max_blocks=1).start()
    rig.store_blocks(keys_of(1))
    rig.until(lambda: not rig.tier._runner.num_open_slices)
    rig.gate.close_gate("write")
    rig.submit(keys_of(2), [2], load=False)
    rig.gate.wait_for_arrivals(1)
    take_results = rig.tier._runner.take_results

    def finish_and_take():
        rig.gate.open_gate()
        assert rig.tier._runner.drain(30)
        return take_results()

    with monkeypatch.context() as patch:
        patch.setattr(rig.tier._runner, "take_results", finish_and_take)
        assert [result.success for result in rig.tier.get_finished_jobs()] == [True]
    assert rig.stat("tier_blocks") == 2, "the eviction came when evictions had been taken in"
    rig.step()
    assert rig.resident == set(keys_of(2))


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
    rig = make(num_blocks=256, limits=TierLimits(max_backlog_blocks=256))
    rig.inner = PatientStore(BLOCK_BYTES)
    rig.store = FaultyStore(rig.inner)
    rig.start()
    keys = keys_of(*range(250))
    rig.store_blocks(keys)
    rig.load_blocks(keys)
    for call in ("write", "read_into"):
        assert [len(keys) for name, keys in rig.store.calls if name == call] == [100, 100, 50]
    assert rig.tier._runner.num_threads == 1


def test_the_threads_of_a_tier_overrule_its_store(make) -> None:
    rig = make(limits=TierLimits(threads=3)).start()
    assert rig.store.requests_in_flight == 4
    assert rig.tier._runner.num_threads == 3


def test_the_backlog_is_bounded_and_drops_are_counted(make) -> None:
    rig = make(limits=TierLimits(threads=1, max_backlog_blocks=4)).start()
    rig.gate.close_gate("write")
    first = rig.submit(keys_of(0, 1, 2), [0, 1, 2], load=False)
    second = rig.submit(keys_of(3, 4, 5), [3, 4, 5], load=False)
    third = rig.submit(keys_of(6), [6], load=False)
    assert not rig.wait(third).success
    assert rig.stat("tier_queued_blocks", "store") == 4
    rig.gate.open_gate()
    assert rig.wait(first).success
    assert set(rig.wait(second).successful_keys) == set(keys_of(3))
    assert rig.stat("tier_queued_blocks", "store") == 0
    assert rig.stat("tier_dropped_blocks") == 3
    assert rig.store_blocks(keys_of(8)).success


def test_the_bytes_of_a_store_that_counts_none_are_those_of_its_known_blocks(make) -> None:
    rig = make()
    rig.store = store = Uncounted(rig.store)
    rig.start()
    assert rig.store_blocks(keys_of(1, 2, 3)).success
    assert store.stats().used_bytes is None
    assert rig.stat("tier_bytes") == 3 * BLOCK_BYTES
    assert rig.stat("tier_free_bytes") == math.inf


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


def test_failing_reads_turn_reads_alone_off_until_a_probe_succeeds(make) -> None:
    rig = make().start()
    keys = keys_of(1, 2, 3)
    rig.store_blocks(keys)
    rig.store.broken = {"read_into": StoreError("no"), "contains": StoreError("no")}
    for _ in range(3):
        assert not rig.load_blocks(keys[:1]).success
    assert not rig.is_in_use
    assert rig.ask(keys) == [False] * 3
    assert not rig.load_blocks(keys).success
    num_calls = len(rig.store.calls)
    assert rig.store_blocks(keys_of(4)).success, "writes still work"
    assert len(rig.store.calls) == num_calls + 1, "the tier makes no call of a store that it does not use"
    rig.clock.advance(1.5)  # a probe goes through, and fails
    rig.until(lambda: rig.store.calls[-1][0] == "contains")
    rig.until(lambda: not rig.tier._runner.num_open_slices)
    rig.store.broken = {}
    rig.clock.advance(1.5)
    rig.step()
    assert not rig.is_in_use, "the next probe comes after twice the time"
    rig.clock.advance(1.0)
    rig.until(lambda: rig.is_in_use)
    assert rig.ask(keys) == [True] * 3
    assert rig.load_blocks(keys).success


def test_one_line_when_a_tier_goes_off_and_one_when_it_comes_back(make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make().start()
    with caplog.at_level(logging.INFO):
        rig.store_blocks(keys_of(1, 2))
        rig.load_blocks(keys_of(1, 2))
        rig.ask_until_answered(keys_of(1, 9))
        assert not caplog.records, "nothing in the steady state"
        rig.store.broken = {"read_into": OSError(errno.EIO, "the disk is gone")}
        for _ in range(5):
            rig.load_blocks(keys_of(1))
        rig.store.broken = {}
        rig.clock.advance(2)
        rig.until(lambda: rig.is_in_use)
    off, on = (record.getMessage() for record in caplog.records)
    assert off.startswith("Tier 'mem' is not used for reading until it recovers:")
    assert on.startswith("Tier 'mem' is used for reading again. It was off:")
    assert "the disk is gone" in off
    assert "the disk is gone" in on


def test_failing_lookups_become_misses(make) -> None:
    rig = make().start()
    rig.store.broken = {"contains": OSError("gone")}
    for number in range(3):
        (key,) = keys_of(number)
        assert rig.ask([key]) == [None]
        rig.until(lambda: not rig.tier._index.is_asking)
    assert rig.ask(keys_of(1, 7)) == [False, False]
    rig.store.broken = {}
    rig.clock.advance(2)
    rig.until(lambda: rig.is_in_use)
    assert rig.ask_until_answered(keys_of(7)) == [False]


def test_lookups_that_succeed_do_not_hide_that_every_load_fails(make) -> None:
    rig = make().start()
    rig.store_blocks(keys_of(1, 2, 3))
    rig.store.broken = {"read_into": StoreError("GET failed: 503")}
    for number in (1, 2, 3):
        assert rig.is_in_use
        assert rig.ask_until_answered(keys_of(100 + number)) == [False]
        assert not rig.load_blocks(keys_of(number)).success
    assert not rig.is_in_use
    rig.store.broken = {}
    rig.clock.advance(2)
    rig.until(lambda: rig.is_in_use)


def test_failures_far_apart_do_not_add_up_although_no_load_was_tried_since(make) -> None:
    rig = make().start()
    rig.store_blocks(keys_of(1))
    rig.store.broken = {"read_into": StoreError("GET failed: 503")}
    assert not rig.load_blocks(keys_of(1)).success
    for number in range(4):
        rig.store.broken = {"contains": OSError("gone")}
        assert rig.ask(keys_of(200 + number)) == [None]
        rig.until(lambda: not rig.tier._index.is_asking)
        assert rig.is_in_use
        rig.store.broken = {}
        assert rig.ask_until_answered(keys_of(100 + number)) == [False]


def test_failing_writes_are_dropped_until_one_job_gets_through(make) -> None:
    rig = make().start()
    rig.store_blocks(keys_of(1))
    rig.store.broken = {"write": OSError(28, "No space left on device")}
    for number in range(10, 13):
        assert not rig.store_blocks(keys_of(number)).success
    calls = len(rig.store.calls)
    assert not rig.store_blocks(keys_of(20, 21)).success
    assert len(rig.store.calls) == calls
    assert rig.stat("tier_dropped_blocks") == 2
    assert rig.ask(keys_of(1)) == [True], "a full disk still reads"
    assert rig.load_blocks(keys_of(1)).success
    assert [rig.stat("tier_breaker_open", direction) for direction in ("read", "write")] == [0, 1]
    assert [rig.stat("tier_breaker_trips", direction) for direction in ("read", "write")] == [0, 1]
    tripped_s = rig.stat("tier_breaker_last_trip_timestamp_seconds", "write", "ENOSPC")
    assert 0 <= time.time() - tripped_s < 3600, "in Unix time"
    rig.store.broken = {}
    rig.clock.advance(2)
    keys = keys_of(*range(30, 34))
    assert set(rig.store_blocks(keys).successful_keys) == set(keys[:2]), "the first slice is the probe"
    assert rig.is_in_use
    assert rig.store_blocks(keys).success


def test_a_tier_that_stays_off_for_another_reason_says_so(make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make().start()

    def probe(error: OSError) -> dict[str, float]:
        rig.store.broken = {"write": error}
        rig.clock.advance(100)
        assert not rig.store_blocks(keys_of(9)).success
        name = "tier_breaker_last_trip_timestamp_seconds", "mem", "write"
        return {sample[3]: value for sample, value in rig.tier.get_stats().items() if sample[:3] == name}

    for _ in range(3):
        since_s = probe(OSError(errno.ENOSPC, "No space left on device"))
    assert probe(OSError(errno.ENOSPC, "No space left on device")) == since_s
    now_s = probe(OSError(errno.ENOENT, "No such file or directory"))
    assert now_s["ENOENT"] >= since_s["ENOSPC"] == now_s["ENOSPC"]
    assert probe(OSError(errno.ENOENT, "No such file or directory")) == now_s
    rig.store.broken = {}
    rig.clock.advance(100)
    assert rig.store_blocks(keys_of(9)).success
    assert [record.getMessage() for record in caplog.records] == [
        "Tier 'mem' is not used for writing until it recovers: [Errno 28] No space left on device",
        "Tier 'mem' is still not used for writing: [Errno 2] No such file or directory",
        "Tier 'mem' is used for writing again. It was off: [Errno 2] No such file or directory",
    ]
    assert rig.stat("tier_breaker_trips", "write") == 1


def test_a_hung_load_has_no_result_and_turns_reads_off_until_it_ends(make) -> None:
    rig = make(limits=TierLimits(threads=1, timeout_s=10)).start()
    rig.store_blocks(keys_of(1, 2))
    rig.gate.close_gate("read_into")
    hung = rig.submit(keys_of(1), [5], load=True)
    rig.gate.wait_for_arrivals(1)
    queued = rig.submit(keys_of(2), [6], load=True)
    rig.clock.advance(11)
    assert not rig.wait(queued).success, "what is queued is cancelled"
    assert rig.ask(keys_of(1, 2)) == [False, False]
    assert not rig.load_blocks(keys_of(2)).success
    assert rig.stat("tier_breaker_last_trip_timestamp_seconds", "read", "hang") > 0
    for _ in range(20):
        rig.clock.advance(60)
        rig.step()
    assert hung not in rig.results, "its slot may still be written"
    assert rig.read(5) == bytes(BLOCK_BYTES)
    rig.gate.open_gate()
    assert rig.wait(hung).success
    assert rig.read(5) == block_of(keys_of(1)[0], BLOCK_BYTES)
    assert rig.is_in_use
    assert rig.ask(keys_of(1, 2)) == [True, True]


def test_a_hung_write_leaves_reads_alone(make) -> None:
    rig = make(limits=TierLimits(threads=2, timeout_s=10)).start()
    rig.store_blocks(keys_of(1))
    rig.gate.close_gate("write")
    hung = rig.submit(keys_of(2), [2], load=False)
    rig.gate.wait_for_arrivals(1)
    rig.clock.advance(11)
    rig.until(lambda: not rig.is_in_use)
    assert rig.load_blocks(keys_of(1)).success
    rig.clock.advance(1000)
    assert not rig.store_blocks(keys_of(3)).success, "the hung call is its own probe"
    assert hung not in rig.results
    rig.gate.open_gate()
    assert rig.wait(hung).success
    assert rig.store_blocks(keys_of(3)).success


def test_work_that_is_queued_for_too_long_is_cancelled(make) -> None:
    rig = make(limits=TierLimits(threads=1, timeout_s=10)).start()
    rig.gate.close_gate("write")
    rig.submit(keys_of(1), [1], load=False)
    rig.gate.wait_for_arrivals(1)
    store = rig.submit(keys_of(2), [2], load=False)
    rig.clock.advance(11)
    assert not rig.wait(store).success
    assert rig.stat("tier_dropped_blocks") == 1


def test_a_drain_waits_for_results(make) -> None:
    rig = make().start()
    keys = keys_of(*range(40))
    rig.fill(range(40), keys)
    job = rig.submit(keys, range(40), load=False)
    rig.tier.drain_jobs()
    assert rig.inner.contains(keys) == [True] * 40
    assert [result.job_id for result in rig.tier.get_finished_jobs()] == [job]


def test_drain_and_shutdown_with_a_hung_store_are_bounded(make, caplog) -> None:
    rig = make(limits=TierLimits(threads=1, drain_timeout_s=0.05)).start()
    rig.gate.close_gate("write")
    rig.submit(keys_of(1), [0], load=False)
    rig.gate.wait_for_arrivals(1)
    queued = rig.submit(keys_of(2), [1], load=False)
    rig.tier.drain_jobs()
    rig.step()
    assert set(rig.results) == {queued}, "cancelled; the other still runs"
    rig.tier.shutdown()
    assert "hang in the store" in caplog.text
    rig.gate.open_gate()
    rig.until(lambda: not any(t.is_alive() for t in rig.tier._runner._threads))


def test_a_tier_asks_for_whole_requests_if_its_policy_says_so(make) -> None:
    rig = make(offload_policy=OffloadPolicy.REQUEST_LEVEL).start()
    assert rig.tier.on_new_request(CONTEXT).policy is OffloadPolicy.REQUEST_LEVEL


def test_touches_reach_the_store_together_and_rarely(make) -> None:
    rig = make().start()
    rig.until(lambda: not rig.tier._runner.num_open_slices)
    for _ in range(10):
        rig.tier.touch(keys_of(1, 2, 3))
        rig.step()
        rig.until(lambda: not rig.tier._runner.num_open_slices)

    def touches() -> int:
        return sum(call == ("touch", tuple(keys_of(1, 2, 3))) for call in rig.store.calls)

    assert touches() == 1
    rig.clock.advance(1.5)
    rig.until(lambda: touches() == 10)


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


@pytest.mark.parametrize("method", ["contains", "write", "read_into", "scan", "touch", "take_lost", "close"])
def test_a_panic_in_a_store_ends_the_job_and_not_the_thread(
    make, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    rig.store = panicking = PanickingStore(rig.store)
    panicking.method = method
    rig.start()
    keys = keys_of(1, 2)
    with caplog.at_level(logging.WARNING):
        stored = rig.store_blocks(keys)
        assert stored.success is (method not in ("write", "take_lost"))
        assert rig.ask_until_answered(keys_of(50)) == [False]
        if stored.success:
            # Lookups that panic again and again turn reading off.
            assert rig.load_blocks(keys).success is (method not in ("contains", "read_into", "take_lost"))
        rig.tier.touch(keys)
        rig.clock.advance(2)
        rig.until(lambda: not rig.tier._runner.num_open_slices)
        if method == "close":
            rig.tier.shutdown()
            assert "failed to close" in caplog.text
            return
    panicking.method = ""
    rig.clock.advance(100)
    rig.until(lambda: rig.is_in_use)
    assert rig.store_blocks(keys_of(7, 8)).success
    assert rig.load_blocks(keys_of(7, 8)).success, "all threads are alive and the tier is in use again"


class StuckOn(StoreWrapper):
    """Calls for blocks in ``stuck`` wait until ``free`` is set."""

    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner)
        self.stuck: set[OffloadKey] = set()
        self.free = threading.Event()
        self.arrived = threading.Semaphore(0)

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        self._pass(keys)
        return self.inner.contains(keys)

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._pass(keys)
        return self.inner.write(keys, blocks)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._pass(keys)
        return self.inner.read_into(keys, blocks)

    def _pass(self, keys: Sequence[OffloadKey]) -> None:
        if self.stuck & set(keys):
            self.arrived.release()
            assert self.free.wait(60)


class TestCallsThatHang:
    @pytest.fixture
    def rig(self, make) -> Iterator[Rig]:
        rig = make(limits=TierLimits(threads=4, timeout_s=10))
        rig.store = StuckOn(rig.store)
        rig.start()
        yield rig
        rig.store.free.set()

    def hang(self, rig: Rig, numbers: Sequence[int], *, load: bool) -> int:
        """Begins a job whose blocks all hang, and waits until they count as hung."""
        keys = keys_of(*numbers)
        rig.store.stuck |= set(keys)
        job = rig.submit(keys, [40 + number for number in numbers], load=load)
        for _ in range(min(len(keys), 4)):
            assert rig.store.arrived.acquire(timeout=30)
        before = rig.tier._runner.num_overdue()
        rig.clock.advance(11)
        rig.until(lambda: rig.tier._runner.num_overdue() == before + len(keys))
        return job

    def test_stores_that_hang_leave_lookups_and_loads_their_threads(self, rig: Rig) -> None:
        rig.store_blocks(keys_of(1))
        hung = self.hang(rig, [10, 11, 12, 13], load=False)
        assert rig.load_blocks(keys_of(1)).success
        assert rig.ask_until_answered(keys_of(20)) == [False]
        assert hung not in rig.results

    def test_a_load_that_hangs_costs_its_thread_and_its_blocks(self, rig: Rig) -> None:
        rig.store_blocks(keys_of(1, 2))
        assert rig.tier.has_pending_work() is False
        hung = self.hang(rig, [2], load=True)
        assert rig.is_in_use
        assert rig.ask(keys_of(1, 2)) == [True, False], "no other call is risked for it"
        assert not rig.tier.has_pending_work(), "an idle engine need not step"
        for _ in range(5):
            assert rig.load_blocks(keys_of(1)).success
        assert hung not in rig.results, "its slot may still be written"
        rig.store.free.set()
        assert rig.wait(hung).success
        assert rig.ask(keys_of(1, 2)) == [True, True]

    def test_the_end_of_a_hung_call_is_pending_work(self, rig: Rig) -> None:
        rig.store_blocks(keys_of(2))
        hung = self.hang(rig, [2], load=True)
        assert not rig.tier.has_pending_work()
        rig.store.free.set()
        end = time.monotonic() + 120
        while not rig.tier.has_pending_work():
            assert time.monotonic() < end
            time.sleep(0.001)
        assert rig.wait(hung).success

    def test_a_lookup_that_hangs_costs_its_thread_and_its_blocks(self, rig: Rig) -> None:
        rig.store_blocks(keys_of(1))
        rig.store.stuck = set(keys_of(30))
        assert rig.ask(keys_of(30)) == [None]
        rig.step()
        assert rig.store.arrived.acquire(timeout=30)
        assert rig.tier.has_pending_work()
        rig.clock.advance(11)
        rig.step()
        assert rig.ask(keys_of(30)) == [False]
        assert not rig.tier.has_pending_work()
        rig.clock.advance(5)
        assert rig.ask_until_answered(keys_of(30, 31)) == [False, False]
        assert rig.load_blocks(keys_of(1)).success
        assert not rig.store.arrived.acquire(blocking=False), "it is not asked for again meanwhile"
        rig.inner.write(keys_of(30), [memoryview(block_of(keys_of(30)[0], BLOCK_BYTES))])
        rig.store.free.set()
        rig.until(lambda: rig.ask(keys_of(30)) == [True])

    def test_when_half_of_the_threads_hang_reading_is_off_until_one_returns(self, rig: Rig) -> None:
        rig.store_blocks(keys_of(1, 2, 3))
        self.hang(rig, [2], load=True)
        assert rig.is_in_use
        self.hang(rig, [3], load=True)
        rig.until(lambda: not rig.is_in_use)
        assert rig.ask(keys_of(1)) == [False]
        assert rig.store_blocks(keys_of(7)).success
        rig.store.free.set()
        rig.until(lambda: rig.is_in_use)
        assert rig.load_blocks(keys_of(1, 2, 3)).success

    def test_a_probe_that_hangs_is_followed_by_another(self, rig: Rig) -> None:
        """Fewer than half of the threads hang, so nothing else would have told the breaker."""
        rig.store_blocks(keys_of(1, 2))
        for direction in ("read", "write"):
            method = "read_into" if direction == "read" else "write"
            rig.store.inner.broken = {method: StoreError("EIO")}
            for number in range(10, 13):
                (rig.load_blocks if direction == "read" else rig.store_blocks)(
                    keys_of(1 if direction == "read" else number)
                )
            assert rig.stat("tier_breaker_open", direction) == 1
            rig.store.inner.broken = {}
            rig.store.stuck = {*keys_of(1, 2, 20)}
            rig.clock.advance(2)
            if direction == "read":
                rig.step()
            else:
                rig.submit(keys_of(20), [40], load=False)
            assert rig.store.arrived.acquire(timeout=30), "the probe"
            rig.clock.advance(11)
            rig.step()
            rig.store.stuck.clear()
            rig.clock.advance(60)
            if direction == "read":
                rig.until(lambda: rig.stat("tier_breaker_open", "read") == 0)
            else:
                assert rig.store_blocks(keys_of(21)).success
        assert rig.tier._runner.num_overdue() == 2
        assert rig.is_in_use

    def test_a_manager_with_hung_jobs_alone_has_no_pending_work(self, rig: Rig) -> None:
        (key,) = keys_of(1)
        rig.below([key])
        rig.store.stuck = {key}
        primary = CPUPrimaryTierOffloadingManager(64, Region(rig.view))
        manager = TieringOffloadingManager(primary, [rig.tier], clock=rig.clock)
        manager.on_new_request(CONTEXT)
        rig.tier._index.add([key])
        assert manager.lookup(key, CONTEXT) is None
        manager.on_schedule_end()
        assert rig.store.arrived.acquire(timeout=30)
        assert manager.has_pending_work()
        rig.clock.advance(11)
        manager.on_schedule_end()
        assert manager.lookup(key, CONTEXT) is False, "its patience has ended"
        assert not manager.has_pending_work()
        rig.store.free.set()
        end = time.monotonic() + 120
        while not manager.lookup(key, CONTEXT):
            assert time.monotonic() < end
            manager.on_schedule_end()
            time.sleep(0.001)


class BadBlock(StoreWrapper):
    """Raises whenever one of ``bad`` is read, as a careless store does for an unreadable file."""

    bad: frozenset[OffloadKey] = frozenset()

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        if self.bad & set(keys):
            raise OSError(errno.EIO, "Input/output error")
        return self.inner.read_into(keys, blocks)


def test_a_probe_does_not_depend_on_the_block_that_failed(make) -> None:
    rig = make()
    rig.store = store = BadBlock(rig.store)
    rig.start()
    keys = keys_of(1, 2)
    rig.store_blocks(keys)
    store.bad = frozenset(keys[:1])
    for _ in range(3):
        assert not rig.load_blocks(keys[:1]).success
    assert not rig.is_in_use
    rig.clock.advance(2)
    rig.until(lambda: rig.is_in_use)
    assert rig.load_blocks(keys[1:]).success


def test_a_probe_fails_while_no_block_can_be_read(make) -> None:
    rig = make()
    rig.store = store = BadBlock(rig.store)
    rig.start()
    keys = keys_of(1, 2, 3)
    rig.store_blocks(keys)
    store.bad = frozenset(keys)
    for _ in range(3):
        assert not rig.load_blocks(keys[:1]).success
    for _ in range(3):
        rig.clock.advance(100)
        rig.step()
        rig.until(lambda: not rig.tier._runner.num_open_slices)
        assert not rig.is_in_use
    store.bad = frozenset()
    rig.clock.advance(100)
    rig.until(lambda: rig.is_in_use)


class ManyPages(StoreWrapper):
    """A shared store with so many pages of 1,000 keys."""

    def __init__(self, inner: BlockStore, num_pages: int) -> None:
        super().__init__(inner)
        self._all_pages = num_pages
        self.num_pages = self.num_ended = 0

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        try:
            for page in range(self._all_pages):
                self.num_pages += 1
                yield keys_of(*range(1_000 * page, 1_000 * (page + 1)))
        finally:
            self.num_ended += 1


def wait_for_upkeep(rig: Rig) -> None:
    """Waits until the upkeep thread has nothing to do, and takes nothing in."""
    runner, end = rig.tier._runner, time.monotonic() + 120
    while runner.backlog(IoQueue.UPKEEP) and not runner.ended:
        assert time.monotonic() < end, "the upkeep thread hangs"
        time.sleep(0.001)


class TestScans:
    def test_a_step_takes_in_a_bounded_part_of_what_a_scan_has_found(self, make) -> None:
        rig = make(max_blocks=10_000)
        rig.below(keys_of(*range(5_000)))
        rig.start()
        while rig.tier._runner.num_open_slices and not rig.tier._runner.ended:
            time.sleep(0.001)
        seen = [len(rig.tier._index)]
        while seen[-1] < 5_000:
            rig.tier.on_schedule_end()
            rig.tier.lookup(keys_of(1)[0], CONTEXT)
            rig.tier.get_finished_jobs()
            rig.tier.get_finished_jobs()
            seen.append(len(rig.tier._index))
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 64

    def test_a_scan_rests_while_some_thousand_keys_wait(self, make) -> None:
        rig = make()
        rig.store = store = ManyPages(rig.store, 50)
        rig.start()
        wait_for_upkeep(rig)
        assert store.num_pages == 4, "some 4,000 keys wait for steps, and an idle engine has none"
        rig.tier.touch(keys_of(1))
        rig.clock.advance(2)
        calls = rig.store.inner.calls
        rig.until(lambda: ("touch", tuple(keys_of(1))) in calls)
        assert not rig.tier._scan_is_done
        while not rig.tier._scan_is_done:
            assert sum(map(len, rig.tier._scanned)) <= 5_000
            rig.step()
            wait_for_upkeep(rig)
        rig.until(lambda: rig.stat("tier_blocks") == 50_000)
        assert store.num_pages == 50

    def test_a_scan_that_rests_is_not_whole(self, make) -> None:
        rig = make(exclusive=True)
        rig.store = ManyPages(rig.store, 10)
        rig.start()
        wait_for_upkeep(rig)
        assert rig.ask(keys_of(9_999)) == [None]
        rig.until(lambda: rig.tier._scan_is_done and not rig.tier._scanned)
        assert rig.ask(keys_of(9_998, 10_001)) == [True, False]

    def test_a_scan_of_more_than_the_index_keeps_is_not_whole(self, make) -> None:
        rig = make(limits=TierLimits(threads=2, max_index_blocks=1_000), exclusive=True)
        rig.store = ManyPages(rig.store, 10)
        rig.start()
        rig.until(lambda: rig.tier._scan_is_done and not rig.tier._scanned)
        assert rig.stat("tier_blocks") <= 1_000
        assert rig.ask(keys_of(0, 10_001)) == [None, None], "one was forgotten, and is not known to be absent"

    def test_a_tier_ends_while_a_scan_rests(self, make) -> None:
        rig = make()
        rig.store = store = ManyPages(rig.store, 10)
        rig.start()
        wait_for_upkeep(rig)
        rig.tier.shutdown()
        assert (store.num_pages, store.num_ended) == (4, 1), "the scan has let go of what it held"
        assert not any(thread.is_alive() for thread in rig.tier._runner._threads)

    def test_blocks_that_were_deleted_from_outside_are_forgotten(self, make) -> None:
        rig = make()
        rig.inner.rescan_s = 30
        rig.store = FaultyStore(rig.inner)
        keys = keys_of(*range(40))
        rig.below(keys)
        rig.start()
        rig.until(lambda: len(rig.resident) == 40)
        rig.inner.discard(keys[:10])
        rig.below(keys_of(50))
        rig.step()
        assert rig.stat("tier_blocks") == 40
        rig.clock.advance(31)
        rig.until(lambda: rig.resident == {*keys[10:], *keys_of(50)})
        assert rig.stat("tier_blocks") == 31

    def test_a_block_that_is_stored_during_a_scan_is_kept(self, make) -> None:
        rig = make()
        rig.inner.rescan_s = 30
        rig.gate = GatedStore(rig.inner)
        rig.store = FaultyStore(rig.gate)
        rig.below(keys_of(1, 2))
        rig.start()
        rig.until(lambda: len(rig.resident) == 2)
        rig.gate.close_gate("scan")
        rig.clock.advance(31)
        rig.step()
        rig.gate.wait_for_arrivals(1)
        rig.store_blocks(keys_of(3))
        rig.inner.discard(keys_of(1))
        rig.gate.open_gate()
        rig.until(lambda: not rig.tier._runner.num_open_slices)
        for _ in range(3):
            rig.step()
        assert rig.resident == set(keys_of(1, 2, 3)), "the scan had found the first before it was deleted"
        rig.clock.advance(31)
        rig.until(lambda: rig.resident == set(keys_of(2, 3)))

    def test_a_scan_that_fails_forgets_nothing(self, make) -> None:
        rig = make()
        rig.inner.rescan_s = 30
        rig.store = FaultyStore(rig.inner)
        rig.below(keys_of(1, 2))
        rig.start()
        rig.until(lambda: len(rig.resident) == 2)
        rig.store.broken = {"scan": StoreError("no")}
        rig.clock.advance(31)
        rig.step()
        rig.until(lambda: not rig.tier._runner.num_open_slices)
        for _ in range(3):
            rig.step()
        assert rig.resident == set(keys_of(1, 2))
