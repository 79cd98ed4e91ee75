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
from tests.soak.watch import LONGEST_PAUSE_S, WatchedManager

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.testing.keys import keys

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


class Undecided(CPUOffloadingManager):
    """Answers ``None`` until it is set otherwise."""

    answer: bool | None = None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.answer


def test_a_wait_is_the_time_in_which_a_request_is_asked_for_and_not_answered() -> None:
    inner, now_s, request = Undecided(4), 0.0, ReqContext("request")
    watched = WatchedManager(inner, clock=lambda: now_s)
    (key,) = keys(1)
    for _ in range(11):
        watched.lookup(key, request)
        now_s += 0.1
    assert watched.longest_wait_s == pytest.approx(1.0)
    now_s += 60  # the engine makes no requests, and may have answered them from its own cache
    watched.lookup(key, request)
    assert watched.longest_wait_s == pytest.approx(1.0 + LONGEST_PAUSE_S)
    inner.answer = True
    watched.lookup(key, request)
    inner.answer = None
    watched.lookup(key, request)
    assert watched.num_waits == 2
    assert watched.longest_wait_s == pytest.approx(1.0 + LONGEST_PAUSE_S)
