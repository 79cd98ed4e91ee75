# SPDX-License-Identifier: Apache-2.0
"""The configuration keys of a ``disk`` tier."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
from collections.abc import Iterable
from functools import partial

import msgspec

from kvoffload.cpu.memory_limits import memory_file_system
from kvoffload.errors import ConfigError, Problems, causes
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.direct_io import BLOCK_ERRORS, REFUSED
from kvoffload.tiering.stores.disk.format import SlabFormat
from kvoffload.tiering.stores.disk.quota import check_memory, existing_directory
from kvoffload.tiering.stores.disk.store import DiskStore
from kvoffload.tiering.stores.in_time import in_time
from kvoffload.tiering.stores.local import DirectoryOptions, open_each
from kvoffload.tiering.stores.root import check_apart
from kvoffload.tiering.stores.striped import Striped
from kvoffload.units import counted, parse_bytes

logger = logging.getLogger(__name__)

_BROKEN = (
    *BLOCK_ERRORS,
    *REFUSED,
    errno.ENXIO,
    errno.ENODEV,
    errno.ESHUTDOWN,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
)
_LOOK_S = 5.0
"""Time limit for a disk to report its size."""


class DiskOptions(DirectoryOptions, frozen=True, kw_only=True):
    """``{"type": "disk", "path": "/mnt/nvme/kv", "max_bytes": "200GiB"}``: a local disk, which the servers of one host
    may share, or a pool in ``/dev/shm``. With a list of paths, each of several disks stores a part of the blocks."""

    _make = DiskStore

    path: str | list[str]
    """The directory: an absolute path, or one that starts with ``~``. kvoffload creates it if it is missing. For
    several disks, a list with a directory on each, in any order."""
    max_bytes: int | str | list[int | str] | None = None
    """Quota on everything below ``path``; at the quota, the least recently used blocks are overwritten. For several
    disks, give one quota, which is divided by their sizes, or a list with one for each. Required on a memory file
    system. Default: four fifths of the disk, because Kubernetes evicts pods if a disk has little free space."""

    @property
    def directories(self) -> tuple[str, ...]:
        return tuple(os.path.expanduser(path) for path in ([self.path] if isinstance(self.path, str) else self.path))

    @property
    def bound_bytes(self) -> int | None:
        if isinstance(self.max_bytes, list):
            return sum(parse_bytes(size, f"max_bytes of the {self.type!r} tier") for size in self.max_bytes)
        return None if self.max_bytes is None else parse_bytes(self.max_bytes, f"max_bytes of the {self.type!r} tier")

    def check(self, block_bytes: int | None = None) -> None:
        problems = Problems()
        if not self.directories:
            problems.add(f"path of the {self.type!r} tier is an empty list; name a directory.")
        if isinstance(self.max_bytes, list) and len(self.max_bytes) != len(self.directories):
            problems.add(
                f"max_bytes of the {self.type!r} tier has {counted(len(self.max_bytes), 'size')} for "
                f"{counted(len(self.directories), 'path')}; give one for each, or one for all of them together."
            )
        with problems:
            DirectoryOptions.check(self, block_bytes)
        for one, other in itertools.combinations(self.directories, 2):
            with problems:
                check_apart(one, other, f"Two paths of the {self.type!r} tier have")
        problems.raise_found()

    def each_disk(self) -> list[DiskOptions]:
        """Return separate options for each disk. A common quota is divided by the sizes of the file systems."""
        paths, quotas = self.directories, list[int | str | None]()
        if isinstance(self.max_bytes, list):
            quotas += self.max_bytes
        elif len(paths) == 1 or self.bound_bytes is None:
            quotas += [self.max_bytes] * len(paths)
        else:
            sizes = _sizes(paths)
            quotas += [self.bound_bytes * size // sum(sizes) for size in sizes]
        return [
            msgspec.structs.replace(self, path=path, max_bytes=quota) for path, quota in zip(paths, quotas, strict=True)
        ]

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        """Open the disks at the same time. A disk that is broken or does not answer in time is left out if another one
        works."""
        disks = self.each_disk()
        opened = open_each(disks, block_bytes, namespace)
        stores, paths, missing, failures = list[BlockStore](), list[str](), list[str](), list[BaseException]()
        for disk, outcome in zip(disks, opened, strict=True):
            if not isinstance(outcome, BaseException):
                stores.append(outcome)
                paths.append(disk.directory)
                continue
            missing.append(disk.directory)
            failures.append(outcome)
        mistakes = [failure for failure in failures if not _is_broken(failure)]
        if failures and (mistakes or not stores):
            for store in stores:
                store.close()
            raise (mistakes or failures)[0]
        for failure in failures:
            logger.warning("The %r tier continues without one of its disks until a restart: %s", self.label, failure)
        return stores[0] if len(disks) == 1 else Striped(stores, self.threads, paths=paths, missing=missing)

    def check_place(self, beside_bytes: int = 0) -> None:
        """Raise ``ConfigError`` if ``path`` is on a memory file system and ``max_bytes`` is missing, or the memory is
        too small for the pool and ``beside_bytes`` of something else."""
        for disk in self.each_disk():
            place = os.path.abspath(disk.directory)
            if disk.max_bytes is None and (kind := memory_file_system(existing_directory(place))) is not None:
                raise ConfigError(
                    f"path of the {self.label!r} tier, {place}, is in memory ({kind}); set max_bytes, the limit "
                    "for all engines that share this path."
                )
            check_memory(place, disk.bound_bytes, beside_bytes)

    def _open(self, block_bytes: int, namespace: str, secret: bytes | None) -> BlockStore:
        self.check_place()
        return DirectoryOptions._open(self, block_bytes, namespace, secret)

    @property
    def quota(self) -> str:
        if self.max_bytes is None:
            return f"four fifths of {'the' if len(self.directories) == 1 else 'each'} disk"
        return super().quota

    def _two_blocks_bytes(self, block_bytes: int) -> int:
        return len(self.directories) * SlabFormat("", block_bytes).slab_bytes(2)


def _sizes(paths: Iterable[str]) -> list[int]:
    """Return the bytes of the file systems. A disk that does not answer counts as the average of the others."""
    calls = [partial(_size, path) for path in paths]
    # If a disk does not report its size, opening it will show the reason.
    sizes = [size if isinstance(size, int) else 0 for size in in_time(calls, _LOOK_S)]
    average = sum(sizes) // max(sum(size > 0 for size in sizes), 1)
    return [size or average or 1 for size in sizes]


def _size(path: str) -> int:
    return shutil.disk_usage(existing_directory(path)).total


def _is_broken(error: BaseException) -> bool:
    """Return whether the disk caused the error, not the configuration."""
    return any(isinstance(each, OSError) and each.errno in _BROKEN for each in causes(error))
