# SPDX-License-Identifier: Apache-2.0
"""The engine's own KV pool and prefix cache, as vLLM and the reference engine manage it, for one request at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvoffload.base import OffloadKey


class DeviceCache:
    """GPU blocks by key. A block without a request waits in a queue, and can be found until it is reused.

    A finished request appends its blocks to the queue, tail first; new blocks are taken from the front. Two blocks may
    have the same content, for example the last block of a prompt that was found whole: the second copy takes a block,
    but cannot be found. A request larger than the pool keeps its head.

    Call ``find_prefix`` and ``admit``, then ``fill`` and ``grow`` while the request computes, then ``release``.
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._key_of: dict[int, OffloadKey] = {}
        self._block_of: dict[OffloadKey, int] = {}
        self._table: list[int] = []
        self._states: list[int] = []
        self._num_named = 0

    def __repr__(self) -> str:
        return f"DeviceCache({len(self._queue)} free, {len(self._block_of)} cached)"

    def find_prefix(self, path: Sequence[OffloadKey]) -> int:
        """The number of blocks cached here, from the head of ``path`` on."""
        return next((at for at, key in enumerate(path) if key not in self._block_of), len(path))

    def has(self, keys: Sequence[OffloadKey]) -> bool:
        return all(key in self._block_of for key in keys)

    def admit(
        self,
        path: Sequence[OffloadKey],
        num_found: int,
        num_loaded: int,
        found_states: Sequence[OffloadKey] = (),
        loaded_states: Sequence[OffloadKey] = (),
    ) -> None:
        """Starts a request, which reuses the first ``num_found`` blocks of ``path`` and loads up to ``num_loaded``.
        With the states at the ends of both."""
        self._table = [self._block_of[key] for key in path[:num_found]]
        self._states = [self._block_of[key] for key in found_states]
        for block in self._table + self._states:
            del self._queue[block]
        self._num_named = num_found
        self.fill(path, num_loaded)
        if num_loaded > num_found:
            self.keep(loaded_states)

    def keep(self, states: Sequence[OffloadKey]) -> None:
        """Takes a block for each of the states that the request has just computed or loaded, as far as there are."""
        for key in states:
            for block in self._take(1):
                self._states.append(block)
                if key not in self._block_of:
                    self._block_of[key], self._key_of[block] = block, key

    def fill(self, path: Sequence[OffloadKey], num_blocks: int) -> None:
        """The first ``num_blocks`` blocks of ``path`` are computed or loaded."""
        self.grow(num_blocks)
        first, self._num_named = self._num_named, num_blocks
        named = {
            key: block
            for key, block in zip(path[first:num_blocks], self._table[first:num_blocks])
            if key not in self._block_of
        }
        self._block_of.update(named)
        self._key_of.update(zip(named.values(), named))

    def grow(self, num_blocks: int) -> None:
        """Gives the request ``num_blocks`` blocks in all, or as many as there are, without making them findable."""
        if num_blocks > len(self._table):
            self._table += self._take(num_blocks - len(self._table))

    def _take(self, most: int) -> list[int]:
        """Up to ``most`` blocks from the front of the queue."""
        named, pop = self._key_of, self._queue.popitem
        taken = [pop(last=False)[0] for _ in range(min(most, len(self._queue)))]
        lost = [named.pop(block) for block in taken if block in named]
        for key in lost:
            del self._block_of[key]
        return taken

    def release(self) -> None:
        self._queue.update(dict.fromkeys(reversed(self._table + self._states)))
        self._table, self._states = [], []
