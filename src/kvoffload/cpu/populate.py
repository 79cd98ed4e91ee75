# SPDX-License-Identifier: Apache-2.0
"""Gives memory its pages before somebody needs them all at once, on several threads."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

__all__ = ["populate"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PIECE_BYTES = 256 << 20
_THREADS = 16


def populate(address: int, num_bytes: int, num_threads: int | None = None) -> bool:
    """Has the kernel allocate the pages of a mapping, which begins a page. Their bytes stay as they are.

    Zeroing pages is what takes long: one thread does some gigabytes a second. ``False`` where the kernel cannot do it
    ahead or has no room: then pages come when they are touched, or whoever checks for room says what to change.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def piece(start: int) -> bool:
        length = min(_PIECE_BYTES, num_bytes - start)
        return not libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    if num_threads is None:
        num_threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, "kvoffload-populate") as threads:
        return all([*threads.map(piece, range(0, num_bytes, _PIECE_BYTES))])
