# SPDX-License-Identifier: Apache-2.0
"""A policy by an outsider who implements the abstract methods and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import pytest

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu import POLICIES, BlockStatus, CachePolicy, CPUOffloadingManager
from kvoffload.testing import CachePolicyContract, OffloadingManagerContract, keys


class FIFO(CachePolicy):
    def __init__(self, cache_capacity: int) -> None:
        self.blocks: dict[OffloadKey, BlockStatus] = {}

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self.blocks.get(key)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.blocks[key] = block

    def remove(self, key: OffloadKey) -> BlockStatus | None:
        return self.blocks.pop(key, None)

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        pass

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        victims = [item for item in self.blocks.items() if item[1].is_idle and item[0] not in protected][:n]
        if len(victims) < n:
            return None
        for key, _ in victims:
            del self.blocks[key]
        return victims

    def clear(self) -> None:
        self.blocks.clear()

    def __len__(self) -> int:
        return len(self.blocks)


class TestFIFO(CachePolicyContract):
    uses_matter = False
    steps_over_once = False

    def make_policy(self, capacity: int) -> FIFO:
        return FIFO(capacity)


@pytest.fixture
def fifo() -> Iterator[str]:
    POLICIES.register("test-fifo", FIFO)
    yield "test-fifo"
    POLICIES.unregister("test-fifo")


def test_a_registered_policy_is_chosen_by_name(fifo: str) -> None:
    manager = CPUOffloadingManager(2, fifo)
    request = ReqContext("r")
    for number in (1, 2, 3):
        output = manager.prepare_store(keys(number), request)
        assert output is not None
        manager.complete_store(output.keys_to_store)
        manager.touch(keys(1))
        manager.check_invariants()
    assert output.evicted_keys == keys(1)


class ManagerContract(OffloadingManagerContract):
    policy: str

    def make_manager(self, num_blocks: int) -> CPUOffloadingManager:
        return CPUOffloadingManager(num_blocks, self.policy, enable_events=True)

    def check(self, manager: CPUOffloadingManager) -> None:  # type: ignore[override]
        manager.check_invariants()


class TestManagerWithLRU(ManagerContract):
    policy = "lru"


class TestManagerWithARC(ManagerContract):
    policy = "arc"


@pytest.mark.usefixtures("fifo")
class TestManagerWithFIFO(ManagerContract):
    policy = "test-fifo"

    def test_the_head_of_a_touched_prefix_outlives_its_tail(self) -> None:
        """Not FIFO's promise."""
