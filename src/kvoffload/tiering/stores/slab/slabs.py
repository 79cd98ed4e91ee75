# SPDX-License-Identifier: Apache-2.0
"""The slabs that a store has open: where each block is, which slots are free, and what is gone."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.base import LossCause
from kvoffload.tiering.stores.slab.allocator import SLAB_STRIDE, Allocator, Run
from kvoffload.tiering.stores.slab.file import SlabFile
from kvoffload.tiering.stores.slab.format import (
    EMPTY_ENTRY,
    ENTRY,
    ENTRY_BYTES,
    PAGE_SLOTS,
    PROBE_AT,
    HashedKey,
    key_in,
)
from kvoffload.tiering.stores.slab.index import SlotIndex

__all__ = ["NS", "Slab", "Slabs", "hash_in"]

_log = logging.getLogger(__name__)

NS = 1_000_000_000
_MAX_LOST = 1 << 18
_KEYS_AT_ONCE = 1024
_LAST_SLAB = (1 << 12) - 1


@dataclass(slots=True, eq=False)
class Slab:
    """A slab that is open. A slot is in the index if its entry here is not empty.

    All but ``file`` belongs to the holder of the store's lock.
    """

    number: int
    file: SlabFile
    entries: bytearray
    changes: npt.NDArray[np.uint32]
    """Of our slab: as last written. Of a neighbour's: as last seen."""
    used_ns: npt.NDArray[np.int64] | None = None
    """Times of use, shared with the allocator. ``None``: a neighbour's slab."""
    changed_pages: set[int] = field(default_factory=set)
    """Of our slab: pages with changes that neighbours do not know of yet."""
    uses: dict[int, int] = field(default_factory=dict)
    """Of a neighbour's slab: slots that we have used, and when (seconds)."""
    given_until_s: float = 0.0
    """Of a slab that we gave away: until when it is others' to take."""
    num_bad: int = 0
    """Slots that are out of use because the disk failed to read or write them."""
    users: int = 0
    """Calls that do I/O on ``file`` just now. It is closed by the last of them."""
    is_dropped: bool = False

    @property
    def is_own(self) -> bool:
        return self.used_ns is not None

    def entry(self, index: int) -> bytearray:
        return self.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]

    def view(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self.entries, ENTRY)


