# SPDX-License-Identifier: Apache-2.0
"""Test the presence index alone: its answers, its questions to the store, its limits and its events.

The last tests are about stores that know their own keys.
"""

from __future__ import annotations

import gc
import itertools
import random

import pytest

from kvoffload.base import OffloadKey
from kvoffload.testing import ManualClock
from kvoffload.testing.keys import keys
from kvoffload.tiering.presence import PresenceIndex

A, B, C = keys(1, 2, 3)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def index(clock: ManualClock) -> PresenceIndex:
    return PresenceIndex("test", 100, enable_events=True, absent_ttl_s=1, clock=clock)


def ask(index: PresenceIndex, *names: OffloadKey, is_complete: bool = False) -> list[bool | None]:
    return [index.lookup_prefix([key], is_complete)[0] for key in names]


def events(index: PresenceIndex) -> list[tuple[list[OffloadKey], bool]]:
    return [(list(event.keys), event.removed) for event in index.take_events()]


def test_an_answer_is_remembered(index: PresenceIndex) -> None:
    assert ask(index, A, B) == [None] * 2
    index.record_answer(A, is_present=True)
    index.record_answer(B, is_present=False)
    assert ask(index, A, B) == [True, False]


def test_an_absent_key_is_asked_for_again_in_the_background(index: PresenceIndex, clock: ManualClock) -> None:
    index.record_answer(A, is_present=False)
    assert ask(index, A) == [False]
    assert index.take_to_refresh() == []
    for _ in range(2):
        clock.advance(1)
        assert ask(index, A, A) == [False, False]
        assert index.take_to_refresh() == [A]
    index.record_answer(A, is_present=True)
    assert ask(index, A) == [True]


def test_the_oldest_absent_key_is_forgotten_first(clock: ManualClock) -> None:
    index = PresenceIndex("test", 100, max_absent=2, clock=clock)
    for key in (A, B, C):
        index.record_answer(key, is_present=False)
    assert ask(index, C, B, A) == [False, False, None]


def test_a_complete_index_knows_what_is_absent(index: PresenceIndex) -> None:
    index.add([A])
    assert ask(index, A, B, is_complete=True) == [True, False]


def test_beyond_its_bound_the_oldest_key_is_unknown_again(clock: ManualClock) -> None:
    index = PresenceIndex("test", 2, clock=clock)
    index.add([A, B, C])
    assert len(index) == 2
    assert ask(index, B, C, A, is_complete=True) == [True, True, None]


def test_what_is_forgotten_is_announced_as_removed(clock: ManualClock) -> None:
    index, known = PresenceIndex("test", 100, enable_events=True, clock=clock), set[OffloadKey]()
    chance = random.Random(7)
    for _ in range(300):
        index.add(chance.sample(keys(*range(400)), chance.randrange(1, 150)))
        index.remove(keys(*range(chance.randrange(5))))
        for names, removed in events(index):
            assert known.issuperset(names) if removed else known.isdisjoint(names)
            known = known.difference(names) if removed else known.union(names)
        assert known == {name for name in keys(*range(400)) if name in index}


def test_without_events_none_pile_up(clock: ManualClock) -> None:
    remembered = PresenceIndex("test", 100, clock=clock)
    exact = PresenceIndex("test", 100, resident={A, B}, clock=clock)
    for index in (remembered, exact):
        index.add([A, B])
        index.remove([B])
        assert A in index
        assert events(index) == []
        assert not index.lost_events


def test_a_full_index_keeps_taking_keys_and_forgets_the_oldest(clock: ManualClock) -> None:
    index = PresenceIndex("test", 1_000, clock=clock)
    for number in range(0, 5_000, 10):
        index.add(keys(*range(number, number + 10)))
        assert len(index) <= 1_000
    assert len(index) >= 900
    assert ask(index, *keys(*range(4_200, 5_000))) == [True] * 800


def test_the_garbage_collector_passes_over_present_keys(clock: ManualClock) -> None:
    index, names = PresenceIndex("test", 1_000, clock=clock), [bytes([number]) * 40 for number in range(250)]
    index.add([OffloadKey(name) for name in names])
    gc.collect()
    assert not [each for each in gc.get_referrers(names[7]) if each is not names]


def test_an_answer_that_a_store_overtook_does_not_count(index: PresenceIndex) -> None:
    index.add([A])
    index.record_answer(A, is_present=False)
    assert ask(index, A) == [True]


def test_a_stored_block_ends_an_absence(index: PresenceIndex) -> None:
    index.record_answer(A, is_present=False)
    index.add([A])
    index.remove([A])
    assert ask(index, A) == [None], "unknown, not absent"


def test_a_stored_block_is_present_unless_it_failed_or_was_evicted_meanwhile(index: PresenceIndex) -> None:
    index.remove([A])
    index.begin_store([A, B, C])
    index.remove([A])
    index.end_store([A, B, C], [True, True, False])
    assert events(index) == [([B], False)]
    index.begin_store([A])
    index.end_store([A], [True])
    assert events(index) == [([A], False)]


