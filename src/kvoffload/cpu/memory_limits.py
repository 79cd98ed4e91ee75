# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take.

A large allocation is checked against it first, so that it fails with a clear message instead of an out-of-memory kill
or a bus error.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Collection
from pathlib import Path

from kvoffload.errors import CapacityError
from kvoffload.units import format_bytes

_CGROUP_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""Of the second and the first version: limit, usage, and the rows of ``memory.stat`` with files, part of the usage."""

SHM = Path("/dev/shm")
"""Where processes of this machine share memory."""

_NO_LIMIT_BYTES = 1 << 60
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
"""By the number that statfs(2) gives as their type."""
_STATFS_BYTES = 512
"""More than any system's structure takes. The type is the first number in it."""


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be allocated without swapping: the smaller of the kernel's estimate and what this container's
    limit leaves. Files that are only cached count as available in both.

    ``None`` where the system reports neither.
    """
    found = [number for number in (_meminfo(proc, "MemAvailable:"), _cgroup_available(cgroup)) if number is not None]
    return min(found, default=None)


def memory_bytes(proc: Path = Path("/proc")) -> int | None:
    """Bytes of memory that the machine has."""
    return _meminfo(proc, "MemTotal:")


def limit_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """This container's limit; ``None`` if there is none."""
    limit = _cgroup_limit(cgroup)
    return None if limit is None else limit[0]


def check_all_engines(
    wanted: int,
    num_engines: int,
    *,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    mount: Path | None = None,
) -> None:
    """Raises ``CapacityError`` if this machine, its container or the shared-memory ``mount`` can never hold what
    ``num_engines`` engines want together, ``wanted`` bytes each. Each may ask at any time, also once it has its part.
    """
    bounds = {"this machine has": memory_bytes(proc), "this container may use": limit_bytes(cgroup)}
    if mount is not None and mount.is_dir():
        stats = os.statvfs(mount)
        bounds[f"{mount} holds"] = stats.f_blocks * stats.f_frsize
    for holder, bound in bounds.items():
        if bound is not None and wanted * num_engines > bound:
            raise CapacityError(
                f"{num_engines} engines on this machine take {format_bytes(wanted)} of cpu_bytes_to_use each, "
                f"{format_bytes(wanted * num_engines)} together, and {holder} {format_bytes(bound)}; divide "
                "cpu_bytes_to_use among them, and let them share a disk tier in /dev/shm."
            )


def check_host_memory(wanted: int, promised: int = 0) -> None:
    """Raises ``CapacityError`` if fewer than ``wanted`` bytes are available now, beside those ``promised`` to others,
    which are about to take them."""
    available = available_bytes()
    if available is not None and wanted > available - promised:
        raise CapacityError(
            f"cpu_bytes_to_use needs {format_bytes(wanted)} of host memory and "
            f"{format_bytes(max(0, available - promised))} are available; lower cpu_bytes_to_use or free memory."
        )


def check_shared_memory(wanted: int, mount: Path, promised: int = 0) -> None:
    """Raises ``CapacityError`` if the shared-memory mount has no room for ``wanted`` bytes, beside those ``promised``
    to others."""
    stats = os.statvfs(mount)
    free = max(0, stats.f_bavail * stats.f_frsize - promised)
    if wanted > free:
        raise CapacityError(
            f"cpu_bytes_to_use needs {format_bytes(wanted)} of shared memory and {mount} has {format_bytes(free)} "
            "free; lower cpu_bytes_to_use or enlarge that mount (docker: --shm-size)."
        )


def memory_file_system(path: str | os.PathLike[str]) -> str | None:
    """The type of the file system of an existing ``path``, if its files are memory: tmpfs, ramfs or hugetlbfs."""
    return _MEMORY_FILE_SYSTEMS.get(file_system_number(path))


def file_system_number(path: str | os.PathLike[str]) -> int:
    """What statfs(2) gives as the type of the file system of ``path``, 0 where it cannot tell."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    try:
        if ctypes.CDLL(None).statfs(os.fsencode(path), buffer):
            return 0
    except (OSError, AttributeError):
        return 0  # not Linux
    number_bytes = 8 if sys.maxsize > 1 << 32 and platform.machine() != "s390x" else 4
    return int.from_bytes(buffer.raw[:number_bytes], sys.byteorder) & 0xFFFF_FFFF


def check_pool(max_bytes: int, used_bytes: int, path: str | os.PathLike[str], beside_bytes: int = 0) -> None:
    """Raises ``CapacityError`` unless a pool of ``max_bytes`` fits into the memory file system of ``path``, and into
    memory beside the ``beside_bytes`` that something else is about to take. ``used_bytes`` of the pool exist: they are
    in use already, and are not needed again."""
    missing_bytes = max(0, max_bytes - used_bytes)
    pool = (
        f"max_bytes of the pool in {path} is {format_bytes(max_bytes)}, {format_bytes(missing_bytes)} more than it has,"
    )
    stats = os.statvfs(path)
    free, available = stats.f_bavail * stats.f_frsize, available_bytes()
    if stats.f_blocks and missing_bytes > free:  # a ramfs has no blocks, and no bound
        raise CapacityError(
            f"{pool} and its file system has {format_bytes(free)} free; lower max_bytes or enlarge that mount "
            "(docker: --shm-size)."
        )
    if available is not None and missing_bytes + beside_bytes > available:
        beside = f", beside {format_bytes(beside_bytes)} of host memory" if beside_bytes else ""
        raise CapacityError(
            f"{pool} and {format_bytes(available)} of memory are available{beside}; lower max_bytes, free memory, or "
            "raise the container's limit."
        )


def _meminfo(proc: Path, row: str) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(row):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available(cgroup: Path) -> int | None:
    limit = _cgroup_limit(cgroup)
    return None if limit is None else max(0, limit[0] - limit[1])


def _cgroup_limit(cgroup: Path) -> tuple[int, int] | None:
    """Limit, and what of it is used by more than cached files."""
    for limit_name, usage_name, file_rows in _CGROUP_FILES:
        for folder in (cgroup, cgroup / "memory"):
            try:
                limit = (folder / limit_name).read_text().strip()
                usage = int((folder / usage_name).read_text())
            except (OSError, ValueError):
                continue
            # The first version writes "no limit" as a number of pages that no machine has.
            if limit != "max" and int(limit) < _NO_LIMIT_BYTES:
                # Weights that were just read are such files. The kernel drops them for whoever needs room.
                return int(limit), usage - min(usage, _sum_of_rows(folder / "memory.stat", file_rows))
    return None


def _sum_of_rows(path: Path, names: Collection[str]) -> int:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
        return sum(int(row[1]) for row in rows if row[0] in names)
    except (OSError, ValueError, IndexError):
        return 0
