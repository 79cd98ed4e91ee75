# SPDX-License-Identifier: Apache-2.0
"""Slots of blocks that a reset forgot while transfers were still reading or writing them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus

__all__ = ["Debt", "Orphans"]


@dataclass(slots=True)
class Debt:
    """Transfers of one kind (reads or writes) of one key that began before a reset, and the slots they hold.

    A completion names its key only, so once the key has a block again, nobody can tell whether a completion is the
    old transfer's or the new one's; and taking one for the other would free a slot that is still being read or
    written. So they are settled together: nothing of this key and kind is released, and nothing published, until
    as many have completed as were begun.
    """

    slots: list[BlockStatus] = field(default_factory=list)
    begun: int = 0
    """Transfers outstanding at the reset."""
    completed: int = 0
    """Completions since, the new block's included."""
    failed: bool = False

    def settles(self, begun_since: int, success: bool = True) -> bool:
        """One more completion; whether it was the last, with ``begun_since`` transfers begun by the new block."""
        self.completed += 1
        self.failed = self.failed or not success
        return self.completed >= self.begun + begun_since


class Orphans:
    """The debts of all keys; empty unless a reset found transfers in flight, and empty again when they have ended."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: dict[OffloadKey, Debt] = {}
        self.writes: dict[OffloadKey, Debt] = {}

    def __bool__(self) -> bool:
        return bool(self.reads or self.writes)

    def adopt(self, key: OffloadKey, block: BlockStatus) -> None:
        """A reset forgets ``key``, whose ``block`` is not idle."""
        debts = self.writes if block.pins < 0 else self.reads
        debt = debts.setdefault(key, Debt())
        debt.slots.append(block)
        debt.begun += 1 if block.pins < 0 else block.pins

    def slots(self) -> list[BlockStatus]:
        """Every slot still held."""
        return [block for debts in (self.reads, self.writes) for debt in debts.values() for block in debt.slots]
