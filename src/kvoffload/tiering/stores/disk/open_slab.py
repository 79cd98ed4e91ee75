# SPDX-License-Identifier: Apache-2.0
"""An open slab, and the parts of slabs that a call uses: blocks to read, and runs to empty or fill."""

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
    """An open slab. A slot is in the index if its entry here is not empty. Only ``Slabs`` changes it, except for
    attributes that belong to the upkeep."""

    number: int
    file: SlabFile
    entries: bytearray
    changes: npt.NDArray[np.uint32]
    """Counters of changes: for our slab, as last written; for a neighbour's, as last seen. Belongs to the upkeep."""
    used_ns: npt.NDArray[np.int64] | None = None
    """Times of use, shared with the allocator; ``None`` for a neighbour's slab."""
    changed_pages: set[int] = field(default_factory=set)
    """For our slab: pages with changes that are not announced to neighbours."""
    uses: dict[int, int] = field(default_factory=dict)
    """For a neighbour's slab: slots that we used, with the times (seconds)."""
    given_until_s: float = 0.0
    """For a slab that we gave away: the time until which only others may take it. Belongs to the upkeep."""
    early: list[Run] = field(default_factory=list)
    """For our slab: slots that became free before the allocator received the slab."""
    num_bad: int = 0
    """Number of slots that are out of use because the disk failed to read or write them."""
    users: int = 0
    """Number of calls that are doing I/O on ``file``. The last of them closes a dropped slab."""
    is_dropped: bool = False

    @property
    def is_own(self) -> bool:
        return self.used_ns is not None

    def entry(self, index: int) -> bytearray:
        return self.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]

    def view(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self.entries, ENTRY)


class FoundBlock(NamedTuple):
    """A block to read. These objects sort so that neighbouring slots follow each other."""

    slot: int
    at: int
    """Its place in the batch."""
    seal: bytes


@dataclass(slots=True, eq=False)
class NewBlock:
    """A block to write."""

    key: HashedKey
    payload: memoryview
    """The block, or, once it is sealed, the bytes to write."""
    stamp_ns: int
    long_key: OffloadKey | None = None
    """The key itself, if the entry contains only its digest."""
    seal: bytes = b""
    is_written: bool = False


@dataclass(slots=True, eq=False)
class BusyRun:
    """Slots of one of our slabs that a call empties or fills. The slab stays open until ``release`` or ``record``."""

    slab: Slab
    slots: Run


@dataclass(slots=True, eq=False)
class NewRun(BusyRun):
    """Slots that a call fills with ``blocks``, and its progress."""

    blocks: Sequence[NewBlock]
    entries: bytes = b""
    good: list[Run] = field(default_factory=list)
    """Parts of ``blocks`` that are on the disk, entries included."""
    bad: list[int] = field(default_factory=list)
    """Blocks that the disk fails to write."""


def hashed_in(entry: bytes | bytearray) -> HashedKey:
    """Return the part of the key's hash that an entry contains, which is the part that the index needs."""
    return HashedKey(int.from_bytes(entry[PROBE_AT : PROBE_AT + 4], "little"), bytes(entry[PROBE_AT:]))
