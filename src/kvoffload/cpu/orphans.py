# SPDX-License-Identifier: Apache-2.0
"""Slots of blocks that a reset forgot while transfers were still reading or writing them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus

__all__ = ["Orphans", "Overlap"]


@dataclass(slots=True)
class Overlap:
    """Transfers of one kind (reads or writes) of one key that began before a reset, and the slots they use.

    The end of a transfer names its key only. Once the key has a block again, an end may be the old transfer's or the
    new one's, and taking one for the other would free a slot that is still being read or written. So nothing of this
    key and kind is released, and nothing published, until as many transfers have ended as were begun.
    """

    slots: list[BlockStatus] = field(default_factory=list)
    begun: int = 0
    """Transfers outstanding at the reset."""
    ended: int = 0
    """Transfers that ended since, the new block's included."""
    failed: bool = False

    def count_end(self, begun_since: int, success: bool = True) -> bool:
        """Counts one more end, and returns whether it was the last. ``begun_since``: transfers of the new block."""
        self.ended += 1
        self.failed = self.failed or not success
        return self.ended >= self.begun + begun_since


class Orphans:
    """The overlaps of all keys. Empty unless a reset found transfers in flight, and again once they have ended."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: dict[OffloadKey, Overlap] = {}
        self.writes: dict[OffloadKey, Overlap] = {}

    def __bool__(self) -> bool:
        return bool(self.reads or self.writes)

    def adopt(self, key: OffloadKey, block: BlockStatus) -> None:
        """A reset forgets ``key``, whose ``block`` is not idle."""
        overlaps = self.writes if block.pins < 0 else self.reads
        overlap = overlaps.setdefault(key, Overlap())
        overlap.slots.append(block)
        overlap.begun += 1 if block.pins < 0 else block.pins

    def slots(self) -> list[BlockStatus]:
        """The slots of all overlaps."""
        return [
            block for overlaps in (self.reads, self.writes) for overlap in overlaps.values() for block in overlap.slots
        ]
