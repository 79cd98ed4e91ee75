# SPDX-License-Identifier: Apache-2.0
"""The index against a plain dict."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
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


def crowded(key: OffloadKey) -> HashedKey:
    """Hashes of which many begin their search in the same few cells, at the end of the table too."""
    key_hash = LAYOUT.hashed(key)
    hash64 = (key_hash.hash64 % 3) * 977 + 1020
    return HashedKey(hash64, key_hash.probe)


def same(key: OffloadKey) -> HashedKey:
    return HashedKey(77, LAYOUT.hashed(key).probe)


@pytest.mark.parametrize("hashed", [LAYOUT.hashed, crowded])
def test_it_finds_what_a_dict_finds(hashed) -> None:
    rng, index = random.Random(0), SlotIndex()
    keys = [hashed(key) for key in keys_of(*range(600))]
    oracle: dict[int, int] = {}
    free = [slab * SLAB_STRIDE + place for slab in (1, 7) for place in range(600)]
    for step in range(6000):
        number = rng.randrange(600)
        key = keys[number]
        if number in oracle:
            slot = oracle.pop(number)
            assert index.remove(key.hash64 & 0xFFFF_FFFF, slot)
            assert not index.remove(key.hash64 & 0xFFFF_FFFF, slot)
            free.append(slot)
        else:
            oracle[number] = free.pop(rng.randrange(len(free)))
            put(index, oracle[number], key)
        if step % 500 == 0:
            assert [index.find(key) for key in keys] == [oracle.get(number, -1) for number in range(600)]
            assert len(index) == len(oracle)


@pytest.mark.parametrize("hashed", [LAYOUT.hashed, crowded])
def test_many_at_once_are_the_same_as_one_by_one(hashed) -> None:
    keys = [hashed(key) for key in keys_of(*range(2000))]
    entries = b"".join(LAYOUT.entry(key, bytes(16), 0) for key in keys)
    index = SlotIndex()
    index.tables[5] = bytearray(entries)
    table = np.frombuffer(entries, ENTRY)
    hashes = np.array([key.hash64 & 0xFFFF_FFFF for key in keys], np.uint32)
    if hashed == LAYOUT.hashed:
        assert (hashes == table["hash"]).all()
    index.add_many(hashes, np.arange(2000) + 5 * SLAB_STRIDE)
    assert [index.find(key) for key in keys] == [5 * SLAB_STRIDE + place for place in range(2000)]
    for key in keys[::2]:
        assert index.remove(key.hash64 & 0xFFFF_FFFF, index.find(key))
    assert [index.find(key) >= 0 for key in keys] == [False, True] * 1000


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
    index.drop_slab(2)
    assert index.find(key) == -1
    assert index.find(other) == SLAB_STRIDE + 1
    assert len(index) == 1


def test_a_reader_without_the_lock_finds_what_it_found_while_all_cells_are_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, absent = SlotIndex(), LAYOUT.hashed(OffloadKey(b"absent"))
    held = [LAYOUT.hashed(key) for key in keys_of(*range(1500))]
    place, meanwhile = index_module._place, list[bool | None]()

    def place_and_ask(array: npt.NDArray[np.uint64], cells: npt.NDArray[np.uint64]) -> None:
        meanwhile.extend(index.holds(key) for key in (held[0], absent))
        place(array, cells)

    monkeypatch.setattr(index_module, "_place", place_and_ask)
    for slot, key in enumerate(held):
        put(index, SLAB_STRIDE + slot if slot else 0, key)
        assert index.holds(key)
        assert index.holds(absent) is False
    index.drop_slab(1)
    assert index.holds(absent) is False
    assert index.holds(held[0])
    assert index.holds(held[1]) is False
    assert 1 not in index.tables, "the number may be used again"
    index.remove(held[0].hash64 & 0xFFFF_FFFF, 0)
    assert index.holds(held[0]) is False
    assert meanwhile == [True, False] * 3, "twice for more cells, once for the slab"


def test_a_reader_without_the_lock_waits_for_no_holder_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread holds the lock and moves all cells, as when a slab is dropped from a large store. It goes on only
    after the lookups."""
    index, lock = SlotIndex(), threading.Lock()
    held = keys_of(*range(1500))
    for slot, key in enumerate(held):
        put(index, SLAB_STRIDE + slot if slot else 0, LAYOUT.hashed(key))
    resident = ResidentKeys(index, lock, LAYOUT.hashed, lambda: iter(()))
    is_moving, go_on, place = threading.Event(), threading.Event(), index_module._place

    def place_late(array: npt.NDArray[np.uint64], cells: npt.NDArray[np.uint64]) -> None:
        is_moving.set()
        assert go_on.wait(120)
        place(array, cells)

    def drop() -> None:
        with lock:
            index.drop_slab(1)

    monkeypatch.setattr(index_module, "_place", place_late)
    dropper = threading.Thread(target=drop)
    dropper.start()
    assert is_moving.wait(120)
    found, is_answered = list[bool](), threading.Event()

    def look() -> None:
        found.extend(key in resident for key in (held[0], held[5], b"absent"))
        is_answered.set()

    reader = threading.Thread(target=look)
    reader.start()
    try:
        assert is_answered.wait(60), "the reader waits for the holder of the lock"
        assert found == [True, False, False]
    finally:
        go_on.set()
        dropper.join()
        reader.join()
    assert not lock.locked()


