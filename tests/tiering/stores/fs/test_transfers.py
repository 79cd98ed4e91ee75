# SPDX-License-Identifier: Apache-2.0
"""FileSystemStore and a kernel that moves fewer bytes than asked for, or wrong ones, or fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.tiering.stores.rig import (
    KEY,
    OTHER,
    PAGED,
    SMALL,
    files,
    read,
    room_for,
    write,
)

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.fs.io import is_absence


@pytest.mark.parametrize(
    ("size", "step"), [(SMALL, 1), *[(size, step) for size in (SMALL, PAGED) for step in (7, 1000, 4096, 5000)]]
)
def test_short_reads_and_writes_are_continued(open_store, monkeypatch, size: int, step: int) -> None:
    real_readv, real_writev = os.readv, os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: real_writev(fd, [buffers[0][:step]]))
    monkeypatch.setattr(os, "readv", lambda fd, buffers: real_readv(fd, [buffers[0][:step]]))
    store = open_store(size)
    assert write(store, KEY, size=size) == [True]
    assert read(store, KEY, size) == block_of(KEY, size)
    assert store.stats().corrupt_blocks == 0


def test_a_read_that_stops_short_is_no_proof(open_store, monkeypatch) -> None:
    store = open_store()
    write(store, KEY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", lambda fd, buffers: 0)
        assert read(store, KEY) is None
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert store.stats().corrupt_blocks == 0


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


def test_a_block_that_is_there_does_not_hide_that_the_disk_takes_no_others(open_store, monkeypatch) -> None:
    def writev(fd: int, buffers: list[memoryview]) -> int:
        raise OSError(errno.EIO, "Input/output error")

    store = open_store()
    write(store, KEY)
    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(StoreError, match="Input/output error"):
        write(store, KEY, OTHER)
    assert write(store, KEY) == [True]


def test_direct_io_falls_back_by_itself(open_store, monkeypatch) -> None:
    real = os.open

    def without_direct(path: str, flags: int, mode: int = 0o777, **options: int | None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", without_direct)
    store = open_store(PAGED)
    assert write(store, KEY, size=PAGED) == [True]
    assert read(store, KEY, PAGED) == block_of(KEY, PAGED)


def test_a_block_that_a_neighbour_publishes_meanwhile_is_replaced_by_the_same(
    open_store, tmp_path: Path, monkeypatch
) -> None:
    store, neighbour, keys = open_store(max_bytes=room_for(9)), open_store(max_bytes=room_for(9)), keys_of(*range(6))
    real_writev, is_late = os.writev, []

    def writev(fd: int, buffers: list[memoryview]) -> int:
        if not is_late:
            is_late.append(True)
            assert write(neighbour, *keys[::2]) == [True] * 3
        return real_writev(fd, buffers)

    monkeypatch.setattr(os, "writev", writev)
    assert write(store, *keys) == [True] * 6
    assert len(files(tmp_path)) == 6
    assert [read(store, key) for key in keys] == [block_of(key, SMALL) for key in keys]


def test_no_two_writes_have_the_same_temporary_name(open_store, tmp_path: Path, monkeypatch) -> None:
    """This includes writes of the same block by stores that do not know of each other."""
    names, real = list[str](), os.rename

    def rename(temporary: str, final: str) -> None:
        names.append(temporary)
        assert Path(temporary).parent == Path(final).parent, "some file systems rename only within a directory"
        real(temporary, final)

    monkeypatch.setattr(os, "rename", rename)
    for store in (open_store(), open_store()):
        for _ in range(3):
            write(store, KEY, OTHER)
            store.discard([KEY, OTHER])
    assert len(set(names)) == len(names) == 12


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE, errno.ELOOP, errno.ENOTDIR, errno.EIO, errno.EACCES])
def test_what_counts_as_absence(number: int) -> None:
    assert is_absence(OSError(number, "")) == (number not in (errno.EIO, errno.EACCES))


@pytest.mark.parametrize("call", ["open", "readv"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT], ids=errno.errorcode.get)
def test_a_file_that_another_host_deletes_while_it_is_read_is_a_miss(
    open_store, monkeypatch, call: str, number: int
) -> None:
    """On a network mount, a deleted file is lost even for processes that have it open."""
    store = open_store()
    write(store, KEY)

    def gone(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, gone)
        assert read(store, KEY) is None
    assert store.stats().corrupt_blocks == 0
    assert store.take_lost() == {}
    assert read(store, KEY) == block_of(KEY, SMALL)


def test_a_rename_whose_answer_was_lost_and_that_is_sent_again_has_succeeded(open_store, tmp_path, monkeypatch) -> None:
    store, real = open_store(), os.rename

    def rename_twice(temporary: str, final: str) -> None:
        real(temporary, final)
        real(temporary, final)

    monkeypatch.setattr(os, "rename", rename_twice)
    assert write(store, KEY, OTHER) == [True, True]
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert len(files(tmp_path)) == 2


def test_a_bad_file_that_was_written_anew_while_it_was_judged_stays(open_store, tmp_path: Path, monkeypatch) -> None:
    store, neighbour = open_store(), open_store()
    write(store, KEY)
    (path,) = files(tmp_path)
    path.write_bytes(b"x" * path.stat().st_size)
    real, calls = os.readv, []

    def readv(fd: int, buffers: list[memoryview]) -> int:
        moved = real(fd, buffers)
        calls.append(fd)
        if len(calls) == 2:
            path.unlink()
            assert write(neighbour, KEY) == [True]
        return moved

    monkeypatch.setattr(os, "readv", readv)
    assert read(store, KEY) is None
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert store.stats().corrupt_blocks == 0


def test_memory_that_may_not_be_written_is_not_written(open_store) -> None:
    store = open_store()
    write(store, KEY)
    mine = bytes(SMALL)
    with pytest.raises(BufferError):
        store.read_into([KEY], [memoryview(mine)])
    assert mine == bytes(SMALL)
