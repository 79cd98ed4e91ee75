# SPDX-License-Identifier: Apache-2.0
"""Find our own files and directories below a root. Other programs may store theirs beside them, under any name."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Iterator

from kvoffload.tiering.stores.fs.format import (
    SUFFIX,
    fan_of_name,
    identity_of,
    is_blank,
    is_our_name,
    parse_name,
    stated_in,
)
from kvoffload.tiering.stores.root import ANYBODYS, SAFE, Access, Directories

NAMES_AT_ONCE = 256
"""Number of names that are read from a directory at once, which may contain millions."""
_NAMES_TRIED = 16_384
"""Number of names in a directory that are read to find ours. Another program's directory may contain millions."""
_FILES_TRIED = 64
"""Number of a directory's files whose headers are read before it counts as another program's."""
_BLANK_BLOCKS = 8
"""Number of blank files, as after a power failure, that prove a directory ours without any header. A name in hex whose
checksum is the directory that contains it is a coincidence in one of 256 files."""
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


def holds_blocks(root: str, namespace: str) -> bool:
    """Return whether the header of a file in this directory identifies it as a block of this namespace, or whether
    several files have names of blocks and no content."""
    num_tried = num_blank = 0
    with Directories(root, ANYBODYS) as opened:
        for fan, name in itertools.islice(_names_of(root, namespace), _NAMES_TRIED):
            if not is_our_name(fan, name):
                continue
            with contextlib.suppress(OSError):
                start = _start_of(opened.path(f"{namespace}/{fan}/{name}"))
                num_blank += is_blank(start) and name.endswith(SUFFIX)
                if _proves(start, namespace, name) or num_blank >= _BLANK_BLOCKS:
                    return True
            if (num_tried := num_tried + 1) >= _FILES_TRIED:
                break
    return False


def _names_of(root: str, namespace: str) -> Iterator[tuple[str, str]]:
    """Yield fan and name of each file of a namespace. Skips unreadable directories."""
    with contextlib.suppress(OSError):
        for fan in fans_in(root, namespace):
            with contextlib.suppress(OSError):
                for names in names_in(root, f"{namespace}/{fan}"):
                    yield from ((fan, name) for name in names)


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
    names = itertools.chain.from_iterable(names_in(root, namespace))
    return (name for name in itertools.islice(names, _NAMES_TRIED) if fan_of_name(name) is not None)


def names_in(root: str, directory: str, access: Access | None = None) -> Iterator[list[str]]:
    """Yield the names in one directory, a few at a time, as the server of a network mount lists them. Yields none if
    the directory does not exist, is a link, or, with ``access``, belongs to another user. Raises ``OSError``."""
    with Directories(root, access or ANYBODYS) as opened:
        try:
            entries = os.scandir(opened.fd(directory))
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.EPERM):
                return
            raise
    with entries as left:
        while names := [entry.name for entry in itertools.islice(left, NAMES_AT_ONCE)]:
            yield names


def _proves(start: bytes, namespace: str, name: str) -> bool:
    if (stated := stated_in(start)) is None:
        return False
    key = parse_name(name)
    return key is None or identity_of(namespace, key) == stated[1]


def _start_of(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | SAFE)
    try:
        return os.pread(fd, _START_BYTES, 0)
    finally:
        os.close(fd)
