# SPDX-License-Identifier: Apache-2.0
"""DiskStore: order of eviction, restarts, damage, and failing disks."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.files import disk_bytes
from tests.leaks import open_in
from tests.tiering.stores.disk.rig import (
    PAGED,
    SMALL,
    aligned,
    damage,
    here,
    may_grow,
    payloads,
    read,
    right,
    slab_of,
    slabs_of,
    tables,
    upkeep_of,
    write,
)

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores import root as root_module
from kvoffload.tiering.stores.disk import allocator as allocator_module
from kvoffload.tiering.stores.disk import file as file_module
from kvoffload.tiering.stores.disk.directory import LOCK_NAME, SlabSeen
from kvoffload.tiering.stores.disk.file import SlabFile
from kvoffload.tiering.stores.disk.format import EMPTY_ENTRY, ENTRY_BYTES, SlabFormat
from kvoffload.tiering.stores.disk.open_slab import Slab
from kvoffload.tiering.stores.disk.slabs import Slabs
from kvoffload.tiering.stores.disk.store import DiskStore
from kvoffload.tiering.stores.disk.upkeep import Upkeep
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.root import CONTROL_DIR
from kvoffload.tiering.stores.slab import SlabStore

KEYS = keys_of(*range(100))


class TestLargeBlocks:
    SIZE = 1 << 20

    def test_checksums_are_made_while_the_blocks_are_written(self, open_store, monkeypatch) -> None:
        digesting, write_of = threading.Event(), SlabFile.write

        def digest(layout: SlabFormat, probe: bytes, block: memoryview) -> bytes:
            digesting.set()
            return checksum_of(layout, probe, block)

        def write_slowly(file: SlabFile, first: int, blocks: Sequence[memoryview]) -> int:
            assert digesting.wait(120)
            assert not file.read_entries(first, 1).strip(b"\0"), "no entry before its payload"
            return write_of(file, first, blocks)

        checksum_of = SlabFormat._checksum
        monkeypatch.setattr(SlabFormat, "_checksum", digest)
        monkeypatch.setattr(SlabFile, "write", write_slowly)
        store = open_store(self.SIZE)
        assert write(store, *KEYS[:3], size=self.SIZE) == [True] * 3
        assert right(store, *KEYS[:3], size=self.SIZE) == {*KEYS[:3]}
        store.close()
        assert right(open_store(self.SIZE), *KEYS[:3], size=self.SIZE) == {*KEYS[:3]}

    def test_a_digest_that_fails_writes_no_entry(self, open_store, monkeypatch) -> None:
        store = open_store(self.SIZE)
        with monkeypatch.context() as broken:
            broken.setattr(SlabFormat, "entry", lambda *arguments: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                write(store, KEYS[0], size=self.SIZE)
        assert right(store, KEYS[0], size=self.SIZE) == set()
        assert write(store, *KEYS[1:4], size=self.SIZE) == [True] * 3

    def test_a_write_that_goes_on_while_the_store_closes_makes_them_itself(self, open_store) -> None:
        store = open_store(self.SIZE)
        store._beside.shutdown()
        assert write(store, *KEYS[:3], size=self.SIZE) == [True] * 3
        assert right(store, *KEYS[:3], size=self.SIZE) == {*KEYS[:3]}


class TestEviction:
    def test_keys_that_are_too_long_for_an_entry_are_named_too(self, open_store) -> None:
        """A program that folds a tier's events would keep such keys forever."""
        store = open_store()
        keys = [OffloadKey(key + bytes(40)) for key in KEYS[:20]]
        evicted: list[OffloadKey] = []
        for key in keys:
            assert write(store, key) == [True]
            evicted += store.take_lost()
        here = right(store, *keys)
        assert len(here) == 8
        assert sorted(evicted) == sorted(set(keys) - here)
        assert set(store.resident) == here
        store.discard(keys[-3:])
        assert set(slabs_of(store)._long_keys.values()) == here - set(keys[-3:]), "what is gone is forgotten"

    def test_the_least_recently_used_goes_first(self, open_store) -> None:
        store = open_store()
        for key in KEYS[:8]:
            write(store, key)
        read(store, KEYS[0])
        store.touch([KEYS[2], KEYS[1]])  # a prefix: its tail, 1, was used before its head
        write(store, KEYS[3])
        for number, victim in ((8, 4), (9, 5), (10, 6), (11, 7), (12, 0), (13, 1), (14, 2), (15, 3)):
            assert write(store, KEYS[number]) == [True]
            assert store.take_lost() == {KEYS[victim]: "evicted"}
            assert store.contains([KEYS[victim]]) == [False]
        assert store.stats().evicted_blocks == 8
        assert right(store, *KEYS[:16]) == set(KEYS[8:16])

    @pytest.mark.once
    def test_slabs_above_a_smaller_quota_count_as_evicted(self, open_store) -> None:
        store, keys = open_store(max_bytes=4 << 20), keys_of(*range(3000))
        for start in range(0, 3000, 100):
            write(store, *keys[start : start + 100])
        store.close()
        store = open_store(max_bytes=2 << 20)
        lost = store.take_lost()
        assert set(lost.values()) == {"evicted"}
        assert store.stats().evicted_blocks == len(lost) > 1000

    def test_a_batch_never_evicts_its_own_blocks(self, open_store) -> None:
        store = open_store()
        assert write(store, *KEYS[:6]) == [True] * 6
        answers = write(store, *KEYS[3:15])
        assert answers == [True] * 8 + [False] * 4
        assert right(store, *KEYS[:20]) == set(KEYS[3:11])

    def test_the_order_survives_a_restart(self, open_store, monkeypatch) -> None:
        now_s = 1_700_000_000
        monkeypatch.setattr("time.time_ns", lambda: now_s * 1_000_000_000)
        store = open_store()
        for number in range(8):
            now_s += 1
            write(store, KEYS[number])
        now_s += 1
        assert read(store, KEYS[0])
        store.close()
        store = open_store()
        now_s += 1
        for number, victim in ((8, 1), (9, 2), (10, 3)):
            write(store, KEYS[number])
            assert store.take_lost() == {KEYS[victim]: "evicted"}

    @pytest.mark.once
    def test_slots_are_used_up_before_anything_is_evicted(self, open_store) -> None:
        store = open_store(max_bytes=4 * slab_of(1000))
        keys = keys_of(*range(3500))
        for start in range(0, 3500, 70):
            assert write(store, *keys[start : start + 70]) == [True] * 70
        assert store.stats().evicted_blocks == 0
        assert right(store, *keys[::9]) == set(keys[::9])


