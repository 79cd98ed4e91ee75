# SPDX-License-Identifier: Apache-2.0
"""Test the cost of an outage."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.sim.result import RequestFigures

SECONDS = np.arange(400, dtype=np.float64)
BLOCKS = np.full(400, 10)


def figures(found: np.ndarray) -> RequestFigures:
    """A request each second. From 100 s to 200 s first tokens take three seconds, otherwise one."""
    return RequestFigures(SECONDS, np.where((SECONDS >= 100) & (SECONDS < 200), 3.0, 1.0), BLOCKS, found)


def test_before_meanwhile_and_after() -> None:
    outage = figures(np.where(SECONDS < 100, 8, np.where(SECONDS < 250, 2, 8))).outage("shared", 100.0, 200.0)
    assert outage.hit_rates == pytest.approx((0.8, 0.2, 0.5))
    assert outage.ttft_p90_s == (1.0, 3.0, 1.0)
    # Of the last 50 requests, 40 or more find 8 blocks and the others 2: 0.9 of 0.8 is reached with 43 of them.
    assert outage.recovery_s == pytest.approx(250 + 43 - 1 + 1.0 - 200, abs=1.0)


def test_what_is_not_in_the_trace_is_not_made_up() -> None:
    alone = figures(np.full(400, 5)).outage("shared", 390.0, 500.0)
    assert alone.hit_rates == pytest.approx((0.5, 0.5, None))
    assert alone.ttft_p90_s[2] is None
    assert alone.recovery_s is None
    never = figures(np.where(SECONDS < 100, 8, 1)).outage("shared", 100.0, 200.0)
    assert never.recovery_s is None
    at_once = figures(np.full(400, 5)).outage("shared", 10.0, 20.0)
    assert at_once.recovery_s is None, "ten requests before it tell too little"


def test_a_server_recovers_by_its_own_requests() -> None:
    served = [(float(second), 0.5) for second in range(100)] + [(200.0 + second, 0.5) for second in range(60)]
    assert figures(np.zeros(400)).outage("server 0", 100.0, 200.0, served).recovery_s == 49.0
