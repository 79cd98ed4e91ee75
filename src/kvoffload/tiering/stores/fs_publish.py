# SPDX-License-Identifier: Apache-2.0
"""Putting a finished file under its name, and knowing whether that made a new file or not."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

__all__ = ["publish"]

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def _find_renameat2() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function


_renameat2 = _find_renameat2()


def publish(temporary: str, final: str) -> bool:
    """Renames ``temporary`` to ``final`` unless that exists; then it is ``False`` and ``temporary`` stays.

    One atomic step, so that of all threads and processes exactly one is told that it made the file: its bytes are
    counted once. Raises ``OSError``.
    """
    if _renameat2 is None:
        return _link(temporary, final)
    if not _renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(final), _RENAME_NOREPLACE):
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    if number in _UNSUPPORTED:
        return _link(temporary, final)
    raise OSError(number, os.strerror(number), final)


def _link(temporary: str, final: str) -> bool:
    """The same where the file system cannot rename like that; the last resort is not atomic."""
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
