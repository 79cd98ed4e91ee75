# SPDX-License-Identifier: Apache-2.0
"""A recency list whose evictions step over each pinned block only once, however long it stays pinned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, Victims


class RecencyList:
    """Blocks from least to most recently used.

    ``blocks`` contains them in that order, except for blocks that a sweep stepped over because they were pinned or
    protected. ``skipped`` contains these with their ranks, which grow with recency. The heap ``returned`` lists the
    skipped blocks that may be idle again, and perhaps blocks that are no longer skipped. Every skipped block is less
    recent than all of ``blocks``, so the order is always exact. A pinned block costs one step in total, and
    O(log skipped) when it becomes idle.

    Callers on a hot path may read ``blocks`` (and ``skipped`` if it is not empty) directly.
    """

    __slots__ = ("blocks", "next_rank", "returned", "skipped")

    def __init__(self) -> None:
        self.blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.skipped: dict[OffloadKey, tuple[int, BlockStatus]] = {}
        self.returned: list[tuple[int, OffloadKey]] = []
        self.next_rank = 0

    def __len__(self) -> int:
        return len(self.blocks) + len(self.skipped)

    def __iter__(self) -> Iterator[OffloadKey]:
        """Yield the keys, least recently used first. For tests and reports: O(n log n) in skipped blocks."""
        yield from sorted(self.skipped, key=lambda key: self.skipped[key][0])
        yield from self.blocks

    def get(self, key: OffloadKey) -> BlockStatus | None:
        block = self.blocks.get(key)
        if block is None and self.skipped and key in self.skipped:
            return self.skipped[key][1]
        return block

    def pop(self, key: OffloadKey) -> BlockStatus | None:
        """Remove ``key`` from the list and return its block, or ``None`` if the list does not contain it."""
        block = self.blocks.pop(key, None)
        if block is None and self.skipped:
            skipped = self.skipped.pop(key, None)
            return skipped[1] if skipped else None
        return block

    def released(self, keys: Iterable[OffloadKey]) -> None:
        """Note that ``keys`` may have become idle, so that the next sweep considers the skipped ones again."""
        if self.skipped:
            for key in keys:
                skipped = self.skipped.get(key)
                if skipped is not None:
                    heappush(self.returned, (skipped[0], key))

    def clear(self) -> None:
        self.blocks.clear()
        self.skipped.clear()
        self.returned.clear()

    def get_all(self, keys: Iterable[OffloadKey], found: list[BlockStatus | None]) -> None:
        """Fill the gaps of ``found``, which was looked up in ``blocks`` alone, with skipped blocks."""
        skipped = self.skipped
        for position, key in enumerate(keys):
            if found[position] is None and key in skipped:
                found[position] = skipped[key][1]

    def first_idle(self, n: int) -> list[OffloadKey]:
        """Return the ``n`` least recently used idle blocks, or fewer if there are fewer. Changes nothing."""
        skipped, waiting = self.skipped, dict.fromkeys(sorted(self.returned))
        returned = [key for rank, key in waiting if self._is_skipped(rank, key) and skipped[key][1].pins == 0]
        missing = n - len(returned)
        if missing <= 0:
            return returned[:n]
        return returned + list(islice((key for key, block in self.blocks.items() if block.pins == 0), missing))

    def check_invariants(self) -> None:
        assert not self.blocks.keys() & self.skipped.keys()
        ranks = [rank for rank, _ in self.skipped.values()]
        assert len(set(ranks)) == len(ranks)
        assert all(rank < self.next_rank for rank in ranks)
        returned = set(self.returned)
        for key, (rank, block) in self.skipped.items():
            assert (rank, key) in returned or not block.is_idle, f"{key!r} is idle, but no sweep would find it"

    def skip(self, rank: int, key: OffloadKey, block: BlockStatus) -> None:
        self.skipped[key] = rank, block
        if block.pins == 0:
            heappush(self.returned, (rank, key))

    def _is_skipped(self, rank: int, key: OffloadKey) -> bool:
        """Return whether ``key`` has been skipped with this rank, and not used or removed since."""
        return key in self.skipped and self.skipped[key][0] == rank


class Sweep:
    """One eviction's walk over a recency list, least recent first.

    End it with exactly one call of ``commit`` or ``undo``. After that, the blocks that it stepped over are in
    ``skipped``, which keeps their order. The next sweep visits only those of them that may be idle.
    """

    __slots__ = ("_deferred", "_list", "_protected", "_ranks", "victims")

    def __init__(self, recency: RecencyList, protected: Collection[OffloadKey]) -> None:
        self.victims: Victims = []
        """The blocks removed so far."""
        self._list = recency
        self._protected = protected
        self._ranks: list[int] = []  # the ranks of the victims
        self._deferred: list[tuple[int, OffloadKey]] = []  # protected blocks, out of the heap until the sweep ends

    def take(self, n: int) -> int:
        """Remove up to ``n`` more idle, unprotected blocks from the list. Returns how many it found."""
        recency, victims, protected, ranks = self._list, self.victims, self._protected, self._ranks
        before = len(victims)
        if recency.returned:
            self._take_returned(n)
        blocks, rank = recency.blocks, recency.next_rank
        pop, take = blocks.popitem, victims.append
        missing = n - (len(victims) - before)
        while missing and blocks:
            item = pop(False)
            key, block = item
            if block.pins or key in protected:
                recency.skipped[key] = rank, block
                if not block.pins:
                    self._deferred.append((rank, key))
            else:
                take(item)
                ranks.append(rank)
                missing -= 1
            rank += 1
        recency.next_rank = rank
        return n - missing

    def commit(self) -> None:
        """End the sweep. The victims stay removed."""
        for entry in self._deferred:
            heappush(self._list.returned, entry)

    def undo(self) -> None:
        """Put the victims back as skipped blocks. Call this only after a ``take`` that found fewer than ``n`` blocks,
        so that none of ``blocks`` is less recent than they are."""
        assert not self._list.blocks
        self.commit()
        for rank, (key, block) in zip(self._ranks, self.victims, strict=True):
            self._list.skip(rank, key, block)

    def _take_returned(self, n: int) -> None:
        """Remove up to ``n`` skipped blocks that are idle again."""
        recency = self._list
        heap = recency.returned
        while n and heap:
            rank, key = entry = heappop(heap)
            if not recency._is_skipped(rank, key):
                continue  # it was used or removed after it was queued
            block = recency.skipped[key][1]
            if block.pins:
                continue  # pinned again: released() will queue it again
            if key in self._protected:
                self._deferred.append(entry)
            else:
                del recency.skipped[key]
                self.victims.append((key, block))
                self._ranks.append(rank)
                n -= 1
