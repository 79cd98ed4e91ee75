# SPDX-License-Identifier: Apache-2.0
"""Maintenance of the local disk's store: usage, verification, deletion.

All of it works beside running servers. A slab that a server writes to is read, but never changed. The server itself
detects a bad block when it reads it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.disk.directory import (
    LOCK_NAME,
    SlabSeen,
    is_unused,
    namespaces_in,
    remove_slabs,
    root_lock,
    slabs_in,
    sweep,
    try_remove,
    unlink_slab,
)
from kvoffload.tiering.stores.disk.file import SlabFile, SlabRefused
from kvoffload.tiering.stores.disk.format import (
    EMPTY_ENTRY,
    ENTRY,
    PAGE_BYTES,
    TABLE_SUFFIX,
    SlabFormat,
)
from kvoffload.tiering.stores.disk.slabs import NS
from kvoffload.tiering.stores.root import (
    CONTROL_DIR,
    LARGEST_BLOCK_BYTES,
    SAFE,
    NamespaceUsage,
    access_to,
    check_locks,
    find_directory,
    secret_for,
)
from kvoffload.tiering.stores.seal import SEAL_BYTES
from kvoffload.units import printable

_PATIENCE_S = 5.0


def is_disk_root(path: Path) -> bool:
    """Return whether a ``DiskStore`` has used this root."""
    return (path / CONTROL_DIR / LOCK_NAME).is_file()


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block found in a table, or a whole slab that cannot be used."""

    directory: str
    slab: str
    index: int
    """Slot of the block, or -1 for the slab."""
    size_bytes: int
    entry: bytes = b""

    @property
    def path(self) -> str:
        """Where the block is, for people to read."""
        return f"{printable(self.directory)}/{self.slab}" + (f"[{self.index}]" if self.index >= 0 else TABLE_SUFFIX)


