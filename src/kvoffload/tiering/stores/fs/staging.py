# SPDX-License-Identifier: Apache-2.0
"""Staging directories: each writer's incomplete files, under a lock that shows whether the writer is alive."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import threading
from collections.abc import Iterator

from kvoffload.tiering.stores.fs.format import STAGING_PREFIX
from kvoffload.tiering.stores.root import (
    CONTROL_DIR,
    PRIVATE,
    Access,
    make_directory,
    open_control,
    open_directory,
    try_lock,
)

__all__ = ["StagingDirectory", "staged_bytes", "sweep", "unlink_quietly", "writers_alive"]

_MAKE_ATTEMPTS = 100
"""Each failed attempt means another process has swept the new directory before it was locked."""


class StagingDirectory:
    """One writer's directory for temporary files. Any number of threads.

    The writer holds a lock on it for as long as it lives, and the kernel releases that however the writer dies. So
    whoever gets the lock may remove the directory.
    """

    def __init__(self, root: str, access: Access = PRIVATE) -> None:
        self.access = access
        self._control = os.path.join(root, CONTROL_DIR)
        self._root = root
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._fd = -1
        self.path = ""
        """Empty until the first ``new_paths``."""
        self.token = b""
        """Eight bytes that name this writer in the usage file; empty until the first ``new_paths``."""

    def new_paths(self, count: int) -> list[str]:
        """Absolute paths for ``count`` temporary files, for this thread alone. Raises ``OSError``.

        Makes the directory unless it is there.
        """
        with self._lock:
            for _ in range(_MAKE_ATTEMPTS):
                if self._exists():
                    return [f"{self.path}/{next(self._numbers)}" for _ in range(count)]
                self._make()
            raise OSError(errno.EBUSY, "staging directories are swept again and again", self._control)

    def close(self) -> None:
        """Removes the directory."""
        with self._lock:
            if self._exists():
                try:
                    control = open_control(self._root, self.access)
                except OSError:
                    pass
                else:
                    _remove(os.path.basename(self.path), self._fd, control)
                    os.close(control)
            self._release()

    def _make(self) -> None:
        self._release()
        if not os.path.isdir(self._root):
            raise FileNotFoundError(f"{self._root} is gone")
        make_directory(self._control, self.access)
        name = STAGING_PREFIX + secrets.token_hex(8)
        self.path, self.token = os.path.join(self._control, name), _token_of(name)
        control = open_control(self._root, self.access)
        try:
            make_directory(self.path, self.access)
            self._fd = open_directory(name, control)
            is_locked = try_lock(self._fd)
        except FileNotFoundError:
            return  # swept before it was locked
        except OSError:
            if self._fd >= 0:
                _remove(name, self._fd, control)
            self._release()
            raise
        finally:
            os.close(control)
        if not is_locked:
            self._release()  # another process holds the lock and is about to sweep it

    def _exists(self) -> bool:
        if self._fd < 0:
            return False
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep(root: str, access: Access = PRIVATE) -> int:
    """Removes the staging directories of dead writers. Returns how many there were."""
    num_dead = 0
    for name, fd, control in _staging_directories(root, access):
        try:
            if fd is not None and try_lock(fd):
                _remove(name, fd, control)
                num_dead += 1
        except OSError:
            continue  # what cannot be locked is not known to be dead
    return num_dead


def writers_alive(root: str, access: Access = PRIVATE) -> set[bytes]:
    """The tokens of all writers whose directory is there. Those of the dead are gone after a ``sweep``."""
    return {_token_of(name) for name, _, _ in _staging_directories(root, access)}


def staged_bytes(root: str, access: Access = PRIVATE) -> int:
    """The bytes of all writers' incomplete files."""
    total_bytes = 0
    for _, fd, _ in _staging_directories(root, access):
        if fd is None:
            continue
        for name in os.listdir(fd):
            try:
                total_bytes += os.stat(name, dir_fd=fd, follow_symlinks=False).st_size
            except OSError:
                continue  # published meanwhile
    return total_bytes


def unlink_quietly(path: str) -> None:
    """Removes a temporary file. If that fails, a later sweep removes it."""
    try:
        os.unlink(path)
    except OSError:
        pass


def _token_of(name: str) -> bytes:
    try:
        return bytes.fromhex(name.removeprefix(STAGING_PREFIX))
    except ValueError:
        return b""


def _staging_directories(root: str, access: Access) -> Iterator[tuple[str, int | None, int]]:
    """Name and descriptor of each staging directory, and the control directory's. They are closed afterwards.

    A link is skipped. A directory that cannot be opened has ``None``.
    """
    try:
        control = open_control(root, access)
    except OSError:
        return
    try:
        for name in os.listdir(control):
            if not name.startswith(STAGING_PREFIX):
                continue
            try:
                fd = open_directory(name, control)
            except PermissionError:
                yield name, None, control
                continue
            except OSError:
                continue  # gone meanwhile, a link or a file
            try:
                yield name, fd, control
            finally:
                os.close(fd)
    finally:
        os.close(control)


def _remove(name: str, fd: int, control: int) -> None:
    """Removes the staging directory ``name``, open as ``fd``. Through descriptors, so that no link leads elsewhere."""
    try:
        for file in os.listdir(fd):
            os.unlink(file, dir_fd=fd)
        os.rmdir(name, dir_fd=control)
    except OSError:
        pass  # already gone, or not permitted: the next sweep tries again
