# SPDX-License-Identifier: Apache-2.0
"""Find our own files and directories below a root. Other programs may store theirs beside them, under any name."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator

from kvoffload.tiering.stores.fs.format import (
    fan_of_name,
    identity_of,
    is_blank,
    is_our_name,
    parse_name,
    stated_in,
)
from kvoffload.tiering.stores.root import ANYBODYS, SAFE, Access, Directories

_FILES_TRIED = 64
"""Number of a directory's files whose headers are read before it counts as another program's."""
_START_BYTES = 128
_LOOKED_SHARE = 20
"""A directory that is not ours is checked again after this many times the duration of the check."""


class Namespaces:
    """The directories of namespaces below a root that a process knows. Any thread may use it."""

    def __init__(self, root: str, access: Access | None = None, own: str = "") -> None:
        """``own`` is the directory that this process uses, which is ours even if it is empty."""
        self._root = root
        self._access = access
        self._own = own
        self._ours = set[tuple[str, int]]()
        self._look_at_s: dict[tuple[str, int], float] = {}
        """Times at which directories that are not ours are checked again."""

    def known(self) -> list[str]:
        """Return the sorted directories. Skips other programs' directories, unreadable ones, and with ``access`` also
        other users'."""
        names = list[str]()
        with contextlib.suppress(OSError), os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == "lost+found":
                    continue
                with contextlib.suppress(OSError):  # deleted meanwhile
                    status = entry.stat(follow_symlinks=False)
                    is_admitted = self._access is None or self._access.admits(status)
                    if is_admitted and entry.is_dir(follow_symlinks=False) and self._is_ours(entry.name, status.st_ino):
                        names.append(entry.name)
        return sorted(names)

    def _is_ours(self, name: str, inode: int) -> bool:
        place, began_s = (name, inode), time.monotonic()
        if name == self._own or place in self._ours:
            return True
        if began_s < self._look_at_s.get(place, 0.0):
            return False
        if holds_blocks(self._root, name):
            self._ours.add(place)
            return True
        ended_s = time.monotonic()
        self._look_at_s[place] = ended_s + _LOOKED_SHARE * (ended_s - began_s)
        return False


def namespaces_of(root: str) -> list[str]:
    """Return the directories of all namespaces, sorted."""
    return Namespaces(root).known()


def holds_blocks(root: str, namespace: str) -> bool:
    """Return whether the header of a file in this directory identifies it as a block of this namespace."""
    tried = 0
    with Directories(root, ANYBODYS) as opened, contextlib.suppress(OSError):
        for fan in fans_in(root, namespace):
            for name in ours_in(root, f"{namespace}/{fan}"):
                if _proves(opened.path(f"{namespace}/{fan}/{name}"), namespace, name):
                    return True
                if (tried := tried + 1) >= _FILES_TRIED:
                    return False
    return False


def is_ours(path: str) -> bool:
    """Return whether the file at ``path`` begins like a block, or is blank, as after a power failure. A deleted file
    also counts as ours."""
    try:
        start = _start_of(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return is_blank(start) or stated_in(start) is not None


def fans_in(root: str, namespace: str) -> Iterator[str]:
    """Return the names of the directories for blocks in a namespace. Raises ``OSError``."""
    return (name for name in list_names(root, namespace) if fan_of_name(name) is not None)


def ours_in(root: str, directory: str, access: Access | None = None) -> list[str]:
    """Return the names of our block files and temporary files in one directory. Returns none if it cannot be read."""
    fan = directory.rpartition("/")[2]
    with contextlib.suppress(OSError):
        return [name for name in list_names(root, directory, access) if is_our_name(fan, name)]
    return []


def list_names(root: str, directory: str, access: Access | None = None) -> list[str]:
    """Return the names in one directory, as the server of a network mount lists them. Returns none if the directory
    does not exist, is a link, or, with ``access``, belongs to another user. Raises ``OSError``."""
    with Directories(root, access or ANYBODYS) as opened:
        try:
            return os.listdir(opened.fd(directory))
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.EPERM):
                return []
            raise


def _proves(path: str, namespace: str, name: str) -> bool:
    try:
        stated = stated_in(_start_of(path))
    except OSError:
        return False
    if stated is None:
        return False
    key = parse_name(name)
    return key is None or identity_of(namespace, key) == stated[1]


def _start_of(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | SAFE)
    try:
        return os.pread(fd, _START_BYTES, 0)
    finally:
        os.close(fd)
