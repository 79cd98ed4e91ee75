# SPDX-License-Identifier: Apache-2.0
"""Blocks as files in a directory. ``store`` is the store, ``format`` the layout on disk, ``admin`` the maintenance."""

from __future__ import annotations

from kvoffload.tiering.stores.fs.store import FileSystemStore

__all__ = ["FileSystemStore"]
