# SPDX-License-Identifier: Apache-2.0
"""Blocks whose parts lie on two nodes keep the contracts of stores and tiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.tiering.nodes.rig import SteppedTier, WholeStore, memory

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import BlockStoreContract, block_of
from kvoffload.testing.tier_contract import SecondaryTierContract
from kvoffload.tiering.base import SecondaryTierManager
from kvoffload.tiering.nodes import Nodes, NodesStore
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.format import PAYLOAD_SUFFIX
from kvoffload.tiering.stores.memory import MemoryStore


class TestTwoMemories(BlockStoreContract):
    def make_store(self, directory: Path) -> BlockStore:
        return WholeStore([MemoryStore(self.block_bytes // 2) for _ in range(2)], self.block_bytes)


class TestTwoDisks(BlockStoreContract):
    def make_store(self, directory: Path) -> BlockStore:
        stores = [DiskStore(directory / str(node), self.block_bytes // 2, max_bytes=1 << 24) for node in range(2)]
        return WholeStore(stores, self.block_bytes)

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        part = block_of(key, self.block_bytes)[self.block_bytes // 2 :]
        for path in (directory / "1").rglob("*" + PAYLOAD_SUFFIX):
            if (at := path.read_bytes().find(part)) >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([part[0] ^ 1]))
                return True
        return False

    def test_the_node_that_has_a_bad_part_is_known(self) -> None:
        with self._open() as (store, directory):
            good, bad = keys_of(1, 2)
            self._write(store, [good, bad])
            assert self.corrupt(store, directory, bad)
            assert [block is not None for block in self._read(store, [good, bad])] == [True, False]
            assert isinstance(store, WholeStore)
            assert isinstance(store.inner, NodesStore)
            assert (store.inner.bad_node(good), store.inner.bad_node(bad)) == (None, 1)


class TestTier(SecondaryTierContract):
    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        self.stores = [MemoryStore(512) for _ in range(2)]
        return SteppedTier(primary_kv_view, self.stores)

    def forget(self, tier: SecondaryTierManager, names: Sequence[OffloadKey]) -> bool:
        self.stores[1].discard(names)  # one part is enough
        return True


def test_a_block_that_is_no_slot_is_refused() -> None:
    own, other = memory(4, 64), memory(4, 64)
    store = NodesStore(Nodes(2), 0, own)
    for block in (other.cast("B")[:64], own.cast("B")[1:65], own.cast("B")[:32]):
        with pytest.raises(StoreError, match="no slot"):
            store.write(keys_of(1), [block])
