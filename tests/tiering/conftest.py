# SPDX-License-Identifier: Apache-2.0
"""Rigs of store tiers, which leave neither threads nor references to their memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.tiering.store_rig import Rig


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs = []
    before = set(threading.enumerate())

    def make(**options) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.gate.open_gate()
        rig.tier.shutdown()
        gc.collect()
        rig.view.release()  # raises if a thread or a job still refers to it
    deadline = time.monotonic() + 120
    while left := [t for t in threading.enumerate() if t not in before]:
        assert time.monotonic() < deadline, f"threads left behind: {left}"
        time.sleep(0.01)
