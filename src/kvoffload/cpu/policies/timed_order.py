# SPDX-License-Identifier: Apache-2.0
"""Recency order with a look at its head, for policies that weigh the heads of several orders against each other."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from heapq import heappop, heappush

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, Victims

__all__ = ["TimedOrder"]


class TimedOrder:
    """Blocks from least to most recently used, whose times of use (by slot, in ``last_uses``) are all different.

    What ``head`` steps over because it is pinned or protected is ``parked``: out of ``blocks``, and less recent than
    all of them. A heap by time of use holds those of the parked that may be idle, so the order is exact, while a
    pinned block costs one step in all and O(log parked) once it is idle again.

    An eviction is a series of ``head`` and ``drop``, then either ``settle`` or ``put_back`` and ``settle``.
    """

    __slots__ = ("_deferred", "_heap", "_last_uses", "_pinned", "blocks", "parked")

    def __init__(self, last_uses: array[int]) -> None:
        self.blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.parked: dict[OffloadKey, BlockStatus] = {}
        self._last_uses = last_uses
        self._heap: list[tuple[int, OffloadKey]] = []
        self._pinned: set[OffloadKey] = set()
        """Parked and not in the heap: they were pinned when last looked at."""
        self._deferred: list[tuple[int, OffloadKey]] = []
        """Protected ones, out of the heap until the eviction is over."""

    def __len__(self) -> int:
        return len(self.blocks) + len(self.parked)

    def pop(self, key: OffloadKey) -> BlockStatus | None:
        """Takes ``key`` out of the order."""
        block = self.blocks.pop(key, None)
        if block is None and self.parked:
            block = self.parked.pop(key, None)
            self._pinned.discard(key)
        return block

    def head(self, protected: Collection[OffloadKey]) -> tuple[OffloadKey, BlockStatus] | None:
        """The least recent idle and unprotected block; it stays where it is."""
        while self._heap:
            last, key = self._heap[0]
            block = self.parked.get(key)
            if block is None or self._last_uses[block.block_id] != last:
                heappop(self._heap)  # used or removed since
            elif block.pins:
                heappop(self._heap)
                self._pinned.add(key)
            elif key in protected:
                self._deferred.append(heappop(self._heap))
            else:
                return key, block
        blocks = self.blocks
        while blocks:
            item = next(iter(blocks.items()))
            key, block = item
            if not block.pins and key not in protected:
                return item
            del blocks[key]
            self.parked[key] = block
            if block.pins:
                self._pinned.add(key)
            else:
                self._deferred.append((self._last_uses[block.block_id], key))
        return None

    def idle(self) -> Iterator[tuple[OffloadKey, BlockStatus]]:
        """Idle blocks, least recently used first. Changes nothing; nothing may change meanwhile."""
        for last, key in sorted(self._heap):
            block = self.parked.get(key)
            if block is not None and not block.pins and self._last_uses[block.block_id] == last:
                yield key, block
        for item in self.blocks.items():
            if not item[1].pins:
                yield item

    def drop(self, key: OffloadKey) -> None:
        """Takes out the block that ``head`` named last."""
        if self.blocks.pop(key, None) is None:
            del self.parked[key]
            heappop(self._heap)

    def put_back(self, victims: Victims) -> None:
        """Undoes ``drop`` of these; every one is less recent than all of ``blocks``."""
        for key, block in victims:
            self.parked[key] = block
            heappush(self._heap, (self._last_uses[block.block_id], key))

    def settle(self) -> None:
        """The eviction is over: what was protected is not any more."""
        for entry in self._deferred:
            heappush(self._heap, entry)
        self._deferred.clear()

    def released(self, keys: Iterable[OffloadKey]) -> None:
        """Some of ``keys`` may be idle now."""
        if self._pinned:
            for key in keys:
                if key in self._pinned:
                    self._pinned.remove(key)
                    heappush(self._heap, (self._last_uses[self.parked[key].block_id], key))

    def clear(self) -> None:
        self.blocks.clear()
        self.parked.clear()
        self._heap.clear()
        self._pinned.clear()

    def check_invariants(self) -> None:
        last_uses = self._last_uses
        lasts = [last_uses[block.block_id] for block in self.blocks.values()]
        assert lasts == sorted(set(lasts)), "not in order of recency"
        parked = {key: last_uses[block.block_id] for key, block in self.parked.items()}
        assert not lasts or all(last < lasts[0] for last in parked.values()), "a parked block is too recent"
        assert not self._deferred
        queued = set(self._heap)
        assert len(queued) == len(self._heap)
        for key, block in self.parked.items():
            assert ((parked[key], key) in queued) != (key in self._pinned)
            assert not block.is_idle or key not in self._pinned, f"{key!r} is idle, but no eviction would find it"
        assert self._pinned <= self.parked.keys()
        assert not self.blocks.keys() & self.parked.keys()
