# SPDX-License-Identifier: Apache-2.0
"""Memory limits of the control groups that contain this process.

Control groups nest. systemd, Slurm and Kubernetes may set a limit on any group above the process, so every group from
the process's own up to the root of the mount is read, in both versions of the kernel's interface.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 reports "no limit" as a number of bytes that no machine has."""


class CgroupLimit(NamedTuple):
    folder: Path
    """The group's folder, which tells an operator which limit to raise."""
    limit_bytes: int
    used_bytes: int
    """Memory that the group uses, without cached files: the kernel drops those when the group needs room."""

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


class _Version(NamedTuple):
    """The files of one version of the interface."""

    limit_names: tuple[str, ...]
    usage_name: str
    limit_row: str
    """Row of ``memory.stat`` with the lowest limit of all groups above, including those outside the mount."""
    file_rows: tuple[str, ...]
    """Rows of ``memory.stat`` with cached files."""


# Above memory.high the kernel slows down every allocation, and pinned memory cannot be reclaimed, so it also counts as
# a limit.
_VERSION_2 = _Version(("memory.max", "memory.high"), "memory.current", "", ("active_file", "inactive_file"))
_VERSION_1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "hierarchical_memory_limit",
    ("total_active_file", "total_inactive_file"),
)


def cgroup_limits(root: Path = Path("/")) -> list[CgroupLimit]:
    """Return the memory limits of this process's own group and of all visible groups above it.

    ``root`` is the directory that contains ``proc`` and ``sys``. The list is empty if there is no limit, or if the
    system has no control groups.
    """
    found: dict[Path, CgroupLimit] = {}
    for version, mount, mount_root in _mounts(root):
        for path in _own_paths(root, version):
            for folder in _folders(mount, mount_root, path):
                limit = _limit_of(folder, version)
                if limit is not None:
                    found[folder] = limit
    return list(found.values())


def _mounts(root: Path) -> Iterator[tuple[_Version, Path, str]]:
    """Yield each mounted hierarchy that may limit memory: its version, its mount point, and the group mounted there."""
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, source = line.partition(" - ")
        fields, kinds = mounted.split(), source.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        mount = root / _unescaped(fields[4]).lstrip("/")
        if kinds[0] == "cgroup2":
            yield _VERSION_2, mount, _unescaped(fields[3])
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            yield _VERSION_1, mount, _unescaped(fields[3])


def _own_paths(root: Path, version: _Version) -> Iterator[str]:
    """Yield the path of this process's group in the hierarchy."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_version_2 = number == "0" and not controllers
        if is_version_2 if version is _VERSION_2 else "memory" in controllers.split(","):
            yield path


def _folders(mount: Path, mount_root: str, path: str) -> list[Path]:
    """Return the folders of the group ``path`` and of all groups above it, up to the mount.

    A container may see the path of its group from outside, while only that group is mounted: then the part above the
    mount is cut off. If the group is not below the mount, only the mount itself is read.
    """
    above = [part for part in mount_root.split("/") if part]
    parts = [part for part in path.split("/") if part]
    below = parts[len(above) :] if parts[: len(above)] == above and ".." not in parts else []
    return [mount.joinpath(*below[:depth]) for depth in range(len(below), -1, -1)]


def _limit_of(folder: Path, version: _Version) -> CgroupLimit | None:
    stat = {row[0]: row[1] for row in (line.split() for line in _lines(folder / "memory.stat")) if len(row) == 2}
    texts = ["".join(_lines(folder / name)) for name in version.limit_names] + [stat.get(version.limit_row, "")]
    limits = [int(text) for text in texts if text.isdecimal() and int(text) < _NO_LIMIT_BYTES]
    if not limits:
        return None
    usage = "".join(_lines(folder / version.usage_name))
    used_bytes = int(usage) if usage.isdecimal() else 0
    # Weights that were just read are cached files.
    cached_bytes = sum(int(stat[row]) for row in version.file_rows if stat.get(row, "").isdecimal())
    return CgroupLimit(folder, min(limits), max(0, used_bytes - cached_bytes))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(text: str) -> str:
    """Decode a path from ``mountinfo``, where the kernel writes blanks and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
