# SPDX-License-Identifier: Apache-2.0
"""Tests that every ``BlockStore``, and every wrapper around one, must pass. Subclass the contract in a test module::

    class TestMyStore(BlockStoreContract):
        def make_store(self, directory):        # the directory is empty, and used by this test only
            return MyStore(directory, self.block_bytes)

Two methods bypass the code under test. Override ``reopen`` for a persistent store, and ``corrupt`` for a store that
promises to detect wrong bytes. A test that needs a missing method does not apply and passes.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.stores.base import BlockStore


def block_of(key: OffloadKey, num_bytes: int) -> bytes:
    """Return the only bytes that may ever be read as ``key``."""
    return hashlib.shake_128(key).digest(num_bytes)


def at_once(work: Callable[..., None], arguments: Iterable[tuple[object, ...]]) -> None:
    """Call ``work`` with each of ``arguments`` in its own thread, and wait for all threads."""
    threads = [threading.Thread(target=work, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class StoreCalls:
    """Helpers that call a store with the only bytes that each key may have."""

    block_bytes = 512

    def _write(self, store: BlockStore, keys: Sequence[OffloadKey]) -> list[bool]:
        return store.write(keys, [memoryview(block_of(key, self.block_bytes)) for key in keys])

    def _read(self, store: BlockStore, keys: Sequence[OffloadKey]) -> list[bytes | None]:
        buffers = [bytearray(b"\xa5" * self.block_bytes) for _ in keys]
        answers = store.read_into(keys, [memoryview(buffer) for buffer in buffers])
        assert len(answers) == len(keys)
        return [bytes(buffer) if answer else None for buffer, answer in zip(buffers, answers, strict=True)]


class BlockStoreContract(StoreCalls, ABC):
    """The tests of the contract. A subclass may set ``block_bytes`` to a size that its store needs."""

    has_scan = True
    """Whether ``scan`` finds all blocks of an earlier process."""

    @abstractmethod
    def make_store(self, directory: Path) -> BlockStore:
        """Return a new, empty store with room for a thousand blocks."""

    def reopen(self, directory: Path) -> BlockStore | None:
        """Open the store of an earlier ``make_store(directory)``, as a new process would.

        The default does not apply.
        """
        return None

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        """Change stored bytes of ``key`` without calling the store. Returns whether that was possible."""
        return False

    # ---------------------------------------------------------------------------------------------------- tests

    def test_an_empty_store_has_nothing(self) -> None:
        with self._open() as (store, _):
            assert store.contains(keys_of(1, 2)) == [False, False]
            assert self._read(store, keys_of(1, 2)) == [None, None]

    def test_what_is_written_is_read(self) -> None:
        with self._open() as (store, _):
            keys = keys_of(*range(20))
            assert self._write(store, keys) == [True] * 20
            assert store.contains(keys) == [True] * 20
            self._check(store, keys)

    def test_keys_of_any_length_and_kind_are_kept_apart(self) -> None:
        with self._open() as (store, _):
            keys = [OffloadKey(key) for key in (b"\0", b"\0\0", b"/", b"..", b"a" * 36, b"A" * 36, b"\xff" * 150)]
            assert self._write(store, keys) == [True] * len(keys)
            self._check(store, keys)

    def test_a_batch_has_an_outcome_per_key(self) -> None:
        with self._open() as (store, _):
            self._write(store, keys_of(1, 3))
            assert store.contains(keys_of(1, 2, 3, 4)) == [True, False, True, False]
            found = self._read(store, keys_of(4, 3, 2, 1))
            assert [block is not None for block in found] == [False, True, False, True]
            assert found[1] == block_of(keys_of(3)[0], self.block_bytes)

    def test_an_empty_batch_changes_nothing(self) -> None:
        with self._open() as (store, _):
            assert store.contains([]) == store.write([], []) == store.read_into([], []) == []
            store.discard([])

    def test_writing_a_block_again_is_true(self) -> None:
        with self._open() as (store, _):
            keys = keys_of(1, 2)
            self._write(store, keys[:1])
            assert self._write(store, keys) == [True, True]
            assert self._write(store, [keys[0], keys[0]]) == [True, True]
            self._check(store, keys)

    def test_a_key_twice_in_one_batch(self) -> None:
        with self._open() as (store, _):
            keys = keys_of(1, 2, 1)
            assert self._write(store, keys) == [True] * 3
            self._check(store, keys)

    def test_discarded_blocks_are_gone(self) -> None:
        with self._open() as (store, _):
            self._write(store, keys_of(1, 2, 3))
            store.discard(keys_of(2, 9))
            store.discard(keys_of(2))
            assert store.contains(keys_of(1, 2, 3)) == [True, False, True]
            assert self._read(store, keys_of(2)) == [None]
            assert self._write(store, keys_of(2)) == [True]
            self._check(store, keys_of(1, 2, 3))

    def test_the_buffer_of_a_finished_write_may_change(self) -> None:
        with self._open() as (store, _):
            (key,) = keys_of(1)
            buffer = bytearray(block_of(key, self.block_bytes))
            assert store.write([key], [memoryview(buffer)]) == [True]
            buffer[:] = bytes(len(buffer))
            self._check(store, [key])

    def test_buffers_may_be_rows_of_a_larger_memory(self) -> None:
        with self._open() as (store, _):
            keys, size = keys_of(0, 1, 2, 3), self.block_bytes
            memory = memoryview(bytearray(6 * size))
            rows = [memory[(index + 1) * size : (index + 2) * size] for index in range(4)]
            for key, row in zip(keys, rows, strict=True):
                row[:] = block_of(key, size)
            assert store.write(keys, rows) == [True] * 4
            memory[:] = bytes(6 * size)
            assert store.read_into(keys[::-1], rows) == [True] * 4
            expected = b"".join(block_of(key, size) for key in keys[::-1])
            assert bytes(memory) == bytes(size) + expected + bytes(size), "bytes outside of the blocks were touched"

    def test_many_threads_at_once(self) -> None:
        with self._open() as (store, _):
            keys = keys_of(*range(12))
            start, wrong = threading.Barrier(4), []

            def work(offset: int) -> None:
                mine = keys[offset:] + keys[:offset]
                start.wait()
                for key in mine:
                    self._write(store, [key])
                    for other, found in zip(mine, self._read(store, mine), strict=True):
                        if found is not None and found != block_of(other, self.block_bytes):
                            wrong.append(other)
                if store.contains(mine) != [True] * len(mine):
                    wrong.append(mine[0])

            at_once(work, [(3 * index,) for index in range(4)])
            assert not wrong
            self._check(store, keys)

    def test_a_scan_yields_only_what_is_here(self) -> None:
        with self._open() as (store, _):
            keys = set(keys_of(*range(30)))
            self._write(store, list(keys))
            store.discard(keys_of(7))
            found = [key for batch in store.scan() for key in batch]
            assert len(found) == len(set(found))
            assert set(found) <= keys - set(keys_of(7))

    def test_resident_keys_are_those_that_are_here(self) -> None:
        with self._open() as (store, _):
            resident = store.resident
            if resident is None:
                return
            keys = keys_of(*range(30))
            self._write(store, keys)
            store.discard(keys_of(7, 99))
            asked = [*keys, *keys_of(99)]
            assert [key in resident for key in asked] == store.contains(asked)
            assert set(resident) == set(keys) - set(keys_of(7))
            assert len(resident) == 29

    def test_touch_and_stats_are_harmless(self) -> None:
        with self._open() as (store, _):
            self._write(store, keys_of(1, 2))
            store.touch(keys_of(1, 2, 3))
            stats = store.stats()
            assert stats.used_bytes is None or stats.used_bytes >= 0
            assert stats.corrupt_blocks == stats.evicted_blocks == 0
            assert store.take_lost() == {}
            self._check(store, keys_of(1, 2))

    def test_wrong_bytes_are_a_miss_and_can_be_written_anew(self) -> None:
        with self._open() as (store, directory):
            keys = keys_of(1, 2, 3)
            self._write(store, keys)
            if not self.corrupt(store, directory, keys[1]):
                return
            found = self._read(store, keys)
            assert [block is not None for block in found] == [True, False, True]
            assert store.stats().corrupt_blocks == 1
            assert store.take_lost() == {keys[1]: "corrupt"}
            assert self._write(store, keys) == [True] * 3
            self._check(store, keys)

    def test_a_restart_finds_what_was_written(self) -> None:
        with self._open() as (store, directory):
            keys = keys_of(*range(10))
            self._write(store, keys)
            store.close()
            again = self.reopen(directory)
            if again is None:
                return
            try:
                self._check(again, keys)
                assert {key for batch in again.scan() for key in batch} == (set(keys) if self.has_scan else set())
            finally:
                again.close()

    def test_close_twice(self) -> None:
        with self._open() as (store, _):
            store.close()

    # -------------------------------------------------------------------------------------------------- helpers

    @contextmanager
    def _open(self) -> Iterator[tuple[BlockStore, Path]]:
        with tempfile.TemporaryDirectory() as name:
            store = self.make_store(Path(name))
            try:
                yield store, Path(name)
            finally:
                store.close()

    def _check(self, store: BlockStore, keys: Sequence[OffloadKey]) -> None:
        assert self._read(store, keys) == [block_of(key, self.block_bytes) for key in keys]
