# SPDX-License-Identifier: Apache-2.0
"""Another process on the root of a store, ``fs`` or ``disk``, which executes commands from its pipe.

``write NUMBERS``, ``read NUMBERS``, ``discard NUMBERS`` and ``scan`` answer ``done`` if no byte that was read is wrong.
``begin`` starts the work that a dead writer would leave half done. ``hold`` holds the root's lock until the next
message. ``hammer SEED COUNT`` performs COUNT random actions as fast as it can.
"""

from __future__ import annotations

import mmap
import os
import random
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk import format as slab_format
from kvoffload.tiering.stores.disk.directory import root_lock
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import TEMPORARY_PREFIX
from kvoffload.tiering.stores.root import Access, directory_of

SLAB_SLOTS = 4
"""Slots of a slab, in the tests that use this script."""
NUM_KEYS = 24
"""Keys that ``hammer`` uses."""


class Neighbour(ABC):
    store: BlockStore

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes

    def block(self, key: OffloadKey) -> memoryview:
        memory = mmap.mmap(-1, self.block_bytes)
        memory[:] = block_of(key, self.block_bytes)
        return memoryview(memory)

    def write(self, keys: list[OffloadKey]) -> None:
        self.store.write(keys, [self.block(key) for key in keys])

    def read(self, keys: list[OffloadKey]) -> None:
        buffers = [memoryview(mmap.mmap(-1, self.block_bytes)) for _ in keys]
        for key, buffer, answer in zip(keys, buffers, self.store.read_into(keys, buffers), strict=True):
            assert not answer or buffer == block_of(key, self.block_bytes), "wrong bytes"

    def scan(self) -> None:
        for _ in self.store.scan():
            pass

    def hammer(self, seed: int, count: int) -> None:
        chance, keys = random.Random(seed), keys_of(*range(NUM_KEYS))
        for _ in range(count):
            first = chance.randrange(NUM_KEYS - 4)
            some = keys[first : first + chance.randrange(1, 5)]
            match chance.randrange(8):
                case 0 | 1 | 2:
                    self.write(some)
                case 3 | 4 | 5:
                    # A block that was just evicted is being overwritten at this moment.
                    self.read(list(self.store.take_lost())[-4:] or some)
                case 6:
                    self.scan()
                case _:
                    self.store.discard(some)
        assert self.store.stats().corrupt_blocks == 0, "an eviction is no corruption"

    @abstractmethod
    def begin(self) -> None:
        """Begins a file, and leaves it there."""

    @abstractmethod
    def hold(self) -> AbstractContextManager[object]:
        """Holds the lock that a write may need."""


class FileNeighbour(Neighbour):
    def __init__(self, root: str, block_bytes: int, max_bytes: int) -> None:
        super().__init__(block_bytes)
        self.root = root
        self.store = self.files = FileSystemStore(root, block_bytes, max_bytes=max_bytes)

    def begin(self) -> None:
        path = os.path.join(self.root, self.files._layout.path_of(keys_of(0)[0]))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(os.path.join(os.path.dirname(path), TEMPORARY_PREFIX + os.urandom(8).hex()), "wb") as file:
            file.write(bytes(self.block_bytes // 2))

    def hold(self) -> AbstractContextManager[object]:
        return nullcontext()  # there is none


class SlabNeighbour(Neighbour):
    def __init__(self, root: str, block_bytes: int, max_bytes: int) -> None:
        super().__init__(block_bytes)
        self.root = root
        slab_format._MIN_SLAB_BYTES = slab_format.SlabFormat("", block_bytes).slab_bytes(SLAB_SLOTS)
        self.store = self.slabs = DiskStore(root, block_bytes, max_bytes=max_bytes)

    def scan(self) -> None:
        self.slabs.refresh()
        super().scan()

    def begin(self) -> None:
        # Empty, as long as no space was taken for them: that needs room in the quota.
        path = os.path.join(self.root, directory_of(""), slab_format.NEW_PREFIX + os.urandom(8).hex())
        for suffix in (slab_format.TABLE_SUFFIX, slab_format.PAYLOAD_SUFFIX):
            open(path + suffix, "wb").close()

    def hold(self) -> AbstractContextManager[object]:
        return root_lock(self.root, Access())


def serve(pipe: Connection, kind: str, root: str, block_bytes: int, max_bytes: int) -> None:
    neighbour = (SlabNeighbour if kind == "disk" else FileNeighbour)(root, block_bytes, max_bytes)
    while True:
        try:
            what, *numbers = pipe.recv()
        except EOFError:
            return
        match what:
            case "write" | "read":
                getattr(neighbour, what)(keys_of(*numbers))
            case "discard":
                neighbour.store.discard(keys_of(*numbers))
            case "scan" | "begin":
                getattr(neighbour, what)()
            case "hammer":
                neighbour.hammer(*numbers)
            case "hold":
                with neighbour.hold():
                    pipe.send("done")
                    pipe.recv()
                continue
        pipe.send("done")
