# SPDX-License-Identifier: Apache-2.0
"""Wrappers: stores that add a checksum, a rate limit or a namespace to any other store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import xxhash

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats

__all__ = ["Checksummed", "Namespaced", "StoreWrapper", "Throttled"]


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

    def attach(self, memory: memoryview) -> None:
        self.inner.attach(memory)

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


class Throttled(StoreWrapper):
    """Keeps the average rate of reads and writes together below ``bytes_per_s``, by sleeping in the I/O thread."""

    def __init__(
        self,
        inner: BlockStore,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s must be positive, not {bytes_per_s}.")
        super().__init__(inner)
        self._bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._wait(blocks)
        return self.inner.write(keys, blocks)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._wait(blocks)
        return self.inner.read_into(keys, blocks)

    def _wait(self, blocks: Sequence[memoryview]) -> None:
        with self._lock:
            start_s = max(self._free_at_s, self._clock())
            self._free_at_s = start_s + sum(block.nbytes for block in blocks) / self._bytes_per_s
        if (delay_s := start_s - self._clock()) > 0:
            self._sleep(delay_s)


class Namespaced(StoreWrapper):
    """Separates several users of one store: puts a digest of ``namespace`` before each key."""

    def __init__(self, inner: BlockStore, namespace: str) -> None:
        super().__init__(inner)
        self.resident = None  # those of the inner store have other names; the tier above remembers them
        self.namespace = namespace
        self._prefix = xxhash.xxh3_128_digest(namespace.encode())

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self.inner.contains(self._to_inner(keys))

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return self.inner.write(self._to_inner(keys), blocks)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return self.inner.read_into(self._to_inner(keys), blocks)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.discard(self._to_inner(keys))

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        for keys in self.inner.scan():
            yield self._from_inner(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.touch(self._to_inner(keys))

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        cut = len(self._prefix)
        lost = self.inner.take_lost()
        return {OffloadKey(key[cut:]): cause for key, cause in lost.items() if key.startswith(self._prefix)}

    def _to_inner(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return [OffloadKey(self._prefix + key) for key in keys]

    def _from_inner(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        cut = len(self._prefix)
        return [OffloadKey(key[cut:]) for key in keys if key.startswith(self._prefix)]
