# SPDX-License-Identifier: Apache-2.0
"""A local disk: blocks in slots of large files. ``store`` contains the store, ``format`` the layout on disk."""

from __future__ import annotations

from kvoffload.tiering.stores.disk.store import DiskStore

__all__ = ["DiskStore"]
