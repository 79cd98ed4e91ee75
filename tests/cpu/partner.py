# SPDX-License-Identifier: Apache-2.0
"""Other processes of an engine that shares a region, for ``test_region.py``."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kvoffload.cpu import region


def join(pipe: Connection, name: str, num_processes: int, mark: int, mount: str) -> None:
    """Mark one of eight blocks, and report the contents of each block after the next message."""
    shared = region.SharedOffloadRegion.shared(name, 8, 4096, num_processes=num_processes, mount=Path(mount))
    view = np.asarray(shared.create_kv_memoryview())
    view[mark] = mark + 100
    pipe.send("mapped")
    pipe.recv()
    pipe.send(view[:, 0].tolist())


def stop_at(pipe: Connection, name: str, mount: str, where: str) -> None:
    """Stops while it holds the start-up lock, or while it allocates pages."""

    def stuck(*_: object) -> None:
        pipe.send("made")
        pipe.recv()

    if where == "lock":
        region.os.pwrite = stuck
    else:
        region.os.posix_fallocate = stuck
    region.SharedOffloadRegion.shared(name, 8, 4096, num_processes=2, mount=Path(mount))


def make_beyond(pipe: Connection, limit: int, kinds: Sequence[str], name: str, mount: Path) -> None:
    """Set a limit of this process that is smaller than a region, make regions, and send their errors."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 if limit == resource.RLIMIT_AS else 0
    resource.setrlimit(limit, (used_bytes + (8 << 20),) * 2)
    found = []
    for kind in kinds:
        try:
            if kind == "anonymous":
                region.SharedOffloadRegion.anonymous(16, 1 << 20)
            else:
                region.SharedOffloadRegion.shared(name, 16, 1 << 20, 1, mount=mount)
        except Exception as exc:  # noqa: BLE001 - the test compares it
            found.append((type(exc).__name__, str(exc)))
    pipe.send(found)
