# SPDX-License-Identifier: Apache-2.0
"""Lookups and surveys alone. ``test_lookup_prefix.py`` has them in the manager."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.tiering.rig import BLOCK_BYTES, keys
from tests.tiering.test_promotions import Parts
from tests.tiering.test_waits import lines_run

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.miss import Miss
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.tiering.load_policy import BlockWorth, LoadPlanner
from kvoffload.tiering.lookups import Lookups
from kvoffload.tiering.places import Places
from kvoffload.tiering.segments import HERE, Place, Segment, joined
from kvoffload.tiering.tier_jobs import GuardedTier


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


def test_a_lookup_takes_in_ended_jobs_and_where_does_not() -> None:
    parts = Asking()
    request = parts.request("r")
    assert parts.lookups.where(request, keys(1, 2, 20)) == [True, True, False]
    assert (parts.num_polls, len(parts.promotions)) == (0, 0)
    assert parts.lookups.ask(request, keys(1, 2, 20), None) == [None, None, False]
    assert (parts.num_polls, list(parts.waits.promoted)) == (1, keys(1, 2))


def test_a_survey_ends_with_what_is_nowhere() -> None:
    parts = Asking()
    request = parts.request("r")
    for key in keys(10, 11):
        parts.primary.prepare_store([key], request.context)
    parts.primary.complete_store(keys(10), request.context)
    parts.fake.answers |= dict.fromkeys(keys(2), None)
    here, below, unknown = HERE, Place((0,)), Place((), (0,))
    survey = parts.places.survey
    assert survey(request, keys(10, 11, 30)) == [Segment(here, 2)], "what the device writes is as good"
    assert survey(request, keys(1, 2, 30)) == [Segment(below, 1), Segment(unknown, 1)]
    assert survey(request, keys(1, 3, 4, 5, 6)) == [Segment(below, 5)]
    assert parts.begin(parts.request("other"), 3, 4) == 2
    arriving = Place((0,), is_arriving=True)
    assert survey(request, keys(10, 3, 10, 4)) == [Segment(each, 1) for each in (here, arriving, here, arriving)]


def test_four_blocks_may_be_claimed() -> None:
    parts = Asking()
    request = parts.request("r")
    for key in keys(10, 11, 12, 13, 14):
        parts.primary.prepare_store([key], request.context)
        parts.primary.complete_store([key], request.context)

    def num_claimable(*numbers: int) -> int:
        return parts.waits.num_claimable(keys(*numbers), parts.places.survey(request, keys(*numbers)))

    assert num_claimable(1, 2, 3, 4, 5, 6) == 4
    assert num_claimable(10, 11, 12, 13, 14) == 5, "what is ready needs no claim until the request waits"
    assert num_claimable(10, 11, 12, 13, 14, 1) == 5
    assert num_claimable(10, 1, 11, 12, 2) == 4
    assert parts.begin(parts.request("other"), 1, 2) == 2
    assert num_claimable(1, 10, 3, 2, 11) == 4, "what others claim takes no further room"
    parts.fake.answers |= dict.fromkeys(keys(6, 7, 8), None)
    assert num_claimable(6, 7, 8, 3, 4, 5) == 5, "unknown blocks have no claims"


class Noting(FakeTier):
    """A tier that records the blocks of each question."""

    def __init__(self, number: int, parts: Parts) -> None:
        super().__init__(parts.primary.kv_view, f"tier{number}")
        self.calls: list[list[OffloadKey]] = []

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        answers = super().lookup_prefix(keys, req_context)
        self.calls.append([*keys[: len(answers)]])
        return answers

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        self.calls.append([*keys])
        return super().lookup_each(keys, req_context)


@pytest.mark.parametrize("seed", range(60))
def test_a_survey_finds_each_block_in_all_tiers_that_have_it_or_may_have_it(seed: int) -> None:
    chance, parts = random.Random(seed), Asking()
    tiers = [Noting(number, parts) for number in range(chance.randint(1, 3))]
    guarded = [GuardedTier(number, tier) for number, tier in enumerate(tiers)]
    planner = LoadPlanner([tier.name for tier in guarded], BlockWorth(BLOCK_BYTES), parts.clock)
    places = Places(parts.primary, guarded, parts.waits, parts.promotions, planner, parts.clock)
    request, blocks = parts.request("r"), keys(*range(chance.choice([5, 70, 200])))
    for tier in tiers:
        answers: list[bool | None] = []
        while len(answers) < len(blocks):  # runs, as stores have them
            answers += chance.choices([True, None, False], [8, chance.choice([0, 1]), 4]) * chance.choice([1, 2, 40])
        tier.answers = dict(zip(blocks, answers))
    failed = chance.choice([*blocks, None])
    if failed is not None:
        request.verdicts[failed] = Miss.PROMOTION_FAILED
    wanted = list[Place]()
    for key in blocks:
        having = tuple(number for number, tier in enumerate(tiers) if tier.answers[key])
        unknown = tuple(number for number, tier in enumerate(tiers) if tier.answers[key] is None)
        if key == failed or not (having or unknown):
            break
        wanted.append(Place(having, unknown))
    assert [place for place, count in places.below(request, blocks) for _ in range(count)] == wanted
    for tier in tiers:
        asked = [key for call in tier.calls for key in call]
        assert len(asked) == len({*asked}), "no block is asked for twice"


@pytest.mark.parametrize("num_blocks", [400, 4000])
def test_a_survey_of_blocks_that_alternate_between_tiers_takes_few_calls(num_blocks: int) -> None:
    parts = Asking()
    tiers, blocks = [Noting(number, parts) for number in range(2)], keys(*range(num_blocks))
    for number, tier in enumerate(tiers):
        tier.answers = {key: at % 2 == number for at, key in enumerate(blocks)}
    guarded = [GuardedTier(number, tier) for number, tier in enumerate(tiers)]
    planner = LoadPlanner([tier.name for tier in guarded], BlockWorth(BLOCK_BYTES), parts.clock)
    places = Places(parts.primary, guarded, parts.waits, parts.promotions, planner, parts.clock)
    found: list[Segment] = []
    lines = lines_run(lambda: found.extend(places.below(parts.request("r"), blocks)))
    assert found == [Segment(Place((at % 2,)), 1) for at in range(num_blocks)]
    assert lines < 12 * num_blocks + 500, "a few for each block"
    assert max(len(tier.calls) for tier in tiers) <= num_blocks.bit_length()


@pytest.mark.parametrize("num_blocks", [400, 4000])
def test_a_survey_over_two_tiers_makes_one_call_for_a_run(num_blocks: int) -> None:
    """4,000 blocks that only the second tier has took 4,000 calls of each."""
    parts = Asking()
    tiers, blocks = [Noting(number, parts) for number in range(2)], keys(*range(num_blocks))
    tiers[0].answers = dict.fromkeys(blocks, False)
    tiers[1].answers = dict.fromkeys(blocks, True)
    guarded = [GuardedTier(number, tier) for number, tier in enumerate(tiers)]
    places = Places(parts.primary, guarded, parts.waits, parts.promotions, parts.planner(), parts.clock)
    assert joined(places.below(parts.request("r"), blocks)) == [Segment(Place((1,)), num_blocks)]
    assert len(tiers[0].calls) <= num_blocks.bit_length()
    assert len(tiers[1].calls) <= num_blocks.bit_length()


def test_a_long_prefix_that_a_tier_has_is_looked_up_in_few_calls() -> None:
    parts = Asking()
    tier, blocks = Noting(0, parts), keys(*range(1000))
    tier.answers = dict.fromkeys(blocks, True)
    places = Places(parts.primary, [GuardedTier(0, tier)], parts.waits, parts.promotions, parts.planner(), parts.clock)
    assert joined(places.below(parts.request("r"), blocks)) == [Segment(Place((0,)), 1000)]
    assert len(tier.calls) == 2


def test_one_unknown_block_is_watched_until_its_answer_comes() -> None:
    parts = Asking()
    planner = parts.planner()
    places = Places(parts.primary, [parts.tier], parts.waits, parts.promotions, planner, parts.clock)
    request = parts.request("r")
    parts.fake.answers |= dict.fromkeys(keys(1, 2))
    for asked in (keys(1), keys(2, 1)):
        assert places.below(request, asked) == [Segment(Place((), (0,)), len(asked))]
        parts.clock.advance(1.0)
    parts.fake.answers[keys(1)[0]] = True
    places.below(request, keys(2, 1))
    assert planner.link(0).answers.seconds == 1.0, "a second after it was asked for there was no answer yet"


def test_a_tier_that_is_too_slow_beside_another_is_asked_only_for_what_that_lacks() -> None:
    parts = Asking()
    tiers = [Noting(number, parts) for number in range(2)]
    tiers[0].answers = dict.fromkeys(keys(1, 2), True)
    tiers[1].answers = dict.fromkeys(keys(1, 2, 3), True)
    planner = LoadPlanner(["fast", "slow"], BlockWorth(BLOCK_BYTES, read_bytes_per_s=(1e9, 1e6)), parts.clock)
    guarded = [GuardedTier(number, tier) for number, tier in enumerate(tiers)]
    places = Places(parts.primary, guarded, parts.waits, parts.promotions, planner, parts.clock)
    assert places.below(parts.request("r"), keys(1, 2, 3)) == [Segment(Place((0,)), 2), Segment(Place((1,)), 1)]
    assert tiers[1].calls == [keys(3)]
