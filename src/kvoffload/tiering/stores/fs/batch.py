# SPDX-License-Identifier: Apache-2.0
"""Batches of block files laid out for the compiled loops of ``fs_native``."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvoffload.tiering.stores.fs.format import PAGE_BYTES, BlockFormat
from kvoffload.tiering.stores.fs.native import NOTHING, STATX_BYTES, NativeFiles, Words, native_files

__all__ = ["BatchIO", "Look", "address_of", "look", "move"]

_BATCH_BYTES = 4 << 20
"""A batch is about as much: a quarter of it was measurably slower with blocks of 256 KiB, more than that no faster."""
_MOST_FILES = 32
_DIRECT = getattr(os, "O_DIRECT", 0)
_BILLION = 1_000_000_000
_BYTE = ctypes.c_char


_STATX = np.dtype(
    {
        "names": ["mode", "size", "mtime_s", "mtime_ns"],
        "formats": ["u2", "u8", "i8", "u4"],
        "offsets": [28, 40, 112, 120],
        "itemsize": STATX_BYTES,
    }
)
"""What is of use here in the kernel's ``struct statx``."""


class Look(NamedTuple):
    """A regular file, as a look at its inode finds it."""

    size_bytes: int
    used_ns: int
    """Its mtime."""


def look(paths: Sequence[str]) -> list[Look | None]:
    """What is there; ``None`` for what is no regular file, or cannot be looked at."""
    native = native_files()
    if native is None or len(paths) < 2:
        return [_look(path) for path in paths]
    found = np.zeros(len(paths), _STATX)
    names = _CStrings(paths)
    native.look(names.addresses, found.view(np.int8))
    return [
        Look(size, seconds * _BILLION + nanoseconds) if stat.S_ISREG(mode) else None
        for mode, size, seconds, nanoseconds in found.tolist()
    ]


def _look(path: str) -> Look | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return Look(status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def move(paths: Sequence[str], targets: Sequence[str]) -> list[bool]:
    """Renames files of one file system; which of them it could."""
    native = native_files()
    if native is None or len(paths) < 2:
        return list(map(_move, paths, targets))
    moved = np.empty(len(paths), np.int8)
    names, new_names = _CStrings(paths), _CStrings(targets)
    native.move(names.addresses, new_names.addresses, moved)
    return list(map(bool, moved.tolist()))


def _move(path: str, target: str) -> bool:
    try:
        os.rename(path, target)
    except OSError:
        return False
    return True


@dataclass(slots=True)
class _Table:
    """One thread's arrays: a row and an aligned header per file of a batch."""

    headers: list[memoryview]
    vectors: Words
    stamps: Words
    marks: np.ndarray[tuple[int], np.dtype[np.int8]]


class BatchIO:
    """Reads and writes up to ``files_per_batch`` files of one ``BlockFormat`` at a time. Any number of threads.

    Payloads are addresses of ``block_bytes`` of memory, whole pages of it with ``direct``; the caller keeps it.
    """

    def __init__(self, layout: BlockFormat, native: NativeFiles, *, durable: bool) -> None:
        self._layout = layout
        self._native = native
        self._durable = durable
        self._local = threading.local()
        self.files_per_batch = max(1, min(_MOST_FILES, _BATCH_BYTES // layout.file_bytes))

    @classmethod
    def where_possible(cls, layout: BlockFormat, *, durable: bool) -> BatchIO | None:
        native = native_files()
        return cls(layout, native, durable=durable) if native is not None else None

    def write(
        self,
        temporaries: Sequence[str],
        finals: Sequence[str],
        headers: Sequence[bytes],
        payloads: Sequence[int],
        stamps_ns: Sequence[int],
        *,
        direct: bool,
    ) -> list[int]:
        """Writes each payload with its header to a temporary file, which may exist with that size, stamps it as used
        at so many nanoseconds and gives it its final name, unless that exists. How far each came; nothing is raised."""
        table = self._table(payloads, stamps_ns)
        for place, header in zip(table.headers, headers):
            place[:] = header
        reached = table.marks[: len(headers)]
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (_DIRECT if direct else 0)
        with_temporaries, with_finals = _CStrings(temporaries), _CStrings(finals)
        self._native.write(
            with_temporaries.addresses,
            with_finals.addresses,
            table.vectors[: len(headers)],
            table.stamps[: len(headers)],
            flags,
            self._durable,
            reached,
        )
        stages: list[int] = reached.tolist()
        return stages

    def read(
        self, names: Sequence[str], payloads: Sequence[int], stamps_ns: Sequence[int], *, direct: bool
    ) -> list[memoryview | None]:
        """Fills each payload from its file, if that has just the right size, and stamps it as used. The headers, until
        this thread's next call; ``None`` for what is absent, of another size or did not come in one go."""
        table = self._table(payloads, stamps_ns)
        complete = table.marks[: len(names)]
        flags = os.O_RDONLY | os.O_CLOEXEC | (_DIRECT if direct else 0)
        strings = _CStrings(names)
        self._native.read(strings.addresses, table.vectors[: len(names)], table.stamps[: len(names)], flags, complete)
        return [header if done else None for header, done in zip(table.headers, complete.tolist())]

    def _table(self, payloads: Sequence[int], stamps_ns: Sequence[int]) -> _Table:
        table: _Table | None = getattr(self._local, "table", None)
        if table is None:
            table = self._local.table = self._new_table()
        count = len(payloads)
        table.vectors[:count, 2] = payloads
        table.stamps[:count, 0], table.stamps[:count, 1] = np.divmod(np.array(stamps_ns, np.int64), _BILLION)
        table.stamps[:count, 2:] = table.stamps[:count, :2]
        return table

    def _new_table(self) -> _Table:
        rows, num_bytes = self.files_per_batch, self._layout.header_bytes
        memory = memoryview(mmap.mmap(-1, rows * PAGE_BYTES))
        headers = [memory[row * PAGE_BYTES :][:num_bytes] for row in range(rows)]
        vectors = np.empty((rows, 4), np.int64)
        vectors[:, 0] = [address_of(header) for header in headers]
        vectors[:, 1], vectors[:, 3] = num_bytes, self._layout.block_bytes
        return _Table(headers, vectors, np.empty((rows, 4), np.int64), np.full(rows, NOTHING, np.int8))


class _CStrings:
    """Names as C strings. Lives as long as their addresses are used."""

    def __init__(self, names: Sequence[str]) -> None:
        self._memory = np.frombuffer(os.fsencode("\0".join(names)) + b"\0", np.int8)
        starts = np.flatnonzero(self._memory == 0) + 1
        starts[1:], starts[:1] = starts[:-1].copy(), 0
        self.addresses: Words = starts + address_of(self._memory.data)


def address_of(buffer: memoryview) -> int:
    if buffer.readonly:
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(_BYTE.from_buffer(buffer))  # a quarter of the time
