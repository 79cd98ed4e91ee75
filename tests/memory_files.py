# SPDX-License-Identifier: Apache-2.0
"""Directories whose files are memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffload.cpu.memory_limits import memory_file_system

__all__ = ["memory_directory"]

_SHM = "/dev/shm"


@contextmanager
def memory_directory() -> Iterator[Path]:
    """Yield a new directory on a tmpfs, which is removed afterwards."""
    if not os.access(_SHM, os.W_OK) or memory_file_system(_SHM) != "tmpfs":
        pytest.skip(f"needs a tmpfs at {_SHM}")
    with tempfile.TemporaryDirectory(dir=_SHM, prefix="kvoffload-test-") as path:
        yield Path(path)
