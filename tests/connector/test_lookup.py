# SPDX-License-Identifier: Apache-2.0
"""The hit search against an oracle that tries every length."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizes import by_size

from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.connector.groups import GroupGeometry, geometry_of, hit_unit_tokens
from kvoffload.connector.lookup import find_hit

Answers = list[list[bool | None]]
Case = tuple[tuple[GroupGeometry, ...], Answers, int, int]
"""Groups, what the tier has, tokens on the device, most tokens."""


def geometry(*groups: KVGroupLayout, factor: int = 1, hash_tokens: int = 1) -> tuple[GroupGeometry, ...]:
    base = min(group.block_tokens for group in groups)
    config = OffloadingConfig(cpu_bytes_to_use=1, block_size=base * factor)
    return geometry_of(EngineLayout(groups, hash_tokens, "test"), config)


def full(tokens: int = 4, lookahead: int = 0) -> KVGroupLayout:
    return KVGroupLayout(GroupKind.FULL_ATTENTION, tokens, 1, lookahead_tokens=lookahead)


def sliding(window: int, tokens: int = 4, lookahead: int = 0) -> KVGroupLayout:
    return KVGroupLayout(GroupKind.SLIDING_WINDOW, tokens, 1, window, lookahead)


def state(tokens: int = 4) -> KVGroupLayout:
    return KVGroupLayout(GroupKind.SINGLE_STATE, tokens, 1)


class Tier:
    """Answers from a table, as a manager would, and records the lookups."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.asked: list[tuple[int, int]] = []

    def ask(self, group: int, blocks: range) -> list[bool | None]:
        found: list[bool | None] = []
        for block in blocks:
            self.asked.append((group, block))
            found.append(self.answers[group][block])
            if found[-1] is False:
                break
        return found


