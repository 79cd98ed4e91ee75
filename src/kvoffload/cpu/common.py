# SPDX-License-Identifier: Apache-2.0
"""The primary tier's end of a transfer."""

from __future__ import annotations

from kvoffload.base import BlockIDsLoadStoreSpec

__all__ = ["CPULoadStoreSpec"]


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier; ``block_ids`` are slot numbers."""

    __slots__ = ()

    @staticmethod
    def medium() -> str:
        return "CPU"
