# SPDX-License-Identifier: Apache-2.0
"""Several stores on one root: other instances, other processes, other namespaces, dead ones."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.files import disk_bytes
from tests.forks import Fork
from tests.tiering.stores.disk.rig import (
    SMALL,
    aligned,
    damage,
    here,
    hold_open,
    may_grow,
    payloads,
    right,
    slab_of,
    slabs_of,
    tables,
    upkeep_of,
    write,
)
from tests.users import NOBODY, needs_root

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk import quota as quota_module
from kvoffload.tiering.stores.disk import slabs as slabs_module
from kvoffload.tiering.stores.disk.directory import root_lock
from kvoffload.tiering.stores.disk.file import SlabFile
from kvoffload.tiering.stores.root import CONTROL_DIR, Access

KEYS = keys_of(*range(100))
LARGE = 8000
"""129 blocks fill a slab of a mebibyte, where 978 small ones do."""
write_large, right_large = partial(write, size=LARGE), partial(right, size=LARGE)

PARENT = """
import multiprocessing, os, sys, time
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk import DiskStore
root, size, max_bytes = sys.argv[1], *map(int, sys.argv[2:])
store = DiskStore(root, size, "", max_bytes)
keys = keys_of(*range(10))
assert store.write(keys, [memoryview(block_of(key, size)) for key in keys]) == [True] * 10
reader, writer = os.pipe()
child = multiprocessing.get_context("fork").Process(target=lambda: (os.write(writer, b"x"), time.sleep(3600)))
child.start()
os.read(reader, 1)
more = keys_of(*range(10, 20))
assert store.write(more, [memoryview(block_of(key, size)) for key in more]) == [True] * 10
print(child.pid, flush=True)
sys.stdin.read()
"""


CHILD_WITH_A_LOG = """
import fcntl, os, sys
from kvoffload.tiering.stores.disk import DiskStore
root, size, max_bytes, is_locked = sys.argv[1], *map(int, sys.argv[2:])
store = DiskStore(root, size, "", max_bytes)
log = os.open(root + "/server.log", os.O_WRONLY | os.O_CREAT)
if is_locked:
    fcntl.flock(log, fcntl.LOCK_EX)
child = os.fork()
if not child:
    try:
        os.write(log, b"a line")
    except OSError:
        os._exit(9)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def neighbour(tmp_path: Path):
    """Starts a process that writes blocks of these numbers, keeps the store open, and waits."""
    started: list[Fork] = []

    def start(max_bytes: int, first: int, last: int) -> Fork:
        started.append(Fork(hold_open, str(tmp_path / "kv"), SMALL, max_bytes, first, last))
        assert started[-1].pipe.recv() == last - first
        return started[-1]

    yield start
    for child in started:
        if child.is_alive:
            child.kill()


def two_slabs(size: int = SMALL) -> int:
    """Return a quota of two slabs of a mebibyte."""
    return 2 << 20


