# SPDX-License-Identifier: Apache-2.0
"""The primary tier's end of a transfer."""

from __future__ import annotations

from kvoffload.base import BlockIDsLoadStoreSpec


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier; ``block_ids`` are slot numbers."""

    __slots__ = ()

    @property
    def slots(self) -> list[int]:
        """``block_ids`` without an array of them."""
        return self._ids if isinstance(self._ids, list) else self._ids.tolist()

    @staticmethod
    def medium() -> str:
        return "CPU"
