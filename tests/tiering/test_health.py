# SPDX-License-Identifier: Apache-2.0
"""Test when a store that fails or hangs is no longer read or written, and how it recovers."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence

import pytest
from tests.tiering.store_rig import BLOCK_BYTES, CONTEXT, Region, Rig

from kvoffload.base import OffloadKey, OffloadPolicy
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.errors import StoreError
from kvoffload.testing import FakeTier, ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.health import StoreHealth
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.runner import IoQueue, IoResult, IoStatus, IoTask, TierRunner
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.wrappers import StoreWrapper
from kvoffload.tiering.tier import TierLimits


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
    rig.until_idle()
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


class Unprintable(Exception):
    def __str__(self) -> str:
        raise UnicodeError("no")


def test_a_failure_that_cannot_be_printed_counts_as_any_other(make) -> None:
    rig, keys = make().start(), keys_of(1, 2)
    rig.store_blocks(keys)
    rig.store.broken = {"read_into": Unprintable(), "contains": Unprintable()}
    for _ in range(2):
        assert not rig.load_blocks(keys[:1]).success
    assert rig.ask(keys_of(9)) == [None]
    assert not rig.load_blocks(keys[:1]).success
    assert not rig.is_in_use
    rig.until_answered()
    rig.clock.advance(1.5)
    rig.step()  # a probe, which fails
    rig.until_idle()
    rig.store.broken = {}
    rig.clock.advance(10)
    rig.until(lambda: rig.is_in_use)


def test_failing_lookups_become_misses(make) -> None:
    rig = make().start()
    rig.store.broken = {"contains": OSError("gone")}
    for number in range(3):
        (key,) = keys_of(number)
        assert rig.ask([key]) == [None]
        rig.until_answered()
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
        rig.until_answered()
        assert rig.is_in_use
        rig.store.broken = {}
        assert rig.ask_until_answered(keys_of(100 + number)) == [False]


def test_failing_writes_are_dropped_until_one_job_gets_through(make) -> None:
    rig = make(num_blocks=80, limits=TierLimits(threads=2)).start()
    rig.store_blocks(keys_of(1))
    rig.store.broken = {"write": OSError(28, "No space left on device")}
    for number in range(10, 13):
        assert (result := rig.store_blocks(keys_of(number))).num_dropped == result.success == 0
    calls = len(rig.store.calls)
    assert rig.store_blocks(keys_of(20, 21)).num_dropped == 2
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
    keys = keys_of(*range(30, 100))
    result = rig.store_blocks(keys)
    assert set(result.successful_keys) == set(keys[:64]), "the first slice is the probe"
    assert result.num_dropped == len(keys) - 64
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
        slots = [40 + number for number in numbers]
        jobs = [(keys, slots)] if load else [([key], [slot]) for key, slot in zip(keys, slots)]
        for job_keys, job_slots in jobs:  # stores of one step would be one call
            job = rig.submit(job_keys, job_slots, load=load)
        for _ in range(min(len(keys), 4)):
            assert rig.store.arrived.acquire(timeout=30)
        before = rig.runner.num_overdue()
        rig.clock.advance(11)
        rig.until(lambda: rig.runner.num_overdue() == before + len(keys))
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
        """Fewer than half of the threads hang, so nothing else would reach the breaker."""
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
        assert rig.runner.num_overdue() == 2
        assert rig.is_in_use

    def test_a_block_that_is_parked_until_a_hung_read_ends_is_no_pending_work(self, rig: Rig) -> None:
        """An idle engine must not keep making steps for as long as the read hangs."""
        (key,) = keys_of(1)
        rig.below([key])
        rig.store.stuck = {key}
        primary = CPUPrimaryTierOffloadingManager(64, Region(rig.view))
        whole = FakeTier(rig.view, policy=OffloadPolicy.REQUEST_LEVEL, at_once=True)
        manager = TieringOffloadingManager(primary, [rig.tier, whole], clock=rig.clock)
        manager.on_new_request(CONTEXT)
        rig.tier._index.add([key])
        assert manager.lookup(key, CONTEXT) is None
        manager.on_schedule_end()
        assert rig.store.arrived.acquire(timeout=30)
        manager.prepare_store([key], CONTEXT)
        manager.on_request_finished(CONTEXT)
        assert manager.get_stats()["cascades_parked",] == 1
        rig.clock.advance(11)
        manager.on_schedule_end()
        assert not manager.has_pending_work()
        rig.store.free.set()
        end = time.monotonic() + 120
        while not manager.has_pending_work():
            assert time.monotonic() < end
            time.sleep(0.001)
        while manager.has_pending_work():
            manager.on_schedule_end()
        assert list(whole.blocks) == [key]
        assert [call.name for call in whole.log] == ["on_new_request", "submit_store", "on_request_finished"]
        manager.check_invariants()

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
        rig.until_idle()
        assert not rig.is_in_use
    store.bad = frozenset()
    rig.clock.advance(100)
    rig.until(lambda: rig.is_in_use)


class Restless(Collection[OffloadKey]):
    """A store's keys. Another thread adds a key while they are listed, the first time."""

    def __init__(self, keys: Sequence[OffloadKey]) -> None:
        self._keys, self._is_quiet = keys, False

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[OffloadKey]:
        if not self._is_quiet:
            self._is_quiet = True
            raise RuntimeError("dictionary changed size during iteration")
        return iter(self._keys)


def test_a_store_whose_keys_change_while_a_probe_looks_for_some_is_probed_again(make) -> None:
    rig, keys = make(), keys_of(1, 2)
    rig.below(keys)
    rig.store.resident = Restless(keys)
    rig.start()
    rig.store.broken = {"read_into": StoreError("no")}
    for _ in range(3):
        assert not rig.load_blocks(keys[:1]).success
    assert not rig.is_in_use
    rig.store.broken = {}
    rig.clock.advance(2)
    with pytest.raises(RuntimeError, match="changed size"):
        rig.tier.on_schedule_end()
    rig.until(lambda: rig.is_in_use)


def test_a_probe_asks_for_other_blocks_than_those_that_failed_last() -> None:
    clock, index = ManualClock(), PresenceIndex("mem", 100)
    runner = TierRunner("mem", 1, timeout_s=10, clock=clock)
    health = StoreHealth("mem", "read", runner, clock)
    assert health.keys_to_probe(index) == [b"probe"], "it asks the store for something, whatever the index says"
    keys = keys_of(*range(5))
    index.add(keys)
    task = IoTask(IoQueue.LOAD, 2, lambda start, stop: [], keys[3:])
    health.record(IoResult(task, 0, 2, IoStatus.FAILED, OSError(errno.EIO, "bad"), True, [False, False]))
    assert set(health.keys_to_probe(index)) == set(keys[:3])
    assert health.breaker.is_closed
    assert runner.shutdown(30) == 0
