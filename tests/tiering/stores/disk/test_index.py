# SPDX-License-Identifier: Apache-2.0
"""Test the index against a plain dict."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.stores.disk import index as index_module
from kvoffload.tiering.stores.disk.allocator import SLAB_STRIDE
from kvoffload.tiering.stores.disk.format import ENTRY, ENTRY_BYTES, HashedKey, SlabFormat
from kvoffload.tiering.stores.disk.index import ResidentKeys, SlotIndex

LAYOUT = SlabFormat("index", 4096)


def put(index: SlotIndex, slot: int, key: HashedKey) -> None:
    table = index.tables.setdefault(slot // SLAB_STRIDE, bytearray(3000 * ENTRY_BYTES))
    at = slot % SLAB_STRIDE * ENTRY_BYTES
    table[at : at + ENTRY_BYTES] = LAYOUT.entry(key, bytes(16), 0)
    index.add(key.hash64 & 0xFFFF_FFFF, slot)


def drop(index: SlotIndex, *slabs: int) -> None:
    for slab in slabs:
        index.tables[slab] = bytearray()
    index.drop_slabs(slabs, nullcontext())


def crowded(key: OffloadKey) -> HashedKey:
    """Return a hash. Many of these hashes start their search in the same few cells, also at the end of the table."""
    key_hash = LAYOUT.hashed(key)
    hash64 = (key_hash.hash64 % 3) * 977 + 1020
    return HashedKey(hash64, key_hash.probe)


def same(key: OffloadKey) -> HashedKey:
    return HashedKey(77, LAYOUT.hashed(key).probe)


@pytest.mark.parametrize(("hashed", "count"), [(LAYOUT.hashed, 600), (crowded, 200)])
def test_it_finds_what_a_dict_finds(hashed, count: int) -> None:
    rng, index = random.Random(0), SlotIndex()
    keys = [hashed(key) for key in keys_of(*range(count))]
    oracle: dict[int, int] = {}
    free = [slab * SLAB_STRIDE + place for slab in (1, 7) for place in range(count)]
    for step in range(10 * count):
        number = rng.randrange(count)
        key = keys[number]
        if number in oracle:
            slot = oracle.pop(number)
            assert index.remove(key.hash64 & 0xFFFF_FFFF, slot)
            assert not index.remove(key.hash64 & 0xFFFF_FFFF, slot)
            free.append(slot)
        else:
            oracle[number] = free.pop(rng.randrange(len(free)))
            put(index, oracle[number], key)
        if step % count == 0:
            assert [index.find(key) for key in keys] == [oracle.get(number, -1) for number in range(count)]
            assert len(index) == len(oracle)


@pytest.mark.parametrize(("hashed", "count"), [(LAYOUT.hashed, 2000), (crowded, 600)])
def test_many_at_once_are_the_same_as_one_by_one(hashed, count: int) -> None:
    keys = [hashed(key) for key in keys_of(*range(count))]
    entries = b"".join(LAYOUT.entry(key, bytes(16), 0) for key in keys)
    index = SlotIndex()
    index.tables[5] = bytearray(entries)
    table = np.frombuffer(entries, ENTRY)
    hashes = np.array([key.hash64 & 0xFFFF_FFFF for key in keys], np.uint32)
    if hashed == LAYOUT.hashed:
        assert (hashes == table["hash"]).all()
    index.add_many(hashes, np.arange(count) + 5 * SLAB_STRIDE)
    assert [index.find(key) for key in keys] == [5 * SLAB_STRIDE + place for place in range(count)]
    for key in keys[::2]:
        assert index.remove(key.hash64 & 0xFFFF_FFFF, index.find(key))
    assert [index.find(key) >= 0 for key in keys] == [False, True] * (count // 2)


def test_one_key_in_several_slots() -> None:
    index = SlotIndex()
    (key, other) = (LAYOUT.hashed(key) for key in keys_of(1, 2))
    slots = [SLAB_STRIDE, 2 * SLAB_STRIDE + 4]
    for slot in slots:
        put(index, slot, key)
    put(index, SLAB_STRIDE + 1, other)
    assert set(index.find_all(key)) == set(slots)
    index.remove(key.hash64 & 0xFFFF_FFFF, slots[0])
    assert index.find(key) == slots[1]
    drop(index, 2)
    assert index.find(key) == -1
    assert index.find(other) == SLAB_STRIDE + 1
    assert len(index) == 1


class Counting:
    """A lock that counts acquisitions, and calls a function at each release."""

    def __init__(self, between: Callable[[], object] = lambda: None) -> None:
        self.num_holds = 0
        self._between = between

    def __enter__(self) -> None:
        self.num_holds += 1

    def __exit__(self, *_: object) -> None:
        self._between()


def test_cells_that_change_while_they_move_are_those_of_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each piece of a move, other calls add and remove blocks and drop slabs.

    Readers without the lock find all present blocks.
    """
    monkeypatch.setattr(index_module, "_CELLS_AT_ONCE", 64)
    rng, index, num_moves = random.Random(5), SlotIndex(), 0
    keys = [crowded(key) if number % 8 == 0 else LAYOUT.hashed(key) for number, key in enumerate(keys_of(*range(1500)))]
    oracle: dict[int, int] = {}
    slabs, unused, dropped = list(range(1, 7)), list(range(7, 4000)), set[int]()

    def change() -> None:
        for _ in range(rng.randrange(12)):
            number = rng.choice((rng.randrange(len(keys)), rng.randrange(0, len(keys), 8)))
            if number in oracle:
                assert index.remove(keys[number].hash64 & 0xFFFF_FFFF, oracle.pop(number))
            else:
                oracle[number] = rng.choice(slabs) * SLAB_STRIDE + number
                put(index, oracle[number], keys[number])
        if rng.random() < 0.05:
            slab = slabs.pop(rng.randrange(len(slabs)))
            slabs.append(unused.pop())
            if slab in index.tables:
                index.tables[slab] = bytearray()
                dropped.add(slab)
            for number in [number for number, slot in oracle.items() if slot // SLAB_STRIDE == slab]:
                del oracle[number]
        for number in rng.sample(range(len(keys)), 8) + rng.sample(range(0, len(keys), 8), 16):
            assert index.holds(keys[number]) is (number in oracle)
            assert list(index.find_all(keys[number])) == ([oracle[number]] if number in oracle else [])

    for step in range(16):
        for _ in range(20):
            change()
        lock = Counting(change)
        if step % 2:
            index.make_room(3000, lock)
            assert not index._lacks_room(2000)
        else:
            index.drop_slabs(going := set(dropped), lock)
            assert going.isdisjoint(index.tables)
        num_moves += lock.num_holds > 16
        assert [index.find(key) for key in keys] == [oracle.get(number, -1) for number in range(len(keys))]
        index.drop_slabs(set(dropped), nullcontext())
        assert len(index) == len(oracle)
    assert num_moves > 4


def test_whoever_finds_no_room_in_the_middle_of_a_copy_makes_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_CELLS_AT_ONCE", 64)
    index, held = SlotIndex(), [LAYOUT.hashed(key) for key in keys_of(*range(2900))]
    left = list(enumerate(held))

    def add_many() -> None:
        for _ in range(min(200, len(left))):
            put(index, *(SLAB_STRIDE + left[-1][0], left[-1][1]))
            left.pop()

    for _ in range(3):
        add_many()
    index.make_room(200, Counting(add_many))
    while left:
        add_many()
    assert [index.find(key) for key in held] == [SLAB_STRIDE + slot for slot in range(len(held))]
    assert len(index) == len(held)


@pytest.mark.parametrize("num_added", [0, 1200])
def test_cells_move_to_one_array_which_is_never_too_short(monkeypatch: pytest.MonkeyPatch, num_added: int) -> None:
    """While this thread allocates an array, another one begins to move the cells, or moves all to a longer array."""
    monkeypatch.setattr(index_module, "_CELLS_AT_ONCE", 64)
    index, num_blocks = SlotIndex(), 600 + num_added
    held = [LAYOUT.hashed(key) for key in keys_of(*range(num_blocks))]
    for place in range(600):
        put(index, SLAB_STRIDE + place, held[place])
    real = index_module._cells

    def slow(num_cells: int) -> object:
        monkeypatch.setattr(index_module, "_cells", real)
        for place in range(600, num_blocks):
            put(index, SLAB_STRIDE + place, held[place])
        if not num_added:
            index._move_some(400, nullcontext())
        return real(num_cells)

    def check() -> None:
        assert 8 * len(index) <= 7 * len(index._views[-1][0])

    monkeypatch.setattr(index_module, "_cells", slow)
    index.make_room(400, Counting(check))
    assert [index.find(key) for key in held] == [SLAB_STRIDE + slot for slot in range(num_blocks)]


@pytest.mark.parametrize("num_blocks", [20_000, 80_000])
def test_the_lock_is_let_go_after_each_piece_of_a_copy(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    """Whatever the number of blocks."""
    monkeypatch.setattr(index_module, "_CELLS_AT_ONCE", 1024)
    index, held = SlotIndex(), np.random.default_rng(0).integers(1, 1 << 32, num_blocks, np.uint32)
    index.make_room(num_blocks)
    index.tables[1] = bytearray(num_blocks * ENTRY_BYTES)
    index.add_many(held, np.arange(num_blocks) + SLAB_STRIDE)
    num_cells, lock = len(index._views[0][0]), Counting()
    index.make_room(num_cells, lock)
    assert lock.num_holds >= num_cells // 1024
    lock.num_holds = 0
    index.tables[1] = bytearray()
    index.drop_slabs([1], lock)
    assert lock.num_holds >= num_cells // 1024
    assert len(index) == 0
    assert 1 not in index.tables, "the number may be used again"


class Interrupted(dict[int, bytearray]):
    """Tables of an index. When one is asked for, ``change`` runs first, as another thread might just then."""

    def __init__(self, tables: dict[int, bytearray], change: Callable[[], None]) -> None:
        super().__init__(tables)
        self._changes = [change]

    def __getitem__(self, slab: int) -> bytearray:
        if self._changes:
            self._changes.pop()()
        return super().__getitem__(slab)


def test_a_reader_without_the_lock_misses_no_block_that_moves() -> None:
    """Two keys of one hash: the reader looks at the first one's cell, which is removed just then, so that the second
    moves to where the reader has been."""
    index, lock = SlotIndex(), threading.Lock()
    first, second = keys_of(1, 2)
    for place, key in enumerate((first, second)):
        put(index, SLAB_STRIDE + place, same(key))
    index.tables = Interrupted(index.tables, lambda: index.remove(same(first).hash64, SLAB_STRIDE) and None)
    resident = ResidentKeys(index, lock, same, lambda: iter([[second]]))
    assert second in resident
    assert first not in resident
    assert list(resident) == [second]
    assert len(resident) == 1


def test_a_reader_without_the_lock_passes_over_a_slab_that_goes() -> None:
    """Its cells are removed, and its table too, after the reader took the old cells."""
    index, lock = SlotIndex(), threading.Lock()
    first, second = keys_of(1, 2)
    put(index, SLAB_STRIDE + 7, same(first))
    put(index, 2 * SLAB_STRIDE, same(second))
    index.tables = Interrupted(index.tables, lambda: drop(index, 1))
    with lock:  # which is not asked for
        assert second in ResidentKeys(index, lock, same, lambda: iter(()))
    assert index.holds(same(first)) is False
    assert 1 not in index.tables


def test_a_reader_without_the_lock_misses_no_block_when_a_move_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader knows only the old array, in which the second key's cell has just moved."""
    index, lock = SlotIndex(), threading.Lock()
    first, second = keys_of(1, 2)
    for place, key in enumerate((first, second)):
        put(index, SLAB_STRIDE + place, same(key))
    monkeypatch.setattr(index_module, "_CELLS_AT_ONCE", 512)
    index.tables = Interrupted(index.tables, lambda: index._move_some(700, lock))
    assert index.holds(same(second)) is None
    assert index._is_moving
    assert second in ResidentKeys(index, lock, same, lambda: iter(()))


def test_a_lookup_that_is_disturbed_again_and_again_takes_the_lock() -> None:
    lock = threading.Lock()

    class Busy(SlotIndex):
        def holds(self, hashed: HashedKey) -> bool | None:
            return None

        def find(self, hashed: HashedKey) -> int:
            assert lock.locked()
            return {LAYOUT.hashed(one): 0, LAYOUT.hashed(two): 1}.get(hashed, -1)

    one, two, three = keys_of(1, 2, 3)
    resident = ResidentKeys(Busy(), lock, LAYOUT.hashed, lambda: iter(()))
    assert [each in resident for each in (one, two, three)] == [True, True, False]
