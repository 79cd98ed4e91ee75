# SPDX-License-Identifier: Apache-2.0
"""Control groups as the kernel shows them to a process: files in both versions of the interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Version:
    name: str
    folder: str
    """The usual mount point of the hierarchy."""
    own_line: str
    """The process's line in ``/proc/self/cgroup``."""
    kind: str
    """File system, source and options in a line of ``/proc/self/mountinfo``."""
    limit_name: str
    usage_name: str
    no_limit: str
    file_rows: tuple[str, str]

    def mount(self, root: Path, own: str, mounted: str = "/", at: str | None = None) -> None:
        """Put the process into the group ``own``, and mount the group ``mounted`` at ``at``."""
        escaped = mounted.replace(" ", "\\040")
        place = "/" + (at or self.folder).replace(" ", "\\040")
        (root / "proc/self").mkdir(parents=True, exist_ok=True)
        (root / "proc/self/cgroup").write_text(
            f"5:cpu,cpuacct:/wrong\n{self.own_line}{own}\n1:name=systemd:/wrong/either\n"
        )
        (root / "proc/self/mountinfo").write_text(
            "23 1 0:5 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"
            "30 31 0:40 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            f"31 23 0:41 {escaped} {place} rw,nosuid shared:9 master:3 - {self.kind}\n"
        )

    def group(
        self,
        root: Path,
        path: str,
        limit: int | None,
        usage: int = 0,
        cached: tuple[int, int] | None = None,
        at: str | None = None,
    ) -> None:
        """Make or change the group that is found at ``path`` below the mount."""
        folder = root / (at or self.folder) / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.limit_name).write_text(f"{self.no_limit if limit is None else limit}\n")
        (folder / self.usage_name).write_text(f"{usage}\n")
        rows = "anon 2000\nfile 9000\nshmem 2000\nactive_anon 2000\n"
        rows += "".join(f"{row} {size}\n" for row, size in zip(self.file_rows, cached or (), strict=False))
        (folder / "memory.stat").write_text(rows)


VERSIONS = (
    Version(
        "v1",
        "sys/fs/cgroup/memory",
        "4:hugetlb,memory:",
        "cgroup cgroup rw,hugetlb,memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "9223372036854771712",
        ("total_active_file", "total_inactive_file"),
    ),
    Version(
        "v2",
        "sys/fs/cgroup",
        "0::",
        "cgroup2 cgroup rw,nsdelegate",
        "memory.max",
        "memory.current",
        "max",
        ("active_file", "inactive_file"),
    ),
)
