# SPDX-License-Identifier: Apache-2.0
"""Read small files that a configuration names."""

from __future__ import annotations

import errno
import os
import stat

_LARGEST_BYTES = 16 << 20


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file, whose path may begin with ``~``. Raises ``OSError``, also for a pipe, which might
    never end, and for a file of more than 16 MiB. Raises ``ValueError`` for a path that cannot exist."""
    fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        if status.st_size > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {_LARGEST_BYTES >> 20} MiB", path)
        with open(fd, "rb", closefd=False) as file:
            return file.read(_LARGEST_BYTES)
    finally:
        os.close(fd)
