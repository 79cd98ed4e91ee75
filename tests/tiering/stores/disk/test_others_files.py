# SPDX-License-Identifier: Apache-2.0
"""Files of other programs below a root, and slabs that a member of the root's group has damaged on purpose."""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path

import pytest
from tests.files import CountedNames, disk_bytes
from tests.tiering.stores.disk.rig import (
    PAGED,
    SMALL,
    here,
    may_grow,
    payloads,
    read,
    slab_of,
    slabs_of,
    tables,
    write,
)

from kvoffload.cpu.memory_limits import SHM
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.admin import DiskRoot
from kvoffload.tiering.stores.disk.format import SlabFormat

KEYS = keys_of(*range(200))


@pytest.fixture
def theirs(tmp_path: Path) -> dict[Path, bytes]:
    """Among them names that slabs have."""
    root, made = tmp_path / "kv", dict[Path, bytes]()
    names = [
        "1.table",
        "1.slab",
        "cafe.slab",
        "new-7.slab",
        "0123456789abcdef.table",
        "0123456789abcdef.slab",
    ]
    made |= {root / folder / name: b"precious" * 1000 for folder in ("app", "app/photos") for name in names}
    made[root / "app" / "feed.table"] = b""
    made[root / "=" / "1.table"] = b"precious" * 1000
    for path, content in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return made


def test_files_of_other_programs_are_left_alone_whatever_they_are_called(
    theirs: dict[Path, bytes], tmp_path: Path
) -> None:
    root = tmp_path / "kv"
    store = DiskStore(root, SMALL, max_bytes=2 * slab_of(8) + 8000)
    for first in range(0, 60, 4):
        assert write(store, *KEYS[first : first + 4]) == [True] * 4
    assert slabs_of(store).num_slots >= 16, "they take nothing of the quota"
    store.close()
    other = DiskStore(root, PAGED, "another", max_bytes=slab_of(8, PAGED))
    write(other, *KEYS[:4], size=PAGED)
    other.close()
    found = DiskRoot(root)
    assert set(found.directories()) <= {"=", "another"}
    for directory in found.directories():
        found.clear(directory)
    assert {path: path.read_bytes() for path in theirs} == theirs


