# SPDX-License-Identifier: Apache-2.0
"""Learned eviction: the policy, its model of reuse, and its log of uses."""

from __future__ import annotations

from kvoffload.cpu.policies.density.policy import DensityCachePolicy

__all__ = ["DensityCachePolicy"]
