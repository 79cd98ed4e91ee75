# SPDX-License-Identifier: Apache-2.0
"""Test blocks that the disk cannot read, or whose reads hang: one bad block costs one block.

The faults come from a C library in front of the real one, so these tests run in their own process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.tiering.stores.rig import PAGED, files, path_of, read, room_for, write

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.errors import StoreError
from kvoffload.testing import ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.runner import IoQueue
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.tier import StoreTier, TierLimits

PLAN = os.environ.get("KVO_FAULTS")
CONTEXT = ReqContext("r")
K = keys_of(*range(12))

needs_faults = pytest.mark.skipif(PLAN is None, reason="run by test_under_a_faulty_c_library")


@pytest.mark.skipif(PLAN is not None, reason="this is that process")
def test_under_a_faulty_c_library(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library, plan = tmp_path / "faults.so", tmp_path / "plan"
    plan.touch()
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", __file__],
        env={**os.environ, "LD_PRELOAD": str(library), "KVO_FAULTS": str(plan)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout
    assert " passed" in outcome.stdout
    assert "1 skipped" in outcome.stdout


class Rig:
    """A tier over a real store of 12 blocks, with planned faults."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock()
        self.store = FileSystemStore(root, PAGED, max_bytes=room_for(40, PAGED))
        write(self.store, *K, size=PAGED)
        self.memory = np.zeros((32, PAGED), np.uint8)
        limits = TierLimits(threads=4, timeout_s=10, drain_timeout_s=20)
        self.tier = StoreTier(memoryview(self.memory), "fs", self.store, limits, clock=self.clock)
        self.results: dict[int, set[OffloadKey]] = {}
        self.until(lambda: self.tier.get_stats()["tier_blocks", "fs"] == len(K))

    def plan(self, *faults: tuple[str, OffloadKey]) -> None:
        """Set the faults from now on."""
        assert PLAN is not None
        path = Path(PLAN).with_suffix(".new")
        path.write_text("".join(f"{kind} {Path(self.path_of(key)).name}\n" for kind, key in faults))
        path.replace(PLAN)

    def path_of(self, key: OffloadKey) -> str:
        return path_of(self.store, key)

    def submit(self, number: int, keys: Sequence[OffloadKey], *, load: bool) -> None:
        job = JobMetadata(number, keys, np.arange(len(keys)) + number % 20, load, CONTEXT)
        (self.tier.submit_load if load else self.tier.submit_store)(job)

    def load(self, number: int, *keys: OffloadKey) -> set[OffloadKey]:
        self.submit(number, keys, load=True)
        self.until(lambda: number in self.results)
        return self.results[number]

    def step(self) -> None:
        self.tier.on_schedule_end()
        for result in self.tier.get_finished_jobs():
            good = result.successful_keys
            self.results[result.job_id] = set(good if good is not None else ["all"] if result.success else ())

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "the tier hangs"
            self.step()
            time.sleep(0.001)

    def ask(self, *keys: OffloadKey) -> list[bool | None]:
        self.until(lambda: None not in [self.tier.lookup(key, CONTEXT) for key in keys])
        return [self.tier.lookup(key, CONTEXT) for key in keys]

    def runs(self, queue: IoQueue) -> bool:
        """Return whether a call of ``queue`` has started. A queued call would be cancelled when the clock advances."""
        runner = self.tier._runner
        with runner._lock:
            return any(part.task.queue is queue for part in runner._running)

    @property
    def is_in_use(self) -> bool:
        return self.tier.get_stats()["tier_healthy", "fs"] == 1


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    before = set(threading.enumerate())
    made = Rig(tmp_path / "kv")
    yield made
    made.plan()
    made.tier.shutdown()
    for thread in set(threading.enumerate()) - before:
        thread.join(120)  # an abandoned call keeps its file open until it returns


