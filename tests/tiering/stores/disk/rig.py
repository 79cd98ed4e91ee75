# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of DiskStore."""

from __future__ import annotations

import mmap
import time
from multiprocessing.connection import Connection
from pathlib import Path

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.format import PAYLOAD_SUFFIX, TABLE_SUFFIX, SlabFormat
from kvoffload.tiering.stores.disk.slabs import Slabs
from kvoffload.tiering.stores.disk.upkeep import Upkeep
from kvoffload.tiering.stores.root import directory_of

SMALL, PAGED = 1000, 8192


def aligned(data: bytes) -> memoryview:
    """Return ``data`` in page-aligned memory, like slots of host memory."""
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    return memoryview(buffer)


def write(store: DiskStore, *keys: OffloadKey, size: int = SMALL) -> list[bool]:
    step = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = memoryview(mmap.mmap(-1, step * max(len(keys), 1)))
    blocks = [memory[start : start + size] for start in range(0, step * len(keys), step)]
    for key, block in zip(keys, blocks, strict=True):
        block[:] = block_of(key, size)
    return store.write(keys, blocks)


def read(store: DiskStore, key: OffloadKey, size: int = SMALL) -> bytes | None:
    buffer = aligned(bytes(size))
    return bytes(buffer) if store.read_into([key], [buffer]) == [True] else None


def right(store: DiskStore, *keys: OffloadKey, size: int = SMALL) -> set[OffloadKey]:
    """The keys whose blocks can be read. Every block that can be read is right."""
    found, buffer = set(), aligned(bytes(size))
    for key in keys:
        if store.read_into([key], [buffer]) == [True]:
            assert buffer == block_of(key, size), "wrong bytes"
            found.add(key)
    return found


def here(store: DiskStore, *keys: OffloadKey) -> set[OffloadKey]:
    return {key for key, found in zip(keys, store.contains(keys), strict=True) if found}


def upkeep_of(store: DiskStore) -> Upkeep:
    """Return the store's background work, which a test does itself while it holds the lock."""
    return store._upkeep


def slabs_of(store: DiskStore) -> Slabs:
    return store._slabs


def may_grow(store: DiskStore) -> None:
    """Let a store that found no room for a slab ask again at its next write, instead of in a second."""
    store._quota.not_before_s = 0.0


def tables(root: Path) -> list[Path]:
    return sorted(root.rglob("*" + TABLE_SUFFIX))


def payloads(root: Path) -> list[Path]:
    return sorted(root.rglob("*" + PAYLOAD_SUFFIX))


def slab_of(num_slots: int, size: int = SMALL) -> int:
    """Return the bytes of a slab with this many slots."""
    return SlabFormat("", size).slab_bytes(num_slots)


def damage(root: Path, key: OffloadKey, size: int = SMALL, at: int = -1) -> None:
    """Flip a bit of the block in its file."""
    block = block_of(key, size)
    for path in payloads(root):
        start = path.read_bytes().find(block)
        if start >= 0:
            with path.open("r+b") as file:
                file.seek(start + at % size)
                file.write(bytes([block[at] ^ 4]))
            return
    raise AssertionError("the block is in no slab")


def hold_open(pipe: Connection, root: str, size: int, max_bytes: int, first: int, last: int) -> None:
    """Run in its own process: write the blocks with these numbers, report how many the store contains, and keep it
    open."""
    store, keys = DiskStore(root, size, "", max_bytes), keys_of(*range(first, last))
    pipe.send(store.write(keys, [memoryview(block_of(key, size)) for key in keys]).count(True))
    pipe.recv()


def sparse_root(root: Path, num_slabs: int, num_slots: int, size: int) -> None:
    """A root of slabs whose payloads are holes. The first slot of each slab, ``number``, has the block of that key."""
    layout, now_s = SlabFormat(directory_of(""), size), int(time.time())
    DiskStore(root, size, max_bytes=layout.slab_bytes(2)).close()
    for number, key in enumerate(keys_of(*range(num_slabs))):
        path = root / layout.directory / f"{number:016x}"
        entry = layout.entry(layout.hashed(key), bytes(16), now_s * 10**9)
        for suffix, header, length in (
            (PAYLOAD_SUFFIX, b"", num_slots * size),
            (TABLE_SUFFIX, layout.header(num_slots), layout.table_bytes(num_slots)),
        ):
            with path.with_suffix(suffix).open("wb") as file:
                file.write(header)
                file.truncate(length)
                if header:
                    file.seek(layout.entries_at(num_slots))
                    file.write(entry)
