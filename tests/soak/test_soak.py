# SPDX-License-Identifier: Apache-2.0
"""A few seconds of the soak, so that it never rots. ``make soak`` runs it for as long as you like."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.soak.soak import Sample, flat

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_short_soak(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.soak.soak", "--minutes", "0.3", "--seed", str(random.randrange(1000))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 wrong tokens." in result.stdout


def test_what_grows_is_found_and_what_wanders_is_not() -> None:
    wandering = [Sample(400 + at % 7, 20 + at % 5, 12 + at % 3) for at in range(60)]
    assert flat(wandering) == []
    assert flat([Sample(400 + 3 * at, 20, 12) for at in range(60)]) == ["rss_mib grew from 488 to 548"]
    assert flat([Sample(400, 20 + 2 * at, 12) for at in range(60)]) == ["descriptors grew from 79 to 119"]
    assert flat([Sample(400, 20, 12 + at // 2) for at in range(60)]) == ["threads grew from 26 to 36"]
    assert flat([Sample(400 + 50 * at, 20, 12) for at in range(12)]) == [], "too few to say"
