# SPDX-License-Identifier: Apache-2.0
"""Offloading to host memory. The names in this package are its control plane, which does not load torch."""

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
