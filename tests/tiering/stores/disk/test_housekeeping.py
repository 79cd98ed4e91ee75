# SPDX-License-Identifier: Apache-2.0
"""Test the work of an idle store: as little as possible, however many slabs there are."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.tiering.stores.disk.rig import SMALL, here, may_grow, right, slabs_of, sparse_root, tables, upkeep_of, write

from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk import directory as directory_module
from kvoffload.tiering.stores.disk import index as index_module
from kvoffload.tiering.stores.disk.directory import Listings
from kvoffload.tiering.stores.disk.file import SlabFile

NUM_SLABS, NUM_SLOTS = 300, 40
MAX_BYTES = 1 << 40
CALLS = (
    *("open", "close", "dup", "stat", "lstat", "fstat", "statvfs", "listdir", "scandir"),
    *("pread", "preadv", "pwrite", "pwritev", "mkdir", "unlink", "rename"),
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """System calls, by name. Each call of ``slabs_in`` counts as two calls for each slab."""
    counts = Counter[str]()

    def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            counts[name] += 1
            return real(*arguments, **options)

        return call

    for module, names in ((os, CALLS), (fcntl, ["flock"]), (directory_module, ["slabs_in"])):
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


@pytest.fixture
def root(tmp_path: Path) -> Path:
    sparse_root(tmp_path / "kv", NUM_SLABS, NUM_SLOTS, SMALL)
    os.utime(tmp_path / "kv" / "=", ns=(0, 1_700_000_000_123_456_789))  # it was not touched for a long time
    return tmp_path / "kv"


@contextmanager
def opened(root: Path, *, max_bytes: int = MAX_BYTES) -> Iterator[DiskStore]:
    """Yield a store that knows all slabs, and whose own thread is paused."""
    store = DiskStore(root, SMALL, max_bytes=max_bytes)
    try:
        assert upkeep_of(store).is_loaded.wait(120)
        store.refresh()
        store.refresh()
        with upkeep_of(store).lock:
            yield store
        store.check_invariants()
    finally:
        store.close()


def test_a_poll_takes_few_calls_however_many_slabs_there_are(root: Path, calls: Counter[str]) -> None:
    with opened(root) as store:
        assert len(slabs_of(store).open) == NUM_SLABS
        calls.clear()
        for _ in range(10):
            upkeep_of(store).flush_changes()
            upkeep_of(store).poll()
        assert calls["slabs_in"] == 0
        assert calls.total() <= 10 * 16, calls


def test_a_start_moves_no_cell_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has room for all existing slabs before the first one is added."""
    placed, place = list[int](), index_module._place
    monkeypatch.setattr(index_module, "_LEAST_CELLS", 8)
    monkeypatch.setattr(index_module, "_place", lambda array, cells: placed.append(len(cells)) or place(array, cells))
    with opened(root) as store:
        assert len(slabs_of(store)) == NUM_SLABS == sum(placed)


