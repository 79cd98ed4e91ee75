# SPDX-License-Identifier: Apache-2.0
"""The seam for cache policies: a policy owns the order of blocks, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Final

from kvoffload.base import OffloadKey
from kvoffload.registry import Registry

__all__ = ["POLICIES", "BlockStatus", "CachePolicy"]


class BlockStatus:
    """One tracked block: its slot, and how many transfers pin it.

    Made and changed by the manager alone; a policy reads ``is_idle`` to know whether it may evict the block.
    ``pins`` is -1 while the block is being written (in flight), else the number of reads in progress.
    """

    __slots__ = ("block_id", "pins")

    IN_FLIGHT: Final = -1

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.pins = self.IN_FLIGHT

    def __repr__(self) -> str:
        state = "in flight" if self.pins < 0 else f"pins={self.pins}"
        return f"BlockStatus(block_id={self.block_id}, {state})"

    @property
    def is_ready(self) -> bool:
        """Written, hence readable."""
        return self.pins >= 0

    @property
    def is_idle(self) -> bool:
        """Ready and unpinned, hence evictable."""
        return self.pins == 0


class CachePolicy(ABC):
    """Orders resident blocks for eviction. One thread; no I/O; knows keys and idleness, not bytes or slots.

    Called by ``CPUOffloadingManager``: ``get`` for every lookup, ``insert`` when a slot is reserved, ``touch``
    when a request uses blocks, ``evict`` when slots are needed, ``remove`` when a store failed, ``clear`` on reset.

    Laws (``kvoffload.testing`` has the contract):

    * ``get`` has no side effect on the order.
    * ``evict(n, protected)`` is atomic: exactly ``n`` idle, unprotected blocks leave, or it answers ``None`` and
      nothing at all has changed, ghosts and targets included. A batch costs O(n + blocks stepped over).
    * ``touch(keys)`` is given a prefix head to tail and applies it tail to head, so that the tail goes first: a
      block is worthless once its predecessor is gone. Keys that are not resident are ignored.
    """

    @abstractmethod
    def __init__(self, cache_capacity: int) -> None:
        """``cache_capacity``: the most blocks that will ever be resident."""

    @abstractmethod
    def get(self, key: OffloadKey) -> BlockStatus | None:
        """The resident block called ``key``."""

    @abstractmethod
    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """A block that is not resident becomes so, as the most recently used."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> BlockStatus | None:
        """Takes a block out without remembering it as evicted; ``None`` if it is not resident."""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Blocks were used."""

    @abstractmethod
    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Takes out the ``n`` idle blocks that should go first, none of them in ``protected``; or ``None``.

        ``protected`` answers ``in`` in O(1). ``evict(0, ...)`` is ``[]``.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forgets everything, ghosts and learned targets included."""

    @abstractmethod
    def __len__(self) -> int:
        """Resident blocks."""


POLICIES: Registry[type[CachePolicy]] = Registry("cache policy", "kvoffload.policies")
"""Every cache policy by name. Outsiders add one with ``POLICIES.register`` or the entry point
``kvoffload.policies``."""

POLICIES.register("lru", "kvoffload.cpu.policies.lru:LRUCachePolicy")
POLICIES.register("arc", "kvoffload.cpu.policies.arc:ARCCachePolicy")
