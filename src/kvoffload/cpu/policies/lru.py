# SPDX-License-Identifier: Apache-2.0
"""Evict the least recently used block."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvoffload.base import NextUse, OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, CachePolicy, Victims
from kvoffload.cpu.policies.recency import RecencyList, Sweep


class LRUCachePolicy(CachePolicy):
    """Evicts the idle block with the oldest last use."""

    def __init__(self, cache_capacity: int) -> None:
        self.recency = RecencyList()
        self._blocks = self.recency.blocks
        self._skipped = self.recency.skipped

    def __repr__(self) -> str:
        return f"LRUCachePolicy({len(self)} blocks)"

    def get(self, key: OffloadKey) -> BlockStatus | None:
        block = self._blocks.get(key)
        if block is None and self._skipped:
            return self.recency.get(key)
        return block

    def get_all(self, keys: Collection[OffloadKey]) -> list[BlockStatus | None]:
        found = list(map(self._blocks.get, keys))
        if self._skipped and None in found:
            self.recency.get_all(keys, found)
        return found

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self._blocks[key] = block

    def insert_all(
        self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus], next_use: NextUse = NextUse.UNKNOWN
    ) -> None:
        self._blocks.update(zip(keys, blocks))

    def remove(self, key: OffloadKey) -> BlockStatus | None:
        return self.recency.pop(key)

    def touch(self, keys: Iterable[OffloadKey], counts: bool = True, next_use: NextUse = NextUse.UNKNOWN) -> None:
        blocks, skipped = self._blocks, self._skipped
        move_to_end = blocks.move_to_end
        for key in reversed(keys if isinstance(keys, (list, tuple)) else list(keys)):
            if key in blocks:
                move_to_end(key)
            elif skipped and key in skipped:
                blocks[key] = skipped.pop(key)[1]

    def evict(self, n: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey] = ()) -> Victims | None:
        if not n:
            return []
        sweep = Sweep(self.recency, protected)
        if sweep.take(n) < n:
            sweep.undo()
            return None
        sweep.commit()
        return sweep.victims

    def clear(self) -> None:
        self.recency.clear()

    def __len__(self) -> int:
        return len(self.recency)

    def released(self, keys: Iterable[OffloadKey]) -> None:
        if self._skipped:
            self.recency.released(keys)

    def next_victims(self, n: int) -> list[OffloadKey]:
        return self.recency.first_idle(n)

    def check_invariants(self) -> None:
        self.recency.check_invariants()
