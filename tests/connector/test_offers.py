# SPDX-License-Identifier: Apache-2.0
"""The rule that portions follow, on the real manager and plain keys."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from tests.connector.rig import BT, FULL, SpyManager, key

from kvoffload.base import OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.connector.groups import geometry_of
from kvoffload.connector.offers import Turnover, offer_in_portions, plan_offer, select_source
from kvoffload.connector.requests import UNLIMITED, Keys

CONTEXT = ReqContext("r")
CONFIG = OffloadingConfig(cpu_bytes_to_use=1)


@dataclass
class Piece:
    keys: list[OffloadKey]
    largest: int
    is_last: bool


@dataclass
class Offering:
    """One request's blocks, offered from ``next_block`` on."""

    manager: SpyManager
    blocks: list[OffloadKey]
    max_blocks: int = UNLIMITED
    touched_at: int = 0
    next_block: int = 0
    in_flight: list[OffloadKey] = field(default_factory=list)

    def plan(self, max_blocks: int) -> Piece | None:
        keys = self.blocks[self.next_block : self.next_block + max_blocks]
        return Piece(keys, len(keys), self.next_block + len(keys) == len(self.blocks)) if keys else None

    def accept(self, portion: Piece, output: PrepareStoreOutput | None) -> bool:
        assert output is not None
        self.next_block += portion.largest
        self.in_flight += output.keys_to_store
        return not set(self.blocks).isdisjoint(output.evicted_keys)

    def offer(self) -> bool:
        return offer_in_portions(self, self.manager, CONTEXT, self.plan, self.accept)

    def complete(self) -> None:
        self.manager.complete_store(self.in_flight, CONTEXT)
        self.in_flight = []

    @property
    def sizes(self) -> list[int]:
        return [len(keys) for keys in self.manager.offered]


def offering(num_slots: int, num_blocks: int) -> Offering:
    return Offering(SpyManager(num_slots), [key(n) for n in range(num_blocks)])


def test_all_blocks_are_one_portion_where_there_is_room() -> None:
    request = offering(num_slots=64, num_blocks=50)
    assert request.offer()
    assert request.sizes == [50]


def test_a_refused_portion_is_cut_to_a_quarter_and_an_accepted_one_lets_the_next_grow() -> None:
    request = offering(num_slots=20, num_blocks=64)
    assert not request.offer()
    assert request.sizes == [64, 16, 48], "one refused after an accepted one waits"
    assert request.next_block == 16
    assert request.max_blocks == 12


def test_a_full_tier_costs_one_call_of_one_block() -> None:
    request = offering(num_slots=4, num_blocks=64)
    other = [key(n, stem="other") for n in range(4)]
    assert request.manager.prepare_store(other, CONTEXT) is not None  # in flight: nothing can be evicted
    request.manager.offered.clear()
    assert not request.offer()
    assert request.sizes == [64, 16, 4, 1]
    request.manager.offered.clear()
    assert not request.offer()
    assert request.sizes == [1]


@pytest.mark.parametrize("num_blocks", [9, 100])
def test_a_request_that_evicts_its_own_blocks_offers_no_more(num_blocks: int) -> None:
    request = offering(num_slots=8, num_blocks=num_blocks)
    while not request.offer():
        request.complete()
    assert request.max_blocks == 0
    offered = len(request.sizes)
    assert request.offer()
    assert len(request.sizes) == offered


def test_a_portion_without_keys_is_passed_over_without_asking_the_manager() -> None:
    request = offering(num_slots=8, num_blocks=0)
    portions = iter([Piece([], 3, False), None])

    def accept(portion: Piece, output: PrepareStoreOutput | None) -> bool:
        assert (portion.largest, output) == (3, None)
        return False

    assert offer_in_portions(request, request.manager, CONTEXT, lambda _: next(portions), accept)
    assert request.sizes == []
    assert request.max_blocks == UNLIMITED


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
    assert select_source(geometry, offer, offer.grouped) == (everything, range(6))
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


@dataclass
class Touched:
    max_blocks: int = UNLIMITED
    touched_at: int = 0


def test_a_touch_is_due_once_half_of_the_cache_was_stored() -> None:
    turnover, state, other = Turnover(64), Touched(), Touched()
    turnover.count(31)
    assert not turnover.is_due(state)
    turnover.count(1)
    assert turnover.is_due(state)
    turnover.touched(state, 4)
    assert not turnover.is_due(state)
    assert turnover.is_due(other), "each request counts from its own last touch"
    turnover.count(32)
    assert turnover.is_due(state)


def test_what_was_touched_is_paid_before_others_are_touched() -> None:
    turnover, state = Turnover(64), Touched()
    turnover.count(1000)
    turnover.touched(Touched(), Turnover.MOST_KEYS)
    assert not turnover.is_due(state)
    turnover.count(1)
    assert turnover.is_due(state)


def test_long_requests_that_are_due_together_take_turns() -> None:
    turnover = Turnover(32_000)  # a quarter of the requests' blocks
    states = [Touched() for _ in range(64)]
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
    turnover, state = Turnover(num_blocks), Touched()
    assert not turnover.is_due(state), "nothing was stored"
    turnover.count(1)
    assert turnover.is_due(state)