class Slabs:
    """The state of a store under ``root``. ``lock`` guards all of it, and is never held during I/O.

    A slab stays open while a call does I/O on it, between ``pin`` and ``unpin``: a descriptor must not be closed, and
    its number given to another file, under a running write.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self.lock = threading.Lock()
        self.index = SlotIndex()
        self.allocator = Allocator()
        self.open: dict[int, Slab] = {}
        """By number."""
        self.by_name: dict[str, Slab] = {}
        self.quarantined: set[str] = set()
        """Names of slabs that are not ours, or failed."""
        self.long_keys: dict[bytes, OffloadKey] = {}
        """By what entries have of them: the keys that are too long for an entry, of blocks that this process wrote.
        Others can be found and read, but not named."""
        self.num_evicted = 0
        self.num_corrupt = 0
        self._last_number = 0
        self._last_stamp_ns = 0
        self._lost: dict[OffloadKey, LossCause] = {}
        self._is_closed = False
        self._is_limit_said = False

    # ------------------------------------------------------------------------------------------ with the lock held

    def stamps(self, count: int) -> range:
        """Times for ``count`` uses now, each later than all before."""
        first = max(self._last_stamp_ns + 1, time.time_ns())
        self._last_stamp_ns = first + count - 1
        return range(first, first + count)

    def use(self, slots: Sequence[int], stamps_ns: range) -> None:
        """Records uses of those slots that are one (not -1)."""
        for slot, stamp_ns in zip(slots, stamps_ns, strict=True):
            if slot < 0:
                continue
            slab = self.open[slot // SLAB_STRIDE]
            if slab.used_ns is not None:
                slab.used_ns[slot % SLAB_STRIDE] = stamp_ns
            else:
                slab.uses[slot % SLAB_STRIDE] = stamp_ns // NS

    def take(self, count: int) -> tuple[list[Run], dict[int, Slab]]:
        """Free slots, at most ``count``, and their slabs, which are pinned."""
        runs = self.allocator.take(count) if count else []
        return runs, self.pin([run.slab for run in runs])

    def pin(self, numbers: Iterable[int]) -> dict[int, Slab]:
        """The slabs of a call that is about to do I/O. They stay open until ``unpin``."""
        slabs: dict[int, Slab] = {}
        for number in numbers:
            if number not in slabs:
                slab = slabs[number] = self.open[number]
                slab.users += 1
        return slabs

    def unpin_locked(self, slabs: dict[int, Slab]) -> None:
        """``unpin`` with the lock held."""
        for slab in slabs.values():
            slab.users -= 1
            if slab.is_dropped and not slab.users:
                slab.file.close()

    def forget(self, slot: int) -> None:
        """Takes a block out of the index. A slot of ours is busy then. A neighbour's block may come back when its page
        changes."""
        slab, index = self.open[slot // SLAB_STRIDE], slot % SLAB_STRIDE
        entry = slab.entry(index)
        self.index.remove(hash_in(entry), slot)
        self.long_keys.pop(bytes(entry[PROBE_AT:]), None)
        slab.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES] = EMPTY_ENTRY
        if slab.is_own:
            self.allocator.hold(Run(slot, 1))

    def evict(self, run: Run) -> None:
        """The same for busy slots of ours whose blocks give way to others."""
        slab = self.open[run.slab]
        begin, end = run.first * ENTRY_BYTES, (run.first + run.count) * ENTRY_BYTES
        entries = bytes(slab.entries[begin:end])
        slab.entries[begin:end] = EMPTY_ENTRY * run.count
        for slot, at in enumerate(range(0, len(entries), ENTRY_BYTES), run.start):
            entry = entries[at : at + ENTRY_BYTES]
            hashed = _hashed_in(entry)
            self.index.remove(hashed.hash64, slot)
            self._note_lost(entry, hashed, "evicted")
        self.num_evicted += run.count

    def note_lost(self, entry: bytes, cause: LossCause) -> None:
        """A block is gone from its slot, and lost unless it is in another slot too."""
        self._note_lost(entry, _hashed_in(entry), cause)

    def _note_lost(self, entry: bytes, hashed: HashedKey, cause: LossCause) -> None:
        has_room = len(self._lost) < _MAX_LOST
        if not (has_room or self.long_keys) or self.index.find(hashed) >= 0:
            return
        key = key_in(entry) or self.long_keys.pop(hashed.probe, None)
        if key is not None and has_room:
            self._lost[key] = cause

    def may_leave_out(self, slab: Slab, count: int, *, any_good: bool) -> bool:
        """Whether slots that the disk cannot read or write are left out of use. Not if there are many: then it is not
        the slots that are bad."""
        if not any_good or slab.num_bad + count > max(1, slab.file.num_slots // 64):
            return False
        slab.num_bad += count
        return True

    def own(self, slab: Slab, uses: npt.NDArray[np.uint32]) -> None:
        """Gives a slab's slots to the allocator. With the lock held."""
        table = slab.view()
        is_held = table["length"] != 0
        # Not in the future: a damaged entry would stay for ever.
        latest_s = np.maximum(table["written_s"], uses).astype(np.int64)
        used_s = np.clip(latest_s, 1, self.stamps(1).start // NS - 1)
        # Within a second, blocks of a run are taken for a prefix: its tail was used before its head.
        slab.used_ns = np.where(is_held, used_s * NS + np.arange(len(used_s))[::-1], 0)
        self.allocator.add_slab(slab.number, slab.used_ns)

    def merge_uses(self, slab: Slab, on_disk: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Takes in the times of use that a table has, and returns what it should have.

        Times in the future are none: the clock was wrong, or the table is damaged. They would keep their blocks until
        then.
        """
        now_s = self.stamps(1).start // NS
        uses = np.where(on_disk <= now_s, on_disk, 0).astype(np.uint32)
        if slab.used_ns is not None:
            is_held = self.allocator.is_held(slab.number)
            later = is_held & (uses.astype(np.int64) * NS > slab.used_ns)
            slab.used_ns[later] = uses[later].astype(np.int64) * NS
            uses[is_held] = np.minimum(slab.used_ns[is_held] // NS, 0xFFFF_FFFF)
        elif slab.uses:
            at = list(slab.uses)
            uses[at] = np.maximum(uses[at], np.array(list(slab.uses.values()), np.uint32))
            slab.uses.clear()
        return uses

    def _next_number(self) -> int:
        if len(self.index.tables) >= _LAST_SLAB:
            self.index.purge()
        for _ in range(_LAST_SLAB):
            self._last_number = self._last_number % _LAST_SLAB + 1
            if self._last_number not in self.index.tables:
                return self._last_number
        raise OSError(errno.EMFILE, "too many slabs", self._root)

    # --------------------------------------------------------------------------------------- without, as they take it

    def register(self, file: SlabFile, is_own: bool) -> None:
        """Takes over ``file``. Raises ``OSError`` if the table cannot be read."""
        try:
            changes = file.read_changes().copy()  # before the entries: a later change is seen again
            entries = file.read_entries(0, file.num_slots)
            uses = file.read_uses() if is_own else None
        except OSError:
            file.close()
            raise
        with self.lock:
            try:
                if self._is_closed:
                    raise OSError(errno.ESHUTDOWN, "the store is closed", self._root)
                number = self._next_number()
            except OSError:
                file.close()
                raise
            slab = Slab(number, file, entries, changes)
            self.open[number] = slab
            self.by_name[file.name] = slab
            self.index.tables[number] = entries
            table = slab.view()
            held = np.flatnonzero(table["length"])
            self.index.add_many(table["hash"][held], held + number * SLAB_STRIDE)
            if uses is not None:
                self.own(slab, uses)

    def apply(self, slab: Slab, first: int, entries: bytes | bytearray) -> None:
        """A neighbour's entries from slot ``first`` on are ``entries`` now."""
        with self.lock:
            if slab.is_dropped:
                return
            offset = first * ENTRY_BYTES
            old = np.frombuffer(bytes(slab.entries[offset : offset + len(entries)]), np.uint64).reshape(-1, 8)
            new = np.frombuffer(bytes(entries), np.uint64).reshape(-1, 8)
            for index in np.flatnonzero((old != new).any(axis=1)).tolist():
                slot = slab.number * SLAB_STRIDE + first + index
                before = bytes(slab.entry(first + index))
                after = entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]
                is_gone = before[24] and self.index.remove(hash_in(before), slot)
                slab.entries[(first + index) * ENTRY_BYTES : (first + index + 1) * ENTRY_BYTES] = after
                if after[24]:
                    self.index.add(hash_in(after), slot)
                if is_gone:
                    self.note_lost(before, "evicted")  # what else it may be, only its owner knows

    def drop(self, slabs: Iterable[Slab], cause: LossCause) -> list[Slab]:
        """Stops using slabs, whose blocks are lost for ``cause``. Returns those that were still in use."""
        with self.lock:
            dropped = [slab for slab in slabs if not slab.is_dropped]
            self._drop(dropped)
        for slab in dropped:
            held = np.flatnonzero(slab.view()["length"]).tolist()
            for first in range(0, len(held), _KEYS_AT_ONCE):
                with self.lock:
                    for index in held[first : first + _KEYS_AT_ONCE]:
                        self.note_lost(bytes(slab.entry(index)), cause)
        return dropped

    def _drop(self, slabs: Sequence[Slab]) -> None:
        """With the lock held. The entries of a dropped slab do not change any more."""
        self.allocator.drop_slabs([slab.number for slab in slabs])
        for slab in slabs:
            slab.is_dropped = True
            self.index.drop_slab(slab.number)
            del self.open[slab.number]
            del self.by_name[slab.file.name]
            if not slab.users:
                slab.file.close()

    def unpin(self, slabs: dict[int, Slab]) -> None:
        with self.lock:
            self.unpin_locked(slabs)

    def lose(self, slab: Slab, error: OSError) -> None:
        """A table failed: its slab is not used any more."""
        self.quarantined.add(slab.file.name)  # before it is dropped, so that no poll opens it again
        if self.drop([slab], "corrupt"):
            _log.warning("The slab %s at %s is not used any more: %s", slab.file.name, self._root, error)

    def note_limit(self, error: OSError) -> None:
        """No more slabs can be open for now. Says so once."""
        with self.lock:
            is_said, self._is_limit_said = self._is_limit_said, True
        if not is_said:
            _log.warning(
                "The store at %s uses the %d slabs that are open and no more: %s.",
                self._root,
                len(self.open),
                error.strerror,
            )

    def clear(self, slabs: dict[int, Slab], runs: Sequence[Run]) -> None:
        """Empties the entries of busy slots on the disk, and makes the slots free. In this order: a slot may be
        written only after its old entry is gone, or a crash or a neighbour would take the new bytes for the old
        block's."""
        for run in runs:
            slab = slabs[run.slab]
            try:
                slab.file.write_entries(run.first, EMPTY_ENTRY * run.count)
            except OSError as exc:
                self.lose(slab, exc)
        with self.lock:
            for run in runs:
                slab = slabs[run.slab]
                if slab.is_own and not slab.is_dropped:
                    self.allocator.release(run)
                    slab.changed_pages.update(
                        range(run.first // PAGE_SLOTS, (run.first + run.count - 1) // PAGE_SLOTS + 1)
                    )

    def keys(self) -> Iterator[Sequence[OffloadKey]]:
        """The keys that are known by now, in batches."""
        with self.lock:
            numbers = list(self.open)
        for number in numbers:
            first = 0
            while True:
                keys = list[OffloadKey]()
                with self.lock:
                    slab = self.open.get(number)
                    if slab is None or first >= slab.file.num_slots:
                        break
                    for index in range(first, min(first + _KEYS_AT_ONCE, slab.file.num_slots)):
                        entry = slab.entry(index)
                        key = key_in(entry) or self.long_keys.get(bytes(entry[PROBE_AT:]))
                        # Of several slots with one block, the one that is found counts.
                        if key is not None and self.index.find(_hashed_in(entry)) == number * SLAB_STRIDE + index:
                            keys.append(key)
                first += _KEYS_AT_ONCE
                if keys:
                    yield keys

    def close(self) -> None:
        """Closes all slabs. Their blocks are not gone: they are there at the next start."""
        with self.lock:
            self._is_closed = True
            for slab in self.open.values():
                slab.is_dropped = True
                if not slab.users:
                    slab.file.close()
            self.open.clear()
            self.by_name.clear()
            self.index.clear()
            self.allocator = Allocator()

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        if not self._lost:
            return {}
        with self.lock:
            lost, self._lost = self._lost, {}
            return lost

    def check_invariants(self) -> None:
        """Recomputes the state from the tables."""
        with self.lock:
            num_found = 0
            for number, slab in self.open.items():
                assert self.by_name[slab.file.name] is slab
                assert not slab.is_dropped
                assert slab.users == 0
                table = slab.view()
                for index in np.flatnonzero(table["length"]).tolist():
                    num_found += 1
                    found = set(self.index.find_all(_hashed_in(slab.entry(index))))
                    assert number * SLAB_STRIDE + index in found, "a block is not in the index"
                if slab.used_ns is not None:
                    is_held = self.allocator.is_held(number)
                    assert ((table["length"] != 0) == is_held).all(), "a slot and its entry disagree"
            assert num_found == len(self.index)
            self.allocator.check_invariants()


def hash_in(entry: bytes | bytearray) -> int:
    return int.from_bytes(entry[PROBE_AT : PROBE_AT + 4], "little")


def _hashed_in(entry: bytes | bytearray) -> HashedKey:
    """As much of the key's hash as an entry has, which is as much as the index asks for."""
    return HashedKey(hash_in(entry), bytes(entry[PROBE_AT:]))
