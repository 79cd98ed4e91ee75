# SPDX-License-Identifier: Apache-2.0
"""Allocate the pages of a memory mapping ahead of use, on several threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PIECE_BYTES = 256 << 20
_THREADS = 16


def populate(
    address: int, num_bytes: int, num_threads: int | None = None, near: AbstractSet[int] = frozenset()
) -> bool:
    """Make the kernel allocate the pages of a mapping, and return whether it allocated all of them.

    ``address`` is page-aligned. The bytes keep their values. Threads run on the cores ``near`` if this process may use
    them. Several threads help, because one thread zeroes only a few gigabytes per second. The result is ``False`` if
    the kernel has no room or cannot allocate ahead. Pages are then allocated when they are first touched.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def piece(start: int) -> bool:
        length = min(_PIECE_BYTES, num_bytes - start)
        return not libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    allowed = os.sched_getaffinity(0)
    cores = allowed & near or allowed

    def stay() -> None:
        with contextlib.suppress(OSError):  # cores may be taken away at any time
            os.sched_setaffinity(0, cores)

    if num_threads is None:
        num_threads = min(_THREADS, len(cores))
    with ThreadPoolExecutor(num_threads, "kvoffload-populate", initializer=stay) as threads:
        return all([*threads.map(piece, range(0, num_bytes, _PIECE_BYTES))])
