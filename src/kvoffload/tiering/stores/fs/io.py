# SPDX-License-Identifier: Apache-2.0
"""Single block files: written and published, read and verified. Direct I/O where that works."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import numpy as np

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.fs.format import PAGE_BYTES, BlockFormat
from kvoffload.tiering.stores.fs.staging import unlink_quietly
from kvoffload.tiering.stores.root import Access, make_directory

__all__ = ["FileIO", "ReadOutcome", "set_used"]

_DIRECT = getattr(os, "O_DIRECT", 0)
_PUBLISH_ATTEMPTS = 100
"""Each failed attempt means another process published and then evicted this block meanwhile."""
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
_BYTE = ctypes.c_char


class ReadOutcome(Enum):
    GOOD = "good"
    ABSENT = "absent"
    """No such file, or it was replaced during the read."""
    BAD = "bad"
    """Read in full, twice, and not this block: safe to delete."""
    UNSURE = "unsure"
    """The kernel returned less than the file has: no proof of anything."""


class FileIO:
    """Reads and writes the files of one ``BlockFormat`` under ``root``, to which paths are relative. Any number of
    threads. A transfer that stops short is continued.

    Direct I/O is used while header, payload and buffer are whole aligned pages and the file system supports it. The
    first refusal of an aligned transfer ends it for good, and the transfer continues through the page cache.
    """

    def __init__(self, root: str, layout: BlockFormat, access: Access, *, durable: bool) -> None:
        self._root = root
        self._layout = layout
        self._access = access
        self._file_mode, self._is_group = access.file_mode, access.is_group
        self._durable = durable
        self._direct = bool(_DIRECT) and layout.is_paged
        self._local = threading.local()

    def is_whole(self, path: str) -> bool:
        """Whether a file of the right size is there. Raises ``OSError`` if that cannot be found out."""
        try:
            status = os.lstat(f"{self._root}/{path}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self._is_whole(status)

    def write(
        self, temporary: str, path: str, key: OffloadKey, payload: memoryview, stamp_ns: int, *, replaces: bool = False
    ) -> bool:
        """Writes a block to ``temporary`` (absolute; absent, or a file of the right size) and publishes it as
        ``path``. Sets its mtime to ``stamp_ns``. ``replaces``: the existing file cannot be read.

        Returns whether the bytes reserved for the file are in use now. They are not if another writer was first. If
        it raises ``OSError``, ``temporary`` is gone.
        """
        try:
            self._write(temporary, key, payload, stamp_ns)
            if replaces and _exchange(temporary, f"{self._root}/{path}"):
                os.unlink(temporary)
                return False  # the bytes that the old file was counted with are the new one's
            try:
                return self._publish(temporary, path)
            except FileNotFoundError:
                self._make_directory(os.path.dirname(path))
                return self._publish(temporary, path)
        except OSError:
            unlink_quietly(temporary)
            raise

    def sync_names(self, paths: Iterable[str]) -> None:
        """Puts the names of published files on the disk. Raises ``OSError``."""
        for directory in {os.path.dirname(path) for path in paths}:
            _sync_directory(f"{self._root}/{directory}")

    def read(self, path: str, key: OffloadKey, payload: memoryview, stamp_ns: int) -> tuple[ReadOutcome, int]:
        """Fills ``payload`` from a file; the second value is the file's inode. Sets the mtime of a good file to
        ``stamp_ns``, where that is permitted. Raises ``OSError`` if the file is neither readable nor absent."""
        full = f"{self._root}/{path}"
        try:
            fd = self._open(full, os.O_RDONLY, payload)
        except (FileNotFoundError, NotADirectoryError):
            return ReadOutcome.ABSENT, 0
        except OSError as exc:
            if exc.errno == errno.ELOOP:
                return ReadOutcome.ABSENT, 0  # a link is not a block; the next write of the block replaces it
            raise
        try:
            outcome, inode = self._read_open(fd, key, payload)
            if outcome is ReadOutcome.BAD:
                # Memory, bus or a passing fault may be to blame. Only a file that is wrong twice is wrong, and the
                # second read takes another way, through the page cache.
                self._make_buffered(fd)
                os.lseek(fd, 0, os.SEEK_SET)
                outcome, inode = self._read_open(fd, key, payload)
            if outcome is ReadOutcome.GOOD:
                try:
                    set_used(fd, stamp_ns)
                except OSError:
                    pass  # a read-only file system keeps no order of use; the block is good all the same
                return outcome, inode
        finally:
            os.close(fd)
        # Another file under this name: ours was evicted, and perhaps written over, while we read it.
        return (outcome if _leads_to(full, inode) else ReadOutcome.ABSENT), inode

    def _write(self, full: str, key: OffloadKey, payload: memoryview, stamp_ns: int) -> None:
        header = self._header_buffer()
        header[:] = self._layout.header(key, payload)
        fd = self._open(full, os.O_WRONLY | os.O_CREAT, payload)
        try:
            if not self._move(fd, os.writev, [header, payload]):
                raise OSError(errno.EIO, "the kernel wrote nothing", full)
            if self._is_group:
                with contextlib.suppress(PermissionError):  # a neighbour's evicted file, which has the mode
                    os.fchmod(fd, self._file_mode)  # the umask took bits away
            set_used(fd, stamp_ns)
            if self._durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _publish(self, temporary: str, path: str) -> bool:
        # The invariant: a file has its final name only when it is complete, and exactly one writer learns that it
        # added the name. That one keeps its reserved bytes, all others free theirs: each file is counted once.
        final = f"{self._root}/{path}"
        for _ in range(_PUBLISH_ATTEMPTS):
            if _rename_if_absent(temporary, final):
                return True
            if self.is_whole(path):  # the same block, just published by another writer
                os.unlink(temporary)
                return False
            if os.path.lexists(final):
                # Broken, or not ours. How many bytes it was counted with is not known, so ours stay counted until
                # the next recount: too much is safe.
                try:
                    os.rename(temporary, final)
                except IsADirectoryError:
                    os.rmdir(final)  # an empty one may go
                    os.rename(temporary, final)
                return True
        raise OSError(errno.EBUSY, "published and evicted again and again", final)

    def _make_directory(self, directory: str) -> None:
        if not os.path.isdir(self._root):  # never made again here: it may be a mount that went away
            raise FileNotFoundError(f"{self._root} is gone")
        full = f"{self._root}/{directory}"
        for part in (os.path.dirname(full), full):
            make_directory(part, self._access)
        if self._durable:
            _sync_directory(os.path.dirname(full))
            _sync_directory(self._root)

    def _read_open(self, fd: int, key: OffloadKey, payload: memoryview) -> tuple[ReadOutcome, int]:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            return ReadOutcome.ABSENT, status.st_ino
        if not self._is_whole(status):
            return ReadOutcome.BAD, status.st_ino
        header = self._header_buffer()
        if not self._move(fd, os.readv, [header, payload]):
            # Cut off while we read, or the kernel stopped early: look again before judging.
            is_short = os.fstat(fd).st_size != self._layout.file_bytes
            return ReadOutcome.BAD if is_short else ReadOutcome.UNSURE, status.st_ino
        good = header.tobytes() == self._layout.header(key, payload)
        return ReadOutcome.GOOD if good else ReadOutcome.BAD, status.st_ino

    def _is_whole(self, status: os.stat_result) -> bool:
        is_ours = stat.S_ISREG(status.st_mode) and self._access.admits(status)
        return is_ours and status.st_size == self._layout.file_bytes

    def _open(self, full: str, flags: int, payload: memoryview) -> int:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link, and no wait for a pipe's other end
        mode = self._file_mode
        if self._direct and _address_of(payload) % PAGE_BYTES == 0:
            try:
                return os.open(full, flags | _DIRECT, mode)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                self._direct = os.path.isdir(full)  # a directory is refused anywhere, which says nothing of files
                if flags & os.O_CREAT:
                    unlink_quietly(full)  # some file systems refuse after they made the file
        return os.open(full, flags, mode)

    def _move(self, fd: int, call: Callable[[int, Sequence[memoryview]], int], buffers: list[memoryview]) -> bool:
        """Moves all of ``buffers`` from the current position on. ``False`` if the kernel stopped before the end."""
        left = buffers
        while left:
            try:
                moved = call(fd, left)
            except OSError as exc:
                if exc.errno != errno.EINVAL or not self._make_buffered(fd):
                    raise
                self._direct = False
                continue
            if moved == 0:
                return False
            left = _after(left, moved)
            if left:
                self._make_buffered(fd)  # the rest need not be aligned
        return True

    @staticmethod
    def _make_buffered(fd: int) -> bool:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & _DIRECT:
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_DIRECT)
        return True

    def _header_buffer(self) -> memoryview:
        """This thread's aligned page for headers."""
        buffer: memoryview | None = getattr(self._local, "header", None)
        if buffer is None:
            buffer = memoryview(mmap.mmap(-1, PAGE_BYTES))[: self._layout.header_bytes]
            self._local.header = buffer
        return buffer


