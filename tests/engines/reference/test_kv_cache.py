# SPDX-License-Identifier: Apache-2.0
"""The device's KV cache against a plain record of every block's content."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.config import GroupKind, KVGroupLayout
from kvoffload.connector import NO_BLOCK, BoundaryState
from kvoffload.engines.reference.kv_cache import KVCache, PrefixHit
from kvoffload.engines.reference.request import Request, SamplingParams

BLOCK = 4
FULL = KVGroupLayout(GroupKind.FULL_ATTENTION, BLOCK, 64)
WINDOWS = {
    window: KVGroupLayout(GroupKind.SLIDING_WINDOW, BLOCK, 64, sliding_window_tokens=window) for window in (1, 5, 10)
}

STATES = KVGroupLayout(GroupKind.SINGLE_STATE, BLOCK, 64)
OTHERS = {"states": STATES, **WINDOWS}


def make_request(tokens: list[int], name: str = "r") -> Request:
    return Request(name, tokens, SamplingParams(), BLOCK)


def nothing(groups: int) -> PrefixHit:
    return PrefixHit(0, ((),) * groups)


def needed(group: KVGroupLayout, num_tokens: int) -> range:
    """Return the blocks to which a token after ``num_tokens`` attends, by listing its keys.

    For states, that is the last one.
    """
    if group.kind is GroupKind.SINGLE_STATE:
        return range(max(0, num_tokens // BLOCK - 1), num_tokens // BLOCK)
    window = group.sliding_window_tokens
    keys = [key for key in range(num_tokens) if window is None or key > num_tokens - window]
    blocks = {key // BLOCK for key in keys}
    return range(min(blocks, default=num_tokens // BLOCK), num_tokens // BLOCK)


def serve(cache: KVCache, request: Request, tokens: int | None = None) -> None:
    """Admits, computes and releases it."""
    hit = cache.find_prefix(request)
    assert cache.admit(request, hit, hit.num_tokens, tokens or request.num_tokens)
    request.num_computed_tokens = tokens or request.num_tokens
    cache.name_computed(request)
    cache.release(request)


def test_the_last_token_is_never_part_of_a_hit() -> None:
    cache = KVCache((FULL,), 8)
    serve(cache, make_request(list(range(8))))
    assert cache.find_prefix(make_request(list(range(8)))).num_tokens == 4
    assert cache.find_prefix(make_request(list(range(9)))).num_tokens == 8


def test_a_window_needs_its_own_blocks_only() -> None:
    cache = KVCache((FULL, WINDOWS[5]), 8)
    serve(cache, make_request(list(range(20))))
    hit = cache.find_prefix(make_request(list(range(21))))
    assert hit.num_tokens == 20
    # Token 20 sees 16 … 20 in the window, so only the last block is needed.
    assert hit.block_ids[1][:4] == (NO_BLOCK,) * 4 and hit.block_ids[1][4] != NO_BLOCK


@pytest.mark.parametrize("window", [1, 5, 10])
def test_a_load_gets_blocks_for_exactly_what_a_window_needs(window: int) -> None:
    cache = KVCache((FULL, WINDOWS[window]), 16)
    request = make_request(list(range(60)))
    assert cache.admit(request, nothing(2), loaded_tokens=40, num_tokens=40)
    full, windowed = cache.table(request)
    assert len(full) == len(windowed) == 10 and NO_BLOCK not in full
    assert [index for index, block in enumerate(windowed) if block != NO_BLOCK] == list(needed(WINDOWS[window], 40))
    cache.check_invariants()


def test_only_the_state_at_the_last_full_block_of_a_step_is_kept() -> None:
    cache = KVCache((FULL, STATES), 16)
    request = make_request(list(range(40)))
    assert cache.admit(request, nothing(2), 0, 18)
    _, states = cache.table(request)
    assert [index for index, block in enumerate(states) if block != NO_BLOCK] == [3, 4]  # at 16 tokens, and at 18
    assert cache.boundary_states(request, 18) == (BoundaryState("r", 1, states[3], 16),)
    request.num_computed_tokens = 18
    cache.name_computed(request)
    # It hits at 16 tokens and nowhere else, however many blocks of attention are there.
    assert [cache.find_prefix(make_request(list(range(count)))).num_tokens for count in (16, 17, 40)] == [0, 16, 16]
    # The state at 18 tokens is overwritten until 20, and the step continues to 27.
    fresh = cache.grow(request, 27)
    assert fresh is not None and [block == NO_BLOCK for block in fresh[1]] == [False, False]
    assert cache.boundary_states(request, 27)[0].num_tokens == 24
    request.num_computed_tokens = 27
    assert cache.boundary_states(request, 27) == ()
    cache.check_invariants()


def test_too_few_blocks_change_nothing() -> None:
    cache = KVCache((FULL, WINDOWS[5]), 4)
    first, second = make_request([1] * 8, "a"), make_request([2] * 12, "b")
    assert cache.admit(first, nothing(2), 0, 8)
    assert not cache.admit(second, nothing(2), 0, 12)
    assert cache.admit(second, nothing(2), 0, 8)
    assert cache.grow(first, 8) == ([], [])
    assert cache.grow(first, 9) is None
    cache.check_invariants()
    cache.release(second)
    assert cache.grow(first, 9) is not None
    cache.check_invariants()


def test_blocks_of_a_hit_that_are_free_count_as_taken() -> None:
    cache = KVCache((FULL,), 4)
    serve(cache, make_request(list(range(13))))
    request = make_request([*range(12), 99, 99, 99, 99, 99])
    hit = cache.find_prefix(request)
    assert hit.num_tokens == 12
    assert not cache.admit(request, hit, 12, 17)  # 3 of the hit and 2 more
    assert cache.admit(request, hit, 12, 16)
    cache.check_invariants()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), other=st.sampled_from([None, *OTHERS]))
def test_what_is_found_is_what_was_computed_and_no_longer_prefix_exists(seed: int, other: int | str | None) -> None:
    rng = random.Random(seed)
    groups = (FULL,) if other is None else (FULL, OTHERS[other])
    cache = KVCache(groups, 20)
    contents: list[dict[int, bytes]] = [{} for _ in groups]  # by group: the bytes that each block was last filled with
    running: list[Request] = []
    for number in range(60):
        action = rng.random()
        if action < 0.5 and len(running) < 4:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 5))]
            request = make_request([token for token in tokens for _ in range(5)], str(number))
            hit = cache.find_prefix(request)
            check_hit(cache, groups, contents, request, hit)
            tokens_to_hold = rng.randint(hit.num_tokens + 1, request.num_tokens)
            if cache.admit(request, hit, hit.num_tokens, tokens_to_hold):
                compute(cache, groups, contents, request, hit.num_tokens, tokens_to_hold)
                running.append(request)
        elif action < 0.75 and running:
            request = rng.choice(running)
            if cache.grow(request, request.num_tokens) is not None:
                compute(cache, groups, contents, request, request.num_computed_tokens, request.num_tokens)
        elif running:
            cache.release(running.pop(rng.randrange(len(running))))
        cache.check_invariants()


def compute(
    cache: KVCache,
    groups: tuple[KVGroupLayout, ...],
    contents: list[dict[int, bytes]],
    request: Request,
    start: int,
    stop: int,
) -> None:
    for group, content, table in zip(groups, contents, cache.table(request), strict=True):
        for index in range(start // BLOCK, -(-stop // BLOCK)):
            if group.kind is GroupKind.SINGLE_STATE and index not in (stop // BLOCK - 1, (stop - 1) // BLOCK):
                continue
            assert table[index] != NO_BLOCK
            content[table[index]] = request.block_hashes[index] if (index + 1) * BLOCK <= stop else b"partial"
    request.num_computed_tokens = stop
    cache.name_computed(request)


def check_hit(
    cache: KVCache,
    groups: tuple[KVGroupLayout, ...],
    contents: list[dict[int, bytes]],
    request: Request,
    hit: PrefixHit,
) -> None:
    for group, content, table in zip(groups, contents, hit.block_ids, strict=True):
        for index in needed(group, hit.num_tokens):
            assert content[table[index]] == request.block_hashes[index]
    for blocks in range(hit.num_tokens // BLOCK + 1, (request.num_tokens - 1) // BLOCK + 1):
        found = [
            pool.find(request.block_hashes[index]) is not None
            for group, pool in zip(groups, cache._pools, strict=True)
            for index in needed(group, blocks * BLOCK)
        ]
        assert not all(found), f"{blocks} blocks were there and {hit.num_tokens // BLOCK} were found"
