# SPDX-License-Identifier: Apache-2.0
"""Test a tier over a store that knows its own keys: no key is unknown, nothing is remembered twice, and all laws
hold."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.tiering.stores.disk.rig import damage, slab_of

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.testing import FaultyStore, GatedStore, ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobMetadata, JobResult
from kvoffload.tiering.stores.disk.format import (
    ENTRY_BYTES,
    PAGE_BYTES,
    PAYLOAD_SUFFIX,
    TABLE_SUFFIX,
    SlabFormat,
)
from kvoffload.tiering.stores.disk.store import DiskStore
from kvoffload.tiering.stores.root import directory_of
from kvoffload.tiering.tier import StoreTier, TierLimits

SIZE, SLOTS = 1000, 8
CONTEXT = ReqContext("r")


class Rig:
    """A ``disk`` tier of eight blocks, with gates and faults in between."""

    def __init__(self, root: Path, enable_events: bool = True) -> None:
        self.root = root
        self.memory = bytearray(SLOTS * SIZE)
        self.view = memoryview(self.memory).cast("B", (SLOTS, SIZE))
        self.clock = ManualClock()
        self.slabs = DiskStore(root, SIZE, max_bytes=slab_of(SLOTS))
        self.gate = GatedStore(self.slabs)
        self.store = FaultyStore(self.gate)
        limits = TierLimits(threads=2, drain_timeout_s=5.0)
        self.tier = StoreTier(self.view, "disk", self.store, limits, enable_events=enable_events, clock=self.clock)
        self.results: dict[int, JobResult] = {}
        self.held: set[OffloadKey] = set()
        self._last_id = 0

    def submit(self, keys: Sequence[OffloadKey], *, load: bool) -> int:
        if not load:
            for slot, key in enumerate(keys):
                self.memory[slot * SIZE : (slot + 1) * SIZE] = block_of(key, SIZE)
        self._last_id += 1
        job = JobMetadata(self._last_id, keys, np.arange(len(keys)), load, CONTEXT)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return job.job_id

    def run(self, keys: Sequence[OffloadKey], *, load: bool) -> set[OffloadKey]:
        """Run a job and return the keys that were stored or loaded."""
        job = self.submit(keys, load=load)
        self.until(lambda: job in self.results)
        result = self.results[job]
        return set(result.successful_keys or (keys if result.success else ()))

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "the tier hangs"
            self.tier.on_schedule_end()
            self.results |= {result.job_id: result for result in self.tier.get_finished_jobs()}
            time.sleep(0.001)

    def ask(self, *keys: OffloadKey) -> list[bool | None]:
        return [self.tier.lookup(key, CONTEXT) for key in keys]

    def fold(self) -> set[OffloadKey]:
        for event in self.tier.take_events():
            self.held = self.held - set(event.keys) if event.removed else self.held | set(event.keys)
        return self.held


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    before = set(threading.enumerate())
    rig = Rig(tmp_path / "kv")
    yield rig
    rig.gate.open_gate()
    rig.tier.shutdown()
    gc.collect()
    rig.view.release()
    end = time.monotonic() + 120
    while set(threading.enumerate()) - before:
        assert time.monotonic() < end, "threads left behind"
        time.sleep(0.01)


def test_a_lookup_is_answered_at_once_by_the_store_itself(rig: Rig) -> None:
    names = keys_of(1, 2)
    assert rig.ask(*names) == [False, False]
    assert not rig.tier.has_pending_work()
    assert rig.run(names, load=False) == set(names)
    assert rig.ask(*names, *keys_of(3)) == [True, True, False]
    assert "contains" not in {call for call, _ in rig.store.calls}, "nobody asked the I/O threads"


def test_a_neighbours_block_is_found_and_loaded(rig: Rig) -> None:
    neighbour = DiskStore(rig.root, SIZE, max_bytes=2 * slab_of(SLOTS))
    (key,) = keys_of(1)
    assert neighbour.write([key], [memoryview(block_of(key, SIZE))]) == [True]
    neighbour.refresh()
    rig.slabs.refresh()
    assert rig.ask(key) == [True]
    assert rig.run([key], load=True) == {key}
    neighbour.close()


def test_a_block_that_cannot_be_read_is_a_miss_at_once_and_written_anew(rig: Rig) -> None:
    names = keys_of(1, 2, 3)
    rig.run(names, load=False)
    damage(rig.root, names[1])
    assert rig.ask(names[1]) == [True]
    assert rig.run(names, load=True) == {names[0], names[2]}
    assert rig.ask(*names) == [True, False, True]
    assert rig.run(names, load=False) == set(names)
    assert rig.run(names, load=True) == set(names)


def test_an_evicted_block_is_a_miss_at_once(rig: Rig) -> None:
    names = keys_of(*range(SLOTS + 1))
    rig.run(names[:SLOTS], load=False)
    rig.run(names[SLOTS:], load=False)
    answers = rig.ask(*names)
    assert answers[-1] is True
    assert answers.count(False) == 1
    assert rig.tier.get_stats()["tier_blocks", "disk"] == SLOTS


def test_blocks_of_a_call_that_hangs_are_misses_until_it_returns(rig: Rig) -> None:
    names = keys_of(1, 2)
    rig.run(names, load=False)
    rig.gate.close_gate("read_into")
    job = rig.submit(names[:1], load=True)
    rig.gate.wait_for_arrivals(1)
    rig.clock.advance(31)
    rig.until(lambda: rig.ask(names[0]) == [False])
    rig.gate.open_gate()
    rig.until(lambda: job in rig.results)
    rig.until(lambda: rig.ask(*names) == [True, True])


def test_a_store_whose_reads_fail_is_probed_with_keys_of_its_own(rig: Rig) -> None:
    names = keys_of(*range(6))
    rig.run(names, load=False)
    rig.store.broken["read_into"] = OSError(5, "the disk is gone")
    for key in names[:3]:
        assert rig.run([key], load=True) == set()
    assert rig.ask(*names) == [False] * 6
    assert rig.tier.get_stats()["tier_healthy", "disk"] == 0
    rig.store.calls.clear()
    del rig.store.broken["read_into"]
    rig.clock.advance(2)
    rig.until(lambda: rig.ask(*names) == [True] * 6)
    (probed,) = {keys for call, keys in rig.store.calls if call == "read_into"}
    assert set(probed) <= set(names) - {names[2]}


class TestEvents:
    def test_who_takes_them_is_told_what_was_there_before(self, tmp_path: Path) -> None:
        names = keys_of(*range(5))
        for _ in range(2):
            rig = Rig(tmp_path / "kv")
            rig.run(names, load=False)
            rig.until(lambda rig=rig: rig.fold() == set(names))
            rig.tier.shutdown()

    def test_without_them_nothing_is_listed_or_kept(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path / "kv", enable_events=False)
        rig.run(keys_of(*range(5)), load=False)
        assert rig.fold() == set()
        rig.run(keys_of(*range(5, 8)), load=False)
        assert rig.fold() == set()
        rig.tier.shutdown()
        assert "scan" not in {call for call, _ in rig.store.calls}

    def test_they_fold_to_what_the_store_has(self, rig: Rig) -> None:
        rig.fold()
        for first in range(0, 40, 3):
            rig.run(keys_of(*range(first, first + 3)), load=False)
        rig.until(lambda: rig.fold() == {key for key in keys_of(*range(50)) if rig.ask(key) == [True]})
        assert len(rig.held) == SLOTS


@pytest.mark.long
def test_store_and_tier_take_150_bytes_per_block(tmp_path: Path) -> None:
    """The blocks are in a large store that exists at startup.

    Payloads are holes in files, because nothing reads them.
    """
    num_slots, num_slabs, size = 16_000, 2, 65536
    layout = SlabFormat(directory_of(""), size)
    DiskStore(tmp_path, size, max_bytes=1 << 30).close()
    slabs = tmp_path / layout.directory
    names = [keys_of(*range(slab * num_slots, (slab + 1) * num_slots)) for slab in range(num_slabs)]
    for number, mine in enumerate(names):
        entries = b"".join(bytes(16) + (1).to_bytes(4, "little") + layout.hashed(key).probe for key in mine)
        assert len(entries) == num_slots * ENTRY_BYTES
        columns = bytes(layout.entries_at(num_slots) - PAGE_BYTES)
        table = slabs / f"{number:016x}{TABLE_SUFFIX}"
        table.write_bytes(layout.header(num_slots) + columns + entries)
        with table.with_suffix(PAYLOAD_SUFFIX).open("wb") as payloads:
            payloads.truncate(num_slots * size)
    view = memoryview(bytearray(size)).cast("B", (1, size))
    gc.collect()
    tracemalloc.start()
    try:
        store = DiskStore(tmp_path, size, max_bytes=1 << 40)
        tier = StoreTier(view, "disk", store)
        for mine in names:
            assert all(tier.lookup(key, CONTEXT) for key in mine)
        tier.on_schedule_end()
        gc.collect()
        per_block = tracemalloc.get_traced_memory()[0] / (num_slabs * num_slots)
    finally:
        tracemalloc.stop()
    tier.shutdown()
    assert ENTRY_BYTES < per_block <= 150