class TestRestart:
    @pytest.mark.once
    def test_a_large_store_is_served_while_its_last_slabs_are_read(self, open_store, monkeypatch) -> None:
        store = open_store(max_bytes=4 << 20)
        keys = keys_of(*range(3800))
        for start in range(0, 3800, 100):
            write(store, *keys[start : start + 100])
        store.close()
        monkeypatch.setattr("kvoffload.tiering.stores.disk.upkeep._LOADED_AT_ONCE", 1000)
        go_on, real = threading.Event(), Upkeep.load

        def load(self: Upkeep, *, at_once: bool) -> None:
            assert at_once or go_on.wait(120)
            real(self, at_once=at_once)

        monkeypatch.setattr(Upkeep, "load", load)
        store = open_store(max_bytes=4 << 20)
        known = right(store, *keys)
        assert 900 <= len(known) < 2000
        assert write(store, KEYS[0]) == [True]
        scan = store.scan()
        go_on.set()
        found = {key for batch in scan for key in batch}
        left = set(keys) - set(store.take_lost())  # the write made room
        assert len(left) > 3700
        assert found >= left
        assert right(store, *left) == left

    @pytest.mark.once
    def test_the_stores_thread_outlives_what_fails(self, open_store, monkeypatch, caplog) -> None:
        calls, twice = [], threading.Event()

        def fail(self: Upkeep) -> None:
            calls.append(1)
            if len(calls) > 2:
                twice.set()
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(Upkeep, "poll", fail)
        store = open_store()
        assert twice.wait(120)
        assert write(store, KEYS[0]) == [True]
        assert [record.message for record in caplog.records if "Input/output" in record.message][1:] == [], "said once"

    @pytest.mark.parametrize("size", [SMALL, PAGED])
    def test_everything_is_there_again(self, open_store, tmp_path: Path, size: int) -> None:
        store = open_store(size, max_bytes=slab_of(40, size))
        write(store, *KEYS[:30], size=size)
        store.discard(KEYS[5:8])
        store.close()
        before = disk_bytes(tmp_path)
        store = open_store(size, max_bytes=slab_of(40, size))
        left = set(KEYS[:30]) - set(KEYS[5:8])
        assert right(store, *KEYS, size=size) == left
        assert {key for batch in store.scan() for key in batch} == left
        assert store.stats().used_bytes == 27 * size
        assert write(store, *KEYS[30:43], size=size) == [True] * 13
        assert store.stats().evicted_blocks == 0
        assert disk_bytes(tmp_path) == before

    def test_another_block_size_or_namespace_sees_nothing_of_it(self, open_store, tmp_path: Path) -> None:
        write(open_store(max_bytes=1 << 20), *KEYS[:5])
        for options in ({"size": 500}, {"namespace": "other"}):
            other = open_store(max_bytes=1 << 20, **options)
            assert here(other, *KEYS[:5]) == set()
            assert [list(batch) for batch in other.scan()] == []

    def test_a_slab_in_the_making_is_swept(self, open_store, tmp_path: Path) -> None:
        store = open_store()
        write(store, *KEYS[:3])
        store.close()
        (namespace,) = {path.parent for path in tables(tmp_path)}
        for name in ("new-0123.slab", "new-0123.table", "0456.slab"):
            (namespace / name).write_bytes(bytes(5000))
        store = open_store(max_bytes=slab_of(8) + slab_of(5))
        assert write(store, *KEYS[3:12]) == [True] * 9
        every = {path.name for path in namespace.iterdir()}
        assert every == {path.name for path in [*tables(tmp_path), *payloads(tmp_path)]}
        assert len(tables(tmp_path)) == len(payloads(tmp_path)) == 2


