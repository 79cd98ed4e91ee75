# SPDX-License-Identifier: Apache-2.0
"""FileSystemStore where it is more than the contract: damage, quota, restarts, neighbours, and disks that fail."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores import fs, fs_batch, fs_io, fs_space
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs_format import CONTROL_DIR, SUFFIX, BlockFormat, directory_of, namespace_of
from kvoffload.tiering.stores.fs_ledger import LEDGER_BYTES

SMALL, PAGED = 1000, 65536
KEY, OTHER = keys_of(1, 2)


def write(store: FileSystemStore, *keys: OffloadKey, size: int = SMALL) -> list[bool]:
    return store.write(keys, [memoryview(block_of(key, size)) for key in keys])


def read(store: FileSystemStore, key: OffloadKey, size: int = SMALL) -> bytes | None:
    buffer = mmap.mmap(-1, size)  # page-aligned, as the primary tier's rows are
    return bytes(buffer) if store.read_into([key], [memoryview(buffer)]) == [True] else None


def here(store: FileSystemStore, *keys: OffloadKey) -> set[OffloadKey]:
    return {key for key, found in zip(keys, store.contains(keys), strict=True) if found}


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*" + SUFFIX))


def disk_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


@pytest.fixture(params=["in batches", "one by one"])
def open_store(tmp_path: Path, request, monkeypatch) -> Iterator[Callable[..., FileSystemStore]]:
    """Stores whose files are moved by machine code in batches, and by Python one by one."""
    opened = []
    if request.param == "one by one":
        monkeypatch.setattr(fs_batch, "native_files", lambda: None)
    elif fs_batch.native_files() is None:
        pytest.skip("numba is not installed here")

    def make(size: int = SMALL, namespace: str = "", max_bytes: int | None = None, **options) -> FileSystemStore:
        opened.append(FileSystemStore(tmp_path / "kv", size, namespace, max_bytes, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


one_by_one = pytest.mark.parametrize("open_store", ["one by one"], indirect=True)
"""For tests that step between the system calls, which only Python's can be."""


def room_for(num_blocks: int, size: int = SMALL) -> int:
    return num_blocks * BlockFormat("", size).file_bytes + LEDGER_BYTES


# ----------------------------------------------------------------------------------------------------------- damage

POSITIONS = {
    SMALL: [0, 9, 12, 17, 30, 60, 75, 90, 119, 121, 127, 128, 600, 1127],
    PAGED: [0, 9, 12, 17, 30, 60, 75, 2000, 4089, 4095, 4096, 40000, 4096 + PAGED - 1],
}


@pytest.mark.parametrize(("size", "position"), [(s, p) for s in POSITIONS for p in POSITIONS[s]])
@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_anywhere_is_a_miss(open_store, tmp_path: Path, size: int, position: int, bit: int) -> None:
    store = open_store(size)
    write(store, KEY, OTHER, size=size)
    path = tmp_path / "kv" / BlockFormat("=", size).path_of(KEY)
    data = bytearray(path.read_bytes())
    data[position] ^= bit
    path.write_bytes(data)
    assert read(store, KEY, size) is None
    assert not path.exists()
    assert store.stats().corrupt_blocks == 1
    assert read(store, OTHER, size) == block_of(OTHER, size)
    assert write(store, KEY, size=size) == [True]
    assert read(store, KEY, size) == block_of(KEY, size)


@pytest.mark.parametrize("size", [SMALL, PAGED])
@pytest.mark.parametrize("left", [0, 1, 64, 127, 128, 129, 4095, 4096, 4097, -1])
def test_a_truncated_file_is_a_miss(open_store, tmp_path: Path, size: int, left: int) -> None:
    store = open_store(size)
    write(store, KEY, size=size)
    (path,) = files(tmp_path)
    length = path.stat().st_size
    os.truncate(path, min(left, length - 1) if left >= 0 else length - 1)
    assert store.contains([KEY]) == [False]
    assert read(store, KEY, size) is None
    assert not path.exists()


@pytest.mark.parametrize("size", [SMALL, PAGED])
def test_more_garbage(open_store, tmp_path: Path, size: int) -> None:
    store = open_store(size)
    for number, content in enumerate(
        [b"", b"x", bytes(10 * size), os.urandom(BlockFormat("", size).file_bytes), b"KVOBLOCK" * 1000]
    ):
        (key,) = keys_of(100 + number)
        write(store, key, size=size)
        path = tmp_path / "kv" / BlockFormat("=", size).path_of(key)
        path.write_bytes(content)
        assert read(store, key, size) is None
        assert not path.exists()
    write(store, KEY, size=size)
    (path,) = files(tmp_path)
    with path.open("ab") as file:
        file.write(b"!")
    assert read(store, KEY, size) is None