class TestReading:
    def test_neighbours_find_each_others_blocks(self, open_store) -> None:
        mine, theirs = open_store(max_bytes=two_slabs()), open_store(max_bytes=two_slabs())
        write(mine, *KEYS[:10])
        mine.refresh()
        theirs.refresh()
        assert right(theirs, *KEYS[:20]) == set(KEYS[:10])
        assert write(theirs, *KEYS[5:15]) == [True] * 10
        theirs.refresh()
        mine.refresh()
        assert right(mine, *KEYS[:20]) == set(KEYS[:15])
        write(mine, *KEYS[20:30])
        mine.refresh()
        theirs.refresh()
        assert right(theirs, *KEYS[20:30]) == set(KEYS[20:30]), "also in a slab that was known before"

    def test_without_being_asked(self, open_store) -> None:
        """The threads of the stores do this by themselves. The test does not check how soon."""
        mine, theirs = open_store(max_bytes=two_slabs()), open_store(max_bytes=two_slabs())
        write(mine, KEYS[0])
        for _ in range(10_000):
            if here(theirs, KEYS[0]):
                return
            upkeep_of(theirs)._stop.wait(0.01)
        raise AssertionError("never found")

    def test_what_a_neighbour_evicts_is_announced(self, open_store) -> None:
        mine, theirs = open_store(max_bytes=two_slabs()), open_store(max_bytes=two_slabs())
        write(mine, *KEYS[:4])
        mine.refresh()
        theirs.refresh()
        mine.discard(KEYS[1:3])
        mine.refresh()
        theirs.refresh()
        assert here(theirs, *KEYS[:4]) == {KEYS[0], KEYS[3]}
        assert theirs.take_lost() == dict.fromkeys(KEYS[1:3], "evicted")

    def test_an_overwrite_that_nobody_has_told_of_is_a_miss_and_no_corruption(self, open_store) -> None:
        mine, theirs = open_store(max_bytes=slab_of(8)), open_store(max_bytes=slab_of(8))
        write(mine, *KEYS[:8])
        mine.refresh()
        theirs.refresh()
        with upkeep_of(mine).lock, upkeep_of(theirs).lock:  # neither thread helps
            assert write(mine, *KEYS[10:14]) == [True] * 4
            assert right(theirs, *KEYS[:8]) == set(KEYS[4:8])
            assert right(theirs, *KEYS[10:14]) == set(KEYS[10:14]), "found while looking"
        assert theirs.stats().corrupt_blocks == 0
        assert theirs.take_lost() == dict.fromkeys(KEYS[:4], "evicted")

    def test_a_block_that_was_evicted_and_written_again_meanwhile_is_no_corruption(
        self, open_store, monkeypatch
    ) -> None:
        """Both entries are of one second, and equal. In between the slot had another block, which was read."""
        mine, theirs = open_store(), open_store()
        monkeypatch.setattr(slabs_module, "time", SimpleNamespace(time_ns=lambda: 10**18))
        write(mine, KEYS[0])
        mine.refresh()
        theirs.refresh()
        with upkeep_of(mine).lock, upkeep_of(theirs).lock:  # neither thread helps
            mine.discard([KEYS[0]])
            write(mine, KEYS[1])
            read_entries = SlabFile.read_entries

            def read_late(file: SlabFile, first: int, count: int) -> bytearray:
                monkeypatch.setattr(SlabFile, "read_entries", read_entries)
                mine.discard([KEYS[1]])
                write(mine, KEYS[0])
                return read_entries(file, first, count)

            monkeypatch.setattr(SlabFile, "read_entries", read_late)
            assert right(theirs, KEYS[0]) == {KEYS[0]}
        assert SlabFile.read_entries is read_entries
        assert theirs.stats().corrupt_blocks == 0

    def test_a_neighbours_bad_block_is_a_miss_until_it_is_written_anew(self, open_store, tmp_path: Path) -> None:
        mine, theirs = open_store(max_bytes=two_slabs()), open_store(max_bytes=two_slabs())
        write(mine, *KEYS[:4])
        mine.refresh()
        theirs.refresh()
        damage(tmp_path, KEYS[1])
        assert right(theirs, *KEYS[:4]) == {KEYS[0], KEYS[2], KEYS[3]}
        assert theirs.stats().corrupt_blocks == 1
        theirs.refresh()
        assert not here(theirs, KEYS[1])
        with upkeep_of(mine).lock, upkeep_of(theirs).lock:  # neither thread helps
            assert write(theirs, KEYS[1]) == [True], "in a slab of its own"
            assert right(theirs, *KEYS[:4]) == set(KEYS[:4])
            assert right(mine, *KEYS[:4]) == {KEYS[0], KEYS[2], KEYS[3]}

    def test_one_block_in_two_slabs_outlives_either(self, open_store) -> None:
        mine, theirs = open_store(max_bytes=two_slabs()), open_store(max_bytes=two_slabs())
        write(mine, *KEYS[:3])
        write(theirs, *KEYS[:3])
        mine.refresh()
        theirs.refresh()
        mine.refresh()
        assert [key for batch in mine.scan() for key in batch] == KEYS[:3]
        mine.discard(KEYS[:1])
        mine.refresh()
        theirs.refresh()
        assert theirs.take_lost() == {}
        assert right(theirs, *KEYS[:3]) == set(KEYS[:3])

    def test_another_copy_is_read_where_one_is_bad(self, open_store, tmp_path: Path) -> None:
        mine, theirs = open_store(max_bytes=two_slabs()), open_store(max_bytes=two_slabs())
        write(mine, KEYS[0])
        write(theirs, KEYS[0])
        for store in (mine, theirs, mine):
            store.refresh()
        damage(tmp_path, KEYS[0])
        assert right(mine, KEYS[0]) == right(theirs, KEYS[0]) == {KEYS[0]}
        assert mine.stats().corrupt_blocks + theirs.stats().corrupt_blocks <= 2
        assert mine.take_lost() == theirs.take_lost() == {}

    def test_a_use_by_a_neighbour_keeps_a_block(self, open_store, monkeypatch) -> None:
        now_s = 1_700_000_000
        monkeypatch.setattr("time.time_ns", lambda: now_s * 1_000_000_000)
        mine, theirs = open_store(max_bytes=slab_of(8)), open_store(max_bytes=slab_of(8))
        for number in range(8):
            now_s += 1
            write(mine, KEYS[number])
        mine.refresh()
        theirs.refresh()
        now_s += 5
        assert right(theirs, KEYS[0], KEYS[1]) == set(KEYS[:2])
        with upkeep_of(theirs).lock:
            upkeep_of(theirs).flush_uses()
        with upkeep_of(mine).lock:
            upkeep_of(mine).flush_uses()
        now_s += 5
        write(mine, *KEYS[8:12])
        assert here(mine, *KEYS[:8]) == {KEYS[0], KEYS[1], KEYS[6], KEYS[7]}


