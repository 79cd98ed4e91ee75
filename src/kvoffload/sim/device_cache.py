# SPDX-License-Identifier: Apache-2.0
"""The engine's own KV pool and prefix cache, as vLLM and the reference engine keep it; one request at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvoffload.base import OffloadKey

__all__ = ["DevicePool"]


class DevicePool:
    """A finished request's blocks go to the end of a queue, tail first, and can be found until they are taken from its
    front. A block of which there is a copy already (the last one of a prompt that was found whole, say) takes room all
    the same, without being findable. A request larger than the pool keeps its head.

    Call ``find_prefix``, ``admit``, then ``fill`` and ``grow`` as it computes, ``release`` at its end.
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._key_of: dict[int, OffloadKey] = {}
        self._block_of: dict[OffloadKey, int] = {}
        self._table: list[int] = []
        self._num_named = 0

    def __repr__(self) -> str:
        return f"DevicePool({len(self._queue)} free, {len(self._block_of)} to be found)"

    def find_prefix(self, path: Sequence[OffloadKey]) -> int:
        """How many blocks of ``path`` are here, from its head on."""
        return next((at for at, key in enumerate(path) if key not in self._block_of), len(path))

    def admit(self, path: Sequence[OffloadKey], num_found: int, num_loaded: int) -> None:
        """A request uses the first ``num_found`` blocks of its path, and loads those up to ``num_loaded``."""
        self._table = [self._block_of[key] for key in path[:num_found]]
        for block in self._table:
            del self._queue[block]
        self._num_named = num_found
        self.fill(path, num_loaded)

    def fill(self, path: Sequence[OffloadKey], num_blocks: int) -> None:
        """So many blocks of ``path`` are computed or loaded."""
        self.grow(num_blocks)
        for index in range(self._num_named, min(num_blocks, len(self._table))):
            if path[index] not in self._block_of:
                self._block_of[path[index]] = self._table[index]
                self._key_of[self._table[index]] = path[index]
        self._num_named = num_blocks

    def grow(self, num_blocks: int) -> None:
        """The request has so many blocks in all, the last of which may be its own forever."""
        while len(self._table) < num_blocks and self._queue:
            block, _ = self._queue.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            self._table.append(block)

    def release(self) -> None:
        """The request has ended."""
        self._queue.update(dict.fromkeys(reversed(self._table)))
        self._table = []