def test_two_swapped_files_are_two_misses(open_store, tmp_path: Path) -> None:
    store = open_store()
    write(store, KEY, OTHER)
    one, two = files(tmp_path)
    os.rename(one, tmp_path / "aside")
    os.rename(two, one)
    os.rename(tmp_path / "aside", two)
    assert store.contains([KEY, OTHER]) == [True, True]
    assert read(store, KEY) is None
    assert read(store, OTHER) is None


def test_a_file_from_another_namespace_is_a_miss(open_store, tmp_path: Path) -> None:
    mine, other = open_store(namespace="a"), open_store(namespace="b")
    other.write([KEY], [memoryview(bytes(SMALL))])
    shutil.copytree(tmp_path / "kv" / "b", tmp_path / "kv" / "a")
    assert mine.contains([KEY]) == [True]
    assert read(mine, KEY) is None
    assert read(other, KEY) == bytes(SMALL)


@pytest.mark.parametrize("size", [SMALL, PAGED])
def test_a_directory_in_place_of_a_file(open_store, tmp_path: Path, size: int) -> None:
    store = open_store(size)
    write(store, KEY, size=size)
    (path,) = files(tmp_path)
    path.unlink()
    path.mkdir()
    assert store.contains([KEY]) == [False]
    assert read(store, KEY, size) is None
    path.mkdir(exist_ok=True)
    assert write(store, KEY, size=size) == [True]
    assert read(store, KEY, size) == block_of(KEY, size)
    path.unlink()
    (path / "something").mkdir(parents=True)
    with pytest.raises(StoreError):
        write(store, KEY, size=size)
    assert write(store, KEY, OTHER, size=size) == [False, True]
    assert read(store, OTHER, size) == block_of(OTHER, size)


def test_damage_to_the_stores_own_files_costs_nothing(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, KEY)
    ledger = tmp_path / "kv" / CONTROL_DIR / "ledger"
    for content in (b"", b"garbage", os.urandom(LEDGER_BYTES), bytes(10_000)):
        ledger.write_bytes(content)
        write(store, *keys_of(*range(10, 20)))
        assert disk_bytes(tmp_path / "kv") <= room_for(4)
        assert len(files(tmp_path)) == 4
    ledger.unlink()
    write(store, *keys_of(*range(30, 40)))
    assert disk_bytes(tmp_path / "kv") <= room_for(4)
    shutil.rmtree(tmp_path / "kv" / CONTROL_DIR)
    assert write(store, KEY) == [True]
    assert read(store, KEY) == block_of(KEY, SMALL)


# ------------------------------------------------------------------------------- the kernel gives less than was asked


@one_by_one
@pytest.mark.parametrize("size", [SMALL, PAGED])
@pytest.mark.parametrize("step", [1, 7, 1000, 4096, 5000])
def test_short_reads_and_writes_are_continued(open_store, monkeypatch, size: int, step: int) -> None:
    if size // step > 10_000:
        pytest.skip("too many steps")
    real_readv, real_writev = os.readv, os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: real_writev(fd, [buffers[0][:step]]))
    monkeypatch.setattr(os, "readv", lambda fd, buffers: real_readv(fd, [buffers[0][:step]]))
    store = open_store(size)
    assert write(store, KEY, size=size) == [True]
    assert read(store, KEY, size) == block_of(KEY, size)
    assert store.stats().corrupt_blocks == 0


