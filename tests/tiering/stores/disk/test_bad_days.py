# SPDX-License-Identifier: Apache-2.0
"""Test a ``disk`` tier whose disk fails or hangs in system calls: the cost of one bad block."""

from __future__ import annotations

import errno
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
from tests.tiering.stores.disk.rig import aligned, right, slab_of, tables, upkeep_of, write

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.errors import StoreError
from kvoffload.testing import ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.stores.disk.store import DiskStore
from kvoffload.tiering.tier import StoreTier, TierLimits

SIZE = 1000
CONTEXT = ReqContext("r")
K = keys_of(*range(24))


class Disk:
    """A disk that intercepts system calls on slabs.

    Calls on ``bad`` slots fail, and calls of a kind in ``hanging`` wait for ``go_on``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bad: set[int] = set()
        self.hanging: set[tuple[str, str]] = set()
        """Name of the call, and suffix of the file."""
        self.num_waiting = 0
        self._go_on = threading.Event()
        self._lock = threading.Lock()
        for name in ("preadv", "pwritev", "pwrite"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def go_on(self) -> None:
        self.hanging = set()
        self._go_on.set()

    def _wrap(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def wrapped(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if (name, Path(path).suffix) in self.hanging:
                with self._lock:
                    self.num_waiting += 1
                assert self._go_on.wait(120)
            if path.endswith(".slab") and self.bad:
                count = sum(buffer.nbytes for buffer in buffers)
                if any(offset < (slot + 1) * SIZE and offset + count > slot * SIZE for slot in self.bad):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(fd, buffers, offset)

        return wrapped


class Rig:
    """A tier over a store of 24 blocks. It contains ``K[:12]``, in slots with these numbers."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root, self.disk, self.clock = root, disk, ManualClock()
        self.store = DiskStore(root, SIZE, max_bytes=slab_of(24))
        write(self.store, *K[:12])
        self.memory = np.zeros((24, SIZE), np.uint8)
        limits = TierLimits(threads=4, timeout_s=10, drain_timeout_s=0.3)
        self.tier = StoreTier(memoryview(self.memory), "disk", self.store, limits, clock=self.clock)
        self.results: dict[int, set[OffloadKey]] = {}
        self._last_id = 0

    def submit(self, *keys: OffloadKey, load: bool) -> int:
        self._last_id += 1
        slots = np.array([K.index(key) for key in keys])
        for slot, key in zip(slots, keys, strict=True):
            self.memory[slot] = 0 if load else np.frombuffer(block_of(key, SIZE), np.uint8)
        job = JobMetadata(self._last_id, keys, slots, load, CONTEXT)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self._last_id

    def run(self, *keys: OffloadKey, load: bool) -> set[OffloadKey]:
        job = self.submit(*keys, load=load)
        self.until(lambda: job in self.results)
        good = set(keys) if None in self.results[job] else self.results[job]
        for key in good if load else ():
            assert bytes(self.memory[K.index(key)]) == block_of(key, SIZE), "wrong bytes"
        return good

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "the tier hangs"
            self.tier.on_schedule_end()
            for result in self.tier.get_finished_jobs():
                good = result.successful_keys
                self.results[result.job_id] = set(good if good is not None else [None] if result.success else ())
            time.sleep(0.001)

    def ask(self, *keys: OffloadKey) -> list[bool | None]:
        return [self.tier.lookup(key, CONTEXT) for key in keys]

    @property
    def is_in_use(self) -> bool:
        return self.tier.get_stats()["tier_healthy", "disk"] == 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def rig(tmp_path: Path, disk: Disk) -> Iterator[Rig]:
    before = set(threading.enumerate())
    made = Rig(tmp_path / "kv", disk)
    yield made
    disk.bad = set()
    disk.go_on()
    made.tier.shutdown()
    made.store.close()  # the tier does not wait forever for that
    for thread in set(threading.enumerate()) - before:
        thread.join(120)  # an abandoned call keeps its slab open until it returns


