# SPDX-License-Identifier: Apache-2.0
"""Lookups and surveys alone. ``test_lookup_prefix.py`` has them in the manager."""

from __future__ import annotations

from tests.tiering.rig import keys
from tests.tiering.test_promotions import Parts

from kvoffload.tiering.lookups import Lookups
from kvoffload.tiering.places import Places, Survey
from kvoffload.tiering.segments import HERE, Place, Segment


class Asking(Parts):
    """Lookups of three blocks at most for each request, from a tier with ten blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_polls = 0
        parts = self.waits, self.promotions, self.planner()
        self.lookups = Lookups(self.primary, [self.tier], *parts, self.poll, self.clock)
        self.places = Places(self.primary, [self.tier], *parts, self.clock)

    def poll(self) -> None:
        self.num_polls += 1


def test_a_lookup_takes_in_ended_jobs_and_a_peek_does_not() -> None:
    parts = Asking()
    request = parts.request("r")
    assert parts.lookups.peek(request, keys(1, 2, 20)) == [True, True, False]
    assert (parts.num_polls, len(parts.promotions)) == (0, 0)
    assert parts.lookups.ask(request, keys(1, 2, 20), None) == [None, None, False]
    assert (parts.num_polls, list(parts.promotions)) == (1, keys(1, 2))


def test_what_was_peeked_at_holds_until_the_step_ends() -> None:
    parts = Asking()
    request = parts.request("r")
    assert parts.lookups.peek(request, keys(1)) == [True]
    parts.fake.blocks.clear()
    assert parts.lookups.peek(request, keys(2)) == [False]
    parts.lookups.end_step()
    assert parts.lookups.ask(request, keys(1), None) == [False]


def test_a_survey_ends_with_what_is_nowhere_or_could_not_be_claimed() -> None:
    parts = Asking()
    request = parts.request("r")
    for key in keys(10, 11):
        parts.primary.prepare_store([key], request.context)
    parts.primary.complete_store(keys(10), request.context)
    parts.fake.answers |= dict.fromkeys(keys(2), None)
    here, below, unknown = HERE, Place((0,)), Place((), (0,))
    survey = parts.places.survey
    assert survey(request, keys(10, 11, 30)) == Survey([Segment(here, 2)], True), "what the device writes is as good"
    assert survey(request, keys(1, 2, 30)) == Survey([Segment(below, 1), Segment(unknown, 1)], True)
    assert survey(request, keys(1, 3, 4, 5)) == Survey([Segment(below, 3)], False), "three blocks may be claimed"
    assert survey(request, keys(1, 2)).num_blocks == 2
