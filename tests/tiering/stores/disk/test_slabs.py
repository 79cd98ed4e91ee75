# SPDX-License-Identifier: Apache-2.0
"""Test a store's open slabs: which process may use one, and until when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.stores.disk import allocator as allocator_module
from kvoffload.tiering.stores.disk import slabs as slabs_module
from kvoffload.tiering.stores.disk.allocator import BUSY, Run
from kvoffload.tiering.stores.disk.file import SlabFile
from kvoffload.tiering.stores.disk.format import HashedKey, SlabFormat
from kvoffload.tiering.stores.disk.open_slab import NewBlock, NewRun, Slab
from kvoffload.tiering.stores.disk.slabs import Slabs
from kvoffload.tiering.stores.root import Access

LAYOUT = SlabFormat("slabs", 100)
KEYS = keys_of(*range(4))


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[Slabs]:
    """Two slabs of ours, with eight slots each."""
    directory = os.open(tmp_path, os.O_RDONLY)
    opened = Slabs(str(tmp_path), LAYOUT)
    for name in ("a", "b"):
        opened.register(SlabFile.create(name, LAYOUT, 8, directory, Access()), is_own=True)
    yield opened
    opened.close()
    os.close(directory)


def hashed(*numbers: int) -> list[HashedKey]:
    return [LAYOUT.hashed(KEYS[number]) for number in numbers]


def put(slabs: Slabs, slab: Slab, *numbers: int) -> list[NewRun]:
    """Blocks in slots of a slab, as a write leaves them."""
    others = []
    while (runs := slabs.take([NewBlock(key, memoryview(b""), 1) for key in hashed(*numbers)]))[0].slab is not slab:
        others += runs
    for run in runs:
        run.entries = b"".join(LAYOUT.entry(block.key, bytes(16), 1) for block in run.blocks)
        run.good = [Run(0, run.slots.count)]
    slabs.record([*runs, *others])
    return runs


def test_a_slab_is_closed_by_its_last_user(slabs: Slabs) -> None:
    slab = slabs.by_name["a"]
    put(slabs, slab, 0, 1)
    _, first = slabs.find(hashed(0), [0])
    _, second = slabs.find(hashed(0, 1, 0), [0, 1, 2])
    assert first == second == {slab.number: slab}
    slabs.drop([slab], "removed")
    slabs.unpin(first.values())
    assert slab.file.read_changes().tolist() == [0], "still open"
    slabs.unpin(second.values())
    with pytest.raises(OSError, match="Bad file"):
        slab.file.read_changes()


def test_blocks_of_a_dropped_slab_of_which_nobody_will_hear_are_not_looked_at(
    slabs: Slabs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of millions of blocks must not look at each of them when its directory disappears."""
    put(slabs, slabs.by_name["a"], 0, 1, 2, 3)
    monkeypatch.setattr(slabs_module, "_MAX_LOST", 2)
    monkeypatch.setattr(slabs_module, "_KEYS_AT_ONCE", 1)
    find, asked = slabs._index.find, list[HashedKey]()

    def counted(key: HashedKey) -> int:
        asked.append(key)
        return find(key)

    monkeypatch.setattr(slabs._index, "find", counted)
    slabs.drop([slabs.by_name["a"]], "evicted")
    assert (len(asked), slabs.num_evicted) == (2, 4)
    assert set(slabs.take_lost().values()) == {"evicted"}


