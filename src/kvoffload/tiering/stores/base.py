# SPDX-License-Identifier: Apache-2.0
"""The seam for secondary storage: a store is a dumb, synchronous container of blocks. ``StoreTier`` adds threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvoffload.base import OffloadKey

LossCause = Literal["evicted", "corrupt", "removed"]
"""Why a block is gone from a store: the store made room, its bytes were bad or could not be read, or somebody else
deleted it."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """One disk of a store on several."""

    path: str
    is_out: bool
    """It fails or hangs, or did not open: its blocks are absent, and new ones go to the others."""
    used_bytes: int = 0
    failed_calls: int = 0
    """Reads and writes that raised, and those that found it hanging."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's own counts: the bytes as of now, the others since it was opened."""

    used_bytes: int | None = None
    """Bytes of all blocks, as far as this process knows; ``None``: the store does not count them."""
    corrupt_blocks: int = 0
    evicted_blocks: int = 0
    max_bytes: int | None = None
    """Bytes that all blocks may take; ``None``: the store knows no bound."""
    free_bytes: int | None = None
    """What its disk has left for more of them; ``None``: the store does not know."""
    other_keys: int = 0
    """Keys that this process does not have, and under which others keep blocks of the same namespace there."""
    disks: tuple[DiskStats, ...] = ()
    """Of a store on several."""

    @classmethod
    def of_all(cls, each: Sequence[StoreStats]) -> StoreStats:
        """Of several stores together, without their disks. What one of them does not know is unknown."""

        def total(name: str) -> Any:
            counts = [getattr(stats, name) for stats in each]
            return None if None in counts else sum(counts)

        counted = "used_bytes", "corrupt_blocks", "evicted_blocks", "max_bytes", "free_bytes", "other_keys"
        return cls(**{name: total(name) for name in counted})


class BlockStore(ABC):
    """Blocks of one fixed size, by key. Each call takes a batch and has an outcome per key.

    I/O threads call it, several at once, and a store keeps its state consistent under that. The caller owns every
    buffer. During a call it keeps the buffer alive, and does not change it (``write``) or read it (``read_into``).

    A block that cannot be written or read is ``False`` in the answer. A store that fails as a whole (its root is
    gone, the disk is read-only) raises ``StoreError`` or ``OSError``. The tier above counts these errors, and stops
    calling the store while they last.

    The attributes below are values that a store declares, for its class or for itself.
    """

    batch_blocks: int | None = None
    """Most blocks of one ``write`` or ``read_into``. ``None``: as many as make some 4 MiB, 64 at most."""
    requests_in_flight: int = 4
    """How many reads the store serves well at once, and how many writes. A tier's ``threads`` overrides it."""
    rescan_s: float | None = None
    """How many seconds after a scan the tier scans the store again, to find what others have written or deleted.
    ``None``: it scans once."""
    resident: Collection[OffloadKey] | None = None
    """The keys that are here now, for a store that has them all in memory. ``in`` and ``len`` return at once, without
    I/O, on any thread. The tier then looks keys up here, and keeps no index of its own. ``None``: only I/O can tell."""

    @abstractmethod
    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Whether each block is probably here. Only ``read_into`` knows for certain."""

    @abstractmethod
    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        """Stores ``blocks[i]`` (contiguous bytes) as ``keys[i]``. The answer for a block that is already here is
        ``True``.

        Readers see all of a block or nothing of it, even after a crash during the write.
        """

    @abstractmethod
    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        """Fills ``blocks[i]`` (contiguous, writable) with block ``keys[i]``.

        ``False``: absent, torn or corrupt; the buffer's content is then undefined.
        """

    @abstractmethod
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Removes blocks. Ignores absent ones."""

    @abstractmethod
    def close(self) -> None:
        """Releases files and memory. Idempotent; no other call follows."""

    # Optional: the tier above does without what a store leaves out.

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        """Yields the keys that are here, in batches of some thousand at most, without reading payloads. Runs at the
        start, and every ``rescan_s``, on a thread of its own, while other threads call the store: a block written
        meanwhile may be missing, and a block yielded may be gone. The tier takes the next batch when it has room for
        its keys, in an idle engine hours later. An empty batch says that there is nothing for now: the tier asks
        again in a later step. Each key comes once, but where only the server knows them all and may name one again.
        """
        return iter(())

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Records that a prefix, head to tail, was used elsewhere: its blocks are evicted later, the tail first."""

    def retire(self) -> None:
        """Nothing is written from now on: what a bounded store holds gives way to the blocks of others beside it."""

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        """The blocks that are gone since the last call other than by ``discard``, and why. Any thread may call this, so
        it does no I/O and holds no lock for long."""
        return {}

    def stats(self) -> StoreStats:
        """The counts. Any thread may call this, so it does no I/O and holds no lock for long."""
        return StoreStats()
