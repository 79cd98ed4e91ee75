# SPDX-License-Identifier: Apache-2.0
"""Maintenance of the local disk's store: usage and deletion, beside running servers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.disk.directory import LOCK_NAME, namespaces_in, root_lock, slabs_in, unlink_slab
from kvoffload.tiering.stores.disk.file import SlabFile, SlabRefused
from kvoffload.tiering.stores.disk.format import ENTRY, PAGE_BYTES, TABLE_SUFFIX, SlabFormat, stated_in
from kvoffload.tiering.stores.disk.slabs import NS
from kvoffload.tiering.stores.root import CONTROL_DIR, SAFE, NamespaceUsage, access_to, check_locks

_PATIENCE_S = 5.0


def is_disk_root(path: Path) -> bool:
    """Return whether a ``DiskStore`` has used this root."""
    return (path / CONTROL_DIR / LOCK_NAME).is_file()


class DiskRoot:
    """A root on disk. Raises ``ConfigError`` if ``path`` is not a root."""

    def __init__(self, path: Path) -> None:
        if not is_disk_root(path):
            raise ConfigError(f"{path} is not a kvoffload store of a 'disk' tier.")
        self._root = str(path.absolute())
        check_locks(self._root)
        self._access = access_to(self._root)

    def directories(self) -> list[str]:
        """Return the directories of all namespaces with a slab, sorted."""
        return sorted(name for name, fd in self._namespaces() if slabs_in(fd))

    def usage(self) -> list[NamespaceUsage]:
        """Return one entry per namespace. Reads only tables."""
        found = []
        for directory, dir_fd in self._namespaces():
            usage = NamespaceUsage(directory)
            for slab in slabs_in(dir_fd):
                usage.size_bytes += slab.num_bytes
                try:
                    with closing(self._opened(directory, slab.name, dir_fd)) as file:
                        table = np.frombuffer(file.read_entries(0, file.num_slots), ENTRY)
                        held = table["length"] != 0
                        used_s = np.maximum(table["written_s"], file.read_uses())[held]
                except (SlabRefused, OSError):
                    continue
                usage.num_blocks += len(used_s)
                for used in (used_s.min(initial=0xFFFF_FFFF), used_s.max(initial=0)) if len(used_s) else ():
                    usage.add_use(int(used) * NS)
            if usage.size_bytes:
                found.append(usage)
        return sorted(found, key=lambda usage: usage.directory)

    def clear(self, directory: str) -> int:
        """Remove all slabs of a namespace. Returns the number of their blocks. A server that uses one continues with a
        new slab within a second."""
        count = sum(usage.num_blocks for usage in self.usage() if usage.directory == directory)
        with self._root_lock():
            for _, dir_fd in self._namespaces(directory):
                for slab in slabs_in(dir_fd):
                    unlink_slab(slab.name, dir_fd)
        try:
            os.rmdir(os.path.join(self._root, directory))
        except OSError:
            pass  # a server has just written there again, or it contains files that are not ours
        return count

    def _opened(self, directory: str, slab: str, dir_fd: int) -> SlabFile:
        """Open a slab for reading. Raises ``SlabRefused`` or ``OSError``."""
        fd = os.open(slab + TABLE_SUFFIX, os.O_RDONLY | SAFE, dir_fd=dir_fd)
        try:
            stated = stated_in(os.pread(fd, PAGE_BYTES, 0))
        finally:
            os.close(fd)
        if stated is None:
            raise SlabRefused(f"{slab} has a damaged header")
        return SlabFile.open(slab, SlabFormat(directory, stated.block_bytes), dir_fd, self._access)

    @contextmanager
    def _root_lock(self) -> Iterator[None]:
        """Hold the root's lock, after waiting for a server that is creating a slab. Raises ``ConfigError`` if that
        takes too long."""
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            with root_lock(self._root, self._access) as is_locked:
                if is_locked:
                    yield
                    return
            if time.monotonic() > end_s:
                raise ConfigError(f"Another process keeps {self._root} locked; try again later.")
            time.sleep(0.05)

    def _namespaces(self, only: str | None = None) -> Iterator[tuple[str, int]]:
        return namespaces_in(self._root, self._access, only)