class DiskRoot:
    """A root on disk. ``is_sound`` uses the ``secrets``. Raises ``ConfigError`` if ``path`` is not a root."""

    def __init__(self, path: Path, secrets: Sequence[bytes] = ()) -> None:
        if not is_disk_root(path):
            raise ConfigError(f"{path} is not a kvoffload store of a 'disk' tier.")
        self.path = path
        self._root = str(path.absolute())
        check_locks(self._root)
        self._access = access_to(self._root)
        self._secrets = secrets

    def directories(self) -> list[str]:
        """Return the directories of all namespaces with a slab, sorted."""
        return sorted(name for name, fd in self._namespaces() if slabs_in(fd))

    def directory(self, namespace: str) -> str:
        """Return the directory of a namespace, given by its name or as ``ls`` shows it. Raises ``ConfigError``."""
        return find_directory(namespace, self.directories(), str(self.path))

    def usage(self) -> list[NamespaceUsage]:
        """Return one entry per namespace. Reads only tables."""
        found = []
        for directory, dir_fd in self._namespaces():
            usage = NamespaceUsage(directory)
            for slab in slabs_in(dir_fd):
                usage.size_bytes += slab.num_bytes
                try:
                    with self._opened(directory, slab.name, dir_fd) as (file, _):
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

    def files(self, directory: str | None = None) -> Iterator[StoredBlock]:
        """Return the blocks of one namespace, or of all."""
        for name, dir_fd in self._namespaces(directory):
            for slab in slabs_in(dir_fd):
                if slab.is_new:
                    continue
                try:
                    with self._opened(name, slab.name, dir_fd) as (file, layout):
                        entries = bytes(file.read_entries(0, file.num_slots))
                        held = np.flatnonzero(np.frombuffer(entries, ENTRY)["length"])
                except FileNotFoundError:
                    continue
                except (SlabRefused, OSError):
                    yield StoredBlock(name, slab.name, -1, slab.num_bytes)
                    continue
                size = ENTRY.itemsize
                for index in held.tolist():
                    entry = entries[index * size : (index + 1) * size]
                    yield StoredBlock(name, slab.name, index, layout.block_bytes, entry)

    def is_sound(self, block: StoredBlock) -> bool | None:
        """Return whether a block verifies; ``None`` if it is gone. Reads a block twice before calling it bad."""
        for name, dir_fd in self._namespaces(block.directory):
            try:
                with self._opened(name, block.slab, dir_fd) as (file, layout):
                    if block.index < 0:
                        return None  # good after all: a server has replaced it
                    payload = memoryview(bytearray(layout.block_bytes))
                    for _ in range(2):
                        is_whole = file.read_buffered(block.index, payload)
                        seal = block.entry[:SEAL_BYTES]
                        if layout.tail_bytes:
                            seal += file.read_tails(block.index, 1)
                        probe = layout.key_of(block.entry).probe
                        if is_whole and layout.sealer.unseal(seal, probe, payload, payload):
                            return True
                        if bytes(file.read_entries(block.index, 1)) != block.entry:
                            return None
            except SlabRefused:
                pass
            except FileNotFoundError:
                return None
            return False
        return None

    def remove(self, blocks: list[StoredBlock]) -> int:
        """Empty the slots of bad blocks, and remove bad slabs, unless a server writes to the slab. Returns their
        number."""
        count = 0
        for block in blocks:
            for name, dir_fd in self._namespaces(block.directory):
                try:
                    if block.index < 0:
                        with self._root_lock():
                            count += try_remove(block.slab, dir_fd)
                        continue
                    with self._opened(name, block.slab, dir_fd) as (file, _):
                        if file.try_lock() and bytes(file.read_entries(block.index, 1)) == block.entry:
                            file.write_entries(block.index, EMPTY_ENTRY)
                            count += 1
                except (SlabRefused, OSError):
                    continue
        return count

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

    def sweep(self) -> int:
        """Remove unfinished slabs of dead processes. Returns the number of slabs."""
        with self._root_lock():
            return sum(sweep(dir_fd, slabs_in(dir_fd)) for _, dir_fd in self._namespaces())

    def would_shrink(self, max_bytes: int | None) -> tuple[int, int, int]:
        """Return the result of a ``shrink`` without doing it: the blocks to delete, the bytes to free, and the bytes on
        the disk before. It removes whole slabs, so it may free more than the excess."""
        slabs = self._by_age()
        num_bytes = sum(slab.num_bytes for _, slab in slabs)
        excess = 0 if max_bytes is None else num_bytes - max_bytes
        blocks = freed_bytes = 0
        for name, slab in slabs:
            if freed_bytes >= excess:
                break
            freed_bytes += slab.num_bytes
            for directory, dir_fd in self._namespaces(name):
                with suppress(SlabRefused, OSError), self._opened(directory, slab.name, dir_fd) as (file, _):
                    table = np.frombuffer(file.read_entries(0, file.num_slots), ENTRY)
                    blocks += int(np.count_nonzero(table["length"]))
        return blocks, freed_bytes, num_bytes

    def shrink(self, max_bytes: int | None) -> tuple[int, int]:
        """Remove slabs until at most ``max_bytes`` are left: first slabs of namespaces without a server, then slabs
        that no server writes to, then the others, each group by last use. A server notices the loss of its slab within
        a second, and creates another if its own quota has room. With ``None``, remove nothing. Returns the number of
        deleted blocks and the bytes on the disk."""
        blocks_before = sum(usage.num_blocks for usage in self.usage())
        with self._root_lock():
            named = self._by_age()
            num_bytes = sum(slab.num_bytes for _, slab in named)
            excess = 0 if max_bytes is None else num_bytes - max_bytes
            freed_bytes = remove_slabs(self._root, self._access, named, excess)
            freed_bytes += remove_slabs(self._root, self._access, named, excess - freed_bytes, also_locked=True)
            num_bytes -= freed_bytes
        return blocks_before - sum(usage.num_blocks for usage in self.usage()), num_bytes

    def _by_age(self) -> list[tuple[str, SlabSeen]]:
        """Return all slabs in the order that ``shrink`` removes them."""
        slabs = list[tuple[bool, str, SlabSeen]]()
        for name, dir_fd in self._namespaces():
            is_used = not is_unused(dir_fd)
            slabs += [(is_used, name, slab) for slab in slabs_in(dir_fd)]
        slabs.sort(key=lambda one: (one[0], one[2].used_ns))
        return [one[1:] for one in slabs]

    @contextmanager
    def _opened(self, directory: str, slab: str, dir_fd: int) -> Iterator[tuple[SlabFile, SlabFormat]]:
        """Open a slab for reading. Raises ``SlabRefused`` or ``OSError``."""
        fd = os.open(slab + TABLE_SUFFIX, os.O_RDONLY | SAFE, dir_fd=dir_fd)
        try:
            block_bytes = SlabFormat.block_bytes_in(os.pread(fd, PAGE_BYTES, 0))
        finally:
            os.close(fd)
        if block_bytes is None or block_bytes > LARGEST_BLOCK_BYTES:
            raise SlabRefused(f"{slab} has a damaged header")
        layout = SlabFormat(directory, block_bytes, secret_for(directory, self._secrets))
        file = SlabFile.open(slab, layout, dir_fd, self._access)
        try:
            yield file, layout
        finally:
            file.close()

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
                raise ConfigError(f"Another process keeps {self.path} locked; try again later.")
            time.sleep(0.05)

    def _namespaces(self, only: str | None = None) -> Iterator[tuple[str, int]]:
        return namespaces_in(self._root, self._access, only)
