# SPDX-License-Identifier: Apache-2.0
"""The quota of a root, kept directory by directory. Any host lists any of them and deletes the excess."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import statistics
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.fs.format import NUM_FANS, SUFFIX, TEMPORARY_PREFIX, fan_of, is_our_name, turn_of
from kvoffload.tiering.stores.fs.owned import NAMES_AT_ONCE, Namespaces, fans_in, is_ours, names_in
from kvoffload.tiering.stores.root import ANYBODYS, CONTROL_DIR, SAFE, Access, Directories

_DEAD_AFTER_NS = 3600 * 10**9
"""Age at which a temporary file belongs to a dead writer. Clocks of hosts differ by at most a few minutes."""
_FEWEST_FILES = 16
"""A quota that allows fewer files than this in each fan is kept over all fans together."""
_FREED_SHARE = 10
"""A full disk deletes a tenth of the listed files at once, so that few writes find the disk full."""
_FEWEST_CHOICES = 64
"""Number of files to list before the oldest of them are deleted."""
_EVERY_FAN = frozenset(range(NUM_FANS))
_DIRECTORY_COSTS = 4
"""Listing a directory counts as this many files."""
_MOST_IN_A_WRITE = 4096
"""Number of files that one write lists or deletes. A slow mount needs a quarter of a millisecond for each."""
_STEP_NS = 1000
"""Difference between the times of two files if this host's clock is behind the root's."""
_AHEAD_NS = 60 * 10**9
"""A root whose newest file is dated so far ahead of its clock has files that a wrong clock has dated."""


class FileSeen(NamedTuple):
    """A file in a listing. A full store creates several of these for each block that it writes."""

    path: str
    """Relative to the root."""
    size_bytes: int
    written_ns: int
    """Its mtime, in nanoseconds since 1970 by the clock of the file system. A use may also set it (``Quota``)."""

    @property
    def is_block(self) -> bool:
        return self.path.endswith(SUFFIX)


_Part = tuple[int, Sequence[FileSeen]]
"""A part of a listing: how many files it listed or deleted, and the files that are gone."""


class Quota:
    """The quota ``max_bytes`` for all files of all namespaces below ``root``. It holds on average over time and
    directories.

    Each fan (the directories with the same two hex digits) gets its share. One publish in ``_period`` of a fan lists it
    and deletes its oldest files. The keys alone decide which publishes do so. So a fan is listed after the same number
    of new files, whether one host writes them or a hundred. Deleting a file twice is harmless, so no host waits for
    another. A write does a limited part of a large listing; the next writes of any thread do the rest.

    Files are ordered by mtime: the time of writing, or of a use after they became old. A file never gets an earlier
    time than the newest file in any listing so far. So the order follows the order of writing, even if a clock is
    ahead, behind or jumps. Any number of threads may call it. Errors of single files are ignored.
    """

    old_before_ns = 0
    """Files with an earlier mtime were the older half of the last listing that deleted any. Only these get a new time
    when they are used, so that few uses write to the disk, and blocks that are used together age together. This is a
    hint, private to each process."""

    def __init__(self, root: str, max_bytes: int | None, file_bytes: int, access: Access, own: str = "") -> None:
        """``own`` is the directory of this process's namespace."""
        self._root = root
        self._access = access
        self._by_fan = max_bytes is not None and max_bytes >= _FEWEST_FILES * NUM_FANS * file_bytes
        self._share_bytes = (max_bytes or 0) // (NUM_FANS if self._by_fan else 1)
        # A fan grows by a tenth between two listings on average, and the 256 fans balance each other. All fans together
        # are counted more often, because nothing balances them.
        files = self._share_bytes // file_bytes
        self._period = max(1, files // (10 if self._by_fan else 64)) if max_bytes is not None else 0
        # This low, so that the average is a twentieth below the quota.
        margin = (self._period - 1) * (1.5 if self._by_fan else 3)
        self._kept_bytes = self._share_bytes - int(margin * file_bytes)
        self._newest_ns = self._now_ns = 0
        """The time of the newest file in any listing so far, and the clock of the root at the last write."""
        self._lock = threading.Lock()
        self._begun: deque[tuple[frozenset[int], Generator[_Part, None, None]]] = deque()
        """Unfinished listings, by their fans. A thread removes one while it works on it."""
        self._namespaces = Namespaces(root, access, own)

    def date(self, fd: int) -> None:
        """Set the time of a file that was just written or used: now, but no earlier than the newest file of the
        root."""
        self._now_ns = now_ns = os.fstat(fd).st_mtime_ns
        if now_ns < self._newest_ns:
            # Some mounts permit no dates: then the file may be deleted early.
            with contextlib.suppress(OSError):
                self._make_newest(fd)

    def use(self, fd: int) -> None:
        """Set the time of a file that was used. A file of another member of the group can only get the time of the
        clock, so it keeps its time if the clock is behind."""
        if self._newest_ns >= self._now_ns + _AHEAD_NS:
            self._make_newest(fd)
            return
        os.utime(fd)
        self.date(fd)

    def _make_newest(self, fd: int) -> None:
        """Give a file a later time than the newest file of the root. Raises ``OSError``."""
        with self._lock:
            self._newest_ns = newest_ns = self._newest_ns + _STEP_NS
        os.utime(fd, ns=(newest_ns, newest_ns))

    def keep(self, published: Iterable[tuple[OffloadKey, str]]) -> list[str]:
        """List the fans that are due, after files were published. Returns the paths of deleted files."""
        if not self._period:
            return []
        paths = set[str]()
        due = set[int]()
        for key, path in published:
            paths.add(path)
            if turn_of(key) % self._period == 0:
                due.add(fan_of(path))
        listings = [frozenset((fan,)) for fan in due] if self._by_fan else [_EVERY_FAN] if due else []
        with self._lock:
            for fans in listings:
                if all(fans != begun for begun, _ in self._begun):
                    self._begun.append((fans, self._tidy(sorted(fans), paths)))
        return self._go_on()

    def close(self) -> None:
        """Close the directories whose listings are unfinished."""
        with self._lock:
            begun, self._begun = self._begun, deque()
        for _, listing in begun:
            listing.close()

    def make_room(self, path: str, num_bytes: int) -> list[str]:
        """Delete old files on a full disk, from the fan of ``path`` and enough others to offer a choice. Returns their
        paths, or none if no file of ours can be deleted."""
        seen, first = list[FileSeen](), fan_of(path)
        for _, files in self._listed([*range(first, NUM_FANS), *range(first)]):
            seen += files
            if len(seen) >= _FEWEST_CHOICES:
                break
        blocks = self._swept(seen)
        total_bytes = sum(file.size_bytes for file in blocks)
        kept_bytes = total_bytes - max(num_bytes, total_bytes // _FREED_SHARE)
        gone = delete_oldest(self._root, blocks, kept_bytes, (), self._access)
        self._note_old(blocks, bool(gone))
        return [file.path for file in gone]

    def _go_on(self) -> list[str]:
        """Continue the unfinished listings, as far as one write may."""
        gone, num_done = list[str](), 0
        while num_done < _MOST_IN_A_WRITE:
            with self._lock:
                if not self._begun:
                    break
                fans, listing = self._begun.popleft()
            for cost, deleted in listing:
                num_done += cost
                gone += [file.path for file in deleted]
                if num_done >= _MOST_IN_A_WRITE:
                    with self._lock:
                        self._begun.appendleft((fans, listing))
                    break
        return gone

    def _tidy(self, fans: Sequence[int], newest: Collection[str]) -> Generator[_Part, None, None]:
        """List fans, and delete the oldest of their files if they exceed the quota. Yields after each part of the
        work."""
        seen, cost = list[FileSeen](), 0
        for num_names, files in self._listed(fans):
            seen += files
            cost += num_names + _DIRECTORY_COSTS
            if cost >= NAMES_AT_ONCE:
                yield cost, ()
                cost = 0
        self._date_again([file for file in seen if file.path in newest and file.written_ns < self._newest_ns])
        blocks = self._swept(seen)
        left_bytes, order = sum(file.size_bytes for file in blocks), deque(in_order(blocks, newest))
        gone_at_all = False
        while order and left_bytes > self._kept_bytes:
            chosen, chosen_bytes = list[FileSeen](), 0
            while order and len(chosen) < NAMES_AT_ONCE and left_bytes - chosen_bytes > self._kept_bytes:
                chosen.append(order.popleft())
                chosen_bytes += chosen[-1].size_bytes
            gone = delete_oldest(self._root, chosen, -1, (), self._access)
            left_bytes -= sum(file.size_bytes for file in gone)
            gone_at_all |= bool(gone)
            yield cost + len(chosen), gone
            cost = 0
        self._note_old(blocks, gone_at_all)
        yield cost, ()

    def _date_again(self, files: Iterable[FileSeen]) -> None:
        """Set the times of files that were written just before a listing found a newer one."""
        with Directories(self._root, self._access) as opened:
            for file in files:
                with contextlib.suppress(OSError):
                    fd = os.open(opened.path(file.path), os.O_RDONLY | SAFE)
                    try:
                        self.date(fd)
                    finally:
                        os.close(fd)

    def _note_old(self, blocks: Collection[FileSeen], has_deleted: bool) -> None:
        if has_deleted:
            self.old_before_ns = statistics.median_low(file.written_ns for file in blocks)

    def _listed(self, fans: Sequence[int]) -> Iterator[tuple[int, list[FileSeen]]]:
        """Yield the files of ``fans`` one after the other, of all namespaces, a few at a time, and the number of names
        that were read for them. The others belong to other programs."""
        namespaces = self._namespaces.known()
        if len(fans) < NUM_FANS:  # opening these few directories is faster than listing all
            directories = {fan: [f"{namespace}/{fan:02x}" for namespace in namespaces] for fan in fans}
        else:
            directories = fan_directories(self._root, namespaces)
        for fan in fans:
            for directory in directories.get(fan, ()):
                with contextlib.suppress(OSError):
                    for names in names_in(self._root, directory, self._access):
                        seen = seen_in(self._root, directory, self._access, names)
                        newest_ns = max((file.written_ns for file in seen), default=0)
                        with self._lock:
                            self._newest_ns = max(self._newest_ns, newest_ns)
                        yield len(names), seen

    def _swept(self, seen: Sequence[FileSeen]) -> list[FileSeen]:
        """Return the blocks among the files that were ``seen``. Deletes temporary files of dead writers."""
        sweep(self._root, seen, self._access)
        return [file for file in seen if file.is_block]


def fan_directories(root: str, namespaces: Iterable[str]) -> dict[int, list[str]]:
    """Return the existing directories of each fan in ``namespaces``. Skips unreadable ones."""
    found: dict[int, list[str]] = {}
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            for name in fans_in(root, namespace):
                found.setdefault(int(name, 16), []).append(f"{namespace}/{name}")
    return found


def seen_in(
    root: str, directory: str, access: Access | None = None, names: Sequence[str] | None = None
) -> list[FileSeen]:
    """Return the block files and temporary files in one directory: the ones among ``names``, or all. Skips unreadable
    files, and a directory that is a link or, with ``access``, not ours."""
    seen, fan = list[FileSeen](), directory.rpartition("/")[2]
    with Directories(root, access or ANYBODYS) as opened, contextlib.suppress(OSError):
        for name in chain.from_iterable(names_in(root, directory, access)) if names is None else names:
            if not is_our_name(fan, name):
                continue
            path = f"{directory}/{name}"
            with contextlib.suppress(OSError):  # deleted meanwhile
                status = os.lstat(opened.path(path))
                if stat.S_ISREG(status.st_mode):
                    seen.append(FileSeen(path, status.st_size, status.st_mtime_ns))
    return seen


def in_order(files: Iterable[FileSeen], newest: Collection[str] = ()) -> list[FileSeen]:
    """Return the files sorted from oldest to newest. The paths in ``newest`` are last, regardless of their times."""
    return sorted(files, key=lambda file: (file.path in newest, file.written_ns, file.path))


def delete_oldest(
    root: str,
    files: Collection[FileSeen],
    kept_bytes: int,
    newest: Collection[str] = (),
    access: Access | None = None,
) -> list[FileSeen]:
    """Delete the oldest of ``files``, ``in_order``, until at most ``kept_bytes`` are left. Returns the files that are
    gone, even if another process deleted them. Skips files that cannot be deleted, and files with a block's name but
    without a block's header."""
    left_bytes, gone = sum(file.size_bytes for file in files), list[FileSeen]()
    with Directories(root, access or ANYBODYS) as opened:
        for file in in_order(files, newest):
            if left_bytes <= kept_bytes:
                break
            try:
                path = opened.path(file.path)
                if file.is_block and not is_ours(path):
                    continue
                os.unlink(path)
            except FileNotFoundError:
                pass  # another host has deleted it
            except OSError:
                continue
            left_bytes -= file.size_bytes
            gone.append(file)
    return gone


def sweep(root: str, seen: Iterable[FileSeen], access: Access | None = None) -> int:
    """Delete the temporary files among ``seen`` that dead writers left. Returns their number."""
    temporaries = [file for file in seen if not file.is_block]
    now_ns = time_at(root) if temporaries else None
    if now_ns is None:
        return 0
    dead = [file for file in temporaries if now_ns - file.written_ns > _DEAD_AFTER_NS]
    return len(delete_oldest(root, dead, -1, (), access))  # all of them, including empty ones


def time_at(root: str) -> int | None:
    """Return the time by the clock of the file system, which may differ from this host's. It is the time of a newly
    created file, in nanoseconds since 1970; ``None`` if no file can be created."""
    path = f"{root}/{CONTROL_DIR}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError:
        return None
