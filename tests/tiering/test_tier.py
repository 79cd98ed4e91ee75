# SPDX-License-Identifier: Apache-2.0
"""StoreTier over real stores that are late, broken, hung or lossy. No call reaches them on the scheduler's thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from tests.tiering.store_rig import BLOCK_BYTES, CONTEXT, Region

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobResult
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.stores.base import DiskStats, StoreStats
from kvoffload.tiering.stores.wrappers import StoreWrapper
from kvoffload.tiering.tier import TierLimits


class Panic(BaseException):
    """An exception as a native client raises it, which is not an ``Exception``."""


class PanickingStore(StoreWrapper):
    """Panics in one method, while ``method`` names it."""

    method = ""

    def __getattribute__(self, name: str) -> Any:
        return self.panic if name == super().__getattribute__("method") else super().__getattribute__(name)

    def panic(self, *arguments: object) -> Any:
        raise Panic(self.method)


class OnFullDisk(StoreWrapper):
    def stats(self) -> StoreStats:
        return StoreStats(used_bytes=2 * BLOCK_BYTES, max_bytes=10 * BLOCK_BYTES, free_bytes=BLOCK_BYTES)


class Telling(StoreWrapper):
    """Its counts all differ."""

    used_blocks = 3

    def stats(self) -> StoreStats:
        return StoreStats(
            self.used_blocks * BLOCK_BYTES, 4, 5, 10 * BLOCK_BYTES, 100 * BLOCK_BYTES,
            (DiskStats("/a", is_out=True, used_bytes=7, failed_calls=8), DiskStats("/b", is_out=False, used_bytes=9)),
        )  # fmt: skip


class Uncounted(StoreWrapper):
    """A store whose contents only the server knows."""

    def stats(self) -> StoreStats:
        return StoreStats()


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


def test_a_tier_that_goes_off_while_a_call_is_under_way_knows_more(make) -> None:
    """From then on, its lookups are misses, and waiting requests must ask again."""
    rig = make()
    rig.gate.close_gate("contains")
    rig.start()
    rig.step()
    assert rig.ask(keys_of(1)) == [None]
    rig.tier.on_schedule_end()
    rig.store.broken = {"read_into": StoreError("no")}
    assert [*rig.tier.take_news()] == []
    for number in range(3):
        rig.load_blocks(keys_of(2 + number))
    assert rig.ask(keys_of(1)) == [False]
    assert {*rig.tier.take_news()} == {*keys_of(1)}
    assert [*rig.tier.take_news()] == []


def test_a_manager_hears_of_a_block_that_the_scan_finds_while_its_first_question_waits(make) -> None:
    rig = make()
    rig.gate.close_gate("contains", "scan")
    rig.below(keys_of(1))
    rig.start()
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(4, Region(rig.view)), [rig.tier])
    manager.on_new_request(CONTEXT)
    assert manager.lookup_prefix(keys_of(1), CONTEXT) == [None]
    rig.gate.open_gate("scan")
    rig.until(lambda: rig.is_scanned)
    deadline = time.monotonic() + 10
    while manager.lookup_prefix(keys_of(1), CONTEXT) == [None]:
        assert time.monotonic() < deadline, "it waits for an answer that came"
        manager.on_schedule_end()
        time.sleep(0.001)
    assert manager.lookup_prefix(keys_of(1), CONTEXT) == [True]
    rig.gate.open_gate("contains")
    manager.shutdown()


def test_a_tier_keeps_no_news_of_requests_that_ended_before_its_answer(make) -> None:
    rig = make()
    rig.start()
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(4, Region(rig.view)), [rig.tier])
    for number in range(3):
        rig.gate.close_gate("contains")
        context = ReqContext(f"r{number}")
        manager.on_new_request(context)
        assert manager.lookup_prefix(keys_of(number), context) == [None]
        manager.on_schedule_end()
        manager.on_request_finished(context)
        rig.gate.open_gate("contains")
        deadline = time.monotonic() + 10
        while manager.has_pending_work():
            assert time.monotonic() < deadline
            manager.on_schedule_end()
            time.sleep(0.001)
        manager.on_schedule_end()
    assert [*rig.tier.take_news()] == []
    manager.shutdown()


@pytest.mark.parametrize("is_there", [True, False])
def test_news_name_the_blocks_that_the_store_has_answered_for(make, is_there: bool) -> None:
    rig = make()
    rig.gate.close_gate("contains", "scan")
    if is_there:
        rig.below(keys_of(1))
    rig.start()
    assert [*rig.tier.take_news()] == [], "recorded from now on"
    assert rig.ask(keys_of(1)) == [None]
    rig.step()
    assert [*rig.tier.take_news()] == []
    rig.gate.open_gate("contains")
    rig.until(lambda: not rig.tier.has_pending_work())
    assert [*rig.tier.take_news()] == keys_of(1)
    assert rig.ask(keys_of(1)) == [is_there]


def test_the_end_of_a_scan_is_news_of_all_blocks_that_are_asked_for(make) -> None:
    rig = make(exclusive=True)
    rig.gate.close_gate("contains")
    rig.gate.close_gate("scan")
    rig.start()
    rig.tier.take_news()
    assert rig.ask(keys_of(1)) == [None]
    rig.step()
    rig.gate.open_gate("scan")
    rig.until(lambda: rig.is_scanned)
    assert keys_of(1)[0] in rig.tier.take_news()
    assert rig.ask(keys_of(1)) == [False]
    rig.gate.open_gate("contains")


def test_a_request_with_a_block_in_the_store_is_put_off_twice(make) -> None:
    """It is delayed in the step that asks the store, and in the step that reads the block."""
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
    rig.until(lambda: rig.stat("tier_blocks") == 1 and rig.is_scanned)
    assert rig.ask(keys_of(1, 2)) == [True, False]


def test_the_bytes_of_a_store_that_counts_none_are_those_of_its_known_blocks(make) -> None:
    rig = make()
    rig.store = store = Uncounted(rig.store)
    rig.start()
    assert rig.store_blocks(keys_of(1, 2, 3)).success
    assert store.stats().used_bytes is None
    assert rig.stat("tier_bytes") == 3 * BLOCK_BYTES
    assert rig.stat("tier_free_bytes") == math.inf


def test_free_bytes_are_those_of_the_disk_if_it_has_less_than_the_quota(make) -> None:
    rig = make()
    rig.store = OnFullDisk(rig.store)
    rig.start()
    assert rig.stat("tier_free_bytes") == BLOCK_BYTES


def test_what_a_store_counts_is_its_tiers(make) -> None:
    rig = make()
    rig.store = telling = Telling(rig.store)
    rig.start()
    counts = ("bytes", "free_bytes", "quota_bytes", "corrupt_blocks", "evicted_blocks")
    told = [rig.stat(f"tier_{count}") for count in counts]
    assert told == [3 * BLOCK_BYTES, 7 * BLOCK_BYTES, 10 * BLOCK_BYTES, 4, 5]
    counts = ("disk_bytes", "disk_out", "disk_failures")
    assert [[rig.stat(f"tier_{count}", disk) for count in counts] for disk in ("/a", "/b")] == [[7, 1, 8], [9, 0, 0]]
    telling.used_blocks = 12
    assert rig.stat("tier_free_bytes") == 0


def test_what_waits_is_counted_by_kind(make) -> None:
    def waiting() -> list[float]:
        blocks = [rig.stat("tier_queued_blocks", kind) for kind in ("lookup", "load", "store")]
        return [*blocks, rig.stat("tier_queued_jobs")]

    rig = make().start()
    rig.until_scanned()
    rig.gate.close_gate("contains", "read_into", "write")
    jobs = [rig.submit(keys_of(1, 2, 3), range(3), load=False), rig.submit(keys_of(4, 5), [4, 5], load=True)]
    rig.ask(keys_of(6))
    assert waiting() == [0, 2, 3, 2]
    rig.step()
    assert waiting() == [1, 2, 3, 2]
    rig.gate.open_gate()
    for job in jobs:
        rig.wait(job)
    rig.until_answered()
    assert waiting() == [0, 0, 0, 0]


def test_a_drain_waits_for_results(make) -> None:
    rig = make().start()
    keys = keys_of(*range(40))
    rig.fill(range(40), keys)
    job = rig.submit(keys, range(40), load=False)
    rig.tier.drain_jobs()
    assert rig.inner.contains(keys) == [True] * 40
    assert rig.stat("tier_blocks_stored") == 40, "taken in already"
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
    rig.until(lambda: not rig.has_threads)


def test_a_second_shutdown_does_nothing(make, monkeypatch) -> None:
    rig = make().start()
    closed: list[None] = []
    monkeypatch.setattr(rig.inner, "close", lambda: closed.append(None))
    for _ in range(2):
        rig.tier.shutdown()
    assert len(closed) == 1


class OwnKeys(Collection[OffloadKey]):
    """The keys that a plug-in's store reports. Once ``is_broken`` is set, it raises."""

    is_broken = False

    def __contains__(self, key: object) -> bool:
        if self.is_broken:
            raise RuntimeError("broken on plan")
        return True

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_what_raises_at_the_end_of_a_call_hides_no_other_end(make, caplog) -> None:
    """The rest of the poll must not be dropped, because jobs would never end and their slots would never be free
    again."""
    rig = make()
    own = OwnKeys()
    rig.store.resident = own
    rig.start()
    rig.gate.close_gate("read_into")
    jobs = [rig.submit(keys_of(number), [number], load=True) for number in range(4)]
    own.is_broken = True
    rig.gate.open_gate()
    while len(rig.runner.ended) < 4:
        time.sleep(0.001)
    results = [*rig.tier.get_finished_jobs()]
    own.is_broken = False
    assert [(result.job_id, result.success) for result in results] == [(job_id, False) for job_id in jobs]
    assert "broken on plan" in caplog.text


