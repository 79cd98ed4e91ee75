# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kvoffload.testing import ManualClock
from kvoffload.tiering.circuit_breaker import Breaker


def opened() -> tuple[Breaker, ManualClock]:
    clock = ManualClock()
    breaker = Breaker(threshold=3, first_wait_s=1, longest_wait_s=4, clock=clock)
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    return breaker, clock


def test_a_success_between_failures_starts_the_count_anew() -> None:
    breaker = Breaker(threshold=2, clock=ManualClock())
    for _ in range(5):
        assert not breaker.failed()
        assert not breaker.succeeded()
    assert breaker.is_closed


def test_one_probe_at_a_time_and_each_later_than_the_last() -> None:
    breaker, clock = opened()
    for wait_s in (1, 2, 4, 4):
        assert not breaker.may_probe()
        clock.advance(wait_s - 0.25)
        assert not breaker.may_probe()
        clock.advance(0.25)
        assert breaker.may_probe()
        assert not breaker.may_probe()
        assert not breaker.failed()
    clock.advance(4)
    assert breaker.may_probe()
    assert breaker.succeeded()
    assert breaker.is_closed
    assert not breaker.failed()


def test_stragglers_do_not_put_the_probe_off() -> None:
    breaker, clock = opened()
    clock.advance(0.5)
    breaker.failed()
    clock.advance(0.5)
    assert breaker.may_probe()


def test_a_withdrawn_probe_may_be_repeated() -> None:
    breaker, clock = opened()
    clock.advance(1)
    assert breaker.may_probe()
    breaker.withdraw_probe()
    assert breaker.may_probe()


def test_at_once() -> None:
    breaker = Breaker(clock=ManualClock())
    assert breaker.failed(at_once=True)
    assert not breaker.is_closed
