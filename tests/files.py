# SPDX-License-Identifier: Apache-2.0
"""List the files under a directory while stores use it, and count the names that stores read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["CountedNames", "disk_bytes"]


def disk_bytes(root: Path) -> int:
    """Return the size of all files under ``root`` that count towards its quota.

    Excludes files that a store's own thread removes during the count.
    """
    total = 0
    for path in root.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


class CountedNames:
    """Counts the names that this process reads from directories."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_read = 0
        self._scandir, self._listdir = os.scandir, os.listdir
        monkeypatch.setattr(os, "scandir", self._scan)
        monkeypatch.setattr(os, "listdir", self._list)

    def _list(self, place: Any = ".") -> list[Any]:
        names = self._listdir(place)
        self.num_read += len(names)
        return names

    def _scan(self, place: Any = ".") -> AbstractContextManager[Iterator[os.DirEntry[Any]]]:
        entries = self._scandir(place)  # opened at once

        @contextmanager
        def counted() -> Iterator[Iterator[os.DirEntry[Any]]]:
            with entries:
                yield self._counted(entries)

        return counted()

    def _counted(self, entries: Iterator[os.DirEntry[Any]]) -> Iterator[os.DirEntry[Any]]:
        for entry in entries:
            self.num_read += 1
            yield entry
