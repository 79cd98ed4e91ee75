# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of FileSystemStore."""

from __future__ import annotations

import mmap
from pathlib import Path

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import SUFFIX, BlockFormat

SMALL, PAGED = 1000, 65536
KEY, OTHER = keys_of(1, 2)


def write(store: FileSystemStore, *keys: OffloadKey, size: int = SMALL) -> list[bool]:
    return store.write(keys, [memoryview(block_of(key, size)) for key in keys])


def read(store: FileSystemStore, key: OffloadKey, size: int = SMALL) -> bytes | None:
    buffer = mmap.mmap(-1, size)  # page-aligned, like slots of host memory
    return bytes(buffer) if store.read_into([key], [memoryview(buffer)]) == [True] else None


def here(store: FileSystemStore, *keys: OffloadKey) -> set[OffloadKey]:
    return {key for key, found in zip(keys, store.contains(keys), strict=True) if found}


def path_of(store: FileSystemStore, key: OffloadKey) -> str:
    """Return the path of a block's file, below the root."""
    return store._layout.path_of(key)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*" + SUFFIX))


def room_for(num_blocks: int, size: int = SMALL) -> int:
    return num_blocks * BlockFormat("", size).file_bytes
