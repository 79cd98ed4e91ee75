# SPDX-License-Identifier: Apache-2.0
"""The state of a store: its open slabs, where each block is, which slots are free, and which blocks are gone."""

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
"""Keys, cells and times of use that are dealt with before others may have the lock."""
_EVICTED_AT_ONCE = 16
_LAST_SLAB = (1 << 12) - 1


class Slabs:
    """The state of a store under ``root``. Any number of threads. One lock guards the state; it is never held during
    I/O.

    A slab stays open while a call does I/O on it: a descriptor must not be closed, and its number given to another
    file, under a running write. ``find``, ``take`` and all that return runs pin the slabs of a call; ``unpin``,
    ``record`` and ``release`` let them go.
    """

    def __init__(self, root: str, layout: SlabFormat) -> None:
        self._root = root
        self._layout = layout
        self._lock = threading.Lock()
        self._planning = threading.Lock()
        """Held by whoever evicts. It is taken before the other one."""
        self._index = SlotIndex()
        self._allocator = Allocator()
        self.resident = ResidentKeys(self._index, self._lock, layout.hashed, self.keys)
        self.open: dict[int, Slab] = {}
        """By number. For others to read."""
        self.by_name: dict[str, Slab] = {}
        self.quarantined: set[str] = set()
        """Names of slabs that are not to be trusted: of another format, or that failed. They give way when room is
        needed."""
        self._long_keys: dict[bytes, OffloadKey] = {}
        """By what entries have of them: the keys that are too long for an entry, of blocks that this process wrote.
        Others can be found and read, but not named."""
        self.num_evicted = 0
        self.num_corrupt = 0
        self._last_number = 0
        self._last_stamp_ns = 0
        self._lost: deque[tuple[OffloadKey, LossCause]] = deque()
        """Not a dictionary or a list, which stop everybody whenever they grow."""
        self._unused: deque[SlabFile] = deque()
        """Files of dropped slabs that no call uses any more. They are closed without the lock: to unmap a file, or to
        end one that is unlinked, takes long."""
        self._is_closed = False
        self._is_limit_said = False

    def __len__(self) -> int:
        """Blocks."""
        return len(self._index)

    @property
    def num_slots(self) -> int:
        """Of our slabs."""
        return self._allocator.num_slots

    @property
    def num_free(self) -> int:
        """Slots of our slabs that a write may take."""
        return self._allocator.free.num_slots

    # --------------------------------------------------------------------------------------------- blocks of a call

    def contains(self, keys: Sequence[HashedKey]) -> list[bool]:
        answers = list[bool]()
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            with self._lock:
                answers += [self._index.find(key) >= 0 for key in keys[first : first + _KEYS_AT_ONCE]]
        return answers

    def touch(self, keys: Sequence[HashedKey]) -> None:
        """Records a use of each block that is here, in this order."""
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            self.use(keys[first : first + _KEYS_AT_ONCE])

    def use(self, keys: Sequence[HashedKey]) -> tuple[list[bool], range]:
        """As ``touch`` for the blocks of a batch. Returns which are here, and the time of each use (nanoseconds), later
        than all before."""
        with self._lock:
            slots = [self._index.find(key) for key in keys]
            return [slot >= 0 for slot in slots], self._use(slots)

    def find(self, keys: Sequence[HashedKey], asked: Sequence[int]) -> tuple[list[FoundBlock], dict[int, Slab]]:
        """Records a use of each of the blocks ``asked`` that is here. Returns these, sorted, and their slabs by number,
        pinned."""
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
        """Takes free slots for the ``blocks``, or for the first of them if there are too few."""
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
        """Adds the blocks that were written. The other slots of the runs are free again, or left out of use."""
        with self._lock:
            for run in runs:
                if not run.slab.is_dropped:
                    self._record(run)
                self._unpin(run.slab)
        self._close_unused()

    def discard(self, keys: Sequence[HashedKey]) -> list[BusyRun]:
        """Forgets blocks. Returns slots of ours that are to be emptied. A neighbour's block may come back when its page
        changes."""
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
        """Evicts at least ``count`` blocks, if that many were used by ``before_ns`` for the last time. Returns their
        slots, which are to be emptied. Others wait for a few blocks at a time, and for no plan, but for those who evict
        too."""
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
        """Removes a corrupt block, unless its entry has changed meanwhile. Returns its slot if that is to be emptied.
        A neighbour's is not. One of ours that ``is_unreadable`` may be left out of use instead."""
        slot = slab.number * SLAB_STRIDE + index
        with self._lock:
            if slab.is_dropped or slab.entry(index) != entry or slot not in self._slots_of(entry):
                return []
            self._remove(slab, index, "corrupt")
            self.num_corrupt += 1
            if not slab.is_own:
                return []  # its own process will find out; here it is gone until its page changes
            if is_unreadable and self._may_leave_out(slab, 1, any_good=True):
                return []
            return self._busy([Run(slot, 1)])

    def release(self, runs: Sequence[BusyRun]) -> None:
        """Slots whose entries are empty on the disk are free."""
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
        """The keys that are known by now, in batches."""
        for slab in self.snapshot():
            lengths = slab.view()["length"]
            for start in range(0, len(lengths), _SLOTS_AT_ONCE):  # of which most may be empty
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
        """The slabs that are open now."""
        with self._lock:
            return list(self.open.values())

    def own_by_age(self) -> list[Slab]:
        """Our slabs, the one whose last use is the oldest first."""
        ages = list[tuple[int, Slab]]()
        for slab in self.snapshot():
            if (used_ns := slab.used_ns) is not None:  # which others change meanwhile
                ages.append((last_use(used_ns), slab))
        return [slab for _, slab in sorted(ages, key=lambda one: one[0])]

    def expect(self, slabs_bytes: Iterable[int]) -> None:
        """Slabs of these sizes are to be registered: makes room for their blocks in the index. To grow with each of
        them would move all cells again and again, with the lock held."""
        self._index.make_room(sum(map(self._layout.slots_in, slabs_bytes)), self._lock)

    def register(self, file: SlabFile, is_own: bool) -> None:
        """Takes over ``file``, a few blocks at a time. Raises ``OSError`` if the table cannot be read."""
        try:
            changes = file.read_changes()  # before the entries: a later change is seen again
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
        except BaseException:  # such as too little memory: nobody else would close it, and it is locked
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
        """A neighbour's entries from slot ``first`` on are ``entries`` now. For the thread that adopts slabs."""
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
        """Takes over a neighbour's new ``entry``, if ours is still the one ``before``. If not, the store's thread has
        read a later one."""
        self._index.make_room(1, self._lock)
        with self._lock:
            if not slab.is_dropped and not slab.is_own and slab.entry(index) == before:
                self._apply(slab, index, entry)

    def adopt(self, slab: Slab, entries: bytes | bytearray, uses: npt.NDArray[np.uint32]) -> None:
        """A neighbour's slab, with these ``entries``, is ours."""
        self.apply(slab, 0, entries)
        table = slab.view()
        used_ns = self._times_of(table, uses)
        with self._lock:
            slab.used_ns = used_ns
            slab.uses.clear()
        for first in range(0, len(table), _SLOTS_AT_ONCE):
            part = slice(first, first + _SLOTS_AT_ONCE)
            with self._lock:  # what was removed while its time was looked up
                used_ns[part][(table["length"][part] == 0) & is_held(used_ns[part])] = BUSY
        self._own(slab)

    def give(self, slab: Slab) -> bool:
        """One of our slabs is a neighbour's from now on. ``False`` if a call uses it just now."""
        with self._lock:
            if slab.users or slab.is_dropped:
                return False
            freed = self._allocator.drop_slab(slab.number)
            slab.used_ns = None
            slab.changed_pages = set()  # to count them later would overwrite what its next owner counts
        del freed
        return True

    def drop(self, slabs: Iterable[Slab], cause: LossCause) -> list[Slab]:
        """Stops using slabs, whose blocks are lost for ``cause``. Returns those that were still in use."""
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
                    break  # nobody would hear of the others
                with self._lock:
                    for index in held[first : first + _KEYS_AT_ONCE].tolist():
                        entry = slab.entry(index)
                        self._note_lost(entry, hashed_in(entry), cause)
        return dropped

    def lose(self, slab: Slab, error: OSError) -> None:
        """A table failed: its slab is not used any more."""
        self.quarantined.add(slab.file.name)  # before it is dropped, so that no poll opens it again
        if self.drop([slab], "corrupt"):
            _log.warning("The slab %s at %s is not used any more: %s", slab.file.name, self._root, error)

    def take_changes(self) -> list[tuple[Slab, list[int]]]:
        """Our slabs with changes that neighbours do not know of, pinned, and the pages that have them."""
        changed = list[tuple[Slab, set[int]]]()
        with self._lock:
            for slab in self.open.values():
                if slab.changed_pages:
                    changed.append((slab, slab.changed_pages))
                    slab.users += 1
                    slab.changed_pages = set()
        return [(slab, list(pages)) for slab, pages in changed]

    def pin_used(self, slabs: Iterable[Slab]) -> list[Slab]:
        """Those of the ``slabs`` with times of use to write down, pinned."""
        with self._lock:
            used = [slab for slab in slabs if not slab.is_dropped and (slab.is_own or slab.uses)]
            for slab in used:
                slab.users += 1
            return used

    def merge_uses(self, slab: Slab, on_disk: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Takes in the times of use that a table has, and returns those that it should have.

        Times in the future do not count: the clock was wrong, or the table is damaged. They would keep their blocks
        until then.
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
        """No more slabs can be open for now. Says so once."""
        with self._lock:
            is_said, self._is_limit_said = self._is_limit_said, True
        if not is_said:
            text = "The store at %s uses the %d slabs that are open and no more: %s."
            _log.warning(text, self._root, len(self.open), error.strerror)

    def close(self) -> None:
        """Closes all slabs. Their blocks are not gone: they are there at the next start."""
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
        """Recomputes the state from the tables."""
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
        """Records uses of ``slots``; -1 is not a slot."""
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
        """Takes a block out of the index and its slot. It is lost for ``cause``, if there is one."""
        entry, offset = slab.entry(index), index * ENTRY_BYTES
        hashed = hashed_in(entry)
        self._index.remove(hashed.hash64, slab.number * SLAB_STRIDE + index)
        slab.entries[offset : offset + ENTRY_BYTES] = EMPTY_ENTRY
        if slab.used_ns is not None:
            slab.used_ns[index] = BUSY
        self._note_lost(entry, hashed, cause)

    def _note_lost(self, entry: bytearray, hashed: HashedKey, cause: LossCause | None) -> None:
        """A block is gone from its slot, and lost unless another slot has it too."""
        if self._index.find(hashed) < 0:
            key = key_in(entry) or self._long_keys.pop(hashed.probe, None)
            if key is not None and cause is not None and len(self._lost) < _MAX_LOST:
                self._lost.append((key, cause))

    def _slots_of(self, entry: bytes | bytearray) -> set[int]:
        return set(self._index.find_all(hashed_in(entry)))

    def _may_leave_out(self, slab: Slab, count: int, *, any_good: bool) -> bool:
        """Whether slots that the disk cannot read or write are left out of use. If there are many, the slots are not
        what is bad."""
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
            self._note_lost(before, hashed_before, "evicted")  # what else it may be, only its owner knows

    def _drop(self, slab: Slab) -> object:
        """The entries of a dropped slab do not change any more. Returns what is to be freed without the lock."""
        freed = self._allocator.drop_slab(slab.number)
        slab.is_dropped = True
        self._index.drop_slab(slab.number)
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
            with suppress(IndexError):  # another thread closes the last one
                self._unused.popleft().close()

    def _times_of(self, table: npt.NDArray[np.void], uses: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """When each slot of a slab was used, for the allocator."""
        with self._lock:
            now_s = self._stamps(1).start // NS
        # Not in the future: a damaged entry would stay for ever.
        used_s = np.clip(np.maximum(table["written_s"], uses).astype(np.int64), 1, now_s - 1)
        # Within a second, blocks of a run are taken for a prefix: its tail was used before its head.
        times: npt.NDArray[np.int64] = np.where(table["length"], used_s * NS + np.arange(len(used_s))[::-1], 0)
        return times

    def _own(self, slab: Slab) -> None:
        """Gives the slots of one of our slabs to the allocator, with all blocks in the index."""
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
                # Of several slots with one block, the one that is found counts.
                if key is not None and self._index.find(hashed_in(entry)) == slab.number * SLAB_STRIDE + index:
                    keys.append(key)
        return keys
