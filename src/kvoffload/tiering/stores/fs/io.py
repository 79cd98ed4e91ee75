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
from dataclasses import dataclass
from enum import Enum

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.fs.batch import BatchIO, address_of
from kvoffload.tiering.stores.fs.format import PAGE_BYTES, BlockFormat
from kvoffload.tiering.stores.fs.native import NOTHING
from kvoffload.tiering.stores.fs.staging import unlink_quietly

__all__ = ["FileIO", "NewFile", "ReadOutcome"]

_DIRECT = getattr(os, "O_DIRECT", 0)


class ReadOutcome(Enum):
    GOOD = "good"
    ABSENT = "absent"
    BAD = "bad"
    """Read in full, twice, and not this block: safe to delete."""
    UNSURE = "unsure"
    """The kernel gave less than the file has: no proof of anything."""


@dataclass(slots=True)
class NewFile:
    """A block on its way to disk: written to ``temporary``, which may be there with the right size, named ``final``."""

    key: OffloadKey
    payload: memoryview
    stamp_ns: int
    """Time of its use, which becomes the file's mtime."""
    temporary: str
    final: str
    reached: int = NOTHING


class FileIO:
    """Reads and writes the files of one ``BlockFormat``. Any number of threads.

    Each transfer is tried first with others of its batch, fast (``fs_batch``); what does not go smoothly is left
    to the careful ``write`` and ``read``, which continue what stops short and tell what is wrong.

    Direct I/O is used while header, payload and buffer are whole aligned pages and the file system takes it; the
    first refusal of an aligned transfer ends it for good, and the transfer goes on through the page cache.
    """

    def __init__(self, layout: BlockFormat, *, durable: bool) -> None:
        self._layout = layout
        self._durable = durable
        self._direct = bool(_DIRECT) and layout.is_paged
        self._local = threading.local()
        self._batch = BatchIO.where_possible(layout, durable=durable)
        self.files_per_batch = self._batch.files_per_batch if self._batch is not None else 1

    def try_to_write(self, files: Sequence[NewFile]) -> None:
        """Writes and names up to ``files_per_batch`` files, as far as that goes smoothly: see ``reached``."""
        if self._batch is None:
            return
        headers = [self._layout.header(file.key, file.payload) for file in files]
        addresses = [address_of(file.payload) for file in files]
        reached = self._batch.write(
            [file.temporary for file in files],
            [file.final for file in files],
            headers,
            addresses,
            [file.stamp_ns for file in files],
            direct=self._is_direct(addresses),
        )
        for file, stage in zip(files, reached):
            file.reached = stage

    def try_to_read(
        self,
        paths: Sequence[str],
        keys: Sequence[OffloadKey],
        payloads: Sequence[memoryview],
        stamps_ns: Sequence[int],
    ) -> list[bool]:
        """Fills up to ``files_per_batch`` payloads; which of them are good and stamped. The others: ask ``read``."""
        if self._batch is None or any(payload.readonly for payload in payloads):
            return [False] * len(paths)
        addresses = list(map(address_of, payloads))
        headers = self._batch.read(paths, addresses, stamps_ns, direct=self._is_direct(addresses))
        return [
            header is not None and header.tobytes() == self._layout.header(key, payload)
            for header, key, payload in zip(headers, keys, payloads)
        ]

    def write(self, path: str, key: OffloadKey, payload: memoryview, stamp_ns: int) -> None:
        """Makes the file ``path``, complete on return (on disk too, if durable), or overwrites one of the same size.
        Raises ``OSError``."""
        header = self._header_buffer()
        header[:] = self._layout.header(key, payload)
        fd = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, payload)
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
        good = header.tobytes() == self._layout.header(key, payload)
        return ReadOutcome.GOOD if good else ReadOutcome.BAD, status.st_ino

    def _open(self, path: str, flags: int, payload: memoryview) -> int:
        if self._is_direct([address_of(payload)]):
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

    def _is_direct(self, addresses: Sequence[int]) -> bool:
        return self._direct and not any(address % PAGE_BYTES for address in addresses)

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
