# SPDX-License-Identifier: Apache-2.0
"""Test a pool: slabs on a memory file system that the processes of a host share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forks import Fork, output_of, output_of_module
from tests.memory_files import memory_directory, unbounded_directory
from tests.sizes import by_size
from tests.tiering.stores.disk.rig import (
    PAGED,
    SMALL,
    aligned,
    damage,
    here,
    hold_open,
    may_grow,
    payloads,
    right,
    slab_of,
    slabs_of,
    write,
)

from kvoffload.cpu import memory_limits
from kvoffload.cpu.memory_limits import check_pool, memory_file_system
from kvoffload.errors import CapacityError, ConfigError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk import quota as quota_module
from kvoffload.tiering.stores.disk.quota import check_memory

KEYS = keys_of(*range(100))
KILLS = by_size(quick=8, thorough=400)


@pytest.fixture
def pool() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "kv"


def test_a_memory_file_system_without_a_size_has_room(tmp_path: Path) -> None:
    with unbounded_directory(tmp_path / "memory") as path:
        tier = parse_tier({"type": "disk", "path": str(path / "kv"), "max_bytes": slab_of(20)})
        store = tier.open_store(SMALL, "")
        assert write(store, *KEYS[:10]) == [True] * 10
        assert store.stats().free_bytes is None
        store.close()


class TestFiles:
    @pytest.mark.parametrize("size", [SMALL, PAGED])
    def test_blocks_are_copied_and_neither_read_nor_written(self, pool: Path, monkeypatch, size: int) -> None:
        store = DiskStore(pool, size, max_bytes=slab_of(20, size))
        write(store, KEYS[0], size=size)
        for call in ("preadv", "pwritev"):
            real = getattr(os, call)

            def on_tables(fd: int, *arguments, real=real) -> int:
                assert os.readlink(f"/proc/self/fd/{fd}").endswith(".table")
                return real(fd, *arguments)

            monkeypatch.setattr(os, call, on_tables)
        assert write(store, *KEYS[1:20], size=size) == [True] * 19
        assert right(store, *KEYS[:20], size=size) == set(KEYS[:20])
        assert write(store, *KEYS[20:25], size=size) == [True] * 5
        assert right(store, *KEYS, size=size) == here(store, *KEYS)
        store.close()
        store = DiskStore(pool, size, max_bytes=slab_of(20, size))
        assert right(store, *KEYS, size=size) >= set(KEYS[20:25])
        store.check_invariants()
        store.close()

    def test_a_closed_store_leaves_no_memory_mapped(self, pool: Path) -> None:
        store = DiskStore(pool, PAGED, max_bytes=slab_of(8, PAGED))
        write(store, *KEYS[:4], size=PAGED)
        maps = Path("/proc/self/maps")
        assert str(pool) in maps.read_text()
        store.close()
        assert str(pool) not in maps.read_text()

    def test_damage_is_a_miss(self, pool: Path) -> None:
        store = DiskStore(pool, SMALL, max_bytes=slab_of(8))
        write(store, *KEYS[:4])
        damage(pool, KEYS[1])
        assert right(store, *KEYS[:4]) == {KEYS[0], KEYS[2], KEYS[3]}
        assert store.stats().corrupt_blocks == 1
        store.close()

    def test_a_file_that_was_cut_off_is_a_miss_and_kills_nobody(self, pool: Path) -> None:
        """The test runs in its own process, which the kernel would otherwise end with SIGBUS."""
        script = """
import os, sys
from pathlib import Path
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk import DiskStore
size, max_bytes, *cuts = map(int, sys.argv[2:])
keys = keys_of(*range(6))
blocks = [memoryview(block_of(key, size)) for key in keys]
for left in cuts:
    root = Path(sys.argv[1], str(left))
    store = DiskStore(root, size, max_bytes=max_bytes)
    store.write(keys, blocks)
    (path,) = root.rglob("*.slab")
    os.truncate(path, left)
    buffers = [memoryview(bytearray(size)) for _ in keys]
    for answers in (store.read_into(keys, buffers), store.write(keys, blocks), store.read_into(keys, buffers)):
        print(sum(answers), flush=True)
        assert all(not good or buffer == block for good, buffer, block in zip(answers, buffers, blocks))
    store.close()
