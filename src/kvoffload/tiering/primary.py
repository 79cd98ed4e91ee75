# SPDX-License-Identifier: Apache-2.0
"""The primary tier as the tiers below it see it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from kvoffload.base import OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.cpu.policies.base import BlockStatus, Either

__all__ = ["CPUPrimaryTierOffloadingManager", "KVMemory"]


class KVMemory(Protocol):
    """What the primary tier needs of its memory; ``kvoffload.cpu.region.SharedOffloadRegion`` has it."""

    def create_kv_memoryview(self) -> memoryview:
        """All slots as rows: two-dimensional (num_blocks, block_bytes), format ``B``, writable."""


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """``CPUOffloadingManager`` with names for its operations as seen from below.

    *Load* and *store* are between device and primary tier, *read* and *write* between the primary tier and the
    tiers below: ``prepare_read`` pins a block that a cascade reads, ``prepare_write`` reserves the slot that a
    promotion writes into. Neither is a request of a client: they neither count for the reuse filter nor are held up
    by it, and reading for a cascade is no use of the block.

    ``spared`` is a live collection of blocks that waiting requests hold (``kvoffload.tiering.waiting``). A promotion
    never evicts one of them; a running request's store does only if there is no other room. ``on_reserved`` is told of
    every reservation: its number of blocks, and which were evicted for it.
    """

    def __init__(
        self,
        num_blocks: int,
        mmap_region: KVMemory,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
    ) -> None:
        super().__init__(num_blocks, cache_policy, enable_events, store_threshold, max_tracker_size)
        self.spared: Collection[OffloadKey] = ()
        self.on_reserved: Callable[[int, Collection[OffloadKey]], None] | None = None
        self._kv_view = mmap_region.create_kv_memoryview()

    @property
    def kv_view(self) -> memoryview:
        """The primary tier's memory, (num_blocks, block_bytes); valid until ``shutdown``."""
        return self._kv_view

    def peek(self, key: OffloadKey) -> BlockStatus | None:
        """The block called ``key``, without its counting as a lookup."""
        return self._get(key)

    def next_victims(self, n: int) -> list[OffloadKey] | None:
        """Idle blocks that ``n`` new ones would evict, in that order; ``None``: the cache policy cannot tell."""
        return self._policy.next_victims(n)

    def postpone(self, keys: Collection[OffloadKey]) -> None:
        """Moves blocks away from their eviction without that being a use of them."""
        self._policy.settle(keys)

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Pins ready blocks for a transfer to a tier below."""
        return CPULoadStoreSpec(self._pin(keys))

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Gives back the pins of one ``prepare_read``."""
        self._unpin(keys)

    def prepare_write(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserves slots for those of ``keys`` that are absent; ``None``, with nothing changed, if that would take
        ``spared`` blocks."""
        return self._told(super()._reserve(keys, self.spared))

    def complete_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        """Publishes what a transfer from below has written, or frees its slots."""
        self.complete_store(keys, req_context, success)

    def shutdown(self) -> None:
        super().shutdown()
        try:
            self._kv_view.release()
        except BufferError:
            pass  # a tier's thread hangs in I/O on it: the memory stays mapped as long as that thread lives

    def _reserve(
        self, keys: Collection[OffloadKey], protected: Collection[OffloadKey] = ()
    ) -> PrepareStoreOutput | None:
        if self.spared:
            reserved = super()._reserve(keys, Either(protected, self.spared))
            if reserved is not None:
                return self._told(reserved)
        return self._told(super()._reserve(keys, protected))

    def _told(self, reserved: PrepareStoreOutput | None) -> PrepareStoreOutput | None:
        if reserved is not None and self.on_reserved is not None:
            self.on_reserved(len(reserved.keys_to_store), reserved.evicted_keys)
        return reserved
