# SPDX-License-Identifier: Apache-2.0
"""Test many hosts on one root: locks that exclude nobody, clocks minutes apart, caches seconds old, and ``kill -9``."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.files import disk_bytes
from tests.sizes import by_size
from tests.tiering.stores.fs.host import Host
from tests.tiering.stores.rig import KEY, OTHER, PAGED, SMALL, files, path_of, room_for

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.shared_store_contract import SharedStoreContract
from kvoffload.testing.store_contract import BlockStoreContract, block_of
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import TEMPORARY_PREFIX, BlockFormat

MINUTES_S = 60.0
HOSTS = [
    {"skew_s": 7 * MINUTES_S, "stamps_files": True, "cache_s": 2.0},
    {"skew_s": -7 * MINUTES_S, "stamps_files": True, "cache_s": 3.0},
    {"skew_s": 200 * MINUTES_S, "cache_s": 2.0},
]
"""The hosts. The last one's clock is hours ahead, and the server sets the times of its files."""


class TestOneHostOfMany(BlockStoreContract):
    """A host with old attributes and a wrong clock works like any other host for its own blocks."""

    def make_store(self, directory: Path) -> BlockStore:
        return Host(directory, self.block_bytes, max_bytes=1 << 30, **HOSTS[0])

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)


class TestHosts(SharedStoreContract):
    block_bytes = PAGED

    def make_host(self, directory: Path, number: int) -> BlockStore:
        return Host(directory, self.block_bytes, max_bytes=1 << 30, **HOSTS[number])


class TestProcesses(SharedStoreContract):
    """Several stores in one process, which behave like stores in several processes."""

    def make_host(self, directory: Path, number: int) -> BlockStore:
        return FileSystemStore(directory, self.block_bytes, max_bytes=1 << 30)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Starts hosts on one root, and ends them."""
    started = []

    def start(**options) -> Host:
        started.append(Host(tmp_path / "kv", SMALL, **options))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def blocks_of(keys: list[OffloadKey]) -> list[bytes]:
    return [block_of(key, SMALL) for key in keys]


def write(host: BlockStore, *keys: OffloadKey) -> list[bool]:
    return host.write(keys, [memoryview(block) for block in blocks_of(list(keys))])


def read(host: BlockStore, *keys: OffloadKey) -> set[OffloadKey]:
    """Which blocks are there, with the right bytes."""
    buffers = [bytearray(SMALL) for _ in keys]
    found = set()
    for key, buffer, answer in zip(keys, buffers, host.read_into(keys, [memoryview(b) for b in buffers]), strict=True):
        assert not answer or bytes(buffer) == block_of(key, SMALL), "wrong bytes"
        found |= {key} if answer else set()
    return found


def temporaries(root: Path) -> list[Path]:
    return sorted(root.glob(f"*/*/{TEMPORARY_PREFIX}*"))


@pytest.mark.long
def test_a_host_that_opens_the_store_again_and_again_costs_another_no_write(tmp_path: Path) -> None:
    """The hosts do not see each other's locks."""
    writer, other = (Host(tmp_path / "kv", PAGED, max_bytes=room_for(2000, PAGED)) for _ in range(2))
    try:
        keys = keys_of(*range(1600))
        other.begin("reopen", 5 * len(keys))
        answers = list[bool]()
        for first in range(0, len(keys), 16):
            batch = keys[first : first + 16]
            try:
                answers += writer.write(batch, [memoryview(block_of(key, PAGED)) for key in batch])
            except StoreError:
                answers += [False] * 16
        other.answer()
        assert answers.count(False) == 0, f"{answers.count(False)} of {len(keys)} writes were lost"
    finally:
        writer.kill()
        other.kill()