def test_each_change_is_announced_once(index: PresenceIndex) -> None:
    index.add([A, B, A])
    index.add([B, C])
    index.remove([A, A, C])
    index.remove([A])
    assert events(index) == [([A, B], False), ([C], False), ([A, C], True)]
    assert events(index) == []


def test_what_a_scan_did_not_find_is_forgotten_and_nothing_that_came_meanwhile(index: PresenceIndex) -> None:
    index.add([A, B])
    index.begin_scan()
    index.forget_unseen()
    assert len(index) == 2, "the scan has not ended"
    index.add([B, C])
    index.end_scan()
    index.forget_unseen()
    assert [key in index for key in (A, B, C)] == [False, True, True]
    assert events(index) == [([A, B], False), ([C], False), ([A], True)]
    index.forget_unseen()
    assert len(index) == 2


def test_what_a_scan_did_not_find_but_a_job_writes_stays(index: PresenceIndex) -> None:
    index.add([A, B])
    index.begin_scan()
    index.end_scan()
    index.begin_store([A])
    assert index.forget_unseen() == [B]
    assert index.forget_unseen() == []
    index.end_store([A], [True])
    assert [key in index for key in (A, B)] == [True, False]


def test_many_keys_are_forgotten_in_small_parts(clock: ManualClock) -> None:
    index = PresenceIndex("test", 100_000, clock=clock)
    index.add(keys(*range(20_000)))
    index.begin_scan()
    index.end_scan()
    sizes = [len(index)]
    while sizes[-1]:
        index.forget_unseen()
        sizes.append(len(index))
    assert max(before - after for before, after in itertools.pairwise(sizes)) <= 256


def test_keys_of_a_call_that_hangs_are_absent_until_it_returns(index: PresenceIndex) -> None:
    index.add([A])
    index.begin_hang([A, B])
    assert ask(index, A, B) == [False, False]
    index.end_hang([A, B])
    assert ask(index, A, B) == [True, None]


def test_a_sample_leaves_out_what_it_is_told_to(index: PresenceIndex) -> None:
    index.add([A, B, C])
    assert set(index.sample(3, 0, [B])) == {A, C}
    assert len(index.sample(1, 5, [])) == 1
    assert index.sample(3, 0, [A, B, C]) == []


@pytest.fixture
def resident() -> set[OffloadKey]:
    """Return the set of the store's keys."""
    return {A, B}


@pytest.fixture
def exact(resident: set[OffloadKey], clock: ManualClock) -> PresenceIndex:
    return PresenceIndex("test", 1, resident=resident, enable_events=True, clock=clock)


def test_an_exact_index_answers_what_the_store_has_now(exact: PresenceIndex, resident: set[OffloadKey]) -> None:
    assert ask(exact, A, B, C) == [True, True, False]
    resident.remove(A)
    resident.add(C)
    assert ask(exact, A, B, C) == [False, True, True]
    assert len(exact) == 2
    assert not exact.to_refresh
    exact.remove([B])
    assert ask(exact, B) == [True], "the store has it, whatever was reported"
    exact.begin_hang([B, C])
    assert ask(exact, B, C) == [False, False]
    exact.end_hang([B, C])
    assert ask(exact, B, C) == [True, True]
    assert exact.sample(3, 5, [B]) == [C]


def test_an_exact_index_announces_what_is_true(exact: PresenceIndex) -> None:
    exact.begin_store([A, B, C])
    exact.remove([A])  # evicted, and written again before anybody heard of it
    exact.end_store([A, B, C], [True, True, True])  # C was evicted meanwhile
    exact.remove([C])
    assert events(exact) == [([A, B], False), ([C], True)]


def test_events_of_an_exact_index_that_nobody_takes_end(clock: ManualClock) -> None:
    resident = set(keys(*range(70_000)))
    exact = PresenceIndex("test", 1, resident=resident, enable_events=True, clock=clock)
    exact.add(list(resident))
    assert exact.lost_events
    exact.add([*resident][:7])
    (lost,) = exact.take_events()
    assert lost.clears, "what was announced before counts no longer"
    assert lost.keys == []
    assert not exact.lost_events
    exact.add([*resident][:5])
    (added,) = exact.take_events()
    assert (len(added.keys), added.clears) == (5, False)


def test_a_removal_after_a_repeated_announcement_is_not_folded_away(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.tiering.presence._EVENT_SHARE", 1)
    resident = set(keys(*range(70_100)))
    exact = PresenceIndex("test", 1, resident=resident, enable_events=True, clock=clock)
    first, *others = sorted(resident)
    exact.add([first])
    assert events(exact) == [([first], False)]
    exact.add([first])  # written again
    resident.remove(first)
    exact.remove([first])
    exact.add(others[:70_000])
    assert ([first], True) in events(exact)
