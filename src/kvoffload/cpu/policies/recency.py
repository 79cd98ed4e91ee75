# SPDX-License-Identifier: Apache-2.0
"""A recency list whose evictions step over each pinned block only once, however long it stays pinned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, Victims


class _Skipped:
    """A block that a sweep stepped over.

    ``rank`` grows with recency. ``queued`` says whether the block has an entry in the heap.
    """

    __slots__ = ("block", "queued", "rank")

    def __init__(self, block: BlockStatus, rank: int) -> None:
        self.block = block
        self.rank = rank
        self.queued = False


class RecencyList:
    """Blocks from least to most recently used.

    ``blocks`` contains them in that order, except for blocks that a sweep stepped over because they were pinned or
    protected. ``skipped`` contains these with their ranks, and the heap ``returned`` lists the skipped blocks that may
    be idle again. Every skipped block is less recent than all of ``blocks``, and ranks order the skipped blocks, so the
    order is always exact. A pinned block costs one step in total, and O(log skipped) when it becomes idle.

    Callers on a hot path may read ``blocks`` (and ``skipped`` if it is not empty) directly.
    """

    __slots__ = ("blocks", "next_rank", "returned", "skipped")

    def __init__(self) -> None:
        self.blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.skipped: dict[OffloadKey, _Skipped] = {}
        self.returned: list[tuple[int, OffloadKey]] = []
        self.next_rank = 0

    def __len__(self) -> int:
        return len(self.blocks) + len(self.skipped)

    def __iter__(self) -> Iterator[OffloadKey]:
        """Yield the keys, least recently used first. For tests and reports: O(n log n) in skipped blocks."""
        yield from sorted(self.skipped, key=lambda key: self.skipped[key].rank)
        yield from self.blocks

    def get(self, key: OffloadKey) -> BlockStatus | None:
        block = self.blocks.get(key)
        if block is None and self.skipped and key in self.skipped:
            return self.skipped[key].block
        return block

    def pop(self, key: OffloadKey) -> BlockStatus | None:
        """Remove ``key`` from the list and return its block, or ``None`` if the list does not contain it."""
        block = self.blocks.pop(key, None)
        if block is None and self.skipped:
            skipped = self.skipped.pop(key, None)
            return skipped.block if skipped else None
        return block

    def released(self, keys: Iterable[OffloadKey]) -> None:
        """Note that ``keys`` may have become idle, so that the next sweep considers the skipped ones again."""
        if self.skipped:
            for key in keys:
                skipped = self.skipped.get(key)
                if skipped is not None and not skipped.queued:
                    skipped.queued = True
                    heappush(self.returned, (skipped.rank, key))

    def clear(self) -> None:
        self.blocks.clear()
        self.skipped.clear()
        self.returned.clear()

    def get_all(self, keys: Iterable[OffloadKey], found: list[BlockStatus | None]) -> None:
        """Fill the gaps of ``found``, which was looked up in ``blocks`` alone, with skipped blocks."""
        skipped = self.skipped
        for position, key in enumerate(keys):
            if found[position] is None and key in skipped:
                found[position] = skipped[key].block

    def first_idle(self, n: int) -> list[OffloadKey]:
        """Return the ``n`` least recently used idle blocks, or fewer if there are fewer. Changes nothing."""
        skipped = self.skipped
        returned = [key for _, key in sorted(self.returned) if key in skipped and skipped[key].block.pins == 0]
        missing = n - len(returned)
        if missing <= 0:
            return returned[:n]
        return returned + list(islice((key for key, block in self.blocks.items() if block.pins == 0), missing))

    def check_invariants(self) -> None:
        assert not self.blocks.keys() & self.skipped.keys()
        ranks = [skipped.rank for skipped in self.skipped.values()]
        assert len(set(ranks)) == len(ranks)
        assert all(rank < self.next_rank for rank in ranks)
        queued = {(skipped.rank, key) for key, skipped in self.skipped.items() if skipped.queued}
        assert queued <= set(self.returned)
        assert len(set(self.returned)) == len(self.returned)
        assert all(key not in self.skipped or (rank, key) in queued for rank, key in self.returned)
        for key, skipped in self.skipped.items():
            assert skipped.queued or not skipped.block.is_idle, f"{key!r} is idle, but no sweep would find it"

    def skip(self, key: OffloadKey, block: BlockStatus, rank: int) -> None:
        self.skipped[key] = skipped = _Skipped(block, rank)
        if block.pins == 0:
            skipped.queued = True
            heappush(self.returned, (rank, key))


class Sweep:
    """One eviction's walk over a recency list, least recent first.

    End it with exactly one call of ``commit`` or ``undo``. After that, the blocks that it stepped over are in
    ``skipped``, which keeps their order. The next sweep visits only those of them that may be idle.
    """

    __slots__ = ("_base", "_deferred", "_gaps", "_list", "_protected", "_ranks", "victims")

    def __init__(self, recency: RecencyList, protected: Collection[OffloadKey]) -> None:
        self.victims: Victims = []
        """The blocks removed so far: first skipped blocks, then others."""
        self._list = recency
        self._protected = protected
        self._base = recency.next_rank
        self._ranks: list[int] = []  # the ranks of victims that were skipped
        self._gaps: list[int] = []  # the ranks of the blocks in ``blocks`` that this sweep stepped over
        self._deferred: list[tuple[int, OffloadKey]] = []  # protected blocks, out of the heap until the sweep ends

    def take(self, n: int) -> int:
        """Remove up to ``n`` more idle, unprotected blocks from the list. Returns how many it found."""
        recency, victims = self._list, self.victims
        before = len(victims)
        if recency.returned:
            self._take_returned(n)
        blocks, protected = recency.blocks, self._protected
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
        """End the sweep. The victims stay removed."""
        for entry in self._deferred:
            heappush(self._list.returned, entry)

    def undo(self) -> None:
        """Put the victims back where they were. Call this only after a ``take`` that found fewer than ``n`` blocks."""
        recency = self._list
        assert not recency.blocks
        self.commit()
        skipped, others = self.victims[: len(self._ranks)], self.victims[len(self._ranks) :]
        for rank, (key, block) in zip(self._ranks, skipped, strict=True):
            recency.skip(key, block, rank)
        # The rank of a block that this sweep stepped over is its position among all blocks that the sweep visited in
        # ``blocks``. So the other victims get the ranks in between. The victims after the last gap are more recent than
        # every skipped block, and return to ``blocks``.
        gaps = set(self._gaps)
        last_gap = self._gaps[-1] if self._gaps else -1
        rank = self._base
        for key, block in others:
            while rank in gaps:
                rank += 1
            if rank < last_gap:
                recency.skip(key, block, rank)
            else:
                recency.blocks[key] = block
            rank += 1
        recency.next_rank = max(recency.next_rank, rank)

    def _take_returned(self, n: int) -> None:
        """Remove up to ``n`` skipped blocks that are idle again."""
        recency = self._list
        heap = recency.returned
        while n and heap:
            rank, key = entry = heappop(heap)
            skipped = recency.skipped.get(key)
            if skipped is None:
                continue  # it was used or removed after it was queued, and is not skipped again until the heap is empty
            if skipped.block.pins:
                skipped.queued = False  # pinned again: released() will queue it again
            elif key in self._protected:
                self._deferred.append(entry)
            else:
                del recency.skipped[key]
                self.victims.append((key, skipped.block))
                self._ranks.append(rank)
                n -= 1

    def _step_over(self, key: OffloadKey, block: BlockStatus) -> None:
        rank = self._base + len(self.victims) - len(self._ranks) + len(self._gaps)
        self._list.next_rank = rank + 1
        self._gaps.append(rank)
        skipped = self._list.skipped[key] = _Skipped(block, rank)
        if not block.pins:
            skipped.queued = True
            self._deferred.append((rank, key))
