# SPDX-License-Identifier: Apache-2.0
"""A link's reads: its queue, its samples, and reads that their tier calls overdue."""

from __future__ import annotations

import pytest
from tests.tiering.rig import keys

from kvoffload.base import ReqContext
from kvoffload.testing.clock import ManualClock
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.links import LATE, Link
from kvoffload.tiering.worth import Pace


def make_link(clock: ManualClock, expected: float | None = None) -> Link:
    return Link("disk", None if expected is None else Pace(0.0, 1 / expected), clock)


def begin(link: Link, num_blocks: int) -> JobMetadata:
    """Start a read, which the tier then executes."""
    read = JobMetadata(0, keys(*range(num_blocks)), [*range(num_blocks)], True, ReqContext("r"))
    link.begin(num_blocks)
    link.submit(read)
    return read


def test_reads_that_end_together_are_one_sample() -> None:
    clock = ManualClock()
    link = make_link(clock)
    assert link.speed is None
    reads = begin(link, 1), begin(link, 2)
    link.check_invariants(3, 3)
    clock.advance(3.0)
    for read in reads:
        link.end(read, len(read.keys), None)
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
    link.drop(2)
    begin(link, 2)
    clock.advance(0.5)
    assert link.queue_s() == pytest.approx(1.5)
    clock.advance(2.5)
    assert link.queue_s() == pytest.approx(1.0), "a second late, and expected to be late by as much again"
    link.begin(1)
    link.drop(1)
    link.check_invariants(2, 2)


def test_an_overdue_read_delays_no_other_and_is_not_waited_for() -> None:
    clock = ManualClock()
    link = make_link(clock, 10.0)
    hung, _ = begin(link, 2), begin(link, 1)
    assert link.queue_s() == pytest.approx(0.3)
    hung.is_overdue = True
    assert link.queue_s() == pytest.approx(0.1)
    assert (link.num_due, link.num_outstanding) == (1, 3)


@pytest.mark.parametrize("is_overtaken", [True, False])
def test_an_overdue_read_is_a_sample_unless_a_later_one_ended_before_it(is_overtaken: bool) -> None:
    clock = ManualClock()
    link = make_link(clock)
    hung = begin(link, 1)
    clock.advance(31.0)
    hung.is_overdue = True
    if is_overtaken:
        other = begin(link, 1)
        clock.advance(0.1)
        link.end(other, 1, None)
        link.measure()
        clock.advance(50.0)
    link.end(hung, 1, None)
    link.measure()
    assert link.speed is not None
    assert link.speed.seconds(1) == pytest.approx(0.1 if is_overtaken else 31.0)


def test_an_overdue_read_that_ends_after_another_began_is_no_sample() -> None:
    """It looked as if it had taken no longer than since then."""
    clock = ManualClock()
    link = make_link(clock)
    hung = begin(link, 1)
    clock.advance(31.0)
    hung.is_overdue = True
    other = begin(link, 1)
    clock.advance(0.1)
    link.end(hung, 1, None)
    link.measure()
    assert link.speed is None
    clock.advance(1.9)
    link.end(other, 1, None)
    link.measure()
    assert link.speed is not None
    assert link.speed.seconds(1) == pytest.approx(2.0)


def test_a_read_that_brought_nothing_is_no_sample() -> None:
    clock = ManualClock()
    link = make_link(clock)
    read = begin(link, 1)
    clock.advance(1.0)
    link.end(read, 0, None)
    link.measure()
    assert link.speed is None


def test_a_tier_that_has_become_slow_is_late_by_its_new_speed() -> None:
    """Not only once a read takes as many times as long as those did that showed it."""
    clock = ManualClock()
    link = make_link(clock)
    for seconds in (0.1, 0.1, 0.1, 1.0, 1.0):
        for read in (begin(link, 1), begin(link, 1)):
            clock.advance(seconds)
            link.end(read, 1, None)
        link.measure()
    begin(link, 1)
    assert link.late_s() == pytest.approx(LATE * 1.0)


def test_a_read_is_late_only_beyond_the_usual_ratio_of_the_last_reads() -> None:
    clock = ManualClock()
    link = make_link(clock, 1.0)
    assert begin(link, 1) and link.late_s() == pytest.approx(LATE)
    for seconds in (1.5, 1.5, 9.0):
        begin(link, 1)
        clock.advance(seconds)
        oldest = next(iter(link._due))
        link.end(oldest, 1, None)
    assert link.late_s() == pytest.approx(1.5 * LATE), "the median, not the mean, of actual to expected times"
    clock.advance(1.4 * LATE)
    assert link.slowdown() == 1.0
    clock.advance(0.2 * LATE)
    assert link.slowdown() > 1.0
