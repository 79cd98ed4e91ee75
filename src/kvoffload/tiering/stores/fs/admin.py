# SPDX-License-Identifier: Apache-2.0
"""Maintenance of a file store: usage, verification, deletion.

All of it works beside running servers, with the same locks and the same count of bytes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.fs.format import PAGE_BYTES, SUFFIX, BlockFormat, Header, parse_name
from kvoffload.tiering.stores.fs.quota import Deletion, Quota
from kvoffload.tiering.stores.fs.staging import StagingDirectory, sweep
from kvoffload.tiering.stores.fs.usage_file import FileSeen, walk
from kvoffload.tiering.stores.root import (
    CONTROL_DIR,
    Access,
    NamespaceUsage,
    check_control,
    check_locks,
    find_directory,
)

__all__ = ["StoreRoot", "is_sound"]

_CHUNK_BYTES = 1 << 20


class StoreRoot:
    """A root on disk. Raises ``ConfigError`` if ``path`` is not one."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory; give the 'path' of an 'fs' tier.")
        if not (path / CONTROL_DIR).is_dir():
            raise ConfigError(f"{path} is not a kvoffload store: it has no {CONTROL_DIR} directory.")
        self.path = path
        self._root = str(path.absolute())

    def directories(self) -> list[str]:
        """The directories of all namespaces, sorted. Skips other directories."""
        found = (entry.name for entry in os.scandir(self._root) if entry.is_dir(follow_symlinks=False))
        return sorted(name for name in found if not name.startswith(".") and name != "lost+found")

    def directory(self, namespace: str) -> str:
        """The directory of a namespace, which is given by its name or as ``ls`` shows it. Raises ``ConfigError``."""
        return find_directory(namespace, self.directories(), str(self.path))

    def usage(self) -> list[NamespaceUsage]:
        """One entry per namespace. Reads no block."""
        found = []
        for directory in self.directories():
            usage = NamespaceUsage(directory)
            for files in walk(self._root, directory):
                for file in files:
                    usage.num_blocks += 1
                    usage.size_bytes += file.size_bytes
                    usage.add_use(file.used_ns)
            found.append(usage)
        return found

    def files(self, directory: str | None = None) -> Iterator[FileSeen]:
        """The block files of one namespace's ``directory``, or of all."""
        for one in self.directories() if directory is None else [directory]:
            for files in walk(self._root, one):
                yield from files

    def is_sound(self, file: FileSeen) -> bool | None:
        """Whether a file verifies, ``None`` if it is gone. Reads a file twice before it calls it bad."""
        sound = is_sound(os.path.join(self._root, file.path))
        return is_sound(os.path.join(self._root, file.path)) if sound is False else sound

    def remove(self, files: list[FileSeen]) -> int:
        """Deletes files and subtracts their bytes from the count. Returns how many there were."""
        with self._quota(None) as quota:
            return quota.remove(Deletion(file.path, file.size_bytes) for file in files)

    def clear(self, directory: str) -> int:
        """Removes a namespace. Returns how many blocks it had. What a server writes meanwhile stays."""
        count = self.remove(list(self.files(directory)))
        top = os.path.join(self._root, directory)
        for path in [*(entry.path for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)), top]:
            try:
                os.rmdir(path)
            except OSError:
                pass  # a server has just written there again, or it holds files that are not ours
        return count

    def sweep(self) -> int:
        """Removes the staging directories of dead writers. Returns how many there were."""
        return sweep(self._root, self._access())

    def shrink(self, max_bytes: int | None) -> tuple[int, int]:
        """Enforces a quota on what is on the disk now, and counts that anew.

        Returns the number of deleted files and the bytes on the disk.
        """
        with self._quota(max_bytes) as quota:
            return quota.shrink(max_bytes)

    @contextmanager
    def _quota(self, max_bytes: int | None) -> Iterator[Quota]:
        staging = StagingDirectory(self._root, self._access())
        quota = Quota(self._root, max_bytes, staging)
        try:
            yield quota
        finally:
            quota.close()
            staging.close()

    def _access(self) -> Access:
        """As the servers on this root have it. Raises ``ConfigError`` if the root is not for us to change."""
        check_locks(self._root)
        shared = stat.S_ISGID | stat.S_IRWXG
        is_group = (self.path / CONTROL_DIR).lstat().st_mode & shared == shared
        return check_control(self._root, "group" if is_group else "private")


def is_sound(path: str) -> bool | None:
    """Whether the file at ``path`` holds the block that its path says, byte for byte. ``None`` if it is gone."""
    directory, fan, name = path.rsplit(os.sep, 2)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            header = Header.parse(file.read(PAGE_BYTES))
            if header is None:
                return False
            layout = BlockFormat(os.path.basename(directory), header.block_bytes)
            if layout.header_bytes != header.header_bytes or os.fstat(file.fileno()).st_size != layout.file_bytes:
                return False
            key = parse_name(name)
            if key is not None and layout.path_of(key) != f"{layout.directory}/{fan}/{name}":
                return False
            stated = layout.identity(key).hex() if key is not None else name.removesuffix(SUFFIX).removeprefix("~")
            if stated != header.identity.hex():
                return False
            file.seek(header.header_bytes)
            digest = xxhash.xxh3_128()
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            return digest.digest() == header.digest
    except FileNotFoundError:
        return None
