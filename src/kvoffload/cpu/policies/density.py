# SPDX-License-Identifier: Apache-2.0
"""Evicts the block with the least hits to expect for the space and time it takes, learned from the traffic."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import xxhash

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, CachePolicy, Victims
from kvoffload.cpu.policies.hit_density import NUM_CLASSES, HitDensity
from kvoffload.cpu.policies.timed_order import TimedOrder
from kvoffload.cpu.policies.use_counts import UseCounts

__all__ = ["DensityCachePolicy"]

_TOP = NUM_CLASSES - 1
_SAMPLED = 1 << 7


class _Front(NamedTuple):
    """The least recent block of a class during an eviction. Fronts compare as victims do: the least goes first."""

    value: float
    last: int
    """Time of its last use."""
    class_: int
    limit: float
    """Blocks of the class that were used later than this are worth more than ``value``."""
    item: tuple[OffloadKey, BlockStatus]

    def until(self, rival: _Front | None) -> float:
        """Blocks of this class used no later than this go before ``rival``, the least front of other classes."""
        return min(self.limit, rival.last) if rival is not None and rival.value == self.value else self.limit


class DensityCachePolicy(CachePolicy):
    """Blocks in classes by number of uses, each in order of recency; the victim is the least recent block of the class
    where such a block is worth least (``kvoffload.cpu.policies.hit_density``), the least recent one among equals.

    With nothing learned yet this is LRU. What it learns makes it keep blocks of a class that comes back late, give
    up those of a class that hardly ever does, or go on as LRU where uses say nothing. ``docs/design/0009-policies.md``
    has the measurements.

    The uses of evicted blocks are remembered for the next 1.5 to 3 capacities of evictions, in 24 bytes per block of
    capacity. Uses while a block is being written belong to the request that writes it: they refresh it but do not
    count.
    """

    def __init__(self, cache_capacity: int) -> None:
        self._model = HitDensity(cache_capacity)
        self._past_uses = UseCounts(cache_capacity * 3 // 2)
        self._blocks: dict[OffloadKey, BlockStatus] = {}
        # The dict's own method: it is called several times per block, and a call between costs as much as the rest.
        self.get = self._blocks.get  # type: ignore[method-assign, assignment]
        # By slot: the class (with the _SAMPLED bit), and the time of the last use.
        self._classes = bytearray()
        self._last_uses = array("q")
        self._orders = tuple(TimedOrder(self._last_uses) for _ in range(NUM_CLASSES))
        self._now = 0
        """Uses of blocks so far: the clock of ages."""

    def __repr__(self) -> str:
        return f"DensityCachePolicy({len(self)} blocks, by uses: {[len(order) for order in self._orders]})"

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self._blocks.get(key)

    def get_all(self, keys: Collection[OffloadKey]) -> list[BlockStatus | None]:
        return list(map(self._blocks.get, keys))

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.insert_all((key,), (block,))

    def insert_all(self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus]) -> None:
        last_uses, classes, orders, now = self._last_uses, self._classes, self._orders, self._now
        missing = max((block.block_id for block in blocks), default=-1) + 1 - len(classes)
        if missing > 0:
            classes.extend(bytes(missing))
            last_uses.extend([0] * missing)
        recall, mask, digest_of = self._past_uses.recall, self._model.sample_mask, xxhash.xxh3_64_intdigest
        for key, block in zip(keys, blocks):
            slot = block.block_id
            digest = digest_of(key)
            class_ = recall(digest)
            now += 1
            last_uses[slot] = now
            orders[class_].blocks[key] = block
            if digest & mask:
                classes[slot] = class_
            else:
                classes[slot] = class_ | _SAMPLED
                self._model.used(key, class_, now)
        self._blocks.update(zip(keys, blocks))
        self._now = now

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        get, classes, last_uses, orders, now = self._blocks.get, self._classes, self._last_uses, self._orders, self._now
        top = orders[_TOP].blocks
        move_top = top.move_to_end
        for key in reversed(keys if isinstance(keys, (list, tuple)) else list(keys)):
            block = get(key)
            if block is None:
                continue
            slot = block.block_id
            now += 1
            last_uses[slot] = now
            state = classes[slot]
            if state == _TOP and key in top:  # not sampled, and no class to rise to
                move_top(key)
                continue
            class_ = state & _TOP
            order = orders[class_]
            if block.pins >= 0:
                if state != class_:
                    self._model.used(key, min(class_ + 1, _TOP), now)
                if class_ != _TOP:
                    classes[slot] = state + 1
                    if order.blocks.pop(key, None) is None:
                        order.pop(key)
                    orders[class_ + 1].blocks[key] = block
                    continue
            if key in order.blocks:
                order.blocks.move_to_end(key)
            else:
                order.pop(key)
                order.blocks[key] = block
        self._now = now

    def settle(self, keys: Iterable[OffloadKey]) -> None:
        for key in reversed(keys if isinstance(keys, (list, tuple)) else list(keys)):
            block = self._blocks.get(key)
            if block is None:
                continue
            self._now += 1
            self._last_uses[block.block_id] = self._now
            order = self._orders[self._classes[block.block_id] & _TOP]
            if key in order.blocks:
                order.blocks.move_to_end(key)
            else:
                order.pop(key)
                order.blocks[key] = block

    def remove(self, key: OffloadKey) -> BlockStatus | None:
        block = self._blocks.pop(key, None)
        if block is not None:
            state = self._classes[block.block_id]
            self._orders[state & _TOP].pop(key)
            if state & _SAMPLED:
                self._model.forget(key)
        return block

    def evict(self, n: int, protected: Collection[OffloadKey]) -> Victims | None:
        if n == 0:
            return []
        orders, last_uses = self._orders, self._last_uses
        fronts = [front for class_ in range(NUM_CLASSES) if (front := self._front(class_, protected)) is not None]
        victims: Victims = []
        while fronts and len(victims) < n:
            best = min(fronts)
            fronts.remove(best)
            until = best.until(min(fronts, default=None))
            order = orders[best.class_]
            if order.parked:
                item: tuple[OffloadKey, BlockStatus] | None = best.item
                while item is not None and len(victims) < n and last_uses[item[1].block_id] <= until:
                    order.drop(item[0])
                    victims.append(item)
                    item = order.head(protected)
            else:
                self._pop(order.blocks, n, until, protected, victims)
                item = order.head(protected) if len(victims) < n else None
            if len(victims) < n and item is not None:
                fronts.append(self._front_of(best.class_, item))
        if len(victims) < n:
            self._undo(victims)
            return None
        for order in orders:
            order.settle()
        forget, classes, remember = self._blocks.__delitem__, self._classes, self._past_uses.remember
        digest_of = xxhash.xxh3_64_intdigest
        for key, block in victims:
            forget(key)
            remember(digest_of(key), (classes[block.block_id] & _TOP) + 1)
        return victims

    def next_victims(self, n: int) -> list[OffloadKey]:
        last_uses = self._last_uses
        ranked: list[_Front] = []
        rest = []
        for class_, order in enumerate(self._orders):
            idle = order.idle()
            item = next(idle, None)
            rest.append(idle)
            if item is not None:
                ranked.append(self._front_of(class_, item))
        keys: list[OffloadKey] = []
        while ranked and len(keys) < n:
            best = min(ranked)
            ranked.remove(best)
            until = best.until(min(ranked, default=None))
            item = best.item
            while item is not None and len(keys) < n and last_uses[item[1].block_id] <= until:
                keys.append(item[0])
                item = next(rest[best.class_], None)
            if item is not None:
                ranked.append(self._front_of(best.class_, item))
        return keys

    def _pop(
        self,
        blocks: OrderedDict[OffloadKey, BlockStatus],
        n: int,
        until: float,
        protected: Collection[OffloadKey],
        victims: Victims,
    ) -> None:
        """Moves the first blocks to ``victims``, up to ``n`` there, while they may go and were used by ``until``."""
        pop, take, last_uses, missing = blocks.popitem, victims.append, self._last_uses, n - len(victims)
        while blocks and missing:
            item = pop(False)
            key, block = item
            if block.pins or key in protected or last_uses[block.block_id] > until:
                blocks[key] = block
                blocks.move_to_end(key, last=False)
                return
            take(item)
            missing -= 1

    def _front(self, class_: int, protected: Collection[OffloadKey]) -> _Front | None:
        order = self._orders[class_]
        if not order.blocks and not order.parked:
            return None
        item = order.head(protected)
        return self._front_of(class_, item) if item is not None else None

    def _front_of(self, class_: int, item: tuple[OffloadKey, BlockStatus]) -> _Front:
        last = self._last_uses[item[1].block_id]
        model = self._model
        bucket = bisect_right(model.bounds, self._now - last)
        return _Front(model.values[class_][bucket], last, class_, self._now - model.youngest[bucket], item)

    def _undo(self, victims: Victims) -> None:
        for class_, order in enumerate(self._orders):
            order.put_back([item for item in victims if self._classes[item[1].block_id] & _TOP == class_])
            order.settle()

    def clear(self) -> None:
        for order in self._orders:
            order.clear()
        self._blocks.clear()
        self._past_uses.clear()
        self._model.clear()

    def __len__(self) -> int:
        return len(self._blocks)

    def released(self, keys: Iterable[OffloadKey]) -> None:
        for order in self._orders:
            order.released(keys)

    def check_invariants(self) -> None:
        for class_, order in enumerate(self._orders):
            order.check_invariants()
            for key, block in (*order.blocks.items(), *order.parked.items()):
                assert self._blocks[key] is block
                assert self._classes[block.block_id] & _TOP == class_
        assert sum(map(len, self._orders)) == len(self._blocks)
