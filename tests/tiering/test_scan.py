# SPDX-License-Identifier: Apache-2.0
"""Test the scan of a store: the keys that a step adds, when a scan pauses, and the blocks that a tier forgets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from tests.tiering.store_rig import BLOCK_BYTES, CONTEXT, Rig

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.testing import FaultyStore, GatedStore, ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.runner import IoQueue, TierRunner
from kvoffload.tiering.scan import StoreScan
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.wrappers import StoreWrapper
from kvoffload.tiering.tier import TierLimits


class ManyPages(StoreWrapper):
    """A shared store with ``num_pages`` pages of 1,000 keys."""

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
    runner, end = rig.runner, time.monotonic() + 120
    while runner.backlog(IoQueue.UPKEEP) and not runner.ended:
        assert time.monotonic() < end, "the upkeep thread hangs"
        time.sleep(0.001)


class LateKeys(StoreWrapper):
    """A store that has nothing to list for some scans' batches."""

    num_empty = 3

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        while self.num_empty:
            self.num_empty -= 1
            yield ()
        yield from self.inner.scan()


class TestScans:
    def test_a_store_that_has_nothing_for_now_is_asked_again_in_later_steps(self, make) -> None:
        rig = make()
        rig.below(keys_of(*range(100)))
        rig.store = store = LateKeys(rig.store)
        rig.start()
        for left in (2, 1, 0):
            wait_for_upkeep(rig)
            assert store.num_empty == left
            rig.step()
        rig.until_scanned()
        assert rig.stat("tier_blocks") == 100

    def test_a_step_takes_in_a_bounded_part_of_what_a_scan_has_found(self, make) -> None:
        rig = make(max_blocks=10_000)
        rig.below(keys_of(*range(5_000)))
        rig.start()
        while rig.runner.num_open_slices and not rig.runner.ended:
            time.sleep(0.001)
        seen = [rig.stat("tier_blocks")]
        while seen[-1] < 5_000:
            rig.tier.on_schedule_end()
            rig.tier.lookup(keys_of(1)[0], CONTEXT)
            rig.tier.get_finished_jobs()
            rig.tier.get_finished_jobs()
            seen.append(rig.stat("tier_blocks"))
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
        assert not rig.is_scanned
        while not rig.is_scanned:
            assert sum(map(len, rig.tier._scan._found)) <= 5_000
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
        rig.until_scanned()
        assert rig.ask(keys_of(9_998, 10_001)) == [True, False]

    def test_a_scan_of_more_than_the_index_keeps_is_not_whole(self, make) -> None:
        rig = make(limits=TierLimits(threads=2, max_index_blocks=1_000), exclusive=True)
        rig.store = ManyPages(rig.store, 10)
        rig.start()
        rig.until_scanned()
        assert rig.stat("tier_blocks") <= 1_000
        assert rig.ask(keys_of(0, 10_001)) == [None, None], "one was forgotten, and is not known to be absent"

    def test_a_tier_ends_while_a_scan_rests(self, make) -> None:
        rig = make()
        rig.store = store = ManyPages(rig.store, 10)
        rig.start()
        wait_for_upkeep(rig)
        rig.tier.shutdown()
        assert (store.num_pages, store.num_ended) == (4, 1), "the scan has let go of what it held"
        assert not rig.has_threads

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

    def test_a_store_is_not_scanned_all_the_time(self, make) -> None:
        rig = make()
        rig.below(keys_of(1))
        rig.inner.rescan_s = 0
        rig.store = FaultyStore(rig.inner)
        rig.start()
        rig.until_scanned()
        for _ in range(3):
            rig.step()
            rig.until_idle()

        def scans() -> int:
            return [call for call, _ in rig.store.calls].count("scan")

        assert scans() == 1, "it took a moment, and has a rest of several"
        rig.clock.advance(1000)
        rig.step()
        rig.until_idle()
        assert scans() == 2

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
        rig.until_idle()
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
        rig.until_idle()
        for _ in range(3):
            rig.step()
        assert rig.resident == set(keys_of(1, 2))


def test_a_scan_that_another_one_replaced_completes_nothing() -> None:
    clock, store, index = ManualClock(), MemoryStore(BLOCK_BYTES), PresenceIndex("mem", 100)
    runner = TierRunner("mem", 1, timeout_s=10, clock=clock)
    scan = StoreScan("mem", store, index, runner, clock)
    store.write(keys_of(1), [memoryview(bytes(BLOCK_BYTES))])
    scan.begin()
    scan.begin()
    answers, end = [], time.monotonic() + 120
    while runner.num_open_slices:
        assert time.monotonic() < end, "the scan hangs"
        for result in runner.take_results():
            scan.take_in()
            result.task.on_result(result)
            answers.append(scan.is_complete)
    assert answers[0] is False
    scan.take_in()
    assert scan.is_complete
    assert len(index) == 1
    assert runner.shutdown(30) == 0
