# SPDX-License-Identifier: Apache-2.0
"""Test one slab's files, with any results of system calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.memory_files import memory_directory

from kvoffload.tiering.stores.disk.file import SlabFile
from kvoffload.tiering.stores.disk.format import ENTRY_BYTES, PAYLOAD_SUFFIX, TABLE_SUFFIX, SlabFormat
from kvoffload.tiering.stores.root import Access

SIZE = 4096
LAYOUT = SlabFormat("file", SIZE)
SLOTS = 8


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def slab(directory: int) -> Iterator[SlabFile]:
    slab = SlabFile.create("a", LAYOUT, SLOTS, directory, Access())
    yield slab
    slab.close()


def test_a_table_is_written_and_read_in_parts_if_need_be(slab: SlabFile, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    entries = bytes(range(1, 1 + 2 * ENTRY_BYTES))

    def write_some(fd: int, data: bytes, offset: int) -> int:
        return write(fd, data[:7], offset)

    def read_some(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return read(fd, [buffers[0][:5]], offset)

    monkeypatch.setattr(os, "pwrite", write_some)
    monkeypatch.setattr(os, "preadv", read_some)
    slab.write_entries(1, entries)
    assert slab.read_entries(0, 4) == bytes(ENTRY_BYTES) + entries + bytes(ENTRY_BYTES)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(OSError, match="wrote nothing") as caught:
        slab.write_entries(1, entries)
    assert caught.value.errno == errno.EIO


def test_a_table_that_was_cut_off_is_not_read(slab: SlabFile, tmp_path: Path) -> None:
    os.truncate(tmp_path / f"a{TABLE_SUFFIX}", LAYOUT.entries_at(SLOTS) + SLOTS * ENTRY_BYTES - 1)
    slab.read_entries(0, SLOTS - 1)
    with pytest.raises(OSError, match="was cut off") as caught:
        slab.read_entries(0, SLOTS)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("suffix", [TABLE_SUFFIX, PAYLOAD_SUFFIX])
def test_a_slab_is_there_as_long_as_both_of_its_names_are_its_own(
    slab: SlabFile, directory: int, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a{suffix}"
    assert slab.is_linked(directory)
    path.rename(tmp_path / "elsewhere")
    assert not slab.is_linked(directory)
    path.touch()
    assert not slab.is_linked(directory)
    (tmp_path / "elsewhere").replace(path)
    assert slab.is_linked(directory)


def test_memory_that_was_cut_off_is_not_touched_and_not_used_again() -> None:
    with memory_directory() as path:
        directory = os.open(path, os.O_RDONLY)
        slab = SlabFile.create("a", LAYOUT, SLOTS, directory, Access())
        blocks = [memoryview(bytearray([number]) * SIZE) for number in range(1, 5)]
        into = [memoryview(bytearray(SIZE)) for _ in blocks]
        assert slab.write(4, blocks) == 4
        assert slab.read(4, into) == 4
        assert into == blocks
        payload = path / f"a{PAYLOAD_SUFFIX}"
        os.truncate(payload, 6 * SIZE)
        assert slab.read(4, into) == 2
        os.truncate(payload, SLOTS * SIZE)  # with holes
        assert slab.write(5, blocks[:1]) == 1
        assert slab.read(4, into) == 4
        assert [bytes(block) for block in into] == [bytes(blocks[0]), bytes(blocks[0]), bytes(SIZE), bytes(SIZE)]
        slab.close()
        other = SlabFile.create("b", LAYOUT, SLOTS, directory, Access())
        os.truncate(path / f"b{PAYLOAD_SUFFIX}", SIZE)
        assert other.read(4, into) == 0
        other.close()
        os.close(directory)
