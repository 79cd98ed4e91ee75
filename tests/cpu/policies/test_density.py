# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Collection, Iterable
from itertools import pairwise, zip_longest

import numpy as np
import numpy.typing as npt
import pytest
from tests.sizes import by_size

from kvoffload.base import NextUse, OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, with_options
from kvoffload.cpu.policies.density.classes import (
    NUM_CLASSES,
    NUM_DRAWS,
    NUM_GROUPS,
    NUM_USES,
    RISEN,
    SHARED,
)
from kvoffload.cpu.policies.density.log import Chunk
from kvoffload.cpu.policies.density.model import HitDensity, UseCounts, densities, hazards
from kvoffload.cpu.policies.density.policy import DensityCachePolicy
from kvoffload.cpu.policies.density.score import HintScore
from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.testing import CachePolicyContract, PolicyDriver, key, keys

Table = npt.NDArray[np.float64]


class TestContract(CachePolicyContract):
    def make_policy(self, capacity: int) -> DensityCachePolicy:
        return DensityCachePolicy(capacity)


def model_of(policy: DensityCachePolicy) -> HitDensity:
    return policy._model


class TestContractWhileLearning(CachePolicyContract):
    """The same with values that differ by class and age, as they would after a while."""

    def make_policy(self, capacity: int) -> DensityCachePolicy:
        policy = DensityCachePolicy(capacity)
        model_of(policy).values = [
            [2.0 ** (class_ // 2) / (bucket // 4 + 1) for bucket in range(40)] for class_ in range(NUM_CLASSES)
        ]
        return policy


class Cache:
    """A policy with slots around it, as a manager would drive it; blocks are idle at once."""

    def __init__(self, policy: DensityCachePolicy | LRUCachePolicy, capacity: int) -> None:
        self.policy = policy
        self.free = [BlockStatus(slot) for slot in range(capacity)][::-1]

    def use(self, path: Iterable[int], hint: NextUse = NextUse.UNKNOWN) -> None:
        """Serve one request: store the absent blocks of its path from tail to head, and use the present ones."""
        absent = [number for number in path if number not in self]
        present = keys(*(number for number in path if number in self))
        for number in reversed(absent):
            if not self.free:
                victims = self.policy.evict(1, present)
                assert victims is not None
                self.free += [block for _, block in victims]
            self.insert(number, hint)
            self[number].pins = 0
        with_options(self.policy.touch, "next_use")(present, next_use=hint)

    def insert(self, number: int, hint: NextUse = NextUse.UNKNOWN) -> None:
        block = self.free.pop()
        block.key = key(number)
        block.pins = BlockStatus.IN_FLIGHT
        with_options(self.policy.insert_all, "next_use")(keys(number), [block], next_use=hint)

    def __getitem__(self, number: int) -> BlockStatus:
        block = self.policy.get(key(number))
        assert block is not None
        return block

    def class_(self, number: int) -> int:
        return int(self[number].policy_state.class_)

    def __contains__(self, number: int) -> bool:
        return self.policy.get(key(number)) is not None


class Plain:
    """The order by its definition: the victim is the idle block of the least value, the least recent among equals."""

    def __init__(self, values: list[list[float]], bounds: list[float]) -> None:
        self.values, self.bounds = values, bounds
        self.classes: dict[OffloadKey, int] = {}
        self.lasts: dict[OffloadKey, int] = {}
        self.now = 0
        self.hinted = False

    def use(self, path: Iterable[OffloadKey], ready: Collection[OffloadKey], hint: int, draw: int | None) -> None:
        """The steps between the classes 1, 2, 3, 4, 6, 10, 18, 34 are taken in one draw of 1, 1, 1, 2, 4, 8, 16, and
        none without a draw. All that happens to a block that is not ready is that it was used. Shared are all blocks
        from the tail on if that was used four times, or from the first that another request used and said otherwise."""
        self.hinted |= bool(hint)
        group, tail = hint, None
        for one in reversed(list(path)):
            if one in self.classes:
                self.now += 1
                self.lasts[one] = self.now
                if one in ready:
                    said, uses = divmod(self.classes[one], 8)
                    if tail is None:
                        tail = 4 if uses >= 3 else said
                    if (self.hinted and said != tail) or said == 4:
                        group = 4
                    rises = draw is not None and uses < 7 and draw % (1 << max(uses - 2, 0)) == 0
                    self.classes[one] = 8 * group + uses + rises

    def insert(self, path: list[OffloadKey], past: list[int], hint: int) -> None:
        self.hinted |= bool(hint)
        for one, class_ in zip_longest(path, past, fillvalue=-1):
            assert isinstance(one, bytes)
            uses = class_ if class_ < 0 else class_ % 8
            self.classes[one] = 8 * (4 if class_ >= 32 else hint) + uses + (uses < 3)
        self.use(path, (), hint, None)

    def evict(self, n: int, idle: set[OffloadKey]) -> list[OffloadKey]:
        order = sorted(idle, key=self.rank)[:n]
        for one in order:
            del self.classes[one]
        return order

    def rank(self, one: OffloadKey) -> tuple[float, int]:
        bucket = bisect_right(self.bounds, self.now - self.lasts[one])
        return self.values[self.classes[one]][bucket], self.lasts[one]


def draw_of(policy: DensityCachePolicy) -> int:
    return (policy._draw >> 16) % NUM_DRAWS


@pytest.mark.parametrize("hints", [[NextUse.UNKNOWN], list(NextUse)], ids=["no hints", "hints"])
@pytest.mark.parametrize("seed", range(by_size(1, 6)))
def test_victims_are_those_of_the_definition(seed: int, hints: list[NextUse]) -> None:
    """A long random life, in paths, with pins, protected blocks and failed stores, under values that stay."""
    rng = random.Random(seed)
    capacity = 120
    driver = PolicyDriver(DensityCachePolicy(capacity))
    policy = driver.policy
    assert isinstance(policy, DensityCachePolicy)
    model_of(policy).values = [
        [[1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 9.0, 9.0][uses] * worth / (1 + bucket // 3) for bucket in range(40)]
        for worth in (1.0, 6.0, 1.0, 0.2, 6.0)
        for uses in range(NUM_USES)
    ]
    plain = Plain(model_of(policy).values, model_of(policy).bounds)
    for step in range(by_size(700, 1500)):
        start = min(int(rng.expovariate(0.15)), 30) * 20
        path = keys(*range(start, start + rng.randint(1, 20)))
        blocks = driver.blocks
        hint = rng.choice(hints)
        ready = {one for one in path if one in blocks and blocks[one].is_ready}
        action = rng.choice(["request"] * 6 + ["refresh", "pin", "unpin", "unpin", "evict", "writing", "fail", "ask"])
        if action in ("request", "writing"):
            absent = [one for one in path if one not in blocks]
            excess = max(len(blocks) + len(absent) - capacity, 0)
            if excess > len(driver.idle() - {*path}):
                continue
            protected = {*path} if step % 3 else set()
            victims = policy.evict(excess, protected, absent[::-1])
            assert victims is not None
            assert [one for one, _ in victims] == plain.evict(excess, driver.idle() - protected)
            for one, _ in victims:
                del blocks[one]
            plain.insert(absent, policy._past_uses.recall(absent), hint)
            assert driver.reserve(absent, next_use=hint)
            if action == "request":
                driver.publish(absent)
            policy.touch(path, next_use=hint)
            ready = {one for one in path if one in blocks and blocks[one].is_ready}
            plain.use(path, ready, hint, draw_of(policy))
            if step % 2 and action == "writing":
                driver.publish(absent)
        elif action == "refresh":
            policy.touch(path, counts=False, next_use=hint)
            plain.use(path, ready, hint, None)
        elif action == "pin":
            driver.pin(*(one for one in path if one in blocks and blocks[one].is_ready))
        elif action == "unpin":
            driver.unpin(*(one for one in sorted(blocks)[: rng.randint(0, 60)] if blocks[one].pins > 0))
        elif action == "evict":
            number = rng.randint(0, min(len(driver.idle()), 30))
            expected = plain.evict(number, driver.idle())
            assert driver.evict(number) == expected
            if rng.random() < 0.2:
                assert driver.evict(len(driver.idle()) + 1, path) is None
        elif action == "fail":
            for one in [one for one in blocks if not blocks[one].is_ready]:
                policy.remove(one)
                del blocks[one], plain.classes[one]
        elif action == "ask":
            number = rng.randint(0, 200)
            assert policy.next_victims(number) == sorted(driver.idle(), key=plain.rank)[:number]
        policy.check_invariants()
        assert {one: block.policy_state.class_ for one, block in blocks.items()} == plain.classes
    assert len(set(plain.classes.values())) > 3


def test_a_block_that_comes_back_to_a_chunk_has_one_entry_there() -> None:
    """Blocks used most return to a class when their hint does, while the chunk that they left is still short."""
    driver = PolicyDriver(DensityCachePolicy(64))
    driver.store(keys(1, 2, 3))
    for _ in range(500):
        driver.policy.touch(keys(1, 2, 3), next_use=NextUse.SOON)
    for hint in (NextUse.LATER, NextUse.SOON, NextUse.UNKNOWN, NextUse.SOON, NextUse.SOON):
        driver.policy.touch(keys(2), next_use=hint)
        driver.policy.check_invariants()
    assert driver.drain() == keys(3, 1, 2)


def evicted_first(*uses: tuple[range, NextUse]) -> list[OffloadKey]:
    """The order of eviction after these uses of paths, where ``SOON`` is worth more than nothing said, and ``NEVER``
    less."""
    driver = PolicyDriver(DensityCachePolicy(64))
    policy = driver.policy
    assert isinstance(policy, DensityCachePolicy)
    model_of(policy).values = [[worth] * 40 for worth in (1.0, 6.0, 1.0, 0.2, 6.0) for _ in range(NUM_USES)]
    for numbers, hint in uses:
        path = keys(*numbers)
        absent = [one for one in path if one not in driver.blocks]
        assert driver.reserve(absent, next_use=hint)
        driver.publish(absent)
        policy.touch([one for one in path if one not in absent], next_use=hint)
    return driver.drain()


class TestSharedBlocks:
    """Blocks 0 and 1 are a prompt. A session with blocks 2 and 3 will be back soon."""

    def test_a_session_that_ends_does_not_take_the_prompt_of_one_that_goes_on(self) -> None:
        back, gone = (range(4), NextUse.SOON), (range(2), NextUse.NEVER)
        assert evicted_first(back, gone, back, gone) == keys(3, 2, 1, 0)

    def test_a_prompt_used_four_times_is_shared(self) -> None:
        ends = [(range(2), NextUse.NEVER)] * 4
        back = (range(4), NextUse.SOON)
        assert evicted_first(*ends, back, ends[0]) == keys(3, 2, 1, 0)

    def test_a_session_that_nobody_shares_takes_all_of_its_blocks_with_it(self) -> None:
        turns = [(range(2 * turn), NextUse.SOON) for turn in range(1, 9)]
        other = (range(100, 102), NextUse.UNKNOWN)
        assert evicted_first(*turns, (range(16), NextUse.NEVER), other) == keys(*range(15, -1, -1), 101, 100)

    def test_an_evicted_block_is_still_known_as_shared(self) -> None:
        driver = PolicyDriver(DensityCachePolicy(64))
        policy = driver.policy
        driver.store(keys(0, 1))
        for _ in range(5):
            policy.touch(keys(0, 1), next_use=NextUse.SOON)
        assert driver.drain() == keys(1, 0)
        assert driver.reserve(keys(0, 1), next_use=NextUse.NEVER)
        assert {block.policy_state.class_ // NUM_USES for block in driver.blocks.values()} == {SHARED}


def test_stale_entries_stay_few() -> None:
    """Blocks used over and over leave entries behind, which are dropped as time goes by."""
    capacity = 20_000
    driver = PolicyDriver(DensityCachePolicy(capacity))
    paths = [keys(*range(start, start + 100)) for start in range(0, capacity, 100)]
    for path in paths:
        driver.store(path)
    policy = driver.policy
    assert isinstance(policy, DensityCachePolicy)
    rng = random.Random(2)
    for _ in range(4000):
        policy.touch(rng.choice(paths)[: rng.choice([1, 100])])
    policy.check_invariants()  # which bounds them
    assert len({block.policy_state.class_ for block in driver.blocks.values()}) > 4


def test_a_block_that_is_idle_again_is_seen_at_once() -> None:
    driver = PolicyDriver(DensityCachePolicy(64_000))
    for number in (1, 2, 3):
        driver.store(keys(number))
    driver.policy.touch(keys(3, 2))  # the tail, 2, is the less recent of them
    driver.store(keys(4))
    driver.pin(key(1))
    assert driver.evict(1) == keys(2)
    driver.unpin(key(1))
    assert driver.drain() == keys(1, 3, 4)


def test_is_lru_until_it_has_learned() -> None:
    capacity, generator = 300, random.Random(7)
    density, lru = (Cache(kind(capacity), capacity) for kind in (DensityCachePolicy, LRUCachePolicy))
    for step in range(450):
        # Fewer blocks are reused than a fit needs.
        number = generator.randrange(step + 1) if generator.random() < 0.2 else step
        density.use([number])
        lru.use([number])
        assert len(density.policy) == len(lru.policy)
    assert {n for n in range(450) if n in density} == {n for n in range(450) if n in lru}
    victims = [policy.evict(50, ()) for policy in (density.policy, lru.policy)]
    assert [[k for k, _ in each or ()] for each in victims] == [[k for k, _ in victims[1] or ()]] * 2


def test_learns_to_keep_what_comes_back_late_over_a_flood() -> None:
    """The loop is longer than an LRU can hold, and is mixed with blocks that are used only once."""
    capacity = 400
    density, lru = (Cache(kind(capacity), capacity) for kind in (DensityCachePolicy, LRUCachePolicy))
    hits = {density: 0, lru: 0}
    fresh = 10_000
    for turn in range(180):
        again = [turn % 30 * 10 + step for step in range(10)]
        flood = list(range(fresh, fresh + 30))
        fresh += 30
        for cache in hits:
            hits[cache] += sum(number in cache for number in again)
            cache.use(again)
            cache.use(flood)
    assert hits[lru] == 0
    assert hits[density] > 400


def test_a_prefix_is_never_outlived_by_its_tail() -> None:
    capacity, generator = 300, random.Random(3)
    cache = Cache(DensityCachePolicy(capacity), capacity)
    paths = [[100 * path + step for step in range(generator.randrange(2, 12))] for path in range(80)]
    broken = 0
    for _ in range(by_size(quick=300, thorough=3000)):
        path = paths[min(int(generator.expovariate(0.04)), 79)]
        cache.use(path[: generator.randrange(1, len(path) + 1)])
        broken += sum(later in cache and earlier not in cache for p in paths for earlier, later in pairwise(p))
    assert broken == 0
    cache.policy.check_invariants()


def test_the_way_around_pinned_blocks_gives_the_same_order() -> None:
    """One pinned block forces an eviction into the general path, which must choose the same victims as the fast
    path."""
    capacity = 300
    fast, general = (Cache(DensityCachePolicy(capacity), capacity) for _ in range(2))
    generator = random.Random(11)
    pinned = key(10**6)
    for cache in (fast, general):
        cache.use([10**6])
    for _ in range(1500):
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
    protected = {key(5), key(150)} if protect else set()
    assert cache.policy.evict(299, protected) is None
    cache.policy.check_invariants()
    assert len(cache.policy) == 300
    first = cache.policy.evict(2, ())
    assert [k for k, _ in first or ()] == [key(1), key(2)]
    assert len(cache.policy.evict(296, protected) or ()) == 296
    assert 5 in cache and 150 in cache


def test_uses_while_writing_are_the_writers_own() -> None:
    cache = Cache(DensityCachePolicy(300), 300)
    cache.insert(1)
    cache.policy.touch([key(1)])
    assert cache.class_(1) == 0
    cache[1].pins = 0
    cache.policy.touch([key(1)])
    assert cache.class_(1) == 1
    cache.policy.touch([key(1)], counts=False)
    assert cache.class_(1) == 1


def test_remembers_uses_of_evicted_blocks_and_forgets_failed_stores() -> None:
    cache = Cache(DensityCachePolicy(300), 300)
    cache.use([1])
    cache.use([1])
    cache.policy.evict(1, ())
    policy = cache.policy
    cache.insert(1)
    assert cache.class_(1) == 2
    assert policy.remove(key(1)) is not None
    assert policy.remove(key(1)) is None
    cache.insert(1)
    assert cache.class_(1) == 2
    policy.clear()
    assert len(policy) == 0
    cache.insert(1)
    assert cache.class_(1) == 0


def test_a_head_never_falls_behind_its_tail() -> None:
    """The path is used as a whole and in part, evicted from its tail and stored again."""
    rng, path = random.Random(0), keys(*range(40))
    driver = PolicyDriver(DensityCachePolicy(40))
    policy, blocks = driver.policy, driver.blocks
    for _ in range(3000):
        end = rng.randint(1, 40)
        absent = [one for one in path[:end] if one not in blocks]
        policy.evict(0, (), absent[::-1])
        driver.store(absent)
        policy.touch(path[:end])
        classes = [blocks[one].policy_state.class_ for one in path if one in blocks]
        assert classes == sorted(classes, reverse=True)
        if rng.random() < 0.3:
            driver.evict(rng.randint(1, len(blocks)))
    assert max(classes) == NUM_USES - 1


def test_classes_rise_as_often_as_they_should() -> None:
    for class_, step in enumerate((1, 1, 1, 2, 4, 8, 16)):
        risen = [RISEN[draw][0][class_] for draw in range(NUM_DRAWS)]
        assert risen.count(class_ + 1) == NUM_DRAWS // step
        assert risen.count(class_) == NUM_DRAWS - NUM_DRAWS // step
    assert {RISEN[draw][0][NUM_USES - 1] for draw in range(NUM_DRAWS)} == {NUM_USES - 1}


class Stream:
    """Uses of blocks as a model sees them, path by path."""

    def __init__(self, capacity: int) -> None:
        self.model = HitDensity(capacity)
        self.now = 0

    def use(self, path: Collection[OffloadKey], class_: int, hint: NextUse = NextUse.UNKNOWN) -> None:
        class_ += hint * NUM_USES
        blocks = [BlockStatus(0) for _ in path]
        for block, one in zip(blocks, path, strict=True):
            block.key, block.pins, block.policy_state = one, 0, Chunk(class_)
        self.model.used(path, blocks, self.now + 1)
        self.now += len(blocks)

    @property
    def samples(self) -> dict[OffloadKey | None, int]:
        return self.model._samples

    @property
    def follows(self) -> Collection[object]:
        return self.model._follows


def values_of(used: Table, left: Table, widths: Table, prior: float) -> Table:
    return densities(hazards(used, left, prior), widths)


class TestHitDensity:
    def test_values_fall_with_age_and_rise_with_use(self) -> None:
        generator = np.random.default_rng(5)
        used, left = generator.poisson(3, (2, NUM_USES, 20)).astype(float)
        found = values_of(used, left, np.arange(1.0, 21.0), prior=50)
        assert (np.diff(found, axis=1) <= 0).all()
        assert (np.diff(found, axis=0) >= 0).all()
        assert (found > 0).all()

    def test_a_class_that_comes_back_is_worth_more(self) -> None:
        used, left = np.zeros((2, NUM_USES, 10))
        left[0, 9] = used[1, 3] = 10_000
        found = values_of(used, left, np.ones(10), prior=50)
        assert found[1, 3] == pytest.approx(2, rel=0.05)  # one hit for half a span of waiting
        assert found[1, 4] < 0.1
        assert found[0, 0] < found[1, 0] / 50

    def test_thin_evidence_says_nothing(self) -> None:
        used, left = np.zeros((2, NUM_USES, 10))
        left[0, 9] = used[0, 3] = 5000
        used[1, 3] = 1
        found = values_of(used, left, np.ones(10), prior=50)
        assert found[1, 0] == pytest.approx(found[0, 0], rel=0.05)

    def test_what_was_not_used_yet_counts_up_to_its_age(self) -> None:
        """Half of 100 blocks that were seen up to age 2 were used there. 1,000 younger blocks are no evidence for that
        age."""
        used, left = np.zeros((2, NUM_USES, 10))
        used[0, 2] = left[0, 2] = 50
        before = values_of(used, left, np.ones(10), prior=1e-6)
        left[0, 1] = 1000
        after = values_of(used, left, np.ones(10), prior=1e-6)
        assert after[0] == pytest.approx(before[0], rel=0.05)
        left[0, 3] = 1000
        assert values_of(used, left, np.ones(10), prior=1e-6)[0, 2] < before[0, 2] / 5

    def test_a_class_that_was_used_more_while_young_is_worth_more_when_old(self) -> None:
        """Nobody has seen a block of class 1 at age 5 yet, but all other ages speak for it."""
        used, left = np.zeros((2, NUM_USES, 10))
        used[0, :6], left[0, 5] = 100, 5000
        used[1, :4], left[1, 4] = 1000, 1000
        found = values_of(used, left, np.ones(10), prior=50)
        assert found[1, 5] > 2 * found[0, 5]

    def test_learns_that_a_class_does_not_come_back_without_waiting_for_the_horizon(self) -> None:
        """In four capacities of uses, each loop is reused twice, and the flood never."""
        stream, fresh = Stream(1000), 10_000
        for turn in range(80):
            stream.use(keys(*range(fresh, fresh + 25)), class_=0)
            stream.use(keys(*range(turn % 10 * 25, turn % 10 * 25 + 25)), class_=1)
            fresh += 25
        values = stream.model.values
        assert values[1][0] > 2 * values[0][0]

    @pytest.mark.parametrize("path_blocks", [1, 100])
    def test_evidence_is_counted_in_paths(self, path_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A path whose blocks return together counts as one block would."""
        priors: list[float] = []

        def watched(used: Table, left: Table, prior: float) -> Table:
            priors.append(prior)
            return hazards(used, left, prior)

        monkeypatch.setattr("kvoffload.cpu.policies.density.model.hazards", watched)
        stream = Stream(2000)
        for turn in range(2000 // path_blocks):
            at = turn * path_blocks % 400
            stream.use(keys(*range(at, at + path_blocks)), class_=1)
        assert priors[-1] == pytest.approx(5 * path_blocks, rel=0.1)

    def test_fits_often_while_the_history_is_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fits: list[float] = []

        def watched(used: Table, left: Table, prior: float) -> Table:
            fits.append(used.sum())
            return hazards(used, left, prior)

        monkeypatch.setattr("kvoffload.cpu.policies.density.model.hazards", watched)
        stream = Stream(1_000_000)
        for _ in range(2):
            for start in range(0, 450, 10):
                stream.use(keys(*range(start, start + 10)), class_=0)
        assert fits == pytest.approx([100, 200, 300, 400], rel=0.01)

    def test_follows_every_use_of_a_short_history(self) -> None:
        stream = Stream(1_000_000)
        for start in range(0, 4000, 10):
            stream.use(keys(*range(start, start + 10)), class_=0)
        assert len(stream.samples) == 4000

    def test_a_longer_history_is_followed_evenly(self) -> None:
        stream = Stream(1_000_000)
        for start in range(0, 40_000, 10):
            stream.use(keys(*range(start, start + 10)), class_=0)
        times = np.array([packed // NUM_CLASSES for packed in stream.samples.values()])
        assert 2000 < len(times) <= 4300
        assert np.histogram(times, 4, (0, 40_000))[0].min() > 0.2 * len(times)

    def test_follows_a_bounded_number_of_keys(self) -> None:
        num_blocks = by_size(quick=3_000, thorough=100_000)
        stream = Stream(num_blocks)
        for number in range(40 * num_blocks // 5):
            stream.use(keys(*range(5 * number, 5 * number + 5)), class_=1)
            assert len(stream.samples) <= 4300
        assert len(stream.samples) > 3800
        assert len(stream.follows) <= 4300

    def test_keys_that_the_horizon_has_passed_are_evidence_once(self) -> None:
        """Two of twenty blocks are reused at once, and the others never. The value of a block does not change."""
        stream, worth = Stream(128), []
        for turn in range(900):
            path = keys(*range(20 * turn, 20 * turn + 20))
            stream.use(path, class_=1)
            stream.use(path[:2], class_=1)
            worth.append(stream.model.values[1][0])
        learned = next(value for value in worth if value != worth[0])
        assert worth[-1] == pytest.approx(learned, rel=0.3)

    def test_learns_from_a_flood_alone(self) -> None:
        stream = Stream(128)
        before = stream.model.values[1][0]
        for start in range(0, 5000, 10):
            stream.use(keys(*range(start, start + 10)), class_=1)
        assert stream.model.values[1][0] < before / 100

    @pytest.mark.parametrize("hint", [NextUse.SOON, NextUse.NEVER])
    def test_learns_what_a_hint_means(self, hint: NextUse) -> None:
        """Whatever the hint's name means, blocks with it are reused, and other blocks of the same class never are."""
        stream, fresh = Stream(1000), 10_000
        for turn in range(80):
            stream.use(keys(*range(fresh, fresh + 25)), 1, NextUse.LATER)
            stream.use(keys(*range(turn % 10 * 25, turn % 10 * 25 + 25)), 1, hint)
            fresh += 25
        values = stream.model.values
        assert values[hint * NUM_USES + 1][0] > 2 * values[NextUse.LATER * NUM_USES + 1][0]
        assert stream.model.hint_score > 0

    def test_blocks_that_several_clients_share_are_worth_at_least_what_any_hint_makes_of_others(self) -> None:
        hinted, plain, fresh = Stream(1000), Stream(1000), 10_000
        for turn in range(80):
            gone, back = keys(*range(fresh, fresh + 25)), keys(*range(turn % 10 * 25, turn % 10 * 25 + 25))
            for path, hint in ((gone, NextUse.NEVER), (back, NextUse.SOON)):
                hinted.use(path, 1, hint)
                plain.use(path, 1)
            fresh += 25
        assert hinted.model.uses_hints
        by_group = np.array(hinted.model.values).reshape(NUM_GROUPS, NUM_USES, -1)
        without = np.array(plain.model.values[:NUM_USES])
        assert by_group[NextUse.SOON, 1, 0] > without[1, 0] > by_group[NextUse.NEVER, 1, 0]
        assert (by_group[SHARED] == by_group.max(axis=0)).all()
        assert (by_group[SHARED] >= without * (1 - 1e-9)).all()

    def test_hints_that_say_nothing_change_no_value(self) -> None:
        hinted, plain, rng, fresh = Stream(1000), Stream(1000), random.Random(3), 10_000
        for turn in range(400):
            again = keys(*range(turn % 10 * 25, turn % 10 * 25 + 25))
            for path, class_ in ((keys(*range(fresh, fresh + 25)), 0), (again, 1)):
                hinted.use(path, class_, rng.choice(list(NextUse)))
                plain.use(path, class_)
            fresh += 25
        assert hinted.model.hint_score < 0
        assert np.allclose(hinted.model.values, plain.model.values, rtol=1e-9)

    def test_a_meaning_that_changes_is_noticed(self) -> None:
        stream, fresh, in_use = Stream(1000), 10_000, []
        for turn in range(1000):
            back, gone = (NextUse.SOON, NextUse.NEVER) if turn < 200 else (NextUse.NEVER, NextUse.SOON)
            stream.use(keys(*range(fresh, fresh + 25)), 1, gone)
            stream.use(keys(*range(turn % 10 * 25, turn % 10 * 25 + 25)), 1, back)
            fresh += 25
            in_use.append(stream.model.uses_hints)
        assert in_use[199]
        assert not all(in_use[200:320])
        assert in_use[-1]
        values = stream.model.values
        assert values[NextUse.NEVER * NUM_USES + 1][0] > values[NextUse.SOON * NUM_USES + 1][0]

    def test_a_hint_that_replaces_another_is_followed_from_then_on(self) -> None:
        """Two of three sessions are closed by a message after their last use, and never return."""
        driver = PolicyDriver(DensityCachePolicy(1000))
        policy = driver.policy
        assert isinstance(policy, DensityCachePolicy)
        for turn in range(300):
            path = keys(*range(turn * 10, turn * 10 + 10))
            assert driver.reserve(path, max(len(driver.blocks) + 10 - 1000, 0), next_use=NextUse.LATER)
            driver.publish(path)
            if turn % 3:
                policy.touch(path, counts=False, next_use=NextUse.NEVER)
                policy.touch(path, counts=False, next_use=NextUse.NEVER)
            elif turn > 30:
                policy.touch(keys(*range(turn * 10 - 300, turn * 10 - 290)), next_use=NextUse.LATER)
            if turn % 20 == 0:
                policy.check_invariants()
        values = model_of(policy).values
        assert values[NextUse.LATER * NUM_USES][0] > 5 * values[NextUse.NEVER * NUM_USES][0]


class TestHintScore:
    """Two classes of hints, one age."""

    def test_weighs_paths_not_keys(self) -> None:
        score = HintScore()
        score.compare(np.array([[[0.2]], [[0.05]]]), np.array([[0.1]]), np.ones((2, 1, 1)))
        assert not score.favours_hints, "nothing was seen yet"
        gains = [np.log(0.2 / 0.125), np.log(0.05 / 0.125)]
        score.add(np.array([0] * 9 + [1]), [9, 1])
        assert score.value == pytest.approx(gains[0] * 0.99 + gains[1])
        assert not score.favours_hints
        score.add(np.zeros(9, np.int64), [1] * 9)
        assert score.favours_hints

    def test_expecting_more_of_everything_gains_nothing(self) -> None:
        score = HintScore()
        score.compare(np.array([[[0.4]], [[0.4]]]), np.array([[0.1]]), np.ones((2, 1, 1)))
        score.add(np.array([0, 1]), [1, 1])
        assert score.value == pytest.approx(0)

    def test_a_path_gains_or_loses_one_at_most(self) -> None:
        score = HintScore()
        score.compare(np.array([[[0.4]], [[1e-9]]]), np.array([[0.1]]), np.array([[[1.0]], [[3.0]]]))
        score.add(np.array([0, 1]), [1, 1])
        assert score.value == pytest.approx(0.99 - 1)

    def test_forgets(self) -> None:
        score = HintScore()
        score.compare(np.array([[[0.2]], [[0.05]]]), np.array([[0.1]]), np.ones((2, 1, 1)))
        score.add(np.zeros(1000, np.int64), [1] * 1000)
        assert score.favours_hints
        score.add(np.ones(100, np.int64), [1] * 100)
        assert not score.favours_hints

    def test_where_nothing_was_used_no_model_is_better(self) -> None:
        score = HintScore()
        score.compare(np.array([[[0.2, 0.0]]]), np.array([[0.1, 0.0]]), np.ones((1, 1, 2)))
        score.add(np.array([1]), [1])
        assert score.value == 0

    def test_while_no_use_is_expected_no_model_is_better(self) -> None:
        score = HintScore()
        score.compare(np.array([[[0.2, 0.0]]]), np.array([[0.1, 0.0]]), np.array([[[0.0, 1.0]]]))
        score.add(np.array([0]), [1])
        assert score.value == 0

    def test_without_hints_or_uses_it_stays(self) -> None:
        score = HintScore()
        score.add(np.array([3]), [1])
        score.compare(np.ones((1, 1, 1)), np.ones((1, 1)), np.ones((1, 1, 1)))
        score.add(np.array([], np.int64), [])
        assert score.value == 0


def test_a_hint_keeps_what_comes_back() -> None:
    """Sessions of one turn are mixed with sessions that return. They differ only in their hints."""
    rates = {}
    for hinted in (False, True):
        rng, cache, hits = random.Random(1), Cache(DensityCachePolicy(400), 400), 0
        for turn in range(400):
            if turn % 4 == 0 and turn >= 80:
                start = 10 * (turn - 80)
                hits += sum(number in cache for number in range(start, start + 10))
                cache.use(range(start, start + 10), NextUse.NEVER if hinted else NextUse.UNKNOWN)
            hint = NextUse.LATER if turn % 4 == 0 else rng.choice([NextUse.NEVER, NextUse.SOON])
            cache.use(range(10 * turn, 10 * turn + 10), hint if hinted else NextUse.UNKNOWN)
        rates[hinted] = hits / (80 * 10)
    assert rates[True] > rates[False] + 0.3


class TestUseCounts:
    def test_remembers_at_least_size_and_at_most_twice_as_many(self) -> None:
        counts = UseCounts(100)
        for at in range(450):
            counts.remember([key(at)], [1 + at % 7])
            recent = range(at, max(-1, at - 100), -1)
            assert counts.recall([key(n) for n in recent]) == [1 + n % 7 for n in recent]
            assert not any(counts.recall([key(n)]) for n in range(at - 199))
        assert counts.recall([key(450)]) == []

    def test_recalls_a_prefix(self) -> None:
        counts = UseCounts(100)
        counts.remember(keys(1, 2, 4), [3, 2, 1])
        assert counts.recall(keys(1, 2, 3, 4)) == [3, 2]

    def test_a_new_count_replaces_the_old_one(self) -> None:
        counts = UseCounts(10)
        counts.remember(keys(1), [2])
        counts.remember(keys(1), [1])
        assert counts.recall(keys(1)) == [1]
        counts.clear()
        assert counts.recall(keys(1)) == []
