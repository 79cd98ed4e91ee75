# SPDX-License-Identifier: Apache-2.0
"""The contents of a root: its namespaces, their slabs, and the directory that a store has open."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.disk.file import SlabFile
from kvoffload.tiering.stores.disk.format import NEW_PREFIX, PAYLOAD_SUFFIX, TABLE_SUFFIX, SlabFormat, Stated, stated_in
from kvoffload.tiering.stores.root import (
    CONTROL_DIR,
    SAFE,
    Access,
    check_there,
    is_mount,
    make_directory,
    make_file,
    open_control,
    open_directory,
    try_lock,
)

LOCK_NAME = "slabs"
_NAME = re.compile(f"(?:{NEW_PREFIX})?[0-9a-f]{{1,16}}")
_FINE_NS, _COARSE_NS = 100_000_000, 1_000_000_000
"""Resolution of directory times: a few milliseconds, or up to two seconds on some file systems."""
_MAX_LISTINGS = 256
_START_BYTES = 64
_ENTRIES_TRIED = 16_384
"""Number of a directory's entries that are read to find a table. Another program's may contain millions."""
_WHOLE_NAME = re.compile("[0-9a-f]{16}")
"""The name that every slab gets, without a suffix."""
_TABLES_TRIED = 64
"""Number of a directory's tables whose headers are read before it counts as another program's."""


@dataclass(frozen=True, slots=True)
class SlabSeen:
    """A slab in a listing, complete or unfinished."""

    name: str
    num_bytes: int
    """Bytes of both files, at least as its header states: its owner may still write there after somebody truncated
    them."""
    used_ns: int
    """Time of the last write to its table, in nanoseconds since 1970."""
    inodes: tuple[int, int]
    """Inodes of table and payloads, 0 for a missing file."""

    @property
    def is_new(self) -> bool:
        return self.name.startswith(NEW_PREFIX)


def slabs_in(dir_fd: int) -> list[SlabSeen]:
    """Return every slab in a namespace's directory, oldest use first. An incomplete slab also counts, but not a table
    that does not begin like one of ours. Raises ``OSError``."""
    found: dict[str, dict[str, os.stat_result]] = {}
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            name, dot, suffix = entry.name.rpartition(".")
            if dot + suffix not in (PAYLOAD_SUFFIX, TABLE_SUFFIX) or not _NAME.fullmatch(name):
                continue  # not ours, so that nobody counts or removes it
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # removed meanwhile
            if stat.S_ISREG(status.st_mode):
                found.setdefault(name, {})[dot + suffix] = status
    slabs = list[SlabSeen]()
    for name, files in found.items():
        table, payload = files.get(TABLE_SUFFIX), files.get(PAYLOAD_SUFFIX)
        inodes = table.st_ino if table else 0, payload.st_ino if payload else 0
        num_bytes = sum(status.st_size for status in files.values())
        is_ours, stated = _proof(name, dir_fd) if table else (True, None)
        if table and payload and stated:
            num_bytes = max(num_bytes, table.st_size + stated.num_slots * stated.block_bytes)
        if is_ours:
            slabs.append(SlabSeen(name, num_bytes, table.st_mtime_ns if table else 0, inodes))
    return sorted(slabs, key=lambda slab: slab.used_ns)


def _proof(name: str, dir_fd: int) -> tuple[bool, Stated | None]:
    """Return whether a table is ours, and the contents of its header. A damaged table may lack either the magic number
    or the digest of its directory; after a power failure or a kill it may be blank."""
    try:
        fd = os.open(name + TABLE_SUFFIX, os.O_RDONLY | SAFE, dir_fd=dir_fd)
        try:
            start = os.pread(fd, _START_BYTES, 0)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return True, None  # removed meanwhile
    except OSError:
        return False, None
    if not start.strip(b"\0"):
        return True, None
    stated = stated_in(start)
    if stated is None or not (stated.has_magic or stated.is_of(_name_of(dir_fd))):
        return False, None
    return True, stated


def _name_of(dir_fd: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{dir_fd}"))


class Listings:
    """The contents of directories when they were last listed. A directory is listed again only if its time has changed,
    or if it changed so shortly before the listing that a later change may have the same time."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[int, list[SlabSeen]]] = {}

    def slabs(self, dir_fd: int) -> list[SlabSeen]:
        """Return the slabs as ``slabs_in`` does, but times of use may be old. Returns the previous list if no slab was
        added or removed. Raises ``OSError``."""
        now_ns, status = time.time_ns(), os.fstat(dir_fd)
        place, changed_ns = (status.st_dev, status.st_ino), status.st_mtime_ns
        if (known := self._known.pop(place, None)) is None or known[0] != changed_ns:
            known = changed_ns, slabs_in(dir_fd)
            if now_ns - changed_ns < (_FINE_NS if changed_ns % _COARSE_NS else 3 * _COARSE_NS):
                return known[1]
        self._known[place] = known
        while len(self._known) > _MAX_LISTINGS:
            self._known.pop(next(iter(self._known)), None)
        return known[1]