class TestDamage:
    @pytest.mark.parametrize("size", [SMALL, PAGED])
    @pytest.mark.parametrize("at", [0, 500, -1])
    def test_a_flipped_bit_is_a_miss(self, open_store, tmp_path: Path, size: int, at: int) -> None:
        store = open_store(size)
        write(store, *KEYS[:4], size=size)
        damage(tmp_path, KEYS[1], size, at)
        assert right(store, *KEYS[:4], size=size) == {KEYS[0], KEYS[2], KEYS[3]}
        assert store.stats().corrupt_blocks == 1
        assert store.take_lost() == {KEYS[1]: "corrupt"}
        assert write(store, KEYS[1], size=size) == [True]
        assert right(store, *KEYS[:4], size=size) == set(KEYS[:4])

    def test_another_slots_block_is_a_miss(self, open_store, tmp_path: Path) -> None:
        store = open_store()
        write(store, *KEYS[:2])
        (path,) = payloads(tmp_path)
        data = bytearray(path.read_bytes())
        data[:SMALL], data[SMALL : 2 * SMALL] = data[SMALL : 2 * SMALL], data[:SMALL]
        path.write_bytes(data)
        assert right(store, *KEYS[:2]) == set()
        assert store.stats().corrupt_blocks == 2

    @pytest.mark.parametrize("position", [0, 12, 30, 4095])
    def test_a_damaged_header_costs_its_slab(self, open_store, tmp_path: Path, position: int, caplog) -> None:
        store = open_store()
        write(store, *KEYS[:3])
        store.close()
        (path,) = tables(tmp_path)
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        store = open_store()
        assert right(store, *KEYS[:3]) == set()
        assert position == 0 or "is damaged" in caplog.text
        assert write(store, *KEYS[:3]) == [True] * 3, "it is nobody's, and gives way"
        assert disk_bytes(tmp_path) <= slab_of(8)

    def test_garbage_in_a_table_is_no_block(self, open_store, tmp_path: Path) -> None:
        rng = random.Random(0)
        store = open_store()
        write(store, *KEYS[:8])
        store.close()
        (path,) = tables(tmp_path)
        at = SlabFormat.entries_at(8)
        data = bytearray(path.read_bytes())
        for slot in (1, 2, 5):
            data[at + slot * ENTRY_BYTES : at + (slot + 1) * ENTRY_BYTES] = rng.randbytes(ENTRY_BYTES)
        data[at + 7 * ENTRY_BYTES + 20] ^= 255  # the hash in an otherwise sound entry
        path.write_bytes(data)
        store = open_store()
        assert right(store, *KEYS[:8]) == {KEYS[number] for number in (0, 3, 4, 6)}
        for _ in store.scan():
            pass
        for number in range(10, 40):
            assert write(store, KEYS[number]) == [True]
        assert right(store, *KEYS) == set(KEYS[32:40])

    @pytest.mark.parametrize("left", [0, 1, SMALL, 3 * SMALL + 1])
    def test_payloads_that_were_cut_off_are_misses(self, open_store, tmp_path: Path, left: int) -> None:
        store = open_store()
        write(store, *KEYS[:6])
        (path,) = payloads(tmp_path)
        os.truncate(path, left)
        buffers = [aligned(bytes(SMALL)) for _ in range(6)]
        answers = store.read_into(KEYS[:6], buffers)
        assert answers == [number < left // SMALL for number in range(6)]
        assert all(bytes(buffers[number]) == block_of(KEYS[number], SMALL) for number in range(left // SMALL))
        assert write(store, *KEYS[:6]) == [True] * 6
        assert right(store, *KEYS[:6]) == set(KEYS[:6])

    def test_a_table_that_was_cut_off_costs_its_slab(self, open_store, tmp_path: Path) -> None:
        store = open_store()
        write(store, *KEYS[:6])
        store.close()
        (path,) = tables(tmp_path)
        os.truncate(path, path.stat().st_size - 1)
        store = open_store()
        assert right(store, *KEYS[:6]) == set()

    @pytest.mark.parametrize("size", [SMALL, PAGED])
    def test_garbage_over_the_payloads_is_a_miss(self, open_store, tmp_path: Path, size: int) -> None:
        """And a slab that grew is as good as before, if the quota has room for it."""
        rng = random.Random(0)
        store = open_store(size)
        write(store, *KEYS[:6], size=size)
        (path,) = payloads(tmp_path)
        with path.open("r+b") as file:
            file.seek(2 * size - size // 2)
            file.write(rng.randbytes(2 * size))  # half of the second, the third and half of the fourth
            file.seek(0, os.SEEK_END)
            file.write(rng.randbytes(12_345))
        assert right(store, *KEYS[:6], size=size) == {KEYS[0], KEYS[4], KEYS[5]}
        assert store.stats().corrupt_blocks == 3
        store.close()
        store = open_store(size, max_bytes=slab_of(8, size) + 12_345)
        assert right(store, *KEYS[:6], size=size) == {KEYS[0], KEYS[4], KEYS[5]}
        assert write(store, *KEYS[1:4], size=size) == [True] * 3
        assert right(store, *KEYS[:6], size=size) == set(KEYS[:6])

    @pytest.mark.parametrize("options", [{"size": 500}, {"namespace": "other"}], ids=str)
    def test_a_slab_that_was_moved_here_from_elsewhere_is_no_slab(self, open_store, tmp_path: Path, options) -> None:
        other = open_store(max_bytes=1 << 20, **options)
        other.write(KEYS[:5], [aligned(block_of(key, options.get("size", SMALL))) for key in KEYS[:5]])
        other.close()
        theirs = [*tables(tmp_path), *payloads(tmp_path)]
        store = open_store(max_bytes=2 << 20)
        write(store, *KEYS[5:10])
        (namespace,) = {path.parent for path in tables(tmp_path) if path not in theirs}
        for path in theirs:
            path.rename(namespace / f"0123456789abcdef{path.suffix}")
        store.refresh()
        assert right(store, *KEYS[:10]) == set(KEYS[5:10])
        store.close()
        store = open_store(max_bytes=2 << 20)
        assert right(store, *KEYS[:10]) == set(KEYS[5:10])
        assert write(store, *KEYS[:5]) == [True] * 5
        assert right(store, *KEYS[:10]) == set(KEYS[:10])

    @pytest.mark.parametrize("lost", [".table", ".slab"])
    def test_what_a_power_failure_loses_is_a_miss(self, open_store, tmp_path: Path, lost: str) -> None:
        """One of the two files has its state from before the last blocks were written. These blocks are misses."""
        store = open_store()
        write(store, *KEYS[:8])
        store.close()
        (path,) = [path for path in (*tables(tmp_path), *payloads(tmp_path)) if path.suffix == lost]
        before = path.read_bytes()
        store = open_store()
        assert write(store, *KEYS[8:11]) == [True] * 3
        left = here(store, *KEYS[:8])
        store.close()
        path.write_bytes(before)
        store = open_store()
        assert len(left) == 5
        assert right(store, *KEYS[:11]) == left
        assert write(store, *KEYS[8:11]) == [True] * 3
        assert right(store, *KEYS[8:11]) == set(KEYS[8:11])

    @pytest.mark.parametrize("suffix", [".table", ".slab"])
    def test_a_directory_in_a_slabs_place_is_no_slab(self, open_store, tmp_path: Path, suffix: str) -> None:
        store = open_store()
        write(store, *KEYS[:4])
        (path,) = [path for path in (*tables(tmp_path), *payloads(tmp_path)) if path.suffix == suffix]
        path.rename(tmp_path / "aside")
        path.mkdir()
        (path / "precious").write_bytes(b"p")
        store.refresh()
        assert right(store, *KEYS[:4]) == set()
        store.close()
        store = open_store(max_bytes=2 * slab_of(8))
        assert right(store, *KEYS[:4]) == set()
        assert write(store, *KEYS[:4]) == [True] * 4
        assert (path / "precious").read_bytes() == b"p"


class Broken:
    """Fails transfers of chosen slots with an error of the disk, below the store: in the system call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slots: set[int] = set()
        self.size = SMALL
        self.error = errno.EIO
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call):
        def wrapped(fd, buffers, offset):
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".slab"):
                count = sum(buffer.nbytes for buffer in buffers)
                if any(offset < (slot + 1) * self.size and offset + count > slot * self.size for slot in self.slots):
                    raise OSError(self.error, os.strerror(self.error))
            return call(fd, buffers, offset)

        return wrapped


OF_DEVICES = (errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO)
"""Linux's errors for a bad medium, a wrong checksum and a failed device, which direct I/O reports unchanged."""


class TestBadMedia:
    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> Broken:
        return Broken(monkeypatch)

    @pytest.mark.parametrize("error", [errno.EIO, *OF_DEVICES], ids=errno.errorcode.get)
    def test_a_slot_that_cannot_be_written_costs_itself(self, open_store, broken: Broken, error: int) -> None:
        store = open_store()
        broken.slots, broken.error = {3}, error
        assert write(store, *KEYS[:6]) == [True, True, True, False, True, True]
        assert write(store, KEYS[3]) == [True], "in another slot"
        assert right(store, *KEYS[:6]) == set(KEYS[:6])
        for number in range(20, 40):
            assert write(store, KEYS[number]) == [True], "the slot is left out of use"
        assert len(here(store, *KEYS)) == 7

    @pytest.mark.parametrize(("transfer", "num_left_out"), [("write", 0), ("read", 200 // 64)])
    def test_slots_are_used_again_where_many_fail_for_a_while(
        self, open_store, broken: Broken, transfer: str, num_left_out: int
    ) -> None:
        """They fail together in a write, and one by one in reads. The first few are taken out of use."""
        store, keys = open_store(max_bytes=slab_of(200)), keys_of(*range(300))
        if transfer == "read":
            write(store, *keys[:40])
        broken.slots = set(range(0, 40, 2))
        buffers = [aligned(bytes(SMALL)) for _ in range(40)]
        answers = write(store, *keys[:40]) if transfer == "write" else store.read_into(keys[:40], buffers)
        assert answers == [False, True] * 20
        broken.slots = set()
        num_free = 180 - num_left_out
        assert write(store, *keys[100 : 100 + num_free]) == [True] * num_free
        assert len(right(store, *keys)) == 20 + num_free

    @pytest.mark.parametrize("error", [errno.EIO, *OF_DEVICES], ids=errno.errorcode.get)
    def test_a_slot_that_cannot_be_read_costs_itself(self, open_store, broken: Broken, error: int) -> None:
        store = open_store()
        write(store, *KEYS[:6])
        broken.slots, broken.error = {3}, error
        buffers = [aligned(bytes(SMALL)) for _ in range(6)]
        assert store.read_into(KEYS[:6], buffers) == [True, True, True, False, True, True]
        assert store.take_lost() == {KEYS[3]: "corrupt"}
        assert store.contains([KEYS[3]]) == [False]
        assert write(store, KEYS[3]) == [True]
        assert right(store, *KEYS[:6]) == set(KEYS[:6])

    def test_a_disk_that_fails_altogether_is_an_error_and_recovers(self, open_store, broken: Broken) -> None:
        store = open_store(max_bytes=slab_of(200))
        write(store, *KEYS[:20])
        broken.slots = set(range(200))
        with pytest.raises(StoreError, match="Input/output error"):
            write(store, *KEYS[20:30])
        with pytest.raises(StoreError, match="Input/output error"):
            store.read_into(KEYS[:3], [aligned(bytes(SMALL)) for _ in range(3)])
        broken.slots = set()
        assert right(store, *KEYS[3:20]) == set(KEYS[3:20])
        for start in range(20, 100, 10):
            assert write(store, *KEYS[start : start + 10]) == [True] * 10
        assert len(here(store, *KEYS)) >= 97

    def test_blocks_that_are_there_do_not_hide_that_the_disk_takes_no_others(self, open_store, broken: Broken) -> None:
        store = open_store()
        write(store, *KEYS[:2])
        broken.slots = set(range(8))
        with pytest.raises(StoreError, match="Input/output error"):
            write(store, *KEYS[:3])

    def test_blocks_are_not_written_over_in_vain_where_every_write_needs_space(
        self, open_store, broken: Broken
    ) -> None:
        """This is the case on file systems that copy on write."""
        store = open_store(max_bytes=slab_of(200))
        write(store, *KEYS)
        broken.slots, broken.error = set(range(200)), errno.ENOSPC
        for number in range(100, 300):
            with pytest.raises(StoreError, match="No space left"):
                write(store, *keys_of(number))
        assert here(store, *KEYS) == set(KEYS)
        broken.slots = set()
        keys = keys_of(*range(100, 300))
        assert write(store, *keys[:90]) == [True] * 90
        assert len(right(store, *KEYS, *keys)) == 190

    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
    def test_a_table_that_takes_no_writes_for_a_while_costs_no_slab(self, open_store, monkeypatch, error: int) -> None:
        """As where every write needs space, or once a file system is read-only. Blocks were evicted for the first write
        alone."""

        def fail(file: SlabFile, *content: object) -> None:
            raise OSError(error, os.strerror(error))

        store = open_store(max_bytes=slab_of(100))
        write(store, *KEYS)
        with monkeypatch.context() as full:
            full.setattr(SlabFile, "write_entries", fail)
            full.setattr(SlabFile, "write_changes", fail)
            for number in range(100, 200, 10):
                with pytest.raises(StoreError, match=os.strerror(error)):
                    write(store, *keys_of(*range(number, number + 10)))
            left = right(store, *KEYS)
            assert len(left) == 90
            store.discard(sorted(left)[:1])
            with upkeep_of(store).lock:
                upkeep_of(store).flush_changes()
        assert len(right(store, *KEYS)) == 89
        keys = keys_of(*range(200, 300))
        assert write(store, *keys) == [True] * 100
        store.close()
        store = open_store(max_bytes=slab_of(100))
        assert right(store, *keys) == set(keys)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
    def test_times_of_use_that_cannot_be_written_down_cost_no_block(self, open_store, monkeypatch, number: int) -> None:
        def fail(file: SlabFile, uses: npt.NDArray[np.uint32]) -> None:
            raise OSError(number, os.strerror(number))

        store = open_store(max_bytes=slab_of(200))
        write(store, *KEYS)
        with monkeypatch.context() as full, upkeep_of(store).lock:
            full.setattr(SlabFile, "write_uses", fail)
            upkeep_of(store).flush_uses()
        assert right(store, *KEYS) == set(KEYS)
        (slab,) = slabs_of(store).snapshot()
        assert not slab.file.read_uses().any()
        with upkeep_of(store).lock:
            upkeep_of(store).flush_uses()
        assert np.count_nonzero(slab.file.read_uses()) == len(KEYS), "the next time"

    @pytest.mark.parametrize("call", ["write_entries", "write_changes", "read_uses"])
    def test_a_table_that_fails_costs_its_slab(self, open_store, monkeypatch, tmp_path: Path, call: str) -> None:
        store = open_store(max_bytes=2 * slab_of(1100))
        keys = keys_of(*range(1200))
        for start in range(0, 1200, 50):
            write(store, *keys[start : start + 50])
        first = min(slabs_of(store).by_name.values(), key=lambda slab: slab.number)

        def fail(self: SlabFile, *args):
            if self.name == first.file.name:
                raise OSError(errno.EIO, "Input/output error")
            return real(self, *args)

        real = getattr(SlabFile, call)
        monkeypatch.setattr(SlabFile, call, fail)
        store.discard(keys[:1])
        store.refresh()
        with upkeep_of(store).lock:
            upkeep_of(store).flush_uses()
        monkeypatch.setattr(SlabFile, call, real)
        assert first.is_dropped
        left = right(store, *keys)
        assert 0 < len(left) < 1200
        assert left.isdisjoint(store.take_lost())
        assert write(store, *keys[:20]) == [True] * 20

    @pytest.mark.once
    def test_tables_that_all_fail_cost_one_slab_for_a_write(self, open_store, monkeypatch) -> None:
        """The disk may recover before the breaker has allowed as many writes as there are slabs."""

        def fail(file: SlabFile, *content: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        store, keys = open_store(max_bytes=2 * slab_of(1100)), keys_of(*range(2300))
        for start in range(0, 2300, 100):
            assert write(store, *keys[start : start + 100]) == [True] * 100
        with monkeypatch.context() as broken:
            broken.setattr(SlabFile, "write_entries", fail)
            with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
                write(store, *keys[:10])
        assert len(right(store, *keys)) > 1000

    @pytest.mark.once
    def test_a_slab_whose_table_failed_gives_way_once_room_is_needed(self, open_store, monkeypatch, tmp_path) -> None:
        """Else a bad moment of a disk would cost that part of the quota until a restart."""

        def fail(file: SlabFile, *content: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        store = open_store(max_bytes=slab_of(100))
        write(store, *KEYS)
        with monkeypatch.context() as broken:
            broken.setattr(SlabFile, "write_entries", fail)
            store.discard(KEYS[:1])
        assert here(store, *KEYS) == set()
        may_grow(store)
        assert write(store, *KEYS) == [True] * 100
        assert right(store, *KEYS) == set(KEYS)
        assert disk_bytes(tmp_path) <= slab_of(100)

    def test_a_table_that_cannot_be_read_at_start(self, open_store, monkeypatch, tmp_path: Path) -> None:
        store = open_store(max_bytes=2 * slab_of(1100))
        keys = keys_of(*range(1200))
        for start in range(0, 1200, 50):
            write(store, *keys[start : start + 50])
        store.close()
        bad = min(tables(tmp_path)).stem
        real = SlabFile.read_entries

        def fail(self: SlabFile, first: int, count: int):
            if self.name == bad:
                raise OSError(errno.EIO, "Input/output error")
            return real(self, first, count)

        monkeypatch.setattr(SlabFile, "read_entries", fail)
        store = open_store(max_bytes=2 * slab_of(1100))
        assert 0 < len(right(store, *keys)) < 1200


class TestRoot:
    def test_a_root_that_goes_away_and_comes_back(self, open_store, tmp_path: Path) -> None:
        store = open_store()
        write(store, *KEYS[:3])
        with upkeep_of(store).lock:
            shutil.rmtree(tmp_path / "kv")
        store.refresh()
        assert right(store, *KEYS[:3]) == set()
        with pytest.raises(StoreError, match="gone"):
            write(store, KEYS[0])
        store.touch([KEYS[0]])
        store.discard([KEYS[0]])
        assert not (tmp_path / "kv").exists(), "a mount that went away is not written under"
        (tmp_path / "kv").mkdir()
        store.refresh()
        may_grow(store)
        assert write(store, *KEYS[:8]) == [True] * 8
        assert right(store, *KEYS[:8]) == set(KEYS[:8])
        assert disk_bytes(tmp_path) <= slab_of(8)

    @pytest.mark.once
    @pytest.mark.parametrize("removed", ["", CONTROL_DIR])
    def test_a_root_that_was_emptied_is_written_to_again(self, open_store, tmp_path: Path, removed: str) -> None:
        store, keys = open_store(max_bytes=2 << 20), keys_of(*range(1500))
        write(store, *keys[:100])
        with upkeep_of(store).lock:
            shutil.rmtree(tmp_path / "kv" / removed)
            (tmp_path / "kv").mkdir(exist_ok=True)
        store.refresh()
        may_grow(store)
        for start in range(0, 1500, 100):
            assert write(store, *keys[start : start + 100]) == [True] * 100
        assert right(store, *keys) == set(keys)
        assert len(tables(tmp_path)) == 2
        assert disk_bytes(tmp_path) <= 2 << 20

    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        path = tmp_path / "disk"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", path]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small disk needs root")
        yield path
        subprocess.run(["umount", "-l", path], check=True)

    @pytest.mark.parametrize("path", ["disk", "link"])
    def test_a_mount_point_without_its_mount_is_not_written_to(self, small_disk: Path, path: str) -> None:
        small_disk.with_name("link").symlink_to(small_disk)
        store = DiskStore(small_disk.with_name(path), SMALL, max_bytes=1 << 20)
        write(store, *KEYS[:3])
        subprocess.run(["umount", "-l", small_disk], check=True)
        store.refresh()
        with pytest.raises(StoreError, match="gone"):
            write(store, *KEYS[:3])
        assert list(small_disk.iterdir()) == []
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", small_disk], check=True)
        store.refresh()
        may_grow(store)
        assert write(store, *KEYS[:3]) == [True] * 3
        store.close()

    def test_a_mount_that_goes_in_the_middle_of_a_check_is_not_written_to(self, small_disk: Path, monkeypatch) -> None:
        store, samestat = DiskStore(small_disk, SMALL, max_bytes=1 << 20), os.path.samestat

        def unmounted_then(*arguments) -> bool:
            is_same = samestat(*arguments)
            monkeypatch.setattr(os.path, "samestat", samestat)
            subprocess.run(["umount", "-l", small_disk], check=True)
            return is_same

        with upkeep_of(store).lock:
            monkeypatch.setattr(os.path, "samestat", unmounted_then)
            assert store._directory.check()
        store.refresh()
        assert list(small_disk.iterdir()) == []
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", small_disk], check=True)
        store.close()

    def test_a_disk_that_cannot_give_the_next_slab_uses_those_it_has(self, small_disk: Path) -> None:
        store = DiskStore(small_disk, SMALL, max_bytes=16 << 20)
        keys = keys_of(*range(4000))
        for start in range(0, 4000, 100):
            assert write(store, *keys[start : start + 100]) == [True] * 100
        assert right(store, *keys[-1500:]) == set(keys[-1500:])
        assert not list(small_disk.rglob("new-*")), "nothing is left of the slab that did not fit"
        store.check_invariants()
        store.close()

    def test_a_disk_without_room_for_one_slab(self, small_disk: Path) -> None:
        (small_disk / "other").write_bytes(bytes(int(2.9 * (1 << 20))))
        store = DiskStore(small_disk, SMALL, max_bytes=16 << 20)
        with pytest.raises(StoreError, match="No space left"):
            write(store, *KEYS[:4])
        with pytest.raises(StoreError, match="No space left"):
            write(store, *KEYS[:4])
        assert right(store, *KEYS[:4]) == set()
        (small_disk / "other").unlink()
        may_grow(store)
        assert write(store, *KEYS[:4]) == [True] * 4
        store.close()

    def test_free_bytes_are_those_of_the_disk_and_of_its_slabs(self, small_disk: Path) -> None:
        store = DiskStore(small_disk, SMALL, max_bytes=16 << 20)
        assert 2 << 20 < store.stats().free_bytes <= 3 << 20
        (small_disk / "other").write_bytes(bytes(int(1.9 * (1 << 20))))
        assert write(store, *KEYS[:4]) == [True] * 4
        store._next_look_s = 0.0
        assert write(store, KEYS[4]) == [True]
        assert 0.8 * (1 << 20) < store.stats().free_bytes < 1.2 * (1 << 20)
        store.close()

    def test_the_rest_of_a_disk_below_the_quota_is_used(self, small_disk: Path) -> None:
        (small_disk / "other").write_bytes(bytes(int(2.5 * (1 << 20))))
        store, keys = DiskStore(small_disk, SMALL, max_bytes=16 << 20), keys_of(*range(1000))
        for start in range(0, 1000, 100):
            assert write(store, *keys[start : start + 100]) == [True] * 100
        assert len(right(store, *keys)) > 300
        store.close()
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "more").write_bytes(bytes(1 << 20))
        store = DiskStore(small_disk, SMALL, max_bytes=16 << 20)
        assert len(right(store, *keys)) > 300, "a full disk is not above the quota"
        store.close()

    def test_slabs_that_no_process_uses_make_room_on_a_full_disk(self, small_disk: Path) -> None:
        keys = keys_of(*range(3000))
        store = DiskStore(small_disk, SMALL, "old", max_bytes=16 << 20)
        for start in range(0, 3000, 100):
            write(store, *keys[start : start + 100])
        store.close()
        store = DiskStore(small_disk, SMALL, "new", max_bytes=16 << 20)
        assert write(store, *keys[:100]) == [True] * 100
        store.close()

    def test_a_disk_that_becomes_read_only(self, small_disk: Path) -> None:
        store = DiskStore(small_disk, SMALL, max_bytes=1 << 20)
        write(store, *KEYS[:3])
        store.close()
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        store = DiskStore(small_disk, SMALL, max_bytes=1 << 20)
        assert right(store, *KEYS[:3]) == set(), "not used, but no error either"
        with pytest.raises(StoreError, match="Read-only"):
            write(store, *KEYS[:3])
        store.close()
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        store = DiskStore(small_disk, SMALL, max_bytes=1 << 20)
        assert right(store, *KEYS[:3]) == set(KEYS[:3])
        store.close()

    def test_a_disk_that_others_have_filled_is_written_to_as_before(self, small_disk: Path) -> None:
        store = DiskStore(small_disk, SMALL, max_bytes=1 << 20)
        keys = keys_of(*range(3000))
        assert write(store, *keys[:100]) == [True] * 100
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "other").write_bytes(bytes(4 << 20))
        for start in range(100, 3000, 100):
            assert write(store, *keys[start : start + 100]) == [True] * 100, "slabs have their space"
        assert right(store, *keys[-800:]) == set(keys[-800:])
        store.check_invariants()
        store.close()

    @pytest.mark.once
    @pytest.mark.parametrize("damage", ["deleted", "garbage", "directory", "pipe"])
    def test_damage_to_the_control_directory_costs_nothing(self, open_store, tmp_path: Path, damage: str) -> None:
        """Files in the control directory are only locked, and read by name."""
        store = open_store(max_bytes=2 << 20)
        keys = keys_of(*range(3000))
        write(store, *keys[:100])
        control = tmp_path / "kv" / CONTROL_DIR
        (control / "want-nonsense").write_bytes(b"x")
        (control / f"want-9-{'f' * 16}-{'0' * 16}").mkdir()
        lock = control / LOCK_NAME
        lock.unlink()
        match damage:
            case "garbage":
                lock.write_bytes(b"garbage")
            case "directory":
                lock.mkdir()
            case "pipe":
                os.mkfifo(lock, 0o600)
            case _:
                with upkeep_of(store).lock:
                    shutil.rmtree(control)
        store.refresh()
        for start in range(100, 3000, 100):
            assert write(store, *keys[start : start + 100]) == [True] * 100
        assert right(store, *keys[-600:]) == set(keys[-600:])
        assert disk_bytes(tmp_path) <= 2 << 20
        store.close()
        store = open_store(max_bytes=2 << 20)
        assert right(store, *keys[-600:]) == set(keys[-600:])

    @pytest.mark.once
    def test_slabs_deleted_from_outside_are_gone_at_the_next_poll(self, open_store, tmp_path: Path) -> None:
        store = open_store(max_bytes=2 << 20)
        keys = keys_of(*range(1500))
        for start in range(0, 1500, 100):
            write(store, *keys[start : start + 100])
        first, second = tables(tmp_path)
        first.unlink()
        first.with_suffix(".slab").unlink()
        store.refresh()
        left = here(store, *keys)
        assert 0 < len(left) < 1500
        assert right(store, *keys) == left
        assert store.stats().used_bytes == len(left) * SMALL
        assert store.take_lost() == dict.fromkeys(set(keys) - left, "removed")
        second.unlink()  # its payloads alone are not a slab
        store.refresh()
        assert here(store, *keys) == set()
        may_grow(store)
        assert write(store, *keys[:100]) == [True] * 100
        assert right(store, *keys[:100]) == set(keys[:100])
        assert disk_bytes(tmp_path) <= 2 << 20

    @pytest.mark.once
    def test_locks_that_fail_later_cost_the_next_slab(self, open_store, tmp_path: Path, monkeypatch) -> None:
        store, neighbour = open_store(max_bytes=2 << 20), open_store(max_bytes=2 << 20)
        keys = keys_of(*range(3000))
        write(store, *keys[:100])
        store.refresh()
        neighbour.refresh()

        def flock(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        real = fcntl.flock
        monkeypatch.setattr("fcntl.flock", flock)
        for start in range(100, 1500, 100):
            assert write(store, *keys[start : start + 100]) == [True] * 100, "in the slab that it has"
        assert right(store, *keys[1400:1500]) == set(keys[1400:1500])
        with pytest.raises(StoreError, match=os.strerror(errno.ENOLCK)):
            write(neighbour, *keys[2000:2100])
        neighbour.refresh()
        assert len(tables(tmp_path)) == 1
        monkeypatch.setattr("fcntl.flock", real)
        may_grow(neighbour)
        assert write(neighbour, *keys[2000:2100]) == [True] * 100
        assert right(neighbour, *keys[2000:2100]) == set(keys[2000:2100])

    def test_mistakes_are_one_sentence(self, tmp_path: Path) -> None:
        FileSystemStore(tmp_path / "fs", SMALL, max_bytes=1 << 20).write([KEYS[0]], [aligned(bytes(SMALL))])
        for make, said in [
            (lambda: DiskStore(tmp_path, 0), "block_bytes must be positive"),
            (lambda: DiskStore(tmp_path, SMALL, max_bytes=SMALL), "no room for one block"),
            (lambda: DiskStore(tmp_path, SMALL, mode="yes"), "mode must be"),
            (lambda: DiskStore(tmp_path, SMALL, mode="all"), "mode must be"),
            (lambda: DiskStore(tmp_path / "fs", SMALL, max_bytes=1 << 20), "belongs to a tier of type 'fs'"),
        ]:
            with pytest.raises(ConfigError, match=said):
                make()

    def test_a_file_system_without_locks_is_refused(self, tmp_path: Path, monkeypatch) -> None:
        def flock(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr("fcntl.flock", flock)
        with pytest.raises(ConfigError, match="does not support locks"):
            DiskStore(tmp_path / "kv", SMALL, max_bytes=1 << 20)

    @pytest.mark.parametrize("mounted", ["nfs4", "smb3", "fuse.sshfs", "newfs"])
    def test_a_file_system_of_several_hosts_is_refused(self, tmp_path: Path, monkeypatch, mounted: str) -> None:
        """If locks are local to a host, two hosts would own all slabs."""
        monkeypatch.setattr(root_module, "mount_type", lambda path: mounted)
        with pytest.raises(ConfigError, match=f"is on a file system of type {mounted}, .*type 'fs'"):
            DiskStore(tmp_path / "kv", SMALL, max_bytes=1 << 20)
        FileSystemStore(tmp_path / "files", SMALL, max_bytes=1 << 20).close()

    @pytest.mark.parametrize("mounted", ["fuseblk", ""])
    def test_a_file_system_of_this_host_or_an_unknown_one_is_not_refused(
        self, tmp_path: Path, monkeypatch, mounted: str
    ) -> None:
        monkeypatch.setattr(root_module, "mount_type", lambda path: mounted)
        DiskStore(tmp_path / "kv", SMALL, max_bytes=1 << 20).close()

    def test_a_thread_that_cannot_be_started_leaves_nothing_open_or_locked(self, tmp_path: Path, monkeypatch) -> None:
        store = DiskStore(tmp_path / "kv", SMALL, max_bytes=slab_of(8))
        write(store, *KEYS[:3])
        store.close()
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if "upkeep" in thread.name:
                raise RuntimeError("can't start new thread")
            real(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            for _ in range(3):
                with pytest.raises(ConfigError, match="needs a thread, which cannot be started: raise the limit"):
                    DiskStore(tmp_path / "kv", SMALL, max_bytes=slab_of(8))
        assert not open_in(tmp_path)
        store = DiskStore(tmp_path / "kv", SMALL, max_bytes=slab_of(8))
        assert right(store, *KEYS[:3]) == set(KEYS[:3])
        assert slabs_of(store).num_slots == 8, "its slab is its own again"
        store.close()

    def test_a_batch_is_evicted_by_one_plan(self, open_store, monkeypatch) -> None:
        """A plan takes as long as hundreds of blocks: in a small store, parts of a batch must not have one each."""
        store = open_store(max_bytes=slab_of(1000))
        number = itertools.count()
        for _ in range(16):
            write(store, *keys_of(*itertools.islice(number, 64)))
        plans, real = list[int](), allocator_module._make_plan

        def plan(used_ns: Any, count: int) -> Any:
            plans.append(count)
            return real(used_ns, count)

        monkeypatch.setattr(allocator_module, "_make_plan", plan)
        for _ in range(20):
            assert write(store, *keys_of(*itertools.islice(number, 64))) == [True] * 64
        assert 0 < len(plans) <= 21

    def test_the_table_of_mounts_names_file_systems(self, small_disk: Path) -> None:
        assert root_module.mount_type(small_disk) == "tmpfs"
        assert root_module.mount_type("/proc") == "proc"
        assert root_module.mount_type(small_disk / "absent") == ""

    def test_without_a_quota_a_fifth_of_the_disk_stays_free(self, small_disk: Path) -> None:
        store = DiskStore(small_disk, SMALL)
        assert write(store, *KEYS[:4]) == [True] * 4
        keys = keys_of(*range(4000))
        for start in range(0, 4000, 100):
            may_grow(store)
            write(store, *keys[start : start + 100])
        disk = os.statvfs(small_disk)
        assert disk.f_blocks // 5 <= disk.f_bavail < disk.f_blocks // 3
        store.close()

    def test_without_a_quota_too_slabs_in_the_making_are_swept(self, small_disk: Path) -> None:
        """Servers that were killed leave them. Here they fill the disk."""

        def leave() -> None:
            (small_disk / "=" / "new-0123.table").write_bytes(bytes(5000))
            disk = os.statvfs(small_disk)
            (small_disk / "=" / "new-0123.slab").write_bytes(bytes(disk.f_frsize * (disk.f_bavail - 4)))

        DiskStore(small_disk, SMALL).close()
        leave()
        store = DiskStore(small_disk, SMALL)
        assert not list(small_disk.rglob("new-*")), "at the start"
        leave()
        assert write(store, *KEYS[:4]) == [True] * 4
        assert not list(small_disk.rglob("new-*")), "before a slab is made"
        store.close()

    @pytest.mark.parametrize("refused", ["what is not aligned", "everything"])
    def test_what_direct_io_refuses_goes_through_the_page_cache(self, open_store, monkeypatch, refused: str) -> None:
        refusals, real = list[int](), {name: getattr(os, name) for name in ("preadv", "pwritev")}
        monkeypatch.setattr("kvoffload.tiering.stores.disk.file._reopen_direct", lambda fd: os.dup(fd))

        def strict(name: str) -> Callable[..., int]:
            def call(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
                if fd in [slab.file._direct_fd for slab in slabs_of(store).open.values()]:
                    addresses = [np.frombuffer(one, np.uint8).__array_interface__["data"][0] for one in buffers]
                    if refused == "everything" or any(address % 4096 for address in addresses):
                        refusals.append(fd)
                        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                return real[name](fd, buffers, offset)

            return call

        store = open_store(PAGED)
        for name in real:
            monkeypatch.setattr(os, name, strict(name))
        odd = memoryview(bytearray(PAGED + 8192))
        at = 17 - np.frombuffer(odd, np.uint8).__array_interface__["data"][0] % 16
        unaligned = odd[at : at + PAGED]
        unaligned[:] = block_of(KEYS[0], PAGED)
        assert store.write([KEYS[0]], [unaligned]) == [True]
        assert write(store, *KEYS[1:4], size=PAGED) == [True] * 3
        unaligned[:] = bytes(PAGED)
        assert store.read_into([KEYS[0]], [unaligned]) == [True]
        assert unaligned == block_of(KEYS[0], PAGED)
        assert right(store, *KEYS[:4], size=PAGED) == set(KEYS[:4])
        assert len(refusals) == 2, "aligned blocks still move directly, or none is tried any more"

    def test_a_file_system_that_cannot_preallocate_is_refused(self, tmp_path: Path) -> None:
        """An example is ext2, where a write may run out of space in the middle of a slab."""
        (tmp_path / "disk").mkdir()
        with (tmp_path / "image").open("wb") as image:
            image.truncate(32 << 20)
        make = f"mke2fs -q {tmp_path}/image && mount -o loop {tmp_path}/image {tmp_path}/disk"
        if os.geteuid() or subprocess.run(make, shell=True, capture_output=True, check=False).returncode:
            pytest.skip("mounting is not allowed here")
        try:
            with pytest.raises(ConfigError, match=r"cannot preallocate .*type 'fs'"):
                DiskStore(tmp_path / "disk" / "kv", SMALL, max_bytes=16 << 20)
            assert list((tmp_path / "disk" / "kv" / CONTROL_DIR).iterdir()) == []
        finally:
            subprocess.run(["umount", "-l", tmp_path / "disk"], check=True)

    def test_nor_is_it_written_to_page_by_page(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(file_module, "_libc_fallocate", None)
        with pytest.raises(ConfigError, match="cannot preallocate"):
            DiskStore(tmp_path / "kv", SMALL, max_bytes=1 << 20)

    def test_space_is_given_again_after_a_signal_and_in_parts(self, tmp_path: Path, monkeypatch) -> None:
        asked, real = list[tuple[int, int]](), file_module._fallocate

        def interrupted(fd: int, offset: int, num_bytes: int) -> None:
            asked.append((offset, num_bytes))
            assert len(asked) < 10
            if offset and num_bytes > 40_000:  # a timer's signal comes sooner, each time
                raise OSError(errno.EINTR, os.strerror(errno.EINTR))
            real(fd, offset, num_bytes)

        monkeypatch.setattr(file_module, "_fallocate", interrupted)
        monkeypatch.setattr(file_module, "_ALLOCATED_AT_ONCE", 1 << 16)
        fd = os.open(tmp_path / "slab", os.O_RDWR | os.O_CREAT)
        file_module._allocate(fd, 150_000)
        assert asked == [(0, 65536), (65536, 65536), (65536, 32768), (98304, 32768), (131072, 18928)]
        assert os.fstat(fd).st_size == 150_000
        os.close(fd)


class TestClock:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        now_s = [1_700_000_000]
        monkeypatch.setattr("time.time_ns", lambda: now_s[0] * 1_000_000_000)
        return now_s

    @pytest.mark.parametrize("jump_s", [-40_000_000, 40_000_000])
    def test_the_order_of_use_outlives_a_jump(self, open_store, clock: list[int], jump_s: int) -> None:
        store = open_store()
        write(store, *KEYS[:8])
        clock[0] += jump_s
        assert right(store, *KEYS[:3]) == set(KEYS[:3])
        assert write(store, *KEYS[8:12]) == [True] * 4
        assert here(store, *KEYS[:8]) >= set(KEYS[:3])
        for number in range(20, 40):
            clock[0] -= 1
            assert write(store, KEYS[number]) == [True]
        assert here(store, *KEYS) == set(KEYS[32:40])

    def test_uses_in_the_future_keep_no_block_for_ever(self, open_store, clock: list[int]) -> None:
        """The clock was a year ahead until the last start. The table has the times of then."""
        clock[0] += 31_000_000
        store = open_store()
        write(store, *KEYS[:8])
        with upkeep_of(store).lock:
            upkeep_of(store).flush_uses()
        store.close()
        clock[0] -= 31_000_000
        store = open_store()
        assert right(store, *KEYS[:8]) == set(KEYS[:8])
        with upkeep_of(store).lock:
            upkeep_of(store).flush_uses()  # which also reads when neighbours have used our blocks
        clock[0] += 60
        for number in range(20, 32):
            assert write(store, KEYS[number]) == [True]
        assert here(store, *KEYS) == set(KEYS[24:32])


class TestThreads:
    def test_threads_on_a_full_store_never_read_wrong_bytes(self, open_store) -> None:
        """The test targets slots that were just evicted: every write evicts blocks that other threads are about to
        read."""
        store = open_store(PAGED, max_bytes=slab_of(40, PAGED))
        keys, wrong = keys_of(*range(200)), []
        blocks = {key: aligned(block_of(key, PAGED)) for key in keys}
        start = threading.Barrier(4)

        def work(seed: int) -> None:
            rng, buffers = random.Random(seed), [aligned(bytes(PAGED)) for _ in range(6)]
            start.wait()
            for _ in range(300):
                first = rng.randrange(194)
                some = keys[first : first + rng.randrange(1, 6)]
                match rng.randrange(6):
                    case 0 | 1 | 2:
                        store.write(some, [blocks[key] for key in some])
                    case 3 | 4:
                        recent = list(store.take_lost())[-5:] or some
                        for key, good, buffer in zip(
                            recent, store.read_into(recent, buffers[: len(recent)]), buffers, strict=False
                        ):
                            if good and buffer != blocks[key]:
                                wrong.append(key)
                    case _:
                        store.discard(some)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert store.stats().corrupt_blocks == 0, "an eviction is no corruption"
        store.check_invariants()
        assert right(store, *keys, size=PAGED) == here(store, *keys)

    @pytest.mark.once
    def test_a_slab_whose_making_hangs_costs_one_thread(self, open_store, monkeypatch) -> None:
        store, hangs, go_on = open_store(max_bytes=2 << 20), threading.Event(), threading.Event()
        keys, real = keys_of(*range(1100)), file_module._allocate
        for start in range(0, 900, 100):
            assert all(write(store, *keys[start : start + 100]))

        def hang(*args) -> None:
            hangs.set()
            assert go_on.wait(120)
            real(*args)

        monkeypatch.setattr(file_module, "_allocate", hang)
        writer = threading.Thread(target=write, args=(store, *keys[900:1100]))
        writer.start()
        assert hangs.wait(120)
        assert all(write(store, *keys_of(*range(5000, 5100)))), "in slots of evicted blocks"
        assert right(store, *keys_of(*range(5000, 5100)))
        go_on.set()
        writer.join()

    def test_a_slab_that_is_dropped_under_a_running_write_is_closed_after_it(
        self, open_store, tmp_path: Path, monkeypatch
    ) -> None:
        """Its descriptor may be another file's a moment later."""
        store, in_write, go_on = open_store(), threading.Event(), threading.Event()
        write(store, KEYS[0])
        real = os.pwritev

        def slow(fd, buffers, offset):
            in_write.set()
            assert go_on.wait(120)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", slow)
        said = []

        def fail() -> None:
            with pytest.raises(StoreError, match="gone") as error:
                write(store, KEYS[1])
            said.append(error)

        writer = threading.Thread(target=fail)
        writer.start()
        assert in_write.wait(120)
        with upkeep_of(store).lock:
            shutil.rmtree(tmp_path / "kv")
        store.refresh()
        other = os.open(tmp_path / "precious", os.O_RDWR | os.O_CREAT)
        os.write(other, b"p" * 5000)
        go_on.set()
        writer.join()
        monkeypatch.setattr(os, "pwritev", real)
        assert said
        assert os.pread(other, 9999, 0) == b"p" * 5000
        os.close(other)
        assert not any(
            "(deleted)" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}") and ".slab" in os.readlink(f"/proc/self/fd/{fd}")
        )


def test_a_write_that_comes_after_the_close_makes_no_slab(tmp_path: Path, monkeypatch) -> None:
    """Or one that makes a slab just then. Nothing would close it."""
    store = DiskStore(tmp_path / "kv", SMALL, max_bytes=slab_of(8))
    create = SlabFile.create.__func__

    def create_late(cls: type[SlabFile], *arguments, **options) -> SlabFile:
        file = create(cls, *arguments, **options)
        store.close()
        return file

    monkeypatch.setattr(SlabFile, "create", classmethod(create_late))
    for _ in range(2):
        may_grow(store)
        with pytest.raises(StoreError, match="closed"):
            write(store, KEYS[0])
    opened = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if fd.isdigit() and int(fd) > 2 and os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


class TestFullQuota:
    @pytest.mark.once
    def test_to_find_that_it_has_no_room_opens_no_slab_again(self, open_store, monkeypatch) -> None:
        """The store checks this up to once a second.

        A slab of another block size is released as soon as it is unused.
        """
        other = open_store(500, max_bytes=4 << 20)
        other.write(KEYS[:5], [aligned(bytes(500))] * 5)
        store, keys = open_store(max_bytes=4 << 20), keys_of(*range(3800))
        for start in range(0, 3800, 100):
            write(store, *keys[start : start + 100])
        assert len(slabs_of(store).open) == 3
        opened, real = list[str](), SlabFile.open
        monkeypatch.setattr(SlabFile, "open", lambda name, *arguments: opened.append(name) or real(name, *arguments))
        with upkeep_of(other).lock, upkeep_of(store).lock:
            opened.clear()
            for first in (5000, 6000):
                may_grow(store)
                assert all(write(store, *keys_of(*range(first, first + 100))))
            assert opened == []
            assert len(slabs_of(store).open) == 3
        other.close()
        may_grow(store)
        while len(slabs_of(store).open) < 4:
            may_grow(store)
            write(store, *keys_of(*range(7000, 7100)))
        assert store.stats().evicted_blocks > 0

    def test_a_directory_that_is_replaced_while_a_slab_is_made_leads_nowhere_else(
        self, open_store, tmp_path: Path, monkeypatch
    ) -> None:
        """The number of its descriptor may belong to another directory a moment later."""
        store, create = open_store(max_bytes=2 << 20), SlabFile.create.__func__
        (tmp_path / "precious").mkdir()
        held = list[int]()

        def create_late(cls: type[SlabFile], *arguments, **options) -> SlabFile:
            with monkeypatch.context() as once:
                once.setattr(SlabFile, "create", classmethod(create))
                (tmp_path / "kv" / "=").rename(tmp_path / "moved")
                (tmp_path / "kv" / "=").symlink_to(tmp_path / "precious")
                store.refresh()
                held.extend(os.open(tmp_path / "precious", os.O_RDONLY) for _ in range(8))
            return create(cls, *arguments, **options)

        monkeypatch.setattr(SlabFile, "create", classmethod(create_late))
        write(store, KEYS[0])
        monkeypatch.setattr(SlabFile, "create", classmethod(create))
        assert list((tmp_path / "precious").iterdir()) == []
        (tmp_path / "kv" / "=").unlink()
        store.refresh()
        may_grow(store)
        assert write(store, *KEYS[:4]) == [True] * 4
        assert right(store, *KEYS[:4]) == set(KEYS[:4])
        for fd in held:
            os.close(fd)


def test_the_store_has_its_former_name_too() -> None:
    assert SlabStore is DiskStore


def test_empty_entries_are_what_a_new_table_has() -> None:
    assert bytes(ENTRY_BYTES) == EMPTY_ENTRY


def test_a_slab_that_is_being_made_is_not_adopted_as_well(tmp_path: Path, monkeypatch) -> None:
    """A poll lists the slabs in the middle of the registration of one. Both would give its slots away."""
    store = DiskStore(tmp_path, SMALL, max_bytes=slab_of(8))
    poll = threading.Thread(target=store.refresh)
    is_polling, is_registering = threading.Event(), threading.Event()
    list_slabs, grow, own, move = store._directory.slabs, store._quota._make_slab, Slabs._own, SlabFile.write

    def listed_late() -> list[SlabSeen]:
        is_polling.set()
        assert is_registering.wait(120)
        return list_slabs()

    def owned_late(slabs: Slabs, slab: Slab) -> None:
        if not is_registering.is_set():
            is_registering.set()
            poll.join(0.5)
        own(slabs, slab)

    def written_late(file: SlabFile, first: int, blocks: Sequence[memoryview]) -> int:
        poll.join(120)
        assert not poll.is_alive()
        return move(file, first, blocks)

    def grown_late(name: str) -> SlabFile | None:
        poll.start()
        assert is_polling.wait(120)
        return grow(name)

    monkeypatch.setattr(store._quota, "_make_slab", grown_late)
    monkeypatch.setattr(store._directory, "slabs", listed_late)
    monkeypatch.setattr(Slabs, "_own", owned_late)
    monkeypatch.setattr(SlabFile, "write", written_late)
    assert write(store, *keys_of(*range(3))) == [True] * 3
    store.check_invariants()
    assert right(store, *keys_of(*range(3))) == set(keys_of(*range(3)))
    store.close()


def test_a_check_waits_for_the_stores_own_thread(tmp_path: Path, monkeypatch) -> None:
    store = DiskStore(tmp_path, SMALL, max_bytes=slab_of(8))
    write_changes = SlabFile.write_changes
    is_telling, is_checked, is_wrong = threading.Event(), threading.Event(), list[AssertionError]()

    def told_late(file: SlabFile, changes: npt.NDArray[np.uint32]) -> None:
        is_telling.set()
        is_checked.wait(0.5)
        write_changes(file, changes)

    def check() -> None:
        assert is_telling.wait(120)
        try:
            store.check_invariants()
        except AssertionError as exc:
            is_wrong.append(exc)
        is_checked.set()

    monkeypatch.setattr(SlabFile, "write_changes", told_late)
    checker = threading.Thread(target=check)
    checker.start()
    write(store, *keys_of(*range(3)))
    store.refresh()
    checker.join(120)
    assert not is_wrong
    store.close()
