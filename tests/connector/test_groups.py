# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of groups, and the hit search against an oracle that tries every length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizes import by_size

from kvoffload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.connector import NO_BLOCK
from kvoffload.connector import groups as search
from kvoffload.connector.groups import (
    GroupGeometry,
    by_position,
    geometry_of,
    hit_unit_tokens,
    possible_hit,
)
from kvoffload.errors import ConfigError

Answers = list[list[bool | None]]
Case = tuple[tuple[GroupGeometry, ...], Answers, int, int]
"""Groups, the tier's blocks, tokens on the device, and the largest number of tokens."""


def geometry(*groups: KVGroupLayout, factor: int = 1, hash_tokens: int = 1) -> tuple[GroupGeometry, ...]:
    base = min(group.block_tokens for group in groups)
    config = OffloadingConfig(cpu_bytes_to_use=1, block_size=base * factor)
    return geometry_of(EngineLayout(groups, hash_tokens, "test"), config)


def find_hit(*args: Any) -> int | None:
    """Return the hit, or ``None`` if an answer for it is missing."""
    hit, is_deferred = search.find_hit(*args)
    return None if is_deferred else hit


def full(tokens: int = 4, lookahead: int = 0) -> KVGroupLayout:
    return KVGroupLayout(GroupKind.FULL_ATTENTION, tokens, 1, lookahead_tokens=lookahead)


def sliding(window: int, tokens: int = 4, lookahead: int = 0) -> KVGroupLayout:
    return KVGroupLayout(GroupKind.SLIDING_WINDOW, tokens, 1, window, lookahead)


def chunk(size: int, tokens: int = 4) -> KVGroupLayout:
    return KVGroupLayout(GroupKind.LOCAL_CHUNK, tokens, 1, size)


def state(tokens: int = 4) -> KVGroupLayout:
    return KVGroupLayout(GroupKind.SINGLE_STATE, tokens, 1)


