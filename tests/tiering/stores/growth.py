# SPDX-License-Identifier: Apache-2.0
"""Measure a process's resources, to show that a store's failures leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    files: int
    threads: int
    resident_bytes: int


def held() -> Held:
    """Return the resources that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * os.sysconf("SC_PAGE_SIZE")
    )


def check_growth(before: Held, after: Held) -> None:
    """No file and no thread more, and no memory to speak of."""
    assert after.files <= before.files
    assert after.threads <= before.threads
    assert after.resident_bytes - before.resident_bytes < 8 << 20