class TestUnreadable:
    def test_a_block_is_a_miss_forgotten_and_written_anew(self, rig: Rig) -> None:
        rig.disk.bad = {3}
        assert rig.run(*K[:4], load=True) == set(K[:3])
        assert rig.ask(*K[:4]) == [True, True, True, False]
        assert rig.run(K[3], load=False) == {K[3]}
        assert rig.run(*K[:4], load=True) == set(K[:4]), "in another slot"

    def test_alone_in_its_job_it_costs_the_tier_nothing(self, rig: Rig) -> None:
        rig.disk.bad = {3}
        assert rig.run(K[3], load=True) == set()
        assert rig.is_in_use
        assert rig.ask(K[3], K[4]) == [False, True]
        assert rig.run(K[4], load=True) == {K[4]}

    def test_several_in_a_row_turn_reading_off_until_the_next_probe(self, rig: Rig) -> None:
        rig.disk.bad = {0, 1, 2}
        for number in range(3):
            assert rig.run(K[number], load=True) == set()
        assert not rig.is_in_use
        assert rig.ask(*K[:4]) == [False] * 4
        rig.clock.advance(2)
        rig.until(lambda: rig.is_in_use)
        assert rig.ask(*K[:4]) == [False] * 3 + [True]
        assert rig.run(*K[3:8], load=True) == set(K[3:8])


