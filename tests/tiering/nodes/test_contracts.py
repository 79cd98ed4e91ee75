# SPDX-License-Identifier: Apache-2.0
"""Test that blocks with parts on two nodes fulfil the contracts of stores and tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.tiering.nodes.rig import LIMITS, SteppedTier, WholeStore, memory

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.errors import StoreError
from kvoffload.testing import FaultyStore, ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import BlockStoreContract, block_of
from kvoffload.testing.tier_contract import SecondaryTierContract
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvoffload.tiering.nodes import AgentTier, NodeAgent, Nodes, NodesStore
from kvoffload.tiering.nodes.messages import Act
from kvoffload.tiering.stores.base import BlockStore, StoreStats
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
        with pytest.raises(StoreError, match="not a slot"):
            store.write(keys_of(1), [block])


def until(is_true: Callable[[], bool], tier: SecondaryTierManager) -> None:
    end_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end_s
        tier.on_schedule_end()
        time.sleep(0.001)


def test_reads_that_were_off_are_on_again_once_the_nodes_can_read() -> None:
    """A probe reads into its own memory, which other nodes do not have."""
    clock, names, context = ManualClock(), keys_of(1, 2), ReqContext("r")
    stores = [FaultyStore(MemoryStore(64)) for _ in range(2)]
    tier = SteppedTier(memory(4, 64), stores, clock=clock)

    def end(job: JobMetadata) -> bool:
        (tier.submit_load if job.is_promotion else tier.submit_store)(job)
        ended: list[JobResult] = []
        until(lambda: bool(ended.extend(tier.get_finished_jobs()) or ended), tier)
        return ended[0].success

    try:
        assert end(JobMetadata(1, names, np.array([0, 1]), False, context))
        stores[1].broken = {"read_into": StoreError("no")}
        for number in range(2, 5):
            assert not end(JobMetadata(number, names[:1], np.array([0]), True, context))
        assert not tier.is_readable()
        before = len(stores[1].calls)
        clock.advance(2)
        until(lambda: len(stores[1].calls) > before + 1 and not tier._runner.num_open_slices, tier)
        assert not tier.is_readable(), "a node still cannot read"
        stores[1].broken = {}
        clock.advance(10)
        until(tier.is_readable, tier)
    finally:
        tier.shutdown()


def test_a_store_that_cannot_tell_its_news_fails_no_step() -> None:
    class Mute(MemoryStore):
        def stats(self) -> StoreStats:
            raise StoreError("no")

    nodes = Nodes(1)
    agent = NodeAgent(
        0, memory(1, 64), [AgentTier("mute", Mute(64), LIMITS), AgentTier("mem", MemoryStore(64), LIMITS)]
    )
    try:
        for _ in range(4):
            nodes.tell(1, Act.TOUCH, keys_of(1))
            agent.receive(nodes.take_packets())
            nodes.receive(agent.take_packets())
        assert (len(nodes.stats(0)), len(nodes.stats(1))) == (0, 1)
    finally:
        nodes.close()
        agent.shutdown()
