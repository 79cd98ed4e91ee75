# SPDX-License-Identifier: Apache-2.0
"""Support direct I/O: its requirements for buffers, which must be whole aligned pages, and its errors from devices."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

import numpy as np

O_DIRECT = getattr(os, "O_DIRECT", 0)
"""The flag of ``os.open``, or 0 if this system does not support direct I/O."""
PAGE_BYTES = 4096
_BYTE = ctypes.c_char
BLOCK_ERRORS = frozenset(
    getattr(errno, name, errno.EIO) for name in ("EIO", "ENODATA", "EILSEQ", "EREMOTEIO", "EUCLEAN", "EBADMSG")
)
"""Errors that concern only some bytes of a file. The page cache turns most of these into EIO. Direct I/O reports the
device's own error: a bad medium, a checksum that does not match, a target that failed. The last two concern a file
system's own data."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (*NO_SPACE, errno.EROFS)
"""Errors of a file system that rejects writes. Existing data remains valid."""


def is_aligned(buffer: memoryview) -> bool:
    """Return whether ``buffer`` (contiguous bytes) starts at a page boundary."""
    if buffer.readonly:
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    else:
        address = ctypes.addressof(_BYTE.from_buffer(buffer))  # takes a quarter of the time
    return address % PAGE_BYTES == 0


def after(buffers: Sequence[memoryview], moved: int) -> list[memoryview]:
    """Return the rest of ``buffers`` after their first ``moved`` bytes have been read or written."""
    for at, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[at + 1 :]]
        moved -= buffer.nbytes
    return []
