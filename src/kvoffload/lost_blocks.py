# SPDX-License-Identifier: Apache-2.0
"""Record why blocks are missing: the last loss of each block, while a trace is recorded."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvoffload.miss import Miss


class Loss(NamedTuple):
    """The reason why a block is a miss."""

    miss: Miss
    place: str = ""
    """The tier that lost the block, or an empty string if the tier adds no information."""
    seconds_ago: float | None = None
    """The time since the loss, or ``None`` if this request itself failed to get the block."""

    @property
    def cause(self) -> str:
        return f"{self.miss} {self.place}" if self.place else str(self.miss)


class LostBlocks:
    """The last loss of each of the ``max_blocks`` most recently lost blocks. One thread."""

    def __init__(self, max_blocks: int = 200_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_blocks = max_blocks
        self._clock = clock
        self._lost: OrderedDict[bytes, tuple[Miss, str, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"LostBlocks({len(self._lost)} of {self._max_blocks})"

    def record(self, keys: Iterable[bytes], miss: Miss, place: str = "") -> None:
        """Record that ``keys`` left ``place`` or were not stored."""
        lost, loss = self._lost, (miss, place, self._clock())
        for key in keys:
            lost[key] = loss
            lost.move_to_end(key)
        while len(lost) > self._max_blocks:
            lost.popitem(last=False)

    def find(self, keys: Sequence[bytes]) -> list[Loss | None]:
        """Return the last loss of each of ``keys``, or ``None`` for a loss that was never recorded or is forgotten."""
        now_s = self._clock()
        found = map(self._lost.get, keys)
        return [None if each is None else Loss(each[0], each[1], now_s - each[2]) for each in found]


class _NoLosses(LostBlocks):
    """Remembers nothing. Used if no trace is recorded."""

    def record(self, keys: Iterable[bytes], miss: Miss, place: str = "") -> None:
        return

    def find(self, keys: Sequence[bytes]) -> list[Loss | None]:
        return [None] * len(keys)


NO_LOSSES = _NoLosses()
