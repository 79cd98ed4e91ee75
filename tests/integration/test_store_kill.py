# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at system calls of a write, and at random. For a longer run, call the script by hand with more kills."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from tests.sizes import by_size

ROOT = Path(__file__).parents[2]
NOT_PERMITTED = 77  # as in the script
STRIDE = by_size(quick=32, thorough=1)
KILLS = by_size(quick=6, thorough=400)


SMALL, PAGED = 3000, 65536
IN_PAIRS = [
    *[("fs", "steps", SMALL), ("fs", "random", PAGED), ("disk", "steps", PAGED), ("disk", "random", SMALL)],
    ("disk-encrypted", "steps", SMALL),
]


@pytest.mark.parametrize(
    ("kind", "how", "block_bytes"),
    by_size(IN_PAIRS, [*product(["fs", "disk", "disk-encrypted"], ["steps", "random"], [SMALL, PAGED])]),
)
def test_killed_writers_leave_nothing_wrong(kind: str, how: str, block_bytes: int, tmp_path: Path) -> None:
    number = STRIDE if how == "steps" else KILLS
    script = [sys.executable, "-m", "tests.integration.store_killer"]
    command = [*script, kind, how, str(tmp_path / "kv"), str(block_bytes), str(number)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(f"this host does not permit tracing: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
