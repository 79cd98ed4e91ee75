# SPDX-License-Identifier: Apache-2.0
"""Whole block files in and out of memory: direct where it can be, continued where the kernel stops short."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.fs_format import PAGE_BYTES, BlockFormat
from kvoffload.tiering.stores.fs_writer import unlink_quietly

__all__ = ["FileIO", "ReadOutcome"]

_DIRECT = getattr(os, "O_DIRECT", 0)


class ReadOutcome(Enum):
    GOOD = "good"
    ABSENT = "absent"
    BAD = "bad"
    """Read in full, twice, and not this block: safe to delete."""
    UNSURE = "unsure"
    """The kernel gave less than the file has: no proof of anything."""


class FileIO:
    """Reads and writes the files of one ``BlockFormat``. Any number of threads.

    Direct I/O is used while header, payload and buffer are whole aligned pages and the file system takes it; the
    first refusal of an aligned transfer ends it for good, and the transfer goes on through the page cache.
    """

    def __init__(self, layout: BlockFormat, *, durable: bool) -> None:
        self._layout = layout
        self._durable = durable
        self._direct = bool(_DIRECT) and layout.is_paged
        self._local = threading.local()

    def write(self, path: str, key: OffloadKey, payload: memoryview, stamp_ns: int, *, is_there: bool = False) -> None:
        """Makes the file ``path``, complete on return (on disk too, if durable), or, if it ``is_there``, overwrites
        one of the same size. Raises ``OSError``."""
        header = self._header_buffer()
        header[:] = self._layout.header(key, payload)
        flags = os.O_WRONLY | os.O_CLOEXEC | (0 if is_there else os.O_CREAT | os.O_EXCL)
        fd = self._open(path, flags, payload)
        try:
            if not self._move(fd, os.writev, [header, payload]):
                raise OSError(errno.EIO, "the kernel wrote nothing", path)
            os.utime(fd, ns=(stamp_ns, stamp_ns))
            if self._durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: str, key: OffloadKey, payload: memoryview, stamp_ns: int) -> tuple[ReadOutcome, int]:
        """Fills ``payload`` from ``path``; the second value is the file's inode. Raises ``OSError`` for what is
        neither there nor absent. A good file is stamped as used at ``stamp_ns``, where that is permitted."""
        try:
            fd = self._open(path, os.O_RDONLY | os.O_CLOEXEC, payload)
        except (FileNotFoundError, NotADirectoryError):
            return ReadOutcome.ABSENT, 0
        try:
            outcome, inode = self._read_open(fd, key, payload)
            if outcome is ReadOutcome.BAD:
                # Memory, bus or a passing fault may have lied: only a file that is wrong twice is wrong, and the
                # second time it comes another way, through the page cache.
                self._make_buffered(fd)
                os.lseek(fd, 0, os.SEEK_SET)
                outcome, inode = self._read_open(fd, key, payload)
            if outcome is ReadOutcome.GOOD:
                try:
                    os.utime(fd, ns=(stamp_ns, stamp_ns))
                except OSError:
                    pass  # a read-only file system: the order of use is not kept, the block is good all the same
            return outcome, inode
        finally:
            os.close(fd)

    def _read_open(self, fd: int, key: OffloadKey, payload: memoryview) -> tuple[ReadOutcome, int]:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != self._layout.file_bytes:
            return ReadOutcome.BAD, status.st_ino
        header = self._header_buffer()
        if not self._move(fd, os.readv, [header, payload]):
            # Cut down while we read, or the kernel stopped early: look again before judging.
            is_short = os.fstat(fd).st_size != self._layout.file_bytes
            return ReadOutcome.BAD if is_short else ReadOutcome.UNSURE, status.st_ino
        good = header == self._layout.header(key, payload)
        return ReadOutcome.GOOD if good else ReadOutcome.BAD, status.st_ino

    def _open(self, path: str, flags: int, payload: memoryview) -> int:
        if self._direct and _is_aligned(payload):
            try:
                return os.open(path, flags | _DIRECT, 0o644)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                self._direct = os.path.isdir(path)  # which is refused anywhere, and says nothing of files
                if flags & os.O_CREAT:
                    unlink_quietly(path)  # some file systems refuse after having made the file
        return os.open(path, flags, 0o644)

    def _move(self, fd: int, call: Callable[[int, Sequence[memoryview]], int], buffers: list[memoryview]) -> bool:
        """Moves all of ``buffers`` from the current position on; whether the kernel went along to the end."""
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


def _after(buffers: list[memoryview], moved: int) -> list[memoryview]:
    while buffers and moved >= buffers[0].nbytes:
        moved -= buffers[0].nbytes
        buffers = buffers[1:]
    return [buffers[0][moved:], *buffers[1:]] if buffers else []


def _is_aligned(buffer: memoryview) -> bool:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0
