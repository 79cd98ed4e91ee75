# SPDX-License-Identifier: Apache-2.0
"""Adaptive replacement: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from kvoffload.base import NextUse, OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, CachePolicy, Victims
from kvoffload.cpu.policies.recency import RecencyList, Sweep


class ARCCachePolicy(CachePolicy):
    """Splits the cache between blocks used once and blocks used again, and learns the split from its mistakes.

    In the paper's names: ``recent`` is T1, ``frequent`` T2, ``recent_ghosts`` B1, ``frequent_ghosts`` B2 (keys only),
    and ``target`` is p, the real-valued target size of T1. If keys are inserted one at a time and nothing is pinned,
    the lists and the target are exactly the paper's. Host memory requires three additions:

    * A block is inserted when its write starts. Uses while it is being written belong to the request that writes it, so
      they refresh the block but do not make it frequent.
    * Evictions step over pinned and protected blocks. If one list contains only such blocks, the victim comes from the
      other list.
    * A batch behaves as if its keys were inserted one by one, except that all of its ghosts are recognised before any
      ghost is dropped.
    """

    def __init__(self, cache_capacity: int) -> None:
        self._capacity = cache_capacity
        self.recent = RecencyList()
        self.frequent = RecencyList()
        self.recent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self.frequent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self.target = 0.0
        self._recalled: set[OffloadKey] = set()
        """Ghosts that ``evict`` has accounted for. They are inserted next."""
        self._is_prepared = False
        """Whether ``evict`` has looked for ghosts among the keys that ``insert_all`` adds next."""

    def __repr__(self) -> str:
        return (
            f"ARCCachePolicy(recent={len(self.recent)}, frequent={len(self.frequent)}, target={self.target:.1f}, "
            f"ghosts={len(self.recent_ghosts)}+{len(self.frequent_ghosts)})"
        )

    def get(self, key: OffloadKey) -> BlockStatus | None:
        block = self.recent.blocks.get(key)
        if block is None:
            block = self.frequent.blocks.get(key)
            if block is None and (self.recent.skipped or self.frequent.skipped):
                return self.recent.get(key) or self.frequent.get(key)
        return block

    def touch(self, keys: Iterable[OffloadKey], counts: bool = True, next_use: NextUse = NextUse.UNKNOWN) -> None:
        if not counts:
            self._refresh(keys)
            return
        recent, frequent = self.recent, self.frequent
        recent_blocks, frequent_blocks = recent.blocks, frequent.blocks
        for key in reversed(keys if isinstance(keys, (list, tuple)) else list(keys)):
            if key in frequent_blocks:
                frequent_blocks.move_to_end(key)
                continue
            block = recent.pop(key)
            if block is not None:
                # A block in flight is still in its first use.
                (recent_blocks if block.pins < 0 else frequent_blocks)[key] = block
            elif frequent.skipped and (block := frequent.pop(key)) is not None:
                frequent_blocks[key] = block

    def _refresh(self, keys: Iterable[OffloadKey]) -> None:
        """Make blocks the most recent ones of their own list, tail first."""
        for key in reversed(keys if isinstance(keys, (list, tuple)) else list(keys)):
            for recency in (self.recent, self.frequent):
                if key in recency.blocks:
                    recency.blocks.move_to_end(key)
                elif recency.skipped and (block := recency.pop(key)) is not None:
                    recency.blocks[key] = block

    def get_all(self, keys: Collection[OffloadKey]) -> list[BlockStatus | None]:
        recent, frequent = self.recent, self.frequent
        found = [
            once or again
            for once, again in zip(map(recent.blocks.get, keys), map(frequent.blocks.get, keys), strict=True)
        ]
        if (recent.skipped or frequent.skipped) and None in found:
            recent.get_all(keys, found)
            frequent.get_all(keys, found)
        return found

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        if key in self._recalled:
            self._recalled.remove(key)
            self.frequent.blocks[key] = block
        elif key in self.recent_ghosts or key in self.frequent_ghosts:
            self.target = self._adapted(key, self.target, len(self.recent_ghosts), len(self.frequent_ghosts))
            self._forget_ghost(key)
            self.frequent.blocks[key] = block
        else:
            self.recent.blocks[key] = block
        self._trim_ghosts()

    def insert_all(
        self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus], next_use: NextUse = NextUse.UNKNOWN
    ) -> None:
        if not self._recalled and (self._is_prepared or not self._any_ghost(keys)):
            self.recent.blocks.update(zip(keys, blocks))
            self._trim_ghosts()
        else:
            super().insert_all(keys, blocks)
        self._is_prepared = False

    def _trim_ghosts(self) -> None:
        """Drop ghosts until T1 + B1 is within the capacity and all lists together are within twice the capacity."""
        recent, frequent, capacity = self.recent, self.frequent, self._capacity
        once = len(recent.blocks) + len(recent.skipped) + len(self.recent_ghosts)
        if once > capacity:
            once -= self._drop(self.recent_ghosts, once - capacity)
        total = once + len(frequent.blocks) + len(frequent.skipped) + len(self.frequent_ghosts)
        if total > 2 * capacity:
            self._drop(self.frequent_ghosts, total - 2 * capacity)

    @staticmethod
    def _drop(ghosts: OrderedDict[OffloadKey, None], n: int) -> int:
        n = min(n, len(ghosts))
        pop = ghosts.popitem
        for _ in range(n):
            pop(False)
        return n

    def _any_ghost(self, keys: Collection[OffloadKey]) -> bool:
        once, again = self.recent_ghosts, self.frequent_ghosts
        return bool((once and not once.keys().isdisjoint(keys)) or (again and not again.keys().isdisjoint(keys)))

    def remove(self, key: OffloadKey) -> BlockStatus | None:
        return self.recent.pop(key) or self.frequent.pop(key)

    def evict(self, n: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey] = ()) -> Victims | None:
        if not incoming:
            # This is the paper's REPLACE, n times: evict from T1 while it is above its target.
            above_target = max(math.ceil(len(self.recent) - self.target), 0)
            return self._evict(min(n, above_target), n, protected)
        if self._any_ghost(incoming):
            victims = self._evict_for_ghosts(incoming, n, protected)
        elif n:
            # As in the paper, key by key: while T1 is within its target, a block of T2 is evicted and T1 grows by the
            # new block. After that, T1 loses one block for each new one.
            within_target = max(math.floor(self.target - (len(self.recent) + len(incoming) - n)) + 1, 0)
            victims = self._evict(max(n - within_target, 0), n, protected)
        else:
            victims = []
        self._is_prepared = victims is not None
        return victims

    def _evict(self, from_recent: int, n: int, protected: Collection[OffloadKey]) -> Victims | None:
        """Evict ``n`` blocks, if possible ``from_recent`` of them from T1 and the others from T2.

        Returns ``None``, and changes nothing, if both lists together have too few.
        """
        recent = Sweep(self.recent, protected)
        missing = n - recent.take(from_recent)
        if not missing:
            return self._commit(recent, self.recent_ghosts)
        frequent = Sweep(self.frequent, protected)
        missing -= frequent.take(missing)
        if missing and len(recent.victims) == from_recent:
            missing -= recent.take(missing)
        if missing:
            recent.undo()
            frequent.undo()
            return None
        return self._commit(recent, self.recent_ghosts) + self._commit(frequent, self.frequent_ghosts)

    def _evict_for_ghosts(
        self, incoming: Sequence[OffloadKey], n: int, protected: Collection[OffloadKey]
    ) -> Victims | None:
        """Evict ``n`` blocks for ``incoming`` keys that include ghosts.

        Follows the paper's steps key by key, on the lengths of the lists. The first ``len(incoming) - n`` keys have
        free slots.
        """
        recent, frequent = Sweep(self.recent, protected), Sweep(self.frequent, protected)
        t1, b1 = len(self.recent), len(self.recent_ghosts)
        t2, b2 = len(self.frequent), len(self.frequent_ghosts)
        target, capacity = self.target, self._capacity
        recalled: set[OffloadKey] = set()
        for position, key in enumerate(incoming):
            was_recent = key in self.recent_ghosts
            was_frequent = not was_recent and key in self.frequent_ghosts
            if was_recent or was_frequent:
                target = self._adapted(key, target, b1, b2)
                recalled.add(key)
            if position >= len(incoming) - n:
                recent_first = t1 > target or (was_frequent and t1 == target)
                if recent_first and recent.take(1):
                    t1, b1 = t1 - 1, b1 + 1
                elif frequent.take(1):
                    t2, b2 = t2 - 1, b2 + 1
                elif not recent_first and recent.take(1):
                    t1, b1 = t1 - 1, b1 + 1
                else:
                    recent.undo()
                    frequent.undo()
                    return None
            if was_recent:
                t2, b1 = t2 + 1, max(b1 - 1, 0)
            elif was_frequent:
                t2, b2 = t2 + 1, max(b2 - 1, 0)
            else:
                t1 += 1
                b1 = min(b1, max(capacity - t1, 0))
                b2 = min(b2, max(2 * capacity - t1 - t2 - b1, 0))
        self.target = target
        for key in recalled:
            self._forget_ghost(key)
        self._recalled = recalled
        return self._commit(recent, self.recent_ghosts) + self._commit(frequent, self.frequent_ghosts)

    @staticmethod
    def _commit(sweep: Sweep, ghosts: OrderedDict[OffloadKey, None]) -> Victims:
        sweep.commit()
        for key, _ in sweep.victims:
            ghosts[key] = None
        return sweep.victims

    def _adapted(self, key: OffloadKey, target: float, b1: int, b2: int) -> float:
        """Return the target after a hit on the ghost ``key``, with ghost lists of these lengths (``key`` included)."""
        if key in self.recent_ghosts:
            return min(target + max(b2 / max(b1, 1), 1.0), float(self._capacity))
        return max(target - max(b1 / max(b2, 1), 1.0), 0.0)

    def _forget_ghost(self, key: OffloadKey) -> None:
        if key in self.recent_ghosts:
            del self.recent_ghosts[key]
        else:
            del self.frequent_ghosts[key]

    def clear(self) -> None:
        for part in (self.recent, self.frequent, self.recent_ghosts, self.frequent_ghosts, self._recalled):
            part.clear()
        self._is_prepared = False
        self.target = 0.0

    def __len__(self) -> int:
        return len(self.recent) + len(self.frequent)

    def released(self, keys: Iterable[OffloadKey]) -> None:
        if self.recent.skipped or self.frequent.skipped:
            self.recent.released(keys)
            self.frequent.released(keys)

    def next_victims(self, n: int) -> list[OffloadKey]:
        # This is the choice that ``evict`` makes for n keys that are not ghosts.
        recent, frequent = self.recent.first_idle(n), self.frequent.first_idle(n)
        within_target = max(math.floor(self.target - len(self.recent)) + 1, 0)
        num_recent = max(n - within_target, n - len(frequent), 0)
        first = recent[:num_recent]
        return first + frequent[: n - len(first)]

    def check_invariants(self) -> None:
        self.recent.check_invariants()
        self.frequent.check_invariants()
        lists = [set(self.recent), set(self.frequent), set(self.recent_ghosts), set(self.frequent_ghosts)]
        assert len(set().union(*lists)) == sum(map(len, lists)), "a key is on two lists"
        assert len(self) <= self._capacity
        assert len(self.recent) + len(self.recent_ghosts) <= self._capacity
        assert sum(map(len, lists)) <= 2 * self._capacity
        assert 0 <= self.target <= self._capacity
        assert not self._recalled, "evict was not followed by insert"
