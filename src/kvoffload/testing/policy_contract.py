# SPDX-License-Identifier: Apache-2.0
"""Tests that every cache policy must pass, to be inherited."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable

from kvoffload.base import NextUse, OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, CachePolicy, with_options
from kvoffload.testing.keys import key, keys


class PolicyDriver:
    """Calls a policy as ``SlotTable`` does, so that a test can use ``store`` and ``pin``."""

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy
        self.policy_evict = with_options(policy.evict, "incoming")
        """``policy.evict``, which can be called with ``incoming`` whether or not the policy has that parameter."""
        self.policy_insert_all = with_options(policy.insert_all, "next_use")
        self.policy_touch = with_options(policy.touch, "next_use")
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        self._next_slot = 0

    def reserve(
        self,
        arriving: Collection[OffloadKey],
        evict: int = 0,
        block: type[BlockStatus] = BlockStatus,
        next_use: NextUse = NextUse.UNKNOWN,
    ) -> bool:
        """Evict ``evict`` blocks and insert distinct absent keys, given head to tail, as blocks in flight.

        Returns ``False``, and inserts nothing, if the policy cannot evict that many blocks.
        """
        arrivals = list(arriving)[::-1]
        victims = self.policy_evict(evict, frozenset(), incoming=arrivals)
        if victims is None:
            return False
        for victim, _ in victims:
            del self.blocks[victim]
        new = []
        for one in arrivals:
            new.append(block(self._next_slot))
            new[-1].key = one
            self._next_slot += 1
        self.policy_insert_all(arrivals, new, next_use=next_use)
        self.blocks.update(zip(arrivals, new, strict=True))
        return True

    def publish(self, ready: Collection[OffloadKey]) -> None:
        for one in ready:
            self.blocks[one].pins = 0
        self.policy.released(ready)

    def store(self, arriving: Collection[OffloadKey], evict: int = 0) -> None:
        assert self.reserve(arriving, evict)
        self.publish(arriving)

    def pin(self, *pinned: OffloadKey) -> None:
        for one in pinned:
            self.blocks[one].pins += 1

    def unpin(self, *pinned: OffloadKey) -> None:
        for one in pinned:
            self.blocks[one].pins -= 1
        self.policy.released(pinned)

    def evict(self, n: int, protected: Iterable[OffloadKey] = ()) -> list[OffloadKey] | None:
        victims = self.policy.evict(n, frozenset(protected))
        if victims is None:
            return None
        for victim, block in victims:
            assert self.blocks.pop(victim) is block, "evict() returned another block than was inserted"
        return [victim for victim, _ in victims]

    def idle(self) -> set[OffloadKey]:
        return {one for one, block in self.blocks.items() if block.is_idle}

    def drain(self) -> list[OffloadKey]:
        """Evict every idle block, one by one, and return them in that order."""
        order = []
        while self.idle():
            victims = self.evict(1)
            assert victims is not None, "evict() refused although a block is idle"
            order += victims
        assert self.evict(1) is None
        return order


class _Watched(BlockStatus):
    """A block that counts how often the pins of any such block are read."""

    __slots__ = ("_pins",)
    looks = 0

    @property
    def pins(self) -> int:
        _Watched.looks += 1
        return self._pins

    @pins.setter
    def pins(self, value: int) -> None:
        self._pins = value


class CachePolicyContract:
    """The tests. Inherit them in a class whose name starts with ``Test``, and implement ``make_policy``::

        class TestMyPolicy(CachePolicyContract):
            def make_policy(self, capacity):
                return MyPolicy(capacity)

    The two class attributes say which optional promises the policy makes.
    """

    uses_matter = True
    """Whether a touched block outlives untouched ones. Set it to ``False`` for FIFO."""
    steps_over_once = True
    """Whether evictions step over a pinned block only once, however long it stays pinned."""

    def make_policy(self, capacity: int) -> CachePolicy:
        raise NotImplementedError

    def make_driver(self, capacity: int = 8) -> PolicyDriver:
        return PolicyDriver(self.make_policy(capacity))

    def test_insert_get_remove(self) -> None:
        driver = self.make_driver()
        policy = driver.policy
        driver.store(keys(1, 2))
        assert policy.get(key(1)) is driver.blocks[key(1)]
        assert policy.get_all(keys(2, 3, 1)) == [driver.blocks[key(2)], None, driver.blocks[key(1)]]
        assert policy.get(key(3)) is None
        assert len(policy) == 2
        assert policy.remove(key(1)) is driver.blocks[key(1)]
        assert policy.remove(key(1)) is None
        assert policy.get(key(1)) is None
        assert len(policy) == 1
        policy.check_invariants()

    def test_clear_forgets_everything(self) -> None:
        driver = self.make_driver(4)
        fresh = self.make_driver(4)
        driver.store(keys(1, 2, 3, 4))
        driver.pin(key(4))
        driver.evict(2)
        driver.policy.clear()
        driver.blocks.clear()
        assert len(driver.policy) == 0
        assert driver.policy.get(key(4)) is None
        for one in (driver, fresh):
            one.store(keys(5, 1, 2))
            one.policy.touch(keys(5))
        assert driver.drain() == fresh.drain()

    def test_get_does_not_change_the_order(self) -> None:
        left, right = self.make_driver(), self.make_driver()
        for driver in (left, right):
            driver.store(keys(1, 2, 3))
        for number in (3, 1, 9):
            left.policy.get(key(number))
        left.policy.get_all(keys(2, 1, 8))
        assert left.drain() == right.drain()

    def test_only_idle_unprotected_blocks_are_evicted(self) -> None:
        driver = self.make_driver()
        driver.store(keys(1, 2, 3, 4))
        driver.reserve(keys(5))
        driver.pin(key(1), key(3))
        assert driver.evict(1, keys(2)) == keys(4)
        assert driver.evict(1, keys(2)) is None
        assert driver.evict(1) == keys(2)
        driver.unpin(key(1), key(3))
        driver.publish(keys(5))
        assert {*driver.drain()} == {*keys(1, 3, 5)}
        assert len(driver.policy) == 0

    def test_evict_of_nothing(self) -> None:
        driver = self.make_driver()
        assert driver.evict(0) == []
        assert driver.evict(1) is None
        driver.store(keys(1))
        assert driver.evict(0) == []
        assert len(driver.policy) == 1

    def test_a_refused_eviction_changes_nothing(self) -> None:
        """Two policies get the same calls, but one of them also gets evictions that it must refuse."""
        rng = random.Random(7)
        for _ in range(30):
            left, right = self.make_driver(12), self.make_driver(12)
            for _ in range(60):
                self._same_random_step(left, right, rng)
                if rng.random() < 0.4:
                    protected = rng.sample(sorted(left.blocks), len(left.blocks) // 3)
                    assert left.evict(len(left.idle() - {*protected}) + 1, protected) is None
                left.policy.check_invariants()
            for driver in (left, right):
                self._release_all(driver)
            assert left.drain() == right.drain()

    def test_random_calls_keep_exactly_what_was_not_evicted(self) -> None:
        rng = random.Random(11)
        driver = self.make_driver(10)
        for _ in range(1500):
            self._same_random_step(driver, driver, rng)
            driver.policy.check_invariants()
            assert len(driver.policy) == len(driver.blocks)
            for number in range(40):
                assert driver.policy.get(key(number)) is driver.blocks.get(key(number))
        self._release_all(driver)
        assert len(driver.drain()) == len({*driver.blocks}) or not driver.blocks

    def test_a_block_may_be_inserted_alone_and_unannounced(self) -> None:
        """Blocks are added with ``insert``, and no eviction was told the next keys."""
        rng = random.Random(13)
        driver = self.make_driver(6)
        policy, blocks = driver.policy, driver.blocks
        for _ in range(200):
            one = key(rng.randrange(12))
            if one in blocks:
                policy.touch([one])
                continue
            if len(blocks) == 6:
                assert driver.evict(1)
            block = blocks[one] = BlockStatus(0)
            block.key = one
            policy.insert(one, block)
            driver.publish([one])
            policy.check_invariants()
            assert len(policy) == len(blocks)
            assert all(policy.get(each) is blocks[each] for each in blocks)
        assert {*driver.drain()} == {*blocks} or not blocks

    def test_evicted_keys_may_come_back(self) -> None:
        driver = self.make_driver(2)
        driver.store(keys(1, 2))
        for number in (3, 1, 2, 3, 1):
            driver.store(keys(number), evict=1)
            driver.policy.check_invariants()
            assert len(driver.policy) == 2

    def test_the_tail_of_a_touched_prefix_goes_first(self) -> None:
        if not self.uses_matter:
            return
        driver = self.make_driver(6)
        for number in (4, 1, 3, 2):
            driver.store(keys(number))
        driver.policy.touch(tuple(keys(1, 2, 3, 4, 99)))
        assert driver.drain() == keys(4, 3, 2, 1)

    def test_touch_takes_any_iterable_and_ignores_absent_keys(self) -> None:
        left, right = self.make_driver(), self.make_driver()
        for driver in (left, right):
            driver.store(keys(1, 2, 3))
        left.policy.touch(iter(keys(7, 2, 8, 1)))
        right.policy.touch(keys(2, 1))
        assert len(left.policy) == 3
        assert left.drain() == right.drain()

    def test_a_block_that_is_idle_again_is_evicted_in_its_old_order(self) -> None:
        """Stepping over a pinned block does not count as a use of it, so the order does not change."""
        left, right = self.make_driver(12), self.make_driver(12)
        for driver in (left, right):
            driver.store(keys(1, 2, 3, 4))
            driver.store(keys(5, 6, 7, 8))
        left.pin(*keys(3, 4, 2))
        evicted, order = left.evict(2, keys(1)), right.drain()
        assert evicted == left_out(order, keys(3, 4, 2, 1))[:2]
        left.unpin(key(2))
        left.unpin(key(4))
        left.pin(key(4))
        left.unpin(key(3), key(4))
        assert left.drain() == left_out(order, evicted)

    def test_the_next_victims_are_those_that_new_blocks_evict(self) -> None:
        """A policy's ``next_victims`` changes nothing, and ``evict`` evicts the blocks that it named."""
        rng = random.Random(5)
        for _ in range(20):
            left, right = self.make_driver(12), self.make_driver(12)
            if left.policy.next_victims(0) is None:
                assert left.policy.next_victims(3) is None
                return
            for _ in range(50):
                self._same_random_step(left, right, rng)
                named = left.policy.next_victims(rng.randint(0, 12))
                assert named is not None
                assert len(set(named)) == len(named)
                assert set(named) <= left.idle()
            num = rng.randint(0, len(left.idle()))
            named = left.policy.next_victims(num)
            assert named is not None
            victims = left.policy_evict(num, frozenset(), incoming=[key(1000 + n) for n in range(num)])
            assert victims is not None
            assert {*named} == {victim for victim, _ in victims}
            victims = right.policy_evict(num, frozenset(), incoming=[key(1000 + n) for n in range(num)])
            assert victims is not None
            assert {*named} == {victim for victim, _ in victims}, "asking changed the order"
            assert left.policy.next_victims(100) is not None

    def test_pinned_blocks_are_stepped_over_once(self) -> None:
        if not self.steps_over_once:
            return
        num_pinned = num_idle = 200
        driver = self.make_driver(num_pinned + num_idle)
        numbers = range(num_pinned + num_idle)
        for number in numbers:
            assert driver.reserve(keys(number), block=_Watched)
        driver.publish(keys(*numbers))
        driver.pin(*keys(*numbers[:num_pinned]))
        _Watched.looks = 0
        for _ in range(num_idle):
            assert driver.policy.evict(1, frozenset()) is not None
        for _ in range(num_idle):
            assert driver.policy.evict(1, frozenset()) is None
        assert _Watched.looks <= 8 * (num_pinned + num_idle)

    def _same_random_step(self, left: PolicyDriver, right: PolicyDriver, rng: random.Random) -> None:
        drivers = [left] if left is right else [left, right]
        resident = sorted(left.blocks)
        action = rng.choice(["reserve", "reserve", "publish", "publish", "pin", "unpin", "touch", "evict", "remove"])
        some = rng.sample(resident, min(len(resident), rng.randint(1, 4)))
        absent = [key(number) for number in rng.sample(range(40), 3) if key(number) not in left.blocks]
        next_use = rng.choice(list(NextUse))
        capacity = 10
        for driver in drivers:
            blocks = driver.blocks
            if action == "reserve":
                excess = max(len(blocks) + len(absent) - capacity, 0)
                if excess <= len(driver.idle()):
                    assert driver.reserve(absent, excess, next_use=next_use)
            elif action == "publish":
                driver.publish([one for one in some if not blocks[one].is_ready])
            elif action == "pin":
                driver.pin(*(one for one in some if blocks[one].is_ready))
            elif action == "unpin":
                driver.unpin(*(one for one in some if blocks[one].pins > 0))
            elif action == "touch":
                driver.policy_touch([*some, *absent], next_use=next_use)
            elif action == "evict":
                driver.evict(min(len(driver.idle()), 2))
            elif action == "remove":
                for one in some:
                    if not blocks[one].is_ready:
                        driver.policy.remove(one)
                        del blocks[one]

    @staticmethod
    def _release_all(driver: PolicyDriver) -> None:
        for block in driver.blocks.values():
            block.pins = 0
        driver.policy.released([*driver.blocks])


def left_out(order: list[OffloadKey], without: Collection[OffloadKey]) -> list[OffloadKey]:
    return [one for one in order if one not in without]
