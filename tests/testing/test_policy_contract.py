# SPDX-License-Identifier: Apache-2.0
"""Test that the contract of cache policies fails policies that break it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import pytest
from tests.testing.broken import failures_of

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, Victims
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


class ReturnsOthers(LRUCachePolicy):
    def get(self, key: OffloadKey) -> BlockStatus | None:
        return None if super().get(key) is None else BlockStatus(0)


class UsesWhatItFinds(LRUCachePolicy):
    def get(self, key: OffloadKey) -> BlockStatus | None:
        self.touch([key])
        return super().get(key)


class UsesAllThatItFinds(LRUCachePolicy):
    def get_all(self, keys: Collection[OffloadKey]) -> list[BlockStatus | None]:
        self.touch(keys)
        return super().get_all(keys)


class KeepsWhatIsRemoved(LRUCachePolicy):
    def remove(self, key: OffloadKey) -> BlockStatus | None:
        return self.get(key)


class CountsOnly(LRUCachePolicy):
    def __len__(self) -> int:
        return 1


class EvictsOneAtLeast(LRUCachePolicy):
    def evict(self, n: int, protected: Collection[OffloadKey]) -> Victims | None:
        return super().evict(max(n, 1), protected)


class NeedsAList(LRUCachePolicy):
    def touch(self, keys: Collection[OffloadKey]) -> None:  # type: ignore[override]
        super().touch(keys[:])


class NeedsResidentKeys(LRUCachePolicy):
    def touch(self, keys: Collection[OffloadKey]) -> None:  # type: ignore[override]
        keys = [*keys]
        assert None not in self.get_all(keys)
        super().touch(keys)


class UsesWhatIsReleased(LRUCachePolicy):
    def released(self, keys: Iterable[OffloadKey]) -> None:
        keys = [*keys]
        super().released(keys)
        self.touch(keys)


class NamesNobody(LRUCachePolicy):
    def next_victims(self, n: int) -> list[OffloadKey] | None:
        return []


class NamesTheNewest(LRUCachePolicy):
    def next_victims(self, n: int) -> list[OffloadKey] | None:
        return super().next_victims(1000)[::-1][:n]


class NamesAll(LRUCachePolicy):
    def next_victims(self, n: int) -> list[OffloadKey] | None:
        return [*self._blocks][:n]


class UsesWhatItNames(LRUCachePolicy):
    def next_victims(self, n: int) -> list[OffloadKey] | None:
        named = super().next_victims(n)
        self.touch(named or ())
        return named


class NamesNoneAtTimes(LRUCachePolicy):
    def next_victims(self, n: int) -> list[OffloadKey] | None:
        return super().next_victims(n) if n else None


class LooksAtAll(LRUCachePolicy):
    """At each block, for each eviction."""

    def evict(self, n: int, protected: Collection[OffloadKey]) -> Victims | None:
        for block in self.get_all([*self._blocks, *self._skipped]):
            assert block is not None
            assert block.pins is not None
        return super().evict(n, protected)


class InsertsBatchesOnly(LRUCachePolicy):
    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        return


class IsUnsound(LRUCachePolicy):
    def check_invariants(self) -> None:
        raise AssertionError


def failures(policy: Callable[[int], LRUCachePolicy], prefix: str = "test_") -> set[str]:
    """Return the tests of the contract that ``policy`` fails."""

    class Contract(CachePolicyContract):
        def make_policy(self, capacity: int) -> LRUCachePolicy:
            return policy(capacity)

    return failures_of(Contract, prefix, (AssertionError, KeyError, TypeError))


def test_a_right_policy_passes() -> None:
    assert failures(LRUCachePolicy) == set()


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (IgnoresProtection, "test_only_idle_unprotected_blocks_are_evicted"),
        (RemembersAfterClear, "test_clear_forgets_everything"),
        (EvictsHalf, None),
        (TouchesHeadFirst, "test_the_tail_of_a_touched_prefix_goes_first"),
        (ReturnsOthers, "test_insert_get_remove"),
        (ReturnsOthers, "test_random_calls_keep_exactly_what_was_not_evicted"),
        (UsesWhatItFinds, "test_get_does_not_change_the_order"),
        (UsesAllThatItFinds, "test_get_does_not_change_the_order"),
        (KeepsWhatIsRemoved, "test_insert_get_remove"),
        (CountsOnly, "test_insert_get_remove"),
        (CountsOnly, "test_evicted_keys_may_come_back"),
        (EvictsOneAtLeast, "test_evict_of_nothing"),
        (NeedsAList, "test_touch_takes_any_iterable_and_ignores_absent_keys"),
        (NeedsResidentKeys, "test_touch_takes_any_iterable_and_ignores_absent_keys"),
        (UsesWhatIsReleased, "test_a_block_that_is_idle_again_is_evicted_in_its_old_order"),
        (NamesNobody, "test_the_next_victims_are_those_that_new_blocks_evict"),
        (NamesTheNewest, "test_the_next_victims_are_those_that_new_blocks_evict"),
        (NamesAll, "test_the_next_victims_are_those_that_new_blocks_evict"),
        (UsesWhatItNames, "test_the_next_victims_are_those_that_new_blocks_evict"),
        (NamesNoneAtTimes, "test_the_next_victims_are_those_that_new_blocks_evict"),
        (LooksAtAll, "test_pinned_blocks_are_stepped_over_once"),
        (InsertsBatchesOnly, "test_a_block_may_be_inserted_alone_and_unannounced"),
        (IsUnsound, "test_insert_get_remove"),
        (IsUnsound, "test_a_refused_eviction_changes_nothing"),
        (IsUnsound, "test_random_calls_keep_exactly_what_was_not_evicted"),
        (IsUnsound, "test_evicted_keys_may_come_back"),
        (IsUnsound, "test_a_block_may_be_inserted_alone_and_unannounced"),
    ],
)
def test_wrong_policies_fail(policy: type[LRUCachePolicy], test: str | None) -> None:
    failed = failures(policy, test or "test_")
    assert failed
    assert test is None or test in failed


def test_the_driver_does_what_a_manager_does() -> None:
    driver = PolicyDriver(LRUCachePolicy(4))
    driver.store(keys(1, 2, 3))
    driver.pin(key(3))
    assert driver.idle() == {*keys(1, 2)}
    assert not driver.reserve(keys(4, 5, 6), evict=3)
    assert driver.drain() == keys(2, 1)
