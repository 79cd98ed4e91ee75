# SPDX-License-Identifier: Apache-2.0
"""Test a store whose reads hang, under the real tier with its threads: requests continue, and memory stays safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.testing.clock import ManualClock
from kvoffload.testing.keys import keys
from kvoffload.tiering import CPUPrimaryTierOffloadingManager, StoreTier, TieringOffloadingManager, TierLimits
from kvoffload.tiering.stores import MemoryStore

BLOCK_BYTES = 4096
NUM_BLOCKS = 8


class HangingStore(MemoryStore):
    """A store whose reads and writes wait while ``gate`` is closed.

    Blocks that were read are delivered when it opens.
    """

    def __init__(self) -> None:
        super().__init__(BLOCK_BYTES)
        self.gate = threading.Event()
        self.gate.set()
        self.num_waiting = threading.Semaphore(0)

    def _pass(self) -> None:
        if not self.gate.is_set():
            self.num_waiting.release()
            assert self.gate.wait(60)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._pass()
        return super().read_into(keys, blocks)

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._pass()
        return super().write(keys, blocks)


class Setup:
    def __init__(self, timeout_s: float) -> None:
        self.region = SharedOffloadRegion.anonymous(NUM_BLOCKS, BLOCK_BYTES)
        self.view = self.region.create_kv_memoryview()
        self.clock = ManualClock()
        primary = CPUPrimaryTierOffloadingManager(NUM_BLOCKS, self.region)
        self.store = HangingStore()
        limits = TierLimits(threads=8, timeout_s=timeout_s, drain_timeout_s=0.05)
        self.tier = StoreTier(primary.kv_view, "slow", self.store, limits, clock=self.clock)
        self.manager = TieringOffloadingManager(primary, [self.tier], clock=self.clock)

    def start(self, req_id: str) -> ReqContext:
        context = ReqContext(req_id)
        self.manager.on_new_request(context)
        return context

    def put(self, names: Sequence[OffloadKey], fill: int, context: ReqContext) -> None:
        output = self.manager.prepare_store(names, context)
        assert output is not None
        for slot in output.store_spec.block_ids.tolist():
            self.fill(slot, fill)
        self.manager.complete_store(names, context)

    def fill(self, slot: int, value: int) -> None:
        self.view.cast("B")[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = bytes([value]) * BLOCK_BYTES

    def row(self, slot: int) -> bytes:
        return bytes(self.view.cast("B")[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES])

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not done():
            self.manager.on_schedule_end()
            self.manager.check_invariants()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def rest(self) -> None:
        self.until(lambda: not self.manager.has_pending_work())

    def load(self, names: Sequence[OffloadKey], context: ReqContext) -> list[bytes]:
        slots = self.manager.prepare_load(names, context).block_ids.tolist()
        rows = [self.row(slot) for slot in slots]
        self.manager.complete_load(names, context)
        return rows


@pytest.fixture
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    made = Setup(timeout_s=getattr(request, "param", 30.0))
    yield made
    made.store.gate.set()
    made.rest()
    made.manager.shutdown()
    made.view.release()
    made.region.close()


def hang_in_a_promotion(setup: Setup) -> ReqContext:
    first = setup.start("first")
    setup.put(keys(1, 2), 7, first)
    setup.rest()
    setup.manager.reset_cache()
    setup.store.gate.clear()
    waiting = setup.start("waiting")
    setup.until(lambda: setup.manager.lookup_prefix(keys(1, 2), waiting) == [None, None])
    setup.manager.on_schedule_end()
    assert setup.store.num_waiting.acquire(timeout=60)
    return waiting


def test_a_request_goes_on_when_its_patience_ends_and_the_late_read_harms_nobody(setup: Setup) -> None:
    waiting = hang_in_a_promotion(setup)
    assert setup.manager.lookup_prefix(keys(1, 2), waiting) == [None, None]
    setup.clock.advance(10.0)
    assert setup.manager.lookup_prefix(keys(1, 2), waiting) == [False]
    others = keys(*range(10, 10 + NUM_BLOCKS - 2))
    assert setup.manager.prepare_store(keys(*range(10, 10 + NUM_BLOCKS)), waiting) is None
    setup.put(others, 9, waiting)
    setup.store.gate.set()
    setup.rest()
    assert setup.manager.lookup_prefix(others, waiting) == [True] * len(others)
    assert set(setup.load(others, waiting)) == {bytes([9]) * BLOCK_BYTES}
    late = setup.start("late")
    assert setup.manager.lookup_prefix(keys(1, 2), late) == [True, True]
    assert set(setup.load(keys(1, 2), late)) == {bytes([7]) * BLOCK_BYTES}


@pytest.mark.parametrize("setup", [5.0], indirect=True)
def test_nobody_waits_for_a_read_that_its_tier_calls_overdue(setup: Setup) -> None:
    """It hung for 30 s before anybody but the tier noticed, whatever the tier's ``timeout_s``."""
    waiting = hang_in_a_promotion(setup)
    setup.clock.advance(4.0)
    assert setup.manager.lookup_prefix(keys(1, 2), setup.start("early")) == [None, None]
    setup.clock.advance(2.0)
    setup.manager.on_schedule_end()
    assert setup.manager.lookup_prefix(keys(1, 2), setup.start("late")) == [False]
    assert setup.manager.is_unchanged(waiting), "it has patience"


def test_a_reset_does_not_wait_for_a_hung_read_nor_give_its_slots_away(setup: Setup) -> None:
    waiting = hang_in_a_promotion(setup)
    setup.manager.reset_cache()
    setup.manager.check_invariants()
    assert setup.manager.prepare_store(keys(*range(10, 10 + NUM_BLOCKS)), waiting) is None
    others = keys(*range(20, 20 + NUM_BLOCKS - 2))
    setup.put(others, 5, waiting)
    setup.store.gate.set()
    setup.rest()
    assert set(setup.load(others, waiting)) == {bytes([5]) * BLOCK_BYTES}


def test_a_hung_write_keeps_its_pins_and_nothing_else(setup: Setup) -> None:
    setup.store.gate.clear()
    context = setup.start("r")
    setup.put(keys(1, 2), 7, context)
    setup.manager.on_schedule_end()
    assert setup.store.num_waiting.acquire(timeout=60)
    assert setup.manager.lookup_prefix(keys(1, 2), context) == [True, True]
    setup.load(keys(1, 2), context)
    assert setup.manager.prepare_store(keys(*range(10, 10 + NUM_BLOCKS)), context) is None
    setup.put(keys(*range(10, 10 + NUM_BLOCKS - 2)), 9, context)
    setup.store.gate.set()
    setup.rest()
    assert setup.manager.prepare_store(keys(*range(30, 30 + NUM_BLOCKS)), context) is not None
    setup.manager.complete_store(keys(*range(30, 30 + NUM_BLOCKS)), context, success=False)
