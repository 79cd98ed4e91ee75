# SPDX-License-Identifier: Apache-2.0
"""The slot of each key's block: a hash table of 16 bytes per block, over tables that contain the keys themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.disk.allocator import SLAB_STRIDE
from kvoffload.tiering.stores.disk.format import ENTRY_BYTES, PROBE_AT, HashedKey

_LEAST_CELLS = 1024
_CELLS_AT_ONCE = 1 << 13
"""Number of cells to move before releasing the lock for a moment."""
_FEW_CELLS = 16
"""Up to this many cells, placing them one by one is faster."""
_TRIES = 64
"""Number of attempts of a lookup without the lock before it takes the lock."""
_MOVED = 1
"""Content of a cell that has moved to another array: a slot of slab 0, which has no keys."""
_SLAB_SHIFT, _IN_SLAB = SLAB_STRIDE.bit_length() - 1, SLAB_STRIDE - 1
_ENTRY_SHIFT = ENTRY_BYTES.bit_length() - 1
_NOTHING = nullcontext()

_View = tuple[memoryview, int]
"""An array of cells, and the mask that gives a hash's place in it."""


class SlotIndex:
    """A hash table over tables that contain the keys. The caller's lock guards it. Only ``holds`` works without the
    lock, and ``make_room`` and ``drop_slabs`` take it themselves.

    It uses open addressing with linear probing. A cell contains a key's 32-bit hash and a slot's number, or 0 if it is
    empty. The invariant: between a cell's home (its hash modulo the number of cells) and its place, no cell is empty.
    When the cells are too few, or slabs are dropped, they move to another array, a few at a time. Until the last one
    has moved, each cell is in one of the two arrays. Lookups search the old array first, because cells never move back.

    A key is compared with the slot's entry in ``tables[slab]``. A key may be in several slots, if several processes
    wrote it. Slabs are numbered from 1.
    """

    def __init__(self) -> None:
        self.tables: dict[int, bytearray] = {0: bytearray()}
        """Entries of each slab; empty while the slots of a dropped slab are removed. The caller changes an entry only
        while its slot is not in the index."""
        self._views: tuple[_View, ...] = (_cells(_LEAST_CELLS),)
        """The cells. While they move, these are the old and the new array."""
        self._num_held = 0
        """Number of cells in use, including cells of dropped slabs that have not been removed."""
        self._next = 0
        """Cells of the old array before this one have moved."""
        self._is_kept = np.ones(1 << (32 - _SLAB_SHIFT), np.bool_)
        """Whether the cells of each slab move, or are removed because the slab was dropped."""
        self._moves = 0
        """A version number: odd while a cell moves to an earlier place, and different afterwards."""

    def __len__(self) -> int:
        return self._num_held

    def find(self, key: HashedKey) -> int:
        """Return a slot with this key's block, or -1."""
        # A short form of ``find_all``, because this is called for each block.
        tables = self.tables
        hash64, probe = key
        hash32 = hash64 & 0xFFFF_FFFF
        for cells, mask in self._views:
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
        except KeyError:  # a slab was dropped meanwhile
            return None
        return None if moves & 1 or moves != self._moves else False

    def find_all(self, key: HashedKey) -> Iterator[int]:
        """Return all slots with this key's block. The index must not change meanwhile."""
        hash32, probe = key.hash64 & 0xFFFF_FFFF, key.probe
        for cells, mask in self._views:
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
        _place_one(self._views[-1], hash32 << 32 | slot)
        self._num_held += 1

    def add_many(self, hashes: npt.NDArray[np.uint32], slots: npt.NDArray[np.int64]) -> None:
        self._make_room_at_last(len(slots))
        _place(self._views[-1], hashes.astype(np.uint64) << np.uint64(32) | slots.astype(np.uint64))
        self._num_held += len(slots)

    def remove(self, hash32: int, slot: int) -> bool:
        """Remove a slot. Returns ``False`` if it is not in the index."""
        removed = hash32 << 32 | slot
        for view in self._views:
            cells, mask = view
            at = hash32 & mask
            while (cell := cells[at]) and cell != removed:
                at = (at + 1) & mask
            if cell:
                self._moves += 1
                _close_gap(view, at)
                self._moves += 1
                self._num_held -= 1
                return True
        return False

    def clear(self) -> None:
        """Remove everything."""
        self._moves += 2
        self._views, self._next, self._num_held = (_cells(_LEAST_CELLS),), 0, 0
        self.tables = {0: bytearray()}

    def make_room(self, count: int, lock: AbstractContextManager[object] = _NOTHING) -> None:
        """Make room for ``count`` more slots. The caller does not hold ``lock``; this method takes it for a few cells
        at a time."""
        while self._lacks_room(count) or self._is_moving:
            self._move_some(count, lock)

    def drop_slabs(self, slabs: Collection[int], lock: AbstractContextManager[object]) -> None:
        """Remove the cells of slabs whose tables are empty, so that their numbers are free. As for ``make_room``, the
        caller does not hold ``lock``."""
        while not self.tables.keys().isdisjoint(slabs):
            self._move_some(0, lock)

    @property
    def _is_moving(self) -> bool:
        return len(self._views) > 1

    def _lacks_room(self, count: int) -> bool:
        """Return whether more than two thirds of the cells would be in use with ``count`` more slots."""
        return 3 * (self._num_held + count) > 2 * len(self._views[-1][0])

    def _make_room_at_last(self, count: int) -> None:
        """Make room for a caller that holds the lock and finds that others have used the room. At least an eighth of
        the cells stays empty, because searches would otherwise be long. The cells between two thirds and seven eighths
        are reserved for this. They can be too few only in a small index."""
        if 8 * (self._num_held + count) > 7 * len(self._views[-1][0]):
            self.make_room(count)

    def _move_some(self, count: int, lock: AbstractContextManager[object]) -> None:
        """Move some cells to another array, without the cells of dropped slabs. If no cells are moving, begin with an
        array that has room for ``count`` more slots."""
        if not self._is_moving:
            num_cells = _num_cells_for(self._num_held + count)
            array = _cells(num_cells)
            with lock:
                # Another thread may have begun, or added slots.
                if len(self._views) == 1 and num_cells >= _num_cells_for(self._num_held):
                    self._moves += 2  # a reader that knows only the old array could miss a cell
                    self._views, self._next = (self._views[0], array), 0
                    self._is_kept[:] = True
                    self._is_kept[[slab for slab, table in self.tables.items() if not table]] = False
        with lock:
            if not self._is_moving:
                return
            old, new = self._views
            some = np.frombuffer(old[0], np.uint64)[self._next : self._next + _CELLS_AT_ONCE]
            kept = some[self._is_kept[(some & np.uint64(0xFFFF_FFFF)) >> np.uint64(_SLAB_SHIFT)]]
            self._num_held -= int(np.count_nonzero(some > _MOVED)) - len(kept)
            _place(new, kept)
            some[some != 0] = _MOVED  # after they are in the new array, for readers without the lock
            self._next += len(some)
            if self._next == len(old[0]):
                self._views = (new,)
                for slab in np.flatnonzero(~self._is_kept)[1:].tolist():
                    del self.tables[slab]
        # The kernel frees the old array here, without the lock, because that takes long.


