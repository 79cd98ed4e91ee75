# SPDX-License-Identifier: Apache-2.0
"""Tests for each kind of service, with a server of its own protocol."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from tests.tiering.stores.blocks import read, write
from tests.tiering.stores.object.inside import path_of

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys
from kvoffload.testing.store_contract import BlockStoreContract
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.object import ObjectStore
from kvoffload.tiering.stores.seal import SEAL_BYTES


class ServiceContract(BlockStoreContract):
    has_scan = False
    server: Any
    """``get(name)`` and ``put(name, value)`` reach its objects as another program would."""

    @abstractmethod
    def open_store(self, prefix: str, block_bytes: int) -> ObjectStore: ...

    def make_store(self, directory: Path) -> BlockStore:
        return self.open_store(directory.name, self.block_bytes)

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        assert isinstance(store, ObjectStore)
        name = f"{directory.name}/{path_of(store, key)}"
        value = bytearray(self.server.get(name))
        value[7] ^= 1
        self.server.put(name, bytes(value))
        return True

    def test_a_block_that_is_there_is_not_written_again(self) -> None:
        store = self.open_store("once", 4096)
        assert write(store, keys(1)) == [True]
        name = f"once/{path_of(store, keys(1)[0])}"
        value = bytes(4096 + SEAL_BYTES)  # of the right length: another one would be replaced
        self.server.put(name, value)
        assert write(store, keys(1)) == [True]
        assert self.server.get(name) == value
        assert read(store, keys(1)) == [False]
        assert write(store, keys(1)) == [True]
        assert read(store, keys(1)) == [True]
        store.close()
