# SPDX-License-Identifier: Apache-2.0
"""The slabs of a root: which there are, how many bytes they take, and when one more may be made."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.root import (
    CONTROL_DIR,
    Access,
    make_directory,
    open_control,
    open_directory,
    try_lock,
)
from kvoffload.tiering.stores.slab.file import SlabFile, SlabUnfit, most_slabs
from kvoffload.tiering.stores.slab.format import NEW_PREFIX, PAYLOAD_SUFFIX, TABLE_SUFFIX, SlabFormat

__all__ = ["LOCK_NAME", "SlabDirectory", "SlabSeen", "namespaces_in", "root_lock", "slabs_in", "sweep", "try_remove"]

LOCK_NAME = "slabs"
_LEAST_SHARE = 8
"""A quota's rest is worth a slab of its own from one in this many slots of a whole slab on."""
_FREE_SHARE = 10
"""Without a quota, one in this many bytes of the disk stays free."""


@dataclass(frozen=True, slots=True)
class SlabSeen:
    """A slab as a listing finds it, or what is left of one that somebody was making."""

    name: str
    num_bytes: int
    """Of both files."""
    used_ns: int
    """When its table was last written to, nanoseconds since 1970."""

    @property
    def is_new(self) -> bool:
        return self.name.startswith(NEW_PREFIX)


def slabs_in(dir_fd: int) -> list[SlabSeen]:
    """Every slab in a directory, oldest use first. Half a slab counts too. Raises ``OSError``."""
    found: dict[str, tuple[int, int]] = {}
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            name, dot, suffix = entry.name.rpartition(".")
            if dot + suffix not in (PAYLOAD_SUFFIX, TABLE_SUFFIX):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # removed meanwhile
            if not stat.S_ISREG(status.st_mode):
                continue
            num_bytes, used_ns = found.get(name, (0, 0))
            found[name] = num_bytes + status.st_size, max(used_ns, status.st_mtime_ns if suffix == "table" else 0)
    return sorted((SlabSeen(name, *facts) for name, facts in found.items()), key=lambda slab: slab.used_ns)


@contextmanager
def root_lock(root: str, access: Access) -> Iterator[bool]:
    """Who holds it may make and remove slabs. Yields ``False`` if somebody else does: no process waits for it, as its
    holder may be stopped. Raises ``OSError``."""
    control = open_control(root, access)
    try:
        fd = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, access.file_mode, dir_fd=control)
    finally:
        os.close(control)
    try:
        if access.is_group:
            try:
                os.fchmod(fd, access.file_mode)  # the umask took bits away
            except PermissionError:
                pass  # a neighbour's, who has done it
        yield try_lock(fd)
    finally:
        os.close(fd)


