# SPDX-License-Identifier: Apache-2.0
"""The seam for secondary storage: a store is a dumb, synchronous byte container. Concurrency lives elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvoffload.base import OffloadKey

__all__ = ["BlockStore", "StoreStats"]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's own counts: gauges as of now, counters since it was opened."""

    used_bytes: int = 0
    """Bytes held, as far as this process knows."""
    corrupt_blocks: int = 0
    evicted_blocks: int = 0


class BlockStore(ABC):
    """Blocks of one fixed size, by key. Batch calls with an outcome per key.

    Called from I/O threads only, from several at once; a store keeps its own state consistent under that. The
    caller owns every buffer and keeps it alive and unchanged (``write``) or unread (``read_into``) for the call.

    A block that cannot be written or read is a ``False`` in the answer. A store that fails as a whole (its root
    is gone, the disk is read-only) raises ``StoreError`` or ``OSError``: the tier above counts it, and stops
    asking while it lasts.
    """

    @abstractmethod
    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Whether each block is probably here. Only ``read_into`` is the truth."""

    @abstractmethod
    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        """Stores ``blocks[i]`` (contiguous bytes) as ``keys[i]``. A block that is here already is ``True``.

        Readers see all of a block or nothing of it, also after a crash in the middle.
        """

    @abstractmethod
    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        """Fills ``blocks[i]`` (contiguous, writable) with block ``keys[i]``.

        ``False``: absent, torn or corrupt; the buffer's content is then undefined.
        """

    @abstractmethod
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Removes blocks; absent ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Releases files and memory. Idempotent; no other call follows."""

    # True options: what a store leaves out, the tier above does without.

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        """Batches of the keys that are here, without reading payloads. Runs once, on a thread of its own, while the
        other calls go on; a key may be missing or be gone by then."""
        return iter(())

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """A prefix, head to tail, was used elsewhere: evict its blocks later, the tail before the head."""

    def take_evicted(self) -> list[OffloadKey]:
        """Blocks removed since the last call other than by ``discard``: for room, or because they were bad."""
        return []

    def stats(self) -> StoreStats:
        """Counts. The one method that any thread calls: it takes no lock for long and does no I/O."""
        return StoreStats()
