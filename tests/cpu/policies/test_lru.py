# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.testing import CachePolicyContract, PolicyDriver, keys


class TestLRU(CachePolicyContract):
    def make_policy(self, capacity: int) -> LRUCachePolicy:
        return LRUCachePolicy(capacity)


def test_a_use_while_parked_makes_a_block_recent() -> None:
    driver = PolicyDriver(LRUCachePolicy(4))
    for number in (1, 2, 3, 4):
        driver.store(keys(number))
    driver.pin(*keys(1))
    assert driver.evict(1) == keys(2)
    driver.unpin(*keys(1))
    driver.policy.touch(keys(1))
    driver.policy.check_invariants()
    assert driver.drain() == keys(3, 4, 1)


def test_a_parked_block_can_be_found_and_removed() -> None:
    driver = PolicyDriver(LRUCachePolicy(4))
    for number in (1, 2, 3):
        driver.store(keys(number))
    driver.pin(*keys(1))
    driver.evict(1)
    assert driver.policy.get_all(keys(3, 1, 2)) == [driver.blocks[keys(3)[0]], driver.blocks[keys(1)[0]], None]
    driver.unpin(*keys(1))
    assert driver.policy.remove(keys(1)[0]) is driver.blocks.pop(keys(1)[0])
    assert driver.drain() == keys(3)
