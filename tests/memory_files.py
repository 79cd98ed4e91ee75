# SPDX-License-Identifier: Apache-2.0
"""Directories whose files are memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffload.cpu.memory_limits import memory_file_system

__all__ = ["memory_directory", "unbounded_directory"]

_SHM = "/dev/shm"


@contextmanager
def memory_directory() -> Iterator[Path]:
    """Yield a new directory on a tmpfs, which is removed afterwards."""
    if not os.access(_SHM, os.W_OK) or memory_file_system(_SHM) != "tmpfs":
        pytest.skip(f"needs a tmpfs at {_SHM}")
    with tempfile.TemporaryDirectory(dir=_SHM, prefix="kvoffload-test-") as path:
        yield Path(path)


@contextmanager
def unbounded_directory(place: Path) -> Iterator[Path]:
    """Mount a tmpfs without a size at ``place``, and yield it."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=0", "kvoffload-test", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a test that fails leaves files open
