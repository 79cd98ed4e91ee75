# SPDX-License-Identifier: Apache-2.0
"""Many small files in one call, as machine code, compiled with numba where that is installed (vLLM brings it).

A block of 64 KiB takes a modern disk 30 microseconds. From Python each of its five system calls gives the GIL away and
has to win it back, among I/O threads that all do the same, which takes longer than the disk. Here a batch gives it away
once. Whatever does not go smoothly (an error, a transfer that stops short) is left for the careful path in ``fs_io``,
so nothing here interprets an error.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.compiled import compiled

__all__ = ["NAMED", "NOTHING", "STATX_BYTES", "WRITTEN", "NativeFiles", "native_files"]

NOTHING, WRITTEN, NAMED = 0, 1, 2
"""How far a file came: not written (or in part); complete under its temporary name; under its final name."""

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_SEEK_END = 2
_AT_SYMLINK_NOFOLLOW = 0x100
_STATX_BASIC_STATS = 0x7FF
STATX_BYTES = 256
_MODE = 0o644

Words = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.int8]


class NativeFiles(NamedTuple):
    """The compiled loops. All arrays are contiguous, one row per file; names are addresses of C strings. ``vectors``:
    header address, header bytes, payload address, payload bytes. ``stamps``: the time of use twice, each as seconds and
    nanoseconds. All release the GIL."""

    look: Callable[[Words, Bytes], None]
    """(names, ``statx`` of each: ``STATX_BYTES`` apart, all zeros where that failed)"""
    move: Callable[[Words, Words, Bytes], None]
    """(names, new names, 1 where it was renamed; what was there is replaced)"""

    write: Callable[[Words, Words, Words, Words, int, bool, Bytes], None]
    """(temporary names, final names, vectors, stamps, flags for opening, whether to sync, how far each came)"""
    read: Callable[[Words, Words, Words, int, Bytes], None]
    """(names, vectors, stamps, flags for opening, 1 where a file of exactly that size was read and stamped)"""


@functools.cache
def native_files() -> NativeFiles | None:
    """The compiled loops, or ``None`` where numba or a system call is missing. The first call takes about a second."""
    return compiled(_compile, "small blocks will be slower on disk")


def _compile(numba: Any) -> NativeFiles:
    types = numba.types
    # ``open`` takes its mode as a variable argument, which Linux's calling conventions pass like any other.
    i32, i64, address = types.int32, types.int64, types.uintp
    signatures = {
        "open": i32(address, i32, i32),
        "close": i32(i32),
        "pwritev": i64(i32, address, i32, i64),
        "preadv": i64(i32, address, i32, i64),
        "lseek": i64(i32, i64, i32),
        "futimens": i32(i32, address),
        "fsync": i32(i32),
        "statx": i32(i32, address, i32, types.uint32, address),
        "renameat2": i32(i32, address, i32, address, types.uint32),
    }
    library = ctypes.CDLL(None)
    missing = [name for name in signatures if not hasattr(library, name)]
    if missing:  # asked for here, because a linker that misses a name ends the process
        raise OSError(f"the C library has no {missing[0]}")
    open_, close, pwritev, preadv, lseek, futimens, fsync, statx, renameat2 = (
        types.ExternalFunction(name, signature) for name, signature in signatures.items()
    )

    def write(
        temporaries: Words, finals: Words, vectors: Words, stamps: Words, flags: int, sync: bool, reached: Bytes
    ) -> None:
        for i in range(len(reached)):
            reached[i] = NOTHING
            fd = open_(temporaries[i], flags, _MODE)
            if fd < 0:
                continue
            whole = pwritev(fd, vectors[i].ctypes.data, 2, 0) == vectors[i, 1] + vectors[i, 3]
            whole = whole and futimens(fd, stamps[i].ctypes.data) == 0 and (not sync or fsync(fd) == 0)
            if close(fd) == 0 and whole:
                named = renameat2(_AT_FDCWD, temporaries[i], _AT_FDCWD, finals[i], _RENAME_NOREPLACE) == 0
                reached[i] = NAMED if named else WRITTEN

    def read(names: Words, vectors: Words, stamps: Words, flags: int, complete: Bytes) -> None:
        for i in range(len(complete)):
            complete[i] = 0
            fd = open_(names[i], flags, 0)
            if fd < 0:
                continue
            num_bytes = vectors[i, 1] + vectors[i, 3]
            if lseek(fd, 0, _SEEK_END) == num_bytes and preadv(fd, vectors[i].ctypes.data, 2, 0) == num_bytes:
                complete[i] = 1
                futimens(fd, stamps[i].ctypes.data)  # a read-only file system keeps no order of use
            close(fd)

    def look(names: Words, found: Bytes) -> None:
        found[:] = 0
        for i in range(len(names)):
            at = found.ctypes.data + i * STATX_BYTES
            if statx(_AT_FDCWD, names[i], _AT_SYMLINK_NOFOLLOW, _STATX_BASIC_STATS, at) != 0:
                found[i * STATX_BYTES : (i + 1) * STATX_BYTES] = 0

    def move(names: Words, targets: Words, moved: Bytes) -> None:
        for i in range(len(names)):
            moved[i] = renameat2(_AT_FDCWD, names[i], _AT_FDCWD, targets[i], 0) == 0

    words, table, marks = types.Array(i64, 1, "C"), types.Array(i64, 2, "C"), types.Array(types.int8, 1, "C")
    return NativeFiles(
        numba.njit(types.void(words, marks), nogil=True)(look),
        numba.njit(types.void(words, words, marks), nogil=True)(move),
        numba.njit(types.void(words, words, table, table, i32, types.boolean, marks), nogil=True)(write),
        numba.njit(types.void(words, table, table, i32, marks), nogil=True)(read),
    )