def test_a_tier_asks_for_whole_requests_if_its_policy_says_so(make) -> None:
    rig = make(offload_policy=OffloadPolicy.REQUEST_LEVEL).start()
    assert rig.tier.on_new_request(CONTEXT).policy is OffloadPolicy.REQUEST_LEVEL


def test_touches_reach_the_store_together_and_rarely(make) -> None:
    rig = make().start()
    rig.until_idle()
    for _ in range(10):
        rig.tier.touch(keys_of(1, 2, 3))
        rig.step()
        rig.until_idle()

    def touches() -> int:
        return sum(call == ("touch", tuple(keys_of(1, 2, 3))) for call in rig.store.calls)

    assert touches() == 1
    rig.clock.advance(1.5)
    rig.until(lambda: touches() == 10)


def test_uses_beyond_a_bound_are_forgotten(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiering.tier._MAX_TOUCHED", 5)
    rig = make().start()
    for seconds in (0, 2):
        rig.until_idle()
        rig.clock.advance(seconds)
        for number in range(4):
            rig.tier.touch(keys_of(3 * number, 3 * number + 1, 3 * number + 2))
        rig.step()
    rig.until_idle()
    told = [keys for call, keys in rig.store.calls if call == "touch"]
    assert told == [tuple(keys_of(*range(first, first + 3))) for first in (0, 3)] * 2


def test_once_somebody_takes_events_again_those_that_were_dropped_follow(make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    keys = keys_of(*range(9))
    rig.below(keys)
    rig.store.resident = set(keys)
    monkeypatch.setattr("kvoffload.tiering.presence._MIN_EVENT_KEYS", 3)
    rig.start()
    while not rig.is_scanned:
        rig.tier.on_schedule_end()
        time.sleep(0.001)
    (lost,) = rig.tier.take_events()
    assert lost.clears
    monkeypatch.undo()
    rig.until_idle()
    rig.step()
    assert rig.resident == set(keys)


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
            # Lookups that panic repeatedly turn reading off.
            assert rig.load_blocks(keys).success is (method not in ("contains", "read_into", "take_lost"))
        rig.tier.touch(keys)
        rig.clock.advance(2)
        rig.until_idle()
        if method == "close":
            rig.tier.shutdown()
            assert "failed to close" in caplog.text
            return
    panicking.method = ""
    rig.clock.advance(100)
    rig.until(lambda: rig.is_in_use)
    assert rig.store_blocks(keys_of(7, 8)).success
    assert rig.load_blocks(keys_of(7, 8)).success, "all threads are alive and the tier is in use again"
