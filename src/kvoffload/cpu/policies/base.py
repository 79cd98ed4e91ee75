# SPDX-License-Identifier: Apache-2.0
"""The seam for cache policies: a policy owns the order of blocks, and nothing else."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, TypeVar

from kvoffload.base import NextUse, OffloadKey
from kvoffload.metrics import Stats
from kvoffload.registry import Registry

T = TypeVar("T")


class BlockStatus:
    """One slot of the primary tier: which block it holds, since when, and how many transfers pin it.

    Made once per slot and reused for every block that the slot ever holds. Only the ``SlotTable`` and its policy keep
    one beyond a call. The table changes ``key``, ``pins`` and ``since_s``; the policy reads them, and owns
    ``policy_state``.

    ``pins`` counts the reads in progress. While the block is being written it is ``IN_FLIGHT`` (-1): one integer
    instead of a count and a flag, because every eviction and every lookup tests it. ``key`` is set before the block is
    inserted in the policy, and is ``None`` while the slot is free.
    """

    __slots__ = ("block_id", "key", "pins", "policy_state", "since_s")

    IN_FLIGHT: Final = -1

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.key: OffloadKey | None = None
        self.pins = self.IN_FLIGHT
        self.policy_state: Any = None
        self.since_s = 0.0

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

    ``SlotTable`` calls ``get`` or ``get_all`` to find blocks; ``evict`` and then ``insert_all``, tail to head, to
    reserve slots; ``touch`` when a request uses blocks; ``released`` when pins were given back; ``remove`` when a
    store failed; ``clear`` on reset.

    Laws (``kvoffload.testing.CachePolicyContract`` tests them):

    * ``get`` does not change the order.
    * ``evict(n, protected)`` is atomic: exactly ``n`` idle, unprotected blocks leave, or it returns ``None`` and
      nothing at all has changed, ghosts and targets included. A batch costs O(n + blocks stepped over).
    * ``touch(keys)`` takes a prefix head to tail and applies it tail to head, so that the tail is evicted first: a
      block is worthless once its predecessor is gone. Keys that are not resident are ignored.

    The abstract methods are all that a policy needs. It may leave out the parameters ``counts``, ``incoming`` and
    ``next_use`` if it has no use for them. The other methods are options: ``get_all`` and ``insert_all`` may be faster
    than their loops, ``released`` saves a policy from stepping over the same pinned block twice, and ``next_victims``
    lets lower tiers write blocks before they are evicted.
    """

    @abstractmethod
    def __init__(self, cache_capacity: int) -> None:
        """``cache_capacity``: the most blocks that will ever be resident."""

    @abstractmethod
    def get(self, key: OffloadKey) -> BlockStatus | None:
        """The resident block called ``key``."""

    @abstractmethod
    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """Adds an absent block as the most recently used. It is in flight."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> BlockStatus | None:
        """Takes a block out without remembering it as evicted; ``None`` if it is not resident."""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey], counts: bool = True, next_use: NextUse = NextUse.UNKNOWN) -> None:
        """One request used these blocks. With ``counts=False`` the use was counted before: the blocks become the most
        recent, and the policy learns nothing from it. ``next_use``: what the request's client says of the next."""

    @abstractmethod
    def evict(self, n: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey] = ()) -> Victims | None:
        """Takes out the ``n`` idle blocks that should go first, none of them in ``protected``; or returns ``None``.

        ``protected`` answers ``in`` in O(1). ``evict(0, ...)`` returns ``[]``. ``incoming``: distinct absent keys
        that ``insert_all`` adds next, in this order, unless the answer is ``None``; the last ``n`` of them take the
        victims' slots. A policy that remembers evicted keys learns from it.
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

    def insert_all(
        self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus], next_use: NextUse = NextUse.UNKNOWN
    ) -> None:
        """``insert`` for each of these distinct keys, in their order: the last is the most recently used.
        ``next_use``: what the client of the request that stores them says of their next use."""
        for key, block in zip(keys, blocks, strict=True):
            self.insert(key, block)

    def released(self, keys: Iterable[OffloadKey]) -> None:
        """Pins of these resident blocks went down, or their writing ended: some may be idle now."""

    def next_victims(self, n: int) -> list[OffloadKey] | None:
        """The ``n`` idle blocks (or all there are) that ``n`` new blocks would evict now, in about that order.

        Changes nothing, and costs O(n + blocks stepped over). A policy that cannot name them returns ``None`` for every
        ``n``.
        """
        return None

    def get_stats(self) -> Stats:
        """Values of the policy's own metrics."""
        return {}

    def check_invariants(self) -> None:
        """Recomputes what the policy keeps redundantly; ``AssertionError`` if it disagrees. For tests: O(blocks)."""


POLICIES: Registry[type[CachePolicy]] = Registry("cache policy", "kvoffload.policies")
"""Every cache policy by name. Outsiders add one with ``POLICIES.register`` or the entry point
``kvoffload.policies``."""

POLICIES.register("lru", "kvoffload.cpu.policies.lru:LRUCachePolicy")
POLICIES.register("arc", "kvoffload.cpu.policies.arc:ARCCachePolicy")
POLICIES.register("density", "kvoffload.cpu.policies.density:DensityCachePolicy")


def with_options(method: Callable[..., T], *options: str) -> Callable[..., T]:
    """``method`` for callers that pass ``options`` by name, which its author may have left out of its signature."""
    missing = [name for name in options if name not in inspect.signature(method).parameters]
    if not missing:
        return method

    @functools.wraps(method)
    def without(*arguments: Any, **named: Any) -> T:
        for name in missing:
            named.pop(name, None)
        return method(*arguments, **named)

    return without


class Union(Collection[OffloadKey]):
    """Keys that are in one of two collections, neither of which is copied. A key of both counts twice."""

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
