# SPDX-License-Identifier: Apache-2.0
"""Test ``where``, which reads nothing, beside the lookups of the same and of other requests."""

from __future__ import annotations

import pytest
from tests.tiering.rig import Rig, keys, prefix

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.load_tiers import LoadTiers, TierMatcher


def asked_of_tier(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[OffloadKey]:
    """Every block that the first tier is asked for from now on, in order."""
    asked: list[OffloadKey] = []
    lookup = rig.tier.lookup

    def record(key: OffloadKey, context: ReqContext) -> bool | None:
        asked.append(key)
        return lookup(key, context)

    monkeypatch.setattr(rig.tier, "lookup", record)
    return asked


def test_what_one_request_found_is_not_taken_for_what_another_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(16)
    asked = asked_of_tier(rig, monkeypatch)
    first, second = rig.start("a"), rig.start("b")
    assert rig.manager.where(prefix(1), first) == [False]
    rig.below(prefix(1))
    assert rig.ask(prefix(1), second) == [None]
    assert asked == keys(0, 0, 0), "the second request first asks whether there is anything"


def test_a_promotion_that_failed_since_then_is_a_miss() -> None:
    rig = Rig(16)
    rig.below(prefix(2))
    context = rig.start("r")
    assert rig.ask(prefix(2), context) == [None, None]
    rig.step()
    assert rig.manager.where(prefix(2), context) == [True, True]
    rig.tier.finish(success=False)
    assert rig.ask(prefix(2), context) == [False]


def test_what_is_held_is_asked_of_each_tier_only_where_nothing_above_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(16, [OffloadPolicy.BLOCK_LEVEL] * 3)
    rig.store(prefix(2), rig.start("r"))
    asked: list[list[OffloadKey]] = []
    for tier, held in zip(rig.tiers, (keys(2), keys(3), []), strict=True):

        def holds(names: list[OffloadKey], held: list[OffloadKey] = held) -> list[bool]:
            asked.append(names)
            return [name in held for name in names][:1]  # a short answer breaks nothing

        monkeypatch.setattr(tier, "holds", holds)
    context = rig.start("other")
    losses = rig.manager.explain(prefix(5), context)
    assert [loss is None for loss in losses] == [True, True, True, True, False]
    assert asked == [keys(2, 3, 4), keys(3, 4), keys(4)]
    asked.clear()
    assert rig.manager.explain(prefix(3), context) == [None] * 3
    assert asked == [keys(2)], "no tier is asked for nothing"


def test_what_another_request_asked_for_gives_no_patience_back() -> None:
    """A request that may not load from the tier asks last in each step. The other request must not wait forever."""
    rig = Rig(max_wait_s=10.0)
    rig.tier.medium = "STORAGE"
    rig.tier.answers |= dict.fromkeys(prefix(2))
    waiting, other = rig.start("waiting"), ReqContext("other", load_tiers=LoadTiers((TierMatcher("CPU"),)))
    rig.manager.on_new_request(other)
    for _ in range(10):
        assert rig.ask(prefix(2), waiting) == [None, None]
        assert rig.manager.where(prefix(2), other) == [False] * 2
        rig.step()
        rig.clock.advance(1.0)
    assert rig.ask(prefix(2), waiting) == [False]
