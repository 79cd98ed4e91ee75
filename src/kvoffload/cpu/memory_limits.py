# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still allocate.

Every large allocation is checked first, so that it fails with a clear message instead of an out-of-memory kill or a
bus error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from kvoffload.cpu.cgroups import cgroup_limits
from kvoffload.errors import CapacityError
from kvoffload.units import format_bytes

SHM = Path("/dev/shm")
"""The mount in which processes of this machine share memory."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process can allocate without swapping or being killed, or ``None`` if unknown.

    This is the least of the kernel's estimate for the machine and of the room below each control group's limit. Cached
    files count as available in both. ``root`` is the directory that contains ``proc`` and ``sys``.
    """
    rooms = [limit.available_bytes for limit in cgroup_limits(root)]
    machine = _meminfo(root, "MemAvailable:")
    return min(rooms if machine is None else [machine, *rooms], default=None)


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the machine's memory in bytes, or ``None`` if unknown."""
    return _meminfo(root, "MemTotal:")


def limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the lowest limit of this process's control groups, or ``None`` if there is none."""
    return min((limit.limit_bytes for limit in cgroup_limits(root)), default=None)


def check_all_engines(wanted: int, num_engines: int, *, root: Path = Path("/"), mount: Path | None = None) -> None:
    """Raise ``CapacityError`` if ``num_engines`` engines can never allocate ``wanted`` bytes each.

    The bounds are the machine's memory, the limits of this process's control groups, and the size of the shared-memory
    ``mount``. Memory in use does not count: each engine may ask at any time, also once it has its part.
    """
    bounds = {"this machine has": memory_bytes(root)}
    for limit in cgroup_limits(root):
        bounds[f"the control group {limit.folder} may use"] = limit.limit_bytes
    if mount is not None and mount.is_dir() and (room := room_of(mount)) is not None:
        bounds[f"{mount} holds"] = room.total_bytes
    for holder, bound in bounds.items():
        if bound is not None and wanted * num_engines > bound:
            raise CapacityError(
                f"{num_engines} engines on this machine take {format_bytes(wanted)} of cpu_bytes_to_use each, "
                f"{format_bytes(wanted * num_engines)} together, but {holder} only {format_bytes(bound)}; divide "
                "cpu_bytes_to_use among the engines, and let them share a disk tier in /dev/shm."
            )


def check_host_memory(wanted: int, promised: int = 0) -> None:
    """Raise ``CapacityError`` if fewer than ``wanted`` bytes are available, in addition to the ``promised`` bytes that
    other processes are about to allocate."""
    available = available_bytes()
    if available is not None and wanted > available - promised:
        raise CapacityError(
            f"cpu_bytes_to_use needs {format_bytes(wanted)} of host memory, but only "
            f"{format_bytes(max(0, available - promised))} are available{_tightest_limit(available)}; lower "
            "cpu_bytes_to_use, free memory, or raise the limit of the container or job."
        )


def check_shared_memory(wanted: int, mount: Path, promised: int = 0) -> None:
    """Raise ``CapacityError`` if the shared-memory ``mount`` has no room for ``wanted`` bytes, in addition to the
    ``promised`` bytes that other processes are about to allocate."""
    room = room_of(mount)
    if room is not None and wanted > (free := max(0, room.free_bytes - promised)):
        raise CapacityError(
            f"cpu_bytes_to_use needs {format_bytes(wanted)} of shared memory, but {mount} has only "
            f"{format_bytes(free)} free; lower cpu_bytes_to_use or enlarge that mount (docker: --shm-size)."
        )


class Room(NamedTuple):
    """The size of a file system, and the part of it that this user may still use."""

    total_bytes: int
    free_bytes: int


def room_of(path: str | os.PathLike[str]) -> Room | None:
    """Return the room on the file system of ``path``, or ``None`` if it has no bound, like a tmpfs without a size.
    Raises ``OSError``."""
    stats = os.statvfs(path)
    return Room(stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail) if stats.f_blocks else None


def memory_file_system(path: str | os.PathLike[str]) -> str | None:
    """Return the type of the file system of ``path`` if its files are memory."""
    found = mount_type(path)
    return found if found in ("tmpfs", "devtmpfs", "ramfs", "hugetlbfs") else None


def mount_type(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system of ``path`` in the table of mounts, or ``""`` if it is not known."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            mount = re.search(r"mnt_id:\s*(\d+)", Path(f"/proc/self/fdinfo/{fd}").read_text())
        finally:
            os.close(fd)
        rows = [row.split() for row in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    return next((row[row.index("-") + 1] for row in rows if mount is not None and row[0] == mount[1]), "")


def check_pool(max_bytes: int, used_bytes: int, path: str | os.PathLike[str], beside_bytes: int = 0) -> None:
    """Raise ``CapacityError`` unless a pool of ``max_bytes`` fits into the memory file system of ``path`` and into
    memory, in addition to the ``beside_bytes`` that something else is about to allocate. The pool already uses
    ``used_bytes``, which are not needed again."""
    missing_bytes = max(0, max_bytes - used_bytes)
    pool = f"The pool in {path} may grow by {format_bytes(missing_bytes)} to its max_bytes, {format_bytes(max_bytes)},"
    room, available = room_of(path), available_bytes()
    if room is not None and missing_bytes > room.free_bytes:
        raise CapacityError(
            f"{pool} but its file system has only {format_bytes(room.free_bytes)} free; lower max_bytes or enlarge "
            "that mount (docker: --shm-size)."
        )
    if available is not None and missing_bytes + beside_bytes > available:
        beside = f", in addition to {format_bytes(beside_bytes)} of host memory" if beside_bytes else ""
        raise CapacityError(
            f"{pool} but only {format_bytes(available)} of memory are available{_tightest_limit(available)}{beside}; "
            "lower max_bytes, free memory, or raise the limit of the container or job."
        )


def _tightest_limit(available: int, root: Path = Path("/")) -> str:
    """Name the control group that leaves ``available`` bytes, for an error message; empty if the machine does."""
    limit = min(cgroup_limits(root), key=lambda each: each.available_bytes, default=None)
    # Other processes allocate and free meanwhile, so the group's room has changed a little since it was first read.
    if limit is None or limit.available_bytes > available + (available >> 3):
        return ""
    return f" (the control group {limit.folder} is limited to {format_bytes(limit.limit_bytes)})"


def _meminfo(root: Path, row: str) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(row):
            return int(line.split()[1]) * 1024
    return None
