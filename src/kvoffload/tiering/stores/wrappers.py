# SPDX-License-Identifier: Apache-2.0
"""Wrappers: stores that add something to any other store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import xxhash

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats
from kvoffload.tiering.stores.seal import SEAL_BYTES, sealer_of
from kvoffload.tiering.stores.shared import BadBlocks


class StoreWrapper(BlockStore):
    """A store that passes every call, including the optional ones, to ``inner``, and declares the same attributes. A
    subclass overrides the calls that it changes."""

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

    def retire(self) -> None:
        self.inner.retire()

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        return self.inner.take_lost()

    def stats(self) -> StoreStats:
        return self.inner.stats()


class Checksummed(StoreWrapper):
    """A store that seals each block for its key and ``namespace``, because ``inner`` might return wrong bytes
    unnoticed. Without a ``secret`` the seal is a checksum.

    ``inner`` stores blocks that are ``overhead_bytes`` longer. A block that does not verify is a miss and is discarded.
    Each write and each read costs one more copy of the block.
    """

    OVERHEAD_BYTES = SEAL_BYTES
    """Bytes that a seal adds without an encrypting secret."""

    def __init__(self, inner: BlockStore, *, namespace: str = "", secret: bytes | None = None) -> None:
        super().__init__(inner)
        # Without a namespace, use the checksum of older stores, which did not include namespaces.
        self._sealer = sealer_of(namespace, secret, None if namespace else _checksum)
        self.overhead_bytes = self._sealer.seal_bytes
        self._bad = BadBlocks()

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        sealed = [memoryview(b"".join(self._sealer.seal(key, block))) for key, block in zip(keys, blocks, strict=True)]
        return self.inner.write(keys, sealed)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        sealed = [memoryview(bytearray(block.nbytes + self.overhead_bytes)) for block in blocks]
        answers = self.inner.read_into(keys, sealed)
        bad = []
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            stored, seal = sealed[index][: block.nbytes], sealed[index][block.nbytes :]
            if answers[index] and not self._sealer.unseal(seal, key, stored, block):
                answers[index] = False
                bad.append(key)
        self._bad.remove(bad, self.inner)
        return answers

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        return self.inner.take_lost() | self._bad.take()

    def stats(self) -> StoreStats:
        inner = self.inner.stats()
        return replace(inner, corrupt_blocks=inner.corrupt_blocks + self._bad.count)


class Rotating(StoreWrapper):
    """Blocks under several secrets, each in its own store: ``inner`` writes and reads, and the ``older`` stores are
    only read. So a fleet can replace its secret and keep its blocks. Blocks under a secret that no process has are
    evicted, because nobody uses them."""

    def __init__(self, inner: BlockStore, older: Sequence[BlockStore]) -> None:
        super().__init__(inner)
        self._all = (inner, *older)
        for store in older:
            store.retire()
        residents = [store.resident for store in self._all if store.resident is not None]
        self.resident = JoinedKeys(lambda: residents) if len(residents) == len(self._all) else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._all))})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._in_turn(len(keys), lambda store, rest: store.contains([keys[index] for index in rest]))

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        def read(store: BlockStore, rest: Sequence[int]) -> list[bool]:
            return store.read_into([keys[index] for index in rest], [blocks[index] for index in rest])

        return self._in_turn(len(keys), read)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        for store in self._all:
            store.discard(keys)

    def close(self) -> None:
        for store in self._all:
            store.close()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        for position, store in enumerate(self._all):
            for keys in store.scan():
                left = keys
                for newer in self._all[:position]:  # yield each key once
                    left = [key for key, is_there in zip(left, newer.contains(left), strict=True) if not is_there]
                if left or not keys:
                    yield left

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        for store in self._all:
            store.touch(keys)

    def retire(self) -> None:
        for store in self._all:
            store.retire()

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        lost = {key: cause for store in reversed(self._all) for key, cause in store.take_lost().items()}
        resident = self.resident
        return lost if resident is None else {key: cause for key, cause in lost.items() if key not in resident}

    def stats(self) -> StoreStats:
        each = [store.stats() for store in self._all]
        # All of them share one quota and one disk.
        return replace(StoreStats.of_all(each), max_bytes=each[0].max_bytes, free_bytes=each[0].free_bytes)

    def _in_turn(self, count: int, ask: Callable[[BlockStore, Sequence[int]], list[bool]]) -> list[bool]:
        """Return the answers of the first store, and ask the next store about each key whose answer is ``False``. An
        error of the first store is raised. An older store that fails loses only its own blocks."""
        answers = [*ask(self.inner, range(count))]
        for store in self._all[1:]:
            if rest := [index for index, answer in enumerate(answers) if not answer]:
                with suppress(StoreError):
                    for index, answer in zip(rest, ask(store, rest), strict=True):
                        answers[index] = answer
        return answers


class JoinedKeys(Collection[OffloadKey]):
    """The keys of several collections. Each of them, and the list that ``parts`` returns, may change meanwhile."""

    def __init__(self, parts: Callable[[], Iterable[Collection[OffloadKey]]]) -> None:
        self._parts = parts

    def __contains__(self, key: object) -> bool:
        return any(key in part for part in self._parts())

    def __len__(self) -> int:
        return sum(map(len, self._parts()))

    def __iter__(self) -> Iterator[OffloadKey]:
        return itertools.chain.from_iterable(self._parts())


def _checksum(key: bytes, block: memoryview) -> bytes:
    state = xxhash.xxh3_128(len(key).to_bytes(4, "big") + key)
    state.update(block)
    return state.digest()
