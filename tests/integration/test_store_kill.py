# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at system calls of a write, and at random. For a longer run, call the script by hand with more kills."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from tests.forks import output_of_module
from tests.sizes import by_size

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
    said = output_of_module("tests.integration.store_killer", kind, how, tmp_path / "kv", block_bytes, number)
    if "does not permit" in said:
        pytest.skip(said)
    print(said)
