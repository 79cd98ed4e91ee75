# SPDX-License-Identifier: Apache-2.0
"""What the processes of a root exchange: which slabs have changed, and who asks for one. No process waits for another.

Each namespace has a bulletin, a file of counters. Whoever changes a slab changes its counter, so that others read one
file, and only the tables of slabs that have changed.

A process that finds no room for another slab posts a request, an empty file in the control directory whose name says
all. It holds a lock on the file, which the kernel drops when it dies. Who has more slabs gives one to who asks.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvoffload.tiering.stores.root import Access, open_control, try_lock

__all__ = ["BULLETIN_NAME", "Bulletin", "PostedRequest", "Request", "requests_of_others"]

BULLETIN_NAME = "changes"
_NUM_COUNTERS = 1024
_NAME = re.compile(r"want-(\d{1,6})-([0-9a-f]{16})-([0-9a-f]{16})")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Bulletin:
    """The counters of a namespace's slabs, several to a counter where there are many. One thread at a time.

    Without the file, for instance on a full disk, nothing is announced, and all slabs may have changed.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._fd = -1
        self._seen = np.zeros(_NUM_COUNTERS, np.uint32)

    def open(self, dir_fd: int) -> None:
        """Opens the bulletin of a directory, and makes it if need be. What is open is kept if it is still that."""
        if self._fd >= 0 and os.fstat(self._fd).st_nlink:
            return
        self.close()
        fd = -1
        try:
            fd = os.open(BULLETIN_NAME, _FLAGS | os.O_CREAT, self._access.file_mode, dir_fd=dir_fd)
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or not self._access.admits(status):
                raise PermissionError(f"{BULLETIN_NAME} is not ours")
            if status.st_size != 4 * _NUM_COUNTERS:
                if self._access.is_group:  # the umask took bits away
                    os.fchmod(fd, self._access.file_mode)
                os.ftruncate(fd, 4 * _NUM_COUNTERS)
            self._fd = fd
        except OSError:
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def announce(self, slabs: Iterable[str]) -> None:
        """Slabs of these names have changed, as their tables say already."""
        if self._fd < 0:
            return
        for counter in {_counter_of(name) for name in slabs}:
            try:
                os.pwrite(self._fd, secrets.token_bytes(4), 4 * counter)  # not one more, which two may write at once
            except OSError:
                return

    def take_changed(self) -> Callable[[str], bool]:
        """Which slabs may have changed since the last call."""
        try:
            content = os.pread(self._fd, 4 * _NUM_COUNTERS, 0) if self._fd >= 0 else b""
        except OSError:
            content = b""
        if len(content) != 4 * _NUM_COUNTERS:
            return lambda name: True
        counters = np.frombuffer(content, np.uint32)
        changed = set(np.flatnonzero(counters != self._seen).tolist())
        self._seen = counters
        return lambda name: _counter_of(name) in changed


def _counter_of(slab: str) -> int:
    return zlib.crc32(slab.encode()) % _NUM_COUNTERS


@dataclass(frozen=True, slots=True)
class Request:
    """``num_slabs`` is what the process has. ``identity`` stands for namespace and block size."""

    num_slabs: int
    identity: str
    process: str

    @property
    def name(self) -> str:
        return f"want-{self.num_slabs}-{self.identity}-{self.process}"


class PostedRequest:
    """This process's own request. One thread at a time."""

    def __init__(self, root: str, identity: str, access: Access) -> None:
        self.process = secrets.token_hex(8)
        self._root = root
        self._identity = identity
        self._access = access
        self._fd = -1
        self._name = ""

    def post(self, num_slabs: int) -> None:
        """Posts a request, or changes the one that is posted. Raises ``OSError``."""
        name = Request(num_slabs, self._identity, self.process).name
        if name == self._name:
            return
        control = open_control(self._root, self._access)
        try:
            if self._fd >= 0:
                os.rename(self._name, name, src_dir_fd=control, dst_dir_fd=control)
            else:
                self._fd = os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, self._access.file_mode, dir_fd=control)
                if self._access.is_group:  # the umask took bits away
                    os.fchmod(self._fd, self._access.file_mode)
                try_lock(self._fd)
            self._name = name
        except FileNotFoundError:
            self.withdraw()  # taken for a dead one's before it was locked: posted anew at the next call
        finally:
            os.close(control)

    def withdraw(self) -> None:
        if self._fd < 0:
            return
        try:
            control = open_control(self._root, self._access)
            try:
                os.unlink(self._name, dir_fd=control)
            finally:
                os.close(control)
        except OSError:
            pass  # the root is gone, or somebody took it for a dead one's
        os.close(self._fd)
        self._fd, self._name = -1, ""


def requests_of_others(root: str, access: Access, own_process: str) -> Iterator[Request]:
    """The requests of living processes. Removes those of the dead. Raises ``OSError``."""
    control = open_control(root, access)
    try:
        for name in os.listdir(control):
            match = _NAME.fullmatch(name)
            if match is None or match[3] == own_process:
                continue
            try:
                fd = os.open(name, _FLAGS, dir_fd=control)
            except OSError:
                continue  # withdrawn, or not for us
            try:
                if not access.admits(os.fstat(fd)):
                    continue
                if try_lock(fd):
                    os.unlink(name, dir_fd=control)
                else:
                    yield Request(int(match[1]), match[2], match[3])
            except OSError:
                continue
            finally:
                os.close(fd)
    finally:
        os.close(control)
