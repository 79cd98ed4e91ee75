# SPDX-License-Identifier: Apache-2.0
"""Where each key's block is: a hash table of 16 bytes per block, over tables that have the keys themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.slab.allocator import SLAB_STRIDE
from kvoffload.tiering.stores.slab.format import ENTRY_BYTES, PROBE_AT, HashedKey

__all__ = ["ResidentKeys", "SlotIndex"]

_LEAST_CELLS = 1024
_SLAB_SHIFT, _IN_SLAB = SLAB_STRIDE.bit_length() - 1, SLAB_STRIDE - 1
_ENTRY_SHIFT = ENTRY_BYTES.bit_length() - 1


class SlotIndex:
    """Open addressing with linear probing. One lock of the caller's guards it; ``holds`` alone does without.

    A cell is a key's 32-bit hash and a slot's number, 0 if it is empty. A key is compared in the slot's entry, in
    ``tables[slab]``. A key may be in several slots, if several processes have written it.

    The invariant: between a cell's home (its hash modulo the number of cells) and its place, no cell is empty.
    """

    def __init__(self) -> None:
        self.tables: dict[int, bytearray] = {}
        """Entries of each slab. The caller changes an entry only while its slot is not in the index."""
        self._array = np.zeros(_LEAST_CELLS, np.uint64)
        self._mask = _LEAST_CELLS - 1
        self._cells = self._array.data, self._mask
        """Both at once, for a reader without the lock."""
        self._count = 0
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
        """Whether a slot has this key's block, asked without the lock. ``None``: a change came in between, and only the
        holder of the lock can tell."""
        moves = self._moves
        try:
            if self.find(key) >= 0:
                return True
        except KeyError:  # a slab's table is gone, and its cells are about to be
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
        self._place(hashes.astype(np.uint64) << np.uint64(32) | slots.astype(np.uint64))
        self._count += len(slots)

    def drop_slab(self, slab: int) -> None:
        """Removes all slots of a slab, and its table."""
        self.tables.pop(slab, None)
        held = self._array[self._array != 0]
        kept = held[(held & np.uint64(0xFFFF_FFFF)) // np.uint64(SLAB_STRIDE) != slab]
        self._rebuild(len(self._array), kept)

    def reserve(self, count: int) -> None:
        """Makes room for ``count`` slots in all."""
        num_cells = len(self._array)
        while 3 * count > 2 * num_cells:
            num_cells *= 2
        if num_cells != len(self._array):
            self._rebuild(num_cells, self._array[self._array != 0])

    def _rebuild(self, num_cells: int, held: npt.NDArray[np.uint64]) -> None:
        self._moves += 1
        self._array = np.zeros(num_cells, np.uint64)
        self._mask = num_cells - 1
        self._cells = self._array.data, self._mask
        self._place(held)
        self._count = len(held)
        self._moves += 1

    def _place(self, cells: npt.NDArray[np.uint64]) -> None:
        array, mask = self._array, np.uint64(self._mask)
        places = (cells >> np.uint64(32)) & mask
        while len(cells):
            # Cells that want the same empty place: one of them wins, the others look further, as in ``add``.
            is_free = array[places] == 0
            array[places[is_free]] = cells[is_free]
            left = array[places] != cells
            cells, places = cells[left], (places[left] + np.uint64(1)) & mask


class ResidentKeys(Collection[OffloadKey]):
    """The keys of an index, for threads that do not hold its lock and must not wait for it.

    A lookup takes ``lock`` only if the index was changed in the middle of it. ``batches`` yields all keys.
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
        if (found := self._index.holds(hashed)) is not None:
            return found
        with self._lock:
            return self._index.find(hashed) >= 0

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[OffloadKey]:
        return (key for batch in self._batches() for key in batch)
