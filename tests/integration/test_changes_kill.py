# SPDX-License-Identifier: Apache-2.0
"""Writers that are killed while a fleet exchanges keys, namespaces and disks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.sizes import by_size

ROOT = Path(__file__).parents[2]


def test_writers_killed_amid_changes_of_keys_namespaces_and_disks_leave_no_wrong_block(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.changes_killer", str(tmp_path / "kv"), str(by_size(6, 200))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
