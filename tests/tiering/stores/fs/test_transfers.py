# SPDX-License-Identifier: Apache-2.0
"""FileSystemStore and a kernel that gives less than was asked, or another answer."""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path

import pytest
from tests.tiering.stores.rig import (
    KEY,
    OTHER,
    PAGED,
    SMALL,
    disk_bytes,
    one_by_one,
    read,
    room_for,
    write,
)

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.fs import io as fs_io
from kvoffload.tiering.stores.fs import store as fs_store
from kvoffload.tiering.stores.fs.batch import BatchIO, address_of
from kvoffload.tiering.stores.fs.format import BlockFormat
from kvoffload.tiering.stores.fs.native import NOTHING, WRITTEN, native_files


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
    for module, name in ((fs_io.FileIO, "read"), (fs_io.FileIO, "write"), (fs_store, "publish")):
        monkeypatch.setattr(module, name, None)
    assert write(store, *keys, size=size) == [True] * len(keys)
    buffers = [memoryview(mmap.mmap(-1, size)) for _ in keys]
    assert store.read_into(keys, buffers) == [True] * len(keys)
    assert [bytes(buffer) for buffer in buffers] == [block_of(key, size) for key in keys]


def test_what_a_neighbour_wrote_meanwhile_is_not_counted_twice(open_store, tmp_path: Path, monkeypatch) -> None:
    store, neighbour, keys = open_store(max_bytes=room_for(9)), open_store(max_bytes=room_for(9)), keys_of(*range(6))
    write(neighbour, *keys[::2])
    with monkeypatch.context() as patch:
        patch.setattr(fs_store, "look", lambda paths: [None] * len(paths))  # it looked a moment too early
        assert write(store, *keys) == [True] * 6
    assert store.stats().used_bytes == disk_bytes(tmp_path)
    assert [read(store, key) for key in keys] == [block_of(key, SMALL) for key in keys]


def test_memory_that_may_not_be_written_is_not_written(open_store) -> None:
    store = open_store()
    write(store, KEY)
    mine = bytes(SMALL)
    with pytest.raises(BufferError):
        store.read_into([KEY], [memoryview(mine)])
    assert mine == bytes(SMALL)


@pytest.mark.parametrize(("sync", "stage"), [(True, NOTHING), (False, WRITTEN)])
def test_a_batch_that_cannot_be_synced_is_not_written(tmp_path: Path, sync: bool, stage: int) -> None:
    """The null device takes every byte and cannot sync; and it can't be renamed into a directory that is not there."""
    native = native_files()
    if native is None:
        pytest.skip("numba is not installed here")
    batch = BatchIO(BlockFormat("", SMALL), native, durable=sync)
    payload = bytearray(SMALL)
    target = str(tmp_path / "none" / "there")
    reached = batch.write(
        ["/dev/null"], [target], [bytes(128)], [address_of(memoryview(payload))], [time.time_ns()], direct=False
    )
    assert reached == [stage]
