# SPDX-License-Identifier: Apache-2.0
"""How a store gets its slabs and loses them: those that it finds, makes, adopts and gives away, and what it exchanges
with its neighbours. Reads and writes do not wait for any of it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from kvoffload.tiering.stores.disk.allocator import runs_of
from kvoffload.tiering.stores.disk.directory import SlabDirectory, SlabSeen
from kvoffload.tiering.stores.disk.file import TOO_MANY_FILES, SlabRefused
from kvoffload.tiering.stores.disk.format import PAGE_SLOTS, SlabFormat
from kvoffload.tiering.stores.disk.sharing import Bulletin, PostedRequest, requests_of_others
from kvoffload.tiering.stores.disk.slabs import Slab, Slabs

__all__ = ["Growth", "Upkeep"]

_log = logging.getLogger(__name__)

_POLL_S = 0.4
"""How often neighbours learn of our new blocks, and we of theirs: both within a second."""
_USES_S = 10.0
"""How often times of use are written down, or as many slabs as ``_LOOKS_AT_ONCE`` in each poll."""
_LOOKS_AT_ONCE = 8
"""How many slabs a poll looks at of which nothing was announced: their owner may be dead."""
_GROW_S = 1.0
"""A quota or disk that had no room for a slab is not asked again for so long."""
_LOADED_AT_ONCE = 1 << 18
"""Slots whose tables are read before the constructor returns. The rest follows in the store's own thread."""
_WANT_S = 10.0
"""For so long after it found no room, a process asks others for a slab."""
_GIVEN_S = 5.0
"""A slab that was given away is left to others for so long."""


class Growth:
    """Makes slabs while the quota has room. Any thread."""

    def __init__(self, directory: SlabDirectory, slabs: Slabs) -> None:
        self._directory = directory
        self._slabs = slabs
        self._lock = threading.Lock()
        self._error: OSError | None = None
        self.not_before_s = 0.0
        self.wants_until_s = 0.0
        """Until when other processes are asked for a slab, as the quota had no room."""
        self.making = ""
        """The name of a slab that is being made."""

    def grow(self, errors: list[OSError]) -> bool:
        """Whether there are free slots now. One thread makes a slab; others wait for it, but not if it hangs."""
        if time.monotonic() < self.not_before_s:
            if self._error is not None and not self._slabs.num_slots:
                errors.append(self._error)
            return False
        if not self._lock.acquire(timeout=_GROW_S):
            self.not_before_s = time.monotonic() + _GROW_S
            return False
        try:
            if self._slabs.num_free:
                return True
            # The store's thread must not take the new slab for a neighbour's, which it sees before we have it.
            self.making = secrets.token_hex(8)
            file = self._directory.grow(self.making)
            self._error = None
            if file is not None:
                self._slabs.register(file, is_own=True)
                return True
            self.wants_until_s = time.monotonic() + _WANT_S
        except OSError as exc:
            self._error = exc
            if exc.errno in TOO_MANY_FILES:
                self._slabs.note_limit(exc)
            if not self._slabs.num_slots:
                errors.append(exc)
        finally:
            self.making = ""
            self._lock.release()
        self.not_before_s = time.monotonic() + _GROW_S
        return False


