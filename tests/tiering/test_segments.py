# SPDX-License-Identifier: Apache-2.0
"""Surveys of many segments, and operations on lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from tests.tiering.test_waits import lines_run

from kvoffload.tiering.plans import LinkState, SoFar, Speeds, plan
from kvoffload.tiering.segments import HERE, Place, Segment, marks, split
from kvoffload.tiering.worth import Pace


def blocks(segments: Sequence[Segment]) -> list[Place]:
    return [place for place, num_blocks in segments for _ in range(num_blocks)]


@pytest.mark.parametrize("num_tiers", [2, 4])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_blocks_that_alternate_between_tiers_each_have_one_source(num_tiers: int, share: float) -> None:
    random, total = Random(3), 4000
    has = [{at % num_tiers, *(tier for tier in range(num_tiers) if random.random() < share)} for at in range(total)]
    survey = [Segment(Place(tuple(sorted(tiers))), 1) for tiers in has]
    link = LinkState(Pace(0.01, 0.004))
    found = plan(survey, Speeds(0.01, 0.0, (link,) * num_tiers), None, SoFar(total))
    assert found.stop == total
    assert found.wait_s == pytest.approx(0.01 + total * 0.004 / num_tiers, rel=0.02)
    sources = [place.tiers[0] for place in blocks(found.segments)]
    assert all(source in tiers for source, tiers in zip(sources, has, strict=True))
    assert max(map(sources.count, range(num_tiers))) <= 1.02 * total / num_tiers


def test_a_plan_is_linear_in_the_runs_of_its_survey() -> None:
    """A planner that shared the blocks of a run among tiers took up to 0.3 s for 4,000 blocks."""
    link = LinkState(Pace(0.01, 0.004))
    lines = []
    for total in (500, 2000):
        survey = [Segment(Place((at % 2,)), 1) for at in range(total)]
        lines.append(lines_run(lambda: plan(survey, Speeds(0.01, 0.0, (link, link)), None, SoFar(total))))  # noqa: B023
    assert lines[1] < 5 * lines[0]


def test_what_alternates_is_declined_with_the_tiers_that_have_it() -> None:
    survey = [Segment(Place((at % 2,)), 1) for at in range(400)]
    slow = LinkState(Pace(0.0, 0.1), reason="slow")
    found = plan(survey, Speeds(0.01, 0.0, (slow, slow)))
    assert found.stop == 0
    assert {(tier, tuple(indices)) for tier, _, indices, _ in found.declined} == {
        (0, tuple(range(0, 400, 2))),
        (1, tuple(range(1, 400, 2))),
    }


def test_marks_are_what_is_not_begun() -> None:
    known, unknown = Place((0,)), Place((), (1,))
    survey = [Segment(HERE, 2), Segment(known, 3), Segment(unknown, 4), Segment(known, 1)]
    assert marks(survey) == [Segment(HERE, 2), Segment(known, 3), Segment(unknown, 4), Segment(known, 1)]
    chosen = [Segment(HERE, 2), Segment(known, 3), Segment(unknown, 4)]
    assert marks(survey, chosen) == [Segment(HERE, 5), Segment(unknown, 4)]
    assert split(chosen, 3)[1] == [Segment(known, 2), Segment(unknown, 4)]
