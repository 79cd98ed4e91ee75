# SPDX-License-Identifier: Apache-2.0
"""A wall clock that jumps under a client, native code included, and under servers that are started with it.

``python -m tests.jumping_clock OPTIONS`` is such a client: it uses the store of a tier's options before, between and
after the jumps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.redis_server import PATIENCE_S
from tests.tiering.stores.blocks import BLOCK_BYTES, read, write

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore

DAY_S = 86_400
JUMPS = ((0, False), (DAY_S, False), (-DAY_S, False), (400 * DAY_S, False), (DAY_S, True), (0, False))
"""Seconds, and whether every other look sees them subtracted."""

Outcome = dict[str, Any]
"""The result of a round after a jump: the detected offset of the clock, and the answers of a write and two reads, or
the text of the error."""


def compiler() -> str | None:
    return shutil.which("cc")


class JumpingClock:
    """A clock that jumps.

    Processes with its ``environment`` use it, and ``set`` makes it jump in all of them at once.
    """

    def __init__(self, directory: Path) -> None:
        built = compiler()
        assert built is not None
        library, self._plan = directory / "clock.so", directory / "clock"
        subprocess.run([built, "-shared", "-fPIC", "-o", library, Path(__file__).with_name("clock.c")], check=True)
        self._plan.write_bytes(bytes(16))
        self.environment = {**os.environ, "LD_PRELOAD": str(library), "KVO_CLOCK": str(self._plan)}

    def run_client(self, options: dict[str, Any]) -> list[Outcome]:
        """Run a client and return an outcome for each of ``JUMPS``."""
        words = [sys.executable, "-m", "tests.jumping_clock", json.dumps(options)]
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        outcomes: list[Outcome] = json.loads(done.stdout.splitlines()[-1])
        return outcomes


def check(outcomes: list[Outcome]) -> None:
    """Only misses while the clock is wrong, and all is well before and some time after."""
    for (seconds, swings), outcome in zip(JUMPS, outcomes, strict=True):
        assert swings or abs(outcome["off_s"] - seconds) < DAY_S // 2, "the clock did not jump"
        for name in ("write", "read own", "read first"):
            assert isinstance(outcome[name], list) or "\n" not in outcome[name], outcome
    for outcome in (outcomes[0], outcomes[-1]):
        assert _is_well(outcome), outcome


def _is_well(outcome: Outcome) -> bool:
    return [outcome[name] for name in ("write", "read own", "read first")] == [[True]] * 3


def _client(options: dict[str, Any]) -> list[Outcome]:
    begun = time.time() - time.monotonic()
    store = parse_tier(options, BLOCK_BYTES).open_store(BLOCK_BYTES, "ns")
    outcomes = []
    for number, (seconds, swings) in enumerate(JUMPS):
        with open(os.environ["KVO_CLOCK"], "r+b") as plan:
            plan.write(struct.pack("qq", seconds, swings))
        outcomes.append(_round(store, number, time.time() - time.monotonic() - begun))
    end_s = time.monotonic() + PATIENCE_S / 2
    while not _is_well(outcomes[-1]) and time.monotonic() < end_s:  # servers may need a while to see that time is back
        number += 1
        with contextlib.suppress(StoreError):
            write(store, keys(0))
        outcomes[-1] = _round(store, number, outcomes[-1]["off_s"])
    store.close()
    return outcomes


def _round(store: BlockStore, number: int, off_s: float) -> Outcome:
    outcome: Outcome = {"off_s": off_s}
    own, first = keys(number), keys(0)
    for name, call, wanted in (("write", write, own), ("read own", read, own), ("read first", read, first)):
        try:
            outcome[name] = call(store, wanted)
        except StoreError as exc:
            outcome[name] = str(exc)
    return outcome


if __name__ == "__main__":
    print(json.dumps(_client(json.loads(sys.argv[1]))))
