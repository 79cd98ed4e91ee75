# SPDX-License-Identifier: Apache-2.0
"""How many bytes a root holds: the count that all processes share, and the walk over its files."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvoffload.tiering.stores.fs.format import SUFFIX
from kvoffload.tiering.stores.root import CONTROL_DIR, PRIVATE, Access, make_directory, open_control, try_lock

__all__ = [
    "NUM_FANS",
    "USAGE_FILE_BYTES",
    "Account",
    "FileSeen",
    "UsageFile",
    "directories_by_fan",
    "fan_of",
    "files_of",
    "walk",
]

NUM_FANS = 256
"""Directories of files per namespace."""


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A block file as a walk finds it. ``path`` is relative to the root."""

    path: str
    size_bytes: int
    used_ns: int
    """Time of last use (the file's mtime), nanoseconds since 1970."""


def walk(root: str, directory: str | None = None) -> Iterator[list[FileSeen]]:
    """Yields every block file of one namespace's ``directory``, or of all, one list per directory of files.

    Reads directories and inodes only. Skips what cannot be read and what is not a block file.
    """
    for _, directories in directories_by_fan(root, [directory] if directory is not None else None):
        for one in directories:
            if files := files_of(root, one):
                yield files


def directories_by_fan(
    root: str, namespaces: Iterable[str] | None = None, first: int = 0
) -> Iterator[tuple[int, list[str]]]:
    """The directories of files as they are now, for each fan from ``first`` on: its number, and those of all
    ``namespaces`` (default: all there are), relative to the root."""
    found: dict[str, list[str]] = {}
    for namespace in _directories(root) if namespaces is None else namespaces:
        if namespace != CONTROL_DIR:
            for name in _directories(os.path.join(root, namespace)):
                found.setdefault(name, []).append(f"{namespace}/{name}")
    for fan in range(first, NUM_FANS):
        yield fan, found.get(f"{fan:02x}", [])


def fan_of(path: str) -> int:
    """The number of the directory that a block file lies in."""
    return int(path.split("/", 2)[1], 16)


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def files_of(root: str, directory: str) -> list[FileSeen]:
    """The block files in one directory of files."""
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


_MAGIC = b"KVOUSED2"
_HEAD = struct.Struct("<8s8sQBxH8sQQQIH")
_WRITER = struct.Struct("<8sQ")
_SUM_BYTES = 8
_USUAL_WRITERS, _MAX_WRITERS = 3, 128
USAGE_FILE_BYTES = _HEAD.size + _USUAL_WRITERS * _WRITER.size + _SUM_BYTES
"""Bytes of the usage file, while no more than three writers have reservations."""
_MOST_BYTES = _HEAD.size + _MAX_WRITERS * _WRITER.size + _SUM_BYTES
_NOBODY = bytes(8)
_STALE_NS = 10_000_000_000
"""A recount that made no step for so long is another's to begin anew: who counted was stopped, or is dead."""
_FIRST_POLL_S, _LONGEST_POLL_S = 0.00005, 0.002


