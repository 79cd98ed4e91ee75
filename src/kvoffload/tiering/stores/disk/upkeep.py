# SPDX-License-Identifier: Apache-2.0
"""The regular work of a store, twice a second: it publishes its changes, reads its neighbours' changes, and adopts
slabs of dead processes. Reads and writes never wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from kvoffload.errors import ConfigError, reason_of
from kvoffload.tiering.stores.direct_io import REFUSED
from kvoffload.tiering.stores.disk.allocator import runs_of
from kvoffload.tiering.stores.disk.directory import SlabDirectory, SlabSeen
from kvoffload.tiering.stores.disk.file import TOO_MANY_FILES, SlabRefused
from kvoffload.tiering.stores.disk.format import PAGE_SLOTS
from kvoffload.tiering.stores.disk.open_slab import Slab
from kvoffload.tiering.stores.disk.quota import Quota
from kvoffload.tiering.stores.disk.slabs import Slabs

_log = logging.getLogger(__name__)

_POLL_S = 0.4
"""Seconds between polls, so that neighbours learn of our new blocks, and we of theirs, within a second."""
_USES_S = 10.0
"""Seconds between rounds that write the times of use."""
_USES_AT_ONCE = 8
"""Number of slabs whose times of use one poll writes."""
_LOADED_AT_ONCE = 1 << 18
"""Number of slots whose tables are read before the constructor returns. The store's own thread reads the rest."""


