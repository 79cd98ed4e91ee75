# SPDX-License-Identifier: Apache-2.0
"""Maintenance of a root of files: usage and deletion, beside running servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.fs.owned import Namespaces, fans_in
from kvoffload.tiering.stores.fs.quota import FileSeen, delete_oldest, fan_directories, seen_in
from kvoffload.tiering.stores.root import ANYBODYS, CONTROL_DIR, Directories, NamespaceUsage, access_to


class StoreRoot:
    """A root on disk. Raises ``ConfigError`` if ``path`` is not a root."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory; give the 'path' of a 'disk' or 'fs' tier.")
        if not (path / CONTROL_DIR).is_dir():
            raise ConfigError(f"{path} is not a kvoffload store: it has no {CONTROL_DIR} directory.")
        self._root = str(path.absolute())

    def directories(self) -> list[str]:
        """Return the directories of all namespaces, sorted. Skips other directories."""
        return Namespaces(self._root).known()

    def usage(self) -> list[NamespaceUsage]:
        """Return one entry per namespace. Times of use are the files' times (``Quota``). Reads no block."""
        found = []
        for directory in self.directories():
            usage = NamespaceUsage(directory)
            for file in self._files(directory):
                usage.num_blocks += 1
                usage.size_bytes += file.size_bytes
                usage.add_use(file.written_ns)
            found.append(usage)
        return found

    def clear(self, directory: str) -> int:
        """Remove a namespace, and return the number of deleted blocks. Blocks that a server writes meanwhile stay."""
        access_to(self._root)
        count = len(delete_oldest(self._root, list(self._files(directory)), -1))
        with Directories(self._root, ANYBODYS) as opened:
            for path in [*(f"{directory}/{fan}" for fan in fans_in(self._root, directory)), directory]:
                try:
                    os.rmdir(opened.path(path))
                except OSError:
                    pass  # a server has just written there again, or it contains files that are not ours
        return count

    def _files(self, directory: str) -> Iterator[FileSeen]:
        for paths in fan_directories(self._root, [directory]).values():
            for path in paths:
                yield from (file for file in seen_in(self._root, path) if file.is_block)
