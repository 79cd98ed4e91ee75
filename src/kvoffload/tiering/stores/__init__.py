# SPDX-License-Identifier: Apache-2.0
"""Block stores: synchronous byte containers that a secondary tier is built on."""

from __future__ import annotations

from kvoffload.tiering.stores.base import BlockStore, StoreStats
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.wrappers import Checksummed, StoreWrapper

__all__ = [
    "BlockStore",
    "Checksummed",
    "FileSystemStore",
    "MemoryStore",
    "StoreStats",
    "StoreWrapper",
]