def test_slots_of_a_slab_that_is_being_taken_in_are_free_when_their_blocks_are_discarded(
    slabs: Slabs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    file = SlabFile.create("c", LAYOUT, 8, directory, Access())
    os.close(directory)
    file.write_entries(0, b"".join(LAYOUT.entry(key, bytes(16), 1) for key in hashed(0, 1, 2, 3)))

    def discarded_meanwhile(*arguments: Any) -> list[Run]:
        found = allocator_module.free_runs(*arguments)
        slabs.release(slabs.discard(hashed(1, 2)))
        return found

    monkeypatch.setattr(slabs_module, "free_runs", discarded_meanwhile)
    slabs.register(file, is_own=True)
    assert slabs.contains(hashed(0, 1, 2, 3)) == [True, False, False, True]
    assert slabs.num_free == 16 + 8 - 2
    slabs.check_invariants()


def test_a_slab_that_cannot_be_taken_in_is_closed_whatever_the_reason(
    slabs: Slabs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    file = SlabFile.create("c", LAYOUT, 8, directory, Access())

    def fail(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as short:
        short.setattr(slabs._index, "make_room", fail)
        with pytest.raises(MemoryError):
            slabs.register(file, is_own=True)
    again = SlabFile.open("c", LAYOUT, directory, Access())
    assert again.try_lock()
    slabs.register(again, is_own=True)
    os.close(directory)


def test_slots_that_were_not_filled_are_free_again(slabs: Slabs) -> None:
    """A write failed completely or in part, or raised an exception."""
    for good, num_free in (([], 16), ([Run(1, 2)], 14)):
        runs = slabs.take([NewBlock(key, memoryview(b""), 1) for key in hashed(0, 1, 2, 3)])
        assert slabs.num_free == 12
        for run in runs:
            run.entries = b"".join(LAYOUT.entry(block.key, bytes(16), 1) for block in run.blocks)
            run.good = good
        slabs.record(runs)
        assert slabs.num_free == num_free
        slabs.check_invariants()
    assert slabs.contains(hashed(0, 1, 2, 3)) == [False, True, True, False]


def test_a_slot_that_is_being_written_or_out_of_use_does_not_make_its_slab_the_newest(slabs: Slabs) -> None:
    first, second = slabs.by_name["a"], slabs.by_name["b"]
    put(slabs, first, 0, 1)
    put(slabs, second, 2)
    slabs.use(hashed(2))
    first.used_ns[7] = np.iinfo(np.int64).max
    assert slabs.own_by_age() == [first, second]
    slabs.use(hashed(0))
    assert slabs.own_by_age() == [second, first]
    first.used_ns[7] = 0


def test_reads_wait_for_no_plan_of_evictions(slabs: Slabs, monkeypatch) -> None:
    first, real = slabs.by_name["a"], allocator_module._make_plan
    put(slabs, first, 0, 1, 2)

    def make_plan(*arguments):
        found = slabs.contains(hashed(0, 3))  # would wait forever for a lock that is held
        slabs.drop([first], "removed")
        return found, real(*arguments)

    plans = []
    monkeypatch.setattr(
        allocator_module, "_make_plan", lambda *arguments: plans.append(make_plan(*arguments)) or plans[-1][1]
    )
    assert slabs.evict(2, 1 << 62) == [], "of a slab that was dropped meanwhile"
    assert [found for found, _ in plans] == [[True, False]]
    slabs.check_invariants()


@pytest.mark.parametrize("meanwhile", ["a block is discarded", "its slab is dropped"])
def test_what_is_chosen_for_eviction_is_gone_before_others_have_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """A plan ends in the middle of a call, and the next plan is made without the lock."""
    directory, slabs = os.open(tmp_path, os.O_RDONLY), Slabs(str(tmp_path), LAYOUT)
    slabs.register(SlabFile.create("a", LAYOUT, 6400, directory, Access()), is_own=True)
    (slab,) = slabs.snapshot()
    keys = [LAYOUT.hashed(key) for key in keys_of(*range(6400))]
    runs = slabs.take([NewBlock(key, memoryview(b""), 1 + at + at % 2 * 9000) for at, key in enumerate(keys)])
    for run in runs:
        run.entries = b"".join(LAYOUT.entry(block.key, bytes(16), 1) for block in run.blocks)
        run.good = [Run(0, run.slots.count)]
    slabs.record(runs)
    make_plan, is_chosen = allocator_module._make_plan, slab.used_ns == BUSY

    def plan(*args):
        assert slab.used_ns is not None
        chosen = np.flatnonzero((slab.used_ns == BUSY) > is_chosen).tolist()
        is_chosen[chosen] = True
        if chosen and meanwhile == "a block is discarded":
            slabs.release(slabs.discard([keys[at] for at in chosen]))
        elif chosen:
            slabs.drop([slab], "removed")
        return make_plan(*args)

    monkeypatch.setattr(allocator_module, "_make_plan", plan)
    for _ in range(4):
        slabs.release(slabs.evict(1, 1 << 40))
        slabs.check_invariants()
    assert is_chosen.any()
    slabs.close()
    os.close(directory)


def test_the_lock_is_let_go_between_blocks(slabs: Slabs) -> None:
    lock, holds = slabs._lock, list[int]()
    find, find_all = slabs._index.find, slabs._index.find_all

    class Watched:
        def __enter__(self) -> None:
            lock.acquire()
            holds.append(0)

        def __exit__(self, *_: object) -> None:
            lock.release()

    def asked(call, key):
        holds[-1] += 1
        return call(key)

    slabs._lock = Watched()  # type: ignore[assignment]
    slabs._index.find = lambda key: asked(find, key)  # type: ignore[method-assign]
    slabs._index.find_all = lambda key: asked(find_all, key)  # type: ignore[method-assign]
    many = [LAYOUT.hashed(key) for key in keys_of(*range(1000))]
    for call in (slabs.touch, slabs.contains, slabs.discard):
        call(many)
        assert sum(holds) == 1000
        assert max(holds) <= 64
        holds.clear()
    slabs._lock = lock


def test_to_list_keys_takes_no_longer_for_slots_that_are_empty(slabs: Slabs, tmp_path: Path) -> None:
    """A probe lists some keys on the scheduler's thread, and a large disk may contain few blocks."""
    directory = os.open(tmp_path, os.O_RDONLY)
    slabs.register(SlabFile.create("large", LAYOUT, 64_000, directory, Access()), is_own=True)
    os.close(directory)
    put(slabs, slabs.by_name["large"], 1, 2)
    lock, num_holds = slabs._lock, 0

    class Watched:
        def __enter__(self) -> None:
            nonlocal num_holds
            num_holds += 1
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    slabs._lock = Watched()  # type: ignore[assignment]
    assert sorted(slabs.resident) == sorted(KEYS[1:3])
    assert num_holds <= 3
    slabs._lock = lock


def test_a_key_that_is_given_twice_is_discarded_once(slabs: Slabs) -> None:
    put(slabs, slabs.by_name["a"], 0, 1)
    slabs.release(slabs.discard(hashed(1, 0, 1)))
    assert slabs.num_free == 16
    slabs.check_invariants()


def test_times_of_use_of_a_slab_that_was_dropped_meanwhile_stay(slabs: Slabs) -> None:
    """A writer whose table failed drops the slab while the store's own thread writes times of use."""
    slab = slabs.by_name["a"]
    (pinned,) = slabs.pin_used([slab])
    slabs.lose(slab, OSError("bad"))
    on_disk = pinned.file.read_uses()
    assert (slabs.merge_uses(pinned, on_disk) == on_disk).all()
    slabs.unpin([pinned])


def test_a_clock_beyond_the_times_that_a_table_has_is_written_down_as_the_last_of_them(slabs: Slabs) -> None:
    slab = slabs.by_name["a"]
    put(slabs, slab, 1)
    assert slabs.give(slab)
    slabs._last_stamp_ns = 5 * 10**18
    slabs.use(hashed(1))
    assert slabs.merge_uses(slab, slab.file.read_uses()).max() == 0xFFFF_FFFF


def test_entries_that_were_read_before_their_slab_became_ours_do_not_count(slabs: Slabs) -> None:
    """A reader that found a bad block of a neighbour reads its entry while the store's thread adopts the slab."""
    slab = slabs.by_name["a"]
    put(slabs, slab, 1)
    entries = bytes(slab.entries)
    assert slabs.give(slab)
    slabs.adopt(slab, entries, slab.file.read_uses())
    slabs.release(slabs.discard(hashed(1)))
    slabs.correct(slab, 0, bytes(64), entries[:64])
    assert slabs.contains(hashed(1)) == [False]
    slabs.check_invariants()


def test_nor_do_those_that_were_read_before_it_was_read_to_become_ours(
    slabs: Slabs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slot would be free and contain a block.

    Removing that block would free the slot again, and two writes would get it.
    """
    slab = slabs.by_name["a"]
    put(slabs, slab, 1)
    first, times_of = bytes(slab.entries[:64]), slabs._times_of
    second = LAYOUT.entry(hashed(2)[0], bytes(16), 1)
    assert slabs.give(slab)

    def late(*arguments: Any) -> Any:
        """A reader saw the first block become the second, and then waited. The owner emptied the slot, and died."""
        times = times_of(*arguments)
        slabs.correct(slab, 0, first, second)
        return times

    monkeypatch.setattr(slabs, "_times_of", late)
    slabs.adopt(slab, bytes(len(slab.entries)), slab.file.read_uses())
    assert slabs.contains(hashed(1, 2)) == [False, False]
    slabs.check_invariants()


def test_one_slot_in_64_may_be_left_out_of_use_and_one_of_any_slab(slabs: Slabs, tmp_path: Path) -> None:
    small, directory = slabs.by_name["a"], os.open(tmp_path, os.O_RDONLY)
    slabs.register(SlabFile.create("large", LAYOUT, 640, directory, Access()), is_own=True)
    os.close(directory)
    large = slabs.by_name["large"]
    assert not slabs._may_leave_out(large, 1, any_good=False), "then the disk is bad, not a slot"
    assert not slabs._may_leave_out(large, 11, any_good=True)
    assert [slabs._may_leave_out(large, count, any_good=True) for count in (6, 5, 4, 1)] == [True, False, True, False]
    assert [slabs._may_leave_out(small, count, any_good=True) for count in (2, 1, 1)] == [False, True, False]
    assert (large.num_bad, small.num_bad) == (10, 1)


def test_a_block_is_gone_with_its_last_copy(slabs: Slabs) -> None:
    first, second = slabs.by_name["a"], slabs.by_name["b"]
    put(slabs, first, 1, 2)
    put(slabs, second, 1)
    slabs.lose(first, OSError("bad"))
    assert slabs.take_lost() == {KEYS[2]: "corrupt"}
    assert slabs.quarantined == {"a"}
    slabs.lose(first, OSError("bad"))
    slabs.lose(second, OSError("bad"))
    assert slabs.take_lost() == {KEYS[1]: "corrupt"}
    assert len(slabs) == 0


def test_slabs_are_dropped_together_and_each_once(slabs: Slabs) -> None:
    first, second = slabs.by_name["a"], slabs.by_name["b"]
    put(slabs, first, 1)
    put(slabs, second, 1, 2)
    assert slabs.drop([first, second], "removed") == [first, second]
    assert slabs.drop([first, second], "removed") == []
    assert slabs.take_lost() == dict.fromkeys(KEYS[1:3], "removed")
    assert (len(slabs), slabs.num_slots, slabs.open, slabs.by_name) == (0, 0, {}, {})


def test_a_slab_that_fails_is_quarantined_before_a_poll_can_open_it_again(slabs: Slabs, monkeypatch) -> None:
    drop = slabs._drop
    monkeypatch.setattr(slabs, "_drop", lambda dropped: (drop(dropped), seen.append(set(slabs.quarantined))))
    seen = list[set[str]]()
    slabs.lose(slabs.by_name["a"], OSError("bad"))
    assert seen == [{"a"}]


def test_blocks_of_a_store_that_closes_are_not_gone(slabs: Slabs) -> None:
    put(slabs, slabs.by_name["a"], 1)
    slabs.close()
    assert slabs.take_lost() == {}
    assert slabs.open == {}