@needs_faults
class TestUnreadable:
    @pytest.mark.parametrize("kind", ["eio", "enodata"])
    def test_it_is_a_miss_forgotten_and_written_anew(self, rig: Rig, kind: str) -> None:
        rig.plan((kind, K[3]))
        assert rig.load(1, *K[:4]) == set(K[:3])
        assert rig.ask(*K[:4]) == [True, True, True, False]
        before = os.stat(rig.root / rig.path_of(K[3])).st_ino
        rig.plan()
        rig.memory[2] = np.frombuffer(block_of(K[3], PAGED), np.uint8)
        rig.submit(2, [K[3]], load=False)
        rig.until(lambda: 2 in rig.results)
        assert rig.results[2] == {"all"}
        assert os.stat(rig.root / rig.path_of(K[3])).st_ino != before, "another file, on other sectors"
        assert rig.ask(K[3]) == [True]
        rig.memory[:] = 0
        assert rig.load(4, K[3]) == {"all"}
        assert bytes(rig.memory[4]) == block_of(K[3], PAGED)
        assert len(files(rig.root)) == len(K)

    def test_alone_in_its_job_it_costs_the_tier_nothing(self, rig: Rig) -> None:
        rig.plan(("eio", K[3]))
        assert rig.load(1, K[3]) == set()
        assert rig.is_in_use
        assert rig.ask(K[3], K[4]) == [False, True]
        assert rig.load(2, K[4]) == {"all"}
        for _ in range(5):
            rig.clock.advance(2)
            assert rig.ask(K[3]) == [False], "nobody tries it again"
        assert rig.is_in_use

    def test_several_in_a_row_turn_reading_off_until_the_next_probe(self, rig: Rig) -> None:
        rig.plan(*(("eio", key) for key in K[:3]))
        for number in range(3):
            assert rig.load(1 + number, K[number]) == set()
        assert not rig.is_in_use
        rig.clock.advance(2)
        rig.until(lambda: rig.is_in_use)
        assert rig.ask(*K[:4]) == [False] * 3 + [True]
        assert rig.load(9, *K[3:8]) == {"all"}

    def test_a_name_that_cannot_be_looked_at_is_a_miss(self, rig: Rig) -> None:
        again = FileSystemStore(rig.root, PAGED, max_bytes=room_for(40, PAGED))
        assert PLAN is not None
        Path(PLAN).write_text(f"eio stat:{Path(rig.path_of(K[5])).name}\n")
        assert again.contains(K[4:7]) == [True, False, True]
        assert write(again, K[5], size=PAGED) == [True]
        rig.plan()
        assert read(again, K[5], PAGED) == block_of(K[5], PAGED)
        again.close()

    def test_a_disk_that_reads_nothing_is_the_store(self, rig: Rig) -> None:
        rig.plan(*(("eio", key) for key in K))
        with pytest.raises(StoreError, match="Input/output error"):
            rig.store.read_into(K, [memoryview(bytearray(PAGED)) for _ in K])


@needs_faults
class TestHung:
    def test_a_read_that_hangs_costs_its_thread_and_its_job(self, rig: Rig) -> None:
        rig.plan(("hang", K[3]))
        rig.submit(1, [K[3]], load=True)
        rig.until(lambda: rig.runs(IoQueue.LOAD))
        rig.clock.advance(11)
        rig.until(lambda: rig.tier._runner.num_overdue() == 1)
        assert rig.is_in_use
        assert rig.ask(K[3], K[4]) == [False, True]
        for number in range(2, 6):
            assert rig.load(number, *K[4:12]) == {"all"}
        assert not rig.tier.has_pending_work(), "only the hung call is left"
        assert 1 not in rig.results
        rig.plan()
        rig.until(lambda: 1 in rig.results)
        assert rig.results[1] == {"all"}
        assert bytes(rig.memory[1]) == block_of(K[3], PAGED)
        assert rig.ask(K[3]) == [True]

    def test_a_lookup_that_hangs_costs_its_thread_and_its_blocks(self, rig: Rig) -> None:
        key = next(key for key in keys_of(*range(500, 5000)) if (rig.root / rig.path_of(key)).parent.exists())
        rig.plan(("hang", key))
        assert rig.tier.lookup(key, CONTEXT) is None
        rig.step()
        rig.until(lambda: rig.runs(IoQueue.LOOKUP))
        rig.clock.advance(11)
        assert rig.ask(key) == [False]
        assert rig.load(1, *K) == {"all"}
        assert not rig.tier.has_pending_work()
        rig.plan()
        rig.until(lambda: not rig.tier._runner.num_open_slices)
        assert rig.is_in_use
