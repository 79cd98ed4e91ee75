# SPDX-License-Identifier: Apache-2.0
"""The contract of cache policies fails policies that break it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import Victims
from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.testing.keys import key, keys
from kvoffload.testing.policy_contract import CachePolicyContract, PolicyDriver


class IgnoresProtection(LRUCachePolicy):
    def evict(self, n: int, protected: Collection[OffloadKey]) -> Victims | None:
        return super().evict(n, frozenset())


class EvictsHalf(LRUCachePolicy):
    """Not atomic: a refused eviction has removed something."""

    def evict(self, n: int, protected: Collection[OffloadKey]) -> Victims | None:
        victims = super().evict(n, protected)
        if victims is None and len(self):
            super().evict(1, protected)
        return victims


class TouchesHeadFirst(LRUCachePolicy):
    def touch(self, keys: Collection[OffloadKey]) -> None:  # type: ignore[override]
        super().touch(list(keys)[::-1])


class RemembersAfterClear(LRUCachePolicy):
    def clear(self) -> None:
        pass


def failures(policy: Callable[[int], LRUCachePolicy]) -> set[str]:
    """The tests of the contract that ``policy`` fails."""

    class Contract(CachePolicyContract):
        def make_policy(self, capacity: int) -> LRUCachePolicy:
            return policy(capacity)

    failed = set()
    for name in dir(Contract):
        if name.startswith("test_"):
            try:
                getattr(Contract(), name)()
            except (AssertionError, KeyError):
                failed.add(name)
    return failed


def test_a_right_policy_passes() -> None:
    assert failures(LRUCachePolicy) == set()


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (IgnoresProtection, "test_only_idle_unprotected_blocks_are_evicted"),
        (RemembersAfterClear, "test_clear_forgets_everything"),
        (EvictsHalf, None),
        (TouchesHeadFirst, None),
    ],
)
def test_wrong_policies_fail(policy: type[LRUCachePolicy], test: str | None) -> None:
    failed = failures(policy)
    assert failed
    assert test is None or test in failed


def test_the_driver_does_what_a_manager_does() -> None:
    driver = PolicyDriver(LRUCachePolicy(4))
    driver.store(keys(1, 2, 3))
    driver.pin(key(3))
    assert driver.idle() == {*keys(1, 2)}
    assert not driver.reserve(keys(4, 5, 6), evict=3)
    assert driver.drain() == keys(2, 1)
