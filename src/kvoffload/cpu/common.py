# SPDX-License-Identifier: Apache-2.0
"""Name the slots of host memory in a transfer."""

from __future__ import annotations

from kvoffload.base import BlockIDsLoadStoreSpec


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of host memory. ``block_ids`` are slot numbers."""

    __slots__ = ()

    @property
    def slots(self) -> list[int]:
        """The slot numbers as a list, without making an array."""
        return self._ids if isinstance(self._ids, list) else self._ids.tolist()

    @staticmethod
    def medium() -> str:
        return "CPU"
