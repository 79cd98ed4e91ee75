# SPDX-License-Identifier: Apache-2.0
"""What lies under a directory, while stores work on it."""

from __future__ import annotations

import stat
from pathlib import Path

__all__ = ["disk_bytes"]


def disk_bytes(root: Path) -> int:
    """The size of all files under ``root``. One that a store's own thread removes meanwhile does not count."""
    total = 0
    for path in root.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
