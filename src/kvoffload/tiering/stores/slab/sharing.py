# SPDX-License-Identifier: Apache-2.0
"""How processes share a quota that is used up: who has more slabs gives one to who asks.

A process that finds no room for another slab posts a request, an empty file in the control directory whose name has all
that there is to say. It holds a lock on the file, which the kernel drops when it dies. No process waits for an answer.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from kvoffload.tiering.stores.root import Access, open_control, try_lock

__all__ = ["PostedRequest", "Request", "requests_of_others"]

_NAME = re.compile(r"want-(\d{1,6})-([0-9a-f]{16})-([0-9a-f]{16})")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
