# SPDX-License-Identifier: Apache-2.0
"""What is on a root: its block files, by names and inodes alone.

How many bytes a root holds, agreed between all processes on it.
"""

from __future__ import annotations

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

from kvoffload.tiering.stores.fs.format import CONTROL_DIR, SUFFIX

__all__ = ["LEDGER_BYTES", "Account", "FileSeen", "Ledger", "walk"]


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A block file as a walk finds it; ``path`` is relative to the root."""

    path: str
    size_bytes: int
    used_ns: int
    """Time of last use (the file's mtime)."""


def walk(root: str, directory: str | None = None) -> Iterator[list[FileSeen]]:
    """Every block file, one list per directory of files; of one namespace's ``directory``, or of all.

    Reads directories and inodes only. What cannot be read or is not ours is left out.
    """
    for space in [directory] if directory is not None else _names(root):
        if space == CONTROL_DIR:
            continue
        for fan in _names(os.path.join(root, space)):
            if len(fan) == 2:
                yield _files(root, f"{space}/{fan}")


def _names(path: str) -> list[str]:
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
LEDGER_BYTES = _FIELDS.size + 8


class Account:
    """The shared count while it is held: ``used_bytes`` may be read and changed."""

    __slots__ = ("used_bytes",)

    def __init__(self, used_bytes: int) -> None:
        self.used_bytes = used_bytes


class Ledger:
    """One small file under a lock. Whoever holds it knows, and may change, the bytes in use.

    Bytes are added before they are written and taken off after they are deleted. A process that dies in between
    leaves the count too high, never too low, so that a quota holds over every crash; the next process that finds
    itself alone counts anew. A ledger that is missing, damaged or from before the host's last start (when files may
    be newer than it) is not believed: ``recount`` walks the files then.
    """

    def __init__(self, root: str, recount: Callable[[], int]) -> None:
        self._root = root
        self._path = os.path.join(root, CONTROL_DIR, "ledger")
        self._recount = recount
        self._lock = threading.Lock()
        self._fd = -1
        self._boot = _boot_id()

    @contextmanager
    def hold(self) -> Iterator[Account]:
        """Waits for all other threads and processes. Raises ``OSError`` where the root is gone or read-only."""
        with self._lock:
            fd = self._locked()
            try:
                before = self._read(fd)
                account = Account(self._recount() if before is None else before)
                try:
                    yield account
                finally:
                    if account.used_bytes != before:
                        if before is None:
                            os.ftruncate(fd, 0)
                        self._write(fd, account.used_bytes)
            finally:
                _flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _locked(self) -> int:
        """The file, locked, and still the one that other processes find: a root may be made anew."""
        for _ in range(100):
            if self._fd < 0:
                if os.path.isdir(self._root):  # never made again by us: it may be a mount that went away
                    os.makedirs(os.path.dirname(self._path), exist_ok=True)
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _flock(self._fd, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                    return self._fd
            except FileNotFoundError:
                pass
            self._drop()
        raise OSError(f"{self._path} is replaced again and again")

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, fd: int) -> int | None:
        data = os.pread(fd, LEDGER_BYTES + 1, 0)
        if len(data) != LEDGER_BYTES or xxhash.xxh3_64_digest(data[:-8]) != data[-8:]:
            return None
        magic, boot, used_bytes = _FIELDS.unpack(data[:-8])
        return int(used_bytes) if magic == _MAGIC and boot == self._boot else None

    def _write(self, fd: int, used_bytes: int) -> None:
        body = _FIELDS.pack(_MAGIC, self._boot, max(used_bytes, LEDGER_BYTES))
        os.pwrite(fd, body + xxhash.xxh3_64_digest(body), 0)


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:36].ljust(36)
    except OSError:
        return b"unknown".ljust(36)


def _flock(fd: int, operation: int) -> None:
    """Locks are advice between our own processes; a file system without them is for one process at a time."""
    try:
        fcntl.flock(fd, operation)
    except OSError:
        pass
