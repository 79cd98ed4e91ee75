# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvoffload.base import OffloadingEvent, OffloadKey, PrepareStoreOutput, ReqContext, make_offload_key
from kvoffload.cpu import CPUOffloadingManager
from kvoffload.cpu.policies.arc import ARCCachePolicy
from kvoffload.errors import ConfigError
from kvoffload.metrics import METRICS, Kind
from kvoffload.testing import ManualClock

REQ = ReqContext("r")


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def slots(output: PrepareStoreOutput) -> list[int]:
    ids: list[int] = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
    return ids


def store(manager: CPUOffloadingManager, *numbers: int) -> PrepareStoreOutput:
    output = manager.prepare_store(keys(*numbers), REQ)
    assert output is not None
    manager.complete_store(output.keys_to_store, REQ)
    manager.check_invariants()
    return output


def looks(manager: CPUOffloadingManager, *numbers: int) -> list[bool | None]:
    return [manager.lookup(key(number), REQ) for number in numbers]


def folded(events: Iterable[OffloadingEvent]) -> set[OffloadKey]:
    resident: set[OffloadKey] = set()
    for event in events:
        assert event.medium == "CPU"
        for one in event.keys:
            if event.removed:
                resident.remove(one)
            else:
                assert one not in resident
                resident.add(one)
    return resident


@pytest.fixture(params=["lru", "arc"])
def policy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_block_is_in_flight_until_its_store_completes(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy)
    output = manager.prepare_store(keys(1, 2), REQ)
    assert output is not None
    assert (output.keys_to_store, slots(output), output.evicted_keys) == (keys(1, 2), [0, 1], [])
    assert looks(manager, 1, 2, 3) == [None, None, False]
    assert manager.prepare_store(keys(3), REQ) is None  # nothing idle: in flight is not evictable
    with pytest.raises(AssertionError, match="cannot be read"):
        manager.prepare_load(keys(1), REQ)
    manager.complete_store(keys(1, 2), REQ)
    assert looks(manager, 1, 2) == [True, True]
    assert manager.prepare_load(keys(2, 1), REQ).block_ids.tolist() == [1, 0]


def test_resident_and_in_flight_keys_are_filtered_and_never_evicted_by_their_own_call(policy: str) -> None:
    manager = CPUOffloadingManager(4, policy)
    store(manager, 1, 2)
    output = manager.prepare_store(keys(2, 3, 4, 5), REQ)
    assert output is not None
    assert output.keys_to_store == keys(3, 4, 5)
    assert slots(output) == [2, 3, 0]  # fresh ones first, then the freed one
    assert output.evicted_keys == keys(1)
    again = manager.prepare_store(keys(3, 4), REQ)
    assert again is not None
    assert (again.keys_to_store, slots(again), again.evicted_keys) == ([], [], [])


def test_without_room_nothing_changes(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy, enable_events=True)
    store(manager, 1, 2, 3)
    manager.prepare_load(keys(1), REQ)
    manager.take_events()
    assert manager.prepare_store(keys(4, 5, 6), REQ) is None
    assert manager.prepare_store(keys(1, 2, 3, 4, 5, 6, 7), REQ) is None
    assert manager.prepare_store(keys(2, 3, 4), REQ) is None  # 2 and 3 are idle, but of this call
    assert looks(manager, 1, 2, 3, 4) == [True, True, True, False]
    assert manager.take_events() == []
    assert manager.get_stats()[("primary_stores_refused",)] == 3
    manager.check_invariants()


def test_the_head_of_a_stored_batch_outlives_its_tail(policy: str) -> None:
    manager = CPUOffloadingManager(4, policy)
    store(manager, 1, 2, 3, 4)
    assert store(manager, 5).evicted_keys == keys(4)
    assert store(manager, 6).evicted_keys == keys(3)


