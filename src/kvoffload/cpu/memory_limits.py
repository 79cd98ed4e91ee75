# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take.

A large allocation is checked against it first, so that it fails with a clear message instead of an out-of-memory kill
or a bus error.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from kvoffload.errors import CapacityError
from kvoffload.units import format_bytes

__all__ = ["available_bytes", "check_host_memory", "check_shared_memory", "limit_bytes", "memory_bytes"]

_CGROUP_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""Of the second and the first version: limit, usage, and the rows of ``memory.stat`` with files, part of the usage."""


_NO_LIMIT_BYTES = 1 << 60


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


def check_host_memory(wanted: int) -> None:
    """Raises ``CapacityError`` if fewer than ``wanted`` bytes are available now."""
    available = available_bytes()
    if available is not None and wanted > available:
        raise CapacityError(
            f"The primary tier needs {format_bytes(wanted)} of host memory and {format_bytes(available)} are "
            "available; lower cpu_bytes_to_use or free memory."
        )


def check_shared_memory(wanted: int, mount: Path) -> None:
    """Raises ``CapacityError`` if the shared-memory mount has no room for ``wanted`` bytes."""
    stats = os.statvfs(mount)
    free = stats.f_bavail * stats.f_frsize
    if wanted > free:
        raise CapacityError(
            f"The primary tier needs {format_bytes(wanted)} of shared memory and {mount} has {format_bytes(free)} "
            "free; lower cpu_bytes_to_use or enlarge that mount (docker: --shm-size)."
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
