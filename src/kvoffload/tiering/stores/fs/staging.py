# SPDX-License-Identifier: Apache-2.0
"""Putting a finished file under its name, and knowing whether that made a new file or not.

Temporary files: a directory per writer, which other processes can tell from that of a dead one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import secrets
import threading
from collections.abc import Callable

from kvoffload.tiering.stores.fs.format import CONTROL_DIR

__all__ = ["Workplace", "publish", "sweep", "unlink_quietly", "writers_alive"]

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


_PREFIX = "w-"


class Workplace:
    """This writer's directory for temporary files. It holds a lock on it for as long as it lives, which the kernel
    gives up however it dies; so whoever gets the lock may clear the directory away."""

    def __init__(self, root: str) -> None:
        self._control = os.path.join(root, CONTROL_DIR)
        self._root = root
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._fd = -1
        self.path = ""

    def open(self) -> None:
        """Makes the directory, unless it is there still. Raises ``OSError``."""
        with self._lock:
            while not self._is_ours():
                self._drop()
                if not os.path.isdir(self._root):
                    raise FileNotFoundError(f"{self._root} is gone")
                os.makedirs(self._control, exist_ok=True)
                self.path = os.path.join(self._control, _PREFIX + secrets.token_hex(8))
                os.mkdir(self.path)
                try:
                    self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue  # swept before it was locked
                if not _try_lock(self._fd):
                    self._drop()  # about to be swept

    def new_path(self) -> str:
        """A name that nobody else uses, for one temporary file."""
        return os.path.join(self.path, str(next(self._count)))

    def close(self) -> None:
        """Removes the directory."""
        with self._lock:
            if self._fd >= 0 and self._is_ours():
                _clear(self.path)
            self._drop()

    def _is_ours(self) -> bool:
        if self._fd < 0:
            return False
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep(root: str) -> int:
    """Removes what dead writers left; answers how many there were."""
    dead = 0
    for path in _workplaces(root):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _try_lock(fd):
                _clear(path)
                dead += 1
        finally:
            os.close(fd)
    return dead


def writers_alive(root: str, besides: str = "") -> bool:
    """Whether another writer than the one whose workplace is ``besides`` is at work on the root."""
    for path in _workplaces(root):
        if path == besides:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if not _try_lock(fd):
                return True
        finally:
            os.close(fd)
    return False


def unlink_quietly(path: str) -> None:
    """Removes a temporary file; one that stays is swept one day."""
    try:
        os.unlink(path)
    except OSError:
        pass


def _workplaces(root: str) -> list[str]:
    control = os.path.join(root, CONTROL_DIR)
    try:
        return [os.path.join(control, name) for name in os.listdir(control) if name.startswith(_PREFIX)]
    except OSError:
        return []


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # held, or a file system without locks, where nothing is ever taken for dead
    return True


def _clear(path: str) -> None:
    try:
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
    except OSError:
        pass  # gone already, or nothing we can help; the next sweep tries again
