# SPDX-License-Identifier: Apache-2.0
"""What direct I/O asks of buffers, whole aligned pages, and what it tells of devices."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

import numpy as np

O_DIRECT = getattr(os, "O_DIRECT", 0)
"""0: this system has no direct I/O."""
PAGE_BYTES = 4096
_BYTE = ctypes.c_char
BLOCK_ERRORS = frozenset(
    getattr(errno, name, errno.EIO) for name in ("EIO", "ENODATA", "EILSEQ", "EREMOTEIO", "EUCLEAN", "EBADMSG")
)
"""Some bytes cannot be read or written, whatever the others do. The page cache makes EIO of most of these. Direct I/O
tells what the device said: a bad medium, a checksum that does not fit, a target that failed. The last two are of a file
system's own data."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (*NO_SPACE, errno.EROFS)
"""The file system takes no writes. What is there is as good as before."""


def is_aligned(buffer: memoryview) -> bool:
    """Whether ``buffer`` (contiguous bytes) begins at a page."""
    if buffer.readonly:
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    else:
        address = ctypes.addressof(_BYTE.from_buffer(buffer))  # takes a quarter of the time
    return address % PAGE_BYTES == 0


def after(buffers: Sequence[memoryview], moved: int) -> list[memoryview]:
    """What is left of ``buffers`` once their first ``moved`` bytes have been read or written."""
    for at, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[at + 1 :]]
        moved -= buffer.nbytes
    return []
