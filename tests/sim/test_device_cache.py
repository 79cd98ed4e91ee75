# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

from kvoffload.base import OffloadKey
from kvoffload.sim.device_cache import DeviceCache
from kvoffload.testing import keys


def serve(cache: DeviceCache, path: Sequence[OffloadKey], extra: int = 0) -> int:
    """One request, all of whose blocks are computed; the blocks it found."""
    found = cache.find_prefix(path)
    cache.admit(path, found, found)
    cache.fill(path, len(path))
    cache.grow(len(path) + extra)
    cache.release()
    return found


def test_a_finished_prefix_is_found_until_its_blocks_are_reused_tail_first() -> None:
    cache = DeviceCache(4)
    path = keys(1, 2, 3)
    assert serve(cache, path) == 0
    assert serve(cache, path) == 3
    serve(cache, keys(4, 5))  # the block that nobody used yet, then the tail of the path
    assert cache.find_prefix(path) == 2
    assert cache.find_prefix(keys(4, 5)) == 2


def test_a_used_block_moves_to_the_end_of_the_queue() -> None:
    cache = DeviceCache(4)
    serve(cache, keys(1, 2))
    serve(cache, keys(3, 4))
    assert serve(cache, keys(1, 2)) == 2
    serve(cache, keys(5, 6))
    assert (cache.find_prefix(keys(1, 2)), cache.find_prefix(keys(3, 4))) == (2, 0)


def test_a_second_copy_takes_a_block_and_is_not_found() -> None:
    cache = DeviceCache(4)
    path = keys(1, 2, 3)
    serve(cache, path)
    cache.admit(path, 2, 2)  # the last block is computed again, as for a prompt that was found whole
    cache.fill(path, 3)
    cache.release()
    assert repr(cache) == "DeviceCache(4 free, 3 cached)"
    assert cache.find_prefix(path) == 3


def test_a_path_that_names_a_block_twice_finds_it_once() -> None:
    cache = DeviceCache(4)
    serve(cache, keys(1, 2, 1))
    assert cache.find_prefix(keys(1, 2)) == 2
    serve(cache, keys(3, 4, 5, 6))
    assert cache.find_prefix(keys(1)) == cache.find_prefix(keys(2)) == 0
    assert cache.find_prefix(keys(3, 4, 5, 6)) == 4


def test_blocks_of_decoded_tokens_take_room_without_a_key() -> None:
    cache = DeviceCache(4)
    serve(cache, keys(1, 2))
    serve(cache, keys(3), extra=2)
    assert cache.find_prefix(keys(1, 2)) == 1
    assert cache.find_prefix(keys(3)) == 1


def test_a_request_larger_than_the_pool_keeps_its_head() -> None:
    cache = DeviceCache(3)
    path = keys(*range(10))
    assert serve(cache, path) == 0
    assert cache.find_prefix(path) == 3


def test_states_take_blocks_and_are_found_until_those_are_reused() -> None:
    cache = DeviceCache(6)
    path, states = [OffloadKey(b"a"), OffloadKey(b"b")], [OffloadKey(b"s"), OffloadKey(b"t")]
    cache.admit(path, 0, 0)
    cache.fill(path, 2)
    cache.keep(states)
    cache.release()
    assert cache.has(states) and cache.find_prefix(path) == 2
    # Two blocks were never used. A third is taken from the states, the tail of the request.
    cache.admit([OffloadKey(b"x")], 0, 0)
    cache.grow(3)
    assert not cache.has(states) and cache.find_prefix(path) == 2
    cache.release()
    cache.admit(path, 2, 2, found_states=states[:1])
    cache.grow(6)
    cache.release()
    assert cache.has(states[:1])
