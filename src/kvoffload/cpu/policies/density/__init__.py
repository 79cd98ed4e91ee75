# SPDX-License-Identifier: Apache-2.0
"""Learned eviction: the policy, the model it learns, and the log it keeps."""

from __future__ import annotations

from kvoffload.cpu.policies.density.policy import DensityCachePolicy

__all__ = ["DensityCachePolicy"]
