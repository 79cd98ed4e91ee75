# SPDX-License-Identifier: Apache-2.0
"""Test several disks as one store: the places of blocks, and the cost of one bad disk."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.metrics import METRICS
from kvoffload.testing.clock import ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.testing.stores import FaultyStore, GatedStore
from kvoffload.tiering.options import parse_tier, parse_tiers
from kvoffload.tiering.stores import local
from kvoffload.tiering.stores import striped as striped_module
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.options import DiskOptions
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.striped import Striped
from kvoffload.tiering.tier import StoreTier

SIZE = 4096
EIO = OSError(errno.EIO, "the disk does not answer")


def write(store: BlockStore, *keys: OffloadKey) -> list[bool]:
    return store.write(keys, [memoryview(block_of(key, SIZE)) for key in keys])


def read(store: BlockStore, *keys: OffloadKey) -> list[bool]:
    """Which blocks are read. None of them is another."""
    targets = [bytearray(SIZE) for _ in keys]
    answers = store.read_into(keys, [memoryview(target) for target in targets])
    for key, target, is_good in zip(keys, targets, answers, strict=True):
        assert not is_good or bytes(target) == block_of(key, SIZE)
    return answers


class Rig:
    """Two disks that can fail and hang."""

    def __init__(self, root: Path, threads: int | None = None) -> None:
        self.disks = [DiskStore(root / name, SIZE, max_bytes=1 << 22) for name in "ab"]
        self.gates = [GatedStore(disk) for disk in self.disks]
        self.faults = [FaultyStore(gate) for gate in self.gates]
        self.clock = ManualClock()
        self.store = Striped(self.faults, threads, self.clock, paths=("/a", "/b"), missing=("/c",))

    def on(self, disk: int, *keys: OffloadKey) -> list[bool]:
        return self.disks[disk].contains(keys)

    def fill(self, count: int = 20) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Write blocks in calls of one block, and return the blocks of each disk."""
        keys = keys_of(*range(count))
        for key in keys:
            assert write(self.store, key) == [True]
        return tuple([key for key in keys if disk.contains([key]) == [True]] for disk in self.disks)  # type: ignore[return-value]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for gate in rig.gates:
        gate.open_gate()
    rig.store.close()


def test_blocks_are_shared_out_each_to_one_disk(rig: Rig) -> None:
    first, second = rig.fill()
    assert sorted([*first, *second]) == sorted(keys_of(*range(20)))
    assert len(first) == len(second) == 10
    assert write(rig.store, *first) == [True] * 10
    assert rig.on(1, *first) == [False] * 10, "what a disk has stays there"
    assert len(rig.store.resident or ()) == 20
    assert rig.store.stats().used_bytes == 20 * SIZE
    assert rig.store.requests_in_flight == 9


@pytest.mark.parametrize(
    ("used", "shares"), [((0, 0), (0.25, 0.75)), ((100, 0), (0.02, 0.98)), ((100, 300), (0.25, 0.75))]
)
def test_new_blocks_go_by_free_room_and_by_size_where_all_are_full(
    used: tuple[int, int], shares: tuple[float, float]
) -> None:
    stores = [MemoryStore(SIZE, count * SIZE) for count in (100, 300)]
    for store, count in zip(stores, used, strict=True):
        write(store, *keys_of(*range(1000, 1000 + count)))
    striped, counts = Striped(stores), [0, 0]
    for key in keys_of(*range(40)):
        before = [store.contains([key]) for store in stores]
        assert before == [[False], [False]]
        assert write(striped, key) == [True]
        counts = [count + sum(store.contains([key])) for count, store in zip(counts, stores, strict=True)]
    assert counts == [pytest.approx(40 * share, abs=2) for share in shares]


def test_a_disk_that_fails_to_write_costs_nothing(rig: Rig) -> None:
    rig.faults[0].broken["write"] = EIO
    first, second = rig.fill()
    assert (len(first), len(second)) == (0, 20)
    assert len([call for call, _ in rig.faults[0].calls if call == "write"]) == 3, "then it is out"
    rig.faults[0].broken.clear()
    rig.clock.advance(1.5)
    later = keys_of(*range(100, 120))
    for key in later:
        assert write(rig.store, key) == [True]
    assert any(rig.on(0, *later)), "it was tried again"