def try_remove(name: str, dir_fd: int) -> bool:
    """Removes a slab unless a process writes to it. The caller holds the root's lock. Raises ``OSError``."""
    try:
        fd = os.open(name + TABLE_SUFFIX, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        fd = -1  # only a payload, which is not used without its table
    try:
        if fd >= 0:
            if not try_lock(fd):
                return False
            os.unlink(name + TABLE_SUFFIX, dir_fd=dir_fd)
        try:
            os.unlink(name + PAYLOAD_SUFFIX, dir_fd=dir_fd)
        except FileNotFoundError:
            pass
        return True
    finally:
        if fd >= 0:
            os.close(fd)


def sweep(dir_fd: int) -> int:
    """Removes what dead processes were making, and payloads without a table. The caller holds the root's lock."""
    num_removed = 0
    tables = {name.removesuffix(TABLE_SUFFIX) for name in os.listdir(dir_fd) if name.endswith(TABLE_SUFFIX)}
    for slab in slabs_in(dir_fd):
        if slab.is_new or slab.name not in tables:
            try:
                num_removed += try_remove(slab.name, dir_fd)
            except OSError:
                continue  # the next sweep tries again
    return num_removed


class SlabDirectory:
    """One namespace's directory under ``root``, and the quota of the root. Any number of threads but in ``grow``."""

    def __init__(self, root: str, layout: SlabFormat, max_bytes: int | None, access: Access) -> None:
        self.root = root
        self.access = access
        self._layout = layout
        self._max_bytes = max_bytes
        self._name = layout.directory
        self._fd = -1
        self._is_marked = False
        self._is_mount = os.path.ismount(root)
        self._open()

    @property
    def fd(self) -> int:
        return self._fd

    def check(self) -> bool:
        """Whether the directory that is open is still the one in its place. If not, opens the one that is there. Makes
        the control directory again if somebody removed it; raises ``OSError`` if that fails."""
        is_same = False
        if self._fd >= 0:
            try:
                is_same = os.path.samestat(os.lstat(f"{self.root}/{self._name}"), os.fstat(self._fd))
            except OSError:
                pass
        if is_same:
            make_directory(f"{self.root}/{CONTROL_DIR}", self.access)
            if not self._is_marked:
                self._mark()
            return True
        self.close()
        try:
            self._open()
        except (OSError, ConfigError):
            pass
        return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._is_marked = False

    def slabs(self) -> list[SlabSeen]:
        """Complete slabs of this namespace, oldest use first. Raises ``OSError``."""
        return [slab for slab in slabs_in(self._fd) if not slab.is_new]

    def open_slab(self, name: str) -> SlabFile:
        """Raises ``SlabUnfit`` or ``OSError``."""
        return SlabFile.open(name, self._layout, self._fd, self.access)

    def grow(self, name: str) -> SlabFile | None:
        """Makes one more slab, called ``name`` and locked, if the quota has room for it.

        ``None`` if it has none, or if another process is making one just now. Raises ``OSError``, also for a disk that
        is full.
        """
        self._check_root()
        if self._fd < 0:
            self._open()
        with root_lock(self.root, self.access) as is_locked:
            if not is_locked:
                return None
            wanted_slots = self._layout.slots_per_slab(self._max_bytes or _disk_bytes(self.root), most_slabs())
            wanted_bytes = self._layout.slab_bytes(wanted_slots)
            room_bytes = self._room_bytes()
            if room_bytes < wanted_bytes:
                room_bytes += self._take_over(wanted_bytes - room_bytes)
            num_slots = min(wanted_slots, self._layout.slots_in(room_bytes))
            if num_slots < max(1, wanted_slots // _LEAST_SHARE):
                return None
            return SlabFile.create(name, self._layout, num_slots, self._fd, self.access)

    def excess_bytes(self) -> int | None:
        """How far the root is above its quota, after unused slabs were removed, and all that is left of slabs
        in the making. ``None`` if somebody else has the root's lock. Raises ``OSError``."""
        with root_lock(self.root, self.access) as is_locked:
            if not is_locked:
                return None
            excess = -self._room_bytes()
            if self._max_bytes is None:
                return 0
            return max(0, excess - self._take_over(excess)) if excess > 0 else 0

    def remove(self, name: str) -> None:
        """Removes a slab of ours, which this process has locked. Raises ``OSError``."""
        for suffix in (TABLE_SUFFIX, PAYLOAD_SUFFIX):
            try:
                os.unlink(name + suffix, dir_fd=self._fd)
            except FileNotFoundError:
                pass

    def _open(self) -> None:
        path = f"{self.root}/{self._name}"
        self._check_root()
        make_directory(f"{self.root}/{CONTROL_DIR}", self.access)
        make_directory(path, self.access)
        root_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = open_directory(self._name, root_fd)
        finally:
            os.close(root_fd)
        if not self.access.admits(os.fstat(fd)):
            os.close(fd)
            raise PermissionError(f"{path} is not a directory of ours")
        self._fd = fd
        self._mark()

    def _check_root(self) -> None:
        """Raises ``FileNotFoundError`` if the root is gone, or its mount. It is never made again here, and nothing is
        written to a mount point without its mount: that may be the system's own disk."""
        if not os.path.isdir(self.root) or (self._is_mount and not os.path.ismount(self.root)):
            raise FileNotFoundError(f"{self.root} is gone")

    def _mark(self) -> None:
        """Shows other processes that this namespace is in use. Who removes slabs of it just now is not waited for."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._is_marked = True
        except OSError:
            self._is_marked = False

    # With the root's lock.

    def _room_bytes(self) -> int:
        used_bytes = 0
        for _, dir_fd in namespaces_in(self.root, self.access):
            sweep(dir_fd)
            if self._max_bytes is not None:
                used_bytes += sum(slab.num_bytes for slab in slabs_in(dir_fd))
        if self._max_bytes is not None:
            return self._max_bytes - used_bytes
        disk = os.statvfs(self.root)
        return disk.f_frsize * (disk.f_bavail - disk.f_blocks // _FREE_SHARE - 2)  # two files, each in whole blocks

    def _take_over(self, num_bytes: int) -> int:
        """Removes unused slabs, the oldest first: of namespaces without a process, and of another block size
        in ours. Returns the bytes that this freed."""
        freed_bytes = 0
        unused = list[tuple[int, str, SlabSeen]]()
        for directory, dir_fd in namespaces_in(self.root, self.access):
            if directory == self._name:
                unused += [(slab.used_ns, directory, slab) for slab in slabs_in(dir_fd) if self._is_foreign(slab)]
            elif _is_unused(dir_fd):
                unused += [(slab.used_ns, directory, slab) for slab in slabs_in(dir_fd)]
        unused.sort(key=lambda one: one[0])
        for _, directory, slab in unused:
            if freed_bytes >= num_bytes:
                break
            for _, dir_fd in namespaces_in(self.root, self.access, directory):
                try:
                    if directory == self._name or _is_unused(dir_fd):
                        freed_bytes += slab.num_bytes * try_remove(slab.name, dir_fd)
                except OSError:
                    continue
        return freed_bytes

    def _is_foreign(self, slab: SlabSeen) -> bool:
        try:
            self.open_slab(slab.name).close()
        except SlabUnfit:
            return True
        except OSError:
            pass
        return False


def namespaces_in(root: str, access: Access, only: str | None = None) -> Iterator[tuple[str, int]]:
    """Name and descriptor of each namespace's directory, sorted, never through a link. Each descriptor is closed when
    the next is asked for. No namespace's name begins with a dot."""
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in sorted(os.listdir(root_fd)) if only is None else [only]:
            if name.startswith("."):
                continue
            try:
                fd = open_directory(name, root_fd)
            except OSError:
                continue  # a link, a file, or not for us
            try:
                if access.admits(os.fstat(fd)):
                    yield name, fd
            finally:
                os.close(fd)
    finally:
        os.close(root_fd)


def _disk_bytes(root: str) -> int:
    disk = os.statvfs(root)
    return disk.f_frsize * disk.f_blocks


def _is_unused(dir_fd: int) -> bool:
    """Whether no process uses a namespace. Its directory is locked from now on, until ``dir_fd`` is closed."""
    try:
        return try_lock(dir_fd)
    except OSError:
        return False
