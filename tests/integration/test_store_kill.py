# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at each system call of a write, and at random for ``KVOFFLOAD_KILL_SECONDS`` (600 for a long test)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOT_PERMITTED = 77  # as in the script
SECONDS = float(os.environ.get("KVOFFLOAD_KILL_SECONDS", "4"))


@pytest.mark.timeout(300 + 2 * SECONDS)
@pytest.mark.parametrize("how", [["steps"], ["random", str(SECONDS)]], ids=["each call", "at random"])
@pytest.mark.parametrize("block_bytes", [3000, 65536], ids=["small", "paged"])
def test_killed_writers_leave_nothing_wrong(how: list[str], block_bytes: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("store_killer.py")
    command = [sys.executable, str(script), how[0], str(tmp_path / "kv"), str(block_bytes), *how[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(f"this host does not permit tracing: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
