# SPDX-License-Identifier: Apache-2.0
"""Test ``kv_load_tiers``: vLLM's interpretation of it, and tiers that a request excludes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiering.rig import Rig, prefix

from kvoffload.base import OffloadPolicy, ReqContext
from kvoffload.connector.limits import RequestLimits
from kvoffload.load_tiers import LoadTiers, TierMatcher, parse_load_tiers

LOCAL_DISK, REMOTE, HOST = ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE"), ("CPU", "LOCAL")


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ([{"medium": "STORAGE"}], [LOCAL_DISK, REMOTE]),
        ([{"medium": "storage", "locality": "local"}], [LOCAL_DISK]),
        ([{"locality": "REMOTE"}, {"medium": "CPU"}], [REMOTE, HOST]),
        ([{}], [LOCAL_DISK, REMOTE, HOST]),
        ([{"medium": "CPU", "other": 1}], [HOST]),
        ([], []),
    ],
)
def test_matchers(value: Any, allowed: list[tuple[str, str]]) -> None:
    tiers, makes_sense = parse_load_tiers(value)
    assert makes_sense
    assert tiers is not None
    assert [each for each in (LOCAL_DISK, REMOTE, HOST) if tiers.allows(*each)] == allowed
    # A tier that does not report its properties matches any matcher.
    assert tiers.allows(None, None) is bool(value)


@pytest.mark.parametrize("value", ["STORAGE", {"medium": "CPU"}, [{"medium": "TAPE"}], [3], [{"locality": 1}], 7, True])
def test_what_makes_no_sense_is_ignored_with_a_sentence(value: Any) -> None:
    assert parse_load_tiers(value) == (None, False)
    limits, problems = RequestLimits.parse({"kv_load_tiers": value})
    assert limits.load_tiers is None
    assert [each for each in problems if 'kv_load_tiers must be a list such as [{"medium": "STORAGE"}]' in each]


def test_the_entries_that_make_sense_hold() -> None:
    assert parse_load_tiers([{"medium": "tape"}, {"medium": "cpu"}]) == (LoadTiers((TierMatcher("CPU"),)), False)
    assert parse_load_tiers([{"medium": "x" * 10**6}]) == (None, False)
    assert RequestLimits.parse({"kv_load_tiers": []}) == (RequestLimits(load_tiers=LoadTiers()), [])


def test_a_list_that_a_client_repeats_costs_nothing_at_each_lookup() -> None:
    tiers, makes_sense = parse_load_tiers([{"locality": "REMOTE"}, {"medium": "CPU"}] * 1000)
    assert makes_sense
    assert tiers == LoadTiers((TierMatcher(locality="REMOTE"), TierMatcher("CPU")))


def test_a_request_is_promoted_only_from_the_tiers_that_it_allows() -> None:
    rig = Rig(num_blocks=8, policies=2 * (OffloadPolicy.BLOCK_LEVEL,))
    for tier, place in zip(rig.tiers, (LOCAL_DISK, REMOTE), strict=True):
        tier.medium, tier.locality = place
    blocks = prefix(2)
    for index in range(2):
        rig.below(blocks, index)

    def hit(*matchers: TierMatcher) -> int:
        context = ReqContext("r", load_tiers=LoadTiers(matchers))
        rig.manager.on_new_request(context)
        found = rig.wait_for_prefix(blocks, context)
        rig.manager.on_request_finished(context)
        return found

    assert hit() == 0
    assert hit(TierMatcher("CPU")) == 0
    assert not any(tier.calls("submit_load") for tier in rig.tiers)
    assert hit(TierMatcher(locality="REMOTE")) == 2
    assert [bool(tier.calls("submit_load")) for tier in rig.tiers] == [False, True]
    assert hit() == 2, "host memory is no tier below it"