class TestOldCaches:
    """Hosts with caches that are seconds old. The clocks of these tests do not run, so caches stay old."""

    @pytest.fixture
    def pair(self, host) -> tuple[Host, Host]:
        return host(), host(cache_s=3600)

    def test_a_block_that_another_host_deleted_is_a_miss_when_it_is_read(self, pair: tuple[Host, Host]) -> None:
        one, two = pair
        write(one, KEY)
        assert two.contains([KEY]) == [True]
        one.discard([KEY])
        assert two.contains([KEY]) == [True], "as far as it knows"
        assert read(two, KEY) == set()
        assert write(two, KEY) == [True]
        assert two.stats().corrupt_blocks == 0

    def test_a_block_that_another_host_wrote_is_read_and_may_be_written_again(self, pair: tuple[Host, Host]) -> None:
        one, two = pair
        assert two.contains([KEY, OTHER]) == [False, False]
        assert write(one, KEY, OTHER) == [True, True]
        assert read(two, KEY) == {KEY}
        assert write(two, KEY, OTHER) == [True, True]
        assert read(one, KEY, OTHER) == {KEY, OTHER}

    def test_a_directory_that_another_host_made_is_found(self, pair: tuple[Host, Host], tmp_path: Path) -> None:
        one, two = pair
        assert read(two, *keys_of(*range(20))) == set()
        assert two.contains(keys_of(*range(20))) == [False] * 20
        write(one, *keys_of(*range(20)))
        assert write(two, *keys_of(*range(40))) == [True] * 40
        assert len(files(tmp_path)) == 40

    def test_listings_that_are_old_delete_nothing_that_is_not_a_miss_afterwards(self, host, tmp_path: Path) -> None:
        one, two = host(max_bytes=room_for(10)), host(cache_s=3600, max_bytes=room_for(10))
        for number in range(0, 60, 2):
            write(one, *keys_of(number))
            assert write(two, *keys_of(number + 1)) == [True]
        read(one, *keys_of(*range(60)))
        assert read(two, *keys_of(59)) == set(keys_of(59))
        assert len(files(tmp_path)) <= 11
        assert write(one, *keys_of(100)) == [True]
        assert len(files(tmp_path)) == 10


def test_three_hosts_keep_one_quota_whatever_their_clocks_say(host, tmp_path: Path) -> None:
    hosts = [host(max_bytes=room_for(40), **options) for options in HOSTS]
    numbers = itertools.count()
    for turn in range(by_size(quick=16, thorough=200)):
        for each in hosts:
            write(each, *keys_of(*itertools.islice(numbers, 4)))
        if turn > 10:
            assert 0.9 * room_for(40) <= disk_bytes(tmp_path) <= 1.3 * room_for(40), "caches are seconds old"
    write(host(max_bytes=room_for(40)), *keys_of(next(numbers)))
    assert disk_bytes(tmp_path) <= room_for(40)


@pytest.mark.parametrize("skew_s", [-40 * MINUTES_S, 40 * MINUTES_S])
def test_what_a_host_is_writing_is_not_swept_by_one_whose_clock_differs(host, tmp_path: Path, skew_s: float) -> None:
    store = FileSystemStore(tmp_path / "kv", SMALL)
    path = tmp_path / "kv" / path_of(store, KEY)
    path.parent.mkdir(parents=True)
    now_ns = time.time_ns()
    unfinished = path.parent / f"{TEMPORARY_PREFIX}of-another-host-1"
    unfinished.write_bytes(b"half")
    os.utime(unfinished, ns=(now_ns, now_ns))
    other = host(max_bytes=room_for(3), skew_s=skew_s, stamps_files=True)
    for number in range(20):
        write(other, *keys_of(100 + number))
    assert unfinished.exists()


def test_hosts_are_killed_and_come_back_and_the_others_lose_no_write(host, tmp_path: Path) -> None:
    chance, numbers = random.Random(7), itertools.count()
    survivor = host(max_bytes=room_for(2000, SMALL), **HOSTS[1])
    for _ in range(by_size(quick=2, thorough=60)):
        victim = host(max_bytes=room_for(2000, SMALL), **HOSTS[0])
        same = keys_of(*range(1000, 1200))
        victim.begin("write_singly", same, blocks_of(same))
        mine = keys_of(*itertools.islice(numbers, 20))
        for number, key in enumerate(mine):
            if number == chance.randrange(20):
                victim.kill()
            assert write(survivor, key, chance.choice(same)) == [True, True]
        victim.kill()
        assert read(survivor, *mine) == set(mine)
    whole_bytes = BlockFormat("=", SMALL).file_bytes
    # A block has its name only once it is complete.
    assert {path.stat().st_size for path in files(tmp_path)} == {whole_bytes}
    assert len(temporaries(tmp_path / "kv")) <= by_size(quick=2, thorough=60)
    assert survivor.stats().corrupt_blocks == 0


def test_a_host_that_is_stopped_holds_nobody_up(host) -> None:
    stopped, other = host(max_bytes=room_for(50)), host(max_bytes=room_for(50))
    keys = keys_of(*range(by_size(120, 400)))
    stopped.begin("write_singly", keys, blocks_of(keys))
    stopped.stop()
    for number in range(1000, 1100):
        assert write(other, *keys_of(number)) == [True]
    assert read(other, *keys_of(1099)) == set(keys_of(1099))
    stopped.go_on()
    assert stopped.answer().count(False) <= 1, "what it was writing is older than all others that fit"
