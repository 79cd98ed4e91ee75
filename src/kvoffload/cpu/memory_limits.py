# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take.

A large allocation is checked against it first, so that it fails with a clear message instead of an out-of-memory kill
or a bus error.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvoffload.errors import CapacityError
from kvoffload.units import format_bytes

__all__ = ["available_bytes", "check_host_memory", "check_shared_memory"]

_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be allocated without swapping: the smaller of the kernel's estimate and this container's limit.

    ``None`` where the system reports neither.
    """
    found = [number for number in (_meminfo_available(proc), _cgroup_available(cgroup)) if number is not None]
    return min(found, default=None)


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


def _meminfo_available(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available(cgroup: Path) -> int | None:
    for limit_name, usage_name in _CGROUP_FILES:
        for folder in (cgroup, cgroup / "memory"):
            try:
                limit = (folder / limit_name).read_text().strip()
                usage = int((folder / usage_name).read_text())
            except (OSError, ValueError):
                continue
            if limit != "max":
                return max(0, int(limit) - usage)
    return None
