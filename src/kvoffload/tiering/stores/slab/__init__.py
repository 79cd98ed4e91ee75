# SPDX-License-Identifier: Apache-2.0
"""Blocks in slots of large files. ``store`` has the store, ``format`` the layout on disk."""

from __future__ import annotations

from kvoffload.tiering.stores.slab.store import SlabStore

__all__ = ["SlabStore"]