def test_a_poll_reads_of_neighbours_only_what_has_changed(
    root: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = list[int](), SlabFile.read_entries
    with opened(root) as mine, opened(root) as theirs:
        assert sum(slab.is_own for slab in slabs_of(theirs).open.values()) == 0
        calls.clear()
        for _ in range(10):
            upkeep_of(theirs).poll()
        assert calls.total() <= 10 * (16 + 2 * NUM_SLABS), "for each slab its lock and its counters"
        keys = keys_of(*range(5000, 5000 + NUM_SLABS))
        for key in keys[:3]:
            write(mine, key)
        upkeep_of(mine).flush_changes()
        monkeypatch.setattr(
            SlabFile, "read_entries", lambda file, first, count: read.append(count) or real(file, first, count)
        )
        upkeep_of(theirs).poll()
        assert 0 < len(read) <= 3
        assert here(theirs, *keys) == set(keys[:3])
        assert right(theirs, *keys[:3]) == set(keys[:3])


def test_slabs_of_the_dead_are_taken_over_by_the_next_poll(root: Path) -> None:
    mine = DiskStore(root, SMALL, max_bytes=MAX_BYTES)
    assert upkeep_of(mine).is_loaded.wait(120)
    with opened(root) as theirs:
        mine.close()
        upkeep_of(theirs).poll()
        assert all(slab.is_own for slab in slabs_of(theirs).open.values())


def test_a_full_quota_lists_nothing_again(root: Path, calls: Counter[str]) -> None:
    used = sum(path.stat().st_size for path in (root / "=").iterdir())
    with opened(root, max_bytes=used) as store:
        for first in range(5000, 5000 + NUM_SLABS * (NUM_SLOTS - 1), 100):
            write(store, *keys_of(*range(first, first + 100)))
        for attempt in range(5):
            may_grow(store)
            if attempt == 1:
                calls.clear()
            assert write(store, *keys_of(*range(90_000 + 100 * attempt, 90_100 + 100 * attempt))) == [True] * 100
        assert calls["slabs_in"] == 0
        assert calls["listdir"] <= 2 * 4, "of the root"
        assert len(slabs_of(store).open) == NUM_SLABS


def test_times_of_use_are_written_down_by_and_by(root: Path, calls: Counter[str]) -> None:
    with opened(root) as store:
        upkeep_of(store).flush_uses()
        store.touch(keys_of(*range(NUM_SLABS)))
        upkeep_of(store)._uses_left = NUM_SLABS
        for _ in range(NUM_SLABS // 8 + 1):
            calls.clear()
            upkeep_of(store)._flush_some_uses()
            assert calls.total() <= 2 * 8
        for slab in slabs_of(store).open.values():
            assert slab.used_ns is not None
            assert slab.file.read_uses()[0] == slab.used_ns[0] // 10**9


def test_a_slab_that_is_replaced_by_another_of_its_name_is_noticed(root: Path) -> None:
    with opened(root) as store:
        table = tables(root)[0]
        table.with_suffix(".copy").write_bytes(table.read_bytes())
        table.with_suffix(".copy").rename(table)
        upkeep_of(store).poll()
        assert len(slabs_of(store).open) == NUM_SLABS, "dropped, and opened anew"
        assert slabs_of(store).by_name[table.stem].file.inodes[0] == table.stat().st_ino


class TestListings:
    @pytest.fixture
    def dir_fd(self, tmp_path: Path) -> Iterator[int]:
        fd = os.open(tmp_path, os.O_RDONLY)
        yield fd
        os.close(fd)

    def test_a_directory_at_rest_is_listed_once(self, dir_fd: int, tmp_path: Path) -> None:
        (tmp_path / "a.table").touch()
        os.utime(tmp_path, ns=(0, 1_700_000_000_123_456_789))
        listings = Listings()
        known = listings.slabs(dir_fd)
        assert [slab.name for slab in known] == ["a"]
        assert listings.slabs(dir_fd) is known
        (tmp_path / "b.table").touch()
        assert {slab.name for slab in listings.slabs(dir_fd)} == {"a", "b"}
        (tmp_path / "a.table").unlink()
        assert [slab.name for slab in listings.slabs(dir_fd)] == ["b"]

    @pytest.mark.parametrize(("changed_ns", "rest_ns"), [(10**18 + 5, 50_000_000), (10**18, 2_500_000_000)])
    def test_a_change_with_the_time_of_the_one_before_is_seen(
        self, dir_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed_ns: int, rest_ns: int
    ) -> None:
        """Both came within one tick of the file system's clock, which may be two seconds long."""
        listings = Listings()
        monkeypatch.setattr("time.time_ns", lambda: changed_ns + rest_ns)
        for number in range(3):
            (tmp_path / f"{number}.table").touch()
            os.utime(tmp_path, ns=(0, changed_ns))
            assert len(listings.slabs(dir_fd)) == number + 1

    def test_a_time_in_the_future_says_nothing(self, dir_fd: int, tmp_path: Path) -> None:
        listings = Listings()
        for number in range(3):
            (tmp_path / f"{number}.table").touch()
            os.utime(tmp_path, ns=(0, 4_000_000_000_123_456_789))
            assert len(listings.slabs(dir_fd)) == number + 1
