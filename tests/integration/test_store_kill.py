# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at system calls of a write, and at random. For a longer run, call the script by hand with more kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.sizes import by_size

ROOT = Path(__file__).parents[2]
NOT_PERMITTED = 77  # as in the script
STRIDE = by_size(quick=16, thorough=1)
KILLS = by_size(quick=10, thorough=400)


@pytest.mark.parametrize(("how", "number"), [("steps", STRIDE), ("random", KILLS)], ids=["by calls", "at random"])
@pytest.mark.parametrize("block_bytes", [3000, 65536], ids=["small", "paged"])
@pytest.mark.parametrize("kind", ["fs", "disk", "disk-encrypted"])
def test_killed_writers_leave_nothing_wrong(kind: str, how: str, number: int, block_bytes: int, tmp_path: Path) -> None:
    script = [sys.executable, "-m", "tests.integration.store_killer"]
    command = [*script, kind, how, str(tmp_path / "kv"), str(block_bytes), str(number)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(f"this host does not permit tracing: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
