# SPDX-License-Identifier: Apache-2.0
"""Maintenance of a root of files: usage, verification, deletion. All of it works beside running servers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.direct_io import PAGE_BYTES
from kvoffload.tiering.stores.fs.format import SUFFIX, BlockFormat, parse_name, stated_in
from kvoffload.tiering.stores.fs.io import is_absence
from kvoffload.tiering.stores.fs.owned import fans_in, namespaces_of
from kvoffload.tiering.stores.fs.quota import FileSeen, delete_oldest, fan_directories, in_order, seen_in, sweep
from kvoffload.tiering.stores.root import (
    ANYBODYS,
    CONTROL_DIR,
    LARGEST_BLOCK_BYTES,
    SAFE,
    Directories,
    NamespaceUsage,
    access_to,
    find_directory,
    secret_for,
)


class StoreRoot:
    """A root on disk. ``is_sound`` uses the ``secrets``. Raises ``ConfigError`` if ``path`` is not a root."""

    def __init__(self, path: Path, secrets: Sequence[bytes] = ()) -> None:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory; give the 'path' of a 'disk' or 'fs' tier.")
        if not (path / CONTROL_DIR).is_dir():
            raise ConfigError(f"{path} is not a kvoffload store: it has no {CONTROL_DIR} directory.")
        self.path = path
        self._root = str(path.absolute())
        self._secrets = secrets

    def directories(self) -> list[str]:
        """Return the directories of all namespaces, sorted. Skips other directories."""
        return namespaces_of(self._root)

    def directory(self, namespace: str) -> str:
        """Return the directory of a namespace, given by its name or as ``ls`` shows it. Raises ``ConfigError``."""
        return find_directory(namespace, self.directories(), str(self.path))

    def usage(self) -> list[NamespaceUsage]:
        """Return one entry per namespace. Times of use are the files' times (``Quota``). Reads no block."""
        found = []
        for directory in self.directories():
            usage = NamespaceUsage(directory)
            for file in self.files(directory):
                usage.num_blocks += 1
                usage.size_bytes += file.size_bytes
                usage.add_use(file.written_ns)
            found.append(usage)
        return found

    def files(self, directory: str | None = None) -> Iterator[FileSeen]:
        """Return the block files of one namespace's ``directory``, or of all."""
        return (file for file in self._seen(directory) if file.is_block)

    def is_sound(self, file: FileSeen) -> bool | None:
        """Return whether a file verifies; ``None`` if it is gone. Reads a file twice before calling it bad."""
        path = os.path.join(self._root, file.path)
        sound = is_sound(path, self._secrets)
        return is_sound(path, self._secrets) if sound is False else sound

    def remove(self, files: list[FileSeen]) -> int:
        """Delete bad files, regardless of their headers, because their names are those of blocks in our own namespace.
        Returns how many are gone."""
        access_to(self._root)
        count = 0
        with Directories(self._root, ANYBODYS) as opened:
            for file in files:
                try:
                    os.unlink(opened.path(file.path))
                except FileNotFoundError:
                    pass
                except OSError:
                    continue
                count += 1
        return count

    def clear(self, directory: str) -> int:
        """Remove a namespace, and return the number of deleted blocks. Blocks that a server writes meanwhile stay."""
        access_to(self._root)
        count = len(delete_oldest(self._root, list(self.files(directory)), -1))
        with Directories(self._root, ANYBODYS) as opened:
            for path in [*(f"{directory}/{fan}" for fan in fans_in(self._root, directory)), directory]:
                try:
                    os.rmdir(opened.path(path))
                except OSError:
                    pass  # a server has just written there again, or it contains files that are not ours
        return count

    def sweep(self) -> int:
        """Remove files that dead writers left at least an hour ago. Returns the number of files."""
        access_to(self._root)
        return sweep(self._root, [*self._seen(), *seen_in(self._root, CONTROL_DIR)])

    def would_shrink(self, max_bytes: int | None) -> tuple[int, int, int]:
        """Return the result of a ``shrink`` without doing it: the blocks to delete, the bytes to free, and the bytes on
        the disk before."""
        files = list(self._seen())
        num_bytes = sum(file.size_bytes for file in files)
        blocks = freed_bytes = 0
        for file in in_order([file for file in files if file.is_block], ()):
            if max_bytes is None or num_bytes - freed_bytes <= max_bytes:
                break
            blocks += 1
            freed_bytes += file.size_bytes
        return blocks, freed_bytes, num_bytes

    def shrink(self, max_bytes: int | None) -> tuple[int, int]:
        """Delete the oldest blocks of all namespaces until at most ``max_bytes`` are left. With ``None``, delete
        nothing.

        Returns the number of deleted blocks and the bytes on the disk.
        """
        files = list(self._seen())
        gone = list[FileSeen]()
        if max_bytes is not None:
            access_to(self._root)
            unfinished_bytes = sum(file.size_bytes for file in files if not file.is_block)
            gone = delete_oldest(self._root, [file for file in files if file.is_block], max_bytes - unfinished_bytes)
        return len(gone), sum(file.size_bytes for file in files) - sum(file.size_bytes for file in gone)

    def _seen(self, directory: str | None = None) -> Iterator[FileSeen]:
        namespaces = self.directories() if directory is None else [directory]
        for paths in fan_directories(self._root, namespaces).values():
            for path in paths:
                yield from seen_in(self._root, path)


def is_sound(path: str, secrets: Sequence[bytes] = ()) -> bool | None:
    """Return whether the file at ``path`` contains exactly the block that its path names; ``None`` if it is gone."""
    directory, fan, name = path.rsplit(os.sep, 2)
    directory = os.path.basename(directory)
    try:
        with open(os.open(path, os.O_RDONLY | SAFE), "rb") as file:
            start = file.read(PAGE_BYTES)
            if (stated := stated_in(start)) is None:
                return False
            block_bytes, identity = stated
            if block_bytes > LARGEST_BLOCK_BYTES:
                return False
            layout = BlockFormat(directory, block_bytes, secret_for(directory, secrets))
            if os.fstat(file.fileno()).st_size != layout.file_bytes:
                return False
            if (key := parse_name(name)) is None:  # a long key, whose identity is the name
                is_its_own = name == f"~{identity.hex()}{SUFFIX}"
            else:
                is_its_own = layout.path_of(key) == f"{directory}/{fan}/{name}" and layout.identity(key) == identity
            file.seek(layout.header_bytes)
            payload = memoryview(bytearray(file.read()))
            return is_its_own and layout.unseal(start[: layout.header_bytes], identity, payload)
    except OSError as exc:
        if is_absence(exc):
            return None
        raise