@one_by_one
def test_a_read_that_stops_short_is_no_proof(open_store, monkeypatch) -> None:
    store = open_store()
    write(store, KEY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", lambda fd, buffers: 0)
        assert read(store, KEY) is None
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert store.stats().corrupt_blocks == 0


@one_by_one
def test_bytes_that_are_wrong_once_are_no_proof(open_store, monkeypatch) -> None:
    store, real, calls = open_store(), os.readv, []

    def flaky(fd: int, buffers: list[memoryview]) -> int:
        moved = real(fd, buffers)
        calls.append(fd)
        if len(calls) == 1:
            buffers[-1][0] ^= 1
        return moved

    write(store, KEY)
    monkeypatch.setattr(os, "readv", flaky)
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert len(calls) == 2


@one_by_one
def test_one_unreadable_block_is_a_miss_and_stays(open_store, monkeypatch) -> None:
    store, real = open_store(), os.readv
    write(store, KEY, OTHER)
    fails = [True]

    def readv(fd: int, buffers: list[memoryview]) -> int:
        if fails and fails.pop():
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers)

    monkeypatch.setattr(os, "readv", readv)
    buffers = [memoryview(bytearray(SMALL)) for _ in range(2)]
    assert store.read_into([KEY, OTHER], buffers) == [False, True]
    assert store.read_into([KEY, OTHER], buffers) == [True, True]
    fails[:] = [True]
    with pytest.raises(StoreError, match="Input/output error"):
        store.read_into([KEY], buffers[:1])


@one_by_one
def test_direct_io_falls_back_by_itself(open_store, monkeypatch) -> None:
    real = os.open

    def without_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", without_direct)
    store = open_store(PAGED)
    assert write(store, KEY, size=PAGED) == [True]
    assert read(store, KEY, PAGED) == block_of(KEY, PAGED)


@pytest.mark.parametrize("open_store", ["in batches"], indirect=True)
@pytest.mark.parametrize("size", [SMALL, PAGED])
def test_what_goes_smoothly_needs_no_care(open_store, monkeypatch, size: int) -> None:
    store, keys = open_store(size), keys_of(*range(100))
    write(store, *keys, size=size)  # makes the directories
    store.discard(keys)
    for module, name in ((fs_io.FileIO, "read"), (fs_io.FileIO, "write"), (fs, "publish")):
        monkeypatch.setattr(module, name, None)
    assert write(store, *keys, size=size) == [True] * len(keys)
    buffers = [memoryview(mmap.mmap(-1, size)) for _ in keys]
    assert store.read_into(keys, buffers) == [True] * len(keys)
    assert [bytes(buffer) for buffer in buffers] == [block_of(key, size) for key in keys]


def test_what_a_neighbour_wrote_meanwhile_is_not_counted_twice(open_store, tmp_path: Path, monkeypatch) -> None:
    store, neighbour, keys = open_store(max_bytes=room_for(9)), open_store(max_bytes=room_for(9)), keys_of(*range(6))
    write(neighbour, *keys[::2])
    with monkeypatch.context() as patch:
        patch.setattr(fs, "look", lambda paths: [None] * len(paths))  # it looked a moment too early
        assert write(store, *keys) == [True] * 6
    assert store.stats().used_bytes == disk_bytes(tmp_path)
    assert [read(store, key) for key in keys] == [block_of(key, SMALL) for key in keys]


# ------------------------------------------------------------------------------------------------------------ quota


def test_the_quota_holds_and_the_oldest_go(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(5))
    keys = keys_of(*range(12))
    for key in keys:
        assert write(store, key) == [True]
        assert disk_bytes(tmp_path / "kv") <= room_for(5)
    assert here(store, *keys) == set(keys[-5:])
    assert store.take_evicted() == keys[:-5]
    assert store.stats().evicted_blocks == 7
    assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")


def test_reading_writing_again_and_touching_are_uses(open_store) -> None:
    store = open_store(max_bytes=room_for(4))
    keys = keys_of(0, 1, 2, 3)
    write(store, *keys)
    read(store, keys[0])
    write(store, keys[1])
    store.touch([keys[2]])
    write(store, *keys_of(10))
    assert here(store, *keys) == set(keys[:3])
    store.touch(keys[:3])  # head to tail: the tail goes first
    write(store, *keys_of(11, 12))
    assert here(store, *keys) == {keys[0], keys[1]}


def test_the_order_survives_a_restart_and_a_crash(open_store) -> None:
    store = open_store(max_bytes=room_for(4))
    keys = keys_of(0, 1, 2, 3)
    write(store, *keys)
    read(store, keys[0])
    # Not closed: as after a crash.
    again = open_store(max_bytes=room_for(4))
    write(again, *keys_of(10, 11))
    assert here(again, *keys) == {keys[0], keys[3]}


def test_a_smaller_quota_is_kept_from_the_next_write_on(open_store, tmp_path: Path) -> None:
    store = open_store()
    write(store, *keys_of(*range(10)))
    store.close()
    smaller = open_store(max_bytes=room_for(3))
    write(smaller, *keys_of(20))
    assert len(files(tmp_path)) == 3


