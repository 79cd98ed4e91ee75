# SPDX-License-Identifier: Apache-2.0
"""The interface of secondary storage: a store is a simple, synchronous container of blocks. ``StoreTier`` adds
threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvoffload.base import OffloadKey

LossCause = Literal["evicted", "corrupt", "removed"]
"""The reason why a store no longer contains a block: the store made room, the bytes were bad or unreadable, or another
process deleted it."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """One disk of a store that uses several."""

    path: str
    is_out: bool
    """Whether it fails, hangs or did not open. Its blocks are then absent, and the other disks get new blocks."""
    used_bytes: int = 0
    failed_calls: int = 0
    """Number of reads and writes that raised or found the disk hanging."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's own counts: current numbers of bytes, and other counts since it was opened."""

    used_bytes: int | None = None
    """Bytes of all blocks, as far as this process knows; ``None`` if the store does not count them."""
    corrupt_blocks: int = 0
    evicted_blocks: int = 0
    max_bytes: int | None = None
    """Bytes that all blocks may use; ``None`` if the store does not know a limit."""
    free_bytes: int | None = None
    """Bytes left on its disk for more blocks; ``None`` if the store does not know."""
    disks: tuple[DiskStats, ...] = ()
    """The disks of a store that uses several."""

    @classmethod
    def of_all(cls, each: Sequence[StoreStats]) -> StoreStats:
        """Return the sum of several stores, without their disks. A value that one of them does not know is ``None``."""

        def total(name: str) -> Any:
            counts = [getattr(stats, name) for stats in each]
            return None if None in counts else sum(counts)

        counted = "used_bytes", "corrupt_blocks", "evicted_blocks", "max_bytes", "free_bytes"
        return cls(**{name: total(name) for name in counted})


class BlockStore(ABC):
    """Blocks of one fixed size, by key. Each call gets a batch and returns an outcome per key.

    Several I/O threads call it at once, and a store keeps its state consistent. The caller owns every buffer. During a
    call it keeps the buffer alive, and does not change it (``write``) or read it (``read_into``).

    The answer for a block that cannot be written or read is ``False``. A store that fails as a whole (its root is gone,
    the disk is read-only) raises ``StoreError`` or ``OSError``. The tier above counts these errors, and stops calling
    the store while they continue.

    A store declares the attributes below, for its class or for itself.
    """

    batch_blocks: int | None = None
    """Maximum number of blocks of one ``write`` or ``read_into``. With ``None``, a batch contains about 4 MiB, and at
    most 64 blocks."""
    requests_in_flight: int = 4
    """Number of reads, and of writes, that the store serves well at once. A tier's ``threads`` overrides it."""
    rescan_s: float | None = None
    """Seconds after which the tier scans the store again, to find blocks that others have written or deleted. With
    ``None``, it scans once."""
    resident: Collection[OffloadKey] | None = None
    """The keys of the blocks that are here now, for a store that keeps all keys in memory. ``in`` and ``len`` return at
    once, without I/O, on any thread. The tier then looks keys up here, and does not keep its own index. ``None`` means
    that an answer needs I/O."""

    @abstractmethod
    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return whether each block is probably here. Only ``read_into`` can be certain."""

    @abstractmethod
    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        """Store ``blocks[i]`` (contiguous bytes) as ``keys[i]``. The answer for a block that is already here is
        ``True``.

        Readers see a whole block or none of it, even after a crash during the write.
        """

    @abstractmethod
    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        """Fill ``blocks[i]`` (contiguous, writable) with block ``keys[i]``.

        The answer is ``False`` for a block that is absent, torn or corrupt; the buffer's content is then undefined.
        """

    @abstractmethod
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks. Ignores absent ones."""

    @abstractmethod
    def close(self) -> None:
        """Release files and memory. Idempotent; no other call follows."""

    # These methods are optional: the tier above also works without them.

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        """Yield the keys of all blocks here, in batches of at most a few thousand, without reading payloads. The scan
        runs at startup and every ``rescan_s``, on its own thread, while other threads call the store. So a block that
        is written meanwhile may be missing, and a yielded block may be gone. The tier requests the next batch when it
        has room for its keys, in an idle engine hours later. An empty batch means that nothing is available yet: the
        tier asks again in a later step. Each key is yielded once, except by stores whose server lists the keys and may
        repeat one."""
        return iter(())

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record that a prefix, listed from head to tail, was used elsewhere. Its blocks are then evicted later, the
        tail first."""

    def retire(self) -> None:
        """Stop writing. A bounded store then gives up its blocks first when other stores beside it need room."""

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        """Return the blocks that disappeared since the last call, except by ``discard``, and the reasons. Any thread
        may call this, so it does no I/O and does not hold a lock for long."""
        return {}

    def stats(self) -> StoreStats:
        """Return the counts. Any thread may call this, so it does no I/O and does not hold a lock for long."""
        return StoreStats()
