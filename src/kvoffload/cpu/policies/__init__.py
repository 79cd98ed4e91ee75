# SPDX-License-Identifier: Apache-2.0
"""Cache policies: the interface, the registry, and one algorithm per file."""

from kvoffload.cpu.policies.base import POLICIES, BlockStatus, CachePolicy, Victims
from kvoffload.cpu.policies.recency import RecencyList

__all__ = ["POLICIES", "BlockStatus", "CachePolicy", "RecencyList", "Victims"]