def test_a_batch_never_evicts_its_own(open_store) -> None:
    store = open_store(max_bytes=room_for(4))
    keys = keys_of(*range(10))
    write(store, keys[0], keys[1])
    answers = write(store, *keys)
    assert sum(answers) == 4
    assert here(store, *keys) == {key for key, answer in zip(keys, answers, strict=True) if answer}
    assert answers[:2] == [True, True]


def test_all_namespaces_share_the_quota(open_store, tmp_path: Path) -> None:
    old, new = open_store(namespace="old"), open_store(namespace="new", max_bytes=room_for(4))
    write(old, *keys_of(0, 1, 2))
    write(new, *keys_of(0, 1, 2))
    assert disk_bytes(tmp_path / "kv") <= room_for(4)
    assert here(new, *keys_of(0, 1, 2)) == set(keys_of(0, 1, 2))
    assert here(old, *keys_of(0, 1, 2)) == set(keys_of(2))
    assert new.take_evicted() == [], "other namespaces' blocks are none of ours to tell of"


def test_two_stores_on_one_root_keep_one_quota_and_each_others_hot_blocks(open_store, tmp_path: Path) -> None:
    one, two = open_store(max_bytes=room_for(6)), open_store(max_bytes=room_for(6))
    keys = keys_of(*range(6))
    write(one, *keys)
    for store in (one, two):
        for _ in store.scan():
            pass
    read(two, keys[0])  # one knows the order of before
    write(one, *keys_of(10))
    assert keys[0] in here(one, *keys)
    assert keys[1] not in here(one, *keys)
    for number in range(20, 60):
        assert write(one if number % 2 else two, *keys_of(number)) == [True]
        assert disk_bytes(tmp_path / "kv") <= room_for(6)


@one_by_one
def test_bytes_given_back_can_be_used_again(open_store, tmp_path: Path, monkeypatch) -> None:
    store = open_store(max_bytes=room_for(3))
    keys = keys_of(0, 1, 2)
    for _ in range(5):
        write(store, *keys)
        store.discard(keys)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda fd, buffers: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        for _ in range(5):
            with pytest.raises(StoreError, match="full"):
                write(store, *keys)
    assert write(store, *keys) == [True] * 3
    assert store.take_evicted() == []
    for path in files(tmp_path):
        path.write_bytes(b"bad")
    assert [read(store, key) for key in keys] == [None] * 3
    assert write(store, *keys) == [True] * 3
    assert store.take_evicted() == keys, "bad, not evicted for room"
    assert store.stats().evicted_blocks == 0


