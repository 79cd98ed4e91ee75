# SPDX-License-Identifier: Apache-2.0
"""The room on a root: a quota in bytes over all namespaces, kept by deleting the blocks least recently used."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kvoffload.tiering.stores.fs.batch import look, move
from kvoffload.tiering.stores.fs.staging import Workplace, sweep, unlink_quietly, writers_alive
from kvoffload.tiering.stores.fs.usage_file import LEDGER_BYTES, Account, FileSeen, Ledger, walk

__all__ = ["Booking", "Doomed", "Space"]

_SCAN_SHARE = 10
"""A walk that found no room is not repeated for this many times its own duration."""


@dataclass(frozen=True, slots=True)
class Doomed:
    """A file to delete, and what it was booked with; only if it still is ``inode``, where that is given."""

    path: str
    booked_bytes: int
    inode: int | None = None


@dataclass(slots=True)
class Booking:
    """Room for ``count`` files. ``recycled``: evicted files of the same size, in the workplace, to write into; their
    bytes are among those booked."""

    count: int
    each_bytes: int
    recycled: list[str] = field(default_factory=list)
    most_recycled: int = 0

    @property
    def missing(self) -> int:
        """How many more evicted files it can use."""
        return self.most_recycled - len(self.recycled)

    def drop_recycled(self, but: int) -> None:
        """Deletes files that nothing was written into, all but so many."""
        while len(self.recycled) > but:
            unlink_quietly(self.recycled.pop())


class Space:
    """Reserves bytes before they are written, and makes room for them. Any number of threads and processes.

    The order of use lives in each file's mtime, so it survives everything, and in memory, where it is a hint: before
    a file is deleted for room its mtime is looked at, and one that another process has used since goes to the back.
    In memory a file takes some 250 bytes; without a quota nothing is kept there.

    Lock order: the ledger (which also serialises whoever makes room), then ``_lock`` (moments).
    """

    def __init__(self, root: str, max_bytes: int | None, workplace: Workplace) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._workplace = workplace
        self._ledger = Ledger(root, self._count)
        self._lock = threading.Lock()
        self._order: OrderedDict[str, int] = OrderedDict()
        self._recycle: Booking | None = None  # of the one that holds the ledger
        # Reserved and not settled yet: not exactly what is on the disk, so nobody counts anew meanwhile.
        self._booked_bytes = 0
        self._removed_in_scan: set[str] | None = None
        self._has_order = False
        self._no_scan_before_s = 0.0
        self._last_stamp_ns = 0
        self._used_bytes = 0
        self._evicted: list[str] = []
        self.num_evicted = 0

    @property
    def used_bytes(self) -> int:
        """As of the last time the ledger was held here; no I/O."""
        return self._used_bytes

    def stamps(self, count: int) -> range:
        """Times for ``count`` uses that happen now, nanoseconds; each later than the one before."""
        with self._lock:
            first = max(self._last_stamp_ns + 1, time.time_ns())
            self._last_stamp_ns = first + count - 1
            return range(first, first + count)

    def reserve(self, count: int, each_bytes: int, spare: Collection[str]) -> Booking:
        """Books up to ``count`` files, making room if need be, though never by deleting one of ``spare``.
        ``settle`` must follow.
        """
        booking = Booking(0, each_bytes)
        with self._ledger.hold() as account:
            if self._max_bytes is not None and account.used_bytes + count * each_bytes > self._max_bytes:
                count = min(count, max(0, self._max_bytes - LEDGER_BYTES) // each_bytes)
                self._recycle = booking
                booking.most_recycled = count
                try:
                    self._make_room(account, self._max_bytes - count * each_bytes, spare)
                except OSError:
                    booking.drop_recycled(but=0)
                    raise
                finally:
                    self._recycle = None
                count = min(count, max(0, self._max_bytes - account.used_bytes) // each_bytes)
            account.used_bytes += count * each_bytes
            self._used_bytes = account.used_bytes
            booking.count = count
            booking.drop_recycled(but=count)
            with self._lock:
                self._booked_bytes += count * each_bytes
        return booking

    def settle(self, booking: Booking, num_unused: int) -> None:
        """Ends a reservation: its files are in place, but for ``num_unused``."""
        booking.drop_recycled(but=0)
        try:
            if num_unused:
                with self._ledger.hold() as account:
                    self._take_off(account, num_unused * booking.each_bytes)
        except OSError:
            pass  # the root is gone: the count stays too high, which is safe
        finally:
            with self._lock:
                self._booked_bytes -= booking.count * booking.each_bytes

    def published(self, path: str, stamp_ns: int) -> None:
        """A reserved file is in place (or was there before)."""
        if self._max_bytes is None:
            return
        with self._lock:
            self._order[path] = stamp_ns
            self._order.move_to_end(path)
            if self._removed_in_scan is not None:
                self._removed_in_scan.discard(path)

    def used(self, path: str, stamp_ns: int) -> None:
        """A file was used (its mtime is set by the caller)."""
        if self._max_bytes is not None:
            with self._lock:
                self._order[path] = stamp_ns
                self._order.move_to_end(path)

    def forget(self, path: str) -> None:
        """A file is gone, by whatever hand."""
        with self._lock:
            self._order.pop(path, None)
            if self._removed_in_scan is not None:
                self._removed_in_scan.add(path)

    def remove(self, files: Iterable[Doomed]) -> int:
        """Deletes files and takes their bytes off; answers how many there were. What cannot be deleted stays."""
        doomed, count = list(files), 0
        if not doomed:
            return 0
        try:
            # With the ledger held, so that nobody counts anew between the deletion and its booking.
            with self._ledger.hold() as account:
                for file in doomed:
                    self.forget(file.path)
                    if self._delete(file):
                        count += 1
                        self._take_off(account, file.booked_bytes)
        except OSError:
            pass  # gone, or read-only: then the files are as well
        return count

    def _delete(self, file: Doomed) -> bool:
        full = os.path.join(self._root, file.path)
        try:
            status = os.stat(full, follow_symlinks=False)
            if file.inode is not None and status.st_ino != file.inode:
                return False  # a good one has taken its place
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(full)
                return False
            os.unlink(full)
        except OSError:
            return False
        return True

    def _take_off(self, account: Account, num_bytes: int) -> None:
        account.used_bytes = max(LEDGER_BYTES, account.used_bytes - num_bytes)
        self._used_bytes = account.used_bytes

    def scan(self) -> Iterator[list[FileSeen]]:
        """Walks the root, learns the order of use on the way, and yields what it sees, directory by directory.

        Writers wait meanwhile, readers do not. Where no other process is at work the bytes are counted anew.
        """
        with self._ledger.hold() as account:
            yield from self._learn(account)
            self._used_bytes = account.used_bytes

    def shrink(self, max_bytes: int) -> int:
        """Deletes the least recently used until at most ``max_bytes`` are in use; answers how many files went."""
        before = self.num_evicted
        with self._ledger.hold() as account:
            self._make_room(account, max_bytes, ())
            self._used_bytes = account.used_bytes
        return self.num_evicted - before

    def take_evicted(self) -> list[str]:
        with self._lock:
            evicted, self._evicted = self._evicted, []
            return evicted

    def close(self) -> None:
        self._ledger.close()

    # With the ledger held.

    def _make_room(self, account: Account, target_bytes: int, spare: Collection[str]) -> None:
        """Deletes files until at most ``target_bytes`` are in use, or nothing is left that may go."""
        if account.used_bytes <= target_bytes:
            return
        if not self._has_order:
            for _ in self._learn(account):
                pass
        self._evict(account, target_bytes, spare)
        if account.used_bytes > target_bytes and time.monotonic() >= self._no_scan_before_s:
            # Other processes hold the rest. Look what they have; if that does not help, not again soon.
            start_s = time.monotonic()
            for _ in self._learn(account):
                pass
            self._evict(account, target_bytes, spare)
            if account.used_bytes > target_bytes:
                self._no_scan_before_s = time.monotonic() + _SCAN_SHARE * (time.monotonic() - start_s)

    def _evict(self, account: Account, target_bytes: int, spare: Collection[str]) -> None:
        spared: list[tuple[str, int]] = []
        booking = self._recycle
        while account.used_bytes > target_bytes:
            count = 1
            if booking is not None:
                count = max(1, min(booking.missing, -(-(account.used_bytes - target_bytes) // booking.each_bytes)))
            oldest = self._take_oldest(count, spare, spared)
            if not oldest:
                break
            try:
                if booking is not None and booking.missing:
                    self._recycle_files(account, oldest, booking)
                while oldest and account.used_bytes > target_bytes:
                    self._delete_oldest(account, *oldest.popleft())
            finally:
                with self._lock:
                    for path, stamp_ns in reversed(oldest):
                        self._order[path] = stamp_ns
                        self._order.move_to_end(path, last=False)
        with self._lock:
            for path, stamp_ns in spared:
                self._order.setdefault(path, stamp_ns)

    def _take_oldest(self, count: int, spare: Collection[str], spared: list[tuple[str, int]]) -> deque[tuple[str, int]]:
        """The first ``count`` files of the order, taken out of it; those of ``spare`` go to ``spared``."""
        oldest = deque[tuple[str, int]]()
        with self._lock:
            while self._order and len(oldest) < count:
                item = self._order.popitem(last=False)
                (spared if item[0] in spare else oldest).append(item)
        return oldest

    def _recycle_files(self, account: Account, files: deque[tuple[str, int]], booking: Booking) -> None:
        """Renames those of ``files`` that the batch which the room is for can write into: making files anew costs some
        file systems more than writing them. The others stay in ``files``."""
        fulls = [f"{self._root}/{path}" for path, _ in files]
        fit = [
            (index, full, self._workplace.new_path())
            for index, (full, found, (_, stamp_ns)) in enumerate(zip(fulls, look(fulls), files))
            if found is not None and found.size_bytes == booking.each_bytes and found.used_ns <= stamp_ns
        ]
        moved = move([full for _, full, _ in fit], [recycled for _, _, recycled in fit])
        for (index, _, recycled), is_moved in reversed(list(zip(fit, moved))):
            if is_moved:
                booking.recycled.append(recycled)
                self._is_gone(account, files[index][0], booking.each_bytes)
                del files[index]

    def _delete_oldest(self, account: Account, path: str, stamp_ns: int) -> None:
        """Deletes a file, unless another process has used it since we looked last. Raises ``OSError``."""
        full = os.path.join(self._root, path)
        try:
            status = os.stat(full, follow_symlinks=False)
            if status.st_mtime_ns > stamp_ns:
                self.used(path, status.st_mtime_ns)
                return
            os.unlink(full)
        except FileNotFoundError:
            return
        except OSError:
            self.used(path, stamp_ns)
            raise
        self._is_gone(account, path, status.st_size)

    def _is_gone(self, account: Account, path: str, size_bytes: int) -> None:
        self._take_off(account, size_bytes)
        self.num_evicted += 1
        self.forget(path)
        with self._lock:
            self._evicted.append(path)

    def _learn(self, account: Account) -> Iterator[list[FileSeen]]:
        """A walk that leaves ``_order`` complete and, if we are alone, ``account`` exact."""
        # In this order: a writer that dies between the two was alive for the first, so that nothing is counted anew
        # while its halves may still lie about; whoever was dead for the first is swept by the second.
        alone = not writers_alive(self._root, besides=self._workplace.path)
        sweep(self._root)
        with self._lock:
            self._removed_in_scan = set()
            # Nobody reserves or deletes while we hold the ledger; what was reserved before may come at any moment.
            is_exact = alone and not self._booked_bytes
            start_ns = self._last_stamp_ns
        total = LEDGER_BYTES
        found: list[tuple[int, str]] = []
        try:
            for files in walk(self._root):
                total += sum(file.size_bytes for file in files)
                if self._max_bytes is not None:
                    found += [(file.used_ns, file.path) for file in files]
                yield files
            found.sort()
            order = OrderedDict((path, stamp_ns) for stamp_ns, path in found)
            with self._lock:
                for path, stamp_ns in self._order.items():
                    if stamp_ns > start_ns:
                        order[path] = stamp_ns
                        order.move_to_end(path)
                for path in self._removed_in_scan:
                    order.pop(path, None)
                self._order = order
                self._has_order = True
        finally:
            with self._lock:
                self._removed_in_scan = None
        if is_exact:
            account.used_bytes = total

    def _count(self) -> int:
        with self._lock:
            booked_bytes = self._booked_bytes
        return LEDGER_BYTES + booked_bytes + sum(file.size_bytes for files in walk(self._root) for file in files)
