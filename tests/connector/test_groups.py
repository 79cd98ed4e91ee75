# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.connector.test_lookup import Case, boundary_ok, cases, full, geometry, needed_tokens, sliding, state
from tests.sizes import by_size

from kvoffload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx
from kvoffload.connector import NO_BLOCK
from kvoffload.connector.groups import hit_unit_tokens
from kvoffload.errors import ConfigError


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
    from kvoffload.config import EngineLayout, OffloadingConfig
    from kvoffload.connector.groups import geometry_of

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
    assert group.gpu_blocks_for_hit(16, 16) == range(0)


def test_a_state_loads_its_last_gpu_block() -> None:
    (group,) = geometry(state(), factor=2)
    assert group.gpu_blocks_for_hit(0, 16) == range(3, 4)
    assert group.blocks_for_hit(0, 16) == range(1, 2)


def test_dont_care_places_repeat_the_last_gpu_block() -> None:
    (window,) = geometry(sliding(6), factor=4)
    assert window.source_gpu_blocks(0, [NO_BLOCK, NO_BLOCK, 7, 8], 12) == [8, 8, 7, 8]
    (single,) = geometry(state(), factor=2)
    assert single.source_gpu_blocks(0, [NO_BLOCK, 5], 4) == [5, 5]


def test_a_block_that_left_the_device_has_no_source() -> None:
    (window,) = geometry(sliding(6))
    assert window.source_gpu_blocks(0, [3, 4, 5, 6], 8) == [3]  # tokens 3..7 are still needed
    assert window.source_gpu_blocks(0, [3, 4, 5, 6], 9) is None  # freed when the step after began
    assert window.source_gpu_blocks(0, [NO_BLOCK, 4], 0) is None
    (single,) = geometry(state())
    assert single.source_gpu_blocks(0, [3], 4) == [3]
    assert single.source_gpu_blocks(0, [3, 4], 5) is None


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
