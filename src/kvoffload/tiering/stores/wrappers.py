# SPDX-License-Identifier: Apache-2.0
"""Wrappers: stores that add something to any other store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import xxhash

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats

__all__ = ["Checksummed", "StoreWrapper"]


class StoreWrapper(BlockStore):
    """Passes every call on to ``inner``, also the optional ones, and declares what ``inner`` does. A wrapper overrides
    what it changes."""

    def __init__(self, inner: BlockStore) -> None:
        self.inner = inner
        self.batch_blocks = inner.batch_blocks
        self.requests_in_flight = inner.requests_in_flight
        self.rescan_s = inner.rescan_s
        self.resident = inner.resident

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self.inner.contains(keys)

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return self.inner.write(keys, blocks)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return self.inner.read_into(keys, blocks)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.discard(keys)

    def close(self) -> None:
        self.inner.close()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        return self.inner.scan()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.touch(keys)

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        return self.inner.take_lost()

    def stats(self) -> StoreStats:
        return self.inner.stats()


class Checksummed(StoreWrapper):
    """Binds each block to its key with a checksum, for stores that might return wrong bytes unnoticed.

    ``inner`` holds blocks that are ``OVERHEAD_BYTES`` longer. A block that does not verify is a miss and is
    discarded. Each write and each read costs one more copy of the block.
    """

    OVERHEAD_BYTES = 16

    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._bad: list[OffloadKey] = []
        self._num_bad = 0

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        sealed = [memoryview(bytes(block) + _checksum(key, block)) for key, block in zip(keys, blocks, strict=True)]
        return self.inner.write(keys, sealed)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        sealed = [memoryview(bytearray(block.nbytes + self.OVERHEAD_BYTES)) for block in blocks]
        answers = self.inner.read_into(keys, sealed)
        bad = []
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            payload, stated = sealed[index][: block.nbytes], sealed[index][block.nbytes :]
            if answers[index] and stated != _checksum(key, payload):
                answers[index] = False
                bad.append(key)
            elif answers[index]:
                block[:] = payload
        if bad:
            try:
                self.inner.discard(bad)
            except (StoreError, OSError):
                pass  # the next read finds them bad again
            # Afterwards: a write that found them there is not announced after their loss.
            with self._lock:
                self._bad += bad
                self._num_bad += len(bad)
        return answers

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        with self._lock:
            bad, self._bad = self._bad, []
        return self.inner.take_lost() | dict.fromkeys(bad, "corrupt")

    def stats(self) -> StoreStats:
        inner = self.inner.stats()
        return replace(inner, corrupt_blocks=inner.corrupt_blocks + self._num_bad)


def _checksum(key: OffloadKey, block: memoryview) -> bytes:
    state = xxhash.xxh3_128(len(key).to_bytes(4, "big") + key)
    state.update(block)
    return state.digest()