def test_touch_spares_the_prefix_head_first(policy: str) -> None:
    manager = CPUOffloadingManager(4, policy)
    store(manager, 1, 2)
    store(manager, 3, 4)
    manager.touch(keys(1, 2, 3, 4, 9))
    assert store(manager, 5, 6).evicted_keys == keys(4, 3)


def test_a_failed_store_frees_its_slots_and_says_nothing(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy, enable_events=True)
    output = manager.prepare_store(keys(1, 2), REQ)
    assert output is not None
    manager.complete_store(keys(1, 2), REQ, success=False)
    assert looks(manager, 1, 2) == [False, False]
    assert manager.take_events() == []
    manager.check_invariants()
    assert slots(store(manager, 3, 4)) == [0, 1]
    manager.complete_store(keys(3), REQ, success=False)  # ready already: not this store's to lose
    assert looks(manager, 3) == [True]


def test_pins_count(policy: str) -> None:
    manager = CPUOffloadingManager(1, policy)
    store(manager, 1)
    manager.prepare_load(keys(1, 1), REQ)
    manager.prepare_load(keys(1), REQ)
    manager.complete_load(keys(1), REQ)
    manager.complete_load(keys(1), REQ)
    assert manager.prepare_store(keys(2), REQ) is None
    assert manager.get_stats()[("primary_blocks_pinned",)] == 1
    manager.complete_load(keys(1))
    manager.check_invariants()
    assert store(manager, 2).evicted_keys == keys(1)
    store(manager, 2)
    with pytest.raises(AssertionError, match="more often"):
        manager.complete_load(keys(2))


def test_a_load_that_cannot_be_pins_nothing(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy)
    store(manager, 1)
    with pytest.raises(AssertionError, match="absent"):
        manager.prepare_load(keys(1, 2), REQ)
    manager.check_invariants()
    assert store(manager, 3, 4).evicted_keys == keys(1)


def test_events_are_recorded_in_order_and_fold_to_the_resident_set(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy, enable_events=True)
    store(manager, 1, 2)
    output = manager.prepare_store(keys(3), REQ)
    assert output is not None
    events = manager.take_events()
    assert [(event.removed, event.keys) for event in events] == [(False, keys(1, 2)), (True, keys(2))]
    manager.complete_store(keys(3))
    manager.prepare_load(keys(3), REQ)
    events += manager.take_events()
    assert folded(events) == {*keys(1, 3)}
    manager.reset_cache()
    events += manager.take_events()
    assert folded(events) == set()
    assert manager.take_events() == []


def test_events_are_off_by_default() -> None:
    manager = CPUOffloadingManager(1)
    store(manager, 1)
    store(manager, 2)
    assert manager.take_events() == []


def test_duplicates_and_empty_calls(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy, enable_events=True)
    output = manager.prepare_store(keys(1, 2, 1), REQ)
    assert output is not None
    assert (output.keys_to_store, slots(output)) == (keys(1, 2), [0, 1])
    manager.complete_store(keys(1, 2, 1), REQ)
    assert [event.keys for event in manager.take_events()] == [keys(1, 2)]
    empty = manager.prepare_store([], REQ)
    assert empty is not None
    assert (empty.keys_to_store, slots(empty), empty.evicted_keys) == ([], [], [])
    manager.complete_store([], REQ)
    assert manager.prepare_load([], REQ).block_ids.tolist() == []
    manager.complete_load([], REQ)
    manager.touch([], REQ)
    assert manager.lookup_prefix([], REQ) == []
    manager.complete_store(keys(8), REQ)
    manager.complete_load(keys(8), REQ)
    manager.check_invariants()


def test_mistakes_are_one_sentence() -> None:
    for num_blocks in (0, -1):
        with pytest.raises(ConfigError, match="num_blocks must be at least 1"):
            CPUOffloadingManager(num_blocks)
    with pytest.raises(ValueError, match=r"Unknown cache policy: 'lur'\. Did you mean 'lru'"):
        CPUOffloadingManager(1, "lur")
    with pytest.raises(ConfigError, match="store_threshold"):
        CPUOffloadingManager(1, store_threshold=-1)
    with pytest.raises(ConfigError, match="max_tracker_size"):
        CPUOffloadingManager(1, max_tracker_size=0)


