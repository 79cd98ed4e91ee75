# SPDX-License-Identifier: Apache-2.0
"""Everything below the primary tier: the manager over all tiers, the seam for tiers, and block stores."""

from __future__ import annotations

from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.primary import CPUPrimaryTierOffloadingManager

__all__ = [
    "CPUPrimaryTierOffloadingManager",
    "JobMetadata",
    "JobResult",
    "SecondaryTierManager",
    "TieringOffloadingManager",
]
