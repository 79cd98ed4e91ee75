# SPDX-License-Identifier: Apache-2.0
"""Blocks in a Mooncake store: the memory of many machines as one pool. Experimental."""

from __future__ import annotations

from kvoffload.tiering.stores.mooncake.store import MooncakeStore

__all__ = ["MooncakeStore"]