class TestHung:
    def test_a_read_costs_its_thread_and_its_blocks(self, rig: Rig) -> None:
        rig.disk.hanging = {("preadv", ".slab")}
        job = rig.submit(K[3], load=True)
        rig.until(lambda: rig.disk.num_waiting == 1)
        rig.disk.hanging = set()
        rig.clock.advance(11)
        rig.until(lambda: rig.ask(K[3], K[4]) == [False, True])
        assert rig.is_in_use
        assert rig.run(*K[4:12], load=True) == set(K[4:12])
        assert not rig.tier.has_pending_work(), "only the hung call is left"
        assert job not in rig.results
        rig.disk.go_on()
        rig.until(lambda: job in rig.results)
        assert rig.ask(K[3]) == [True]

    def test_a_write_leaves_everything_else_alone(self, rig: Rig) -> None:
        rig.disk.hanging = {("pwritev", ".slab")}
        job = rig.submit(K[12], load=False)
        rig.until(lambda: rig.disk.num_waiting == 1)
        rig.disk.hanging = set()
        assert rig.run(*K[:4], load=True) == set(K[:4])
        assert rig.run(*K[13:20], load=False) == set(K[13:20])
        assert rig.ask(*K[12:14]) == [False, True]
        rig.disk.go_on()
        rig.until(lambda: job in rig.results)
        assert rig.run(*K[12:20], load=True) == set(K[12:20])

    def test_a_table_costs_the_writer_alone(self, rig: Rig) -> None:
        with upkeep_of(rig.store).lock:  # so that it is not the store's own thread that hangs
            rig.disk.hanging = {("pwrite", ".table")}
            job = rig.submit(K[12], load=False)
            rig.until(lambda: rig.disk.num_waiting == 1)
            rig.disk.hanging = set()
        assert rig.run(*K[:4], load=True) == set(K[:4])
        assert rig.run(*K[13:16], load=False) == set(K[13:16])
        assert rig.ask(*K[11:14]) == [True, False, True]
        rig.disk.go_on()
        rig.until(lambda: job in rig.results)
        assert rig.run(*K[10:16], load=True) == set(K[10:16])

    def test_a_poll_leaves_everything_else_alone(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        """The store's own thread, which watches neighbours, hangs with a table of theirs."""
        neighbour = DiskStore(rig.root, SIZE, max_bytes=2 * slab_of(24))
        assert write(neighbour, *K[20:22]) == [True] * 2
        neighbour.refresh()
        rig.store.refresh()
        assert rig.ask(*K[19:22]) == [False, True, True]
        with upkeep_of(neighbour).lock:  # so that it is not the neighbour who hangs
            rig.disk.hanging = {("preadv", ".table")}
            rig.until(lambda: rig.disk.num_waiting == 1)
            assert rig.run(*K[:4], load=True) == set(K[:4])
            assert rig.run(*K[20:22], load=True) == set(K[20:22])
            assert rig.run(*K[12:16], load=False) == set(K[12:16])
            assert rig.ask(*K[11:17]) == [True] * 5 + [False]
            assert rig.is_in_use
            rig.tier.shutdown()
            assert "are abandoned" in caplog.text
            rig.disk.go_on()
        neighbour.close()

    def test_a_shutdown_is_bounded(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        rig.disk.hanging = {("pwrite", ".table")}
        rig.submit(K[12], load=False)
        rig.until(lambda: rig.disk.num_waiting >= 1)
        rig.tier.shutdown()
        assert "are abandoned" in caplog.text


class TestRoot:
    def test_writes_into_a_root_that_is_gone_are_lost_until_that_is_noticed(self, rig: Rig) -> None:
        """Slabs that are open outlive their names. Nothing is made in the root's place."""
        with upkeep_of(rig.store).lock:
            shutil.rmtree(rig.root)
            assert rig.run(K[12], load=False) == {K[12]}
            assert rig.run(*K[10:13], load=True) == set(K[10:13])
        rig.store.refresh()
        assert rig.ask(*K[10:13]) == [False] * 3
        with pytest.raises(StoreError, match="gone"):
            rig.store.write([K[13]], [aligned(block_of(K[13], SIZE))])
        assert not rig.root.exists()

    @pytest.mark.parametrize("suffix", [".table", ".slab"])
    def test_a_pipe_in_a_slabs_place_holds_nobody_up(self, tmp_path: Path, suffix: str) -> None:
        store = DiskStore(tmp_path, SIZE, max_bytes=slab_of(24))
        write(store, *K[:4])
        store.close()
        (path,) = [table.with_suffix(suffix) for table in tables(tmp_path)]
        path.unlink()
        os.mkfifo(path, 0o600)
        store = DiskStore(tmp_path, SIZE, max_bytes=2 * slab_of(24))
        assert right(store, *K[:4]) == set()
        assert write(store, *K[:4]) == [True] * 4
        store.close()


class TestOpenFiles:
    """A process whose limit of open files is small for its slabs, like a terabyte's slabs with the usual limit of
    1,024."""

    MAX_BYTES = 32 << 20
    """16 slabs, which take 48 files."""
    SCRIPT = """
import logging, os, resource, sys
from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.stores.disk import DiskStore
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
root, soft, hard = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
def open_store():
    return DiskStore(root, 4096, max_bytes=32 << 20)
def fill(store):
    for first in range(0, 7600, 100):
        keys = keys_of(*range(first, first + 100))
        store.write(keys, [memoryview(bytes(4096)) for _ in keys])
def say(store):
    os.close(os.open("/dev/null", os.O_RDONLY))  # there are files left for others
    slots = sum(slab.file.num_slots for slab in store._slabs.open.values())
    print(len(store._slabs.open), slots * 4096 * 100 // (32 << 20), len(store._slabs.quarantined), flush=True)
"""

    def run(self, root: Path, soft: int, hard: int, script: str) -> list[str]:
        """Run a script and return its output: the open slabs, their percentage of the quota, and those left out for
        good."""
        command = [sys.executable, "-c", self.SCRIPT + script, str(root), str(soft), str(hard)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not ran.returncode, ran.stdout + ran.stderr
        return ran.stdout.splitlines()

    def test_the_soft_limit_is_raised(self, tmp_path: Path) -> None:
        (said,) = self.run(tmp_path, 40, 4096, "store = open_store(); fill(store); say(store)")
        assert said == "16 98 0"

    def test_slabs_are_larger_under_a_small_hard_limit(self, tmp_path: Path) -> None:
        (said,) = self.run(tmp_path, 64, 64, "store = open_store(); fill(store); say(store)")
        num_slabs, percent, _ = map(int, said.split())
        assert num_slabs <= 10
        assert percent >= 95

    def test_slabs_beyond_half_of_it_wait_and_that_is_said_once(self, tmp_path: Path) -> None:
        """Other files are closed later, and then all slabs are used."""
        self.run(tmp_path, 4096, 4096, "store = open_store(); fill(store); store.close()")
        others = "others = [os.open('/dev/null', os.O_RDONLY) for _ in range(50)]; store = open_store()"
        fewer = "say(store); [os.close(fd) for fd in others]; store.refresh(); say(store)"
        log, before, after = self.run(tmp_path, 128, 128, f"{others}; store.refresh(); {fewer}")
        assert log.startswith("LOG The store at ")
        assert "files are open, half of this process's limit" in log
        num_slabs, _, num_quarantined = map(int, before.split())
        assert 0 < num_slabs < 10
        assert num_quarantined == 0
        assert after == "16 98 0"

    def test_without_one_slab_a_store_fails_in_words(self, tmp_path: Path) -> None:
        script = """
others = [os.open('/dev/null', os.O_RDONLY) for _ in range(50)]
store = open_store()
for _ in range(3):
    try:
        store.write(keys_of(1), [memoryview(bytes(4096))])
    except Exception as exc:
        print(type(exc).__name__, exc)
[os.close(fd) for fd in others]
store._quota.not_before_s = 0.0
print(store.write(keys_of(1), [memoryview(bytes(4096))]))
"""
        log, *said, written = self.run(tmp_path, 64, 64, script)
        assert log.startswith("LOG ")
        assert all(line.startswith("StoreError") and "(ulimit -n)" in line for line in said)
        assert written == "[True]"