def test_a_disk_that_fails_to_read_costs_its_blocks(rig: Rig) -> None:
    first, second = rig.fill()
    rig.faults[0].broken["read_into"] = EIO
    for key in first[:3]:
        assert read(rig.store, key, second[0]) == [False, True]
    resident = rig.store.resident
    assert resident is not None
    assert [key in resident for key in first] == [False] * len(first)
    assert [key in resident for key in second] == [True] * len(second)
    assert sorted(resident) == sorted(second)
    assert len(resident) == len(second)
    assert rig.store.contains([*first, *second]) == [False] * len(first) + [True] * len(second)
    assert read(rig.store, *first) == [False] * len(first)
    assert write(rig.store, first[0]) == [True]
    rig.clock.advance(1.5)
    assert first[1] in resident, "it is tried again now"
    assert read(rig.store, first[1]) == [False]
    assert first[1] not in resident
    rig.faults[0].broken.clear()
    rig.clock.advance(2.5)
    assert read(rig.store, *first) == [True] * len(first)
    assert all(key in resident for key in first)


def test_each_disk_counts_for_itself(rig: Rig) -> None:
    first, second = rig.fill()
    one, other, missing = rig.store.stats().disks
    assert (one.path, one.used_bytes, one.is_out, one.failed_calls) == ("/a", len(first) * SIZE, False, 0)
    assert (other.path, other.used_bytes, other.is_out) == ("/b", len(second) * SIZE, False)
    assert (missing.path, missing.used_bytes, missing.is_out) == ("/c", 0, True)
    rig.faults[0].broken["read_into"] = EIO
    for key in first[:3]:
        read(rig.store, key)
    assert [(disk.is_out, disk.failed_calls) for disk in rig.store.stats().disks] == [(True, 3), (False, 0), (True, 0)]
    rig.clock.advance(1.5)
    assert rig.store.stats().disks[0].is_out, "a disk that is to be tried again is still out"
    rig.faults[0].broken.clear()
    assert read(rig.store, first[0]) == [True]
    assert not rig.store.stats().disks[0].is_out


def test_a_tier_reports_its_disks(rig: Rig, tmp_path: Path) -> None:
    tier = StoreTier(memoryview(bytearray(SIZE)).cast("B", (1, SIZE)), "disk", rig.store)
    stats = tier.get_stats()
    assert {sample: value for sample, value in stats.items() if sample[0] == "tier_disk_out"} == {
        ("tier_disk_out", "disk", "/a"): 0,
        ("tier_disk_out", "disk", "/b"): 0,
        ("tier_disk_out", "disk", "/c"): 1,
    }
    assert stats["tier_disk_bytes", "disk", "/a"] == stats["tier_disk_failures", "disk", "/a"] == 0
    assert all(METRICS[sample[0]].fits(sample) for sample in stats)
    tier.shutdown()


def test_if_all_disks_are_out_the_store_fails(rig: Rig) -> None:
    first, second = rig.fill()
    for fault in rig.faults:
        fault.broken.update(read_into=EIO, write=StoreError("the disk is gone"))
    for _ in range(2):
        assert read(rig.store, first[0], second[0]) == [False, False]
        assert write(rig.store, *keys_of(100)) == [False]
    with pytest.raises(StoreError, match=r"All 2 disks are out\. the disk does not answer"):
        read(rig.store, first[0], second[0])
    with pytest.raises(StoreError, match=r"All 2 disks are out.*the disk is gone"):
        write(rig.store, *keys_of(100))
    with pytest.raises(StoreError, match="All 2 disks are out"):  # or a tier's probe would find it healthy
        rig.store.contains(keys_of(100))
    assert read(rig.store) == []


