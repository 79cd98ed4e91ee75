# SPDX-License-Identifier: Apache-2.0
"""Files that a clock has dated which is wrong by a day: the order of writing stays."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.sizes import by_size
from tests.tiering.stores.fs.host import Host
from tests.tiering.stores.rig import SMALL, files, here, path_of, read, room_for, write
from tests.users import GROUP, NOBODY, SOMEBODY, as_user, needs_root

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.fs import FileSystemStore

DAY_S = 86_400


def fill(store: FileSystemStore, numbers: Sequence[int]) -> None:
    for number in numbers:
        assert write(store, *keys_of(number)) == [True]


@pytest.mark.parametrize("days", [-1, 1, 400])
def test_blocks_that_are_written_after_a_clock_was_wrong_stay(open_store, tmp_path: Path, days: int) -> None:
    """Whether the clock that dated the blocks before was behind or ahead."""
    store = open_store(max_bytes=room_for(40))
    fill(store, range(80))
    for path in files(tmp_path):
        os.utime(path, (time.time() + days * DAY_S,) * 2)
    for first in range(100, by_size(240, 400), 20):
        fill(store, range(first, first + 20))
        if first > 100:  # unknown until the first listing
            assert here(store, *keys_of(*range(first, first + 20))) == set(keys_of(*range(first, first + 20)))
    assert not here(store, *keys_of(*range(80))), "the oldest went first"


@needs_root
def test_a_member_of_the_group_makes_no_block_older_by_a_use(public: Path) -> None:
    """A clock was ahead, and only its owner may give a file a time other than the current one."""
    root = public / "kv"
    root.mkdir()
    os.chown(root, -1, GROUP)
    root.chmod(0o2770)

    def open_shared() -> FileSystemStore:
        return FileSystemStore(root, SMALL, max_bytes=room_for(8), mode="group")

    def write_ahead() -> None:
        fill(open_shared(), range(8))
        for number, path in enumerate(sorted(files(root))):
            os.utime(path, (time.time() + DAY_S + number,) * 2)

    def use() -> list[tuple[float, float]]:
        store, keys = open_shared(), keys_of(*range(8))
        fill(store, range(10, 14))
        before = {key: (root / path_of(store, key)).stat().st_mtime for key in here(store, *keys)}
        assert before
        for key in before:
            assert read(store, key) == block_of(key, SMALL)
            write(store, key)
        return [(time_before, (root / path_of(store, key)).stat().st_mtime) for key, time_before in before.items()]

    as_user(NOBODY, write_ahead, gid=GROUP, umask=0o077)
    for time_before, time_after in as_user(SOMEBODY, use, gid=GROUP, umask=0o077):
        assert time_after >= time_before


def test_a_mount_that_permits_no_dates_still_takes_blocks(
    open_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock was ahead, and the files of some mounts have the dates that the server gives them."""

    def utime(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    store = open_store(max_bytes=room_for(40))
    fill(store, range(80))
    for path in files(tmp_path):
        os.utime(path, (time.time() + DAY_S,) * 2)
    monkeypatch.setattr(os, "utime", utime)
    fill(store, range(100, 200))


def test_a_used_block_stays_longer_whatever_the_clock_says(open_store, tmp_path: Path) -> None:
    store, keys = open_store(max_bytes=room_for(8)), keys_of(*range(8))
    fill(store, range(8))
    for number, key in enumerate(keys):
        os.utime(tmp_path / "kv" / path_of(store, key), (time.time() + DAY_S + number,) * 2)
    fill(store, [10])
    assert read(store, keys[1]) == block_of(keys[1], SMALL), "the older half"
    fill(store, range(11, 15))
    assert keys[1] in here(store, *keys)
    assert keys[2] not in here(store, *keys)


@pytest.mark.parametrize("days", [1, 5000])
def test_hosts_whose_clocks_are_far_apart_starve_nobody(tmp_path: Path, days: int) -> None:
    """This applies where clients set the times of files."""
    hosts = [
        Host(tmp_path / "kv", SMALL, skew_s=skew_s, stamps_files=True, max_bytes=room_for(60))
        for skew_s in (-days * DAY_S, 0, days * DAY_S)
    ]
    try:
        numbers, last = itertools.count(), list[list[OffloadKey]]()
        for _ in range(60):
            last = last[-5:] + [keys_of(*itertools.islice(numbers, 2)) for _ in hosts]
            for host, keys in zip(hosts, last[-3:], strict=True):
                blocks = [memoryview(block_of(key, SMALL)) for key in keys]
                host.write(keys, blocks)
        for keys in last:  # two rounds: 12 of the 60 blocks that there is room for
            assert hosts[0].contains(keys) == [True, True]
    finally:
        for host in hosts:
            host.close()
