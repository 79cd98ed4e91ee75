# SPDX-License-Identifier: Apache-2.0
"""The shipped contract over the fake tier."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.base import OffloadKey, OffloadPolicy
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.testing.tier_contract import SecondaryTierContract
from kvoffload.tiering.base import SecondaryTierManager


class TestFakeTierAtOnce(SecondaryTierContract):
    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        return FakeTier(primary_kv_view, at_once=True)

    def forget(self, tier: SecondaryTierManager, names: Sequence[OffloadKey]) -> bool:
        assert isinstance(tier, FakeTier)
        for key in names:
            del tier.blocks[key]
        return True


class TestFakeTierByHand(TestFakeTierAtOnce):
    wants_whole_requests = True

    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        return FakeTier(primary_kv_view, policy=OffloadPolicy.REQUEST_LEVEL)

    def progress(self, tier: SecondaryTierManager) -> None:
        assert isinstance(tier, FakeTier)
        tier.finish()
