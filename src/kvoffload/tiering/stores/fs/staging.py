# SPDX-License-Identifier: Apache-2.0
"""Staging directories: each writer's incomplete files, under a lock that shows whether the writer is alive."""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
import threading

from kvoffload.tiering.stores.fs.format import CONTROL_DIR, STAGING_PREFIX

__all__ = ["StagingDirectory", "sweep", "unlink_quietly", "writers_alive"]


class StagingDirectory:
    """One writer's directory for temporary files. Any number of threads.

    The writer holds a lock on it for as long as it lives, and the kernel releases that however the writer dies. So
    whoever gets the lock may remove the directory.
    """

    def __init__(self, root: str) -> None:
        self._control = os.path.join(root, CONTROL_DIR)
        self._root = root
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._fd = -1
        self.path = ""
        """Empty until the first ``new_paths``."""

    def new_paths(self, count: int) -> list[str]:
        """Absolute paths for ``count`` temporary files, which nobody else uses. Raises ``OSError``.

        Makes the directory unless it is there.
        """
        with self._lock:
            while not self._exists():
                self._make()
            return [f"{self.path}/{next(self._numbers)}" for _ in range(count)]

    def close(self) -> None:
        """Removes the directory."""
        with self._lock:
            if self._exists():
                _remove(self.path)
            self._release()

    def _make(self) -> None:
        self._release()
        if not os.path.isdir(self._root):
            raise FileNotFoundError(f"{self._root} is gone")
        os.makedirs(self._control, exist_ok=True)
        self.path = os.path.join(self._control, STAGING_PREFIX + secrets.token_hex(8))
        os.mkdir(self.path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # swept before it was locked
        if not _try_lock(self._fd):
            self._release()  # another process holds the lock and is about to sweep it

    def _exists(self) -> bool:
        if self._fd < 0:
            return False
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep(root: str) -> int:
    """Removes the staging directories of dead writers. Returns how many there were."""
    num_dead = 0
    for path in _staging_directories(root):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _try_lock(fd):
                _remove(path)
                num_dead += 1
        finally:
            os.close(fd)
    return num_dead


def writers_alive(root: str, besides: str = "") -> bool:
    """Whether a writer is at work on the root, other than the one with the staging directory ``besides``."""
    for path in _staging_directories(root):
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
    """Removes a temporary file. If that fails, a later sweep removes it."""
    try:
        os.unlink(path)
    except OSError:
        pass


def _staging_directories(root: str) -> list[str]:
    control = os.path.join(root, CONTROL_DIR)
    try:
        return [os.path.join(control, name) for name in os.listdir(control) if name.startswith(STAGING_PREFIX)]
    except OSError:
        return []


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # held, or a file system without locks, where no writer ever counts as dead
    return True


def _remove(path: str) -> None:
    try:
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
    except OSError:
        pass  # already gone, or not permitted: the next sweep tries again
