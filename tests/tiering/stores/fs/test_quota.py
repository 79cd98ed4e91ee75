# SPDX-License-Identifier: Apache-2.0
"""FileSystemStore's quota: over directories, namespaces, stores, restarts, crashes and full disks."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.files import disk_bytes
from tests.sizes import by_size
from tests.tiering.stores.rig import KEY, SMALL, files, here, path_of, read, room_for, write

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.fs import FileSystemStore, quota
from kvoffload.tiering.stores.fs.format import MARKER, NUM_FANS, TEMPORARY_PREFIX
from kvoffload.tiering.stores.fs.quota import time_at
from kvoffload.tiering.stores.root import CONTROL_DIR, Access

TINY = 64
HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize(("num_stores", "num_namespaces"), by_size([(2, 3)], [(1, 1), (5, 1), (2, 3)]))
def test_a_large_quota_holds_within_a_tenth_and_the_oldest_go(
    open_store, tmp_path: Path, num_stores: int, num_namespaces: int
) -> None:
    max_blocks = by_size(3, 16) * NUM_FANS
    stores = [
        open_store(TINY, f"n{number % num_namespaces}", room_for(max_blocks, TINY))
        for number in range(num_stores * num_namespaces)
    ]
    numbers, turns = itertools.count(), itertools.cycle(stores)
    written = [(next(turns), keys_of(*itertools.islice(numbers, 64))) for _ in range(5 * max_blocks // 2 // 64)]
    for batch, (store, keys) in enumerate(written):
        assert write(store, *keys, size=TINY) == [True] * 64
        if batch >= len(written) // 2 and batch % 20 == 0:
            assert 0.9 * room_for(max_blocks, TINY) <= disk_bytes(tmp_path) <= 1.1 * room_for(max_blocks, TINY)
    newest, oldest = written[-max_blocks // 128 :], written[: max_blocks // 64]
    kept = sum(len(here(store, *keys)) for store, keys in newest)
    assert kept >= 0.99 * 64 * len(newest), "half of what fits, the newest, is there"
    assert sum(len(here(store, *keys)) for store, keys in oldest) < 0.05 * 64 * len(oldest), (
        "and hardly any of the first"
    )


def test_one_write_lists_all_the_small_directories_in_which_it_wrote(open_store, tmp_path: Path) -> None:
    max_blocks, numbers = 16 * NUM_FANS, itertools.count()
    write(open_store(TINY), *keys_of(*itertools.islice(numbers, max_blocks)), size=TINY)
    store = open_store(TINY, max_bytes=room_for(max_blocks, TINY))
    for _ in range(32):
        write(store, *keys_of(*itertools.islice(numbers, 64)), size=TINY)
    assert disk_bytes(tmp_path) <= room_for(max_blocks, TINY)


@pytest.mark.parametrize("max_blocks", by_size([1, 2, 5, 12], [1, 2, 5, 40]))
def test_a_quota_of_few_blocks_is_kept_over_all_directories(open_store, tmp_path: Path, max_blocks: int) -> None:
    stores, numbers = [open_store(max_bytes=room_for(max_blocks)) for _ in range(3)], itertools.count()
    for batch in range(3 * max_blocks):
        keys = keys_of(*itertools.islice(numbers, 1 + batch % 2 * (max_blocks > 1)))
        answers = write(stores[batch % 3], *keys)  # False for one that is as old as others by its file's time
        assert here(stores[0], *keys) == {key for key, answer in zip(keys, answers, strict=True) if answer}
        assert disk_bytes(tmp_path) <= 1.1 * room_for(max_blocks)
        assert batch < max_blocks or disk_bytes(tmp_path) >= 0.9 * room_for(max_blocks)


def test_listings_cost_a_bounded_number_of_files_for_each_that_is_written(open_store, monkeypatch) -> None:
    """However many files there are, and however many stores write."""
    stores = [open_store(TINY, max_bytes=room_for(20 * NUM_FANS, TINY)) for _ in range(4)]
    real, seen = quota.seen_in, []
    monkeypatch.setattr(quota, "seen_in", lambda *args: seen.append(real(*args)) or seen[-1])
    numbers, count = itertools.count(), by_size(4_000, 8_000)
    for batch in range(count // 50):
        write(stores[batch % 4], *keys_of(*itertools.islice(numbers, 50)), size=TINY)
    assert count < sum(map(len, seen)) <= 15 * count


def test_a_small_quota_lists_the_directories_that_exist(open_store, tmp_path: Path, monkeypatch) -> None:
    store, real, seen = open_store(max_bytes=room_for(4)), quota.seen_in, list[str]()
    monkeypatch.setattr(quota, "seen_in", lambda *args: seen.append(args[1]) or real(*args))
    for number in range(10):
        write(store, *keys_of(number))
    directories = {f"=/{path.name}" for path in (tmp_path / "kv" / "=").iterdir()}
    assert set(seen) == directories and len(seen) <= 10 * len(directories)


def test_of_files_with_one_time_those_just_written_stay(open_store, tmp_path: Path, monkeypatch) -> None:
    """File systems count time in steps of milliseconds to seconds."""
    store, real = open_store(max_bytes=room_for(4)), os.writev

    def at_one_time(fd: int, buffers: list[memoryview]) -> int:
        moved = real(fd, buffers)
        os.utime(fd, ns=(10**18, 10**18))
        return moved

    monkeypatch.setattr(os, "writev", at_one_time)
    for first in range(0, 40, 2):
        assert write(store, *keys_of(first, first + 1)) == [True, True]
        assert here(store, *keys_of(first, first + 1)) == set(keys_of(first, first + 1))
    assert len(files(tmp_path)) == 4


def test_what_is_used_while_there_is_room_is_no_younger_for_it(open_store, tmp_path: Path) -> None:
    store, keys = open_store(max_bytes=room_for(4)), keys_of(*range(4))
    for seconds, key in enumerate(keys):
        write(store, key)
        age(tmp_path / "kv" / path_of(store, key), (100 - seconds) * 10**9)
    read(store, keys[0])
    store.touch(keys)
    write(store, keys[0])
    write(store, *keys_of(10, 11))
    assert here(store, *keys) == set(keys[2:])
    assert store.take_lost() == dict.fromkeys(keys[:2], "evicted")
    assert store.stats().evicted_blocks == 2


def test_an_old_block_that_is_used_is_deleted_later(open_store, tmp_path: Path) -> None:
    store, keys = open_store(max_bytes=room_for(8)), keys_of(*range(8))

    def times() -> list[int]:
        paths = [tmp_path / "kv" / path_of(store, key) for key in keys]
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]

    for seconds, key in enumerate(keys):
        write(store, key)
        age(tmp_path / "kv" / path_of(store, key), (100 - seconds) * 10**9)
    write(store, *keys_of(10))
    before = times()
    read(store, keys[1])
    read(store, keys[6])
    assert write(store, keys[2], keys[7]) == [True, True]
    assert store.contains(keys) == [False] + [True] * 7
    assert [index for index, time_ns in enumerate(times()) if time_ns != before[index]] == [1, 2], "the older half"
    write(store, *keys_of(11, 12))
    assert here(store, *keys) == {keys[1], keys[2], *keys[5:]}
    assert read(open_store(), keys[5]) == block_of(keys[5], SMALL)
    assert times()[5] == before[5], "who deletes nothing does not know what is old"


def age(path: Path, by_ns: int) -> None:
    written_ns = path.stat().st_mtime_ns - by_ns
    os.utime(path, ns=(written_ns, written_ns))


def test_a_smaller_quota_is_kept_from_the_next_write_on(open_store, tmp_path: Path) -> None:
    write(open_store(), *keys_of(*range(10)))
    write(open_store(max_bytes=room_for(3)), *keys_of(20))
    assert len(files(tmp_path)) == 3


def test_a_batch_larger_than_the_quota_is_answered_for_what_is_left_of_it(open_store, tmp_path: Path) -> None:
    store, keys = open_store(max_bytes=room_for(4)), keys_of(*range(10))
    write(store, *keys[:2])
    answers = write(store, *keys)
    assert here(store, *keys) == {key for key, answer in zip(keys, answers, strict=True) if answer}
    assert sum(answers) == 4 == len(files(tmp_path))


def test_all_namespaces_share_the_quota(open_store, tmp_path: Path) -> None:
    old, new = open_store(namespace="old"), open_store(namespace="new", max_bytes=room_for(4))
    write(old, *keys_of(0, 1, 2))
    for path in files(tmp_path):
        age(path, 10**9)
    write(new, *keys_of(0, 1, 2))
    assert here(new, *keys_of(0, 1, 2)) == set(keys_of(0, 1, 2))
    assert len(files(tmp_path)) == 4
    assert new.take_lost() == {}, "blocks of another namespace are not announced"
    assert new.stats().evicted_blocks == 2


def test_a_bad_block_is_corrupt_and_not_evicted(open_store, tmp_path: Path) -> None:
    store, keys = open_store(max_bytes=room_for(3)), keys_of(0, 1, 2)
    write(store, *keys)
    for path in files(tmp_path):
        path.write_bytes(b"bad")
    assert [read(store, key) for key in keys] == [None] * 3
    assert write(store, *keys) == [True] * 3
    assert store.take_lost() == dict.fromkeys(keys, "corrupt")
    assert store.stats().evicted_blocks == 0


def test_many_threads_under_a_tight_quota(open_store, tmp_path: Path) -> None:
    store, wrong, start = open_store(max_bytes=room_for(8)), [], threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait()
        for number in range(60):
            chosen = keys_of((7 * number + seed) % 24, (5 * number + seed) % 24)
            write(store, *chosen)
            wrong.extend(key for key in chosen if read(store, key) not in (None, block_of(key, SMALL)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.stats().corrupt_blocks == 0, "a file that is deleted while it is read is no bad file"
    assert disk_bytes(tmp_path) <= room_for(8)


def test_a_file_that_cannot_be_deleted_is_passed_over(open_store, tmp_path: Path, monkeypatch) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, *keys_of(0, 1, 2, 3))
    fatal = files(tmp_path)[0]
    age(fatal, 10**9)
    real = os.unlink

    def unlink(path: str, **options: int | None) -> None:
        if Path(path).name == fatal.name:
            raise OSError(errno.EIO, "Input/output error")
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    assert write(store, *keys_of(10)) == [True]
    assert fatal in files(tmp_path)
    assert len(files(tmp_path)) == 4


def test_a_neighbour_that_deletes_the_same_files_is_no_trouble(open_store, tmp_path: Path, monkeypatch) -> None:
    """Two stores list the same fan, and both delete the excess files."""
    store = open_store(max_bytes=room_for(4))
    write(store, *keys_of(0, 1, 2, 3))
    real = quota.delete_oldest

    def delete_twice(*args: object) -> list[quota.FileSeen]:
        real(*args)
        return real(*args)

    monkeypatch.setattr(quota, "delete_oldest", delete_twice)
    assert write(store, *keys_of(10, 11)) == [True, True]
    assert len(files(tmp_path)) == 4
    assert len(store.take_lost()) == 2


def leave_behind(store: FileSystemStore, root: Path, number: int, age_ns: int) -> Path:
    """Create the file of a writer that was killed some time ago, by the clock of the file system."""
    (key,) = keys_of(number)
    path = root / path_of(store, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    left = path.parent / f"{TEMPORARY_PREFIX}0123456789abcdef-{number}"
    left.write_bytes(b"half")
    age(left, age_ns)
    return left


def test_nothing_is_seen_in_a_directory_that_is_not_ours(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, KEY)
    (fan,) = {path.parent for path in files(tmp_path)}
    directory = str(fan.relative_to(tmp_path))
    ours, theirs = Access(), Access(owner=fan.stat().st_uid + 1)
    assert [len(quota.seen_in(str(tmp_path), directory, access)) for access in (None, ours, theirs)] == [1, 1, 0]


def test_what_dead_writers_left_goes_and_what_is_being_written_stays(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(4))
    dead = [leave_behind(store, tmp_path / "kv", number, 2 * HOUR_NS) for number in range(5)]
    alive = [leave_behind(store, tmp_path / "kv", 10 + number, HOUR_NS // 2) for number in range(5)]
    open_store()
    assert all(path.exists() for path in dead + alive), "to open a store changes nothing"
    write(store, KEY)
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in alive)


def test_without_a_quota_a_scan_removes_what_dead_writers_left(open_store, tmp_path: Path) -> None:
    store = open_store()
    write(store, *keys_of(*range(8)))
    dead = [leave_behind(store, tmp_path / "kv", number, 2 * HOUR_NS) for number in range(5)]
    alive = [leave_behind(store, tmp_path / "kv", 10 + number, HOUR_NS // 2) for number in range(5)]
    assert sorted(key for batch in store.scan() for key in batch) == sorted(keys_of(*range(8)))
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in alive)


def test_the_file_system_says_what_time_it_is(open_store, tmp_path: Path, monkeypatch) -> None:
    store = open_store(max_bytes=room_for(4))
    now_ns = (tmp_path / "kv" / CONTROL_DIR / MARKER).stat().st_mtime_ns
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    told = time_at(str(tmp_path / "kv"))
    assert told is not None
    assert 0 <= told - now_ns < HOUR_NS
    assert [path.name for path in (tmp_path / "kv" / CONTROL_DIR).iterdir()] == [MARKER]
    assert time_at(str(tmp_path / "nowhere")) is None
    store.close()


def test_a_scan_finds_all_names_without_a_look_at_a_block(open_store, monkeypatch) -> None:
    write(open_store(namespace="mine"), *keys_of(*range(20)))
    write(open_store(namespace="other"), *keys_of(30))
    again, real = open_store(namespace="mine"), os.lstat

    def no_blocks(path: str, **options: int | None) -> os.stat_result:
        assert not str(path).endswith(".kvb")
        return real(path, **options)

    monkeypatch.setattr(os, "lstat", no_blocks)
    assert sorted(key for batch in again.scan() for key in batch) == sorted(keys_of(*range(20)))


def test_writing_and_reading_go_on_while_a_scan_rests(open_store) -> None:
    write(open_store(), *keys_of(*range(40)))
    store = open_store(max_bytes=room_for(60))
    scan = store.scan()
    found = set(next(iter(scan)))
    assert read(store, keys_of(5)[0]) == block_of(keys_of(5)[0], SMALL)
    assert write(store, *keys_of(50, 51)) == [True, True]
    store.discard(keys_of(7))
    for batch in scan:
        found |= set(batch)
    assert set(keys_of(*range(40))) - set(keys_of(7)) <= found <= set(keys_of(*range(40), 50, 51))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "kv"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield path
    subprocess.run(["umount", "-R", "-l", path], check=True)


class TestFullDisks:
    SIZE = 64 << 10

    @pytest.mark.parametrize("max_bytes", [None, 100 << 20], ids=["no quota", "below the quota"])
    def test_a_full_disk_makes_room_and_goes_on(self, small_disk: Path, open_store, max_bytes: int | None) -> None:
        store = open_store(self.SIZE, max_bytes=max_bytes)
        keys = keys_of(*range(200))
        for start in range(0, 200, 8):
            batch = keys[start : start + 8]
            assert write(store, *batch, size=self.SIZE) == [True] * 8
            assert here(store, *batch) == set(batch)
        assert 30 < len(files(small_disk)) < 64
        assert store.stats().evicted_blocks == 200 - len(files(small_disk)) == len(store.take_lost())
        assert not list(small_disk.rglob(TEMPORARY_PREFIX + "*"))

    def test_bytes_of_others_count_too(self, small_disk: Path, open_store) -> None:
        store = open_store(self.SIZE, max_bytes=100 << 20)
        write(store, *keys_of(*range(20)), size=self.SIZE)
        (small_disk / "somebody else's").write_bytes(bytes(2 << 20))
        for number in range(20, 60):
            assert write(store, *keys_of(number), size=self.SIZE) == [True]
        assert read(store, keys_of(59)[0], self.SIZE) == block_of(keys_of(59)[0], self.SIZE)

    def test_a_disk_that_is_full_of_others_files_fails_in_words(self, small_disk: Path, open_store) -> None:
        store = open_store(self.SIZE)
        with pytest.raises(OSError):
            (small_disk / "somebody else's").write_bytes(bytes(5 << 20))
        with pytest.raises(StoreError, match="No space left"):
            write(store, KEY, size=self.SIZE)
        (small_disk / "somebody else's").unlink()
        assert write(store, KEY, size=self.SIZE) == [True]

    def test_many_threads_on_a_full_disk(self, small_disk: Path, open_store) -> None:
        store, wrong = open_store(self.SIZE, max_bytes=100 << 20), []

        def work(offset: int) -> None:
            for number in range(offset, offset + 40):
                try:
                    write(store, *keys_of(number), size=self.SIZE)
                except StoreError as exc:
                    if "No space left" not in str(exc):
                        wrong.append(exc)

        threads = [threading.Thread(target=work, args=(100 * index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert write(store, *keys_of(999), size=self.SIZE) == [True]
        assert not list(small_disk.rglob(TEMPORARY_PREFIX + "*"))

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
    @pytest.mark.parametrize("call", ["open", "writev", "close"])
    def test_wherever_it_shows(self, open_store, tmp_path: Path, monkeypatch, number: int, call: str) -> None:
        """A network mount may report only at the end that the server has no room. One deletion is enough here."""
        store = open_store()
        write(store, *keys_of(*range(10)))
        real: Callable[..., object] = getattr(os, call)

        def full(file: str | int, *args: object) -> object:
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
            is_full = TEMPORARY_PREFIX in path and CONTROL_DIR not in path and len(files(tmp_path)) == 10
            outcome = real(file, *args) if call == "close" or not is_full else None
            if is_full:
                raise OSError(number, os.strerror(number))
            return outcome

        monkeypatch.setattr(os, call, full)
        assert write(store, *keys_of(99)) == [True]
        assert len(files(tmp_path)) == 10
        assert here(store, *keys_of(99)) == set(keys_of(99))
        assert not list(tmp_path.rglob(TEMPORARY_PREFIX + "*"))
