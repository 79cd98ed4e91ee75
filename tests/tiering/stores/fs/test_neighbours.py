# SPDX-License-Identifier: Apache-2.0
"""FileSystemStore beside processes that are stopped, killed or busy: who waits for whom, and what is counted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.files import disk_bytes
from tests.tiering.stores.rig import KEY, OTHER, SMALL, files, here, read, room_for, write

from kvoffload.base import ReqContext
from kvoffload.errors import StoreError
from kvoffload.testing import ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.stores.fs import FileSystemStore, quota
from kvoffload.tiering.stores.fs.staging import unlink_quietly
from kvoffload.tiering.stores.root import CONTROL_DIR
from kvoffload.tiering.tier import StoreTier, TierLimits

Run = Callable[[str], "subprocess.Popen[str]"]

HOLDS_THE_USAGE_FILE = """
    from kvoffload.tiering.stores.fs.usage_file import UsageFile
    with UsageFile(root).hold(10):
        print("ready", flush=True)
        sys.stdin.readline()
"""

DIES_WITH_A_RESERVATION = """
    store = FileSystemStore(root, 1000, max_bytes=1 << 20)
    keys = keys_of(*range(900, 904))
    assert store.write(keys, [memoryview(bytes(1000)) for _ in keys]) == [True] * 4
    reservation = store._quota.reserve(8, 1128, ())
    open(reservation.temporaries[0], "wb").write(bytes(700))
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a script as a neighbour on the same root, and returns once it says that it is ready."""
    children = []

    def start(script: str) -> subprocess.Popen[str]:
        head = """
            import sys
            from kvoffload.testing.keys import keys as keys_of
            from kvoffload.tiering.stores.fs import FileSystemStore
            root = sys.argv[1]
        """
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(script), str(tmp_path / "kv")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def stop(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGSTOP)
    assert os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT) is not None


class TestStopped:
    """A neighbour is stopped while it holds the usage file."""

    def test_reads_lookups_and_scans_go_on_and_writes_fail_in_words(
        self, open_store, tmp_path: Path, run: Run, monkeypatch
    ) -> None:
        monkeypatch.setattr(quota, "_LOCK_TIMEOUT_S", 0.2)
        store = open_store(max_bytes=room_for(6))
        keys = keys_of(0, 1, 2, 3)
        write(store, *keys)
        bad = tmp_path / "kv" / store._layout.path_of(keys[3])
        bad.write_bytes(b"x" * bad.stat().st_size)
        neighbour = run(HOLDS_THE_USAGE_FILE)
        stop(neighbour)
        assert [read(store, key) for key in keys] == [*(block_of(key, SMALL) for key in keys[:3]), None]
        assert store.contains(keys) == [True, True, True, False]
        assert read(store, keys[3]) is None
        assert {key for batch in store.scan() for key in batch} == set(keys[:3])
        store.touch(keys)
        with pytest.raises(StoreError, match="held by another writer for too long"):
            write(store, *keys_of(9))
        assert bad.exists(), "it can be deleted only by who holds the usage file"
        again = open_store(max_bytes=room_for(6))
        assert read(again, keys[0]) == block_of(keys[0], SMALL)
        neighbour.kill()
        neighbour.wait()
        assert write(store, *keys_of(9), keys[3]) == [True, True]
        assert read(store, keys[3]) == block_of(keys[3], SMALL)
        assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")

    def test_a_tier_loads_and_looks_up_while_its_stores_wait(self, open_store, run: Run, monkeypatch) -> None:
        monkeypatch.setattr(quota, "_LOCK_TIMEOUT_S", 600.0)
        store = open_store(max_bytes=room_for(20))
        keys = keys_of(*range(4))
        write(store, *keys)
        memory = np.zeros((16, SMALL), np.uint8)
        tier = StoreTier(memoryview(memory), "fs", store, TierLimits(threads=2, timeout_s=600.0))
        context = ReqContext("r")
        try:
            neighbour = run(HOLDS_THE_USAGE_FILE)
            stop(neighbour)
            stores = [JobMetadata(n, keys_of(100 + n), np.array([n]), False, context) for n in range(4)]
            for job in stores:
                tier.submit_store(job)
            tier.submit_load(JobMetadata(50, keys, np.arange(8, 12), True, context))
            unknown, ended = keys_of(77), dict[int, bool]()
            while 50 not in ended or tier.lookup(unknown[0], context) is None:
                tier.on_schedule_end()
                ended |= {result.job_id: result.success for result in tier.get_finished_jobs()}
            assert ended == {50: True}, "the stores still wait"
            assert [bytes(memory[8 + n]) for n in range(4)] == [block_of(key, SMALL) for key in keys]
            neighbour.kill()
            while len(ended) < 5:
                tier.on_schedule_end()
                ended |= {result.job_id: result.success for result in tier.get_finished_jobs()}
            assert ended == dict.fromkeys([0, 1, 2, 3, 50], True)
        finally:
            tier.shutdown()


class TestKilled:
    def test_a_writer_killed_beside_a_living_one_leaks_nothing_beyond_the_next_scan(
        self, open_store, tmp_path: Path, run: Run
    ) -> None:
        store = open_store(max_bytes=1 << 20)
        write(store, *keys_of(1, 2, 3))
        living = open_store(max_bytes=1 << 20)
        write(living, *keys_of(4))
        neighbour = run(DIES_WITH_A_RESERVATION)
        write(store, *keys_of(5))
        assert store.stats().used_bytes == disk_bytes(tmp_path / "kv") + 8 * 1128 - 700
        neighbour.kill()
        neighbour.wait()
        for _ in store.scan():
            pass
        assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")
        assert len(files(tmp_path)) == 9

    @pytest.mark.parametrize("how", ["killed", "stopped"])
    def test_a_neighbour_that_ends_in_the_middle_of_a_recount_does_not_stop_others(
        self, open_store, tmp_path: Path, run: Run, monkeypatch, how: str
    ) -> None:
        store = open_store(max_bytes=1 << 20)
        write(store, *keys_of(1, 2, 3))
        neighbour = run("""
            store = FileSystemStore(root, 1000, max_bytes=1 << 20)
            from kvoffload.tiering.stores.fs import quota
            quota._STEP_FILES = 1
            scan = store.scan()
            next(scan)
            print("ready", flush=True)
            sys.stdin.readline()
        """)
        os.unlink(files(tmp_path)[0])
        assert sum(len(batch) for batch in store.scan()) == 2
        assert store.stats().used_bytes > disk_bytes(tmp_path / "kv"), "the neighbour counts"
        if how == "killed":
            neighbour.kill()
            neighbour.wait()
        else:
            stop(neighbour)
            monkeypatch.setattr("kvoffload.tiering.stores.fs.usage_file._STALE_NS", 0)
        for _ in store.scan():
            pass
        assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")


class TestRecounts:
    @pytest.fixture(autouse=True)
    def small_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quota, "_STEP_FILES", 1)
        monkeypatch.setattr(quota, "_PAUSE_S", 0.0)

    def test_a_scan_holds_the_usage_file_for_a_step_and_not_for_the_walk(self, open_store, tmp_path: Path) -> None:
        store = open_store(max_bytes=room_for(60))
        write(store, *keys_of(*range(40)))
        again = open_store(max_bytes=room_for(60))
        num_batches = 0
        for number, _ in enumerate(again.scan()):
            assert write(store, *keys_of(100 + number)) == [True], "between two steps"
            store.discard(keys_of(number))
            num_batches += 1
        assert num_batches > 20
        for _ in store.scan():
            pass
        assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")

    @pytest.mark.parametrize("seed", range(6))
    def test_a_recount_beside_busy_writers_is_never_too_low_and_ends_exact(
        self, open_store, tmp_path: Path, seed: int
    ) -> None:
        """Writers, evictions, deletions, and files that appear and vanish without being counted."""
        rng, root = random.Random(seed), tmp_path / "kv"
        *stores, scanned = [open_store(max_bytes=room_for(30)) for _ in range(4)]
        write(stores[0], *keys_of(*range(25)))
        for _ in range(4):
            for path in rng.sample(files(root), 3):
                path.unlink()  # from outside: the count is too high now
            for _ in scanned.scan():
                store = rng.choice(stores)
                match rng.randrange(3):
                    case 0:
                        write(store, *keys_of(*rng.sample(range(60), 3)))
                    case 1:
                        store.discard(keys_of(rng.randrange(60)))
                    case 2:
                        reservation = store._quota.reserve(2, store._layout.file_bytes, ())
                        for temporary in reservation.temporaries:
                            unlink_quietly(temporary)
                        store._quota.release(reservation, {}, len(reservation.temporaries))
                with store._quota._hold() as held:
                    assert held.account.used_bytes >= disk_bytes(root)
                assert disk_bytes(root) <= room_for(30)
        for _ in scanned.scan():
            pass
        assert scanned.stats().used_bytes == disk_bytes(root)

    def test_a_recount_beside_a_writer_in_another_thread(self, open_store, tmp_path: Path) -> None:
        store, writer = open_store(max_bytes=room_for(40)), open_store(max_bytes=room_for(40))
        write(store, *keys_of(*range(30)))
        ends, wrong = threading.Event(), list[int]()

        def work() -> None:
            number = 1000
            while not ends.is_set():
                number += 1
                wrong.extend([number] * (write(writer, *keys_of(number)) != [True]))

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(5):
            for _ in store.scan():
                pass
        ends.set()
        thread.join(60)
        assert not wrong
        assert disk_bytes(tmp_path / "kv") <= room_for(40)
        for _ in store.scan():
            pass
        assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")

    @pytest.mark.parametrize("size_bytes", [0, 10, 5000])
    @pytest.mark.parametrize("scanner", ["nobody", "we", "a neighbour"])
    def test_a_file_of_another_size_is_counted_and_taken_off_at_its_real_size(
        self, open_store, tmp_path: Path, size_bytes: int, scanner: str
    ) -> None:
        store, neighbour = open_store(max_bytes=room_for(20)), open_store(max_bytes=room_for(20))
        write(store, *keys_of(1, 2, 3))
        for _ in store.scan():
            pass
        path = tmp_path / "kv" / store._layout.path_of(keys_of(2)[0])
        path.write_bytes(bytes(size_bytes))
        scanned = {"nobody": None, "we": store, "a neighbour": neighbour}[scanner]
        if scanned is not None:
            assert {key for batch in scanned.scan() for key in batch} == set(keys_of(1, 3))
            assert scanned.stats().used_bytes == disk_bytes(tmp_path / "kv")
        assert read(store, keys_of(2)[0]) is None
        assert not path.exists()
        assert store.stats().used_bytes >= disk_bytes(tmp_path / "kv")
        if scanner != "a neighbour" or size_bytes < SMALL:
            assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")
        for _ in store.scan():
            pass
        assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")

    def test_a_count_that_was_lost_is_made_before_anything_is_written(self, open_store, tmp_path: Path) -> None:
        """As after the host's start, with more files than fit in the quota of today."""
        write(open_store(), *keys_of(*range(40)))
        (tmp_path / "kv" / CONTROL_DIR / "ledger").unlink()
        store = open_store(max_bytes=room_for(5))
        assert write(store, *keys_of(99)) == [True]
        assert disk_bytes(tmp_path / "kv") <= room_for(5)
        assert here(store, *keys_of(99)) == set(keys_of(99))


