# SPDX-License-Identifier: Apache-2.0
"""How many bytes a root holds: the count that all processes share, and the walk that recounts."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvoffload.tiering.stores.fs.format import SUFFIX
from kvoffload.tiering.stores.root import CONTROL_DIR, PRIVATE, Access, make_directory, open_control

__all__ = ["USAGE_FILE_BYTES", "Account", "FileSeen", "UsageFile", "walk"]


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A block file as a walk finds it. ``path`` is relative to the root."""

    path: str
    size_bytes: int
    used_ns: int
    """Time of last use (the file's mtime), nanoseconds since 1970."""


def walk(root: str, directory: str | None = None) -> Iterator[list[FileSeen]]:
    """Yields every block file of one namespace's ``directory``, or of all, one list per directory of files.

    Reads directories and inodes only. Skips what cannot be read and what is no block file.
    """
    for namespace in [directory] if directory is not None else _directories(root):
        if namespace == CONTROL_DIR:
            continue
        for fan in _directories(os.path.join(root, namespace)):
            if len(fan) == 2:
                yield _files(root, f"{namespace}/{fan}")


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _files(root: str, directory: str) -> list[FileSeen]:
    seen = []
    try:
        with os.scandir(os.path.join(root, directory)) as entries:
            for entry in entries:
                if not entry.name.endswith(SUFFIX):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    seen.append(FileSeen(f"{directory}/{entry.name}", status.st_size, status.st_mtime_ns))
    except OSError:
        pass
    return seen


_FIELDS = struct.Struct("<8s36sQ")
_MAGIC = b"KVOUSED1"
USAGE_FILE_BYTES = _FIELDS.size + 8


class Account:
    """The count of bytes in use. Read and change it while the usage file is held."""

    __slots__ = ("used_bytes",)

    def __init__(self, used_bytes: int) -> None:
        self.used_bytes = used_bytes

    def subtract(self, num_bytes: int) -> None:
        self.used_bytes = max(USAGE_FILE_BYTES, self.used_bytes - num_bytes)


class UsageFile:
    """The count of bytes in use, in one small file under a lock. Only its holder may change the count.

    Bytes are added before they are written and subtracted after they are deleted. A process that dies in between
    leaves the count too high, never too low, so the quota holds over every crash. The next process that finds itself
    alone counts anew.

    A file that is missing, damaged, or from before the host's last start is not trusted, as block files may be newer
    than it. Then ``recount`` gives the count.
    """

    def __init__(self, root: str, recount: Callable[[], int], access: Access = PRIVATE) -> None:
        self._root = root
        self._access = access
        self._path = os.path.join(root, CONTROL_DIR, "ledger")
        self._recount = recount
        self._lock = threading.Lock()
        self._fd = -1
        self._boot = _boot_id()
        self.last_used_bytes = 0
        """The count when this process last held the file."""

    @contextmanager
    def hold(self) -> Iterator[Account]:
        """Waits for all other threads and processes. Raises ``OSError`` where the root is gone or read-only."""
        with self._lock:
            fd = self._open_locked()
            try:
                stated_bytes = self._read(fd)
                account = Account(self._recount() if stated_bytes is None else stated_bytes)
                try:
                    yield account
                finally:
                    self.last_used_bytes = account.used_bytes
                    if account.used_bytes != stated_bytes:
                        if stated_bytes is None:
                            os.ftruncate(fd, 0)
                        self._write(fd, account.used_bytes)
            finally:
                try:
                    fcntl.flock(fd, fcntl.LOCK_UN)
                except OSError:
                    self._close()  # which ends the lock as well

    def close(self) -> None:
        with self._lock:
            self._close()

    def _open_locked(self) -> int:
        for _ in range(100):
            if self._fd < 0:
                if os.path.isdir(self._root):  # never made again here: it may be a mount that went away
                    make_directory(os.path.dirname(self._path), self._access)
                self._fd = self._open()
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            except OSError:
                self._close()
                raise
            # A root may be made anew. The file that is locked must be the one that other processes find.
            try:
                if os.path.samestat(os.lstat(self._path), os.fstat(self._fd)):
                    return self._fd
            except FileNotFoundError:
                pass
            self._close()
        raise OSError(f"{self._path} is replaced again and again")

    def _open(self) -> int:
        """Raises ``OSError`` for a link in the file's place, and for what is not ours."""
        control = open_control(self._root, self._access)
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                fd = os.open("ledger", flags | os.O_CREAT | os.O_EXCL, self._access.file_mode, dir_fd=control)
            except FileExistsError:
                fd = os.open("ledger", flags | os.O_CREAT, self._access.file_mode, dir_fd=control)
            else:
                if self._access.is_group:  # the umask took bits away
                    os.fchmod(fd, self._access.file_mode)
        finally:
            os.close(control)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not self._access.admits(status):
            os.close(fd)
            raise PermissionError(errno.EPERM, "is no file, or belongs to another user", self._path)
        return fd

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, fd: int) -> int | None:
        data = os.pread(fd, USAGE_FILE_BYTES + 1, 0)
        if len(data) != USAGE_FILE_BYTES or xxhash.xxh3_64_digest(data[:-8]) != data[-8:]:
            return None
        magic, boot, used_bytes = _FIELDS.unpack(data[:-8])
        return int(used_bytes) if magic == _MAGIC and boot == self._boot else None

    def _write(self, fd: int, used_bytes: int) -> None:
        body = _FIELDS.pack(_MAGIC, self._boot, max(used_bytes, USAGE_FILE_BYTES))
        os.pwrite(fd, body + xxhash.xxh3_64_digest(body), 0)


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:36].ljust(36)
    except OSError:
        return b"unknown".ljust(36)
