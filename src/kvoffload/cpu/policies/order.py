# SPDX-License-Identifier: Apache-2.0
"""Recency order whose eviction steps over a pinned block once, however long it stays pinned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, Victims

__all__ = ["RecencyOrder", "Sweep"]


class _Parked:
    """A block that a sweep stepped over. ``rank`` grows with recency; ``queued``: it has an entry in the heap."""

    __slots__ = ("block", "queued", "rank")

    def __init__(self, block: BlockStatus, rank: int) -> None:
        self.block = block
        self.rank = rank
        self.queued = False


class RecencyOrder:
    """Blocks from least to most recently used.

    ``blocks`` holds them in that order, but for those that a sweep stepped over because they were pinned (or
    protected): they are ``parked``, each with its rank, and a heap holds those of them that may be idle again.
    Every parked block is less recent than every one in ``blocks``, and ranks order the parked ones, so the order is
    exact at all times, while a pinned block costs one step in all and O(log parked) when it comes back.

    Callers on a hot path may read ``blocks`` (and ``parked`` when it is not empty) directly.
    """

    __slots__ = ("_heap", "_next_rank", "blocks", "parked")

    def __init__(self) -> None:
        self.blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.parked: dict[OffloadKey, _Parked] = {}
        self._heap: list[tuple[int, OffloadKey]] = []
        self._next_rank = 0

    def __len__(self) -> int:
        return len(self.blocks) + len(self.parked)

    def __contains__(self, key: object) -> bool:
        return key in self.blocks or key in self.parked

    def __iter__(self) -> Iterator[OffloadKey]:
        """Keys, least recently used first. O(n log n) in parked blocks: for tests and reports."""
        yield from sorted(self.parked, key=lambda key: self.parked[key].rank)
        yield from self.blocks

    def get(self, key: OffloadKey) -> BlockStatus | None:
        block = self.blocks.get(key)
        if block is None and self.parked and key in self.parked:
            return self.parked[key].block
        return block

    def pop(self, key: OffloadKey) -> BlockStatus | None:
        """Takes ``key`` out of the order."""
        block = self.blocks.pop(key, None)
        if block is None and self.parked:
            parked = self.parked.pop(key, None)
            return parked.block if parked else None
        return block

    def released(self, keys: Iterable[OffloadKey]) -> None:
        """Some of ``keys`` may be idle now; those that are parked take part in the next sweep again."""
        if self.parked:
            for key in keys:
                parked = self.parked.get(key)
                if parked is not None and not parked.queued:
                    parked.queued = True
                    heappush(self._heap, (parked.rank, key))

    def clear(self) -> None:
        self.blocks.clear()
        self.parked.clear()
        self._heap.clear()

    def sweep(self, protected: Collection[OffloadKey]) -> Sweep:
        return Sweep(self, protected)

    def check_invariants(self) -> None:
        assert not self.blocks.keys() & self.parked.keys()
        ranks = [parked.rank for parked in self.parked.values()]
        assert len(set(ranks)) == len(ranks)
        assert all(rank < self._next_rank for rank in ranks)
        queued = {(parked.rank, key) for key, parked in self.parked.items() if parked.queued}
        assert queued <= set(self._heap)
        assert len(set(self._heap)) == len(self._heap)
        for key, parked in self.parked.items():
            assert parked.queued or not parked.block.is_idle, f"{key!r} is idle, but no sweep would find it"

    # ------------------------------------------------------------------------------------- used by Sweep

    def _next_returned(self) -> tuple[int, OffloadKey] | None:
        """The least recent parked block that is idle again, out of the heap but still parked."""
        while self._heap:
            rank, key = heappop(self._heap)
            parked = self.parked.get(key)
            if parked is None or parked.rank != rank:
                continue  # used or removed since it was queued
            if parked.block.pins == 0:
                return rank, key
            parked.queued = False  # pinned again: released() will queue it again
        return None

    def _park(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            parked = _Parked(self.blocks.pop(key), self._next_rank)
            self._next_rank += 1
            self.parked[key] = parked
            if parked.block.pins == 0:
                parked.queued = True
                heappush(self._heap, (parked.rank, key))


class Sweep:
    """One eviction's walk over an order, least recent first: an iterator of idle, unprotected blocks.

    Ends with exactly one of ``take`` and ``give_up``; until then, and after ``give_up``, the order is as it was. What
    was stepped over is parked either way, so that the next sweep starts behind it.
    """

    __slots__ = ("_candidates", "_order", "_popped", "_protected", "_stepped_over", "_yielded")

    def __init__(self, order: RecencyOrder, protected: Collection[OffloadKey]) -> None:
        self._order = order
        self._protected = protected
        self._popped: list[tuple[int, OffloadKey]] = []
        self._stepped_over: list[OffloadKey] = []
        self._yielded = 0
        self._candidates = self._walk()

    def __iter__(self) -> Iterator[tuple[OffloadKey, BlockStatus]]:
        return self._candidates

    def _walk(self) -> Iterator[tuple[OffloadKey, BlockStatus]]:
        order, protected = self._order, self._protected
        while order._heap and (returned := order._next_returned()) is not None:
            self._popped.append(returned)
            key = returned[1]
            if key not in protected:
                self._yielded += 1
                yield key, order.parked[key].block
        step_over = self._stepped_over.append
        for key, block in order.blocks.items():
            if block.pins or key in protected:
                step_over(key)
            else:
                yield key, block

    def take(self, victims: Victims) -> None:
        """Takes ``victims``, which are all that this sweep has yielded, out of the order."""
        order = self._order
        blocks = order.blocks
        if self._yielded:
            for key, _ in victims[: self._yielded]:
                del order.parked[key]
            victims = victims[self._yielded :]
        for key, _ in victims:
            del blocks[key]
        if self._popped:
            self._requeue()
        if self._stepped_over:
            order._park(self._stepped_over)

    def give_up(self, num_yielded: int) -> None:
        """Leaves the order as it is. ``num_yielded``: how many blocks were taken from the iterator."""
        self._requeue()
        if self._stepped_over:
            # Idle blocks between those stepped over are parked with them: else they would count as more recent.
            visited = num_yielded - self._yielded + len(self._stepped_over)
            self._order._park(list(islice(self._order.blocks, visited)))

    def _requeue(self) -> None:
        order = self._order
        for rank, key in self._popped:
            if key in order.parked:
                heappush(order._heap, (rank, key))