def test_what_is_deleted_from_outside_leaves_the_metrics(open_store, tmp_path: Path) -> None:
    store, clock = open_store(max_bytes=room_for(60)), ManualClock()
    keys = keys_of(*range(40))
    write(store, *keys)
    tier = StoreTier(memoryview(np.zeros((4, SMALL), np.uint8)), "fs", store, clock=clock)
    context = ReqContext("r")

    def metrics() -> tuple[float, float]:
        tier.on_schedule_end()
        stats = tier.get_stats()
        return stats["tier_blocks", "fs"], stats["tier_bytes", "fs"]

    def wait_for(*expected: float) -> None:
        end_s = clock() + 60
        while metrics() != expected:
            assert clock() < end_s
            if tier._runner.num_open_slices:
                time.sleep(0.001)  # the clock waits for the threads
            else:
                clock.advance(0.5)

    try:
        wait_for(40, disk_bytes(tmp_path / "kv"))
        for key in keys[:15]:
            (tmp_path / "kv" / store._layout.path_of(key)).unlink()
        write(open_store(max_bytes=room_for(60)), OTHER, *keys_of(500))
        wait_for(27 - (OTHER in keys[15:]), disk_bytes(tmp_path / "kv"))
        assert tier.lookup(keys_of(500)[0], context) is True, "what a neighbour has written is known as well"
    finally:
        tier.shutdown()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "kv"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield path
    subprocess.run(["umount", "-R", "-l", path], check=True)


