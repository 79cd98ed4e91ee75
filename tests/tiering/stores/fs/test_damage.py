# SPDX-License-Identifier: Apache-2.0
"""FileSystemStore and damaged files: always a miss."""

from __future__ import annotations

import os
import shutil
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
from kvoffload.tiering.stores.fs.format import BlockFormat
from kvoffload.tiering.stores.root import CONTROL_DIR

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
def test_garbage_in_a_file_is_a_miss(open_store, tmp_path: Path, size: int) -> None:
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


def test_damage_to_the_control_directory_costs_nothing(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, KEY)
    shutil.rmtree(tmp_path / "kv" / CONTROL_DIR)
    (tmp_path / "kv" / CONTROL_DIR).write_bytes(b"garbage")
    assert write(store, *keys_of(*range(10, 20))).count(True) == 4
    assert len(files(tmp_path)) == 4
    (tmp_path / "kv" / CONTROL_DIR).unlink()
    assert write(store, KEY) == [True]
    assert read(store, KEY) == block_of(KEY, SMALL)