def test_lookup_prefix_stops_at_the_first_absent_block(policy: str) -> None:
    manager = CPUOffloadingManager(4, policy)
    store(manager, 1)
    manager.prepare_store(keys(2), REQ)
    store(manager, 4)
    assert manager.lookup_prefix(keys(1, 2, 3, 4), REQ) == [True, None, False]
    assert manager.lookup_prefix(keys(1, 2), REQ) == [True, None]


# ------------------------------------------------------------------------------------------------- reset


def test_reset_forgets_idle_blocks_at_once(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy)
    store(manager, 1, 2, 3)
    manager.reset_cache()
    assert looks(manager, 1, 2, 3) == [False, False, False]
    manager.check_invariants()
    assert slots(store(manager, 1, 2, 3)) == [0, 1, 2]


def test_a_store_that_a_reset_overtook_keeps_its_slot_and_publishes_nothing(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy, enable_events=True)
    manager.prepare_store(keys(1), REQ)
    manager.reset_cache()
    assert looks(manager, 1) == [False]
    assert manager.prepare_store(keys(2, 3), REQ) is None
    assert slots(store(manager, 2)) == [1]
    manager.complete_store(keys(1))
    assert looks(manager, 1) == [False]
    manager.check_invariants()
    assert slots(store(manager, 3)) == [0]
    assert folded(manager.take_events()) == {*keys(2, 3)}


def test_a_load_that_a_reset_overtook_keeps_its_slot(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy)
    store(manager, 1)
    manager.prepare_load(keys(1), REQ)
    manager.prepare_load(keys(1), REQ)
    manager.reset_cache()
    manager.complete_load(keys(1))
    assert manager.prepare_store(keys(2, 3), REQ) is None
    manager.complete_load(keys(1))
    manager.check_invariants()
    assert store(manager, 2, 3).evicted_keys == []


@pytest.mark.parametrize("success", [True, False])
def test_a_key_is_stored_again_once_its_forgotten_store_has_ended(policy: str, success: bool) -> None:
    manager = CPUOffloadingManager(3, policy)
    manager.prepare_store(keys(1), REQ)
    manager.reset_cache()
    assert manager.prepare_store(keys(2, 1), REQ) is None
    assert manager.get_stats()[("primary_blocks_used",)] == 1, "nothing was changed"
    manager.complete_store(keys(1), REQ, success=success)
    assert looks(manager, 1) == [False]
    assert slots(store(manager, 2, 1)) == [1, 2]
    manager.check_invariants()


def test_a_key_is_stored_again_once_its_last_forgotten_load_has_ended(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy)
    store(manager, 1)
    manager.prepare_load(keys(1, 1), REQ)
    manager.reset_cache()
    for _ in range(2):
        assert manager.prepare_store(keys(1), REQ) is None
        manager.complete_load(keys(1))
        manager.check_invariants()
    assert slots(store(manager, 1, 2)) == [1, 0]


def test_two_resets_in_a_row(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy)
    for slot in range(3):
        output = manager.prepare_store(keys(slot), REQ)
        assert output is not None
        assert slots(output) == [slot]
        manager.reset_cache()
        manager.check_invariants()
    for slot in range(3):
        assert manager.prepare_store(keys(*range(3, 4 + slot)), REQ) is None
        manager.complete_store(keys(slot))
        manager.check_invariants()
    assert store(manager, 2, 3, 4).evicted_keys == []


