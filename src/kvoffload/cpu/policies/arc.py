# SPDX-License-Identifier: Apache-2.0
"""Adaptive replacement: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, CachePolicy, Victims
from kvoffload.cpu.policies.order import RecencyOrder, Sweep

__all__ = ["ARCCachePolicy"]


class ARCCachePolicy(CachePolicy):
    """Splits the cache between blocks used once and blocks used again, and learns the split from its mistakes.

    In the paper's names: ``recent`` is T1, ``frequent`` T2, ``recent_ghosts`` B1, ``frequent_ghosts`` B2 (keys only),
    and ``target`` is p, the real-valued size that T1 aims at. One key at a time, with nothing pinned, lists and target
    are exactly the paper's. What a host tier adds to it:

    * A block is inserted when its writing begins. Uses while it is being written belong to the request that
      writes it, so they refresh the block but do not make it frequent.
    * Pinned and protected blocks are stepped over; if a list has no other, the other list gives the victim.
    * A batch behaves like its keys one by one in the order of insertion, except that all of its ghosts are
      recognised before any is dropped.
    """

    def __init__(self, cache_capacity: int) -> None:
        self._capacity = cache_capacity
        self.recent = RecencyOrder()
        self.frequent = RecencyOrder()
        self.recent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self.frequent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self.target = 0.0
        self._recalled: set[OffloadKey] = set()
        """Ghosts that ``make_room`` has accounted for; ``insert`` comes next."""

    def __repr__(self) -> str:
        return (
            f"ARCCachePolicy(recent={len(self.recent)}, frequent={len(self.frequent)}, target={self.target:.1f}, "
            f"ghosts={len(self.recent_ghosts)}+{len(self.frequent_ghosts)})"
        )

    def get(self, key: OffloadKey) -> BlockStatus | None:
        block = self.recent.blocks.get(key)
        if block is None:
            block = self.frequent.blocks.get(key)
            if block is None and (self.recent.parked or self.frequent.parked):
                return self.recent.get(key) or self.frequent.get(key)
        return block

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        recent, frequent = self.recent, self.frequent
        recent_blocks, frequent_blocks = recent.blocks, frequent.blocks
        for key in reversed(keys if isinstance(keys, (list, tuple)) else list(keys)):
            if key in frequent_blocks:
                frequent_blocks.move_to_end(key)
                continue
            block = recent.pop(key)
            if block is not None:
                # In flight: the first use is still going on.
                (recent_blocks if block.pins < 0 else frequent_blocks)[key] = block
            elif frequent.parked and (block := frequent.pop(key)) is not None:
                frequent_blocks[key] = block

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        if self._recalled and key in self._recalled:
            self._recalled.remove(key)
            self.frequent.blocks[key] = block
            return
        if key in self.recent_ghosts or key in self.frequent_ghosts:
            self.target = self._adapted(key, self.target, len(self.recent_ghosts), len(self.frequent_ghosts))
            self._forget_ghost(key)
            self.frequent.blocks[key] = block
            return
        recent, ghosts = self.recent, self.recent_ghosts
        recent.blocks[key] = block
        once = len(recent) + len(ghosts)
        if once > self._capacity and ghosts:
            ghosts.popitem(last=False)
            once -= 1
        if once + len(self.frequent) + len(self.frequent_ghosts) > 2 * self._capacity and self.frequent_ghosts:
            self.frequent_ghosts.popitem(last=False)

    def remove(self, key: OffloadKey) -> BlockStatus | None:
        return self.recent.pop(key) or self.frequent.pop(key)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> Victims | None:
        return self._replace([None] * n, n, protected)

    def make_room(self, incoming: Sequence[OffloadKey], n: int, protected: Collection[OffloadKey]) -> Victims | None:
        return self._replace(incoming, n, protected)

    def _replace(
        self, incoming: Sequence[OffloadKey | None], n: int, protected: Collection[OffloadKey]
    ) -> Victims | None:
        """Plans on numbers what the paper does for each of ``incoming`` (``None``: nothing comes in), then acts.

        The first ``len(incoming) - n`` find a free slot.
        """
        recent_ghosts, frequent_ghosts, capacity = self.recent_ghosts, self.frequent_ghosts, self._capacity
        sweeps = self.recent.sweep(protected), self.frequent.sweep(protected)
        from_recent, from_frequent = iter(sweeps[0]), iter(sweeps[1])
        victims: tuple[Victims, Victims] = ([], [])
        take_recent, take_frequent = victims[0].append, victims[1].append
        t1, b1, b2, target = len(self.recent), len(recent_ghosts), len(frequent_ghosts), self.target
        twice = len(self.frequent)
        recalled: set[OffloadKey] = set()
        free = len(incoming) - n
        for key in incoming:
            ghost_of_frequent = False
            is_ghost = False
            if key is not None and (key in recent_ghosts or (ghost_of_frequent := key in frequent_ghosts)):
                is_ghost = True
                recalled.add(key)
                target = self._adapted(key, target, b1, b2)
            if free > 0:
                free -= 1
            else:
                victim = None
                if t1 > target or (ghost_of_frequent and t1 == target):
                    victim = next(from_recent, None)
                if victim is not None:
                    take_recent(victim)
                    t1, b1 = t1 - 1, b1 + 1
                elif (victim := next(from_frequent, None)) is not None:
                    take_frequent(victim)
                    twice, b2 = twice - 1, b2 + 1
                elif (victim := next(from_recent, None)) is not None:
                    take_recent(victim)
                    t1, b1 = t1 - 1, b1 + 1
                else:
                    for sweep, taken in zip(sweeps, victims, strict=True):
                        sweep.give_up(len(taken))
                    return None
            if is_ghost:
                twice += 1
                if ghost_of_frequent:
                    b2 -= 1
                else:
                    b1 -= 1
            elif key is not None:
                t1 += 1
                if t1 + b1 > capacity and b1:
                    b1 -= 1
                if t1 + b1 + twice + b2 > 2 * capacity and b2:
                    b2 -= 1
        self._commit(sweeps, victims, recalled, target)
        return victims[0] + victims[1]

    def _commit(
        self, sweeps: tuple[Sweep, Sweep], victims: tuple[Victims, Victims], recalled: set[OffloadKey], target: float
    ) -> None:
        self.target = target
        for key in recalled:
            self._forget_ghost(key)
        self._recalled = recalled
        for sweep, taken, ghosts in zip(sweeps, victims, (self.recent_ghosts, self.frequent_ghosts), strict=True):
            sweep.take(taken)
            for key, _ in taken:
                ghosts[key] = None

    def _adapted(self, key: OffloadKey, target: float, b1: int, b2: int) -> float:
        """The target after a hit on the ghost ``key``, with ghost lists of these lengths (``key`` included)."""
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
        self.target = 0.0

    def __len__(self) -> int:
        return len(self.recent) + len(self.frequent)

    def released(self, keys: Iterable[OffloadKey]) -> None:
        if self.recent.parked or self.frequent.parked:
            self.recent.released(keys)
            self.frequent.released(keys)

    def check_invariants(self) -> None:
        self.recent.check_invariants()
        self.frequent.check_invariants()
        lists = [set(self.recent), set(self.frequent), set(self.recent_ghosts), set(self.frequent_ghosts)]
        assert len(set().union(*lists)) == sum(map(len, lists)), "a key is on two lists"
        assert len(self) <= self._capacity
        assert len(self.recent) + len(self.recent_ghosts) <= self._capacity
        assert sum(map(len, lists)) <= 2 * self._capacity
        assert 0 <= self.target <= self._capacity
        assert not self._recalled, "make_room was not followed by insert"
