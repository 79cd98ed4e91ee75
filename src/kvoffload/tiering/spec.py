# SPDX-License-Identifier: Apache-2.0
"""Offloading to host memory and the tiers below it, built from one configuration."""

from __future__ import annotations

from kvoffload.base import OffloadingManager
from kvoffload.config import EngineLayout, OffloadingConfig
from kvoffload.cpu.spec import CPUOffloadingSpec
from kvoffload.tiering.base import SecondaryTierManager
from kvoffload.tiering.identity import check_hashes_are_stable, persistent_namespace
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.options import parse_tiers
from kvoffload.tiering.primary import CPUPrimaryTierOffloadingManager

__all__ = ["TieringOffloadingSpec"]


class TieringOffloadingSpec(CPUOffloadingSpec):
    """``CPUOffloadingSpec`` with ``config.secondary_tiers`` below.

    The worker side is the same: bytes reach the tiers through the primary tier's memory, which the scheduler process
    maps too, and whose I/O threads run there. All options are checked here; nothing is allocated, and no tier's
    directory or server is touched, before ``get_manager``.
    """

    def __init__(self, config: OffloadingConfig, layout: EngineLayout) -> None:
        super().__init__(config, layout)
        self.tier_options = parse_tiers(config.secondary_tiers, self.block_bytes)
        for options in self.tier_options:
            if options.is_persistent:
                check_hashes_are_stable(layout, options.type)
        self.namespace = persistent_namespace(layout, self.block_size_factor)

    def _make_manager(self) -> OffloadingManager:
        config = self.config
        primary = CPUPrimaryTierOffloadingManager(
            self.num_blocks,
            self.region,
            cache_policy=config.eviction_policy,
            enable_events=self.layout.events_enabled,
            store_threshold=config.store_threshold,
            max_tracker_size=config.max_tracker_size,
        )
        tiers: list[SecondaryTierManager] = []
        try:
            for options in self.tier_options:
                tiers.append(options.build(primary.kv_view, self.namespace))  # noqa: PERF401 - those made are needed
        except BaseException:
            for tier in tiers:
                tier.shutdown()
            primary.shutdown()
            raise
        return TieringOffloadingManager(
            primary,
            tiers,
            max_wait_s=config.max_wait_s,
            claim_share=config.claim_share,
            promotion_share=config.promotion_share,
            cascade=[options.cascade_above(self.num_blocks * self.block_bytes) for options in self.tier_options],
        )
