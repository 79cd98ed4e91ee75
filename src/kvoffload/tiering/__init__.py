# SPDX-License-Identifier: Apache-2.0
"""Everything below the primary tier: the manager over all tiers, the seam for tiers, and block stores."""

from __future__ import annotations

from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.base import CascadeMode, JobMetadata, JobResult, SecondaryTierManager
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.options import STORES, StoreOptions, build_tier, parse_tier, parse_tiers
from kvoffload.tiering.tier import StoreTier, TierLimits

__all__ = [
    "STORES",
    "CPUPrimaryTierOffloadingManager",
    "CascadeMode",
    "JobMetadata",
    "JobResult",
    "SecondaryTierManager",
    "StoreOptions",
    "StoreTier",
    "TierLimits",
    "TieringOffloadingManager",
    "build_tier",
    "parse_tier",
    "parse_tiers",
]
