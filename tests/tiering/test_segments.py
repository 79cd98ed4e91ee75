# SPDX-License-Identifier: Apache-2.0
"""Surveys of many pieces are planned as a few, and each block keeps the place that it has."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.tiering.plans import LinkState, SoFar, Speeds, plan
from kvoffload.tiering.segments import HERE, MOST_PIECES, Place, Segment, cut, gathered, marks, scattered
from kvoffload.tiering.worth import Pace

PLACES = [HERE, Place((0,)), Place((1,)), Place((0, 1)), Place((), (1,)), Place((0,), is_arriving=True)]
SURVEYS = st.lists(st.builds(Segment, st.sampled_from(PLACES), st.integers(1, 5)), min_size=1, max_size=40)


def blocks(segments: Sequence[Segment]) -> list[Place]:
    return [place for place, num_blocks in segments for _ in range(num_blocks)]


@given(SURVEYS, st.data())
def test_what_is_gathered_is_scattered_again(survey: list[Segment], data: st.DataObject) -> None:
    total = len(blocks(survey))
    ends = data.draw(st.none() | st.sets(st.integers(1, total)).map(lambda found: sorted({*found, total})))
    begin = data.draw(st.integers(0, total))
    pieces, useful = gathered(survey, [begin], ends)
    assert {*useful} <= {*(range(1, total + 1) if ends is None else ends)}
    assert useful[-1] == total
    for stop in useful:
        assert sorted(blocks(pieces)[:stop]) == sorted(blocks(survey)[:stop]), "stretches end there"
        assert blocks(scattered(survey, pieces, cut_off(pieces, stop))) == blocks(survey)[:stop]
    assert sorted(blocks(pieces)[:begin]) == sorted(blocks(survey)[:begin])


def cut_off(segments: Sequence[Segment], stop: int) -> list[Segment]:
    """The first ``stop`` blocks."""
    found = []
    for place, num_blocks in segments:
        if count := min(num_blocks, stop):
            found.append(Segment(place, count))
            stop -= count
    return found


@pytest.mark.parametrize("num_tiers", [2, 4])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_blocks_that_alternate_between_tiers_are_planned_in_few_pieces(num_tiers: int, share: float) -> None:
    """A plan of 4,000 took up to 0.3 s, amid an engine's step."""
    random, total = Random(3), 4000
    has = [{at % num_tiers, *(tier for tier in range(num_tiers) if random.random() < share)} for at in range(total)]
    survey = [Segment(Place(tuple(sorted(tiers))), 1) for tiers in has]
    pieces, _ = gathered(survey, [0], None)
    assert len(pieces) <= 3 * MOST_PIECES
    link = LinkState(Pace(0.01, 0.004))
    found = plan(survey, Speeds(0.01, 0.0, (link,) * num_tiers), None, SoFar(total))
    assert found.stop == total
    assert found.wait_s == pytest.approx(0.01 + total * 0.004 / num_tiers, rel=0.02)
    sources = [place.tiers[0] for place in blocks(found.segments)]
    assert all(source in tiers for source, tiers in zip(sources, has, strict=True))
    assert max(map(sources.count, range(num_tiers))) <= 1.02 * total / num_tiers


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
    assert cut(chosen, 3) == [Segment(known, 2), Segment(unknown, 4)]
