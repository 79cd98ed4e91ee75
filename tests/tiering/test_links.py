# SPDX-License-Identifier: Apache-2.0
"""A link's reads: its queue, its samples, and reads that are overdue."""

from __future__ import annotations

import pytest

from kvoffload.testing.clock import ManualClock
from kvoffload.tiering.links import LATE, OVERDUE_S, Link
from kvoffload.tiering.worth import Pace


def make_link(clock: ManualClock, expected: float | None = None) -> Link:
    return Link("disk", None if expected is None else Pace(0.0, 1 / expected), clock)


def read(link: Link, clock: ManualClock, slots: list[int], seconds: float) -> None:
    link.begin(len(slots))
    link.submit(slots)
    clock.advance(seconds)
    link.end(slots, len(slots), None)
    link.measure()


def test_reads_that_end_together_are_one_sample() -> None:
    clock = ManualClock()
    link = make_link(clock)
    assert link.speed is None
    link.begin(3)
    link.submit([0])
    link.submit([1, 2])
    link.check_invariants(0, 3)
    clock.advance(3.0)
    link.end([0], 1, None)
    link.end([1, 2], 2, None)
    link.measure()
    assert link.speed is not None
    assert link.speed.seconds(1) == pytest.approx(1.0)
    link.check_invariants(0, 0)


def test_the_queue_counts_what_is_outstanding_and_lateness_twice() -> None:
    clock = ManualClock()
    link = make_link(clock, 1.0)
    assert link.queue_s() == 0.0
    link.begin(2)
    assert link.queue_s() == pytest.approx(2.0)
    link.submit([0, 1])
    clock.advance(0.5)
    assert link.queue_s() == pytest.approx(1.5)
    clock.advance(2.5)
    assert link.queue_s() == pytest.approx(1.0), "a second late, and expected to be late by as much again"
    link.begin(1)
    link.drop(1)
    link.check_invariants(0, 2)


def test_an_overdue_read_delays_no_other_and_is_not_waited_for() -> None:
    clock = ManualClock()
    link = make_link(clock, 10.0)
    link.begin(2)
    link.submit([4, 5])
    assert not link.is_overdue(4)
    clock.advance(OVERDUE_S + 1)
    assert link.is_overdue(4)
    assert not link.is_overdue(6)
    assert link.queue_s() == 0.0
    assert (link.num_due, link.num_outstanding) == (0, 2)


def test_one_overdue_read_among_many_costs_no_look_at_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A survey asks for each block on its way: 4,000 blocks in 400 reads took 0.2 s of the scheduler."""
    clock = ManualClock()
    link = make_link(clock)
    link.begin(802)
    link.submit([0, 1])
    clock.advance(20.0)
    for slot in range(2, 802, 2):
        link.submit([slot, slot + 1])

    looked_at = 0

    class Counted(dict[int, object]):
        def values(self):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            looked_at += 1
            return super().values()

    monkeypatch.setattr(link, "_reads", Counted(link._reads))
    overdue = []
    for _ in range(3):
        overdue.append([slot for slot in range(802) if link.is_overdue(slot)])
        clock.advance(16.0)
    assert overdue == [[], [0, 1], [*range(802)]]
    assert looked_at <= 2, "once for each time that some became overdue"
    link.end([0, 1], 2, None)
    link.begin(2)
    link.submit([0, 1])
    assert not link.is_overdue(0), "the slot has another read"
    assert link.is_overdue(2)


@pytest.mark.parametrize("is_overtaken", [True, False])
def test_an_overdue_read_is_a_sample_unless_a_later_one_ended_before_it(is_overtaken: bool) -> None:
    clock = ManualClock()
    link = make_link(clock)
    link.begin(1)
    link.submit([9])
    clock.advance(OVERDUE_S + 1)
    if is_overtaken:
        read(link, clock, [1], 0.1)
        clock.advance(50.0)
    link.end([9], 1, None)
    link.measure()
    assert link.speed is not None
    assert link.speed.seconds(1) == pytest.approx(0.1 if is_overtaken else OVERDUE_S + 1)


def test_a_read_that_brought_nothing_is_no_sample() -> None:
    clock = ManualClock()
    link = make_link(clock)
    link.begin(1)
    link.submit([3])
    clock.advance(1.0)
    link.end([3], 0, None)
    link.measure()
    assert link.speed is None


def test_a_tier_that_has_become_slow_is_late_by_its_new_speed() -> None:
    """Not only once a read takes as many times as long as those did that showed it."""
    clock = ManualClock()
    link = make_link(clock)
    for seconds in (0.1, 0.1, 0.1, 1.0, 1.0):
        link.begin(2)
        link.submit([0])
        link.submit([1])
        for slot in (0, 1):
            clock.advance(seconds)
            link.end([slot], 1, None)
        link.measure()
    link.begin(1)
    link.submit([0])
    assert link.late_s() == pytest.approx(LATE * 1.0)
