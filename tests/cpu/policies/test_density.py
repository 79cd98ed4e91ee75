# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest

from kvoffload.cpu.policies.base import BlockStatus
from kvoffload.cpu.policies.density import DensityCachePolicy
from kvoffload.cpu.policies.hit_density import NUM_CLASSES, HitDensity, densities
from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.cpu.policies.use_counts import UseCounts
from kvoffload.testing import CachePolicyContract, key


class TestContract(CachePolicyContract):
    def make_policy(self, capacity: int) -> DensityCachePolicy:
        return DensityCachePolicy(capacity)


class TestContractWhileLearning(CachePolicyContract):
    """The same with values that differ by class and age, as they would after a while."""

    def make_policy(self, capacity: int) -> DensityCachePolicy:
        policy = DensityCachePolicy(capacity)
        policy._model.values = [
            [2.0 ** (class_ // 2) / (bucket // 4 + 1) for bucket in range(40)] for class_ in range(NUM_CLASSES)
        ]
        return policy


class Cache:
    """A policy with slots around it, as a manager would drive it; blocks are idle at once."""

    def __init__(self, policy: DensityCachePolicy | LRUCachePolicy, capacity: int) -> None:
        self.policy = policy
        self.free = [BlockStatus(slot) for slot in range(capacity)][::-1]

    def use(self, path: Iterable[int]) -> None:
        """Every block of a path from tail to head."""
        for number in reversed(list(path)):
            if self.policy.get(key(number)) is not None:
                self.policy.touch([key(number)])
                continue
            if not self.free:
                victims = self.policy.evict(1, ())
                assert victims is not None
                self.free += [block for _, block in victims]
            block = self.free.pop()
            self.policy.insert(key(number), block)
            block.pins = 0

    def __contains__(self, number: int) -> bool:
        return self.policy.get(key(number)) is not None


def test_is_lru_until_it_has_learned() -> None:
    capacity, generator = 300, random.Random(7)
    density, lru = (Cache(kind(capacity), capacity) for kind in (DensityCachePolicy, LRUCachePolicy))
    for _ in range(450):  # fewer uses than a fit takes
        number = int(generator.paretovariate(0.7)) % 2000
        density.use([number])
        lru.use([number])
        assert len(density.policy) == len(lru.policy)
    assert {n for n in range(2000) if n in density} == {n for n in range(2000) if n in lru}
    victims = [policy.evict(50, ()) for policy in (density.policy, lru.policy)]
    assert [[k for k, _ in each or ()] for each in victims] == [[k for k, _ in victims[1] or ()]] * 2


def test_learns_to_keep_what_comes_back_late_over_a_flood() -> None:
    """A loop longer than an LRU can hold, between blocks that are used once and never again."""
    capacity = 400
    density, lru = (Cache(kind(capacity), capacity) for kind in (DensityCachePolicy, LRUCachePolicy))
    hits = {density: 0, lru: 0}
    fresh = 10_000
    for turn in range(300):
        again = [turn % 30 * 10 + step for step in range(10)]
        flood = list(range(fresh, fresh + 30))
        fresh += 30
        for cache in hits:
            hits[cache] += sum(number in cache for number in again)
            cache.use(again)
            cache.use(flood)
    assert hits[lru] == 0
    assert hits[density] > 1000


def test_a_prefix_is_never_outlived_by_its_tail() -> None:
    capacity, generator = 300, random.Random(3)
    cache = Cache(DensityCachePolicy(capacity), capacity)
    paths = [[100 * path + step for step in range(generator.randrange(2, 12))] for path in range(80)]
    broken = 0
    for _ in range(3000):
        path = paths[min(int(generator.expovariate(0.04)), 79)]
        cache.use(path[: generator.randrange(1, len(path) + 1)])
        broken += sum(later in cache and earlier not in cache for p in paths for earlier, later in pairwise(p))
    assert broken == 0
    cache.policy.check_invariants()


def test_the_way_around_pinned_blocks_gives_the_same_order() -> None:
    """One pinned block sends an eviction down the general path; its victims are those of the fast path."""
    capacity = 300
    fast, general = (Cache(DensityCachePolicy(capacity), capacity) for _ in range(2))
    generator = random.Random(11)
    pinned = key(10**6)
    for cache in (fast, general):
        cache.use([10**6])
    for _ in range(4000):
        number = int(generator.expovariate(0.01))
        for cache in (fast, general):
            cache.use([number, number + 1])
            cache.policy.touch([pinned])
    block = general.policy.get(pinned)
    assert block is not None
    block.pins = 1
    for n in (1, 40, 200):
        found = [cache.policy.evict(n, ()) for cache in (fast, general)]
        assert [k for k, _ in found[0] or ()] == [k for k, _ in found[1] or ()]
        assert len(found[0] or ()) == n
        general.policy.check_invariants()


@pytest.mark.parametrize("protect", [True, False])
def test_an_eviction_that_fails_changes_nothing(protect: bool) -> None:
    cache = Cache(DensityCachePolicy(300), 300)
    for number in range(300):
        cache.use([number])
    for number in range(0, 300, 3):
        cache.use([number])
    blocks = [cache.policy.get(key(number)) for number in (5, 150)]
    for block in blocks:
        assert block is not None
        block.pins = 0 if protect else 1
    shield = {key(5), key(150)} if protect else set()
    assert cache.policy.evict(299, shield) is None
    cache.policy.check_invariants()
    assert len(cache.policy) == 300
    first = cache.policy.evict(2, ())
    assert [k for k, _ in first or ()] == [key(1), key(2)]
    assert len(cache.policy.evict(296, shield) or ()) == 296
    assert 5 in cache and 150 in cache


def test_uses_while_writing_are_the_writers_own() -> None:
    policy = DensityCachePolicy(300)
    block = BlockStatus(0)
    policy.insert(key(1), block)
    policy.touch([key(1)])
    assert "[1, 0," in repr(policy)
    block.pins = 0
    policy.touch([key(1)])
    assert "[0, 1, 0," in repr(policy)


def test_remembers_uses_of_evicted_blocks_and_forgets_failed_stores() -> None:
    cache = Cache(DensityCachePolicy(300), 300)
    cache.use([1])
    cache.use([1])
    cache.policy.evict(1, ())
    policy = cache.policy
    policy.insert(key(1), BlockStatus(299))
    assert "[0, 0, 1, 0," in repr(policy)
    assert policy.remove(key(1)) is not None
    assert policy.remove(key(1)) is None
    policy.insert(key(1), BlockStatus(299))
    assert "[0, 0, 1, 0," in repr(policy)
    policy.clear()
    assert len(policy) == 0
    policy.insert(key(1), BlockStatus(299))
    assert "[1, 0," in repr(policy)


class TestHitDensity:
    def test_values_fall_with_age_and_rise_with_use(self) -> None:
        generator = np.random.default_rng(5)
        used, lost = generator.poisson(3, (2, NUM_CLASSES, 20)).astype(float)
        found = densities(used, lost, np.arange(1.0, 21.0))
        assert (np.diff(found, axis=1) <= 0).all()
        assert (np.diff(found, axis=0) >= 0).all()
        assert (found > 0).all()

    def test_a_class_that_comes_back_is_worth_more(self) -> None:
        used, lost = np.zeros((2, NUM_CLASSES, 10))
        lost[0, 9] = used[1, 3] = 10_000
        found = densities(used, lost, np.ones(10))
        assert found[1, 3] == pytest.approx(2, rel=0.05)  # one hit for half a span of waiting
        assert found[1, 4] < 0.1
        assert found[0, 0] < found[1, 0] / 50

    def test_thin_evidence_says_nothing(self) -> None:
        used, lost = np.zeros((2, NUM_CLASSES, 10))
        lost[0, 9] = used[0, 3] = 5000
        used[1, 3] = 1
        found = densities(used, lost, np.ones(10))
        assert found[1, 0] == pytest.approx(found[0, 0], rel=0.05)

    def test_follows_a_bounded_number_of_keys(self) -> None:
        model = HitDensity(100_000)
        for now in range(0, 5_000_000, model.sample_mask + 1):
            model.used(key(now), 0, now)
        assert 2000 < len(model._samples) <= 8192


class TestUseCounts:
    def test_remembers_at_least_size_and_at_most_twice_as_many(self) -> None:
        counts = UseCounts(100)
        generator = random.Random(1)
        digests = [generator.getrandbits(64) for _ in range(1000)]
        for at, digest in enumerate(digests):
            counts.remember(digest, 1 + at % 7)
            recent = range(max(0, at - 99), at + 1)
            assert [counts.recall(digests[n]) for n in recent] == [1 + n % 7 for n in recent]
            assert not any(counts.recall(digest) for digest in digests[: max(0, at - 199)])
        assert counts.recall(generator.getrandbits(64)) == 0

    def test_a_new_count_replaces_the_old_one(self) -> None:
        counts = UseCounts(10)
        counts.remember(1 << 40, 2)
        counts.remember(1 << 40, 9)
        assert counts.recall(1 << 40) == 7
        counts.clear()
        assert counts.recall(1 << 40) == 0