class Account:
    """What the usage file says. Read and change it while the file is held.

    A recount walks the root fan by fan and lets the file go in between. So every change of a file in a fan that it has
    passed is made to ``recounted_bytes`` as well, whoever makes it.
    """

    __slots__ = (
        "beat_ns",
        "doubtful_bytes",
        "is_counted",
        "num_passed",
        "num_recounts",
        "recounted_bytes",
        "recounter",
        "used_bytes",
        "writers",
    )

    def __init__(self) -> None:
        self.used_bytes = USAGE_FILE_BYTES
        """Bytes of all files and reservations. Never too low, once ``is_counted``."""
        self.is_counted = False
        """Otherwise ``used_bytes`` lacks what was there before the usage file was made."""
        self.writers: dict[bytes, int] = {}
        """The bytes that each writer has reserved, as far as it has not ended the reservations."""
        self.recounter = _NOBODY
        """The writer that counts anew."""
        self.num_passed = 0
        self.recounted_bytes = 0
        self.doubtful_bytes = 0
        """Those of ``recounted_bytes`` that may be counted twice."""
        self.beat_ns = 0
        self.num_recounts = 0
        """Those that have ended, as a number that is another after each."""

    # Changes of files.

    def remove_file(self, path: str, counted_bytes: int, real_bytes: int) -> None:
        """A file was deleted that was counted with ``counted_bytes``."""
        self._subtract(counted_bytes)
        if self._has_passed(path):
            self.recounted_bytes -= real_bytes

    def _subtract(self, num_bytes: int) -> None:
        self.used_bytes = max(USAGE_FILE_BYTES, self.used_bytes - num_bytes)

    # Reservations.

    def reserve(self, writer: bytes, num_bytes: int, reserved_bytes: int) -> bool:
        """``writer`` reserves ``num_bytes``, with which it has ``reserved_bytes``. ``False`` if too many others have
        reservations."""
        if writer not in self.writers and len(self.writers) >= _MAX_WRITERS:
            return False
        self.used_bytes += num_bytes
        self._set_reserved(writer, reserved_bytes)
        return True

    def release(
        self, writer: bytes, published: Iterable[tuple[str, int]], unused_bytes: int, reserved_bytes: int
    ) -> None:
        """Reservations of ``writer`` have ended, some time since they were made: files of these sizes were published,
        ``unused_bytes`` are free again, and ``reserved_bytes`` are left."""
        self._subtract(unused_bytes)
        for path, num_bytes in published:
            if self._has_passed(path):  # perhaps it was published before, and seen
                self.recounted_bytes += num_bytes
                self.doubtful_bytes += num_bytes
        self._set_reserved(writer, reserved_bytes)

    def _set_reserved(self, writer: bytes, num_bytes: int) -> None:
        before = self._extra_bytes
        if num_bytes:
            self.writers[writer] = num_bytes
        else:
            self.writers.pop(writer, None)
        self.used_bytes += self._extra_bytes - before

    def keep_writers(self, alive: Collection[bytes]) -> None:
        """Forgets the reservations and the recount of all others: they are dead."""
        for writer in self.writers.keys() - alive:
            num_bytes = self.writers[writer]
            self._set_reserved(writer, 0)
            if self.recounter != _NOBODY:
                # It may have published files in fans that the recount has passed.
                self.recounted_bytes += num_bytes
                self.doubtful_bytes += num_bytes
        if self.recounter not in alive:
            self.recounter, self.num_passed = _NOBODY, 0

    # The recount.

    @property
    def is_recounting(self) -> bool:
        """Somebody counts anew, and was not stopped meanwhile."""
        return self.recounter != _NOBODY and abs(time.monotonic_ns() - self.beat_ns) < _STALE_NS

    def begin_recount(self, writer: bytes) -> bool:
        """``False`` if another is under way."""
        if self.is_recounting:
            return False
        self.recounter, self.num_passed, self.recounted_bytes, self.doubtful_bytes = writer, 0, USAGE_FILE_BYTES, 0
        self.beat_ns = time.monotonic_ns()
        return True

    def pass_fans(self, writer: bytes, num_passed: int, num_bytes: int) -> bool:
        """``writer`` has counted ``num_bytes`` in its next fans. ``False`` if another has begun anew since."""
        if self.recounter != writer:
            return False
        self.num_passed = num_passed
        self.recounted_bytes += num_bytes
        self.beat_ns = time.monotonic_ns()
        return True

    def end_recount(self, writer: bytes) -> bool:
        """Takes over what ``writer`` has found. ``False`` if it did not pass all fans, or another has begun anew."""
        if self.recounter != writer:
            return False
        if is_whole := self.num_passed == NUM_FANS:
            # The truth lies between the two: what is reserved may be published, and seen, already.
            most = self.recounted_bytes + self._extra_bytes + sum(self.writers.values())
            least = self.recounted_bytes + self._extra_bytes - self.doubtful_bytes
            counted = min(max(self.used_bytes, least), most) if self.is_counted else most
            self.used_bytes, self.is_counted = max(USAGE_FILE_BYTES, counted), True
            self.num_recounts = (self.num_recounts + 1) % (1 << 32)
        self.recounter, self.num_passed, self.recounted_bytes, self.doubtful_bytes = _NOBODY, 0, 0, 0
        return is_whole

    def _has_passed(self, path: str) -> bool:
        return self.num_passed > 0 and fan_of(path) < self.num_passed

    # The file.

    @property
    def _extra_bytes(self) -> int:
        """What the usage file itself has more than ``USAGE_FILE_BYTES``."""
        return max(0, len(self.writers) - _USUAL_WRITERS) * _WRITER.size

    def pack(self, boot: bytes) -> bytes:
        writers = b"".join(_WRITER.pack(*one) for one in self.writers.items())
        head = _HEAD.pack(
            _MAGIC,
            boot,
            max(self.used_bytes, USAGE_FILE_BYTES),
            self.is_counted,
            self.num_passed,
            self.recounter,
            max(0, self.recounted_bytes),
            self.doubtful_bytes,
            self.beat_ns,
            self.num_recounts,
            len(self.writers),
        )
        body = (head + writers).ljust(USAGE_FILE_BYTES - _SUM_BYTES, b"\0")
        return body + xxhash.xxh3_64_digest(body)

    @classmethod
    def parse(cls, data: bytes, boot: bytes) -> Account | None:
        """``None`` for a file that is damaged, from another version or from before the host's last start."""
        if len(data) < USAGE_FILE_BYTES or xxhash.xxh3_64_digest(data[:-_SUM_BYTES]) != data[-_SUM_BYTES:]:
            return None
        account = cls()
        magic, stated, used, counted, passed, name, *recount, count = _HEAD.unpack_from(data)
        if magic != _MAGIC or stated != boot or count > _MAX_WRITERS:
            return None
        account.used_bytes, account.is_counted = used, bool(counted)
        account.recounter, account.num_passed = name, passed
        account.recounted_bytes, account.doubtful_bytes, account.beat_ns, account.num_recounts = recount
        account.writers = dict(_WRITER.iter_unpack(data[_HEAD.size : _HEAD.size + count * _WRITER.size]))
        return account