class Upkeep:
    """What a store does twice a second, in a thread of its own: publishes its changes, takes in those of other
    processes, adopts what the dead leave, and shares a quota that is used up."""

    def __init__(self, root: str, layout: SlabFormat, directory: SlabDirectory, slabs: Slabs, growth: Growth) -> None:
        self._root = root
        self._directory = directory
        self._slabs = slabs
        self._growth = growth
        self._layout = layout
        self._identity = layout.digest.hex()[:16]
        self._request = PostedRequest(root, self._identity, directory.access)
        self._answered: dict[str, tuple[int, float]] = {}
        """Whom we gave a slab: how many it had then, and until when it has time to take it."""
        self.lock = threading.Lock()
        """Held by whoever polls or closes. It may be held during I/O: calls of the store never take it."""
        self._is_closed = False
        self.is_loaded = threading.Event()
        """All slabs that were there at the start are known."""
        self._must_shrink = True
        """The quota was not seen to hold since the start."""
        self._bulletin = Bulletin(directory.access)
        self._listed: Sequence[SlabSeen] = ()
        """The slabs of the directory, when all of them were last taken in."""
        self._next_look = self._next_uses = 0
        """How many slabs were looked at, and had their uses written down, for no reason but their turn."""
        self._uses_left = 0
        self._stop = threading.Event()
        with self.lock:
            self.load(at_once=True)
        self._thread = threading.Thread(target=self._keep_up, name="kvoffload-disk-upkeep", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Publishes our changes and takes in those of other processes, also of those that died."""
        with self.lock:
            if not self._is_closed:
                self.flush_changes()
                self.poll(every_slab=True)

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.flush_uses()
            self.flush_changes()
            own = [slab.file.name for slab in self._slabs.snapshot() if slab.is_own]
            self._slabs.close()
            self._bulletin.announce(own)
            self._bulletin.close()
            self._request.withdraw()
            self._directory.close()
        self.is_loaded.set()

    def _keep_up(self) -> None:
        uses_at_s, said = time.monotonic() + _USES_S, ""
        while True:
            try:
                if not self.is_loaded.is_set():
                    with self.lock:
                        self.load(at_once=False)
                with self.lock:
                    if not self._is_closed:
                        self.flush_changes()
                        self.poll()
                        if time.monotonic() >= uses_at_s:
                            uses_at_s = time.monotonic() + _USES_S
                            self._uses_left = len(self._slabs.open)
                        self._flush_some_uses()
                said = ""
            except Exception as exc:  # noqa: BLE001 - the thread must outlive whatever a broken disk does
                if str(exc) != said:
                    said = str(exc)
                    _log.warning("The store at %s: %s", self._root, exc)
            if self._stop.wait(_POLL_S):
                return

    def load(self, *, at_once: bool) -> None:
        """Takes in the slabs that are there, the last used first. With ``at_once`` stops after a quarter million slots,
        so that a large store does not delay its engine."""
        num_slots = 0
        try:
            for seen in reversed(self._directory.slabs()):
                if self._stop.is_set():
                    return
                if not seen.is_new and self._is_unknown(seen.name):
                    if at_once and num_slots >= _LOADED_AT_ONCE:
                        return
                    if (taken := self._take_in(seen.name)) is None:
                        break
                    num_slots += taken
            self._shrink()
        except OSError as exc:
            _log.warning("The slabs at %s cannot be listed: %s", self._root, exc)
        self.is_loaded.set()

    def _is_unknown(self, name: str) -> bool:
        # In this order: a slab that is being made is registered before it is no longer being made.
        return name != self._growth.making and name not in self._slabs.by_name and name not in self._slabs.quarantined

    def _take_in(self, name: str) -> int | None:
        """Opens a slab and learns its blocks. Returns how many slots it has, ``None`` if no slab can be opened now."""
        try:
            file = self._directory.open_slab(name)
            try:
                is_own = file.try_lock()
            except OSError:
                file.close()
                raise
            if not file.is_linked(self._directory.fd):
                file.close()
                return 0
            self._slabs.register(file, is_own)
            return file.num_slots
        except FileNotFoundError:
            pass  # removed meanwhile
        except SlabRefused:
            self._slabs.quarantined.add(name)
        except OSError as exc:
            if exc.errno in TOO_MANY_FILES:
                self._slabs.note_limit(exc)
                return None
            _log.warning("The slab %s at %s is left out: %s", name, self._root, exc)
            self._slabs.quarantined.add(name)
        return 0

    def poll(self, *, every_slab: bool = False) -> None:
        """Takes in what other processes did. Looks at neighbours' slabs that were announced, and at a few others in
        turn; with ``every_slab`` at all. Raises ``OSError``."""
        slabs = self._slabs.snapshot()  # before they are listed: one that is made meanwhile is not gone
        if not self._directory.check():
            self._slabs.drop(slabs, "removed")
            self._bulletin.close()
            self._listed = ()
        if self._directory.fd < 0:
            return
        if (listing := self._directory.slabs()) is not self._listed:
            self._bulletin.open(self._directory.fd)
            self._listed = listing if self._is_taken_in(listing, slabs) else ()
        if self._must_shrink and self.is_loaded.is_set():
            self._shrink()
        self._share()
        theirs = [slab for slab in self._slabs.snapshot() if not slab.is_own]
        if not theirs:
            return
        is_changed = self._bulletin.take_changed()
        first, self._next_look = self._next_look, self._next_look + _LOOKS_AT_ONCE
        in_turn = {(first + at) % len(theirs) for at in range(_LOOKS_AT_ONCE)}
        for at, slab in enumerate(theirs):
            if every_slab or at in in_turn or is_changed(slab.file.name):
                self._poll_neighbour(slab)

    def _is_taken_in(self, listing: Sequence[SlabSeen], slabs: Sequence[Slab]) -> bool:
        """Drops those of ``slabs`` that are no more in the directory, and opens new ones. Returns whether none is left
        for later."""
        here = {seen.name: seen.inodes for seen in listing if not seen.is_new}
        self._slabs.drop([slab for slab in slabs if here.get(slab.file.name) != slab.file.inodes], "removed")
        self._slabs.quarantined.intersection_update(here)
        for name in here:
            if name == self._growth.making or (self._is_unknown(name) and self._take_in(name) is None):
                return False
        return True

    def _share(self) -> None:
        """Asks for a slab if we lack room, and gives one to a process that asks and has fewer than we. Raises
        ``OSError``."""
        num_own, now_s = sum(slab.is_own for slab in self._slabs.snapshot()), time.monotonic()
        if now_s < self._growth.wants_until_s:
            self._request.post(num_own)
        else:
            self._request.withdraw()
        self._answered = {process: given for process, given in self._answered.items() if now_s < given[1]}
        for theirs in requests_of_others(self._root, self._directory.access, self._request.process):
            has_been_given = self._answered.get(theirs.process, (-1, 0.0))[0] == theirs.num_slabs
            if has_been_given or num_own <= theirs.num_slabs + 1:
                continue
            slab = self._slabs.own_by_age()[0]
            if not self._slabs.give(slab):
                continue  # a call uses it just now: perhaps at the next poll
            num_own -= 1
            self._answered[theirs.process] = theirs.num_slabs, now_s + _GIVEN_S
            if theirs.identity == self._identity:
                slab.given_until_s = now_s + _GIVEN_S
                slab.file.write_changes(slab.changes + 1)  # also what was not announced yet
                slab.file.unlock()
                self._bulletin.announce([slab.file.name])
            else:
                self._slabs.drop([slab], "evicted")
                self._directory.remove(slab.file.name)

    def _poll_neighbour(self, slab: Slab) -> None:
        try:
            if time.monotonic() >= slab.given_until_s and slab.file.try_lock():
                # Its process is gone, and it is ours. Neighbours have seen its counters: ours must be larger.
                slab.changes = slab.file.read_changes().copy()
                self._slabs.adopt(slab, slab.file.read_entries(0, slab.file.num_slots), slab.file.read_uses())
                return
            changes = slab.file.read_changes()
            for pages in runs_of(np.flatnonzero(changes != slab.changes).tolist()):
                first = pages.start * PAGE_SLOTS
                count = min(pages.count * PAGE_SLOTS, slab.file.num_slots - first)
                self._slabs.apply(slab, first, slab.file.read_entries(first, count))
            slab.changes = changes.copy()
        except OSError as exc:
            self._slabs.lose(slab, exc)

    def flush_changes(self) -> None:
        changed = self._slabs.take_changes()
        try:
            for slab, pages in changed:
                slab.changes[pages] += 1
                try:
                    slab.file.write_changes(slab.changes)
                except OSError as exc:
                    self._slabs.lose(slab, exc)
            self._bulletin.announce(slab.file.name for slab, _ in changed)
        finally:
            self._slabs.unpin(slab for slab, _ in changed)

    def _flush_some_uses(self) -> None:
        count, slabs = min(self._uses_left, _LOOKS_AT_ONCE), self._slabs.snapshot()
        if slabs and count:
            first, self._next_uses = self._next_uses, self._next_uses + count
            self._uses_left -= count
            self.flush_uses([slabs[at % len(slabs)] for at in range(first, first + min(count, len(slabs)))])

    def flush_uses(self, slabs: Iterable[Slab] | None = None) -> None:
        """Writes down when blocks of ``slabs``, or of all, were used, and learns when neighbours used ours. The later
        time counts."""
        used = self._slabs.pin_used(self._slabs.snapshot() if slabs is None else slabs)
        try:
            for slab in used:
                try:
                    on_disk = slab.file.read_uses()
                    uses = self._slabs.merge_uses(slab, on_disk)
                    if (uses != on_disk).any():
                        slab.file.write_uses(uses)
                except OSError as exc:
                    self._slabs.lose(slab, exc)
        finally:
            self._slabs.unpin(used)

    def _shrink(self) -> None:
        """A quota that is smaller than at the last start: removes our slabs, the one with the oldest uses first.
        Somebody else who has the root's lock is not waited for, nor one whose slabs take the room: the next poll tries
        again."""
        self._must_shrink = False
        while excess := self._directory.excess_bytes():
            own = self._slabs.own_by_age()
            if not own:
                self._must_shrink = True
                return
            too_many = list[Slab]()
            for slab in own:
                if excess > 0:
                    too_many.append(slab)
                    excess -= self._layout.slab_bytes(slab.file.num_slots)
            self._slabs.drop(too_many, "evicted")
            for slab in too_many:
                self._directory.remove(slab.file.name)
            _log.info("%d slabs at %s are removed: they are above the quota.", len(too_many), self._root)
        self._must_shrink = excess is None