def _cells(num_cells: int) -> _View:
    # Written to, so that adding a block does not wait for the kernel to find a page.
    return np.full(num_cells, 0, np.uint64).data, num_cells - 1


def _num_cells_for(count: int) -> int:
    """Return the smallest size at which ``count`` cells use at most two thirds of the index."""
    num_cells = _LEAST_CELLS
    while 3 * count > 2 * num_cells:
        num_cells *= 2
    return num_cells


def _place(view: _View, cells: npt.NDArray[np.uint64]) -> None:
    """Add cells that are absent."""
    array, mask = np.frombuffer(view[0], np.uint64), np.uint64(view[1])
    places = (cells >> np.uint64(32)) & mask
    while len(cells) > _FEW_CELLS:
        # If several cells want the same empty place, one of them gets it, and the others search further.
        is_free = array[places] == 0
        array[places[is_free]] = cells[is_free]
        left = array[places] != cells
        cells, places = cells[left], (places[left] + np.uint64(1)) & mask
    for cell in cells.tolist():
        _place_one(view, cell)


def _place_one(view: _View, cell: int) -> None:
    cells, mask = view
    at = (cell >> 32) & mask
    while cells[at]:
        at = (at + 1) & mask
    cells[at] = cell


def _close_gap(view: _View, gap: int) -> None:
    """Empty the cell at ``gap``: a later cell moves into it, unless its home is after the gap."""
    cells, mask = view
    at = (gap + 1) & mask
    while here := cells[at]:
        if (at - (here >> 32)) & mask >= (at - gap) & mask:
            cells[gap] = here
            gap = at
        at = (at + 1) & mask
    cells[gap] = 0


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
