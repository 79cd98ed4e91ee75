# SPDX-License-Identifier: Apache-2.0
"""The primary tier. What is named here is its control plane, which loads no torch."""

from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.cpu.policies import POLICIES, BlockStatus, CachePolicy
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.cpu.reuse import ReuseFilter
from kvoffload.cpu.spec import CPUOffloadingSpec

__all__ = [
    "POLICIES",
    "BlockStatus",
    "CPULoadStoreSpec",
    "CPUOffloadingManager",
    "CPUOffloadingSpec",
    "CachePolicy",
    "ReuseFilter",
    "SharedOffloadRegion",
]
