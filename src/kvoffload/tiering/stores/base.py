# SPDX-License-Identifier: Apache-2.0
"""The seam for secondary storage: a store is a dumb, synchronous byte container. Concurrency lives elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvoffload.base import OffloadKey

__all__ = ["BlockStore"]


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