def needed_tokens(group: GroupGeometry, computed: int, hit: int) -> list[int]:
    """The tokens whose KV a request with a hit of ``hit`` tokens needs, and those that this KV was computed with: token
    by token, by the definition of the kinds."""
    ahead = list(range(hit, hit + group.lookahead_tokens))
    match group.kind:
        case GroupKind.FULL_ATTENTION:
            return [*range(computed, hit), *ahead]
        case GroupKind.SLIDING_WINDOW:
            assert group.window_tokens is not None
            # Token ``hit`` attends to itself and the window_tokens - 1 before it.
            return [token for token in range(computed, hit) if hit - token < group.window_tokens] + ahead
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
        st.sampled_from([2, 4]).map(state),
    )
    groups = geometry(*draw(st.lists(layout, min_size=1, max_size=3)), factor=draw(st.integers(1, 3)))
    tokens = draw(st.integers(1, 60))
    likely = st.sampled_from([True, True, True, True, False, None])
    answers = [
        draw(st.lists(likely, min_size=tokens // group.block_tokens, max_size=tokens // group.block_tokens))
        for group in groups
    ]
    device = math.lcm(*(group.gpu_block_tokens for group in groups))
    computed = draw(st.integers(0, (tokens - 1) // device)) * device
    return groups, answers, computed, tokens - 1


@settings(max_examples=by_size(quick=200, thorough=2000))
@given(cases())
def test_the_hit_is_the_longest_that_trying_all_finds(case: Case) -> None:
    groups, answers, computed, most = case
    tier = Tier(answers)
    hit = find_hit(groups, [len(each) for each in answers], tier.ask, computed, most)
    assert hit == by_trying_all(groups, answers, computed, most)
    assert len(tier.asked) == len(set(tier.asked)), "a block was asked for twice"
    unit = hit_unit_tokens(groups)
    assert all(groups[group].is_reachable(block, unit) for group, block in tier.asked), "asked for what nobody stores"


def test_a_deferred_block_does_not_stop_the_questions() -> None:
    tier = Tier([[True, None, None, True, None, False, True]])
    assert find_hit(geometry(full()), [7], tier.ask, 0, 27) is None
    assert tier.asked == [(0, block) for block in range(6)]  # all that may start their journey, and not beyond the gap


def test_a_deferred_window_block_does_not_stop_the_questions() -> None:
    tier = Tier([[False, None, None, None]])
    assert find_hit(geometry(sliding(13)), [4], tier.ask, 0, 16) is None
    assert set(tier.asked) == {(0, 1), (0, 2), (0, 3)}


def test_a_window_needs_its_last_blocks_only() -> None:
    tier = Tier([[False, False, True, True]])
    assert find_hit(geometry(sliding(8)), [4], tier.ask, 0, 16) == 16
    assert tier.asked == [(0, 2), (0, 3)]


def test_a_state_needs_its_last_block_only() -> None:
    tier = Tier([[False, False, True, False]])
    assert find_hit(geometry(state()), [4], tier.ask, 0, 16) == 12


def test_the_hit_is_the_minimum_over_all_groups() -> None:
    tier = Tier([[True, True, True, True], [True, True, False, True]])
    assert find_hit(geometry(full(), full()), [4, 4], tier.ask, 0, 16) == 8


def test_shrinking_for_one_group_is_checked_with_the_others_again() -> None:
    # The state says 12, where the window is broken; at 8 the state is missing; at 4 both agree.
    tier = Tier([[True, False, True, True], [True, False, True, False]])
    assert find_hit(geometry(sliding(8), state()), [4, 4], tier.ask, 0, 16) == 4


def test_what_the_device_has_is_not_asked_for() -> None:
    tier = Tier([[False, False, True]])
    assert find_hit(geometry(full()), [3], tier.ask, 8, 12) == 12
    assert tier.asked == [(0, 2)]


def test_a_hit_may_end_inside_a_block_of_full_attention() -> None:
    tier = Tier([[True, True]])
    assert find_hit(geometry(full(), factor=4), [2], tier.ask, 0, 31) == 28


def test_a_speculative_head_needs_the_block_behind_a_hit() -> None:
    tier = Tier([[True, True, True, False]])
    assert find_hit(geometry(full(4, lookahead=1)), [4], tier.ask, 0, 19) == 8
    assert find_hit(geometry(full(4, lookahead=1)), [3], tier.ask, 0, 19) == 8, "no block behind the third"
    # The block behind a hit may hold the last token, which is never part of one.
    assert find_hit(geometry(full(4, lookahead=1)), [2], Tier([[True, True]]).ask, 0, 7) == 4


def test_a_larger_block_of_a_speculative_head_tells_the_next_token_but_at_its_end() -> None:
    assert find_hit(geometry(full(4, lookahead=1), factor=4), [1], Tier([[True]]).ask, 0, 31) == 12


def test_the_device_holds_what_a_speculative_head_dropped() -> None:
    """vLLM drops the last block of a hit on the device, and it must not be loaded again."""
    tier = Tier([[True, True, True]])
    assert find_hit(geometry(full(4, lookahead=1)), [3], tier.ask, 8, 12) == 8
    assert tier.asked == []


def test_only_a_group_with_a_speculative_head_needs_more() -> None:
    tier = Tier([[True, True], [True, True, True]])
    assert find_hit(geometry(full(), sliding(4, lookahead=1)), [2, 3], tier.ask, 0, 11) == 8
    assert tier.asked == [(0, 0), (0, 1), (1, 1), (1, 2)]


def test_windows_and_states_end_at_their_own_blocks() -> None:
    # Inside a larger block only the tail is kept, so a hit must not end there.
    assert find_hit(geometry(sliding(8), factor=4), [2], Tier([[True, True]]).ask, 0, 31) == 16
    assert find_hit(geometry(state(), factor=4), [2], Tier([[True, True]]).ask, 0, 31) == 16


@pytest.mark.parametrize("most", [0, 1, 3])
def test_too_short_for_a_block(most: int) -> None:
    assert find_hit(geometry(full()), [0], Tier([[]]).ask, 0, most) == 0
