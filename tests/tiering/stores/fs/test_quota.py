# SPDX-License-Identifier: Apache-2.0
"""FileSystemStore's quota and order of use: across restarts, namespaces, other processes and crashes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.files import disk_bytes
from tests.tiering.stores.rig import (
    KEY,
    OTHER,
    PAGED,
    SMALL,
    files,
    here,
    read,
    room_for,
    write,
)

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.fs import io as fs_io
from kvoffload.tiering.stores.fs import quota
from kvoffload.tiering.stores.fs.format import SUFFIX, BlockFormat
from kvoffload.tiering.stores.root import CONTROL_DIR, Access


def test_the_quota_holds_and_the_oldest_go(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(5))
    keys = keys_of(*range(12))
    for key in keys:
        assert write(store, key) == [True]
        assert disk_bytes(tmp_path / "kv") <= room_for(5)
    assert here(store, *keys) == set(keys[-5:])
    assert list(store.take_lost().items()) == [(key, "evicted") for key in keys[:-5]]
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


def test_a_batch_never_evicts_its_own_blocks(open_store) -> None:
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
    assert new.take_lost() == {}, "blocks of another namespace are not announced"


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


def test_released_bytes_can_be_reserved_again(open_store, tmp_path: Path, monkeypatch) -> None:
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
    assert store.take_lost() == {}
    for path in files(tmp_path):
        path.write_bytes(b"bad")
    assert [read(store, key) for key in keys] == [None] * 3
    assert write(store, *keys) == [True] * 3
    assert store.take_lost() == dict.fromkeys(keys, "corrupt"), "bad, not evicted for room"
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
    """Never more than at some one moment: a file counts only if it is unchanged at the end."""
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
            # Inodes are reused, so the time of the last change is compared as well.
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


def test_a_file_that_cannot_be_deleted_costs_itself_and_is_passed_over(open_store, tmp_path: Path, monkeypatch) -> None:
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
        assert sum(write(store, *keys_of(10, 11, 12, 13))) == 3
    assert fatal in files(tmp_path)
    assert disk_bytes(tmp_path / "kv") == room_for(4)
    assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")
    assert write(store, *keys_of(10)) == [True]
    assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")


def test_a_reservation_that_cannot_be_recorded_is_none(open_store, tmp_path: Path, monkeypatch) -> None:
    """As on a full disk, where the usage file is to be made anew."""
    store = open_store(max_bytes=room_for(4))

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        for _ in range(5):
            with pytest.raises(StoreError, match="No space left"):
                write(store, *keys_of(0, 1, 2))
    assert write(store, *keys_of(0, 1, 2, 3)) == [True] * 4
    assert store.take_lost() == {}
    assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")


def test_a_scan_finds_all_names_without_opening_a_block(open_store, monkeypatch) -> None:
    store = open_store(namespace="mine", max_bytes=room_for(50))
    write(store, *keys_of(*range(20)))
    write(open_store(namespace="other"), *keys_of(30))
    again, real = open_store(namespace="mine", max_bytes=room_for(50)), os.open

    def no_blocks(path: str, *args: int, **options: int | None) -> int:
        assert not str(path).endswith(SUFFIX)
        return real(path, *args, **options)

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


def test_a_block_that_is_published_during_a_walk_keeps_its_turn(open_store, monkeypatch) -> None:
    """Its bytes were reserved before the walk, which is past its directory when the file gets its name."""
    store, gate, arrived = open_store(max_bytes=room_for(3)), threading.Event(), threading.Event()
    write(open_store(namespace="walked last"), OTHER)
    real_writev = os.writev

    def writev(fd: int, buffers: list[memoryview]) -> int:
        arrived.set()
        assert gate.wait(30)
        return real_writev(fd, buffers)

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", writev)
        writer = threading.Thread(target=write, args=(store, KEY))
        writer.start()
        assert arrived.wait(30)
        scan = store.scan()
        assert next(scan) == []
        gate.set()
        writer.join(30)
        assert list(scan) == []
    write(store, *keys_of(10))
    write(store, *keys_of(11))  # instead of the other namespace's block
    assert here(store, KEY, *keys_of(10, 11)) == {KEY, *keys_of(10, 11)}
    write(store, *keys_of(12))
    assert here(store, KEY, *keys_of(10, 11, 12)) == set(keys_of(10, 11, 12))


def test_staging_directories_of_dead_writers_are_swept_and_of_live_ones_are_not(open_store, tmp_path: Path) -> None:
    living = open_store()
    write(living, KEY)
    staging = Path(living._staging.path)
    (staging / "half").write_bytes(b"a block being written")
    dead = tmp_path / "kv" / CONTROL_DIR / "w-0123456789abcdef"
    dead.mkdir()
    (dead / "7").write_bytes(b"left behind")
    open_store()
    assert not dead.exists()
    assert (staging / "half").exists()


def test_a_writer_that_dies_during_a_walk_is_still_counted(open_store, tmp_path: Path, monkeypatch) -> None:
    """It is alive when dead writers' directories are swept, and dead when the files are counted."""
    store, dying = open_store(max_bytes=room_for(8)), open_store(max_bytes=room_for(8))
    write(store, *keys_of(0))
    write(dying, *keys_of(1))
    reservation = dying._quota.reserve(1, BlockFormat("", SMALL).file_bytes, ())
    Path(reservation.temporaries[0]).write_bytes(bytes(BlockFormat("", SMALL).file_bytes))
    real_sweep = quota.sweep

    def sweep_then_die(root: str, access: Access) -> int:
        swept = real_sweep(root, access)
        dying._staging._release()  # the lock goes, the files stay
        return swept

    monkeypatch.setattr(quota, "sweep", sweep_then_die)
    for _ in store.scan():
        pass
    assert store.stats().used_bytes >= disk_bytes(tmp_path)


@pytest.mark.parametrize("times", [1, 3])
def test_a_neighbours_copy_that_vanishes_while_the_block_is_written_is_counted(
    open_store, tmp_path: Path, monkeypatch, times: int
) -> None:
    """A neighbour publishes the block just before us, and evicts it just after our rename was refused."""
    store, neighbour = open_store(max_bytes=room_for(8)), open_store(max_bytes=room_for(8))
    real_rename, refused = fs_io._rename_if_absent, []

    def rename(temporary: str, final: str) -> bool:
        if len(refused) == times or store._staging.path not in temporary:
            return real_rename(temporary, final)
        assert write(neighbour, KEY) == [True]
        answer = real_rename(temporary, final)
        neighbour.discard([KEY])
        refused.append(answer)
        return answer

    monkeypatch.setattr(fs_io, "_rename_if_absent", rename)
    assert write(store, KEY) == [True]
    assert refused == [False] * times
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert len(files(tmp_path)) == 1
    write(store, OTHER)  # reads the usage file
    assert store.stats().used_bytes == disk_bytes(tmp_path)


def test_only_files_of_the_right_size_are_written_over(open_store, tmp_path: Path) -> None:
    room = room_for(6, PAGED)
    large, small = open_store(PAGED, "large", room), open_store(SMALL, "small", room)
    write(large, *keys_of(*range(6)), size=PAGED)
    keys = keys_of(*range(10, 20))
    assert write(small, *keys) == [True] * 10
    assert [read(small, key) for key in keys] == [block_of(key, SMALL) for key in keys]
    assert small.stats().used_bytes == disk_bytes(tmp_path) <= room
