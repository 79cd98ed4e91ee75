# SPDX-License-Identifier: Apache-2.0
"""The interface of cache policies. A policy owns the order of blocks and nothing else."""

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
    """The record of one slot in host memory: its block, the time since when it holds it, and the number of pins.

    It is made once per slot and reused for every block that the slot ever holds. Only the ``SlotTable`` and its policy
    keep a reference beyond a call. The table changes ``key``, ``pins`` and ``since_s``. The policy reads these and owns
    ``policy_state``.

    ``pins`` counts the reads in progress. It is ``IN_FLIGHT`` (-1) while the block is being written: one integer
    instead of a count and a flag, because every eviction and every lookup tests it. ``key`` is set before the block is
    inserted into the policy, and is ``None`` while the slot is free.
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
        """Whether the block is written, and hence readable."""
        return self.pins >= 0

    @property
    def is_idle(self) -> bool:
        """Whether the block is ready and unpinned, and hence evictable."""
        return self.pins == 0


Victims = list[tuple[OffloadKey, BlockStatus]]


class CachePolicy(ABC):
    """Orders resident blocks for eviction.

    All calls come from one thread. A policy does no I/O. It sees the blocks' keys and whether they are idle, and does
    not access bytes or slots.

    ``SlotTable`` calls ``get`` or ``get_all`` to find blocks; ``evict`` and then ``insert_all``, tail to head, to
    reserve slots; ``touch`` when a request uses blocks; ``released`` when pins were released; ``remove`` when a
    store failed; ``clear`` on reset.

    Laws (``kvoffload.testing.CachePolicyContract`` tests them):

    * ``get`` does not change the order.
    * ``evict(n, protected)`` is atomic. Either exactly ``n`` idle, unprotected blocks leave, or it returns ``None`` and
      changes nothing, ghosts and targets included. A batch costs O(n + blocks stepped over).
    * ``touch(keys)`` accepts a prefix head to tail and applies it tail to head, so that the tail is evicted first. (A
      block is useless after its predecessor is evicted.) It ignores keys that are not resident.

    A policy must implement the abstract methods, and may leave out the parameters ``counts``, ``incoming`` and
    ``next_use`` if it does not use them. The other methods are optional: ``get_all`` and ``insert_all`` may be faster
    than the default loops, ``released`` saves a policy from stepping over the same pinned block twice, and
    ``next_victims`` lets lower tiers write blocks before they are evicted.
    """

    @abstractmethod
    def __init__(self, cache_capacity: int) -> None:
        """Create an empty policy. ``cache_capacity`` is the largest number of blocks that will ever be resident."""

    @abstractmethod
    def get(self, key: OffloadKey) -> BlockStatus | None:
        """Return the resident block with this key, or ``None``."""

    @abstractmethod
    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """Add an absent block as the most recently used one. The block is in flight."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> BlockStatus | None:
        """Remove a block without remembering it as evicted, and return it, or ``None`` if it is not resident."""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey], counts: bool = True, next_use: NextUse = NextUse.UNKNOWN) -> None:
        """Record that one request used these blocks.

        With ``counts=False``, an earlier call has counted this use: the blocks become the most recent ones, but the
        policy learns nothing from the call. ``next_use`` is the client's hint about the next use.
        """

    @abstractmethod
    def evict(self, n: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey] = ()) -> Victims | None:
        """Remove and return the first ``n`` idle blocks in the order of eviction that are not ``protected``.

        Returns ``None``, and changes nothing, if there are fewer. ``protected`` answers ``in`` in O(1).
        ``evict(0, ...)`` returns ``[]``. ``incoming`` lists distinct absent keys. Unless the result is ``None``, the
        caller adds them next with ``insert_all``, in this order, and the last ``n`` of them get the victims' slots. A
        policy that remembers evicted keys learns from ``incoming``.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, ghosts and learned targets included."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of resident blocks."""

    def get_all(self, keys: Collection[OffloadKey]) -> list[BlockStatus | None]:
        """Return the result of ``get`` for each of ``keys``, in their order."""
        return list(map(self.get, keys))

    def insert_all(
        self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus], next_use: NextUse = NextUse.UNKNOWN
    ) -> None:
        """Insert these distinct keys in their order, so that the last becomes the most recently used.

        ``next_use`` is the hint about their next use from the client whose request stores them.
        """
        for key, block in zip(keys, blocks, strict=True):
            self.insert(key, block)

    def released(self, keys: Iterable[OffloadKey]) -> None:
        """Note that these resident blocks may have become idle, because pins were released or a write ended."""

    def next_victims(self, n: int) -> list[OffloadKey] | None:
        """Return the idle blocks, at most ``n``, that ``n`` new blocks would evict, in approximately that order.

        Changes nothing, and costs O(n + blocks stepped over). A policy that cannot tell returns ``None`` for every
        ``n``.
        """
        return None

    def get_stats(self) -> Stats:
        """Return the values of the policy's own metrics."""
        return {}

    def check_invariants(self) -> None:
        """Recompute redundant state and raise ``AssertionError`` if it disagrees. For tests: O(blocks)."""


POLICIES: Registry[type[CachePolicy]] = Registry("cache policy", "kvoffload.policies")
"""All cache policies by name. Other packages add a policy with ``POLICIES.register`` or the entry point
``kvoffload.policies``."""

POLICIES.register("lru", "kvoffload.cpu.policies.lru:LRUCachePolicy")
POLICIES.register("arc", "kvoffload.cpu.policies.arc:ARCCachePolicy")
POLICIES.register("density", "kvoffload.cpu.policies.density:DensityCachePolicy")


def with_options(method: Callable[..., T], *options: str) -> Callable[..., T]:
    """Return ``method``, or a wrapper that drops the named ``options`` that its signature lacks."""
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
    """The keys of two collections, without copying them. A key in both counts twice."""

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
