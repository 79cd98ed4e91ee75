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

    def get_all(self, keys: Iterable[OffloadKey], found: list[BlockStatus | None]) -> None:
        """Fills the gaps of ``found``, which was looked up in ``blocks`` alone, with parked blocks."""
        parked = self.parked
        for position, key in enumerate(keys):
            if found[position] is None and key in parked:
                found[position] = parked[key].block

    def first_idle(self, n: int) -> list[OffloadKey]:
        """The ``n`` least recently used idle blocks, or all there are. Changes nothing."""
        parked = self.parked
        returned = [key for _, key in sorted(self._heap) if key in parked and parked[key].block.pins == 0]
        missing = n - len(returned)
        if missing <= 0:
            return returned[:n]
        return returned + list(islice((key for key, block in self.blocks.items() if block.pins == 0), missing))

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
        assert all(key not in self.parked or (rank, key) in queued for rank, key in self._heap)
        for key, parked in self.parked.items():
            assert parked.queued or not parked.block.is_idle, f"{key!r} is idle, but no sweep would find it"

    def _park(self, key: OffloadKey, block: BlockStatus, rank: int) -> None:
        self.parked[key] = parked = _Parked(block, rank)
        if block.pins == 0:
            parked.queued = True
            heappush(self._heap, (rank, key))


class Sweep:
    """One eviction's walk over an order, least recent first. Ends with exactly one of ``commit`` and ``undo``.

    What it steps over is parked either way, which does not change the order, so that the next sweep starts behind it.
    """

    __slots__ = ("_base", "_deferred", "_gaps", "_protected", "_ranks", "order", "victims")

    def __init__(self, order: RecencyOrder, protected: Collection[OffloadKey]) -> None:
        self.victims: Victims = []
        """Taken out so far: first those that were parked, then others."""
        self.order = order
        self._protected = protected
        self._base = order._next_rank
        self._ranks: list[int] = []  # of the victims that were parked
        self._gaps: list[int] = []  # ranks of blocks stepped over among the others
        self._deferred: list[tuple[int, OffloadKey]] = []  # protected ones, out of the heap for now

    def take(self, n: int) -> int:
        """Takes up to ``n`` more idle, unprotected blocks out of the order; says how many there were."""
        order, victims = self.order, self.victims
        before = len(victims)
        if order._heap:
            self._take_returned(n)
        blocks, protected = order.blocks, self._protected
        pop, take = blocks.popitem, victims.append
        missing = n - (len(victims) - before)
        while missing and blocks:
            item = pop(False)
            if item[1].pins or item[0] in protected:
                self._step_over(*item)
            else:
                take(item)
                missing -= 1
        return n - missing

    def commit(self) -> None:
        """The victims are gone."""
        for entry in self._deferred:
            heappush(self.order._heap, entry)

    def undo(self) -> None:
        """Puts the victims back where they were. Only after a ``take`` that found less than it was asked for."""
        order = self.order
        assert not order.blocks
        self.commit()
        parked, others = self.victims[: len(self._ranks)], self.victims[len(self._ranks) :]
        for rank, (key, block) in zip(self._ranks, parked, strict=True):
            order._park(key, block, rank)
        gaps = set(self._gaps)
        last_gap = self._gaps[-1] if self._gaps else -1
        rank = self._base
        for key, block in others:
            while rank in gaps:
                rank += 1
            if rank < last_gap:
                order._park(key, block, rank)
            else:
                order.blocks[key] = block
            rank += 1
        order._next_rank = max(order._next_rank, rank)

    def _take_returned(self, n: int) -> None:
        """Takes up to ``n`` parked blocks that are idle again."""
        order = self.order
        heap = order._heap
        while n and heap:
            rank, key = entry = heappop(heap)
            parked = order.parked.get(key)
            if parked is None:
                continue  # used or removed since it was queued; parked again it cannot be, before the heap is empty
            if parked.block.pins:
                parked.queued = False  # pinned again: released() will queue it again
            elif key in self._protected:
                self._deferred.append(entry)
            else:
                del order.parked[key]
                self.victims.append((key, parked.block))
                self._ranks.append(rank)
                n -= 1

    def _step_over(self, key: OffloadKey, block: BlockStatus) -> None:
        rank = self._base + len(self.victims) - len(self._ranks) + len(self._gaps)
        self.order._next_rank = rank + 1
        self._gaps.append(rank)
        if block.pins:
            self.order.parked[key] = _Parked(block, rank)
        else:
            parked = self.order.parked[key] = _Parked(block, rank)
            parked.queued = True
            self._deferred.append((rank, key))
