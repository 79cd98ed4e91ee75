# SPDX-License-Identifier: Apache-2.0
"""When a circuit breaker opens, probes and closes."""

from __future__ import annotations

from kvoffload.testing import ManualClock
from kvoffload.tiering.circuit_breaker import CircuitBreaker


def opened() -> tuple[CircuitBreaker, ManualClock]:
    clock = ManualClock()
    breaker = CircuitBreaker("tests", threshold=3, first_wait_s=1, longest_wait_s=4, clock=clock)
    assert [breaker.record_failure() for _ in range(3)] == [False, False, True]
    return breaker, clock


def test_a_success_between_failures_starts_the_count_anew() -> None:
    breaker = CircuitBreaker("tests", threshold=2, clock=ManualClock())
    for _ in range(5):
        assert not breaker.record_failure()
        assert not breaker.record_success()
    assert breaker.is_closed


def test_one_probe_at_a_time_and_each_later_than_the_last() -> None:
    breaker, clock = opened()
    for wait_s in (1, 2, 4, 4):
        assert not breaker.begin_probe()
        clock.advance(wait_s - 0.25)
        assert not breaker.begin_probe()
        clock.advance(0.25)
        assert breaker.begin_probe()
        assert not breaker.begin_probe()
        assert not breaker.record_failure()
    clock.advance(4)
    assert breaker.begin_probe()
    assert breaker.record_success()
    assert breaker.is_closed
    assert not breaker.record_failure()


def test_late_failures_of_earlier_calls_do_not_delay_the_probe() -> None:
    breaker, clock = opened()
    clock.advance(0.5)
    breaker.record_failure()
    clock.advance(0.5)
    assert breaker.begin_probe()


def test_a_cancelled_probe_may_be_repeated() -> None:
    breaker, clock = opened()
    clock.advance(1)
    assert breaker.begin_probe()
    breaker.cancel_probe()
    assert breaker.begin_probe()


def test_one_grave_failure_opens_it() -> None:
    breaker = CircuitBreaker("tests", clock=ManualClock())
    assert breaker.record_failure(is_grave=True)
    assert not breaker.is_closed