class Upkeep:
    """The store's own thread, and its work."""

    def __init__(self, directory: SlabDirectory, slabs: Slabs, quota: Quota) -> None:
        self._directory = directory
        self._slabs = slabs
        self._quota = quota
        self.lock = threading.Lock()
        """Lock of the thread that polls or closes. It may be held during I/O, because calls of the store never take
        it."""
        self._is_closed = False
        self.is_loaded = threading.Event()
        """Set when all slabs that existed at startup are known."""
        self._must_shrink = True
        """Whether the quota has not been checked successfully since startup."""
        self._listed: Sequence[SlabSeen] = ()
        """The slabs of the directory at the last time when all of them were read."""
        self._next_uses = 0
        """A counter that chooses, in turn, the next slabs whose times of use are written."""
        self._uses_left = 0
        self._stop = threading.Event()
        with self.lock:
            self.load(at_once=True)
        self._thread = threading.Thread(target=self._keep_up, name="kvoffload-disk-upkeep", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise ConfigError(
                f"The store at {directory.root} needs a thread, which cannot be started: raise the limit of processes "
                "(ulimit -u, or the container's limit)."
            ) from exc

    def refresh(self) -> None:
        """Publish our changes and read the changes of other processes, including dead ones."""
        with self.lock:
            if not self._is_closed:
                self.flush_changes()
                self.poll()

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
            self._slabs.close()
            self._quota.close()
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
                        if time.monotonic() >= uses_at_s:
                            uses_at_s = time.monotonic() + _USES_S
                            self._uses_left = len(self._slabs.open)
                            self._quota.drop_plain()
                        self._flush_some_uses()
                        self.poll()
                said = ""
            except Exception as exc:  # noqa: BLE001 - the thread must survive any error of a broken disk
                if reason_of(exc) != said:
                    said = reason_of(exc)
                    _log.warning("The store at %s: %s", self._directory.root, said)
            if self._stop.wait(_POLL_S):
                return

    def load(self, *, at_once: bool) -> None:
        """Read the existing slabs, the last used first. With ``at_once``, stop after a quarter of a million slots, so
        that a large store does not delay its engine."""
        num_slots = 0
        try:
            slabs = self._directory.slabs()
            if at_once:
                self._slabs.expect(seen.num_bytes for seen in slabs if not seen.is_new)
            for seen in reversed(slabs):
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
            _log.warning("The slabs at %s cannot be listed: %s", self._directory.root, reason_of(exc))
        self.is_loaded.set()

    def _is_unknown(self, name: str) -> bool:
        # In this order, because a new slab is registered before ``making`` is cleared.
        return name != self._quota.making and name not in self._slabs.by_name and name not in self._slabs.quarantined

    def _take_in(self, name: str) -> int | None:
        """Open a slab and read its blocks. Returns its number of slots; ``None`` if no slab can be opened now."""
        try:
            file = self._directory.open_slab(name)
            try:
                self._quota.check_share(file)
                is_own = file.try_lock()
            except (OSError, SlabRefused):
                file.close()
                raise
            if not file.is_linked(self._directory.fd):
                file.close()
                return 0
            self._slabs.register(file, is_own)
            return file.num_slots
        except FileNotFoundError:
            pass  # removed meanwhile
        except (OSError, SlabRefused) as exc:
            if isinstance(exc, OSError) and exc.errno in TOO_MANY_FILES:
                self._slabs.note_limit(exc)
                return None
            if not self._slabs.quarantined:  # the others probably have the same fault
                _log.warning(
                    "kvoffload ignores the blocks of a slab at %s: %s. It also ignores other slabs like this one, and "
                    "replaces them when it needs room.",
                    self._directory.root,
                    reason_of(exc).rstrip("."),
                )
            self._slabs.quarantined.add(name)
        return 0

    def poll(self) -> None:
        """Read the changes of other processes. Raises ``OSError``."""
        slabs = self._slabs.snapshot()  # before the listing: a slab created meanwhile is not gone
        if not self._directory.check():
            self._slabs.drop(slabs, "removed")
            self._listed = ()
        if self._directory.fd < 0:
            return
        if (listing := self._directory.slabs()) is not self._listed:
            self._listed = listing if self._is_taken_in(listing, slabs) else ()
        if self._must_shrink and self.is_loaded.is_set():
            self._shrink()
        for slab in self._slabs.snapshot():
            if not slab.is_own:
                self._poll_neighbour(slab)
        self._quota.share()  # last, because on a full disk no request can be posted

    def _is_taken_in(self, listing: Sequence[SlabSeen], slabs: Sequence[Slab]) -> bool:
        """Drop the open slabs that are no longer in the directory, and open new ones. Returns ``False`` if some new
        ones remain for later."""
        here = {seen.name: seen.inodes for seen in listing if not seen.is_new}
        self._slabs.drop([slab for slab in slabs if here.get(slab.file.name) != slab.file.inodes], "removed")
        self._slabs.quarantined.intersection_update(here)
        for name in here:
            if name == self._quota.making or (self._is_unknown(name) and self._take_in(name) is None):
                return False
        return True

    def _poll_neighbour(self, slab: Slab) -> None:
        try:
            if time.monotonic() >= slab.given_until_s and slab.file.try_lock():
                # Its process is dead, and the slab is now ours. Neighbours have seen its counters, so ours must be
                # larger.
                slab.changes = slab.file.read_changes()
                self._slabs.adopt(slab, slab.file.read_entries(0, slab.file.num_slots), slab.file.read_uses())
                return
            changes = slab.file.read_changes()
            for pages in runs_of(np.flatnonzero(changes != slab.changes).tolist()):
                first = pages.start * PAGE_SLOTS
                count = min(pages.count * PAGE_SLOTS, slab.file.num_slots - first)
                self._slabs.apply(slab, first, slab.file.read_entries(first, count))
            slab.changes = changes
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
                    if exc.errno not in REFUSED:  # otherwise the next change also announces this one
                        self._slabs.lose(slab, exc)
        finally:
            self._slabs.unpin(slab for slab, _ in changed)

    def _flush_some_uses(self) -> None:
        count, slabs = min(self._uses_left, _USES_AT_ONCE), self._slabs.snapshot()
        if slabs and count:
            first, self._next_uses = self._next_uses, self._next_uses + count
            self._uses_left -= count
            self.flush_uses([slabs[at % len(slabs)] for at in range(first, first + min(count, len(slabs)))])

    def flush_uses(self, slabs: Iterable[Slab] | None = None) -> None:
        """Write the times of use of ``slabs``, or of all, and read the times at which neighbours used ours. The later
        time counts. A failed write is harmless, because no block depends on it."""
        used = self._slabs.pin_used(self._slabs.snapshot() if slabs is None else slabs)
        try:
            for slab in used:
                try:
                    on_disk = slab.file.read_uses()
                    uses = self._slabs.merge_uses(slab, on_disk)
                except OSError as exc:
                    self._slabs.lose(slab, exc)
                    continue
                if (uses != on_disk).any():
                    with suppress(OSError):
                        slab.file.write_uses(uses)
        finally:
            self._slabs.unpin(used)

    def _shrink(self) -> None:
        self._must_shrink = False  # do not try again after an error, because every poll would then end with it
        self._must_shrink = not self._quota.shrink()