@contextmanager
def root_lock(root: str, access: Access) -> Iterator[bool]:
    """Hold the lock that allows a process to create and remove slabs. Yields ``False`` if another process holds it. No
    process waits for it, because the holder may be stopped. Raises ``OSError``."""
    control = open_control(root, access)
    try:
        fd = make_file(LOCK_NAME, control, access)
    finally:
        os.close(control)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def unlink_slab(name: str, dir_fd: int) -> None:
    """Remove a slab, complete or not, that ``slabs_in`` found. Raises ``OSError``."""
    if not _proof(name, dir_fd)[0]:
        return  # another file has this name now
    for suffix in (TABLE_SUFFIX, PAYLOAD_SUFFIX):  # payloads without their table are not used
        with suppress(FileNotFoundError):
            os.unlink(name + suffix, dir_fd=dir_fd)


def try_remove(name: str, dir_fd: int) -> bool:
    """Remove a slab unless a process writes to it. The caller holds the root's lock. Raises ``OSError``."""
    try:
        fd = os.open(name + TABLE_SUFFIX, os.O_RDWR | SAFE, dir_fd=dir_fd)
    except FileNotFoundError:
        unlink_slab(name, dir_fd)
        return True
    try:
        if is_free := try_lock(fd):
            unlink_slab(name, dir_fd)
        return is_free
    finally:
        os.close(fd)


def remove_slabs(root: str, access: Access, slabs: Iterable[tuple[str, SlabSeen]], num_bytes: int) -> int:
    """Remove slabs of these namespaces, in this order, until ``num_bytes`` are free. Skips slabs that are gone, and
    slabs that a process writes to. Returns the freed bytes. The caller holds the root's lock."""
    freed_bytes = 0
    for directory, slab in slabs:
        if freed_bytes >= num_bytes:
            break
        for _, dir_fd in namespaces_in(root, access, directory):
            with suppress(OSError):
                os.stat(slab.name + (TABLE_SUFFIX if slab.inodes[0] else PAYLOAD_SUFFIX), dir_fd=dir_fd)
                freed_bytes += slab.num_bytes * try_remove(slab.name, dir_fd)
    return freed_bytes


def sweep(dir_fd: int, slabs: Sequence[SlabSeen]) -> int:
    """Remove the unfinished ``slabs`` of dead processes, and payloads without a table. The caller holds the root's
    lock."""
    num_removed = 0
    for slab in slabs:
        if slab.is_new or not slab.inodes[0]:
            try:
                num_removed += try_remove(slab.name, dir_fd)
            except OSError:
                continue  # the next sweep tries again
    return num_removed


def namespaces_in(
    root: str, access: Access, only: str | None = None, own: str | None = None
) -> Iterator[tuple[str, int]]:
    """Yield name and descriptor of each namespace's directory, sorted, never through a link. Each descriptor is closed
    when the next is requested. No namespace's name begins with a dot. A directory belongs to a namespace if a table in
    it says so; ``only`` and ``own`` always do."""
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in sorted(os.listdir(root_fd)) if only is None else [only]:
            if name.startswith("."):
                continue
            try:
                fd = open_directory(name, root_fd)
            except OSError:
                continue  # a link, a file, or not accessible
            try:
                if access.admits(os.fstat(fd)) and (name in (own, only) or _holds_slabs(name, fd)):
                    yield name, fd
            finally:
                os.close(fd)
    finally:
        os.close(root_fd)