class TestFullDisks:
    SIZE = 64 << 10

    def test_a_disk_that_is_full_below_the_quota_evicts_and_goes_on(self, small_disk: Path, open_store) -> None:
        store = open_store(self.SIZE, max_bytes=100 << 20)
        keys = keys_of(*range(200))
        for start in range(0, 200, 8):
            batch = keys[start : start + 8]
            assert write(store, *batch, size=self.SIZE) == [True] * 8
            assert here(store, *batch) == set(batch)
        assert 30 < len(files(small_disk)) < 64
        assert here(store, *keys) == set(keys[-len(files(small_disk)) :]), "the least recently used have gone"
        assert store.stats().used_bytes == disk_bytes(small_disk)
        assert store.stats().evicted_blocks == 200 - len(files(small_disk))

    def test_bytes_of_others_count_too(self, small_disk: Path, open_store) -> None:
        store = open_store(self.SIZE, max_bytes=100 << 20)
        write(store, *keys_of(*range(20)), size=self.SIZE)
        (small_disk / "somebody else's").write_bytes(bytes(2 << 20))
        for number in range(20, 60):
            assert write(store, *keys_of(number), size=self.SIZE) == [True]
        assert read(store, keys_of(59)[0], self.SIZE) == block_of(keys_of(59)[0], self.SIZE)

    def test_many_threads_on_a_full_disk(self, small_disk: Path, open_store) -> None:
        store, wrong = open_store(self.SIZE, max_bytes=100 << 20), []

        def work(offset: int) -> None:
            for number in range(offset, offset + 40):
                wrong.extend([number] * (write(store, *keys_of(number), size=self.SIZE) != [True]))

        threads = [threading.Thread(target=work, args=(100 * index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert store.stats().used_bytes == disk_bytes(small_disk)

    def test_an_entry_that_cannot_be_deleted_is_passed_over(self, small_disk: Path, open_store) -> None:
        store = open_store(self.SIZE, max_bytes=room_for(6, self.SIZE))
        keys = keys_of(*range(6))
        write(store, *keys, size=self.SIZE)
        busy = [small_disk / store._layout.path_of(key) for key in keys[:2]]
        for path in busy:
            subprocess.run(["mount", "--bind", path, path], check=True)
        new = keys_of(*range(20, 24))
        assert write(store, *new, size=self.SIZE) == [True] * 4
        assert here(store, *keys, *new) == {*keys[:2], *new}
        more = keys_of(*range(30, 36))
        assert sum(write(store, *more, size=self.SIZE)) == 4
        assert all(path.exists() for path in busy)
        assert store.stats().used_bytes == disk_bytes(small_disk) <= room_for(6, self.SIZE)
        store.close()


def test_a_store_is_closed_beside_a_stopped_neighbour(open_store, tmp_path: Path, run: Run, monkeypatch) -> None:
    monkeypatch.setattr(quota, "_CLOSE_TIMEOUT_S", 0.05)
    store = open_store(max_bytes=room_for(6))
    write(store, KEY)
    path = files(tmp_path)[0]
    path.write_bytes(b"x" * path.stat().st_size)
    neighbour = run(HOLDS_THE_USAGE_FILE)
    stop(neighbour)
    assert read(store, KEY) is None
    store.close()
    neighbour.kill()
    neighbour.wait()
    again = FileSystemStore(tmp_path / "kv", SMALL, max_bytes=room_for(6))
    assert read(again, KEY) is None
    assert not path.exists()
    again.close()
