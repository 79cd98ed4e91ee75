# SPDX-License-Identifier: Apache-2.0
"""The state of a store: its open slabs, the place of each block, the free slots, and the lost blocks."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.errors import reason_of
from kvoffload.tiering.stores.base import LossCause
from kvoffload.tiering.stores.disk.allocator import (
    BUSY,
    SLAB_STRIDE,
    Allocator,
    Run,
    free_runs,
    is_held,
    last_use,
    runs_of,
)
from kvoffload.tiering.stores.disk.file import SlabFile
from kvoffload.tiering.stores.disk.format import (
    EMPTY_ENTRY,
    ENTRY,
    ENTRY_BYTES,
    LENGTH_AT,
    PAGE_SLOTS,
    PROBE_AT,
    HashedKey,
    SlabFormat,
    key_in,
)
from kvoffload.tiering.stores.disk.index import ResidentKeys, SlotIndex
from kvoffload.tiering.stores.disk.open_slab import BusyRun, FoundBlock, NewBlock, NewRun, Slab, hashed_in
from kvoffload.tiering.stores.seal import SEAL_BYTES

_log = logging.getLogger(__name__)

NS = 1_000_000_000
_MAX_LOST = 1 << 18
_KEYS_AT_ONCE = 32
_CELLS_AT_ONCE = 1 << 9
_SLOTS_AT_ONCE = 1 << 14
"""Number of keys, cells or times of use to handle before releasing the lock for a moment."""
_EVICTED_AT_ONCE = 16
_LAST_SLAB = (1 << 12) - 1


class Slabs:
    """The state of a store under ``root``, for any number of threads. One lock guards the state; it is never held
    during I/O.

    A slab stays open while a call does I/O on it, because closing a descriptor during a write could send the rest to
    another file with the same number. ``find``, ``take`` and all methods that return runs pin the slabs of a call;
    ``unpin``, ``record`` and ``release`` unpin them.
    """

    def __init__(self, root: str, layout: SlabFormat) -> None:
        self._root = root
        self._layout = layout
        self._lock = threading.Lock()
        self._planning = threading.Lock()
        """Lock of the thread that evicts. It is taken before the other lock."""
        self._index = SlotIndex()
        self._allocator = Allocator()
        self.resident = ResidentKeys(self._index, self._lock, layout.hashed, self.keys)
        self.open: dict[int, Slab] = {}
        """Open slabs by number. Other classes only read it."""
        self.by_name: dict[str, Slab] = {}
        self.quarantined: set[str] = set()
        """Names of untrusted slabs, which use another format or failed. They are removed when room is needed."""
        self._long_keys: dict[bytes, OffloadKey] = {}
        """Long keys of blocks that this process wrote, by their entries' part of the key. Blocks of other processes
        with long keys can be found and read, but not named."""
        self.num_evicted = 0
        self.num_corrupt = 0
        self._last_number = 0
        self._last_stamp_ns = 0
        self._lost: deque[tuple[OffloadKey, LossCause]] = deque()
        """Lost blocks. A deque, because a dictionary or list blocks all threads whenever it grows."""
        self._unused: deque[SlabFile] = deque()
        """Files of dropped slabs that no call uses. They are closed without the lock, because unmapping a file, or
        closing an unlinked one, takes long."""
        self._is_closed = False
        self._is_limit_said = False

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._index)

    @property
    def num_slots(self) -> int:
        """Number of slots of our slabs."""
        return self._allocator.num_slots

    @property
    def num_free(self) -> int:
        """Number of slots of our slabs that a write may use."""
        return self._allocator.free.num_slots

    # --------------------------------------------------------------------------------------------- blocks of a call

    def contains(self, keys: Sequence[HashedKey]) -> list[bool]:
        answers = list[bool]()
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            with self._lock:
                answers += [self._index.find(key) >= 0 for key in keys[first : first + _KEYS_AT_ONCE]]
        return answers

    def touch(self, keys: Sequence[HashedKey]) -> None:
        """Record a use of each block that is here, in this order."""
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            self.use(keys[first : first + _KEYS_AT_ONCE])

    def use(self, keys: Sequence[HashedKey]) -> tuple[list[bool], range]:
        """Record a use of the blocks of a batch, as ``touch`` does. Returns which are here, and the time of each use
        (nanoseconds), later than all earlier uses."""
        with self._lock:
            slots = [self._index.find(key) for key in keys]
            return [slot >= 0 for slot in slots], self._use(slots)

    def find(self, keys: Sequence[HashedKey], asked: Sequence[int]) -> tuple[list[FoundBlock], dict[int, Slab]]:
        """Record a use of each block in ``asked`` that is here. Returns these blocks, sorted, and their slabs by
        number, pinned."""
        with self._lock:
            slots = [self._index.find(keys[at]) for at in asked]
            self._use(slots)
            found, slabs = list[FoundBlock](), dict[int, Slab]()
            for at, slot in zip(asked, slots, strict=True):
                if slot >= 0:
                    slab = self.open[slot // SLAB_STRIDE]
                    if slab.number not in slabs:
                        slabs[slab.number] = slab
                        slab.users += 1
                    offset = slot % SLAB_STRIDE * ENTRY_BYTES
                    found.append(FoundBlock(slot, at, bytes(slab.entries[offset : offset + SEAL_BYTES])))
        return sorted(found), slabs

    def take(self, blocks: Sequence[NewBlock]) -> list[NewRun]:
        """Take free slots for the ``blocks``, or for the first ones if the slots do not suffice."""
        self._index.make_room(len(blocks), self._lock)
        with self._lock:
            runs, first = list[NewRun](), 0
            for slots in self._allocator.take(len(blocks)):
                slab = self.open[slots.slab]
                slab.users += 1
                runs.append(NewRun(slab, slots, blocks[first : first + slots.count]))
                first += slots.count
        return runs

    def record(self, runs: Sequence[NewRun]) -> None:
        """Add the blocks that were written. The other slots of the runs are free again, or left out of use."""
        with self._lock:
            for run in runs:
                if not run.slab.is_dropped:
                    self._record(run)
                self._unpin(run.slab)
        self._close_unused()

    def discard(self, keys: Sequence[HashedKey]) -> list[BusyRun]:
        """Forget blocks. Returns our own slots to empty. A neighbour's block may reappear when its page changes."""
        runs = list[BusyRun]()
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            with self._lock:
                removed = list[int]()
                for key in keys[first : first + _KEYS_AT_ONCE]:
                    for slot in list(self._index.find_all(key)):
                        slab = self.open[slot // SLAB_STRIDE]
                        self._remove(slab, slot % SLAB_STRIDE, None)
                        if slab.is_own:
                            removed.append(slot)
                runs += self._busy(runs_of(sorted(removed)))
        return runs

    def evict(self, count: int, before_ns: int) -> list[BusyRun]:
        """Evict at least ``count`` blocks, if the last use of that many was by ``before_ns``. Returns their slots,
        which the caller must empty. Other threads wait at most for a few blocks at a time, and never for a plan, unless
        they also evict."""
        runs = list[BusyRun]()
        with self._planning:
            lacking = self._allocator.grain_of(count)
            while lacking > 0:
                with self._lock:
                    part = min(lacking, _EVICTED_AT_ONCE)
                    evicted = self._allocator.evict(part, before_ns, self._unlocked, num_wanted=lacking)
                    for slots in evicted:
                        for slot in range(slots.start, slots.stop):
                            self._remove(self.open[slots.slab], slot % SLAB_STRIDE, "evicted")
                        self.num_evicted += slots.count
                        lacking -= slots.count
                        if runs and runs[-1].slots.stop == slots.start:
                            runs[-1].slots = Run(runs[-1].slots.start, runs[-1].slots.count + slots.count)
                        else:
                            runs += self._busy([slots])
                if not evicted:
                    break
        return runs

    def remove_corrupt(self, slab: Slab, index: int, entry: bytes, *, is_unreadable: bool) -> list[BusyRun]:
        """Remove a corrupt block, unless its entry has changed meanwhile. Returns its slot if the caller must empty it,
        which is never a neighbour's. One of our slots that ``is_unreadable`` may be put out of use instead."""
        slot = slab.number * SLAB_STRIDE + index
        with self._lock:
            if slab.is_dropped or slab.entry(index) != entry or slot not in self._slots_of(entry):
                return []
            self._remove(slab, index, "corrupt")
            self.num_corrupt += 1
            if not slab.is_own:
                return []  # its own process will detect this; here it is gone until its page changes
            if is_unreadable and self._may_leave_out(slab, 1, any_good=True):
                return []
            return self._busy([Run(slot, 1)])

    def release(self, runs: Sequence[BusyRun]) -> None:
        """Free slots whose entries are empty on the disk."""
        with self._lock:
            for run in runs:
                if not run.slab.is_dropped:
                    if not self._allocator.release(run.slots):
                        run.slab.early.append(run.slots)
                    self._change(run.slab, run.slots.first, run.slots.count)
                self._unpin(run.slab)
        self._close_unused()

    def unpin(self, slabs: Iterable[Slab]) -> None:
        with self._lock:
            for slab in slabs:
                self._unpin(slab)
        self._close_unused()

    def entry(self, slab: Slab, index: int) -> bytes:
        with self._lock:
            return bytes(slab.entry(index))

    def keys(self) -> Iterator[Sequence[OffloadKey]]:
        """Yield the keys that are known so far, in batches."""
        for slab in self.snapshot():
            lengths = slab.view()["length"]
            for start in range(0, len(lengths), _SLOTS_AT_ONCE):  # most of them may be empty
                held = (np.flatnonzero(lengths[start : start + _SLOTS_AT_ONCE]) + start).tolist()
                for first in range(0, len(held), _KEYS_AT_ONCE):
                    if keys := self._keys_in(slab, held[first : first + _KEYS_AT_ONCE]):
                        yield keys

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        if not self._lost:
            return {}
        with self._lock:
            lost, self._lost = self._lost, deque()
        return dict(lost)

    # -------------------------------------------------------------------------------------------------- whole slabs

    def snapshot(self) -> list[Slab]:
        """Return the slabs that are open now."""
        with self._lock:
            return list(self.open.values())

    def own_by_age(self) -> list[Slab]:
        """Return our slabs, the least recently used first."""
        ages = list[tuple[int, Slab]]()
        for slab in self.snapshot():
            if (used_ns := slab.used_ns) is not None:  # others change it meanwhile
                ages.append((last_use(used_ns), slab))
        return [slab for _, slab in sorted(ages, key=lambda one: one[0])]

    def expect(self, slabs_bytes: Iterable[int]) -> None:
        """Make room in the index for the blocks of slabs of these sizes, before they are registered. Growing with each
        slab would move all cells repeatedly."""
        self._index.make_room(sum(map(self._layout.slots_in, slabs_bytes)), self._lock)

    def register(self, file: SlabFile, is_own: bool) -> None:
        """Take over ``file``, a few blocks at a time. Raises ``OSError`` if the table cannot be read."""
        try:
            changes = file.read_changes()  # read before the entries, so that a later change is noticed
            entries = file.read_entries(0, file.num_slots)
            table = np.frombuffer(entries, ENTRY)
            used_ns = self._times_of(table, file.read_uses()) if is_own else None
            held = np.flatnonzero(table["length"])
            self._index.make_room(len(held), self._lock)
            with self._lock:
                if self._is_closed:
                    raise OSError(errno.ESHUTDOWN, "the store is closed", self._root)
                slab = Slab(self._next_number(), file, entries, changes, used_ns)
                self.open[slab.number] = self.by_name[file.name] = slab
                self._index.tables[slab.number] = entries
        except BaseException:  # such as too little memory: nothing else would close the file, and it is locked
            file.close()
            raise
        hashes, slots = table["hash"][held], held + slab.number * SLAB_STRIDE
        for first in range(0, len(held), _CELLS_AT_ONCE):
            self._index.make_room(_CELLS_AT_ONCE, self._lock)
            with self._lock:
                if slab.is_dropped:
                    return
                last = first + _CELLS_AT_ONCE
                self._index.add_many(hashes[first:last], slots[first:last])
        self._own(slab)

    def apply(self, slab: Slab, first: int, entries: bytes | bytearray) -> None:
        """Replace a neighbour's entries from slot ``first`` on with ``entries``. For the thread that adopts slabs."""
        old = np.frombuffer(slab.entries, np.uint64).reshape(-1, 8)[first : first + len(entries) // ENTRY_BYTES]
        new = np.frombuffer(entries, np.uint64).reshape(-1, 8)
        changed = np.flatnonzero((old != new).any(axis=1)).tolist()
        for begin in range(0, len(changed), _KEYS_AT_ONCE):
            self._index.make_room(_KEYS_AT_ONCE, self._lock)
            with self._lock:
                if slab.is_dropped:
                    return
                for at in changed[begin : begin + _KEYS_AT_ONCE]:
                    self._apply(slab, first + at, entries[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES])

    def correct(self, slab: Slab, index: int, before: bytes, entry: bytes | bytearray) -> None:
        """Accept a neighbour's new ``entry``, if our copy is still ``before``. If not, the store's thread has read a
        later entry."""
        self._index.make_room(1, self._lock)
        with self._lock:
            if not slab.is_dropped and not slab.is_own and slab.entry(index) == before:
                self._apply(slab, index, entry)

    def adopt(self, slab: Slab, entries: bytes | bytearray, uses: npt.NDArray[np.uint32]) -> None:
        """Make a neighbour's slab, with these ``entries``, our own."""
        self.apply(slab, 0, entries)
        table = slab.view()
        used_ns = self._times_of(table, uses)
        with self._lock:
            slab.used_ns = used_ns
            slab.uses.clear()
        for first in range(0, len(table), _SLOTS_AT_ONCE):
            part = slice(first, first + _SLOTS_AT_ONCE)
            with self._lock:  # slots that were emptied while their times were looked up
                used_ns[part][(table["length"][part] == 0) & is_held(used_ns[part])] = BUSY
        self._own(slab)

    def give(self, slab: Slab) -> bool:
        """Treat one of our slabs as a neighbour's. Returns ``False`` if a call is using it."""
        with self._lock:
            if slab.users or slab.is_dropped:
                return False
            freed = self._allocator.drop_slab(slab.number)
            slab.used_ns = None
            slab.changed_pages = set()  # counting them later would overwrite the next owner's counts
        del freed
        return True

    def drop(self, slabs: Iterable[Slab], cause: LossCause) -> list[Slab]:
        """Stop using slabs, whose blocks are lost for ``cause``. Returns the slabs that were still in use."""
        dropped = list[Slab]()
        for slab in slabs:
            with self._lock:
                if slab.is_dropped:
                    continue
                freed = self._drop(slab)
            del freed
            dropped.append(slab)
        self._close_unused()
        for slab in dropped:
            held = np.flatnonzero(slab.view()["length"])
            if cause == "evicted":
                with self._lock:
                    self.num_evicted += len(held)
            for first in range(0, len(held), _KEYS_AT_ONCE):
                if len(self._lost) >= _MAX_LOST and not self._long_keys:
                    break  # the other keys could not be reported
                with self._lock:
                    for index in held[first : first + _KEYS_AT_ONCE].tolist():
                        entry = slab.entry(index)
                        self._note_lost(entry, hashed_in(entry), cause)
        self._index.drop_slabs({slab.number for slab in dropped}, self._lock)
        return dropped

    def lose(self, slab: Slab, error: OSError) -> None:
        """Drop a slab whose table failed."""
        self.quarantined.add(slab.file.name)  # before the drop, so that no poll opens it again
        if self.drop([slab], "corrupt"):
            _log.warning("kvoffload no longer uses the slab %s at %s: %s", slab.file.name, self._root, reason_of(error))

    def take_changes(self) -> list[tuple[Slab, list[int]]]:
        """Return our slabs with changes that are not announced to neighbours, pinned, and the changed pages."""
        changed = list[tuple[Slab, set[int]]]()
        with self._lock:
            for slab in self.open.values():
                if slab.changed_pages:
                    changed.append((slab, slab.changed_pages))
                    slab.users += 1
                    slab.changed_pages = set()
        return [(slab, list(pages)) for slab, pages in changed]

    def pin_used(self, slabs: Iterable[Slab]) -> list[Slab]:
        """Return the ``slabs`` with times of use to write down, pinned."""
        with self._lock:
            used = [slab for slab in slabs if not slab.is_dropped and (slab.is_own or slab.uses)]
            for slab in used:
                slab.users += 1
            return used

    def merge_uses(self, slab: Slab, on_disk: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Merge the times of use in a table with ours, and return the times that it should contain.

        Ignores times in the future, because the clock was wrong or the table is damaged. Such times would protect their
        blocks until then.
        """
        with self._lock:
            now_s = self._stamps(1).start // NS
            used, slab.uses = slab.uses, {}
        uses = np.where(on_disk <= now_s, on_disk, 0).astype(np.uint32)
        if used:
            at = list(used)
            uses[at] = np.maximum(uses[at], np.minimum(list(used.values()), 0xFFFF_FFFF))
        for first in range(0, len(uses), _SLOTS_AT_ONCE):
            theirs = uses[first : first + _SLOTS_AT_ONCE]
            with self._lock:
                if slab.is_dropped or slab.used_ns is None:
                    break
                ours = slab.used_ns[first : first + _SLOTS_AT_ONCE]
                held = is_held(ours)
                later = held & (theirs.astype(np.int64) * NS > ours)
                ours[later] = theirs[later].astype(np.int64) * NS
                theirs[held] = np.minimum(ours[held] // NS, 0xFFFF_FFFF)
        return uses

    def note_limit(self, error: OSError) -> None:
        """Log once that no more slabs can be opened for now."""
        with self._lock:
            is_said, self._is_limit_said = self._is_limit_said, True
        if not is_said:
            text = "The store at %s uses the %d slabs that are open and no more: %s."
            _log.warning(text, self._root, len(self.open), error.strerror)

    def close(self) -> None:
        """Close all slabs. Their blocks are not lost: the next start finds them."""
        with self._lock:
            self._is_closed = True
            for slab in self.open.values():
                slab.is_dropped = True
                if not slab.users:
                    self._unused.append(slab.file)
            self.open.clear()
            self.by_name.clear()
            self._index.clear()
            self._allocator = Allocator()
        self._close_unused()

    def check_invariants(self) -> None:
        """Recompute the state from the tables, and compare it."""
        with self._lock:
            num_found = 0
            for number, slab in self.open.items():
                assert self.by_name[slab.file.name] is slab
                assert not slab.is_dropped
                assert slab.users == 0
                table = slab.view()
                for index in np.flatnonzero(table["length"]).tolist():
                    num_found += 1
                    assert number * SLAB_STRIDE + index in self._slots_of(slab.entry(index)), "not in the index"
                if slab.used_ns is not None:
                    assert ((table["length"] != 0) == is_held(slab.used_ns)).all(), "a slot and its entry disagree"
            assert num_found == len(self._index)
            self._allocator.check_invariants()

    # ------------------------------------------------------------------------------------------- with the lock held

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def _stamps(self, count: int) -> range:
        first = max(self._last_stamp_ns + 1, time.time_ns())
        self._last_stamp_ns = first + count - 1
        return range(first, first + count)

    def _use(self, slots: Sequence[int]) -> range:
        """Record uses of ``slots``; -1 is not a slot."""
        stamps_ns = self._stamps(len(slots))
        for slot, stamp_ns in zip(slots, stamps_ns, strict=True):
            if slot >= 0:
                slab = self.open[slot // SLAB_STRIDE]
                if slab.used_ns is not None:
                    slab.used_ns[slot % SLAB_STRIDE] = stamp_ns
                else:
                    slab.uses[slot % SLAB_STRIDE] = stamp_ns // NS
        return stamps_ns

    def _busy(self, runs: Iterable[Run]) -> list[BusyRun]:
        busy = [BusyRun(self.open[run.slab], run) for run in runs]
        for run in busy:
            run.slab.users += 1
        return busy

    def _unpin(self, slab: Slab) -> None:
        slab.users -= 1
        if slab.is_dropped and not slab.users:
            self._unused.append(slab.file)

    def _record(self, new: NewRun) -> None:
        slab, start, first = new.slab, new.slots.start, new.slots.first
        for part in new.good:
            begin, end = part.start, part.stop
            slab.entries[(first + begin) * ENTRY_BYTES : (first + end) * ENTRY_BYTES] = new.entries[
                begin * ENTRY_BYTES : end * ENTRY_BYTES
            ]
            self._change(slab, first + begin, part.count)
            for at in range(begin, end):
                block = new.blocks[at]
                self._index.add(block.key.hash64 & 0xFFFF_FFFF, start + at)
                self._allocator.use(start + at, block.stamp_ns)
                if block.long_key is not None:
                    self._long_keys[block.key.probe] = block.long_key
                block.is_written = True
        if len(new.good) == 1 and new.good[0].count == new.slots.count:
            return
        left = {at for at, block in enumerate(new.blocks) if not block.is_written}
        if new.bad and self._may_leave_out(slab, len(new.bad), any_good=bool(new.good)):
            left.difference_update(new.bad)
        for part in runs_of(sorted(left)):
            self._allocator.release(Run(start + part.start, part.count))

    def _change(self, slab: Slab, first: int, count: int) -> None:
        slab.changed_pages.update(range(first // PAGE_SLOTS, (first + count - 1) // PAGE_SLOTS + 1))

    def _remove(self, slab: Slab, index: int, cause: LossCause | None) -> None:
        """Remove a block from the index and its slot. Records it as lost for ``cause``, if a cause is given."""
        entry, offset = slab.entry(index), index * ENTRY_BYTES
        hashed = hashed_in(entry)
        self._index.remove(hashed.hash64, slab.number * SLAB_STRIDE + index)
        slab.entries[offset : offset + ENTRY_BYTES] = EMPTY_ENTRY
        if slab.used_ns is not None:
            slab.used_ns[index] = BUSY
        self._note_lost(entry, hashed, cause)

    def _note_lost(self, entry: bytearray, hashed: HashedKey, cause: LossCause | None) -> None:
        """Record a block that is gone from its slot as lost, unless another slot also contains it."""
        if self._index.find(hashed) < 0:
            key = key_in(entry) or self._long_keys.pop(hashed.probe, None)
            if key is not None and cause is not None and len(self._lost) < _MAX_LOST:
                self._lost.append((key, cause))

    def _slots_of(self, entry: bytes | bytearray) -> set[int]:
        return set(self._index.find_all(hashed_in(entry)))

    def _may_leave_out(self, slab: Slab, count: int, *, any_good: bool) -> bool:
        """Return whether slots that the disk cannot read or write may be put out of use. If they are too many, the
        slots are not the cause."""
        if not any_good or slab.num_bad + count > max(1, slab.file.num_slots // 64):
            return False
        slab.num_bad += count
        return True

    def _apply(self, slab: Slab, index: int, entry: bytes | bytearray) -> None:
        before, slot = slab.entry(index), slab.number * SLAB_STRIDE + index
        hashed_before = hashed_in(before)
        is_gone = before[LENGTH_AT] and self._index.remove(hashed_before.hash64, slot)
        slab.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES] = entry
        if entry[LENGTH_AT]:
            self._index.add(hashed_in(entry).hash64, slot)
        if is_gone:
            self._note_lost(before, hashed_before, "evicted")  # only its owner knows other causes

    def _drop(self, slab: Slab) -> object:
        """Remove a slab from the state. Its entries no longer change. Returns objects to free without the lock."""
        freed = self._allocator.drop_slab(slab.number)
        slab.is_dropped = True
        self._index.tables[slab.number] = bytearray()
        del self.open[slab.number]
        del self.by_name[slab.file.name]
        if not slab.users:
            self._unused.append(slab.file)
        return freed

    def _next_number(self) -> int:
        for _ in range(_LAST_SLAB):
            self._last_number = self._last_number % _LAST_SLAB + 1
            if self._last_number not in self._index.tables:
                return self._last_number
        raise OSError(errno.EMFILE, "too many slabs", self._root)

    # ------------------------------------------------------------------------------------------------------ without

    def _close_unused(self) -> None:
        while self._unused:
            with suppress(IndexError):  # another thread has closed the last one
                self._unused.popleft().close()

    def _times_of(self, table: npt.NDArray[np.void], uses: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Return the time of use of each slot of a slab, for the allocator."""
        with self._lock:
            now_s = self._stamps(1).start // NS
        # Not in the future, because a damaged entry would then stay forever.
        used_s = np.clip(np.maximum(table["written_s"], uses).astype(np.int64), 1, now_s - 1)
        # Blocks of a run with the same second count as a prefix, whose tail was used before its head.
        times: npt.NDArray[np.int64] = np.where(table["length"], used_s * NS + np.arange(len(used_s))[::-1], 0)
        return times

    def _own(self, slab: Slab) -> None:
        """Give the slots of one of our slabs to the allocator, with all blocks in the index."""
        used_ns = slab.used_ns
        if used_ns is None:
            return
        free = free_runs(slab.number, used_ns)
        with self._lock:
            if slab.is_dropped or slab.used_ns is not used_ns:
                return
            self._allocator.add_slab(slab.number, used_ns)
        for first in range(0, len(free), _KEYS_AT_ONCE):
            with self._lock:
                self._allocator.add_free(used_ns, free[first : first + _KEYS_AT_ONCE])
        with self._lock:
            for run in slab.early:
                self._allocator.release(run)
            slab.early.clear()

    def _keys_in(self, slab: Slab, indexes: Sequence[int]) -> list[OffloadKey]:
        keys = list[OffloadKey]()
        with self._lock:
            if slab.is_dropped:
                return keys
            for index in indexes:
                entry = slab.entry(index)
                key = key_in(entry) or self._long_keys.get(bytes(entry[PROBE_AT:]))
                # If several slots contain one block, the one that is found counts.
                if key is not None and self._index.find(hashed_in(entry)) == slab.number * SLAB_STRIDE + index:
                    keys.append(key)
        return keys