def _holds_slabs(directory: str, dir_fd: int) -> bool:
    """Return whether a table in this directory belongs to this namespace, or whether a slab's table has no
    content."""
    num_tried = 0
    try:
        with os.scandir(dir_fd) as entries:
            for entry in itertools.islice(entries, _ENTRIES_TRIED):
                name, _, suffix = entry.name.rpartition(".")
                if f".{suffix}" == TABLE_SUFFIX and _NAME.fullmatch(name) and entry.is_file(follow_symlinks=False):
                    is_ours, stated = _proof(name, dir_fd)
                    if stated is not None and stated.is_of(directory):
                        return True
                    is_blank = is_ours and stated is None and _WHOLE_NAME.fullmatch(name) is not None
                    if is_blank and _exists(name + PAYLOAD_SUFFIX, dir_fd):
                        return True  # as after a power failure
                    if (num_tried := num_tried + 1) >= _TABLES_TRIED:
                        break
    except OSError:
        pass
    return False


def _exists(name: str, dir_fd: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError:
        return False


def is_unused(dir_fd: int) -> bool:
    """Return whether no process uses a namespace. If so, its directory stays locked until ``dir_fd`` is closed."""
    try:
        return try_lock(dir_fd)
    except OSError:
        return False


class SlabDirectory:
    """One namespace's directory under ``root``. Any number of threads may use it. Only ``check`` and ``close`` close
    the descriptor ``fd``, and one thread at a time calls methods that use it."""

    def __init__(self, root: str, layout: SlabFormat, access: Access) -> None:
        self.root = root
        self.name = layout.directory
        self.access = access
        self.listings = Listings()
        self._layout = layout
        self._fd = -1
        self._lock = threading.Lock()
        """Lock that is held while ``_fd`` is replaced or duplicated."""
        self._is_closed = False
        self._is_marked = False
        self._is_mount = is_mount(root)
        self._open()

    @property
    def fd(self) -> int:
        return self._fd

    def check(self) -> bool:
        """Return whether the open directory is still the one at its path. If not, open the one that is there. Creates
        the control directory again if it was removed; raises ``OSError`` if that fails."""
        is_same = False
        if self._fd >= 0:
            try:
                is_same = os.path.samestat(os.lstat(f"{self.root}/{self.name}"), os.fstat(self._fd))
            except OSError:
                pass
        if is_same:
            # Created relative to the open directory, not at the root's path, because the root may have just been
            # unmounted.
            root_fd = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                make_directory(f"/proc/self/fd/{root_fd}/{CONTROL_DIR}", self.access)
            finally:
                os.close(root_fd)
            if not self._is_marked:
                self._mark()
            return True
        with self._lock:
            self._close()
            try:
                self._open()
            except (OSError, ConfigError):
                pass
        return False

    def close(self) -> None:
        """Close the directory permanently."""
        with self._lock:
            self._is_closed = True
            self._close()

    def slabs(self) -> list[SlabSeen]:
        """Return the slabs of this namespace, including unfinished ones. Returns the previous list if no slab was added
        or removed. Raises ``OSError``."""
        return self.listings.slabs(self._fd)

    def open_slab(self, name: str) -> SlabFile:
        """Open a slab. Raises ``SlabRefused`` or ``OSError``."""
        return SlabFile.open(name, self._layout, self._fd, self.access)

    def remove(self, name: str) -> None:
        """Remove a slab of ours, which this process has locked. Raises ``OSError``."""
        unlink_slab(name, self._fd)

    @contextmanager
    def duplicate(self) -> Iterator[int]:
        """Return a descriptor of the directory that ``check`` does not close. Raises ``OSError``, also if the root is
        gone."""
        check_there(self.root, self._is_mount)
        with self._lock:
            if self._is_closed:
                raise OSError(errno.ESHUTDOWN, "the store is closed", self.root)
            if self._fd < 0:
                self._open()
            fd = os.dup(self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._is_marked = False

    def _open(self) -> None:
        path = f"{self.root}/{self.name}"
        check_there(self.root, self._is_mount)
        make_directory(f"{self.root}/{CONTROL_DIR}", self.access)
        make_directory(path, self.access)
        root_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = open_directory(self.name, root_fd)
        finally:
            os.close(root_fd)
        if not self.access.admits(os.fstat(fd)):
            os.close(fd)
            raise PermissionError(f"{path} is not a directory of ours")
        self._fd = fd
        self._mark()

    def _mark(self) -> None:
        """Show other processes that this namespace is in use. Does not wait for a process that removes its slabs."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._is_marked = True
        except OSError:
            self._is_marked = False
