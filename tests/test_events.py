# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.base import OffloadKey
from kvoffload.events import PendingEvents
from kvoffload.testing.keys import keys


def fold(resident: set[OffloadKey], pending: PendingEvents) -> None:
    """Apply all pending events to ``resident``, as a caller who takes them does."""
    for event in pending.take():
        assert event.medium == "CPU"
        assert len(set(event.keys)) == len(event.keys)
        if event.removed:
            assert resident.issuperset(event.keys), "left without having been there"
            resident.difference_update(event.keys)
        else:
            assert resident.isdisjoint(event.keys), "appeared twice"
            resident.update(event.keys)
    assert len(pending) == 0


def test_without_need_every_change_is_kept_in_order() -> None:
    pending = PendingEvents("CPU", min_keys=4)
    pending.add(keys(1, 2), removed=False)
    pending.add([], removed=True)
    pending.add(keys(1), removed=True)
    pending.add(keys(1), removed=False)
    assert [(event.keys, event.removed) for event in pending.take()] == [
        (keys(1, 2), False),
        (keys(1), True),
        (keys(1), False),
    ]
    assert pending.take() == []


def test_memory_is_bounded_by_what_the_medium_held_and_holds() -> None:
    """The medium has ten blocks, and nobody takes its events during thousands of changes."""
    pending, resident = PendingEvents("CPU", min_keys=16), set[OffloadKey]()
    pending.add(keys(*range(10)), removed=False)
    fold(resident, pending)
    most = 0
    for number in range(5_000):
        pending.add(keys(number), removed=True)
        pending.add(keys(number + 10), removed=False)
        most = max(most, len(pending))
    assert most <= 2 * (10 + 10) + 2
    fold(resident, pending)
    assert resident == set(keys(*range(5_000, 5_010)))


@given(st.lists(st.tuples(st.sets(st.integers(0, 7), min_size=1), st.booleans(), st.integers(0, 9)), max_size=60))
def test_a_taker_who_comes_at_any_time_folds_to_the_resident_set(steps: list[tuple[set[int], bool, int]]) -> None:
    """``steps``: (numbers, whether they leave, whether somebody takes: at 0)."""
    pending, resident, known = PendingEvents("CPU", min_keys=3), set[OffloadKey](), set[OffloadKey]()
    for numbers, removed, take in steps:
        changed = [key for key in keys(*sorted(numbers)) if (key in resident) == removed]
        pending.add(list(changed), removed=removed)
        resident = resident - set(changed) if removed else resident | set(changed)
        assert len(pending) <= 2 * 8 + 8, "twice what differs, at most 8 keys, and one more batch"
        if take == 0:
            fold(known, pending)
            assert known == resident
    fold(known, pending)
    assert known == resident