def test_an_empty_folder_of_another_program_stays(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", SMALL, max_bytes=slab_of(8))
    write(store, *KEYS[:4])
    store.close()
    (tmp_path / "kv" / "app" / "empty").mkdir(parents=True)
    found = DiskRoot(tmp_path / "kv")
    for directory in found.directories():
        found.clear(directory)
    assert (tmp_path / "kv" / "app" / "empty").is_dir()
    assert not (tmp_path / "kv" / "=").exists()


def test_a_copy_of_a_namespace_is_another_programs(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", SMALL, max_bytes=slab_of(8))
    write(store, *KEYS[:4])
    store.close()
    (tmp_path / "kv" / "=").rename(tmp_path / "kv" / "backup")
    store = DiskStore(tmp_path / "kv", SMALL, max_bytes=slab_of(8))
    assert write(store, *KEYS[:4]) == [True] * 4
    store.close()
    assert len(tables(tmp_path / "kv" / "backup")) == 1


def test_a_large_folder_of_another_program_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read with the root's lock held, whenever there is no room for a slab."""
    (tmp_path / "kv" / "app").mkdir(parents=True)
    for number in range(40_000):
        (tmp_path / "kv" / "app" / f"photo-{number}.jpg").touch()
    names = CountedNames(monkeypatch)
    store = DiskStore(tmp_path / "kv", SMALL, max_bytes=slab_of(8))
    before = names.num_read
    assert write(store, KEYS[0]) == [True]
    assert names.num_read - before < 20_000
    store.close()


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_namespace_with_blank_tables_gives_way(tmp_path: Path, is_cut: bool) -> None:
    """After a power failure, recent tables are empty or full of zeros."""
    size, max_bytes = 1 << 16, 4 << 20
    store = DiskStore(tmp_path / "kv", size, "old", max_bytes=max_bytes)
    for first in range(0, 60, 4):
        write(store, *KEYS[first : first + 4], size=size)
    store.close()
    assert len(tables(tmp_path / "kv")) > 1
    for path in tables(tmp_path / "kv"):
        table_bytes = path.stat().st_size
        os.truncate(path, 0)
        os.truncate(path, 0 if is_cut else table_bytes)
    assert DiskRoot(tmp_path / "kv").directories() == ["old"]
    store = DiskStore(tmp_path / "kv", size, "new", max_bytes=max_bytes)
    for first in range(0, 60, 4):
        assert write(store, *KEYS[first : first + 4], size=size) == [True] * 4
        may_grow(store)
    assert disk_bytes(tmp_path / "kv") <= max_bytes
    store.close()


class TestMembers:
    """Test members of a group that shares a root."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        path = tmp_path / "kv"
        path.mkdir()
        path.chmod(0o2770)
        return path

    @pytest.mark.parametrize("payload", ["empty", "sparse"])
    def test_slabs_that_take_no_disk_take_no_memory(self, root: Path, payload: str) -> None:
        store = DiskStore(root, PAGED, max_bytes=slab_of(8, PAGED), mode="group")
        write(store, *KEYS[:2], size=PAGED)
        layout, num_slots = SlabFormat("=", PAGED), 1000
        for _ in range(5):
            name = root / "=" / secrets.token_hex(8)
            for suffix, size in ((".table", layout.table_bytes(num_slots)), (".slab", num_slots * PAGED)):
                with name.with_suffix(suffix).open("wb") as file:
                    file.write(layout.header(num_slots) if suffix == ".table" else b"")
                    if suffix == ".table" or payload == "sparse":
                        file.truncate(size)
                name.with_suffix(suffix).chmod(0o660)
        store.refresh()
        assert len(slabs_of(store).open) == 1
        for first in range(0, 12, 4):
            assert write(store, *KEYS[first : first + 4], size=PAGED) == [True] * 4
        store.close()

    def test_slabs_that_a_file_system_compresses_are_used(self, root: Path) -> None:
        """It reports little space for their content. Files with punched holes look the same."""
        store = DiskStore(root, PAGED, max_bytes=slab_of(64, PAGED), mode="group")
        assert store.write(KEYS[:4], [memoryview(bytes(PAGED)) for _ in range(4)]) == [True] * 4
        store.close()
        for path in payloads(root):
            size = path.stat().st_size
            os.truncate(path, 0)
            os.truncate(path, size)
            assert path.stat().st_blocks == 0
        store = DiskStore(root, PAGED, max_bytes=slab_of(64, PAGED), mode="group")
        assert here(store, *KEYS[:4]) == set(KEYS[:4])
        assert read(store, KEYS[0], PAGED) == bytes(PAGED)
        assert write(store, *KEYS[4:8], size=PAGED) == [True] * 4
        store.close()

    def test_a_slab_that_was_cut_off_is_no_room(self, root: Path) -> None:
        store = DiskStore(root, SMALL, max_bytes=slab_of(8), mode="group")
        other = DiskStore(root, SMALL, max_bytes=slab_of(8), mode="group")
        write(store, *KEYS[:8])
        for path in payloads(root):
            os.truncate(path, 0)
        may_grow(other)
        other.write([KEYS[20]], [memoryview(block_of(KEYS[20], SMALL))])
        write(store, *KEYS[30:38])
        assert disk_bytes(root) <= slab_of(8)
        store.close()
        other.close()

    def test_a_slab_that_was_cut_off_is_left_out_and_gives_way(self, root: Path) -> None:
        store = DiskStore(root, SMALL, max_bytes=slab_of(8), mode="group")
        write(store, *KEYS[:8])
        store.close()
        for path in payloads(root):
            os.truncate(path, 0)
        store = DiskStore(root, SMALL, max_bytes=slab_of(8), mode="group")
        assert here(store, *KEYS[:8]) == set()
        assert write(store, *KEYS[:8]) == [True] * 8
        assert len(tables(root)) == 1
        store.close()

    def test_memory_that_is_cut_off_at_any_moment_kills_nobody(self, tmp_path: Path) -> None:
        """Even between the question for its size and the copy."""
        if not SHM.is_dir():
            pytest.skip("there is no shared memory")
        root = SHM / f"kvoffload-test-{secrets.token_hex(8)}"
        root.mkdir()
        root.chmod(0o2770)
        try:
            store = DiskStore(root, PAGED, max_bytes=slab_of(300, PAGED), mode="group")
            write(store, *KEYS[:8], size=PAGED)
            (path,) = payloads(root)
            child = os.fork()
            if not child:
                code = 1
                try:
                    real = os.fstat

                    def fstat(fd: int) -> os.stat_result:
                        status = real(fd)
                        os.truncate(path, 0)
                        return status

                    fresh = DiskStore(root, PAGED, max_bytes=slab_of(300, PAGED), mode="group")
                    os.fstat = fstat  # type: ignore[assignment]
                    code = int(read(fresh, KEYS[0], PAGED) not in (None, block_of(KEYS[0], PAGED)))
                    write(fresh, *KEYS[8:9], size=PAGED)
                finally:
                    os._exit(code)
            status = os.waitpid(child, 0)[1]
            assert not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGBUS
            assert status == 0
            store.close()
        finally:
            for path in sorted(root.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            root.rmdir()
