# SPDX-License-Identifier: Apache-2.0
"""The slabs that a store has open: who may use one, and until when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.stores.root import Access
from kvoffload.tiering.stores.slab.allocator import SLAB_STRIDE
from kvoffload.tiering.stores.slab.file import SlabFile
from kvoffload.tiering.stores.slab.format import ENTRY_BYTES, SlabFormat
from kvoffload.tiering.stores.slab.slabs import Slab, Slabs

LAYOUT = SlabFormat("slabs", 100)
KEYS = keys_of(*range(4))


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[Slabs]:
    """Two slabs of ours, with eight slots each."""
    directory = os.open(tmp_path, os.O_RDONLY)
    opened = Slabs(str(tmp_path))
    for name in ("a", "b"):
        opened.register(SlabFile.create(name, LAYOUT, 8, directory, Access()), is_own=True)
    yield opened
    opened.close()
    os.close(directory)


def put(slabs: Slabs, slab: Slab, index: int, number: int) -> int:
    """The slot of a block, as a write leaves it."""
    key = LAYOUT.hashed(KEYS[number])
    with slabs.lock:
        slab.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES] = LAYOUT.entry(key, memoryview(b""), 1)
        slot = slab.number * SLAB_STRIDE + index
        slabs.index.add(key.hash64 & 0xFFFF_FFFF, slot)
    return slot


def test_a_slab_is_closed_by_its_last_user(slabs: Slabs) -> None:
    slab = slabs.by_name["a"]
    with slabs.lock:
        first, second = slabs.pin([slab.number]), slabs.pin([slab.number, slab.number])
        slabs._drop([slab])
    slabs.unpin(first)
    assert slab.file.read_changes().tolist() == [0], "still open"
    slabs.unpin(second)
    with pytest.raises(OSError, match="Bad file"):
        slab.file.read_changes()


def test_one_slot_in_64_may_be_left_out_of_use_and_one_of_any_slab(slabs: Slabs, tmp_path: Path) -> None:
    small, directory = slabs.by_name["a"], os.open(tmp_path, os.O_RDONLY)
    slabs.register(SlabFile.create("large", LAYOUT, 640, directory, Access()), is_own=True)
    os.close(directory)
    large = slabs.by_name["large"]
    assert not slabs.may_leave_out(large, 1, any_good=False), "then the disk is bad, not a slot"
    assert not slabs.may_leave_out(large, 11, any_good=True)
    assert [slabs.may_leave_out(large, count, any_good=True) for count in (6, 5, 4, 1)] == [True, False, True, False]
    assert [slabs.may_leave_out(small, count, any_good=True) for count in (2, 1, 1)] == [False, True, False]
    assert (large.num_bad, small.num_bad) == (10, 1)


def test_a_block_is_gone_with_its_last_copy(slabs: Slabs) -> None:
    first, second = slabs.by_name["a"], slabs.by_name["b"]
    put(slabs, first, 0, 1)
    put(slabs, first, 3, 2)
    put(slabs, second, 5, 1)
    slabs.lose(first, OSError("bad"))
    assert slabs.take_lost() == {KEYS[2]: "corrupt"}
    assert slabs.quarantined == {"a"}
    slabs.lose(first, OSError("bad"))
    slabs.lose(second, OSError("bad"))
    assert slabs.take_lost() == {KEYS[1]: "corrupt"}
    assert len(slabs.index) == 0


def test_slabs_are_dropped_together_and_each_once(slabs: Slabs) -> None:
    first, second = slabs.by_name["a"], slabs.by_name["b"]
    put(slabs, first, 0, 1)
    put(slabs, second, 5, 1)
    put(slabs, second, 6, 2)
    assert slabs.drop([first, second], "removed") == [first, second]
    assert slabs.drop([first, second], "removed") == []
    assert slabs.take_lost() == dict.fromkeys(KEYS[1:3], "removed")
    assert (len(slabs.index), slabs.allocator.num_slots, slabs.open, slabs.by_name) == (0, 0, {}, {})


def test_a_slab_that_fails_is_quarantined_before_a_poll_can_open_it_again(slabs: Slabs, monkeypatch) -> None:
    drop = slabs._drop
    monkeypatch.setattr(slabs, "_drop", lambda dropped: (drop(dropped), seen.append(set(slabs.quarantined))))
    seen = list[set[str]]()
    slabs.lose(slabs.by_name["a"], OSError("bad"))
    assert seen == [{"a"}]


def test_blocks_of_a_store_that_closes_are_not_gone(slabs: Slabs) -> None:
    put(slabs, slabs.by_name["a"], 0, 1)
    slabs.close()
    assert slabs.take_lost() == {}
    assert slabs.open == {}
