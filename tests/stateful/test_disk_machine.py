# SPDX-License-Identifier: Apache-2.0
"""Test the tiering manager over a real store on disk, with a neighbour that writes, evicts, is stopped and dies.

Requests look up, load and store blocks while the neighbour, another process on the same root and quota, works on the
same blocks. In all cases, a served block has its own bytes, no request waits longer than its time limit, and the root
keeps its quota once the neighbour has ended.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.files import disk_bytes
from tests.forks import Fork
from tests.sizes import by_size
from tests.stateful.neighbour import SLAB_SLOTS, serve
from tests.tiering.stores.rig import files, room_for

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.testing import ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering import CPUPrimaryTierOffloadingManager, StoreTier, TieringOffloadingManager, TierLimits
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.format import PAYLOAD_SUFFIX, TABLE_SUFFIX, SlabFormat
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import TEMPORARY_PREFIX

SIZE = 1000
NUM_KEYS = 12
KEYS = keys_of(*range(NUM_KEYS))
QUOTA_BLOCKS = 7
MAX_WAIT_S = 5.0
numbers = st.lists(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=4, unique=True)

WEIGHTS = {"store": 5, "ask": 8, "steps": 3, "tick": 2, "reset": 3, "vandal": 1, "corrupt": 2}
WEIGHTS |= {
    "neighbour writes": 4,
    "neighbour reads": 2,
    "neighbour deletes": 1,
    "neighbour scans": 1,
    "neighbour begins": 1,
}
WEIGHTS |= {"neighbour stops": 1, "neighbour stops with the lock": 1, "neighbour dies": 1}
ACTIONS = [action for action, weight in WEIGHTS.items() for _ in range(weight)]


class Neighbour:
    """The other process. A stopped process is resumed before it is asked again."""

    def __init__(self, kind: str, root: Path, max_bytes: int, size: int = SIZE) -> None:
        self._fork = Fork(serve, kind, str(root), size, max_bytes)
        self.is_stopped = self.holds = False

    def ask(self, *words: object) -> None:
        self.go_on()
        self.begin(*words)
        self.wait()
        self.holds = words[0] == "hold"

    def begin(self, *words: object) -> None:
        self._fork.pipe.send(words)

    def wait(self) -> None:
        try:
            assert self._fork.pipe.recv() == "done"
        except EOFError:
            raise AssertionError("the other process failed") from None

    def stop(self) -> None:
        self._fork.stop()
        self.is_stopped = True

    def go_on(self) -> None:
        self._fork.go_on()
        self.is_stopped = False
        if self.holds:
            self._fork.pipe.send("go on")
            self.holds = False

    def die(self) -> None:
        self._fork.kill()


class DiskMachine(RuleBasedStateMachine):
    """The common part of the machines for a store of files and a store of slabs."""

    kind: str
    max_bytes: int
    store: FileSystemStore | DiskStore

    def open_store(self) -> FileSystemStore | DiskStore:
        raise NotImplementedError

    def files(self) -> list[Path]:
        """Return the files that a vandal can damage."""
        raise NotImplementedError

    def check_store(self) -> None:
        """Check the store when no other process uses its root."""
        raise NotImplementedError

    @initialize(num_blocks=st.integers(3, 8), cascade=st.sampled_from(["on_store", "on_evict"]))
    def build(self, num_blocks: int, cascade: str) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name) / "kv"
        self.clock = ManualClock()
        self.region = SharedOffloadRegion.anonymous(num_blocks, SIZE)
        self.view = self.region.create_kv_memoryview()
        self.primary = CPUPrimaryTierOffloadingManager(num_blocks, self.region)
        self.store = self.open_store()
        limits = TierLimits(threads=2, drain_timeout_s=20)
        self.tier = StoreTier(self.primary.kv_view, self.kind, self.store, limits, enable_events=True, clock=self.clock)
        self.manager = TieringOffloadingManager(
            self.primary, [self.tier], clock=self.clock, max_wait_s=MAX_WAIT_S, cascade=[cascade]
        )
        self.neighbour = self.start_neighbour()
        self.num_requests = itertools.count()

    def start_neighbour(self) -> Neighbour:
        return Neighbour(self.kind, self.root, self.max_bytes)

    @rule(action=st.sampled_from(ACTIONS), chosen=numbers)
    def act(self, action: str, chosen: list[int]) -> None:
        match action:
            case "store":
                self.offload(chosen)
            case "ask":
                self.ask([KEYS[number] for number in chosen])
            case "steps":
                self.step(20)
            case "tick":
                self.clock.advance(3.0)
            case "reset":
                self.manager.reset_cache()
            case "vandal":
                for path in self.files()[: len(chosen)]:
                    path.unlink(missing_ok=True)
            case "corrupt":
                self.corrupt(chosen)
            case "neighbour writes":
                self.neighbour.ask("write", *chosen)
            case "neighbour reads":
                self.neighbour.ask("read", *chosen)
            case "neighbour deletes":
                self.neighbour.ask("discard", *chosen)
            case "neighbour scans":
                self.neighbour.ask("scan")
            case "neighbour begins":
                self.neighbour.ask("begin")
            case "neighbour stops":
                self.neighbour.stop()
            case "neighbour stops with the lock":
                self.neighbour.ask("hold")
                self.neighbour.stop()
            case "neighbour dies":
                self.neighbour.die()
                self.neighbour = self.start_neighbour()

    def offload(self, chosen: list[int]) -> None:
        """Serve a request whose blocks are computed, stored in host memory, and written to tiers from there."""
        context = self.start()
        keys = [KEYS[number] for number in chosen]
        output = self.manager.prepare_store(keys, context)
        if output is not None:
            for key, slot in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
                self.view[slot : slot + 1].cast("B")[:] = block_of(key, SIZE)
            self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.step(5)

    def ask(self, keys: list[OffloadKey]) -> None:
        """Serve a request that waits for its prefix, up to its time limit, and loads the blocks that it gets."""
        context, end_s = self.start(), self.clock() + 2 * MAX_WAIT_S
        while None in (answers := self.manager.lookup_prefix(keys, context)):
            assert self.clock() < end_s, "deferred beyond its patience"
            self.step(1)
            self.clock.advance(0.05)
        hit = answers.index(False) if False in answers else len(answers)
        if hit:
            spec = self.manager.prepare_load(keys[:hit], context)
            for key, slot in zip(keys, spec.block_ids.tolist()):
                assert bytes(self.view[slot : slot + 1].cast("B")) == block_of(key, SIZE), f"wrong bytes for {key!r}"
            self.manager.complete_load(keys[:hit], context)
        self.manager.on_request_finished(context)

    def corrupt(self, chosen: list[int]) -> None:
        for number, path in zip(chosen, self.files()):
            try:
                data = bytearray(path.read_bytes())
                data[(number * 97) % len(data)] ^= 0xFF
                with path.open("r+b") as file:
                    file.write(data)
            except (OSError, ZeroDivisionError):
                continue  # evicted in the meantime

    def start(self) -> ReqContext:
        context = ReqContext(f"r{next(self.num_requests)}")
        self.manager.on_new_request(context)
        return context

    def step(self, count: int) -> None:
        for _ in range(count):
            self.manager.on_schedule_end()
            self.manager.take_events()
            time.sleep(0.0005)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        try:
            self.neighbour.die()
            end = time.monotonic() + 120
            while self.manager.has_pending_work():
                assert time.monotonic() < end, "work is pending for ever"
                self.step(1)
            self.tier.drain_jobs()
            self.check_store()
            assert disk_bytes(self.root) <= self.max_bytes
            for key in KEYS:
                buffer = bytearray(SIZE)
                if self.store.read_into([key], [memoryview(buffer)]) == [True]:
                    assert bytes(buffer) == block_of(key, SIZE)
        finally:
            self.manager.shutdown()
            self.view.release()
            self.region.close()
            self.directory.cleanup()


class FileMachine(DiskMachine):
    kind = "fs"
    max_bytes = room_for(QUOTA_BLOCKS)

    def open_store(self) -> FileSystemStore:
        return FileSystemStore(self.root, SIZE, max_bytes=self.max_bytes)

    def files(self) -> list[Path]:
        return files(self.root)

    def check_store(self) -> None:
        for left in self.root.rglob(TEMPORARY_PREFIX + "*"):
            os.utime(left, (0, 0))  # an hour and more later
        (key,) = keys_of(999)  # each block that is written has the quota looked at
        assert self.store.write([key], [memoryview(block_of(key, SIZE))]) == [True]
        assert not list(self.root.rglob(TEMPORARY_PREFIX + "*"))


class SlabMachine(DiskMachine):
    """Two slabs. The neighbour asks for one of them, and they change owners when either store is refreshed."""

    kind = "disk"
    max_bytes = 2 * SlabFormat("", SIZE).slab_bytes(SLAB_SLOTS)

    def __init__(self) -> None:
        super().__init__()
        self.slabs_are_small = patch("kvoffload.tiering.stores.disk.format._MIN_SLAB_BYTES", self.max_bytes // 2)
        self.slabs_are_small.start()

    def open_store(self) -> DiskStore:
        return DiskStore(self.root, SIZE, max_bytes=self.max_bytes)

    def files(self) -> list[Path]:
        return [path for path in sorted(self.root.rglob("*")) if path.suffix in (TABLE_SUFFIX, PAYLOAD_SUFFIX)]

    def step(self, count: int) -> None:
        if count > 5:
            self.store.refresh()
        super().step(count)

    def check_store(self) -> None:
        self.store.refresh()
        self.store.check_invariants()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.slabs_are_small.stop()


TestFileMachine = FileMachine.TestCase
TestSlabMachine = SlabMachine.TestCase
TestFileMachine.settings = TestSlabMachine.settings = settings(
    max_examples=by_size(quick=8, thorough=30), stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize("size", [SIZE, 8192], ids=["small", "paged"])
def test_processes_that_evict_each_others_blocks_read_no_wrong_byte(tmp_path: Path, size: int) -> None:
    """Three processes use four slabs. One process is killed and restarted in the middle."""
    count, max_bytes = by_size(quick=400, thorough=2000), 4 * SlabFormat("", size).slab_bytes(SLAB_SLOTS)
    neighbours = [Neighbour("disk", tmp_path / "kv", max_bytes, size) for _ in range(3)]
    try:
        for turn in range(3):
            for seed, neighbour in enumerate(neighbours):
                neighbour.begin("hammer", 10 * turn + seed, count)
            if turn == 1:
                time.sleep(0.05)
                neighbours[0].die()
                neighbours[0] = Neighbour("disk", tmp_path / "kv", max_bytes, size)
            for neighbour in neighbours[turn == 1 :]:
                neighbour.wait()
            assert disk_bytes(tmp_path) <= max_bytes
    finally:
        for neighbour in neighbours:
            neighbour.die()