def test_many_threads_under_a_tight_quota(open_store, tmp_path: Path) -> None:
    store, wrong, start = open_store(max_bytes=room_for(8)), [], threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait()
        for number in range(60):
            chosen = keys_of((7 * number + seed) % 24, (5 * number + seed) % 24)
            write(store, *chosen)
            if disk_bytes_while_others_work(tmp_path / "kv") > room_for(8):
                wrong.append("quota")
            wrong.extend(key for key in chosen if read(store, key) not in (None, block_of(key, SMALL)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.stats().corrupt_blocks == 0, "a file written over while it was read is no bad file"
    assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")


def disk_bytes_while_others_work(root: Path) -> int:
    """Never more than there was at some moment: what is counted is looked at again at the end."""
    seen = {}
    for path in root.rglob("*"):
        try:
            seen[path] = path.stat()
        except OSError:
            continue
    total = 0
    for path, status in seen.items():
        try:
            again = path.stat()
            # Inodes are used again: the time of the change tells.
            is_same = (again.st_ino, again.st_ctime_ns) == (status.st_ino, status.st_ctime_ns)
            total += status.st_size if path.is_file() and is_same else 0
        except OSError:
            continue
    return total


def test_evicted_files_are_written_over(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, *keys_of(0, 1, 2, 3))
    inodes = {path.stat().st_ino for path in files(tmp_path)}
    for number in range(4, 30, 2):
        new = keys_of(number, number + 1)
        assert write(store, *new) == [True, True]
        assert [read(store, key) for key in new] == [block_of(key, SMALL) for key in new]
        assert disk_bytes(tmp_path / "kv") <= room_for(4)
        assert {path.stat().st_ino for path in files(tmp_path)} == inodes


@one_by_one
def test_an_eviction_that_fails_in_the_middle_leaves_nothing_uncounted(open_store, tmp_path: Path, monkeypatch) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, *keys_of(0, 1, 2, 3))
    fatal = files(tmp_path)[0]

    def failing(real: Callable[..., None]) -> Callable[..., None]:
        def call(path: str, *args: str) -> None:
            if str(path) == str(fatal):
                raise OSError(errno.EIO, "Input/output error")
            real(path, *args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing(os.rename))
        patch.setattr(os, "unlink", failing(os.unlink))
        with pytest.raises(StoreError, match="Input/output"):
            write(store, *keys_of(10, 11, 12, 13))
    assert files(tmp_path) == [fatal]
    assert write(store, *keys_of(10)) == [True]
    assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")


def test_a_scan_finds_all_names_without_opening_a_block(open_store, monkeypatch) -> None:
    store = open_store(namespace="mine", max_bytes=room_for(50))
    write(store, *keys_of(*range(20)))
    write(open_store(namespace="other"), *keys_of(30))
    again, real = open_store(namespace="mine", max_bytes=room_for(50)), os.open

    def no_blocks(path: str, *args: int) -> int:
        assert not str(path).endswith(SUFFIX)
        return real(path, *args)

    monkeypatch.setattr(os, "open", no_blocks)
    assert sorted(key for batch in again.scan() for key in batch) == sorted(keys_of(*range(20)))


def test_writing_and_reading_go_on_while_a_scan_is_under_way(open_store, tmp_path: Path) -> None:
    write(open_store(), *keys_of(*range(40)))
    store = open_store(max_bytes=room_for(50))
    scan = store.scan()
    next(scan)
    assert read(store, keys_of(5)[0]) == block_of(keys_of(5)[0], SMALL)
    written = threading.Thread(target=write, args=(store, *keys_of(50, 51)))
    written.start()  # waits for the scan
    store.discard([])
    for _ in scan:
        pass
    written.join(30)
    assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")
    assert here(store, *keys_of(50, 51)) == set(keys_of(50, 51))


# ---------------------------------------------------------------------------------------------------- dead writers


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(open_store, tmp_path: Path) -> None:
    living = open_store()
    write(living, KEY)
    workplace = Path(living._workplace.path)
    (workplace / "half").write_bytes(b"a block being written")
    dead = tmp_path / "kv" / CONTROL_DIR / "w-0123456789abcdef"
    dead.mkdir()
    (dead / "7").write_bytes(b"left behind")
    open_store()
    assert not dead.exists()
    assert (workplace / "half").exists()


# ------------------------------------------------------------------------------------------------- disks that fail


def test_a_root_that_goes_away_and_comes_back(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, KEY, OTHER)
    shutil.rmtree(tmp_path / "kv")
    for call in (lambda: store.contains([KEY]), lambda: read(store, KEY), lambda: write(store, KEY)):
        with pytest.raises(StoreError):
            call()
    store.touch([KEY])
    store.discard([OTHER])
    assert not (tmp_path / "kv").exists(), "a mount that went away is not written under"
    (tmp_path / "kv").mkdir()
    assert store.contains([KEY]) == [False]
    assert read(store, KEY) is None
    for _ in range(3):
        assert write(store, *keys_of(*range(10, 14))) == [True] * 4
    assert here(store, *keys_of(*range(10, 14))) == set(keys_of(*range(10, 14)))
    assert disk_bytes(tmp_path / "kv") <= room_for(4)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    store = FileSystemStore(small_disk, PAGED)
    keys = keys_of(*range(12))
    answers = write(store, *keys, size=PAGED)
    assert True in answers
    assert False in answers
    for key, answer in zip(keys, answers, strict=True):
        assert read(store, key, PAGED) == (block_of(key, PAGED) if answer else None)
    with pytest.raises(StoreError, match="No space left"):
        write(store, *keys_of(20, 21), size=PAGED)
    assert not list((small_disk / CONTROL_DIR).glob("w-*/*")), "no halves are left"
    store.discard([key for key, answer in zip(keys, answers, strict=True) if answer][:2])
    assert write(store, *keys_of(20), size=PAGED) == [True]
    store.close()


def test_a_disk_that_becomes_read_only(small_disk: Path) -> None:
    store = FileSystemStore(small_disk, SMALL, max_bytes=room_for(10))
    write(store, KEY)
    store.close()
    store = FileSystemStore(small_disk, SMALL, max_bytes=room_for(10))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert store.contains([KEY]) == [True]
    with pytest.raises(StoreError, match="Read-only"):
        write(store, OTHER)
    store.touch([KEY])
    store.discard([KEY])
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert write(store, OTHER) == [True]
    assert read(store, OTHER) == block_of(OTHER, SMALL)
    store.close()


# ----------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("namespace", ["", "a", "org/model", "..", ".kvoffload", "=", "%2F", "ü" * 20, "a b", "~~"])
def test_any_namespace_is_one_directory_and_readable_again(namespace: str) -> None:
    directory = directory_of(namespace)
    assert "/" not in directory
    assert not directory.startswith(".")
    assert namespace_of(directory) == namespace


def test_long_namespaces_are_kept_apart() -> None:
    long = ["m/" * 300 + str(number) for number in range(3)]
    assert len({directory_of(name) for name in long}) == 3
    assert all(len(directory_of(name)) <= 255 for name in long)


def test_mistakes_are_told_before_anything_is_made(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    for options in ({"max_bytes": 100}, {"durability": "maybe"}):
        with pytest.raises(ConfigError):
            FileSystemStore(root, SMALL, **options)
    with pytest.raises(ConfigError):
        FileSystemStore(root, 0)
    assert not root.exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        FileSystemStore(tmp_path / "file", SMALL)


def test_a_writer_that_dies_during_a_walk_is_still_counted(open_store, tmp_path: Path, monkeypatch) -> None:
    """It was alive when the halves of the dead were swept, and dead when the walk asked who is alive."""
    store, dying = open_store(max_bytes=room_for(8)), open_store(max_bytes=room_for(8))
    write(store, *keys_of(0))
    write(dying, *keys_of(1))
    dying._space.reserve(1, BlockFormat("", SMALL).file_bytes, ())
    Path(dying._workplace.new_path()).write_bytes(bytes(BlockFormat("", SMALL).file_bytes))
    real_sweep = fs_space.sweep

    def sweep_then_die(root: str) -> int:
        swept = real_sweep(root)
        dying._workplace._drop()  # its lock goes, its files stay
        return swept

    monkeypatch.setattr(fs_space, "sweep", sweep_then_die)
    for _ in store.scan():
        pass
    assert store.stats().used_bytes >= disk_bytes(tmp_path)


@one_by_one
@pytest.mark.parametrize("times", [1, 3])
def test_a_neighbours_copy_that_vanishes_while_the_block_is_written_is_counted(
    open_store, tmp_path: Path, monkeypatch, times: int
) -> None:
    """A neighbour has written the block just before us, and evicts it just after our file was refused its name."""
    store, neighbour = open_store(max_bytes=room_for(8)), open_store(max_bytes=room_for(8))
    real_publish, refused = fs.publish, []

    def publish(temporary: str, final: str) -> bool:
        if len(refused) == times or store._workplace.path not in temporary:
            return real_publish(temporary, final)
        assert write(neighbour, KEY) == [True]
        answer = real_publish(temporary, final)
        neighbour.discard([KEY])
        refused.append(answer)
        return answer

    monkeypatch.setattr(fs, "publish", publish)
    assert write(store, KEY) == [True]
    assert refused == [False] * times
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert len(files(tmp_path)) == 1
    write(store, OTHER)  # which looks into the ledger
    assert store.stats().used_bytes == disk_bytes(tmp_path)


@one_by_one
def test_a_root_that_goes_away_in_the_middle_of_a_write_is_not_made_again(
    open_store, tmp_path: Path, monkeypatch
) -> None:
    """Whatever would be written to that path then is on another disk than the one the quota is about."""
    store, root = open_store(max_bytes=room_for(8)), tmp_path / "kv"
    real_publish = fs.publish

    def publish(temporary: str, final: str) -> bool:
        if root.exists():
            root.rename(tmp_path / "away")
        return real_publish(temporary, final)

    monkeypatch.setattr(fs, "publish", publish)
    with pytest.raises(StoreError):
        write(store, KEY)
    assert not root.exists()
    (tmp_path / "away").rename(root)
    monkeypatch.setattr(fs, "publish", real_publish)
    assert write(store, KEY) == [True]
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert store.stats().used_bytes >= disk_bytes(tmp_path)


def test_memory_that_may_not_be_written_is_not_written(open_store) -> None:
    store = open_store()
    write(store, KEY)
    mine = bytes(SMALL)
    with pytest.raises(BufferError):
        store.read_into([KEY], [memoryview(mine)])
    assert mine == bytes(SMALL)
