# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sizes import by_size

from kvoffload.cpu.policies.arc import ARCCachePolicy
from kvoffload.testing import CachePolicyContract, PolicyDriver, key, keys


class TestARC(CachePolicyContract):
    def make_policy(self, capacity: int) -> ARCCachePolicy:
        return ARCCachePolicy(capacity)


class PaperARC:
    """Figure 4 of the paper, case by case; lists are LRU first. Slow, obvious, written from the pseudo-code."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def replace(self, x: int) -> None:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def access(self, x: int) -> bool:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            return True
        if x in b1:
            delta = 1 if len(b1) >= len(b2) else len(b2) / len(b1)
            self.p = min(self.p + delta, c)
            self.replace(x)
            b1.remove(x)
            t2.append(x)
            return False
        if x in b2:
            delta = 1 if len(b2) >= len(b1) else len(b1) / len(b2)
            self.p = max(self.p - delta, 0)
            self.replace(x)
            b2.remove(x)
            t2.append(x)
            return False
        if len(t1) + len(b1) == c:
            if len(t1) < c:
                b1.pop(0)
                self.replace(x)
            else:
                t1.pop(0)
        else:
            total = len(t1) + len(t2) + len(b1) + len(b2)
            if total >= c:
                if total == 2 * c:
                    b2.pop(0)
                self.replace(x)
        t1.append(x)
        return False


def access(driver: PolicyDriver, capacity: int, number: int) -> bool:
    if driver.policy.get(key(number)) is not None:
        driver.policy.touch(keys(number))
        return True
    driver.store(keys(number), evict=int(len(driver.policy) == capacity))
    return False


def lists(policy: ARCCachePolicy) -> tuple[list[bytes], ...]:
    return tuple(map(list, (policy.recent, policy.frequent, policy.recent_ghosts, policy.frequent_ghosts)))


def assert_equal_to_the_paper(capacity: int, trace: list[int]) -> None:
    paper = PaperARC(capacity)
    policy = ARCCachePolicy(capacity)
    driver = PolicyDriver(policy)
    for number in trace:
        assert access(driver, capacity, number) == paper.access(number)
        assert lists(policy) == tuple([key(n) for n in part] for part in (paper.t1, paper.t2, paper.b1, paper.b2))
        assert policy.target == pytest.approx(paper.p)
        policy.check_invariants()


@given(st.integers(1, 8), st.lists(st.integers(0, 16), max_size=200))
def test_single_accesses_are_the_papers(capacity: int, trace: list[int]) -> None:
    assert_equal_to_the_paper(capacity, trace)


def test_a_long_mixed_trace_is_the_papers() -> None:
    rng = random.Random(3)
    trace: list[int] = []
    while len(trace) < by_size(quick=5_000, thorough=20_000):
        if rng.random() < 0.1:
            start = rng.randrange(200)
            trace += range(start, start + 60)  # a scan
        else:
            trace += [int(rng.paretovariate(0.8)) % 300 for _ in range(40)]
    assert_equal_to_the_paper(37, trace)


def test_a_batch_of_new_blocks_is_its_keys_one_by_one() -> None:
    """Tail first, none being written out before all are in."""
    rng = random.Random(5)
    capacity = 24
    one, many = (PolicyDriver(ARCCachePolicy(capacity)) for _ in range(2))
    fresh = 1000
    for _ in range(2000):
        if rng.random() < 0.6:
            number = int(rng.paretovariate(0.6)) % 60
            access(one, capacity, number)
            access(many, capacity, number)
        else:
            batch = list(range(fresh, fresh + rng.randint(1, 6)))
            fresh += len(batch)
            for number in reversed(batch):
                one.reserve(keys(number), evict=int(len(one.policy) == capacity))
            one.publish(keys(*batch))
            many.store(keys(*batch), evict=max(len(many.policy) + len(batch) - capacity, 0))
        assert isinstance(one.policy, ARCCachePolicy)
        assert isinstance(many.policy, ARCCachePolicy)
        assert lists(one.policy) == lists(many.policy)
        assert one.policy.target == many.policy.target


def test_an_eviction_for_no_key_is_the_papers_replace_again_and_again() -> None:
    """This also holds if the target is between two sizes: blocks above it are evicted."""
    rng, has_fraction = random.Random(4), False
    for _ in range(30):
        policy = ARCCachePolicy(8)
        driver = PolicyDriver(policy)
        for _ in range(90):
            access(driver, 8, int(rng.paretovariate(0.3)) % 24)
        recent, frequent = list(policy.recent), list(policy.frequent)
        has_fraction |= policy.target % 1 > 0
        expected = set()
        for _ in range(rng.randint(1, 8)):
            gives = recent if recent and (len(recent) > policy.target or not frequent) else frequent
            expected.add(gives.pop(0))
        assert {*driver.evict(len(expected))} == expected
    assert has_fraction


def test_a_batch_of_ghosts_comes_back_as_frequent_and_moves_the_target_for_each() -> None:
    policy = ARCCachePolicy(4)
    driver = PolicyDriver(policy)
    driver.store(keys(1, 2))
    policy.touch(keys(1, 2))
    driver.store(keys(3, 4))
    driver.store(keys(5, 6), evict=2)
    assert list(policy.recent_ghosts) == keys(4, 3)
    driver.store(keys(3, 4), evict=2)
    assert policy.target == 2.0
    assert {*policy.frequent} >= {*keys(3, 4)}
    assert not policy.recent_ghosts.keys() & {*keys(3, 4)}
    policy.check_invariants()


def test_a_batch_of_ghosts_evicts_what_the_paper_evicts_one_by_one() -> None:
    """Tail first."""
    rng, sizes = random.Random(8), set[int]()
    for _ in range(by_size(quick=150, thorough=2_000)):
        capacity = rng.randint(4, 12)
        paper, policy = PaperARC(capacity), ARCCachePolicy(capacity)
        driver = PolicyDriver(policy)
        for _ in range(80):
            number = int(rng.paretovariate(0.4)) % (3 * capacity)
            assert access(driver, capacity, number) == paper.access(number)
        ghosts = paper.b1 + paper.b2
        if len(policy) < capacity or not ghosts:
            continue
        batch = rng.sample(ghosts, rng.randint(1, min(3, len(ghosts))))
        for number in reversed(batch):
            paper.access(number)
        if not {*batch} <= {*paper.t2}:
            continue  # it evicts one of them again
        driver.store(keys(*batch), evict=len(batch))
        sizes.add(len(batch))
        assert {*policy.recent, *policy.frequent} == {key(number) for number in (*paper.t1, *paper.t2)}
        assert policy.target == pytest.approx(paper.p)
    assert sizes == {1, 2, 3}


def test_uses_by_the_request_that_writes_a_block_do_not_make_it_frequent() -> None:
    policy = ARCCachePolicy(4)
    driver = PolicyDriver(policy)
    driver.reserve(keys(1, 2))
    policy.touch(keys(1, 2))
    assert (len(policy.recent), len(policy.frequent)) == (2, 0)
    driver.publish(keys(1, 2))
    policy.touch(keys(1))
    assert (list(policy.recent), list(policy.frequent)) == (keys(2), keys(1))


def test_a_removed_block_leaves_no_ghost() -> None:
    policy = ARCCachePolicy(2)
    driver = PolicyDriver(policy)
    driver.reserve(keys(1))
    policy.remove(key(1))
    assert lists(policy) == ([], [], [], [])


def test_a_refused_eviction_leaves_ghosts_and_target_alone() -> None:
    rng = random.Random(9)
    for _ in range(40):
        policy = ARCCachePolicy(8)
        driver = PolicyDriver(policy)
        for _ in range(60):
            access(driver, 8, int(rng.paretovariate(0.7)) % 20)
        before = (lists(policy), policy.target)
        pinned = rng.sample(sorted(driver.blocks), 5)
        driver.pin(*pinned)
        ghosts = [*policy.recent_ghosts, *policy.frequent_ghosts]
        assert policy.evict(4, frozenset()) is None
        assert policy.evict(4, frozenset(), [*ghosts[:2], *keys(90, 91)]) is None
        assert policy.evict(4, frozenset(), keys(90, 91, 92, 93)) is None
        assert (lists(policy), policy.target) == before
        driver.unpin(*pinned)
        policy.check_invariants()
        assert (lists(policy), policy.target) == before


def test_if_one_list_has_no_idle_block_the_other_gives_it() -> None:
    policy = ARCCachePolicy(4)
    driver = PolicyDriver(policy)
    driver.store(keys(1, 2, 3, 4))
    policy.touch(keys(1, 2))
    driver.pin(*keys(3, 4))
    assert driver.evict(2) == keys(2, 1)
    driver.unpin(*keys(3, 4))
    assert driver.evict(2) == keys(4, 3)


def test_ghosts_are_kept_without_records() -> None:
    policy = ARCCachePolicy(2)
    assert isinstance(policy.recent_ghosts, OrderedDict)
    driver = PolicyDriver(policy)
    for number in range(6):
        driver.store(keys(number), evict=int(number >= 2))
    assert set(policy.recent_ghosts.values()) | set(policy.frequent_ghosts.values()) <= {None}
