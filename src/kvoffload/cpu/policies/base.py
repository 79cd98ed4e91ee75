# SPDX-License-Identifier: Apache-2.0
"""The seam for cache policies: a policy owns the order of blocks, and nothing else.

Two collections taken as one, without copying either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from kvoffload.base import OffloadKey
from kvoffload.registry import Registry

__all__ = ["POLICIES", "BlockStatus", "CachePolicy", "Either", "Victims"]


class BlockStatus:
    """One slot of the primary tier: which block it holds, and how many transfers pin it.

    Made once per slot and reused for every block that the slot ever holds, so nobody but the manager and its
    policy may keep one beyond a call. Changed by the manager alone, but for ``place``, which is the policy's own. A
    policy reads ``pins`` (or ``is_idle``) to know whether it may evict the block, and ``key``, which is set before the
    block is inserted. ``pins`` is -1 while the block is being written (in flight), else the number of reads in
    progress. ``key`` is ``None`` while the slot is free.
    """

    __slots__ = ("block_id", "key", "pins", "place")

    IN_FLIGHT: Final = -1

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.key: OffloadKey | None = None
        self.pins = self.IN_FLIGHT
        self.place: Any = None

    def __repr__(self) -> str:
        state = "in flight" if self.pins < 0 else f"pins={self.pins}"
        return f"BlockStatus(block_id={self.block_id}, {'free' if self.key is None else state})"

    @property
    def is_ready(self) -> bool:
        """Written, hence readable."""
        return self.pins >= 0

    @property
    def is_idle(self) -> bool:
        """Ready and unpinned, hence evictable."""
        return self.pins == 0


Victims = list[tuple[OffloadKey, BlockStatus]]


class CachePolicy(ABC):
    """Orders resident blocks for eviction. One thread; no I/O; knows keys and idleness, not bytes or slots.

    Called by ``CPUOffloadingManager``: ``get`` (or ``get_all``) to find blocks; ``make_room`` and then ``insert_all``,
    tail to head, when slots are reserved; ``touch`` when a request uses blocks; ``released`` when pins were given
    back; ``remove`` when a store failed; ``clear`` on reset.

    Laws (``kvoffload.testing`` has the contract):

    * ``get`` has no side effect on the order.
    * ``evict(n, protected)`` is atomic: exactly ``n`` idle, unprotected blocks leave, or it answers ``None`` and
      nothing at all has changed, ghosts and targets included. A batch costs O(n + blocks stepped over).
    * ``touch(keys)`` is given a prefix head to tail and applies it tail to head, so that the tail goes first: a
      block is worthless once its predecessor is gone. Keys that are not resident are ignored.

    The abstract methods are all that a policy needs. The others are true options: ``get_all`` and ``insert_all`` may be
    faster than their loops, ``make_room`` is for policies that learn from what is coming back, ``settle`` for those
    that count uses, ``released`` for those that do not want to step over the same pinned block twice, and
    ``next_victims`` lets tiers below get blocks on their way out.
    """

    @abstractmethod
    def __init__(self, cache_capacity: int) -> None:
        """``cache_capacity``: the most blocks that will ever be resident."""

    @abstractmethod
    def get(self, key: OffloadKey) -> BlockStatus | None:
        """The resident block called ``key``."""

    @abstractmethod
    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """A block that is not resident becomes so, as the most recently used. It is in flight."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> BlockStatus | None:
        """Takes a block out without remembering it as evicted; ``None`` if it is not resident."""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Blocks were used by one request."""

    @abstractmethod
    def evict(self, n: int, protected: Collection[OffloadKey]) -> Victims | None:
        """Takes out the ``n`` idle blocks that should go first, none of them in ``protected``; or ``None``.

        ``protected`` answers ``in`` in O(1). ``evict(0, ...)`` is ``[]``.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forgets everything, ghosts and learned targets included."""

    @abstractmethod
    def __len__(self) -> int:
        """Resident blocks."""

    def get_all(self, keys: Collection[OffloadKey]) -> list[BlockStatus | None]:
        """``get`` for each of ``keys``, in their order."""
        return list(map(self.get, keys))

    def insert_all(self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus]) -> None:
        """``insert`` for each of these distinct keys, in their order: the last is the most recently used."""
        for key, block in zip(keys, blocks, strict=True):
            self.insert(key, block)

    def make_room(self, incoming: Sequence[OffloadKey], n: int, protected: Collection[OffloadKey]) -> Victims | None:
        """``evict``, for a policy that wants to know for whom.

        ``incoming``: distinct absent keys, in the order in which they will all be inserted if the answer is not
        ``None``; ``n <= len(incoming)`` of them need another block's slot.
        """
        return self.evict(n, protected) if n else []

    def settle(self, keys: Iterable[OffloadKey]) -> None:
        """``touch`` for blocks whose use was counted already: they become the most recent, tail first, and nothing is
        learned from it. The default takes it for another use."""
        self.touch(keys)

    def released(self, keys: Iterable[OffloadKey]) -> None:
        """Pins of these resident blocks went down, or their writing ended: some may be idle now."""

    def next_victims(self, n: int) -> list[OffloadKey] | None:
        """The ``n`` idle blocks (or all there are) that would go, in about that order, if ``n`` new blocks came now.

        Changes nothing, and costs O(n + blocks stepped over). ``None``, whatever ``n``: this policy cannot tell.
        """
        return None

    def check_invariants(self) -> None:
        """Recomputes what the policy keeps redundantly; ``AssertionError`` if it disagrees. For tests: O(blocks)."""


POLICIES: Registry[type[CachePolicy]] = Registry("cache policy", "kvoffload.policies")
"""Every cache policy by name. Outsiders add one with ``POLICIES.register`` or the entry point
``kvoffload.policies``."""

POLICIES.register("lru", "kvoffload.cpu.policies.lru:LRUCachePolicy")
POLICIES.register("arc", "kvoffload.cpu.policies.arc:ARCCachePolicy")
POLICIES.register("density", "kvoffload.cpu.policies.density:DensityCachePolicy")


class Either(Collection[OffloadKey]):
    """Keys that are in one of two collections. ``in`` costs what it costs there; a key of both counts twice."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Collection[OffloadKey], second: Collection[OffloadKey]) -> None:
        self._first = first
        self._second = second

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain(self._first, self._second)

    def __len__(self) -> int:
        return len(self._first) + len(self._second)