def test_stats() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(2, clock=clock)
    store(manager, 1, 2)
    clock.advance(20)
    manager.prepare_store(keys(3), REQ)
    clock.advance(100)
    manager.prepare_load(keys(1), REQ)
    stats = manager.get_stats()
    histograms = {sample: value for sample, value in stats.items() if METRICS[sample[0]].kind is Kind.HISTOGRAM}
    assert {sample: value for sample, value in stats.items() if sample not in histograms} == {
        ("primary_blocks",): 2,
        ("primary_blocks_used",): 2,
        ("primary_blocks_pinned",): 2,
        ("primary_blocks_being_read",): 1,
        ("primary_blocks_being_written",): 1,
        ("primary_blocks_stored",): 2,
        ("primary_blocks_evicted",): 1,
        ("primary_stores_refused",): 0,
        ("reuse_filtered_blocks",): 0,
    }
    assert {sample: value for sample, value in histograms.items() if "sum" in sample} == {
        ("primary_allocation_blocks", "sum", "1.0"): 1,
        ("primary_allocation_blocks", "sum", "4.0"): 2,
        ("primary_eviction_age_seconds", "sum", "60.0"): 20,
        ("primary_reuse_age_seconds", "sum", "300.0"): 120,
    }


@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
def test_a_request_stored_in_portions_loses_its_tail_first_once_it_touched_its_prefix(policy: str) -> None:
    manager = CPUOffloadingManager(6, policy)
    request = ReqContext("r")
    manager.on_new_request(request)
    for portion in (keys(1, 2), keys(3, 4), keys(5, 6)):
        output = manager.prepare_store(portion, request)
        assert output is not None
        manager.complete_store(portion, request)
    manager.touch(keys(1, 2, 3, 4, 5, 6), request)
    manager.on_request_finished(request)
    output = manager.prepare_store(keys(7, 8, 9), ReqContext("other"))
    assert output is not None
    assert output.evicted_keys == keys(6, 5, 4)
    manager.check_invariants()


def test_touches_by_one_announced_request_are_one_use_and_by_another_a_second() -> None:
    manager = CPUOffloadingManager(4, "arc")
    first, second = ReqContext("1"), ReqContext("2")
    for request in (first, second):
        manager.on_new_request(request)
    manager.prepare_store(keys(1, 2), first)
    manager.complete_store(keys(1, 2), first)
    manager.touch(keys(1, 2), first)
    policy = manager.slots.policy
    assert isinstance(policy, ARCCachePolicy)
    assert (len(policy.recent), len(policy.frequent)) == (2, 0)
    manager.touch(keys(1, 2), second)
    manager.touch(keys(1, 2), second)
    assert (len(policy.recent), len(policy.frequent)) == (0, 2)
    for request in (first, second):
        manager.on_request_finished(request)
    assert not manager._used


def test_what_is_remembered_of_a_long_request_is_bounded_by_the_tier() -> None:
    manager, request = CPUOffloadingManager(600), ReqContext("long")
    manager.on_new_request(request)
    for first in range(0, 6_000, 100):
        output = manager.prepare_store(keys(*range(first, first + 100)), request)
        assert output is not None
        manager.complete_store(output.keys_to_store, request)
        manager.touch(keys(*range(max(0, first - 300), first + 100)), request)
        manager.check_invariants()
        assert len(manager._used["long"]) <= 1200
    assert manager._used["long"].issuperset(keys(*range(5_600, 6_000))), "what is here is still known"
    manager.on_request_finished(request)
    assert manager._used == {}


def test_a_block_whose_store_never_ends_is_a_miss_after_the_time_limit() -> None:
    """Later requests with that prefix must not wait for it forever."""
    clock = ManualClock()
    manager = CPUOffloadingManager(4, max_wait_s=5.0, clock=clock)
    context = ReqContext("r")
    assert manager.prepare_store(keys(1, 2, 3), context) is not None
    manager.complete_store(keys(1), context)
    clock.advance(4.9)
    assert manager.lookup_prefix(keys(1, 2, 3), context) == [True, None, None]
    clock.advance(0.2)
    assert manager.lookup_prefix(keys(1, 2, 3), context) == [True, False]
    assert manager.lookup(key(2), context) is False
    manager.complete_store(keys(2, 3), context)
    assert manager.lookup_prefix(keys(1, 2, 3), context) == [True, True, True]
