# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

import pytest

from kvoffload.device_pool import DevicePool
from kvoffload.testing import keys


def serve(pool: DevicePool, path: list[bytes], extra: int = 0) -> int:
    """Serve one request alone, all of whose blocks are computed. Return the number of blocks that it found."""
    found = pool.find_prefix(path)
    pool.share(found)
    table = found + pool.take(len(path) - len(found) + extra)
    pool.name(table[: len(path)], path)
    pool.release(table)
    return len(found)


def test_a_finished_prefix_is_found_until_its_blocks_are_reused_tail_first() -> None:
    pool = DevicePool(4)
    path = keys(1, 2, 3)
    assert serve(pool, path) == 0
    assert serve(pool, path) == 3
    serve(pool, keys(4, 5))  # the block that nobody used yet, then the tail of the path
    assert len(pool.find_prefix(path)) == 2
    assert len(pool.find_prefix(keys(4, 5))) == 2


def test_a_used_block_moves_to_the_end_of_the_queue() -> None:
    pool = DevicePool(4)
    serve(pool, keys(1, 2))
    serve(pool, keys(3, 4))
    assert serve(pool, keys(1, 2)) == 2
    serve(pool, keys(5, 6))
    assert (len(pool.find_prefix(keys(1, 2))), len(pool.find_prefix(keys(3, 4)))) == (2, 0)


def test_a_second_copy_takes_a_block_and_is_not_found() -> None:
    pool = DevicePool(4)
    path = keys(1, 2, 3)
    serve(pool, path)
    table = pool.find_prefix(path)[:2]  # the last block is computed again, as for a prompt that was found whole
    pool.share(table)
    table += pool.take(1)
    pool.name(table, path)
    pool.release(table)
    assert len(pool.find_prefix(path)) == 3
    pool.check_invariants([])


def test_blocks_of_decoded_tokens_take_room_without_a_key() -> None:
    pool = DevicePool(4)
    serve(pool, keys(1, 2))
    serve(pool, keys(3), extra=2)
    assert len(pool.find_prefix(keys(1, 2))) == 1
    assert len(pool.find_prefix(keys(3))) == 1


def test_a_request_larger_than_the_pool_keeps_its_head() -> None:
    pool = DevicePool(3)
    path = keys(*range(10))
    assert serve(pool, path) == 0
    assert len(pool.find_prefix(path)) == 3
    assert pool.num_free == 3, "the blocks that were made up are gone"


def test_a_pool_of_unknown_size_has_room_and_finds_nothing() -> None:
    pool = DevicePool(0)
    assert serve(pool, keys(*range(1000))) == 0
    assert serve(pool, keys(*range(1000))) == 0
    assert pool.num_free > 1 << 50


def test_forgetting_leaves_users_their_blocks() -> None:
    pool = DevicePool(2, finds_copies=True)
    blocks = pool.take(2)
    pool.name(blocks, keys(1, 1))
    pool.forget_all()
    pool.check_invariants([blocks])
    assert pool.find(keys(1)) is None and pool.num_free == 0
    pool.name(blocks[:1], keys(2))
    assert pool.find(keys(2)) == blocks[:1]


@pytest.mark.parametrize("seed", range(5))
def test_any_use_against_a_list_of_free_blocks(seed: int) -> None:
    """The oracle is a plain list of free blocks in order, and a dict with the contents of each block."""
    chance = random.Random(seed)
    pool, free, content = DevicePool(12), [*range(12)], dict[int, bytes]()
    running: list[list[int]] = []
    for _ in range(400):
        if running and (chance.random() < 0.4 or len(free) < 4):
            table = running.pop(chance.randrange(len(running)))
            pool.release(table)
            free += [block for block in reversed(table) if not any(block in other for other in running)]
        else:
            path = keys(*[10 * chance.randrange(3) + at for at in range(chance.randint(1, 4))])
            by_key = {key: block for block, key in content.items()}
            expected: list[int] = []
            for key in path:
                if key not in by_key:
                    break
                expected.append(by_key[key])
            found = pool.find_prefix(path)
            assert found == expected
            fresh = len(path) - len(found)
            room = pool.room_beside(found)
            assert room == len([block for block in free if block not in found])
            if fresh > room:
                continue
            pool.share(found)
            free = [block for block in free if block not in found]
            taken, free = free[:fresh], free[fresh:]
            assert pool.take(fresh) == taken
            content = {block: key for block, key in content.items() if block not in taken}
            pool.name(found + taken, path)
            for block, key in zip(taken, path[len(found) :], strict=True):
                if key not in content.values():
                    content[block] = key
            running.append(found + taken)
        assert pool.num_free == len(free)
        pool.check_invariants(running)
