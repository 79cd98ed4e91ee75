# SPDX-License-Identifier: Apache-2.0
"""Where each key's block is: a hash table of 16 bytes per block, over tables that have the keys themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.disk.allocator import SLAB_STRIDE
from kvoffload.tiering.stores.disk.format import ENTRY_BYTES, LENGTH_AT, PROBE_AT, HashedKey

__all__ = ["ResidentKeys", "SlotIndex"]

_LEAST_CELLS = 1024
_DEAD_SHARE = 4
"""Cells of dropped slabs are removed when they are one in this many."""
_TRIES = 64
"""How often a lookup without the lock begins anew before it takes the lock."""
_SLAB_SHIFT, _IN_SLAB = SLAB_STRIDE.bit_length() - 1, SLAB_STRIDE - 1
_ENTRY_SHIFT = ENTRY_BYTES.bit_length() - 1


class SlotIndex:
    """Open addressing with linear probing. One lock of the caller's guards it; ``holds`` alone does without.

    A cell is a key's 32-bit hash and a slot's number, 0 if it is empty. A key is compared in the slot's entry, in
    ``tables[slab]``. A key may be in several slots, if several processes have written it. The cells of a dropped slab
    stay until they are many, with an empty table that matches no key, so that a drop costs the slab alone.

    The invariant: between a cell's home (its hash modulo the number of cells) and its place, no cell is empty.
    """

    def __init__(self) -> None:
        self.tables: dict[int, bytearray] = {}
        """Entries of each slab, empty if it was dropped and its number must not be used yet. The caller changes an
        entry only while its slot is not in the index."""
        self._array = np.zeros(_LEAST_CELLS, np.uint64)
        self._mask = _LEAST_CELLS - 1
        self._cells = self._array.data, self._mask
        """Both at once, for a reader without the lock."""
        self._count = 0
        self._num_dead = 0
        self._moves = 0
        """Odd while cells are being moved, and another number afterwards."""

    def __len__(self) -> int:
        return self._count

    def find(self, key: HashedKey) -> int:
        """A slot with this key's block, -1 if there is none."""
        # ``find_all`` in short, as this is asked for each block.
        (cells, mask), tables = self._cells, self.tables
        hash64, probe = key
        hash32 = hash64 & 0xFFFF_FFFF
        at = hash32 & mask
        while cell := cells[at]:
            if cell >> 32 == hash32:
                slot: int = cell & 0xFFFF_FFFF
                begin = (slot & _IN_SLAB) << _ENTRY_SHIFT
                if tables[slot >> _SLAB_SHIFT][begin + PROBE_AT : begin + ENTRY_BYTES] == probe:
                    return slot
            at = (at + 1) & mask
        return -1

    def holds(self, key: HashedKey) -> bool | None:
        """Whether a slot has this key's block, asked without the lock. ``None``: a change came in between."""
        moves = self._moves
        try:
            if self.find(key) >= 0:
                return True
        except KeyError:  # these cells were replaced meanwhile
            return None
        return None if moves & 1 or moves != self._moves else False

    def find_all(self, key: HashedKey) -> Iterator[int]:
        """All slots with this key's block. The index must not change meanwhile."""
        cells, mask = self._cells
        hash32, probe = key.hash64 & 0xFFFF_FFFF, key.probe
        at = hash32 & mask
        while cell := cells[at]:
            if cell >> 32 == hash32:
                slot = cell & 0xFFFF_FFFF
                entry_at = slot % SLAB_STRIDE * ENTRY_BYTES
                if self.tables[slot // SLAB_STRIDE][entry_at + PROBE_AT : entry_at + ENTRY_BYTES] == probe:
                    yield slot
            at = (at + 1) & mask

    def add(self, hash32: int, slot: int) -> None:
        self.reserve(self._count + 1)
        cells, mask = self._cells
        at = hash32 & mask
        while cells[at]:
            at = (at + 1) & mask
        cells[at] = hash32 << 32 | slot
        self._count += 1

    def remove(self, hash32: int, slot: int) -> bool:
        """``False`` if the slot is not in the index."""
        cells, mask = self._cells
        cell, at = hash32 << 32 | slot, hash32 & mask
        while (here := cells[at]) != cell:
            if not here:
                return False
            at = (at + 1) & mask
        self._count -= 1
        self._moves += 1
        # Close the gap: a later cell moves into it, unless its home lies after the gap.
        gap = at
        while True:
            at = (at + 1) & mask
            here = cells[at]
            if not here:
                break
            home = (here >> 32) & mask
            if (at - home) & mask >= (at - gap) & mask:
                cells[gap] = here
                gap = at
        cells[gap] = 0
        self._moves += 1
        return True

    def add_many(self, hashes: npt.NDArray[np.uint32], slots: npt.NDArray[np.int64]) -> None:
        self.reserve(self._count + len(slots))
        _place(self._array, hashes.astype(np.uint64) << np.uint64(32) | slots.astype(np.uint64))
        self._count += len(slots)

    def drop_slab(self, slab: int) -> None:
        """Removes all slots of a slab, which are those with an entry in its table. Its number is free when ``tables``
        has it no more."""
        num_held = int(np.count_nonzero(np.frombuffer(self.tables[slab], np.uint8)[LENGTH_AT::ENTRY_BYTES]))
        self.tables[slab] = bytearray()
        self._count -= num_held
        self._num_dead += num_held
        if _DEAD_SHARE * self._num_dead >= len(self._array):
            self.purge()

    def purge(self) -> None:
        """Removes the cells of dropped slabs, so that their numbers are free."""
        held = self._array[self._array != 0]
        is_dropped = np.zeros(max(self.tables, default=0) + 1, np.bool_)
        is_dropped[[slab for slab, table in self.tables.items() if not table]] = True
        kept = held[~is_dropped[(held & np.uint64(0xFFFF_FFFF)) >> np.uint64(_SLAB_SHIFT)]]
        self._rebuild(kept)
        self.tables = {slab: table for slab, table in self.tables.items() if table}

    def clear(self) -> None:
        """Removes everything."""
        self._rebuild(self._array[:0])
        self.tables = {}

    def reserve(self, count: int) -> None:
        """Makes room for ``count`` slots in all."""
        if 3 * (count + self._num_dead) <= 2 * len(self._array):
            return
        if self._num_dead:
            self.purge()
        if 3 * count > 2 * len(self._array):
            self._rebuild(self._array[self._array != 0], count)

    def _rebuild(self, held: npt.NDArray[np.uint64], room_for: int = 0) -> None:
        """Readers without the lock use the old cells, which do not change any more, until the new ones are complete."""
        # Written to, so that whoever adds a block does not wait for the kernel to find a page.
        array = np.full(_cells_for(max(room_for, len(held))), 0, np.uint64)
        _place(array, held)
        self._array, self._mask = array, len(array) - 1
        self._cells = array.data, self._mask
        self._count, self._num_dead = len(held), 0


def _cells_for(count: int) -> int:
    """The least number of cells of which ``count`` are at most two thirds."""
    num_cells = _LEAST_CELLS
    while 3 * count > 2 * num_cells:
        num_cells *= 2
    return num_cells


def _place(array: npt.NDArray[np.uint64], cells: npt.NDArray[np.uint64]) -> None:
    mask = np.uint64(len(array) - 1)
    places = (cells >> np.uint64(32)) & mask
    while len(cells):
        # Cells that want the same empty place: one of them wins, the others look further, as in ``add``.
        is_free = array[places] == 0
        array[places[is_free]] = cells[is_free]
        left = array[places] != cells
        cells, places = cells[left], (places[left] + np.uint64(1)) & mask


class ResidentKeys(Collection[OffloadKey]):
    """The keys of an index, for threads that do not hold its lock and must not wait for it.

    A lookup takes ``lock`` only if the index was changed in the middle of it, again and again. ``batches`` yields all
    keys.
    """

    def __init__(
        self,
        index: SlotIndex,
        lock: threading.Lock,
        hashed: Callable[[OffloadKey], HashedKey],
        batches: Callable[[], Iterator[Sequence[OffloadKey]]],
    ) -> None:
        self._index = index
        self._lock = lock
        self._hashed = hashed
        self._batches = batches

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        hashed = self._hashed(OffloadKey(key))
        for _ in range(_TRIES):
            if (found := self._index.holds(hashed)) is not None:
                return found
        with self._lock:
            return self._index.find(hashed) >= 0

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[OffloadKey]:
        return (key for batch in self._batches() for key in batch)
