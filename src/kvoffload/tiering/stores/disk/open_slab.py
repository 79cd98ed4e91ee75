# SPDX-License-Identifier: Apache-2.0
"""A slab that is open, and what a call holds of slabs: blocks that it reads, runs that it empties or fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.disk.allocator import Run
from kvoffload.tiering.stores.disk.file import SlabFile
from kvoffload.tiering.stores.disk.format import ENTRY, ENTRY_BYTES, PROBE_AT, HashedKey


@dataclass(slots=True, eq=False)
class Slab:
    """A slab that is open. A slot is in the index if its entry here is not empty. ``Slabs`` alone changes it, but for
    what belongs to the upkeep."""

    number: int
    file: SlabFile
    entries: bytearray
    changes: npt.NDArray[np.uint32]
    """Of our slab: as last written. Of a neighbour's: as last seen. Belongs to the upkeep."""
    used_ns: npt.NDArray[np.int64] | None = None
    """Times of use, shared with the allocator. ``None``: a neighbour's slab."""
    changed_pages: set[int] = field(default_factory=set)
    """Of our slab: pages with changes that neighbours do not know of yet."""
    uses: dict[int, int] = field(default_factory=dict)
    """Of a neighbour's slab: slots that we have used, and when (seconds)."""
    given_until_s: float = 0.0
    """Of a slab that we gave away: until when it is others' to take. Belongs to the upkeep."""
    early: list[Run] = field(default_factory=list)
    """Of our slab: slots that became free before the allocator had it."""
    num_bad: int = 0
    """Slots that are out of use because the disk failed to read or write them."""
    users: int = 0
    """Calls that do I/O on ``file`` just now. The last of them closes a dropped slab."""
    is_dropped: bool = False

    @property
    def is_own(self) -> bool:
        return self.used_ns is not None

    def entry(self, index: int) -> bytearray:
        return self.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]

    def view(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self.entries, ENTRY)


class FoundBlock(NamedTuple):
    """A block that is to be read. Sorted, neighbouring slots follow each other."""

    slot: int
    at: int
    """Its place in the batch."""
    seal: bytes


@dataclass(slots=True, eq=False)
class NewBlock:
    """A block that is to be written."""

    key: HashedKey
    payload: memoryview
    """The block; once it is sealed, what is written for it."""
    stamp_ns: int
    long_key: OffloadKey | None = None
    """The key itself, where an entry has only a digest of it."""
    seal: bytes = b""
    is_written: bool = False


@dataclass(slots=True, eq=False)
class BusyRun:
    """Slots of one of our slabs that a call empties or fills. The slab stays open until ``release`` or ``record``."""

    slab: Slab
    slots: Run


@dataclass(slots=True, eq=False)
class NewRun(BusyRun):
    """Slots that a call fills with ``blocks``, and how far it came."""

    blocks: Sequence[NewBlock]
    entries: bytes = b""
    good: list[Run] = field(default_factory=list)
    """Parts of ``blocks`` that are on the disk, entries included."""
    bad: list[int] = field(default_factory=list)
    """Blocks that the disk fails to write."""


def hashed_in(entry: bytes | bytearray) -> HashedKey:
    """As much of the key's hash as an entry has, which is as much as the index asks for."""
    return HashedKey(int.from_bytes(entry[PROBE_AT : PROBE_AT + 4], "little"), bytes(entry[PROBE_AT:]))
