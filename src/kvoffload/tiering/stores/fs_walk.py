# SPDX-License-Identifier: Apache-2.0
"""What is on a root: its block files, by names and inodes alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from kvoffload.tiering.stores.fs.format import CONTROL_DIR, SUFFIX

__all__ = ["FileSeen", "walk"]


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A block file as a walk finds it; ``path`` is relative to the root."""

    path: str
    size_bytes: int
    used_ns: int
    """Time of last use (the file's mtime)."""


def walk(root: str, directory: str | None = None) -> Iterator[list[FileSeen]]:
    """Every block file, one list per directory of files; of one namespace's ``directory``, or of all.

    Reads directories and inodes only. What cannot be read or is not ours is left out.
    """
    for space in [directory] if directory is not None else _names(root):
        if space == CONTROL_DIR:
            continue
        for fan in _names(os.path.join(root, space)):
            if len(fan) == 2:
                yield _files(root, f"{space}/{fan}")


def _names(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _files(root: str, directory: str) -> list[FileSeen]:
    seen = []
    try:
        with os.scandir(os.path.join(root, directory)) as entries:
            for entry in entries:
                if not entry.name.endswith(SUFFIX):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    seen.append(FileSeen(f"{directory}/{entry.name}", status.st_size, status.st_mtime_ns))
    except OSError:
        pass
    return seen
