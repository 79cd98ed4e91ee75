# SPDX-License-Identifier: Apache-2.0
"""Disk tiers that read and write only so fast, which a scenario changes as they serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvoffload.base import OffloadKey
from kvoffload.tiering.options import STORES
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk.options import DiskOptions
from kvoffload.tiering.stores.wrappers import StoreWrapper

BYTES_PER_S: dict[str, float] = {}
"""The bytes per second of each tier."""


class Paced(StoreWrapper):
    """However many threads read, they share the tier's speed of the moment. Writes are free."""

    def __init__(self, inner: BlockStore, name: str) -> None:
        super().__init__(inner)
        self._name = name
        self._reading = threading.Lock()

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        with self._reading:
            begun_s = time.monotonic()
            found = self.inner.read_into(keys, blocks)
            end_s = begun_s + sum(block.nbytes for block in blocks) / BYTES_PER_S[self._name]
            time.sleep(max(0.0, end_s - time.monotonic()))
        return found


class PacedOptions(DiskOptions, frozen=True, kw_only=True):
    """``{"type": "paced", "name": ..., "path": ...}``"""

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        return Paced(super().open_store(block_bytes, namespace), self.label)


STORES.register("paced", PacedOptions)
