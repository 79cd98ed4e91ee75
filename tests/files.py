# SPDX-License-Identifier: Apache-2.0
"""List the files under a directory while stores use it."""

from __future__ import annotations

import stat
from pathlib import Path

from kvoffload.tiering.stores.disk.upkeep import BULLETIN_NAME

__all__ = ["disk_bytes"]


def disk_bytes(root: Path) -> int:
    """Return the size of all files under ``root`` that count towards its quota.

    Excludes a disk store's bulletin of 4 KiB, and files that a store's own thread removes during the count.
    """
    total = 0
    for path in root.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        total += status.st_size if stat.S_ISREG(status.st_mode) and path.name != BULLETIN_NAME else 0
    return total