class TestAdoption:
    def test_slabs_of_the_dead_are_adopted_with_their_blocks(self, open_store, neighbour, tmp_path: Path) -> None:
        child = neighbour(two_slabs(), 0, 40)
        store = open_store(max_bytes=two_slabs())
        assert right(store, *KEYS[:40]) == set(KEYS[:40])
        assert slabs_of(store).num_slots == 0
        child.kill()
        store.refresh()
        assert slabs_of(store).num_slots > 0
        assert right(store, *KEYS[:40]) == set(KEYS[:40])
        assert write(store, *KEYS[40:60]) == [True] * 20
        assert len(tables(tmp_path)) == 1, "in the slab of the dead"

    def test_a_child_that_outlives_its_engine_keeps_no_lock(self, open_store, tmp_path: Path) -> None:
        """Locks belong to open files, which a forked child also has open."""
        command = [sys.executable, "-c", PARENT, *map(str, (tmp_path / "kv", SMALL, two_slabs()))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            try:
                parent.kill()
                parent.wait()
                store = open_store(max_bytes=two_slabs())
                assert slabs_of(store).num_slots > 0
                assert right(store, *KEYS[:20]) == set(KEYS[:20])
                assert write(store, *KEYS[40:60]) == [True] * 20
            finally:
                os.kill(child, signal.SIGKILL)

    @pytest.mark.parametrize("is_locked", [False, True])
    def test_a_child_keeps_what_others_have_open_under_the_root(self, tmp_path: Path, is_locked: bool) -> None:
        """Such as the file that its output goes to, but no lock, whatever is locked."""
        words = tmp_path / "kv", SMALL, two_slabs(), int(is_locked)
        command = [sys.executable, "-c", CHILD_WITH_A_LOG, *map(str, words)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == (9 if is_locked else 0), ran.stderr
        assert (tmp_path / "kv" / "server.log").read_bytes() == (b"" if is_locked else b"a line")

    def test_a_stopped_neighbour_is_waited_for_by_nobody(self, open_store, neighbour) -> None:
        child = neighbour(two_slabs(), 0, 40)
        child.stop()
        store = open_store(max_bytes=two_slabs())
        assert right(store, *KEYS[:40]) == set(KEYS[:40])
        assert write(store, *KEYS[40:60]) == [True] * 20
        store.refresh()
        store.close()
        assert right(open_store(max_bytes=two_slabs()), *KEYS[:60]) == set(KEYS[:60])
        child.go_on()

    def test_only_one_adopts(self, open_store, tmp_path: Path) -> None:
        store = open_store(max_bytes=two_slabs())
        write(store, *KEYS[:10])
        store.close()
        stores = [open_store(max_bytes=two_slabs()) for _ in range(3)]
        assert sum(slabs_of(store).num_slots > 0 for store in stores) == 1
        for store in stores:
            assert right(store, *KEYS[:10]) == set(KEYS[:10])


class TestQuota:
    def test_it_is_the_roots(self, open_store, tmp_path: Path) -> None:
        stores = [
            open_store(max_bytes=3 << 20, **options)
            for options in ({}, {}, {"namespace": "other"}, {"size": 500}, {"namespace": "third", "size": 70_000})
        ]
        sizes = [SMALL, SMALL, SMALL, 500, 70_000]
        for number, (store, size) in enumerate(zip(stores * 4, sizes * 4, strict=True)):
            keys = keys_of(*range(number * 1000, number * 1000 + (600 if size <= SMALL else 60)))
            store.write(keys, [memoryview(bytes(size)) for _ in keys])
            assert disk_bytes(tmp_path) <= 3 << 20
        assert len(tables(tmp_path)) >= 3

    def test_a_namespace_that_nobody_uses_gives_way(self, open_store, tmp_path: Path) -> None:
        old = open_store(LARGE, namespace="yesterday", max_bytes=two_slabs())
        keys = keys_of(*range(250))
        for start in range(0, 250, 100):
            assert all(write_large(old, *keys[start : start + 100]))
        new = open_store(LARGE, namespace="today", max_bytes=two_slabs())
        assert write_large(new, KEYS[0]) == [False], "it is in use"
        old.close()
        may_grow(new)
        assert write_large(new, KEYS[0]) == [True]
        assert disk_bytes(tmp_path) <= two_slabs()
        again = open_store(LARGE, namespace="yesterday", max_bytes=two_slabs())
        assert 0 < len(right_large(again, *keys)) < 250, "one slab is enough for now"

    def test_a_smaller_quota_removes_slabs_at_start(self, open_store, tmp_path: Path, monkeypatch) -> None:
        now_s = 1_700_000_000
        monkeypatch.setattr("time.time_ns", lambda: now_s * 1_000_000_000)
        store = open_store(LARGE, max_bytes=4 << 20)
        keys = keys_of(*range(500))
        for start in range(0, 500, 100):
            now_s += 1
            assert all(write_large(store, *keys[start : start + 100]))
        store.close()
        assert disk_bytes(tmp_path) > 3 << 20
        store = open_store(LARGE, max_bytes=2 << 20)
        assert disk_bytes(tmp_path) <= 2 << 20
        assert right_large(store, *keys[-195:]) == set(keys[-195:]), "the oldest go"

    def test_a_smaller_quota_is_looked_at_again_if_another_process_has_the_lock(
        self, open_store, tmp_path: Path
    ) -> None:
        """Several servers that start together with less than before."""
        store = open_store(LARGE, max_bytes=4 << 20)
        keys = keys_of(*range(500))
        for start in range(0, 500, 100):
            write_large(store, *keys[start : start + 100])
        store.close()
        with root_lock(str(tmp_path / "kv"), Access()) as is_locked:
            assert is_locked
            store = open_store(LARGE, max_bytes=2 << 20)
            store.refresh()
            assert disk_bytes(tmp_path) > 3 << 20
        store.refresh()
        assert disk_bytes(tmp_path) <= 2 << 20
        assert right_large(store, *keys), "what is left is used"

    def test_a_root_that_another_process_has_locked_is_not_waited_for(
        self, open_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process is making a slab at this moment.

        That does not count as a full quota: the next write asks again, and no process is asked for a slab.
        """
        monkeypatch.setattr(quota_module, "_GROW_S", 1000.0)
        store = open_store(max_bytes=two_slabs())
        with root_lock(str(tmp_path / "kv"), Access()) as is_locked:
            assert is_locked
            assert write(store, KEYS[0]) == [False]
            store.refresh()
            assert not list((tmp_path / "kv" / CONTROL_DIR).glob("want-*"))
        assert write(store, KEYS[0]) == [True]


class TestSharing:
    @pytest.fixture(autouse=True)
    def no_request_expires(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However slow the machine is."""
        monkeypatch.setattr(quota_module, "_WANT_S", 3600.0)
        monkeypatch.setattr(quota_module, "_GIVEN_S", 3600.0)

    def fill(self, store: DiskStore, first: int, count: int) -> list[OffloadKey]:
        keys = keys_of(*range(first, first + count))
        for start in range(0, count, 100):
            write_large(store, *keys[start : start + 100])
        return keys

    def settle(self, *stores: DiskStore) -> None:
        for _ in range(12):
            for store in stores:
                store.refresh()

    def owned(self, store: DiskStore) -> int:
        return sum(slab.is_own for slab in slabs_of(store).open.values())

    def test_a_late_comer_is_given_slabs_with_their_blocks(self, open_store, tmp_path: Path) -> None:
        mine = open_store(LARGE, max_bytes=6 << 20)
        keys = self.fill(mine, 0, 765)
        late = open_store(LARGE, max_bytes=6 << 20)
        assert write_large(late, KEYS[0]) == [True], "it is there"
        other = keys_of(*range(10_000, 10_100))
        assert write_large(late, *other) == [False] * 100
        self.settle(mine, late)
        assert (self.owned(mine), self.owned(late)) == (3, 3)
        for store in (mine, late):
            assert right_large(store, *keys[::7]) == set(keys[::7]), "nothing is lost by it"
        assert write_large(late, *other) == [True] * 100
        assert disk_bytes(tmp_path) <= 6 << 20
        self.settle(mine, late)
        assert right_large(mine, *other) == set(other)

    def test_who_gave_a_slab_away_writes_no_more_counters_of_it(self, open_store) -> None:
        """Blocks of the slab were removed just before. Counters that decrease would hide changes from neighbours."""
        mine = open_store(LARGE, max_bytes=6 << 20)
        keys = self.fill(mine, 0, 765)
        late = open_store(LARGE, max_bytes=6 << 20)
        with upkeep_of(mine).lock:  # its thread gives nothing away
            assert write_large(late, *keys_of(*range(10_000, 10_100))) == [False] * 100
            late.refresh()  # asks for a slab
            upkeep_of(mine).flush_changes()
            mine.discard(keys[:1])
            upkeep_of(mine).poll()
            (given,) = (slab for slab in slabs_of(mine).open.values() if not slab.is_own)
            given.given_until_s = 0.0
            late.refresh()
            for key in keys[1:3]:
                late.discard([key])
                late.refresh()
            with upkeep_of(late).lock:
                counted = given.file.read_changes()
                upkeep_of(mine).flush_changes()
                assert (given.file.read_changes() == counted).all()

    def test_who_cannot_ask_for_a_slab_finds_its_neighbours_blocks_all_the_same(self, open_store, monkeypatch) -> None:
        """On a full disk, there is no room for the file that asks for a slab."""

        def full(name: str, *arguments) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

        mine = open_store(LARGE, max_bytes=two_slabs())
        self.fill(mine, 0, 240)
        late = open_store(LARGE, max_bytes=two_slabs())
        monkeypatch.setattr(quota_module, "make_file", full)
        assert write_large(late, *keys_of(*range(10_000, 10_100))) == [False] * 100
        more = self.fill(mine, 5000, 10)
        mine.refresh()
        with pytest.raises(OSError, match="No space left"):
            late.refresh()
        assert right_large(late, *more) == set(more)

    def test_a_late_comer_of_another_namespace_too(self, open_store, tmp_path: Path) -> None:
        mine, late = open_store(LARGE, max_bytes=6 << 20), open_store(LARGE, max_bytes=6 << 20, namespace="late")
        self.fill(mine, 0, 765)
        for _ in range(5):
            may_grow(late)
            self.fill(late, 0, 265)
            self.settle(mine, late)
        assert abs(self.owned(mine) - self.owned(late)) <= 1
        assert self.owned(mine) + self.owned(late) >= 5
        assert disk_bytes(tmp_path) <= 6 << 20

    def test_requests_of_the_dead_are_removed(self, open_store, neighbour, tmp_path: Path) -> None:
        mine = open_store(LARGE, max_bytes=two_slabs())
        self.fill(mine, 0, 250)
        control = tmp_path / "kv" / CONTROL_DIR
        (control / f"want-0-{'0' * 16}-{'1' * 16}").touch()
        (control / "want-garbage").touch()
        mine.refresh()
        assert [path.name for path in control.glob("want-*")] == ["want-garbage"]
        assert self.owned(mine) == 2

    def test_a_neighbour_that_was_stopped_while_it_asked_is_given_no_more(
        self, open_store, tmp_path: Path, monkeypatch
    ) -> None:
        mine, control = open_store(LARGE, namespace="mine", max_bytes=6 << 20), tmp_path / "kv" / CONTROL_DIR
        with upkeep_of(mine).lock:  # its thread gives nothing away
            self.fill(mine, 0, 765)
            child = Fork(hold_open, str(tmp_path / "kv"), SMALL, 6 << 20, 9000, 9001)
            while not (asked := list(control.glob("want-*"))):
                assert child.is_alive
            child.stop()
            os.utime(asked[0], ns=(0, 0))  # as time passes
            monkeypatch.setattr(quota_module, "_GIVEN_S", 0.0)
            for _ in range(10):
                upkeep_of(mine).poll()
            child.kill()
            assert self.owned(mine) == 6

    def test_who_has_as_much_gives_nothing(self, open_store) -> None:
        mine, theirs = open_store(LARGE, max_bytes=4 << 20), open_store(LARGE, max_bytes=4 << 20)
        for first in range(0, 1600, 400):
            self.fill(mine, first, 200)
            self.fill(theirs, first + 200, 200)
            self.settle(mine, theirs)
        assert (self.owned(mine), self.owned(theirs)) == (2, 2)


class TestAccess:
    @pytest.mark.parametrize("umask", [0o000, 0o077], ids=oct)
    @pytest.mark.parametrize(("mode", "modes"), [("private", (0o700, 0o600)), ("group", (0o2770, 0o660))])
    def test_modes(self, open_store, tmp_path: Path, umask: int, mode: str, modes: tuple[int, int]) -> None:
        before = os.umask(umask)
        try:
            write(open_store(max_bytes=two_slabs(), mode=mode), *KEYS[:3])
        finally:
            os.umask(before)
        every = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
        assert {stat.S_IMODE(path.lstat().st_mode) for path in every if path.is_dir()} == {modes[0]}
        assert {stat.S_IMODE(path.lstat().st_mode) for path in every if path.is_file()} == {modes[1]}

    @pytest.fixture
    def precious(self, tmp_path: Path):
        path = tmp_path / "victim"
        path.mkdir()
        (path / "precious.table").write_bytes(b"p" * 9000)
        yield path
        assert [(one.name, one.read_bytes()) for one in path.iterdir()] == [("precious.table", b"p" * 9000)]

    def test_links_lead_nowhere(self, open_store, tmp_path: Path, precious: Path) -> None:
        store = open_store(max_bytes=slab_of(8))
        write(store, *KEYS[:4])
        store.close()
        (namespace,) = {path.parent for path in tables(tmp_path / "kv")}
        for suffix in (".table", ".slab"):
            (namespace / f"0000{suffix}").symlink_to(precious / "precious.table")
        (tmp_path / "kv" / "linked").symlink_to(precious)
        (tmp_path / "kv" / CONTROL_DIR / "slabs").unlink()
        (tmp_path / "kv" / CONTROL_DIR / "slabs").symlink_to(precious / "precious.table")
        store = open_store(max_bytes=slab_of(8))
        assert right(store, *KEYS[:4]) == set(KEYS[:4])
        write(store, *KEYS[4:12])
        store.refresh()

    def test_a_slab_with_a_second_name_is_not_used(self, open_store, tmp_path: Path, caplog) -> None:
        store = open_store(max_bytes=two_slabs())
        write(store, *KEYS[:4])
        store.close()
        os.link(payloads(tmp_path)[0], tmp_path / "second")
        before = (tmp_path / "second").read_bytes()
        store = open_store(max_bytes=two_slabs())
        assert right(store, *KEYS[:4]) == set()
        assert "hard link" in caplog.text, "somebody wonders where the blocks are"
        assert write(store, *KEYS[:4]) == [True] * 4
        assert (tmp_path / "second").read_bytes() == before

    @needs_root
    @pytest.mark.parametrize("suffix", [".table", ".slab"])
    def test_a_slab_of_another_user_is_not_used(self, open_store, tmp_path: Path, suffix: str) -> None:
        store = open_store(max_bytes=two_slabs())
        write(store, *KEYS[:4])
        store.close()
        (path,) = [path for path in (*tables(tmp_path), *payloads(tmp_path)) if path.suffix == suffix]
        os.chown(path, NOBODY, NOBODY)
        before = path.read_bytes()
        store = open_store(max_bytes=two_slabs())
        assert right(store, *KEYS[:4]) == set()
        assert write(store, *KEYS[4:8]) == [True] * 4
        store.refresh()
        assert path.read_bytes() == before

    def test_a_link_in_the_namespaces_place_is_refused(self, open_store, tmp_path: Path, precious: Path) -> None:
        open_store(max_bytes=two_slabs()).close()
        shutil.rmtree(tmp_path / "kv" / "=")
        (tmp_path / "kv" / "=").symlink_to(precious)
        with pytest.raises(ConfigError, match="cannot use"):
            DiskStore(tmp_path / "kv", SMALL, max_bytes=two_slabs())

    def test_a_link_put_there_later_ends_the_use_of_it(self, open_store, tmp_path: Path, precious: Path) -> None:
        store = open_store(max_bytes=two_slabs())
        write(store, *KEYS[:4])
        (tmp_path / "kv" / "=").rename(tmp_path / "moved")
        (tmp_path / "kv" / "=").symlink_to(precious)
        store.refresh()
        assert right(store, *KEYS[:4]) == set()
        with pytest.raises(StoreError, match="=") as caught:
            write(store, KEYS[0])
        assert "Errno" not in str(caught.value)


def test_a_block_that_both_write_at_once_is_right(open_store) -> None:
    mine, theirs = open_store(max_bytes=two_slabs()), open_store(max_bytes=two_slabs())
    key, block = KEYS[0], aligned(block_of(KEYS[0], SMALL))
    assert mine.write([key], [block]) == theirs.write([key], [block]) == [True]
    for store in (mine, theirs, mine):
        store.refresh()
    assert right(mine, key) == right(theirs, key) == {key}