def test_to_drop_every_slab_takes_work_in_proportion_to_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in cells that are placed anew."""
    index, placed, place = SlotIndex(), list[int](), index_module._place
    num_slabs, per_slab = 128, 256
    keys = [LAYOUT.hashed(key) for key in keys_of(*range(num_slabs * per_slab))]
    for slab in range(num_slabs):
        some = keys[slab * per_slab : (slab + 1) * per_slab]
        index.tables[slab] = bytearray(b"".join(LAYOUT.entry(key, bytes(16), 0) for key in some))
        hashes = np.array([key.hash64 & 0xFFFF_FFFF for key in some], np.uint32)
        index.add_many(hashes, np.arange(per_slab) + slab * SLAB_STRIDE)

    def place_and_count(array: npt.NDArray[np.uint64], cells: npt.NDArray[np.uint64]) -> None:
        placed.append(len(cells))
        place(array, cells)

    monkeypatch.setattr(index_module, "_place", place_and_count)
    for slab in range(num_slabs):
        index.drop_slab(slab)
        left = keys[(slab + 1) * per_slab :]
        assert len(index) == len(left)
        assert all(index.find(key) >= 0 for key in left[:: 8 * per_slab])
        assert index.find(keys[slab * per_slab]) == -1
    assert sum(placed) <= 2 * len(keys)


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
    for slot, key in enumerate((first, second)):
        put(index, slot, same(key))
    index.tables = Interrupted(index.tables, lambda: index.remove(same(first).hash64, 0) and None)
    resident = ResidentKeys(index, lock, same, lambda: iter([[second]]))
    assert second in resident
    assert first not in resident
    assert list(resident) == [second]
    assert len(resident) == 1


def test_a_reader_without_the_lock_passes_over_a_slab_that_goes() -> None:
    """Its cells are replaced, and its table removed, after the reader took the old cells."""
    index, lock = SlotIndex(), threading.Lock()
    first, second = keys_of(1, 2)
    put(index, 7, same(first))
    put(index, SLAB_STRIDE, same(second))

    def drop() -> None:
        index.drop_slab(0)
        index.purge()

    index.tables = Interrupted(index.tables, drop)
    with lock:  # which is not asked for
        assert second in ResidentKeys(index, lock, same, lambda: iter(()))
    assert index.holds(same(first)) is False
    assert 0 not in index.tables
