# SPDX-License-Identifier: Apache-2.0
"""Blocks in this process's memory: the smallest real store, which tests and simulations use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats


class MemoryStore(BlockStore):
    """Copies of blocks of ``block_bytes`` each in memory. It evicts the least recently used to stay within
    ``max_bytes``."""

    def __init__(self, block_bytes: int, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < block_bytes:
            raise ConfigError(f"max_bytes must hold at least one block of {block_bytes} bytes, not {max_bytes}.")
        self._block_bytes = block_bytes
        self._max_blocks = None if max_bytes is None else max_bytes // block_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[OffloadKey, bytes] = OrderedDict()
        self._evicted: list[OffloadKey] = []
        self._num_evicted = 0

    def __repr__(self) -> str:
        return f"MemoryStore(block_bytes={self._block_bytes}, blocks={len(self._blocks)})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return [key in self._blocks for key in keys]

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self.touch(keys[::-1])  # so that no block here is evicted for another one
        return [self._put(key, bytes(block)) for key, block in zip(keys, blocks, strict=True)]

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return [self._get_into(key, block) for key, block in zip(keys, blocks, strict=True)]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        with self._lock:
            for key in keys:
                self._blocks.pop(key, None)

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        with self._lock:
            keys = list(self._blocks)
        yield keys

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        with self._lock:
            for key in reversed(keys):
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return dict.fromkeys(evicted, "evicted")

    def stats(self) -> StoreStats:
        max_bytes = None if self._max_blocks is None else self._max_blocks * self._block_bytes
        used_bytes = len(self._blocks) * self._block_bytes
        return StoreStats(used_bytes, evicted_blocks=self._num_evicted, max_bytes=max_bytes)

    def _put(self, key: OffloadKey, block: bytes) -> bool:
        if len(block) != self._block_bytes:
            return False
        with self._lock:
            if key not in self._blocks:
                if self._max_blocks is not None and len(self._blocks) >= self._max_blocks:
                    self._evicted.append(self._blocks.popitem(last=False)[0])
                    self._num_evicted += 1
                self._blocks[key] = block
            self._blocks.move_to_end(key)
        return True

    def _get_into(self, key: OffloadKey, target: memoryview) -> bool:
        with self._lock:
            block = self._blocks.get(key)
            if block is None or len(block) != target.nbytes:
                return False
            self._blocks.move_to_end(key)
        target[:] = block
        return True