"""
        cuts = (0, 1, 4096, 3 * PAGED + 1)
        said = output_of(script, pool, PAGED, slab_of(8, PAGED), *cuts).split()
        assert said == [word for left in cuts for word in (str(left // PAGED), "6", "6")]

    def test_a_file_with_holes_is_not_mapped(self, pool: Path) -> None:
        """Touching a hole would kill the process once the file system is full."""
        store = DiskStore(pool, PAGED, max_bytes=slab_of(8, PAGED))
        write(store, *KEYS[:1], size=PAGED)
        store.close()
        (path,) = payloads(pool)
        for size in (0, path.stat().st_size):
            os.truncate(path, size)
        store = DiskStore(pool, PAGED, max_bytes=slab_of(8, PAGED))
        assert right(store, *KEYS[:1], size=PAGED) == set()
        assert write(store, *KEYS[:4], size=PAGED) == [True] * 4
        assert str(payloads(pool)[0]) not in Path("/proc/self/maps").read_text()
        assert right(store, *KEYS[:4], size=PAGED) == set(KEYS[:4])
        store.close()


def open_tier(pool: Path, max_bytes: int) -> BlockStore:
    return parse_tier({"type": "disk", "path": str(pool), "max_bytes": max_bytes}).open_store(PAGED, "")


class TestMemory:
    @pytest.fixture
    def available(self, monkeypatch) -> list[int]:
        """Return the memory that the system reports as available, which the test changes."""
        said = [1 << 40]
        monkeypatch.setattr(memory_limits, "available_bytes", lambda: said[0])
        monkeypatch.setattr(quota_module, "available_bytes", lambda: said[0])
        return said

    def test_file_systems(self, pool: Path) -> None:
        assert memory_file_system(pool.parent) == "tmpfs"
        assert memory_file_system("/proc") is None
        assert memory_file_system(pool / "absent") is None

    def test_more_than_is_available_is_refused(self, pool: Path, available: list[int]) -> None:
        available[0] = 1 << 20
        with pytest.raises(CapacityError, match=r"lower max_bytes, free memory, or raise the limit"):
            open_tier(pool, (1 << 20) + 1)
        assert not pool.exists()
        open_tier(pool, 1 << 20).close()
        check_memory(str(pool), 1 << 19, beside_bytes=1 << 19)
        with pytest.raises(CapacityError, match=r"available.*in addition to 512 KiB of host memory"):
            check_memory(str(pool), 1 << 20, beside_bytes=1 << 19)

    def test_more_than_the_mount_has_is_refused(self, pool: Path, available: list[int]) -> None:
        disk = os.statvfs(pool.parent)
        available[0] = 1 << 60
        with pytest.raises(CapacityError, match="docker: --shm-size"):
            open_tier(pool, disk.f_blocks * disk.f_frsize * 2)

    def test_slabs_that_exist_are_not_counted_twice(self, pool: Path, available: list[int]) -> None:
        """They are already in use, so they are no longer counted as available."""
        max_bytes = 4 << 20
        store = DiskStore(pool, PAGED, max_bytes=max_bytes)
        keys = keys_of(*range(400))
        for start in range(0, 400, 100):
            write(store, *keys[start : start + 100], size=PAGED)
        store.close()
        used = sum(path.stat().st_size for path in (pool / "=").iterdir())
        available[0] = max_bytes - used + 8192
        open_tier(pool, max_bytes).close()
        available[0] = max_bytes - used - 8192
        with pytest.raises(CapacityError):
            open_tier(pool, max_bytes)
        with pytest.raises(CapacityError):
            check_pool(max_bytes, 0, pool)

    def test_no_slab_is_made_for_which_there_is_no_memory(self, pool: Path, available: list[int]) -> None:
        """Other programs used the memory in the meantime. Existing blocks make room, and nothing is killed."""
        store, keys = DiskStore(pool, PAGED, max_bytes=4 << 20), keys_of(*range(400))
        write(store, *keys[:100], size=PAGED)
        available[0] = 10_000
        for start in range(100, 400, 100):
            may_grow(store)
            assert write(store, *keys[start : start + 100], size=PAGED) == [True] * 100
        assert len(payloads(pool)) == 1
        available[0] = 1 << 40
        may_grow(store)
        while len(payloads(pool)) == 1:
            may_grow(store)
            write(store, *keys[:100], size=PAGED)
            write(store, *keys[100:200], size=PAGED)
        store.close()

    def test_hugetlbfs_is_refused(self, pool: Path, monkeypatch) -> None:
        monkeypatch.setattr(quota_module, "memory_file_system", lambda path: "hugetlbfs")
        with pytest.raises(ConfigError, match="choose a directory on a tmpfs"):
            open_tier(pool, 1 << 20)

    def test_a_tier_needs_max_bytes(self, pool: Path) -> None:
        options = parse_tier({"type": "disk", "path": str(pool)})
        with pytest.raises(ConfigError, match=r"is in memory \(tmpfs\); set max_bytes"):
            options.open_store(PAGED, "")
        assert not pool.exists()
        parse_tier({"type": "disk", "path": str(pool), "max_bytes": "1MiB"}).open_store(PAGED, "").close()


def test_a_second_process_hits_what_the_first_stored(pool: Path) -> None:
    first = Fork(hold_open, str(pool), PAGED, 4 << 20, 0, 20)
    assert first.pipe.recv() == 20
    second = DiskStore(pool, PAGED, max_bytes=4 << 20)
    assert right(second, *KEYS[:30], size=PAGED) == set(KEYS[:20])
    assert write(second, *KEYS[15:25], size=PAGED) == [True] * 10
    first.kill()
    second.refresh()
    assert right(second, *KEYS[:30], size=PAGED) == set(KEYS[:25]), "of the dead, too"
    assert all(slab.is_own for slab in slabs_of(second).open.values())
    second.close()


def test_killed_processes_lose_nothing_of_what_was_stored(pool: Path) -> None:
    print(output_of_module("tests.integration.pool_killer", pool, KILLS))


def test_the_right_block_is_read_from_aligned_and_other_memory(pool: Path) -> None:
    store = DiskStore(pool, PAGED, max_bytes=slab_of(8, PAGED))
    odd = memoryview(bytearray(PAGED + 7))[7:]
    odd[:] = block_of(KEYS[0], PAGED)
    assert store.write(KEYS[:2], [odd, aligned(block_of(KEYS[1], PAGED))]) == [True] * 2
    odd[:] = bytes(PAGED)
    assert store.read_into([KEYS[0]], [odd]) == [True]
    assert odd == block_of(KEYS[0], PAGED)
    store.close()
