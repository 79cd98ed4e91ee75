# SPDX-License-Identifier: Apache-2.0
"""The quota of a root, kept directory by directory: any host lists any of them and deletes what is too much."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.fs.format import NUM_FANS, SUFFIX, TEMPORARY_PREFIX, fan_of, turn_of
from kvoffload.tiering.stores.root import CONTROL_DIR, Access

_DEAD_AFTER_NS = 3600 * 10**9
"""A temporary file as old as this is of a dead writer. Clocks of hosts are minutes apart at most."""
_FEWEST_FILES = 16
"""A quota with less room than this in each fan is kept over all of them together."""
_FREED_SHARE = 10
"""On a full disk a tenth of the listed files goes at once, so that few writes find the disk full."""
_FEWEST_CHOICES = 64
"""Files that are listed before the oldest of them go."""
_FAN = re.compile("[0-9a-f]{2}")
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FileSeen(NamedTuple):
    """A file as a listing finds it. A full store makes several for each block that it writes."""

    path: str
    """Relative to the root."""
    size_bytes: int
    written_ns: int
    """Its mtime, nanoseconds since 1970 by the clock of the file system. A use may set it too (``Quota``)."""

    @property
    def is_block(self) -> bool:
        return self.path.endswith(SUFFIX)


class Quota:
    """Keeps all files of all namespaces below ``root`` within ``max_bytes``, on average over time and directories.

    Each fan (the directories with the same two hex digits) has its share. One publish in ``_period`` of a fan lists it
    and deletes its oldest files. Which ones do so depends on the keys alone, so that a fan is listed after as many new
    files whether one host writes them or a hundred. Deleting a file twice is harmless: no host waits for another.

    Files are ordered by mtime: when they were written, or used after they had become old. Any number of threads. Errors
    of single files are passed over.
    """

    old_before_ns = 0
    """Files with an older mtime were the older half of the last listing that deleted any. Only they are dated anew when
    they are used: so few uses write to the disk, and blocks that are used together grow old together. A hint, which
    each process has for itself."""

    def __init__(self, root: str, max_bytes: int | None, file_bytes: int, access: Access) -> None:
        self._root = root
        self._access = access
        self._by_fan = max_bytes is not None and max_bytes >= _FEWEST_FILES * NUM_FANS * file_bytes
        self._share_bytes = (max_bytes or 0) // (NUM_FANS if self._by_fan else 1)
        # A fan grows by a tenth between two listings, on average, and 256 of them level each other out. All fans
        # together are counted more often, because nothing levels them out.
        files = self._share_bytes // file_bytes
        self._period = max(1, files // (10 if self._by_fan else 64)) if max_bytes is not None else 0
        # As low as makes it a twentieth less than the quota on average.
        margin = (self._period - 1) * (1.5 if self._by_fan else 3)
        self._kept_bytes = self._share_bytes - int(margin * file_bytes)

    def keep(self, published: Iterable[tuple[OffloadKey, str]]) -> list[str]:
        """After files were published: lists the fans whose turn it is. Returns the paths of deleted files."""
        if not self._period:
            return []
        paths = set[str]()
        due = set[int]()
        for key, path in published:
            paths.add(path)
            if turn_of(key) % self._period == 0:
                due.add(fan_of(path))
        if not due:
            return []
        listed: Iterable[Sequence[FileSeen]] = self._listed(list(due) if self._by_fan else range(NUM_FANS))
        if not self._by_fan:
            listed = [[file for files in listed for file in files]]
        gone = [self._delete_oldest(self._swept(files), self._kept_bytes, paths) for files in listed]
        return [file.path for files in gone for file in files]

    def make_room(self, path: str, num_bytes: int) -> list[str]:
        """Deletes old files on a full disk, of the fan of ``path`` and as many more as give a choice. Returns their
        paths: empty if no file of ours can be deleted."""
        seen, first = list[FileSeen](), fan_of(path)
        for files in self._listed([*range(first, NUM_FANS), *range(first)]):
            seen += files
            if len(seen) >= _FEWEST_CHOICES:
                break
        blocks = self._swept(seen)
        total_bytes = sum(file.size_bytes for file in blocks)
        kept_bytes = total_bytes - max(num_bytes, total_bytes // _FREED_SHARE)
        return [file.path for file in self._delete_oldest(blocks, kept_bytes)]

    def _delete_oldest(
        self, blocks: Collection[FileSeen], kept_bytes: int, newest: Collection[str] = ()
    ) -> list[FileSeen]:
        if gone := delete_oldest(self._root, blocks, kept_bytes, newest):
            self.old_before_ns = statistics.median_low(file.written_ns for file in blocks)
        return gone

    def _listed(self, fans: Sequence[int]) -> Iterator[list[FileSeen]]:
        """The files of one of ``fans`` after the other, of all namespaces."""
        namespaces = namespaces_of(self._root, self._access)
        if len(fans) < NUM_FANS:  # whose directories are opened sooner than listed
            directories = {fan: [f"{namespace}/{fan:02x}" for namespace in namespaces] for fan in fans}
        else:
            directories = fan_directories(self._root, namespaces)
        for fan in fans:
            yield [file for path in directories.get(fan, ()) for file in seen_in(self._root, path, self._access)]

    def _swept(self, seen: Sequence[FileSeen]) -> list[FileSeen]:
        """The blocks among the files that were ``seen``. Deletes what dead writers left."""
        sweep(self._root, seen)
        return [file for file in seen if file.is_block]


def namespaces_of(root: str, access: Access | None = None) -> list[str]:
    """The directories of all namespaces, sorted. Skips other directories, what cannot be read, and, with ``access``,
    what is not ours."""
    names = list[str]()
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "lost+found":
                continue
            with contextlib.suppress(OSError):  # deleted meanwhile
                if access is None or access.admits(entry.stat(follow_symlinks=False)):
                    names += [entry.name] if entry.is_dir(follow_symlinks=False) else []
    return sorted(names)


def fan_directories(root: str, namespaces: Iterable[str]) -> dict[int, list[str]]:
    """The directories of each fan that exist in ``namespaces``. Skips what cannot be read."""
    found: dict[int, list[str]] = {}
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            for name in filter(_FAN.fullmatch, list_names(root, namespace)):
                found.setdefault(int(name, 16), []).append(f"{namespace}/{name}")
    return found


def list_names(root: str, directory: str) -> list[str]:
    """The names in one directory, as the server of a network mount knows them; none if there is no such directory.
    Raises ``OSError``."""
    try:
        fd = os.open(f"{root}/{directory}", _OPEN)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def seen_in(root: str, directory: str, access: Access | None = None) -> list[FileSeen]:
    """The block files and temporary files in one directory. Skips what cannot be read, and a directory that is a link
    or, with ``access``, not ours."""
    try:
        fd = os.open(f"{root}/{directory}", _OPEN)
    except OSError:
        return []
    seen = []
    try:
        if access is not None and not access.admits(os.fstat(fd)):
            return []
        with contextlib.suppress(OSError), os.scandir(fd) as entries:
            for entry in entries:
                if not entry.name.endswith(SUFFIX) and not entry.name.startswith(TEMPORARY_PREFIX):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # deleted meanwhile
                if stat.S_ISREG(status.st_mode):
                    seen.append(FileSeen(f"{directory}/{entry.name}", status.st_size, status.st_mtime_ns))
    finally:
        os.close(fd)
    return seen


def delete_oldest(
    root: str, files: Collection[FileSeen], kept_bytes: int, newest: Collection[str] = ()
) -> list[FileSeen]:
    """Deletes the oldest of ``files`` until at most ``kept_bytes`` are left, and of those with one age the paths that
    are not among ``newest``. Returns those that are gone, by whomever. What cannot be deleted is passed over."""
    left_bytes, gone = sum(file.size_bytes for file in files), list[FileSeen]()
    for file in sorted(files, key=lambda file: (file.written_ns, file.path in newest, file.path)):
        if left_bytes <= kept_bytes:
            break
        try:
            os.unlink(f"{root}/{file.path}")
        except FileNotFoundError:
            pass  # another host had the same to do
        except OSError:
            continue
        left_bytes -= file.size_bytes
        gone.append(file)
    return gone


def sweep(root: str, seen: Iterable[FileSeen]) -> int:
    """Deletes the temporary files among ``seen`` that dead writers left. Returns how many."""
    temporaries = [file for file in seen if not file.is_block]
    now_ns = time_at(root) if temporaries else None
    if now_ns is None:
        return 0
    dead = [file for file in temporaries if now_ns - file.written_ns > _DEAD_AFTER_NS]
    return len(delete_oldest(root, dead, -1))  # all of them, empty ones too


def time_at(root: str) -> int | None:
    """The time by the clock of the file system, which need not be this host's: that of a file made now. Nanoseconds
    since 1970; ``None`` if no file can be made."""
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