class Tier:
    """Answers from a table, as a manager would, and records the lookups."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.keys = [
            [make_offload_key(bytes([block]), group) for block in range(len(blocks))]
            for group, blocks in enumerate(answers)
        ]
        self.asked: list[tuple[int, int]] = []

    def ask(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        found: list[bool | None] = []
        for key in keys:
            group, (block,) = get_offload_group_idx(key), get_offload_block_hash(key)
            self.asked.append((group, block))
            found.append(self.answers[group][block])
            if found[-1] is False:
                break
        return found

    def ask_each(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        return [self.ask([key])[0] for key in keys]


def needed_tokens(group: GroupGeometry, computed: int, hit: int) -> list[int]:
    """Return the tokens whose KV a request with a hit of ``hit`` tokens needs, and the tokens from which this KV was
    computed.

    This works token by token, from the definition of the kinds.
    """
    ahead = list(range(hit, hit + group.lookahead_tokens))
    match group.kind:
        case GroupKind.FULL_ATTENTION:
            return [*range(computed, hit), *ahead]
        case GroupKind.SLIDING_WINDOW:
            assert group.window_tokens is not None
            # Token ``hit`` attends to itself and the window_tokens - 1 before it.
            return [token for token in range(computed, hit) if hit - token < group.window_tokens] + ahead
        case GroupKind.LOCAL_CHUNK:
            assert group.window_tokens is not None
            # Token ``hit`` attends to the tokens of its own chunk.
            return [
                token for token in range(computed, hit) if token // group.window_tokens == hit // group.window_tokens
            ]
        case GroupKind.SINGLE_STATE:
            return [hit - 1]


def boundary_ok(group: GroupGeometry, hit: int) -> bool:
    step = group.gpu_block_tokens if group.kind is GroupKind.FULL_ATTENTION else group.block_tokens
    return hit % step == 0


def by_trying_all(groups: tuple[GroupGeometry, ...], answers: Answers, computed: int, most: int) -> int | None:
    for hit in range(most, computed, -1):
        if not all(boundary_ok(group, hit) for group in groups):
            continue
        verdicts: list[bool | None] = []
        for group, blocks in zip(groups, answers, strict=True):
            needed = {token // group.block_tokens for token in needed_tokens(group, computed, hit)}
            verdicts += [blocks[block] if block < len(blocks) else False for block in needed]
        if False not in verdicts:
            return None if None in verdicts else hit
    return computed


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = st.one_of(
        st.tuples(st.sampled_from([2, 4, 6]), st.integers(0, 1)).map(lambda pair: full(*pair)),
        st.tuples(st.integers(1, 20), st.sampled_from([2, 4, 6]), st.integers(0, 1)).map(lambda row: sliding(*row)),
        st.tuples(st.integers(1, 20), st.sampled_from([2, 4, 6])).map(lambda pair: chunk(*pair)),
        st.sampled_from([2, 4]).map(state),
    )
    groups = geometry(*draw(st.lists(layout, min_size=1, max_size=5)), factor=draw(st.integers(1, 3)))
    tokens = draw(st.integers(1, 60))
    likely = st.sampled_from([True, True, True, True, False, None])
    answers = [
        draw(st.lists(likely, min_size=tokens // group.block_tokens, max_size=tokens // group.block_tokens))
        for group in groups
    ]
    device = math.lcm(*(group.gpu_block_tokens for group in groups))
    computed = draw(st.integers(0, (tokens - 1) // device)) * device
    return groups, answers, computed, tokens - 1


@settings(max_examples=by_size(quick=100, thorough=2000))
@given(cases())
def test_the_hit_is_the_longest_that_trying_all_finds(case: Case) -> None:
    groups, answers, computed, most = case
    tier = Tier(answers)
    hit = find_hit(groups, tier.keys, tier.ask, computed, most)
    assert hit == by_trying_all(groups, answers, computed, most)
    assert len(tier.asked) == len(set(tier.asked)), "a block was asked for twice"
    unit = hit_unit_tokens(groups)
    assert all(groups[group].is_reachable(block, unit) for group, block in tier.asked), "asked for what nobody stores"


@settings(max_examples=by_size(quick=100, thorough=2000))
@given(cases())
def test_a_search_that_knows_what_is_anywhere_asks_for_no_attention_behind_it(case: Case) -> None:
    """The test works as the scheduler side does: first with ``where``, then with lookups."""
    groups, answers, computed, most = case
    anywhere = Tier([[answer is not False for answer in blocks] for blocks in answers])
    possible = find_hit(groups, anywhere.keys, anywhere.ask, computed, most)
    assert possible == by_trying_all(groups, anywhere.answers, computed, most)
    assert possible is not None
    tier = Tier(answers)
    assert find_hit(groups, tier.keys, tier.ask, computed, possible) == by_trying_all(groups, answers, computed, most)
    for group, block in tier.asked:
        assert block in groups[group].blocks_to_find(computed, possible)


@settings(max_examples=by_size(quick=100, thorough=2000))
@given(cases())
def test_a_part_of_a_hit_ends_where_all_states_are(case: Case) -> None:
    groups, answers, computed, most = case
    anywhere = Tier([[answer is not False for answer in blocks] for blocks in answers])
    possible, ends = possible_hit(groups, anywhere.keys, anywhere.ask_each, computed, most)
    assert possible is not None
    states = [group for group in groups if group.kind is GroupKind.SINGLE_STATE]
    if possible == computed or not states:
        assert ends is None
        return
    useful = [
        hit
        for hit in range(computed + 1, possible + 1)
        if all(boundary_ok(group, hit) for group in groups)
        and all(anywhere.answers[group.index][hit // group.block_tokens - 1] for group in states)
    ]
    assert ends == {
        anywhere.keys[group.index][max(needed_tokens(group, computed, hit)) // group.block_tokens]
        for hit in useful
        for group in groups
        if group.kind is GroupKind.FULL_ATTENTION
    }


def test_a_deferred_block_does_not_stop_the_questions() -> None:
    tier = Tier([[True, None, None, True, None, False, True]])
    assert find_hit(geometry(full()), tier.keys, tier.ask, 0, 27) is None
    assert tier.asked == [(0, block) for block in range(6)]  # all that may start their journey, and not beyond the gap


def test_a_deferred_window_block_does_not_stop_the_questions() -> None:
    tier = Tier([[False, None, None, None]])
    assert find_hit(geometry(sliding(13)), tier.keys, tier.ask, 0, 16) is None
    assert set(tier.asked) == {(0, 1), (0, 2), (0, 3)}


def test_a_window_needs_its_last_blocks_only() -> None:
    tier = Tier([[False, False, True, True]])
    assert find_hit(geometry(sliding(8)), tier.keys, tier.ask, 0, 16) == 16
    assert tier.asked == [(0, 2), (0, 3)]


def test_a_state_needs_its_last_block_only() -> None:
    tier = Tier([[False, False, True, False]])
    assert find_hit(geometry(state()), tier.keys, tier.ask, 0, 16) == 12


def test_the_hit_is_the_minimum_over_all_groups() -> None:
    tier = Tier([[True, True, True, True], [True, True, False, True]])
    assert find_hit(geometry(full(), full()), tier.keys, tier.ask, 0, 16) == 8


def test_several_states_must_agree_on_one_boundary() -> None:
    tier = Tier([[True] * 6, [False, True, False, True, False, True], [True, True, True, True, True, False]])
    assert find_hit(geometry(full(), state(), state()), tier.keys, tier.ask, 0, 24) == 16


def test_shrinking_for_one_group_is_checked_with_the_others_again() -> None:
    # The state says 12, where the window is broken; at 8 the state is missing; at 4 both agree.
    tier = Tier([[True, False, True, True], [True, False, True, False]])
    assert find_hit(geometry(sliding(8), state()), tier.keys, tier.ask, 0, 16) == 4


class SlowTier(Tier):
    """A tier that has no answer in the step in which a block is first asked for."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._answered: set[OffloadKey] = set()
        self._new: set[OffloadKey] = set()

    def ask(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        found: list[bool | None] = []
        for key in keys:
            if key not in self._answered:
                self._new.add(key)
                found.append(None)
                continue
            found += super().ask([key])
            if not found[-1]:
                break
        return found

    def end_step(self) -> int:
        """How many blocks were asked for in the step."""
        new, self._new = self._new, set()
        self._answered |= new
        return len(new)


@pytest.mark.parametrize(("blocks", "last_state"), [(64, 4), (64, 63), (64, None), (40, 12)])
def test_states_that_a_tier_must_be_asked_for_are_asked_for_in_one_step(blocks: int, last_state: int | None) -> None:
    groups = geometry(full(), state())
    states: list[bool | None] = [block == last_state for block in range(64)]
    tier = SlowTier([[block < blocks for block in range(64)], states])
    asked = []
    while True:
        hit, _ = possible_hit(groups, tier.keys, tier.ask_each, 0, 64 * 4)
        asked.append(tier.end_step())
        if hit is not None:
            break
    assert hit == (0 if last_state is None else 4 * (last_state + 1))
    assert len(asked) <= 4, "all attention with the last state, all other states, and the answer"
    assert sum(asked) <= 64 + blocks + 1


def test_what_the_device_has_is_not_asked_for() -> None:
    tier = Tier([[False, False, True]])
    assert find_hit(geometry(full()), tier.keys, tier.ask, 8, 12) == 12
    assert tier.asked == [(0, 2)]


def test_a_hit_may_end_inside_a_block_of_full_attention() -> None:
    tier = Tier([[True, True]])
    assert find_hit(geometry(full(), factor=4), tier.keys, tier.ask, 0, 31) == 28


def test_a_speculative_head_needs_the_block_behind_a_hit() -> None:
    head = geometry(full(4, lookahead=1))
    tier = Tier([[True, True, True, False]])
    assert find_hit(head, tier.keys, tier.ask, 0, 19) == 8
    tier = Tier([[True, True, True]])
    assert find_hit(head, tier.keys, tier.ask, 0, 19) == 8, "the third has none behind it"
    # The block behind a hit may hold the last token, which is never part of one.
    tier = Tier([[True, True]])
    assert find_hit(head, tier.keys, tier.ask, 0, 7) == 4


def test_a_larger_block_of_a_speculative_head_tells_the_next_token_but_at_its_end() -> None:
    tier = Tier([[True]])
    assert find_hit(geometry(full(4, lookahead=1), factor=4), tier.keys, tier.ask, 0, 31) == 12


def test_the_device_holds_what_a_speculative_head_dropped() -> None:
    """vLLM drops the last block of a hit on the device, and it must not be loaded again."""
    tier = Tier([[True, True, True]])
    assert find_hit(geometry(full(4, lookahead=1)), tier.keys, tier.ask, 8, 12) == 8
    assert tier.asked == []


def test_only_a_group_with_a_speculative_head_needs_more() -> None:
    tier = Tier([[True, True], [True, True, True]])
    assert find_hit(geometry(full(), sliding(4, lookahead=1)), tier.keys, tier.ask, 0, 11) == 8
    assert tier.asked == [(0, 0), (0, 1), (1, 1), (1, 2)]


def test_windows_end_at_their_own_blocks() -> None:
    # Inside a larger block only the tail is kept, so a hit must not end there.
    tier = Tier([[True, True]])
    assert find_hit(geometry(sliding(8), factor=4), tier.keys, tier.ask, 0, 31) == 16


def test_a_state_may_end_a_hit_inside_a_larger_block_of_attention() -> None:
    tier = Tier([[True, True], [False] * 5 + [True, False]])
    assert find_hit(geometry(full(), state(), factor=4), tier.keys, tier.ask, 0, 31) == 24


@pytest.mark.parametrize("most", [0, 1, 3])
def test_too_short_for_a_block(most: int) -> None:
    assert find_hit(geometry(full()), [[]], Tier([[]]).ask, 0, most) == 0


# ---------------------------------------------------------------------------------------------------- arithmetic


def test_keys_are_the_engines_hashes_at_block_ends() -> None:
    (group,) = geometry(full(4), factor=2, hash_tokens=2)
    keys: list[OffloadKey] = []
    hashes = [bytes([n]) for n in range(7)]
    group.extend_keys(keys, hashes)
    assert [get_offload_block_hash(key) for key in keys] == [bytes([3])]
    before = keys[0]
    group.extend_keys(keys, [*hashes, bytes([7])])
    assert [get_offload_block_hash(key) for key in keys] == [bytes([3]), bytes([7])]
    assert keys[0] is before
    assert get_offload_group_idx(keys[0]) == 0


def test_groups_of_other_block_sizes_have_their_own_hash_steps() -> None:
    small, large = geometry(full(2), full(4), factor=2, hash_tokens=2)
    assert (small.block_tokens, large.block_tokens) == (4, 8)
    assert (small.hashes_per_block, large.hashes_per_block) == (2, 4)


def test_a_block_size_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of the engine's block of 4"):
        geometry_of(EngineLayout((full(4),), 4, "x"), OffloadingConfig(cpu_bytes_to_use=1, block_size=6))


def test_a_load_starts_inside_a_block_and_may_end_inside_one() -> None:
    (group,) = geometry(full(), factor=4)
    assert group.gpu_blocks_for_hit(8, 28) == range(2, 7)
    assert group.blocks_for_hit(8, 28) == range(2)


def test_a_window_loads_what_covers_its_last_tokens() -> None:
    (group,) = geometry(sliding(6))
    assert group.gpu_blocks_for_hit(0, 16) == range(2, 4)  # tokens 11..15
    assert group.gpu_blocks_for_hit(12, 16) == range(3, 4)
    assert group.gpu_blocks_for_hit(16, 16) == group.blocks_for_hit(16, 16) == range(0)


def test_a_state_is_one_gpu_block_whatever_the_size_of_blocks() -> None:
    attention, group = geometry(full(), state(), factor=4)
    assert (attention.block_tokens, group.block_tokens) == (16, 4)
    assert group.gpu_blocks_for_hit(0, 12) == group.blocks_for_hit(0, 12) == range(2, 3)


def test_dont_care_places_repeat_the_last_gpu_block() -> None:
    (window,) = geometry(sliding(6), factor=4)
    assert window.source_gpu_blocks(0, [NO_BLOCK, NO_BLOCK, 7, 8], 12) == [8, 8, 7, 8]


def test_a_block_that_left_the_device_has_no_source() -> None:
    (window,) = geometry(sliding(6))
    assert window.source_gpu_blocks(0, [3, 4, 5, 6], 8) == [3]  # tokens 3..7 are still needed
    assert window.source_gpu_blocks(0, [3, 4, 5, 6], 9) is None  # freed when the step after began
    assert window.source_gpu_blocks(0, [NO_BLOCK, 4], 0) is None


# ------------------------------------------------------------------------------------------------ reachable blocks


@settings(max_examples=by_size(quick=100, thorough=1000))
@given(cases())
def test_the_reachable_blocks_are_those_that_some_hit_needs(case: Case) -> None:
    groups, _, _, most = case
    unit = hit_unit_tokens(groups)
    # Whoever shares a block may share all before it, be longer, and end anywhere. So every aligned length is a hit.
    hits = [hit for hit in range(1, most + 2 * unit + 1) if all(boundary_ok(group, hit) for group in groups)]
    for group in groups:
        needed = {token // group.block_tokens for hit in hits for token in needed_tokens(group, 0, hit)}
        for block in range(most // group.block_tokens):
            assert group.is_reachable(block, unit) == (block in needed)


def test_a_window_beside_larger_blocks_is_reachable_only_before_their_boundaries() -> None:
    attention, window = geometry(full(16), sliding(8))
    unit = hit_unit_tokens((attention, window))
    assert unit == 16
    assert [block for block in range(8) if window.is_reachable(block, unit)] == [2, 3, 6, 7]
    assert all(attention.is_reachable(block, unit) for block in range(8))


def test_of_small_states_beside_larger_blocks_only_one_is_reachable() -> None:
    groups = geometry(full(16), state(4))
    assert [block for block in range(8) if groups[1].is_reachable(block, hit_unit_tokens(groups))] == [3, 7]


def test_a_window_with_a_speculative_head_needs_the_block_behind_a_boundary_too() -> None:
    attention, window = geometry(full(16), sliding(8, lookahead=1))
    unit = hit_unit_tokens((attention, window))
    assert [block for block in range(10) if window.is_reachable(block, unit)] == [2, 3, 4, 6, 7, 8]


def test_a_window_of_one_token_needs_no_earlier_one() -> None:
    (window,) = geometry(sliding(1))
    assert not any(window.is_reachable(block, 4) for block in range(8))


@settings(max_examples=by_size(100, 2000))
@given(data=st.data())
def test_what_is_stored_of_a_run_of_blocks_is_what_is_stored_of_each(data: st.DataObject) -> None:
    layout = data.draw(
        st.sampled_from([full(), full(8, lookahead=1), sliding(6), sliding(3, 2), sliding(9, 4, 1), chunk(8), chunk(6)])
    )
    groups = geometry(layout, full(8), factor=data.draw(st.sampled_from([1, 2])))
    group, unit = groups[0], hit_unit_tokens(groups)
    ids = data.draw(st.lists(st.sampled_from([NO_BLOCK, 5, 6, 7, 8, 9]), max_size=24))
    start = data.draw(st.integers(0, 8))
    run = range(start, data.draw(st.integers(start, 9)))
    computed = data.draw(st.integers(0, 80))
    sources = {block: group.source_gpu_blocks(block, ids, computed) for block in run if group.is_reachable(block, unit)}
    blocks, gpu_ids = group.blocks_to_store(run, ids, computed, unit)
    assert list(blocks) == [block for block, own in sources.items() if own is not None]
    assert gpu_ids == [each for own in sources.values() if own is not None for each in own]


# ---------------------------------------------------------------------------------------------- the order of blocks


@given(st.lists(st.tuples(st.sampled_from((2, 4, 6)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
def test_keys_are_sorted_by_the_last_tokens_of_their_blocks(parts: list[tuple[int, int, int]]) -> None:
    groups = geometry(*(full(tokens) for tokens, _, _ in parts))
    blocks = [range(first, first + number) for _, first, number in parts]
    ends = {
        make_offload_key(bytes([block]), group.index): ((block + 1) * group.block_tokens, group.index)
        for group, own in zip(groups, blocks, strict=True)
        for block in own
    }
    for each in (blocks, [[*own] for own in blocks]):
        assert by_position(groups, each, [*ends]) == sorted(ends, key=ends.__getitem__)
