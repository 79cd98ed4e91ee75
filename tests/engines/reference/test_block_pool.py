# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kvoffload.engines.reference.block_pool import BlockPool


def test_what_was_freed_first_is_overwritten_first_and_tails_before_heads() -> None:
    pool = BlockPool(6)
    first, second = pool.take(3), pool.take(2)
    pool.release(second)
    pool.release(first)
    # The block that was never used, then the second table from its tail, then the first from its tail.
    assert pool.take(6) == [5, *reversed(second), *reversed(first)]


def test_a_free_block_is_found_until_it_is_taken() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.name(block, b"x")
    pool.release([block])
    assert pool.find(b"x") == block and pool.is_free(block)
    pool.share([block])
    assert not pool.is_free(block) and pool.num_free == 1
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1  # one user is left
    pool.release([block])
    pool.take(2)
    assert pool.find(b"x") is None
    pool.check_invariants([[0, 1]])


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.name(first, b"x")
    pool.name(second, b"x")
    assert pool.find(b"x") == first
    pool.release([second])
    assert pool.take(1) == [second] and pool.find(b"x") == first


def test_forgetting_leaves_users_their_blocks() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.name(block, b"x")
    pool.forget_all()
    assert pool.find(b"x") is None and not pool.is_free(block)
    pool.name(block, b"y")
    assert pool.find(b"y") == block