def set_used(file: str | int, stamp_ns: int) -> None:
    """Sets the time of use of a path or descriptor, not of what a link leads to. Raises ``OSError``.

    Only a file's owner may choose the time. Others of a group can set it to the present, which is as good.
    """
    follow = not isinstance(file, str)
    try:
        os.utime(file, ns=(stamp_ns, stamp_ns), follow_symlinks=follow)
    except PermissionError:
        os.utime(file, follow_symlinks=follow)


def _find_renameat2() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function


_renameat2 = _find_renameat2()


def _rename_if_absent(temporary: str, final: str) -> bool:
    """Renames ``temporary`` to ``final`` in one atomic step, unless ``final`` exists: then returns ``False``."""
    if _renameat2 is None:
        return _link_if_absent(temporary, final)
    if not _renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(final), _RENAME_NOREPLACE):
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    if number in _UNSUPPORTED:
        return _link_if_absent(temporary, final)
    raise OSError(number, os.strerror(number), final)


def _exchange(temporary: str, final: str) -> bool:
    """Makes each the other's file, in one atomic step. ``False`` if ``final`` is absent or that is not possible."""
    if _renameat2 is None:
        return False
    return not _renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE)


def _link_if_absent(temporary: str, final: str) -> bool:
    """The same where the file system cannot rename like that. Without hard links either, it is not atomic."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED:
            raise
        if os.path.lexists(final):
            return False
        os.rename(temporary, final)
        return True
    os.unlink(temporary)
    return True


def _leads_to(full: str, inode: int) -> bool:
    try:
        return os.stat(full, follow_symlinks=False).st_ino == inode
    except FileNotFoundError:
        return False


def _address_of(buffer: memoryview) -> int:
    if buffer.readonly:
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(_BYTE.from_buffer(buffer))  # takes a quarter of the time


def _after(buffers: list[memoryview], moved: int) -> list[memoryview]:
    while buffers and moved >= buffers[0].nbytes:
        moved -= buffers[0].nbytes
        buffers = buffers[1:]
    return [buffers[0][moved:], *buffers[1:]] if buffers else []


def _sync_directory(full: str) -> None:
    fd = os.open(full, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
