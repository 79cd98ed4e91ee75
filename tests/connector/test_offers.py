# SPDX-License-Identifier: Apache-2.0
"""The rule that portions follow, on the real manager."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.connector.rig import BT, FULL, Request, Rig, key

from kvoffload.base import OffloadKey
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.connector.engine import NO_BLOCK
from kvoffload.connector.groups import geometry_of
from kvoffload.connector.messages import TransferJob
from kvoffload.connector.offers import Turnover, plan_offer, select_source
from kvoffload.connector.requests import UNLIMITED, Keys

CONFIG = OffloadingConfig(cpu_bytes_to_use=1)


def computed(
    num_slots: int, num_blocks: int, table: Sequence[int] | None = None
) -> tuple[Rig, Request, list[TransferJob]]:
    """One request whose blocks are all computed in one step. Returns its first stores."""
    rig, request = Rig(num_blocks=num_slots), Request("r", num_blocks * BT)
    return rig, request, [*rig.admit(request, table or range(num_blocks)).stores]


def again(rig: Rig, request: Request) -> list[TransferJob]:
    """A step without tokens, in which the blocks that found no room are offered again."""
    rig.manager.offered.clear()
    return [*rig.step().stores]


def sizes(rig: Rig) -> list[int]:
    return [len(keys) for keys in rig.manager.offered]


def test_all_blocks_are_one_portion_where_there_is_room() -> None:
    rig, _, stores = computed(num_slots=64, num_blocks=50)
    assert sizes(rig) == [50]
    assert len(stores) == 1


def test_a_refused_portion_is_cut_to_a_quarter_and_an_accepted_one_lets_the_next_grow() -> None:
    rig, request, stores = computed(num_slots=20, num_blocks=64)
    assert sizes(rig) == [64, 16, 48], "one refused after an accepted one waits"
    rig.end(*stores)
    stores = again(rig, request)
    assert sizes(rig)[0] == 12
    assert rig.manager.offered[0][0] == key(16)


def test_a_full_tier_costs_one_call_of_one_block() -> None:
    rig = Rig(num_blocks=4)
    rig.admit(Request("other", 4 * BT, "other"), range(4))  # in flight: nothing can be evicted
    rig.manager.offered.clear()
    request = Request("r", 64 * BT)
    rig.admit(request, range(4, 68))
    assert sizes(rig) == [64, 16, 4, 1]
    again(rig, request)
    assert sizes(rig) == [1]


@pytest.mark.parametrize("num_blocks", [9, 100])
def test_a_request_that_evicts_its_own_blocks_offers_no_more(num_blocks: int) -> None:
    rig, request, stores = computed(num_slots=8, num_blocks=num_blocks)
    for _ in range(100):
        rig.end(*stores)
        stores = again(rig, request)
    assert not sizes(rig)
    request.num_tokens += BT
    rig.step(rig.run(request, [num_blocks], computed=num_blocks * BT, new=False))
    assert not sizes(rig)


def test_blocks_without_bytes_are_passed_over_without_asking_the_manager() -> None:
    rig, request, _ = computed(num_slots=8, num_blocks=3, table=[NO_BLOCK] * 3)
    assert sizes(rig) == []
    request.num_tokens += BT
    rig.step(rig.run(request, [7], computed=3 * BT, new=False))
    assert rig.manager.offered == [[key(3)]]


# ----------------------------------------------------------------------------------------- the sources of copies


def test_the_source_of_some_offered_blocks_names_their_own_gpu_blocks() -> None:
    """Blocks consist of two GPU blocks, and states of one. The manager accepts any offered blocks, in order."""
    state_layout = KVGroupLayout(GroupKind.SINGLE_STATE, BT, 64)
    config = OffloadingConfig(cpu_bytes_to_use=1, block_size=2 * BT)
    geometry = geometry_of(EngineLayout((FULL, state_layout, FULL), BT, "rig"), config)
    groups = [
        Keys(geometry[0], [key(n) for n in range(3)], [10, 11, 12, 13, 14, 15], next_block=0),
        Keys(geometry[1], [key(n, 1) for n in range(6)], [], states={5: 90}),
        Keys(geometry[2], [key(n, 2) for n in range(3)], [20, 21, 22, 23, 24, 25], next_block=1),
    ]
    offer = plan_offer(groups, BT, 0, 6 * BT, UNLIMITED)
    assert offer is not None
    assert offer.grouped == [key(0), key(1), key(2), key(5, 1), key(1, 2), key(2, 2)]
    assert offer.keys == [key(0), key(1), key(1, 2), key(2), key(5, 1), key(2, 2)], "by position"
    assert (offer.next_blocks, offer.largest, offer.is_last) == ([3, 0, 3], 3, True)

    def source(*keys: OffloadKey) -> tuple[list[int], list[int], list[int]] | None:
        selected = select_source(geometry, offer, keys)
        if selected is None:
            return None
        own, order = selected
        assert [keys[at] for at in order] == [each for each in offer.grouped if each in keys]
        return own

    everything = [10, 11, 12, 13, 14, 15, 90, 22, 23, 24, 25], [6, 1, 4], [0, 5, 2]
    assert source(*offer.keys) == source(*offer.grouped) == everything
    assert source(key(1), key(2, 2)) == ([12, 13, 24, 25], [2, 0, 2], [2, 0, 4])
    assert source(key(0), key(2), key(5, 1)) == ([10, 11, 14, 15, 90], [4, 1, 0], [0, 5, 0])
    assert source(key(2), key(1)) == ([12, 13, 14, 15], [4, 0, 0], [2, 0, 0]), "whatever order the manager prefers"
    assert source(key(7)) is source(key(1), key(7)) is source(key(1), key(1)) is None


def test_of_several_states_of_a_step_the_first_is_offered_and_others_are_left() -> None:
    (geometry,) = geometry_of(EngineLayout((KVGroupLayout(GroupKind.SINGLE_STATE, BT, 64),), BT, "rig"), CONFIG)
    own = Keys(geometry, [key(n) for n in range(4)], states={3: 93, 1: 91, 0: 90, 5: 95}, next_block=1)
    for block in (1, 3):
        offer = plan_offer([own], BT, 0, 4 * BT, UNLIMITED)
        assert offer is not None
        assert (offer.blocks, offer.source.gpu_block_ids) == ([block], [90 + block])
        assert (offer.largest, offer.is_last) == (1, block == 3)
        del own.states[block]
    assert plan_offer([own], BT, 0, 4 * BT, UNLIMITED) is None


# ------------------------------------------------------------------------------------------------- turnover


def request_state() -> Any:
    return SimpleNamespace(touched_at=0)


def test_a_touch_is_due_once_half_of_the_cache_was_stored() -> None:
    turnover, state, other = Turnover(64), request_state(), request_state()
    turnover.count(31)
    assert not turnover.is_due(state)
    turnover.count(1)
    assert turnover.is_due(state)
    turnover.touched(state, 4)
    assert not turnover.is_due(state)
    assert turnover.is_due(other), "each request counts from its own last touch"
    turnover.count(32)
    assert turnover.is_due(state)


def test_what_was_touched_is_paid_before_others_are_request_state() -> None:
    turnover, state = Turnover(64), request_state()
    turnover.count(1000)
    turnover.touched(request_state(), Turnover.MOST_KEYS)
    assert not turnover.is_due(state)
    turnover.count(1)
    assert turnover.is_due(state)


def test_long_requests_that_are_due_together_take_turns() -> None:
    turnover = Turnover(32_000)  # a quarter of the requests' blocks
    states = [request_state() for _ in range(64)]
    turnover.count(16_000)
    touched_by_round = []
    while any(not state.touched_at for state in states):
        touched = 0
        for state in states:  # each stores a block in the same step
            turnover.count(1)
            if not state.touched_at and turnover.is_due(state):
                turnover.touched(state, 2000)
                touched += 1
        touched_by_round.append(touched)
    assert max(touched_by_round) <= 3
    assert len(touched_by_round) * 64 <= 16_000, "all had their turn before the first is due again"


@pytest.mark.parametrize("num_blocks", [0, 1, 6, 63])
def test_in_the_smallest_cache_each_store_is_followed_by_a_touch(num_blocks: int) -> None:
    turnover, state = Turnover(num_blocks), request_state()
    assert not turnover.is_due(state), "nothing was stored"
    turnover.count(1)
    assert turnover.is_due(state)
