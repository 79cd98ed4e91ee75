# SPDX-License-Identifier: Apache-2.0
"""The quota of a root: bytes in use, agreed between all processes, and eviction of the least recently used files."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvoffload.tiering.stores.fs.staging import StagingDirectory, staged_bytes, sweep, unlink_quietly, writers_alive
from kvoffload.tiering.stores.fs.usage_file import USAGE_FILE_BYTES, Account, FileSeen, UsageFile, walk
from kvoffload.tiering.stores.root import check_directory

__all__ = ["Deletion", "Quota", "Reservation"]

_WALK_SHARE = 10
"""A walk that found no room is not repeated for this many times its own duration."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """A file to delete, and the bytes it is counted with. With ``inode``, only if the path still has that inode."""

    path: str
    size_bytes: int
    inode: int | None = None


@dataclass(slots=True)
class Reservation:
    """Bytes for one file of ``file_bytes`` at each path in ``temporaries``, all in the staging directory.

    The first ``num_recycled`` paths exist: evicted files of that size, to be written over.
    """

    file_bytes: int
    temporaries: list[str]
    num_recycled: int = 0
    stamps_ns: range = range(0)
    """The time of use for each file."""

    @property
    def num_bytes(self) -> int:
        return self.file_bytes * len(self.temporaries)

    def keep(self, count: int) -> None:
        """Gives up all but the first ``count`` files, and deletes the evicted files among them."""
        while self.num_recycled > count:
            self.num_recycled -= 1
            unlink_quietly(self.temporaries[self.num_recycled])
        del self.temporaries[count:]


class Quota:
    """Reserves bytes before they are written, and evicts files to make room. Any number of threads and processes.

    The time of last use is each file's mtime, so the order survives restarts and crashes. The copy in memory,
    ``_recency``, is only a hint: eviction looks at the mtime first, and a file that another process has used since
    goes to the back. One file takes some 250 bytes there; without ``max_bytes`` it stays empty.

    Paths are relative to the root. Lock order: the usage file, then ``_lock``, which is never held during I/O.
    """

    def __init__(self, root: str, max_bytes: int | None, staging: StagingDirectory) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._staging = staging
        self._access = staging.access
        self._usage_file = UsageFile(root, self._count, staging.access)
        self._lock = threading.Lock()
        self._recency: OrderedDict[str, int] = OrderedDict()
        self._has_walked = False
        # During a walk: the time of each use, None for files that are gone. The walk may have missed either.
        self._changes: dict[str, int | None] | None = None
        self._no_walk_before_s = 0.0
        self._reserved_bytes = 0
        self._last_stamp_ns = 0
        self.evicted: list[str] = []
        """Paths for ``take_evicted``. Others only test whether there are any."""
        self.num_evicted = 0

    @property
    def used_bytes(self) -> int:
        """As of the last time that this process held the usage file. No I/O."""
        return self._usage_file.last_used_bytes

    def use(self, paths: Sequence[str]) -> range:
        """Records that files are used now, the last of them latest. Returns the times, nanoseconds since 1970, which
        the caller sets as mtimes. ``forget`` those that turn out to be absent."""
        with self._lock:
            stamps_ns = self._stamps(len(paths))
            self._record(zip(paths, stamps_ns))
        return stamps_ns

    def forget(self, path: str) -> None:
        """Records that a file is gone, whoever deleted it."""
        with self._lock:
            self._recency.pop(path, None)
            if self._changes is not None:
                self._changes[path] = None

    def reserve(self, count: int, file_bytes: int, protected: Collection[str]) -> Reservation:
        """Reserves up to ``count`` files. Evicts others to make room if need be, but none of ``protected``.

        The caller writes to ``temporaries``, publishes the files and calls ``release``. Raises ``OSError``.
        """
        reservation = Reservation(file_bytes, self._staging.new_paths(count))
        reserved_bytes = 0
        try:
            with self._usage_file.hold() as account:
                if self._max_bytes is not None and account.used_bytes + reservation.num_bytes > self._max_bytes:
                    reservation.keep((self._max_bytes - USAGE_FILE_BYTES) // file_bytes)
                    self._make_room(account, self._max_bytes - reservation.num_bytes, protected, reservation)
                    reservation.keep(max(0, self._max_bytes - account.used_bytes) // file_bytes)
                reserved_bytes = reservation.num_bytes
                account.used_bytes += reserved_bytes
                with self._lock:
                    self._reserved_bytes += reserved_bytes
                    reservation.stamps_ns = self._stamps(len(reservation.temporaries))
        except OSError:
            reservation.keep(0)
            with self._lock:
                self._reserved_bytes -= reserved_bytes
            raise
        return reservation

    def release(self, reservation: Reservation, published: Mapping[str, int], num_unused: int) -> None:
        """Ends a reservation. ``published`` maps the paths of published files to their times of use; the bytes of
        ``num_unused`` files are free again."""
        try:
            if num_unused:
                with self._usage_file.hold() as account:
                    account.subtract(num_unused * reservation.file_bytes)
        except OSError:
            pass  # the root is gone: the count stays too high, which is safe
        finally:
            with self._lock:
                self._reserved_bytes -= reservation.num_bytes
                self._record(published.items())

    def remove(self, files: Iterable[Deletion]) -> int:
        """Deletes files and returns how many there were. What cannot be deleted stays, and stays counted."""
        deletions, count = list(files), 0
        if not deletions:
            return 0
        try:
            # The usage file is held, so that nobody counts anew between a deletion and its subtraction.
            with self._usage_file.hold() as account:
                for directory in {file.path.partition("/")[0] for file in deletions}:
                    check_directory(self._root, directory, self._access)
                for file in deletions:
                    self.forget(file.path)
                    if _delete(f"{self._root}/{file.path}", file.inode):
                        count += 1
                        account.subtract(file.size_bytes)
        except OSError:
            pass  # the root is gone or read-only, or a link is in the way
        return count

    def scan(self) -> Iterator[list[FileSeen]]:
        """Yields all files, directory by directory, and learns their order of use on the way.

        Writers wait meanwhile, readers do not. If no other process is at work, the bytes are counted anew.
        """
        with self._usage_file.hold() as account:
            yield from self._walk(account)

    def shrink(self, max_bytes: int | None) -> tuple[int, int]:
        """Walks the root, and evicts files until at most ``max_bytes`` are on the disk. ``None``: evicts nothing.

        Returns how many files it evicted, and the bytes that are left. Writers wait meanwhile.
        """
        num_before = self.num_evicted
        with self._usage_file.hold() as account:
            num_bytes = USAGE_FILE_BYTES
            for files in self._walk(account):
                num_bytes += sum(file.size_bytes for file in files)
            num_bytes += staged_bytes(self._root, self._access)
            # The count may be too high beside other processes, as those that died had reservations. So it says nothing
            # about what must go, and only follows what does go.
            counted_bytes = account.used_bytes
            if max_bytes is not None and num_bytes > max_bytes:
                self._make_room(account, max(0, counted_bytes - (num_bytes - max_bytes)), ())
            return self.num_evicted - num_before, num_bytes - (counted_bytes - account.used_bytes)

    def take_evicted(self) -> list[str]:
        """The paths evicted since the last call."""
        with self._lock:
            evicted, self.evicted = self.evicted, []
            return evicted

    def close(self) -> None:
        self._usage_file.close()

    # With _lock held.

    def _stamps(self, count: int) -> range:
        """Times for ``count`` uses now, each later than all before."""
        first = max(self._last_stamp_ns + 1, time.time_ns())
        self._last_stamp_ns = first + count - 1
        return range(first, first + count)

    def _record(self, uses: Iterable[tuple[str, int]]) -> None:
        if self._max_bytes is None:
            return
        for path, stamp_ns in uses:
            self._recency[path] = stamp_ns
            self._recency.move_to_end(path)
            if self._changes is not None:
                self._changes.pop(path, None)
                self._changes[path] = stamp_ns

    # With the usage file held.

    def _make_room(
        self,
        account: Account,
        target_bytes: int,
        protected: Collection[str],
        reservation: Reservation | None = None,
    ) -> None:
        """Evicts files until at most ``target_bytes`` are in use, or until no file may go. Raises ``OSError``."""
        if account.used_bytes <= target_bytes:
            return
        if not self._has_walked:
            for _ in self._walk(account):
                pass
        self._evict(account, target_bytes, protected, reservation)
        if account.used_bytes > target_bytes and time.monotonic() >= self._no_walk_before_s:
            # Other processes have written the rest. Walk to find it; if that does not help, not again soon.
            start_s = time.monotonic()
            for _ in self._walk(account):
                pass
            self._evict(account, target_bytes, protected, reservation)
            if account.used_bytes > target_bytes:
                self._no_walk_before_s = time.monotonic() + _WALK_SHARE * (time.monotonic() - start_s)

    def _evict(
        self, account: Account, target_bytes: int, protected: Collection[str], reservation: Reservation | None
    ) -> None:
        skipped: list[tuple[str, int]] = []
        checked = set[str]()
        try:
            while account.used_bytes > target_bytes:
                with self._lock:
                    if not self._recency:
                        break
                    path, stamp_ns = self._recency.popitem(last=False)
                if path in protected:
                    skipped.append((path, stamp_ns))
                    continue
                if (directory := path.partition("/")[0]) not in checked:
                    try:
                        check_directory(self._root, directory, self._access)
                    except PermissionError:
                        continue  # not ours to delete from, whatever was there
                    except OSError:
                        skipped.append((path, stamp_ns))
                        raise
                    checked.add(directory)
                self._evict_file(account, path, stamp_ns, reservation)
        finally:
            with self._lock:
                for path, stamp_ns in skipped:
                    self._recency.setdefault(path, stamp_ns)

    def _evict_file(self, account: Account, path: str, stamp_ns: int, reservation: Reservation | None) -> None:
        """Deletes or recycles a file, unless another process has used it since ``stamp_ns``. Raises ``OSError``."""
        full = f"{self._root}/{path}"
        try:
            status = os.stat(full, follow_symlinks=False)
            used_ns = status.st_mtime_ns
            if used_ns <= stamp_ns and (reservation is None or not self._recycle(full, status, reservation)):
                os.unlink(full)
        except FileNotFoundError:
            return
        except OSError:
            with self._lock:
                self._record([(path, stamp_ns)])
            raise
        if used_ns > stamp_ns:
            with self._lock:
                self._record([(path, used_ns)])
            return
        # The order of events: the file loses its name, its bytes are subtracted, the count is written as the usage
        # file is released, and only then anything is written in its stead. So the count is never too low, wherever
        # a process dies.
        account.subtract(status.st_size)
        self.num_evicted += 1
        with self._lock:
            self._recency.pop(path, None)
            self.evicted.append(path)

    def _recycle(self, full: str, status: os.stat_result, reservation: Reservation) -> bool:
        """Renames an evicted file to the reservation's next path, if it fits there.

        Some file systems take longer to make a file anew than to write it. Only a file that no one else owns or has
        by another name is written over.
        """
        is_fit = stat.S_ISREG(status.st_mode) and status.st_size == reservation.file_bytes
        is_ours = self._access.admits(status) and status.st_nlink == 1
        if not is_fit or not is_ours or reservation.num_recycled == len(reservation.temporaries):
            return False
        try:
            os.rename(full, reservation.temporaries[reservation.num_recycled])
        except OSError:
            return False
        reservation.num_recycled += 1
        return True

    def _walk(self, account: Account) -> Iterator[list[FileSeen]]:
        """Yields all files. Afterwards ``_recency`` is complete and, if nobody else is at work, ``account`` exact."""
        # The invariant: the count is never below what is on the disk and reserved. So the walk's total replaces it
        # only if no writer, here or elsewhere, has a reservation. New ones wait for the usage file, which we hold.
        #
        # First ask who is alive, then sweep. A writer that dies between the two counts as alive, so nothing is
        # counted anew while its files lie in its staging directory; one dead before that is swept.
        is_alone = not writers_alive(self._root, self._staging.path, self._access)
        sweep(self._root, self._access)
        with self._lock:
            is_exact = is_alone and not self._reserved_bytes
            self._changes = {}
        total_bytes, found = USAGE_FILE_BYTES, list[tuple[int, str]]()
        try:
            for files in walk(self._root):
                total_bytes += sum(file.size_bytes for file in files)
                if self._max_bytes is not None:
                    found += [(file.used_ns, file.path) for file in files]
                yield files
            found.sort()
            recency = OrderedDict((path, used_ns) for used_ns, path in found)
            with self._lock:
                for path, stamp_ns in self._changes.items():
                    recency.pop(path, None)
                    if stamp_ns is not None:
                        recency[path] = stamp_ns
                self._recency, self._has_walked = recency, True
        finally:
            with self._lock:
                self._changes = None
        if is_exact:
            account.used_bytes = total_bytes

    def _count(self) -> int:
        """For a usage file that cannot be trusted. Published files with a reservation count twice: never too little."""
        with self._lock:
            reserved_bytes = self._reserved_bytes
        return USAGE_FILE_BYTES + reserved_bytes + sum(file.size_bytes for files in walk(self._root) for file in files)


def _delete(full: str, inode: int | None) -> bool:
    """Whether that deleted a file. An empty directory in its stead goes as well, but was never counted."""
    try:
        status = os.stat(full, follow_symlinks=False)
        if inode is not None and status.st_ino != inode:
            return False  # replaced by a good one
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(full)
            return False
        os.unlink(full)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode)  # a link was never counted
