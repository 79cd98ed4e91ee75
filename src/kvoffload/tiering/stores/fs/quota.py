# SPDX-License-Identifier: Apache-2.0
"""The quota of a root: bytes in use, agreed between all processes, and eviction of the least recently used files."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvoffload.tiering.stores.fs.format import BlockFormat
from kvoffload.tiering.stores.fs.recency import Recency
from kvoffload.tiering.stores.fs.staging import StagingDirectory, staged_bytes, sweep, unlink_quietly, writers_alive
from kvoffload.tiering.stores.fs.usage_file import (
    NUM_FANS,
    USAGE_FILE_BYTES,
    Account,
    FileSeen,
    UsageFile,
    directories_by_fan,
    files_of,
)
from kvoffload.tiering.stores.root import check_directory

__all__ = ["Deletion", "Quota", "Reservation"]

_LOCK_TIMEOUT_S = 10.0
"""How long a writer waits for the usage file, whose holder may be stopped."""
_CLOSE_TIMEOUT_S = 1.0
_WALK_TIMEOUT_S = 20.0
"""How long a writer without room waits for another thread's walk, which will find files to evict."""
_WALK_SHARE = 10
"""A walk that found no room is not repeated for this many times its own duration."""
_STEP_FILES = 512
"""A walk lets the usage file go after this many files, once it has finished a fan."""
_PAUSE_S = 0.003
"""For so long, so that everybody who waits for the usage file gets it."""
_MAX_FAILURES = 64
"""An eviction stops after this many files in a row that cannot be deleted."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """A file to delete, and its usual size. With ``inode``, only if the path still has that inode."""

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
        """Drops all but the first ``count`` files, and deletes the evicted files among them."""
        while self.num_recycled > count:
            self.num_recycled -= 1
            unlink_quietly(self.temporaries[self.num_recycled])
        del self.temporaries[count:]

    def drop_recycled(self) -> None:
        """Deletes the evicted files. Their paths stay, for new ones."""
        for path in self.temporaries[: self.num_recycled]:
            unlink_quietly(path)
        self.num_recycled = 0


@dataclass(frozen=True, slots=True)
class _Release:
    """The end of a reservation of ``num_bytes``: what was published, and what is free again."""

    published: Collection[str]
    file_bytes: int
    num_bytes: int
    unused_bytes: int


@dataclass(frozen=True, slots=True)
class _Held:
    account: Account
    num_deleted: int
    """Files that were doomed, and are deleted now."""


class Quota:
    """Reserves bytes before they are written, and evicts files to make room. Any number of threads and processes.

    The time of last use is each file's mtime, so the order survives restarts and crashes. What is in memory, the
    ``Recency``, is only a hint: eviction looks at the mtime first, and a file that another process has used since goes
    to the back. Without ``max_bytes`` nothing is kept there, and nothing is evicted.

    No thread waits for the usage file longer than ``_LOCK_TIMEOUT_S``, and readers not at all: what they have to change
    waits for the next holder of this process. A walk holds it for one step at a time.

    Paths are relative to the root. Lock order: ``_walking``, the usage file, then ``_lock``, which is never held during
    I/O.
    """

    def __init__(
        self, root: str, max_bytes: int | None, staging: StagingDirectory, layout: BlockFormat | None = None
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._staging = staging
        self._access = staging.access
        self._layout = layout
        self._usage_file = UsageFile(root, staging.access)
        self._walking = threading.Lock()
        self._num_walks = 0
        self._no_walk_before_s = 0.0
        self._lock = threading.Lock()
        self._recency = Recency()
        self._reserved_bytes = 0
        self._releases: list[_Release] = []
        self._deletions: dict[str, Deletion] = {}
        # Files of the layout that our last recount has counted with another size than theirs, and its number. Who has
        # counted anew since may have found others.
        self._odd_sizes: dict[str, int] = {}
        self._our_recount = -1
        self._last_stamp_ns = 0
        self.evicted: list[str] = []
        """Paths for ``take_evicted``. Others only test whether there are any."""
        self.num_evicted = 0

    @property
    def used_bytes(self) -> int:
        """As of the last time that this process held the usage file. No I/O."""
        return self._usage_file.last_used_bytes

    def is_doomed(self, path: str) -> bool:
        """The file is to be deleted as soon as this process holds the usage file."""
        return path in self._deletions

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
            self._recency.forget(path)

    def reserve(self, count: int, file_bytes: int, protected: Collection[str]) -> Reservation:
        """Reserves up to ``count`` files. Evicts others to make room if need be, but none of ``protected``.

        The caller writes to ``temporaries``, publishes the files and calls ``release``. Raises ``OSError``.
        """
        reservation = Reservation(file_bytes, self._staging.new_paths(count))
        try:
            if not self._reserve(reservation, protected):
                self._walk_for_room()
                self._reserve(reservation, protected, is_last=True)
        except OSError:
            reservation.keep(0)
            raise
        return reservation

    def release(self, reservation: Reservation, published: Mapping[str, int], num_unused: int) -> None:
        """Ends a reservation. ``published`` maps the paths of published files to their times of use; the bytes of
        ``num_unused`` files are free again."""
        unused_bytes = num_unused * reservation.file_bytes
        with self._lock:
            self._record(published.items())
            if not reservation.num_bytes:
                return
            paths = list(published)
            self._releases.append(_Release(paths, reservation.file_bytes, reservation.num_bytes, unused_bytes))
        try:
            with self._hold():
                pass
        except TimeoutError:
            pass  # until this process holds the usage file again, the count stays too high, which is safe
        except OSError:
            # The root is gone, and incomplete files with it, which may come back: their bytes stay counted.
            with self._lock:
                self._releases = [replace(release, unused_bytes=0) for release in self._releases]

    def remove(self, files: Iterable[Deletion], timeout_s: float | None = None) -> int:
        """Deletes files and returns how many there were. What cannot be deleted stays, and stays counted.

        If the usage file is not free within ``timeout_s``, the files are doomed instead. Then this returns 0.
        """
        deletions = {file.path: file for file in files}
        if not deletions:
            return 0
        with self._lock:
            self._deletions |= deletions
            for path in deletions:
                self._recency.forget(path)
        try:
            with self._hold(timeout_s) as held:
                return held.num_deleted
        except TimeoutError:
            return 0
        except OSError:
            with self._lock:
                for path in deletions:
                    self._deletions.pop(path, None)
            return 0  # the root is gone or read-only, or a link is in the way

    def make_disk_room(self, file_bytes: int, temporaries: Sequence[str], protected: Collection[str]) -> int:
        """Evicts as much as new files of ``file_bytes`` at ``temporaries`` need, because the disk is full below the
        quota. Evicted files of that size are there afterwards, to be written over. Returns the bytes that were evicted.
        Raises ``OSError``."""
        if self._max_bytes is None:
            return 0
        if not self._num_walks:
            self._walk_for_room()
        reservation = Reservation(file_bytes, list(temporaries))
        with self._hold() as held:
            return self._evict(held.account, reservation.num_bytes, protected, reservation)

    def scan(self) -> Iterator[list[FileSeen]]:
        """Yields all files, learns their order of use and counts their bytes anew, step by step. Others go on reading
        and writing."""
        with self._walking:
            yield from self._walk()

    def shrink(self, max_bytes: int | None) -> tuple[int, int]:
        """Walks the root, and evicts files until at most ``max_bytes`` are on the disk. ``None``: evicts nothing.

        Returns how many files it evicted, and the bytes that are left.
        """
        num_bytes = USAGE_FILE_BYTES + sum(file.size_bytes for files in self.scan() for file in files)
        num_bytes += staged_bytes(self._root, self._access)
        num_before = self.num_evicted
        # The count may be too high beside other processes, as those that died had reservations. So it says nothing
        # about what must go, and only follows what does go.
        if max_bytes is not None and num_bytes > max_bytes:
            with self._hold() as held:
                num_bytes -= self._evict(held.account, num_bytes - max_bytes, (), None)
        return self.num_evicted - num_before, num_bytes

    def take_evicted(self) -> list[str]:
        """The paths evicted since the last call."""
        with self._lock:
            evicted, self.evicted = self.evicted, []
            return evicted

    def close(self) -> None:
        if self._releases or self._deletions:
            try:
                with self._hold(_CLOSE_TIMEOUT_S):
                    pass
            except OSError:
                pass  # this writer counts as one that died
        self._usage_file.close()

    # With _lock held.

    def _stamps(self, count: int) -> range:
        """Times for ``count`` uses now, each later than all before."""
        first = max(self._last_stamp_ns + 1, time.time_ns())
        self._last_stamp_ns = first + count - 1
        return range(first, first + count)

    def _record(self, uses: Iterable[tuple[str, int]]) -> None:
        if self._max_bytes is not None:
            self._recency.record(uses)

    # With the usage file held.

    @contextmanager
    def _hold(self, timeout_s: float | None = None) -> Iterator[_Held]:
        """Holds the usage file, and first makes the changes that have waited for it. Raises ``OSError``."""
        with self._usage_file.hold(_LOCK_TIMEOUT_S if timeout_s is None else timeout_s) as account:
            yield _Held(account, self._catch_up(account))

    def _catch_up(self, account: Account) -> int:
        """Ends reservations, and deletes files that are doomed. Returns how many it deleted."""
        with self._lock:
            releases, self._releases = self._releases, []
            doomed = list(self._deletions.values())
            self._reserved_bytes -= sum(release.num_bytes for release in releases)
        if releases:
            published = [(path, release.file_bytes) for release in releases for path in release.published]
            for path, _ in published:
                self._odd_sizes.pop(path, None)
            unused_bytes = sum(release.unused_bytes for release in releases)
            account.release(self._staging.token, published, unused_bytes, self._reserved_bytes)
        count = 0
        for file in doomed:
            count += self._delete(account, file)
            with self._lock:
                self._deletions.pop(file.path, None)
        return count

    def _delete(self, account: Account, file: Deletion) -> bool:
        try:
            check_directory(self._root, file.path.partition("/")[0], self._access)
        except OSError:
            return False  # a link is in the way
        size_bytes = _delete(f"{self._root}/{file.path}", file.inode)
        if size_bytes is None:
            return False
        account.remove_file(file.path, self._counted_bytes(account, file.path, size_bytes, file.size_bytes), size_bytes)
        return True

    def _counted_bytes(self, account: Account, path: str, size_bytes: int, usual_bytes: int) -> int:
        """What the file at ``path`` is counted with, which now has ``size_bytes``; rather too little."""
        if account.num_recounts != self._our_recount:
            return min(size_bytes, usual_bytes)
        return self._odd_sizes.pop(path, usual_bytes)

    def _reserve(self, reservation: Reservation, protected: Collection[str], *, is_last: bool = False) -> bool:
        """Reserves as much as there is room for. ``False``: nothing, because a walk may find room first. ``is_last``:
        there is none to come."""
        reserved_bytes = 0
        may_walk = not is_last and time.monotonic() >= self._no_walk_before_s
        try:
            with self._hold() as held:
                account = held.account
                if self._max_bytes is not None:
                    if not account.is_counted:
                        if not is_last:
                            return False
                        reservation.keep(0)
                    reservation.keep((self._max_bytes - USAGE_FILE_BYTES) // reservation.file_bytes)
                    excess_bytes = account.used_bytes + reservation.num_bytes - self._max_bytes
                    if excess_bytes > 0:
                        if may_walk and not self._num_walks:
                            return False
                        self._evict(account, excess_bytes, protected, reservation)
                    room_bytes = max(0, self._max_bytes - account.used_bytes)
                    if may_walk and room_bytes < reservation.num_bytes:
                        reservation.drop_recycled()
                        return False
                    reservation.keep(room_bytes // reservation.file_bytes)
                with self._lock:
                    reserved_bytes = reservation.num_bytes
                    self._reserved_bytes += reserved_bytes
                    reservation.stamps_ns = self._stamps(len(reservation.temporaries))
                if not account.reserve(self._staging.token, reserved_bytes, self._reserved_bytes):
                    reservation.keep(0)
                    with self._lock:
                        self._reserved_bytes -= reserved_bytes
                        reserved_bytes = 0
        except OSError:
            with self._lock:
                self._reserved_bytes -= reserved_bytes
            raise
        return True

    def _evict(
        self, account: Account, num_bytes: int, protected: Collection[str], reservation: Reservation | None
    ) -> int:
        """Evicts files of ``num_bytes``, or all that may go. Passes over those that cannot be deleted. Returns the
        bytes freed. Raises ``OSError`` for a read-only file system."""
        skipped: list[tuple[str, int]] = []
        checked = set[str]()
        freed_bytes = num_failures = 0
        try:
            while freed_bytes < num_bytes and num_failures < _MAX_FAILURES:
                with self._lock:
                    oldest = self._recency.take_oldest()
                if oldest is None:
                    break
                if oldest[0] in protected:
                    skipped.append(oldest)
                    continue
                try:
                    if (directory := oldest[0].partition("/")[0]) not in checked:
                        check_directory(self._root, directory, self._access)
                        checked.add(directory)
                    freed_bytes += self._evict_file(account, *oldest, reservation)
                    num_failures = 0
                except OSError as exc:
                    if exc.errno == errno.EROFS:
                        skipped.append(oldest)
                        raise
                    num_failures += 1  # it stays, and stays counted; the next walk finds it again
        finally:
            with self._lock:
                self._recency.put_back(skipped)
        return freed_bytes

    def _evict_file(self, account: Account, path: str, stamp_ns: int, reservation: Reservation | None) -> int:
        """Deletes or recycles a file, unless another process has used it since ``stamp_ns``. Returns the bytes freed.
        Raises ``OSError``."""
        full = f"{self._root}/{path}"
        try:
            status = os.stat(full, follow_symlinks=False)
            if (used_ns := status.st_mtime_ns) > stamp_ns:
                with self._lock:
                    self._record([(path, used_ns)])
                return 0
            if reservation is None or not self._recycle(full, status, reservation):
                os.unlink(full)
        except FileNotFoundError:
            return 0
        # The order of events: the file loses its name, its bytes are subtracted, the count is written as the usage
        # file is released, and only then anything is written in its stead. So the count is never too low, wherever
        # a process dies.
        is_own = self._layout is not None and path.startswith(self._layout.directory + "/")
        usual_bytes = self._layout.file_bytes if is_own and self._layout is not None else status.st_size
        account.remove_file(path, self._counted_bytes(account, path, status.st_size, usual_bytes), status.st_size)
        self.num_evicted += 1
        with self._lock:
            self._recency.forget(path)
            self.evicted.append(path)
        return status.st_size

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

    # The walk, with ``_walking`` held.

    def _walk_for_room(self) -> None:
        """Walks, unless another thread does meanwhile. Returns without a walk if that takes too long."""
        num_walks, start_s = self._num_walks, time.monotonic()
        if not self._walking.acquire(timeout=_WALK_TIMEOUT_S):
            return
        try:
            if self._num_walks == num_walks:
                for _ in self._walk():
                    pass
        finally:
            self._walking.release()
        self._wait_for_count(start_s + _WALK_TIMEOUT_S)
        self._no_walk_before_s = time.monotonic() + _WALK_SHARE * (time.monotonic() - start_s)

    def _wait_for_count(self, end_s: float) -> None:
        """Waits while another process counts what has never been counted."""
        while time.monotonic() < end_s:
            with self._hold() as held:
                if held.account.is_counted or not held.account.is_recounting:
                    return
            time.sleep(_PAUSE_S)

    def _walk(self) -> Iterator[list[FileSeen]]:
        """Yields all files. Afterwards ``_recency`` is complete and, unless somebody else was counting, ``used_bytes``
        as well."""
        # The invariant: the count is never below what is on the disk and reserved. No process reserves or deletes while
        # the usage file is held. What happens between two steps in a fan that was passed is added to the recount by its
        # author (see ``Account``); what happens in a fan to come will be seen there.
        chunks, odd_sizes = list[list[tuple[int, str]]](), dict[str, int]()
        counts = self._begin_recount()
        with self._lock:
            self._recency.begin_walk()
        num_passed = 0
        try:
            while num_passed < NUM_FANS:
                found, num_passed, counts = self._step(num_passed, counts)
                for files in found:
                    if self._max_bytes is not None:
                        chunks += Recency.chunks_of(files)
                    odd_sizes |= self._odd_files(files)
                    yield files
                if counts and num_passed < NUM_FANS:
                    time.sleep(_PAUSE_S)
        finally:
            if counts:
                self._end_recount(odd_sizes)
        with self._lock:
            old = self._recency.end_walk(chunks)
            self._num_walks += 1
        for chunk in old:
            chunk.clear()  # one by one: freeing a million at once would stop all threads

    def _begin_recount(self) -> bool:
        try:
            self._staging.new_paths(0)  # whose lock shows that we are alive
            with self._hold() as held:
                self._bury_the_dead(held.account)
                return held.account.begin_recount(self._staging.token)
        except TimeoutError:
            return False  # a neighbour was stopped while it held the usage file; we can find files all the same
        except OSError as exc:
            if exc.errno != errno.EROFS:
                raise
            return False

    def _step(self, num_passed: int, counts: bool) -> tuple[list[list[FileSeen]], int, bool]:
        """Lists the next fans: the files, how many fans are passed then, and whether the recount goes on."""
        if counts:
            try:
                with self._hold() as held:
                    found, num_passed = self._list(num_passed)
                    num_bytes = sum(file.size_bytes for files in found for file in files)
                    return found, num_passed, held.account.pass_fans(self._staging.token, num_passed, num_bytes)
            except TimeoutError:
                pass
        return *self._list(num_passed), False

    def _list(self, num_passed: int) -> tuple[list[list[FileSeen]], int]:
        found, num_files = list[list[FileSeen]](), 0
        # A directory that is made after this look has files that will be released after this step.
        for fan, directories in directories_by_fan(self._root, first=num_passed):
            if num_files >= _STEP_FILES:
                return found, fan
            for directory in directories:
                if files := files_of(self._root, directory):
                    found.append(files)
                    num_files += len(files)
        return found, NUM_FANS

    def _odd_files(self, files: list[FileSeen]) -> dict[str, int]:
        layout = self._layout
        if layout is None or not files[0].path.startswith(layout.directory + "/"):
            return {}
        return {file.path: file.size_bytes for file in files if file.size_bytes != layout.file_bytes}

    def _end_recount(self, odd_sizes: dict[str, int]) -> None:
        """Takes over what the recount has found; a recount that was not finished is dropped."""
        try:
            with self._hold() as held:
                self._bury_the_dead(held.account)
                if held.account.end_recount(self._staging.token):
                    self._odd_sizes, self._our_recount = odd_sizes, held.account.num_recounts
        except OSError:
            pass  # it becomes stale, and somebody else begins anew

    def _bury_the_dead(self, account: Account) -> None:
        """Removes what dead writers have left, and their reservations."""
        sweep(self._root, self._access)
        account.keep_writers(writers_alive(self._root, self._access))


def _delete(full: str, inode: int | None) -> int | None:
    """Deletes a file and returns its size. ``None`` for what was never counted, and for what stays.

    An empty directory in its stead goes as well.
    """
    try:
        status = os.stat(full, follow_symlinks=False)
        if inode is not None and status.st_ino != inode:
            return None  # replaced by a good one
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(full)
            return None
        os.unlink(full)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
