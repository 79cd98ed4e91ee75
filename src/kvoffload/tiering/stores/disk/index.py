# SPDX-License-Identifier: Apache-2.0
"""The slot of each key's block: a hash table of 16 bytes per block, over tables that contain the keys themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.disk.allocator import SLAB_STRIDE
from kvoffload.tiering.stores.disk.format import ENTRY_BYTES, PROBE_AT, HashedKey

_LEAST_CELLS = 1024
_CELLS_AT_ONCE = 1 << 14
"""Number of cells to copy before releasing the lock for a moment."""
_CHANGES_AT_ONCE = 128
_FEW_CELLS = 16
"""Up to this many cells, placing them one by one is faster."""
_TRIES = 64
"""Number of attempts of a lookup without the lock before it takes the lock."""
_SLAB_SHIFT, _IN_SLAB = SLAB_STRIDE.bit_length() - 1, SLAB_STRIDE - 1
_ENTRY_SHIFT = ENTRY_BYTES.bit_length() - 1
_NUM_SLABS = 1 << (32 - _SLAB_SHIFT)
_NOTHING = nullcontext()


class SlotIndex:
    """A hash table over tables that contain the keys. The caller's lock guards it. Only ``holds`` works without the
    lock, and ``make_room`` takes it itself.

    A key is compared with the slot's entry in ``tables[slab]``. A key may be in several slots, if several processes
    wrote it. The cells of a dropped slab stay until the next ``make_room``, with an empty table that matches no key, so
    that dropping a slab is cheap.
    """

    def __init__(self) -> None:
        self.tables: dict[int, bytearray] = {}
        """Entries of each slab; empty if the slab was dropped and its number cannot be used yet. The caller changes an
        entry only while its slot is not in the index."""
        self._cells = _Cells(_LEAST_CELLS)
        self._num_dead = 0
        """Number of cells of dropped slabs."""
        self._moves = 0
        """A version number: odd while a cell is being moved, and different afterwards."""
        self._journal: list[tuple[int, bool]] | None = None
        """Changes since the filling of new cells began: each is a cell, and whether it was added."""
        self._rebuilding = threading.Lock()

    def __len__(self) -> int:
        return self._cells.num_held - self._num_dead

    def find(self, key: HashedKey) -> int:
        """Return a slot with this key's block, or -1."""
        # A short form of ``find_all``, because this is called for each block.
        (cells, mask), tables = self._cells.view, self.tables
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
        """Return whether a slot contains this key's block, without the lock; ``None`` if a change interfered."""
        moves = self._moves
        try:
            if self.find(key) >= 0:
                return True
        except KeyError:  # these cells were replaced meanwhile
            return None
        return None if moves & 1 or moves != self._moves else False

    def find_all(self, key: HashedKey) -> Iterator[int]:
        """Return all slots with this key's block. The index must not change meanwhile."""
        cells, mask = self._cells.view
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
        self._make_room_at_last(1)
        cell = hash32 << 32 | slot
        self._cells.add(cell)
        if self._journal is not None:
            self._journal.append((cell, True))

    def add_many(self, hashes: npt.NDArray[np.uint32], slots: npt.NDArray[np.int64]) -> None:
        """Add slots of one slab."""
        self._make_room_at_last(len(slots))
        cells = hashes.astype(np.uint64) << np.uint64(32) | slots.astype(np.uint64)
        self._cells.add_many(cells)
        if self._journal is not None:
            self._journal += [(cell, True) for cell in cells.tolist()]

    def remove(self, hash32: int, slot: int) -> bool:
        """Remove a slot. Returns ``False`` if it is not in the index."""
        cell = hash32 << 32 | slot
        moved = None if self._journal is None else list[int]()
        self._moves += 1
        is_here = self._cells.remove(cell, moved)
        self._moves += 1
        if is_here and moved is not None and self._journal is not None:
            # Also moved cells: they may have moved from an uncopied place to one that was already copied.
            self._journal += [(cell, False), *((other, True) for other in moved)]
        return is_here

    def drop_slab(self, slab: int) -> None:
        """Remove all slots of a slab. Its number is free once ``tables`` no longer contains it."""
        self.tables[slab] = bytearray()
        self._num_dead += self._cells.num_of[slab]
        if not self._cells.num_of[slab]:
            del self.tables[slab]

    def clear(self) -> None:
        """Remove everything."""
        self._replace(_Cells(_LEAST_CELLS))
        self.tables = {}

    def make_room(self, count: int, lock: AbstractContextManager[object] = _NOTHING) -> None:
        """Make room for ``count`` more slots, and for the number of one more slab. The caller does not hold ``lock``;
        this method takes it for a few cells at a time."""
        if self._lacks_room(count):
            with self._rebuilding:
                while self._lacks_room(count):
                    self._rebuild(count, lock)

    def _lacks_room(self, count: int) -> bool:
        cells = self._cells
        if cells.num_held + count > cells.well_held:
            return True
        return self._num_dead > 0 and len(self.tables) >= _NUM_SLABS - 1

    def _make_room_at_last(self, count: int) -> None:
        """Make room for a caller that holds the lock and finds that others have used the room. The last eighth is
        reserved for this. It can be too small only in a small index."""
        if self._cells.num_held + count > self._cells.most_held:
            self._rebuild(count, _NOTHING)

    def _rebuild(self, count: int, lock: AbstractContextManager[object]) -> None:
        """Copy the cells to new ones. Changes made meanwhile are repeated there before the new cells are used. Readers
        without the lock use the old cells until then, which no longer change. Ends early if another thread is doing it,
        or if the new cells have too little room for additions made meanwhile."""
        with lock:
            old, journal = self._cells, list[tuple[int, bool]]()
            self._journal = journal
            num_held = len(self)
            is_dropped = np.zeros(_NUM_SLABS, np.bool_)
            is_dropped[[slab for slab, table in self.tables.items() if not table]] = True
        new = _Cells(_cells_for(num_held + max(count, num_held // 16)))
        for first in range(0, len(old), _CELLS_AT_ONCE):
            with lock:
                if self._journal is not journal:
                    return
                some = old.array[first : first + _CELLS_AT_ONCE].copy()
            some = some[some != 0]
            new.add_many(some[~is_dropped[_slabs_of(some)]])
        new.count()
        while True:
            with lock:
                if self._journal is not journal:
                    return
                if new.num_held + len(journal) > new.most_held:
                    self._journal = None
                    return
                if len(journal) <= _CHANGES_AT_ONCE:
                    new.replay(journal)
                    self._replace(new)
                    return
                done, journal = journal, []
                self._journal = journal
            new.replay(done)

    def _replace(self, new: _Cells) -> None:
        self._cells, self._journal, self._num_dead = new, None, 0
        for slab in [slab for slab, table in self.tables.items() if not table]:
            self._num_dead += new.num_of[slab]  # the slab was dropped during the copy
            if not new.num_of[slab]:
                del self.tables[slab]


class _Cells:
    """Open addressing with linear probing, in a fixed number of cells.

    A cell contains a key's 32-bit hash and a slot's number, or 0 if it is empty. The invariant: between a cell's home
    (its hash modulo the number of cells) and its place, no cell is empty.
    """

    def __init__(self, num_cells: int) -> None:
        # Written to, so that adding a block does not wait for the kernel to find a page.
        self.array = np.full(num_cells, 0, np.uint64)
        self._cells, self._mask = self.view = self.array.data, num_cells - 1
        """Cells and mask in one object, for a reader without the lock."""
        self.num_held, self.most_held = 0, num_cells - num_cells // 8
        """Maximum number of cells in use. With more, fewer than an eighth would be empty, and searches would be
        long."""
        self.well_held = 2 * num_cells // 3
        """Number of cells in use above which the index grows."""
        self.num_of = [0] * _NUM_SLABS
        """Number of cells by slab."""

    def __len__(self) -> int:
        return len(self.array)

    def add(self, cell: int, *, is_new: bool = True) -> None:
        """Add a cell. ``is_new`` says that the cell is known to be absent."""
        cells, mask = self._cells, self._mask
        at = (cell >> 32) & mask
        while here := cells[at]:
            if not is_new and here == cell:
                return
            at = (at + 1) & mask
        cells[at] = cell
        self.num_held += 1
        self.num_of[(cell & 0xFFFF_FFFF) >> _SLAB_SHIFT] += 1

    def remove(self, cell: int, moved: list[int] | None = None) -> bool:
        """Remove a cell. Returns ``False`` if it is absent. Adds to ``moved`` the cells that were moved to close the
        gap."""
        cells, mask = self._cells, self._mask
        at = (cell >> 32) & mask
        while (here := cells[at]) != cell:
            if not here:
                return False
            at = (at + 1) & mask
        self.num_held -= 1
        self.num_of[(cell & 0xFFFF_FFFF) >> _SLAB_SHIFT] -= 1
        # Close the gap: a later cell moves into it, unless its home is after the gap.
        gap, at = at, (at + 1) & mask
        while here := cells[at]:
            if (at - (here >> 32)) & mask >= (at - gap) & mask:
                cells[gap] = here
                if moved is not None:
                    moved.append(here)
                gap = at
            at = (at + 1) & mask
        cells[gap] = 0
        return True

    def replay(self, changes: Iterable[tuple[int, bool]]) -> None:
        for cell, is_held in changes:
            if is_held:
                self.add(cell, is_new=False)
            else:
                self.remove(cell)

    def add_many(self, cells: npt.NDArray[np.uint64]) -> None:
        """Add cells of one slab, or of several before a ``count``. Ignores cells that are present."""
        if len(cells):
            self.num_held += len(cells)
            self.num_of[int(_slabs_of(cells[:1])[0])] += len(cells)
            _place(self.array, cells)

    def count(self) -> None:
        """Count all cells."""
        counts = np.zeros(_NUM_SLABS, np.int64)
        for first in range(0, len(self.array), _CELLS_AT_ONCE):
            some = self.array[first : first + _CELLS_AT_ONCE]
            counts += np.bincount(_slabs_of(some[some != 0]), minlength=_NUM_SLABS)
        self.num_of = counts.tolist()
        self.num_held = sum(self.num_of)


def _cells_for(count: int) -> int:
    """Return the smallest size at which ``count`` cells use at most two thirds of the index."""
    num_cells = _LEAST_CELLS
    while 3 * count > 2 * num_cells:
        num_cells *= 2
    return num_cells


def _slabs_of(cells: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return ((cells & np.uint64(0xFFFF_FFFF)) >> np.uint64(_SLAB_SHIFT)).astype(np.int64)


def _place(array: npt.NDArray[np.uint64], cells: npt.NDArray[np.uint64]) -> None:
    mask = np.uint64(len(array) - 1)
    places = (cells >> np.uint64(32)) & mask
    while len(cells) > _FEW_CELLS:
        # If several cells want the same empty place, one of them gets it, and the others search further, as in ``add``.
        is_free = array[places] == 0
        array[places[is_free]] = cells[is_free]
        left = array[places] != cells
        cells, places = cells[left], (places[left] + np.uint64(1)) & mask
    view, last = array.data, len(array) - 1
    for cell, at in zip(cells.tolist(), places.tolist(), strict=True):
        while (here := view[at]) and here != cell:
            at = (at + 1) & last
        view[at] = cell


class ResidentKeys(Collection[OffloadKey]):
    """The keys of an index, for threads that do not hold its lock and must not wait for it. A lookup takes ``lock``
    only if changes of the index keep interfering. ``batches`` yields all keys."""

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
