# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at each step of a write, and at random: ``KVOFFLOAD_KILL_SECONDS=600`` makes the random part long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = float(os.environ.get("KVOFFLOAD_KILL_SECONDS", "6"))


@pytest.mark.timeout(300 + 2 * SECONDS)
@pytest.mark.parametrize("how", [["steps"], ["random", str(SECONDS)]], ids=["each step", "at random"])
def test_killed_writers_leave_nothing_wrong(how: list[str], tmp_path: Path) -> None:
    script = Path(__file__).with_name("store_killer.py")
    command = [sys.executable, str(script), how[0], str(tmp_path / "kv"), *how[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
