# SPDX-License-Identifier: Apache-2.0
"""Wrappers around a store that delay calls, fail calls, lose writes or tear reads, as the test chooses."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.base import BlockStore, LossCause
from kvoffload.tiering.stores.wrappers import StoreWrapper


class GatedStore(StoreWrapper):
    """A wrapper that delays calls of the methods named in ``close_gate`` until ``open_gate``.

    Any method that does I/O can be named: ``"contains"``, ``"write"``, ``"read_into"``, ``"scan"`` and so on.
    ``threads`` collects the ids of the threads that called such a method.
    """

    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner)
        self.threads: set[int] = set()
        self._closed: set[str] = set()
        self._arrived = 0
        self._change = threading.Condition()

    def close_gate(self, *calls: str) -> None:
        """Make later calls of these methods wait."""
        with self._change:
            self._closed |= set(calls)

    def open_gate(self, *calls: str) -> None:
        """Let waiting and later calls of these methods pass, or calls of all methods if none is named."""
        with self._change:
            self._closed -= set(calls or tuple(self._closed))
            self._change.notify_all()

    def wait_for_arrivals(self, count: int, timeout_s: float = 30.0) -> None:
        """Return once ``count`` calls in total have arrived at a closed gate.

        Raises ``AssertionError`` after ``timeout_s``.
        """
        with self._change:
            if not self._change.wait_for(lambda: self._arrived >= count, timeout_s):
                raise AssertionError(f"{self._arrived} calls arrived at the gate, not {count}")

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        self._pass("contains")
        return self.inner.contains(keys)

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._pass("write")
        return self.inner.write(keys, blocks)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._pass("read_into")
        return self.inner.read_into(keys, blocks)

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        for batch in self.inner.scan():
            self._pass("scan")
            yield batch

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._pass("touch")
        self.inner.touch(keys)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._pass("discard")
        self.inner.discard(keys)

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        self._pass("take_lost")
        return self.inner.take_lost()

    def _pass(self, call: str) -> None:
        self.threads.add(threading.get_ident())
        with self._change:
            if call in self._closed:
                self._arrived += 1
                self._change.notify_all()
                self._change.wait_for(lambda: call not in self._closed)


class FaultyStore(StoreWrapper):
    """A wrapper that fails as planned.

    A method in ``broken`` raises its exception. Writes of keys in ``lost`` fail. Reads of keys in ``torn`` fail and
    leave garbage in the buffer. ``calls`` records (method, keys) of every call.
    """

    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner)
        self.broken: dict[str, Exception] = {}
        self.lost: set[OffloadKey] = set()
        self.torn: set[OffloadKey] = set()
        self.calls: list[tuple[str, tuple[OffloadKey, ...]]] = []

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        self._enter("contains", keys)
        return self.inner.contains(keys)

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._enter("write", keys)
        kept = [index for index, key in enumerate(keys) if key not in self.lost]
        done = self.inner.write([keys[index] for index in kept], [blocks[index] for index in kept])
        answers = dict(zip(kept, done, strict=True))
        return [answers.get(index, False) for index in range(len(keys))]

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._enter("read_into", keys)
        answers = self.inner.read_into(keys, blocks)
        for index, key in enumerate(keys):
            if key in self.torn:
                blocks[index][: blocks[index].nbytes // 2] = b"\xa5" * (blocks[index].nbytes // 2)
                answers[index] = False
        return answers

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._enter("touch", keys)
        self.inner.touch(keys)

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        self._enter("scan", ())
        yield from self.inner.scan()

    def _enter(self, call: str, keys: Sequence[OffloadKey]) -> None:
        self.calls.append((call, tuple(keys)))
        if call in self.broken:
            raise self.broken[call]
