# SPDX-License-Identifier: Apache-2.0
"""The primary tier as the tiers below it see it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvoffload.base import OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUOffloadingManager

__all__ = ["CPUPrimaryTierOffloadingManager", "KVMemory"]

_NO_KEYS: frozenset[OffloadKey] = frozenset()


class KVMemory(Protocol):
    """What the primary tier needs of its memory; ``kvoffload.cpu.region.SharedOffloadRegion`` has it."""

    def create_kv_memoryview(self) -> memoryview:
        """All slots: two-dimensional (num_blocks, block_bytes), format ``B``, writable."""


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """``CPUOffloadingManager`` with the memory behind its slots, and with names for transfers to and from lower tiers.

    *Load* and *store* move blocks between device and primary tier, *read* and *write* between the primary tier and the
    tiers below. ``prepare_read`` pins blocks for a cascade, ``prepare_write`` reserves slots for a promotion. Neither
    comes from a client: the reuse filter neither counts nor stops them, and reading for a cascade is no use of a block.

    ``mmap_region`` is asked for its view once. The other parameters are those of ``CPUOffloadingManager``.
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
        self._kv_view = mmap_region.create_kv_memoryview()

    @property
    def kv_view(self) -> memoryview:
        """The primary tier's memory, (num_blocks, block_bytes); valid until ``shutdown``."""
        return self._kv_view

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Pins ready blocks for a transfer to a tier below."""
        return CPULoadStoreSpec(self.slots.pin(keys))

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Gives back the pins of one ``prepare_read``."""
        self.slots.unpin(keys)

    def prepare_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext, claimed: Collection[OffloadKey] = _NO_KEYS
    ) -> PrepareStoreOutput | None:
        """Reserves slots for the absent ones of ``keys``; ``None``, with nothing changed, if that would evict a
        ``claimed`` block."""
        return self.slots.reserve(keys, claimed)

    def complete_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        """Publishes what a transfer from below has written, or frees its slots."""
        self.slots.end_write(keys, success)

    def shutdown(self) -> None:
        super().shutdown()
        try:
            self._kv_view.release()
        except BufferError:
            pass  # a tier's thread hangs in I/O on it: the memory stays mapped as long as that thread lives