class UsageFile:
    """The count of bytes in use, in one small file under a lock. Only its holder may change the count.

    Bytes are added before they are written and subtracted after they are deleted. A process that dies in between
    leaves the count too high, never too low, so the quota holds over every crash. The next recount corrects it.

    A file that is missing, damaged, or from before the host's last start is not trusted, as block files may be newer
    than it. Then the account is not counted, until a recount has ended.
    """

    def __init__(self, root: str, access: Access = PRIVATE) -> None:
        self._root = root
        self._access = access
        self._path = os.path.join(root, CONTROL_DIR, "ledger")
        self._lock = threading.Lock()
        self._fd = -1
        self._boot = _boot_id()
        self.last_used_bytes = 0
        """The count when this process last held the file."""

    @contextmanager
    def hold(self, timeout_s: float) -> Iterator[Account]:
        """Waits for other threads and processes, one of which may be stopped: raises ``TimeoutError`` after
        ``timeout_s``. Raises ``OSError`` where the root is gone or read-only."""
        end_s = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise self._timeout()
        try:
            fd = self._open_locked(end_s)
            try:
                stated = os.pread(fd, _MOST_BYTES + 1, 0)
                account = Account.parse(stated, self._boot) or Account()
                try:
                    yield account
                finally:
                    self.last_used_bytes = account.used_bytes
                    if (data := account.pack(self._boot)) != stated:
                        if len(stated) > len(data):
                            os.ftruncate(fd, len(data))
                        os.pwrite(fd, data, 0)
            finally:
                try:
                    fcntl.flock(fd, fcntl.LOCK_UN)
                except OSError:
                    self._close()  # which ends the lock as well
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _open_locked(self, end_s: float) -> int:
        for _ in range(100):
            if self._fd < 0:
                if os.path.isdir(self._root):  # never made again here: it may be a mount that went away
                    make_directory(os.path.dirname(self._path), self._access)
                self._fd = self._open()
            try:
                self._wait_for_lock(self._fd, end_s)
            except TimeoutError:
                raise
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

    def _wait_for_lock(self, fd: int, end_s: float) -> None:
        """Asks again and again, because ``flock`` itself has no deadline."""
        poll_s = _FIRST_POLL_S
        while not try_lock(fd):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise self._timeout()
            time.sleep(min(poll_s, left_s))
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def _timeout(self) -> TimeoutError:
        return TimeoutError(errno.ETIMEDOUT, "is held by another writer for too long", self._path)

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
            raise PermissionError(errno.EPERM, "is not a file, or belongs to another user", self._path)
        return fd

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _boot_id() -> bytes:
    """Eight bytes that are different after each start of the host."""
    try:
        return xxhash.xxh3_64_digest(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    except OSError:
        return b"unknown "
