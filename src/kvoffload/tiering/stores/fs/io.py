# SPDX-License-Identifier: Apache-2.0
"""Write single block files under a temporary name and rename them; read and verify them. Uses direct I/O if
possible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Sequence
from enum import Enum

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.direct_io import O_DIRECT, PAGE_BYTES, after, is_aligned
from kvoffload.tiering.stores.fs.format import TEMPORARY_PREFIX, BlockFormat
from kvoffload.tiering.stores.fs.quota import Quota
from kvoffload.tiering.stores.root import SAFE, Access, Directories, check_there, is_mount, make_directory

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)


def is_absence(error: OSError) -> bool:
    """Return whether the error means that our file is absent: it does not exist, is a link, or was deleted by another
    host."""
    return error.errno in _ABSENT


class ReadOutcome(Enum):
    GOOD = "good"
    ABSENT = "absent"
    """No such file, or it was deleted or replaced during the read."""
    BAD = "bad"
    """The whole file was read twice, and is not this block. It is deleted."""
    STAYS = "stays"
    """The file is bad as for ``BAD``, but it cannot be deleted."""
    UNSURE = "unsure"
    """The kernel returned fewer bytes than the file contains, which proves nothing."""


class FileIO:
    """The files of one ``BlockFormat`` under ``root``. Paths are relative to ``root``, and each call opens them through
    the ``Directories`` that it gets. Any number of threads may call it. An incomplete transfer is continued.

    Direct I/O is used if header, payload and buffer are whole aligned pages and the file system supports it. If the
    file system rejects an aligned transfer, that transfer and all later ones use the page cache.
    """

    def __init__(self, root: str, layout: BlockFormat, access: Access, quota: Quota) -> None:
        self._root = root
        self._layout = layout
        self._access = access
        self._quota = quota
        self._is_mount = is_mount(root)
        self._direct = bool(O_DIRECT) and layout.is_paged
        self._local = threading.local()
        # Random, because containers of different hosts may share both host name and process id.
        self._prefix = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        self._numbers = itertools.count()

    def is_whole(self, opened: Directories, path: str) -> bool:
        """Return whether a file of the right size is there. Raises ``OSError`` if that cannot be found out."""
        try:
            return self._is_whole(os.lstat(opened.path(path)))
        except OSError as exc:
            if is_absence(exc):
                return False
            raise

    def write(self, opened: Directories, path: str, key: OffloadKey, payload: memoryview) -> None:
        """Write a block and publishes it as ``path``, in place of any file of that name. Raises ``OSError``, and then
        leaves nothing, unless the process is killed."""
        # In the same directory, as some file systems cannot rename from one to another. Each name is used once.
        name = f"{os.path.dirname(path)}/{self._prefix}-{next(self._numbers)}"
        try:
            temporary = opened.path(name)
        except FileNotFoundError:
            self._make_directory(opened, os.path.dirname(path))
            temporary = opened.path(name)
        try:
            self._write(temporary, key, payload)
            self._publish(temporary, opened.path(path))
        except OSError:
            try:
                os.unlink(temporary)
            except OSError:
                pass  # it was never created, or a later listing deletes it after an hour
            raise

    def mark_used(self, opened: Directories, path: str) -> None:
        """Set an old file's time to the current time, so that it is deleted later."""
        with contextlib.suppress(OSError):
            full = opened.path(path)
            if os.lstat(full).st_mtime_ns < self._quota.old_before_ns:
                fd = os.open(full, os.O_RDONLY | SAFE)
                try:
                    self._quota.use(fd)
                finally:
                    os.close(fd)

    def read(self, opened: Directories, path: str, key: OffloadKey, payload: memoryview) -> ReadOutcome:
        """Fill ``payload`` from a file, and delete a bad file. Raises ``OSError`` if the file is neither readable nor
        absent."""
        try:
            full = opened.path(path)
            outcome, _ = self._read(full, key, payload, direct=self._direct)
            if outcome is ReadOutcome.BAD:
                # Memory, the bus, a stale cache or a temporary fault may be the cause. So a file counts as bad only
                # after a second failure. The second read opens the file again and uses the page cache.
                outcome, inode = self._read(full, key, payload, direct=False)
                if outcome is ReadOutcome.BAD and os.lstat(full).st_ino != inode:
                    return ReadOutcome.ABSENT  # another process has just replaced it
        except OSError as exc:
            if is_absence(exc):
                return ReadOutcome.ABSENT
            raise
        if outcome is ReadOutcome.BAD and not self.remove(opened, path):
            return ReadOutcome.STAYS
        return outcome

    def remove(self, opened: Directories, path: str) -> bool:
        """Delete a file. Returns whether it is gone, even if another process deleted it."""
        try:
            os.unlink(opened.path(path))
        except IsADirectoryError:
            return False
        except OSError as exc:
            return is_absence(exc)
        return True

    def _write(self, temporary: str, key: OffloadKey, payload: memoryview) -> None:
        header = self._header_buffer()
        header[:], payload = self._layout.sealed(self._layout.identity(key), payload)
        fd = self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, payload, self._direct)
        try:
            if not self._move(fd, os.writev, [header, payload]):
                raise OSError(errno.EIO, "the kernel wrote nothing", temporary)
            if self._access.is_group:
                os.fchmod(fd, self._access.file_mode)  # the umask removed bits
            self._quota.date(fd)
        finally:
            os.close(fd)  # a network mount may report a full disk here

    def _publish(self, temporary: str, final: str) -> None:
        # The invariant: a file has its final name only when it is complete.
        try:
            os.rename(temporary, final)
        except IsADirectoryError:
            os.rmdir(final)  # works only for an empty directory
            os.rename(temporary, final)
        except FileNotFoundError:
            # A mount that repeats a call after a lost answer finds that the first call has already renamed the file.
            try:
                is_there = self._is_whole(os.lstat(final))
            except OSError:
                is_there = False
            if not is_there:
                raise

    def _make_directory(self, opened: Directories, directory: str) -> None:
        check_there(self._root, self._is_mount)
        for part in (os.path.dirname(directory), directory):
            make_directory(opened.path(part), self._access)

    def _read(self, full: str, key: OffloadKey, payload: memoryview, *, direct: bool) -> tuple[ReadOutcome, int]:
        """Read the file, and return the outcome and its inode."""
        fd = self._open(full, os.O_RDONLY, payload, direct)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return ReadOutcome.ABSENT, status.st_ino
            if not self._is_whole(status):
                return ReadOutcome.BAD, status.st_ino
            header = self._header_buffer()
            if not self._move(fd, os.readv, [header, payload]):
                # The file was truncated during the read, or the kernel stopped early: check the size again.
                is_short = os.fstat(fd).st_size != self._layout.file_bytes
                return ReadOutcome.BAD if is_short else ReadOutcome.UNSURE, status.st_ino
            good = self._layout.unseal(header.tobytes(), self._layout.identity(key), payload)
            if good and status.st_mtime_ns < self._quota.old_before_ns:
                with contextlib.suppress(OSError):
                    self._quota.use(fd)  # it is deleted later
            return ReadOutcome.GOOD if good else ReadOutcome.BAD, status.st_ino
        finally:
            os.close(fd)

    def _is_whole(self, status: os.stat_result) -> bool:
        is_ours = stat.S_ISREG(status.st_mode) and self._access.admits(status)
        return is_ours and status.st_size == self._layout.file_bytes

    def _open(self, full: str, flags: int, payload: memoryview, direct: bool) -> int:
        flags |= SAFE
        mode = self._access.file_mode
        if direct and is_aligned(payload):
            try:
                return os.open(full, flags | O_DIRECT, mode)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                self._direct = os.path.isdir(full)  # directories never support it, so this proves nothing about files
                if flags & os.O_CREAT and os.path.lexists(full):
                    os.unlink(full)  # some file systems reject the flag after creating the file
        return os.open(full, flags, mode)

    def _move(self, fd: int, call: Callable[[int, Sequence[memoryview]], int], buffers: list[memoryview]) -> bool:
        """Transfer all of ``buffers`` at the current position. Returns ``False`` if the kernel stopped before the
        end."""
        left = buffers
        while left:
            try:
                moved = call(fd, left)
            except OSError as exc:
                if exc.errno != errno.EINVAL or not _make_buffered(fd):
                    raise
                self._direct = False
                continue
            if moved == 0:
                return False
            left = after(left, moved)
            if left:
                _make_buffered(fd)  # the rest need not be aligned
        return True

    def _header_buffer(self) -> memoryview:
        """Return this thread's aligned page for headers."""
        buffer: memoryview | None = getattr(self._local, "header", None)
        if buffer is None:
            buffer = memoryview(mmap.mmap(-1, PAGE_BYTES))[: self._layout.header_bytes]
            self._local.header = buffer
        return buffer


def _make_buffered(fd: int) -> bool:
    """Turn direct I/O off for ``fd``. Returns ``False`` if it was off."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~O_DIRECT)
    return True