def test_a_disk_that_was_busy_for_long_does_not_get_all_that_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striped_module, "_MOST_CREDIT", 4)
    rig = Rig(tmp_path, threads=3)
    rig.gates[0].close_gate("write")
    busy = threading.Thread(target=write, args=(rig.store, *keys_of(1000)), daemon=True)
    busy.start()
    rig.gates[0].wait_for_arrivals(1)
    first, second = rig.fill(60)
    assert (len(first), len(second)) == (0, 60)
    rig.gates[0].open_gate()
    busy.join(60)
    later = keys_of(*range(100, 120))
    for key in later:
        assert write(rig.store, key) == [True]
    assert 10 < sum(rig.on(0, *later)) < 18
    rig.store.close()


@pytest.mark.parametrize("call", ["read_into", "write"])
def test_a_disk_that_hangs_keeps_less_than_half_of_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Calls for other disks are answered, and lookups treat its blocks as absent until its calls end."""
    monkeypatch.setattr(striped_module, "_STALL_S", 0.05)
    rig = Rig(tmp_path, threads=5)
    first, second = rig.fill()
    new = keys_of(*range(100, 140))
    rig.gates[0].close_gate(call)
    ends, num_ends = list[list[bool]](), threading.Semaphore(0)

    def end(answers: list[bool]) -> None:
        ends.append(answers)
        num_ends.release()

    works = (
        [lambda key=key: end(read(rig.store, key, second[0])) for key in first[:5]]
        if call == "read_into"
        else [lambda key=key: end(write(rig.store, key)) for key in new[:5]]
    )
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    rig.gates[0].wait_for_arrivals(2)
    for _ in range(3):
        assert num_ends.acquire(timeout=60)
    rig.clock.advance(1.0)
    for _ in range(3):  # more do not come to it
        assert read(rig.store, *second[:2]) == [True, True]
        key = new.pop()
        assert write(rig.store, key) == [True]
        assert rig.on(call == "write", key) == [True] or call == "read_into"
    resident = rig.store.resident
    assert resident is not None
    assert [key in resident for key in first[:2]] == [call == "write"] * 2
    assert rig.gates[0]._arrived == 2
    rig.gates[0].open_gate()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(ends) == 5
    assert all(each[-1] for each in ends)
    assert all(key in resident for key in first)
    assert read(rig.store, *first) == [True] * len(first)
    rig.store.close()


def test_a_disk_that_hangs_keeps_no_other_from_being_closed(rig: Rig) -> None:
    closed, go_on = list[str](), threading.Event()
    rig.faults[0].close = lambda: go_on.wait(60) and None  # type: ignore[method-assign]
    close, is_closed = rig.faults[1].close, threading.Event()

    def close_other() -> None:
        close()
        is_closed.set()

    rig.faults[1].close = close_other  # type: ignore[method-assign]
    closing = threading.Thread(target=rig.store.close)
    closing.start()
    assert is_closed.wait(60)
    go_on.set()
    closing.join()
    rig.disks[0].close()
    assert closed == []


def test_what_another_disk_still_has_is_not_lost(rig: Rig) -> None:
    first, second = rig.fill()
    assert write(rig.disks[1], first[0]) == [True]
    rig.disks[0].take_lost = lambda: {first[0]: "evicted", first[1]: "evicted"}  # type: ignore[method-assign]
    rig.disks[0].discard(first[:2])
    assert rig.store.take_lost() == {first[1]: "evicted"}
    assert sorted(key for keys in rig.store.scan() for key in keys) == sorted({*first, *second} - {first[1]})


def test_a_disk_that_hangs_while_it_is_scanned_keeps_no_other_from_being_scanned(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rig.fill()
    is_there = False

    def scan(real: Callable[[], Iterator[Sequence[OffloadKey]]] = rig.disks[0].scan) -> Iterator[Sequence[OffloadKey]]:
        while not is_there:
            yield ()
        yield from real()

    monkeypatch.setattr(rig.faults[0], "scan", scan)
    found = rig.store.scan()
    assert sorted(key for keys in itertools.takewhile(bool, found) for key in keys) == sorted(second)
    assert next(found) == ()
    is_there = True
    assert sorted(key for keys in found for key in keys) == sorted(first)


def test_a_disk_that_is_being_loaded_says_so(rig: Rig) -> None:
    upkeep = rig.disks[0]._upkeep
    with upkeep.lock:  # without which nothing is loaded
        upkeep.is_loaded.clear()
        assert next(rig.disks[0].scan()) == ()


def test_a_copy_that_is_bad_is_read_from_the_other_disk(rig: Rig) -> None:
    first, _ = rig.fill()
    assert write(rig.disks[1], first[0]) == [True]
    rig.faults[0].torn.add(first[0])
    rig.faults[1].torn.add(first[0])
    assert read(rig.store, first[0]) == [False]
    rig.faults[1].torn.clear()
    assert read(rig.store, first[0]) == [True]


# -------------------------------------------------------------------------------------------------------- options


def tier(paths: Sequence[Path], **options: object) -> DiskOptions:
    parsed = parse_tier({"type": "disk", "path": [str(path) for path in paths], "max_bytes": "8MiB"} | options, SIZE)
    assert isinstance(parsed, DiskOptions)
    return parsed


def test_a_restart_may_have_the_disks_in_another_order_and_one_more_or_less(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    keys = keys_of(*range(40))
    store = tier([a, b]).open_store(SIZE, "ns")
    for key in keys:
        assert write(store, key) == [True]
    store.close()
    for paths in ([b, a], [c, a, b]):
        store = tier(paths).open_store(SIZE, "ns")
        assert read(store, *keys) == [True] * 40
        store.close()
    store = tier([b]).open_store(SIZE, "ns")
    found = read(store, *keys)
    assert 15 <= sum(found) <= 25
    assert [key in (store.resident or ()) for key in keys] == found
    assert write(store, *keys) == [True] * 40
    store.close()


@pytest.mark.parametrize(
    ("max_bytes", "each"),
    [("8MiB", [4 << 20, 4 << 20]), (["1MiB", "2MiB"], ["1MiB", "2MiB"]), (None, [None, None])],
)
def test_a_quota_is_for_all_disks_or_for_each(tmp_path: Path, max_bytes: object, each: list[object]) -> None:
    options = tier([tmp_path / "a", tmp_path / "b"], max_bytes=max_bytes)
    assert [disk.max_bytes for disk in options.each_disk()] == each
    assert [disk.directories for disk in options.each_disk()] == [(f"{tmp_path}/a",), (f"{tmp_path}/b",)]
    assert f"{tmp_path}/a, {tmp_path}/b" in options.describe(1 << 30)


@pytest.mark.parametrize("error", [None, errno.EACCES, errno.EIO, errno.ENODATA, errno.ENOSPC])
def test_a_disk_that_is_broken_at_the_start_is_left_out_and_a_mistake_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int | None
) -> None:
    options = tier([tmp_path / "a", tmp_path / "b"])
    make: Callable[..., None] = DiskStore.__init__

    def fail(self: DiskStore, root: str, *args: object, **rest: object) -> None:
        if error is not None and root.endswith("/a"):
            raise ConfigError(f"{root} cannot be opened.") from OSError(error, "broken")
        make(self, root, *args, **rest)

    monkeypatch.setattr(DiskStore, "__init__", fail)
    if error == errno.EACCES:
        with pytest.raises(ConfigError, match="/a cannot be opened"):
            options.open_store(SIZE, "ns")
        return
    store = options.open_store(SIZE, "ns")
    assert write(store, *keys_of(1, 2)) == [True, True]
    assert read(store, *keys_of(1, 2)) == [True, True]
    assert ("continues without" in caplog.text) == (error is not None)
    store.close()


@pytest.mark.long
@pytest.mark.parametrize("others", [["b"], []])
def test_a_disk_that_hangs_at_the_start_is_left_out_and_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, others: list[str]
) -> None:
    monkeypatch.setattr(local, "_OPEN_S", 2.0)
    options = tier([tmp_path / name for name in ("a", *others)], timeout_s=1.0)
    may_open, is_closed = threading.Event(), threading.Event()
    make: Callable[..., None] = DiskStore.__init__
    close: Callable[[DiskStore], None] = DiskStore.close

    def hang(self: DiskStore, root: str, *args: object, **rest: object) -> None:
        if root.endswith("/a"):
            may_open.wait()
        make(self, root, *args, **rest)

    def note(self: DiskStore) -> None:
        close(self)
        is_closed.set()

    monkeypatch.setattr(DiskStore, "__init__", hang)
    if others:
        store = options.open_store(SIZE, "ns")
        assert "a of the 'disk' tier did not open within 2 s" in caplog.text
        assert [disk.is_out for disk in store.stats().disks] == [False, True]
        assert write(store, *keys_of(1, 2)) == [True, True]
        store.close()
    else:
        with pytest.raises(ConfigError, match="a of the 'disk' tier did not open within 2 s"):
            options.open_store(SIZE, "ns")
    monkeypatch.setattr(DiskStore, "close", note)
    may_open.set()
    assert is_closed.wait(60), "nobody uses what opens too late"


@pytest.mark.parametrize("max_bytes", ["8MiB", ["4MiB", "4MiB"], None])
def test_a_mount_that_tells_nothing_at_the_start_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: object
) -> None:
    """Examples are a mount whose file system was shut down, and one whose server has ended."""
    options, stat = tier([tmp_path / "a" / "kv", tmp_path / "b" / "kv"], max_bytes=max_bytes), os.stat
    (tmp_path / "a").mkdir()
    real = os.statvfs(tmp_path)
    empty = os.statvfs_result((*real[:4], real.f_blocks, *real[5:]))  # without max_bytes a tenth must be free
    monkeypatch.setattr(os, "statvfs", lambda path: empty)

    def fail(path: Any, *args: Any, **rest: Any) -> os.stat_result:
        if not isinstance(path, int) and os.fspath(path).startswith(f"{tmp_path}/a"):
            raise OSError(errno.EIO, "broken", path)
        return stat(path, *args, **rest)

    monkeypatch.setattr(os, "stat", fail)
    assert [disk.max_bytes for disk in options.each_disk()] == [
        *(max_bytes if isinstance(max_bytes, list) else [max_bytes and 4 << 20] * 2)
    ]
    store = options.open_store(SIZE, "ns")
    assert write(store, *keys_of(1, 2)) == [True, True]
    assert os.listdir(tmp_path / "a") == []
    store.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"path": []}, "path of the 'disk' tier is an empty list"),
        ({"path": ["/kv/a", ""]}, "is empty; name a directory"),
        ({"path": ["/kv/a", "kv/b"]}, "must begin with / or ~"),
        ({"path": ["/kv/a", "/kv/a"]}, "have the directory /kv/a; give"),
        ({"path": ["/kv/a", "/kv/a/b"]}, "/kv/a/b is in /kv/a"),
        ({"path": ["/kv/a", "/kv/b"], "max_bytes": ["1GiB"]}, "has 1 size for 2 paths"),
        ({"path": "/kv/a", "max_bytes": ["1GiB", "1GiB"]}, "has 2 sizes for 1 path"),
        ({"path": ["/kv/a", "/kv/b"], "max_bytes": 10_000}, "too little for two blocks"),
        ({"path": ["/kv/a", 7]}, "path"),
        ({"path": ["/kv/a", "/kv/\0"]}, "path of the 'disk' tier contains a character that is not allowed"),
    ],
)
def test_a_mistake_is_one_sentence(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        parse_tier({"type": "disk"} | options, SIZE)
    assert "\n" not in str(caught.value)


def test_two_tiers_share_no_disk() -> None:
    one, other = {"type": "disk", "path": ["/kv/a", "/kv/b"]}, {"type": "fs", "path": "/kv/b/c", "max_bytes": "1GiB"}
    with pytest.raises(ConfigError, match="/kv/b/c is in /kv/b"):
        parse_tiers([one, other])
