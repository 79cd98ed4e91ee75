# SPDX-License-Identifier: Apache-2.0
"""Test files of other programs below a root: they do not count and are never deleted, whatever their names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.files import CountedNames, disk_bytes
from tests.tiering.stores.rig import KEY, SMALL, files, here, path_of, room_for, write

from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.stores.fs.admin import StoreRoot
from kvoffload.tiering.stores.fs.format import SUFFIX

LONG_AGO_NS = 10**18


def put(path: Path, content: bytes = b"precious" * 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return path


@pytest.fixture
def theirs(open_store, tmp_path: Path) -> list[Path]:
    """Among them names that blocks and unfinished blocks have, in folders of the same form."""
    store, root = open_store(), tmp_path / "kv"
    names = ["model.kvb", "tmp-upload.bin", "tmp-0123456789abcdef-7", Path(path_of(store, KEY)).name]
    fan = Path(path_of(store, KEY)).parent.name
    made = [put(root / folder / fan / name) for folder in ("app", "other") for name in names]
    made += [put(root / folder / fan / name) for folder in ("=",) for name in ("model.kvb", "tmp-upload.bin")]
    made += [put(root / "app" / fan / f"empty{SUFFIX}", b""), put(root / "app" / "readme")]
    (root / "app" / "empty").mkdir()
    return made


def test_a_quota_and_a_scan_leave_them_alone(open_store, theirs: list[Path], tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(8))
    for number in range(40):
        write(store, *keys_of(100 + number))
    assert list(store.scan())
    assert all(path.exists() for path in theirs)
    assert len(here(store, *keys_of(*range(132, 140)))) == 8, "they take nothing of the quota"


def test_commands_leave_them_alone(open_store, theirs: list[Path], tmp_path: Path) -> None:
    write(open_store(), *keys_of(*range(5)))
    root = StoreRoot(tmp_path / "kv")
    assert root.directories() == ["="]
    assert [one.num_blocks for one in root.usage()] == [5]
    for directory in root.directories():
        root.clear(directory)
    assert all(path.exists() for path in theirs)
    assert (tmp_path / "kv" / "app" / "empty").is_dir()


def test_a_blocks_name_alone_proves_nothing(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, *keys_of(*range(4)))
    strange = put(tmp_path / "kv" / path_of(store, KEY))
    for number in range(20):
        write(store, *keys_of(100 + number))
    assert strange.read_bytes() == b"precious" * 1000
    assert disk_bytes(tmp_path / "kv") - strange.stat().st_size <= room_for(4)


def test_a_block_without_content_goes_as_if_it_had_some(open_store, tmp_path: Path) -> None:
    """A power failure leaves such files, which have their full length and use up quota."""
    store = open_store(max_bytes=room_for(4))
    write(store, *keys_of(*range(4)))
    for path in files(tmp_path)[:2]:
        put(path, bytes(path.stat().st_size))
    for number in range(8):
        write(store, *keys_of(100 + number))
    assert not {path for path in files(tmp_path) if not path.read_bytes().strip(b"\0")}


def test_a_copy_of_a_namespace_is_another_programs(open_store, tmp_path: Path) -> None:
    """An example is a backup beside it, whose headers name another directory."""
    store, root = open_store(max_bytes=room_for(4)), tmp_path / "kv"
    write(store, *keys_of(*range(4)))
    shutil.copytree(root / "=", root / "backup")
    before = files(root / "backup")
    for number in range(20):
        write(store, *keys_of(100 + number))
    assert StoreRoot(root).directories() == ["="]
    assert files(root / "backup") == before


def test_a_namespace_that_nobody_uses_counts_and_gives_way(open_store, tmp_path: Path) -> None:
    write(open_store(namespace="old"), *keys_of(*range(6)))
    store = open_store(max_bytes=room_for(8))
    for number in range(20):
        write(store, *keys_of(100 + number))
    assert files(tmp_path / "kv" / "old") == []
    assert disk_bytes(tmp_path / "kv") <= room_for(8)


def test_a_large_directory_is_listed_by_several_writes(open_store, tmp_path: Path, monkeypatch) -> None:
    """On a slow mount one write would take many seconds for it."""
    from kvoffload.tiering.stores.fs import owned, quota

    monkeypatch.setattr(quota, "_MOST_IN_A_WRITE", 64)
    monkeypatch.setattr(quota, "NAMES_AT_ONCE", 16)
    monkeypatch.setattr(owned, "NAMES_AT_ONCE", 16)
    many = open_store(max_bytes=None)
    write(many, *keys_of(*range(1000)))
    store, looked_at = open_store(max_bytes=room_for(300)), list[str]()
    real, unlink = os.lstat, os.unlink
    monkeypatch.setattr(os, "lstat", lambda path, **rest: looked_at.append(path) or real(path, **rest))
    monkeypatch.setattr(os, "unlink", lambda path, **rest: looked_at.append(path) or unlink(path, **rest))
    most = 0
    for number in range(600):
        looked_at.clear()
        write(store, *keys_of(2000 + number))
        most = max(most, len(looked_at))
    assert most <= 64 + 2 * 16
    assert disk_bytes(tmp_path) <= 1.1 * room_for(300)
    assert here(store, *keys_of(*range(2500, 2600))) == set(keys_of(*range(2500, 2600)))
    assert SMALL


def test_a_write_reads_a_limited_number_of_other_programs_names(open_store, tmp_path: Path, monkeypatch) -> None:
    """They are in a folder for blocks, so every listing meets them."""
    store = open_store(max_bytes=room_for(40))
    write(store, *keys_of(*range(40)))
    fan = files(tmp_path)[0].parent
    for number in range(20_000):
        (fan / f"photo-{number}.jpg").touch()
    names = CountedNames(monkeypatch)
    most = total = 0
    for number in range(100, 200):
        names.num_read = 0
        write(store, *keys_of(number))
        most, total = max(most, names.num_read), total + names.num_read
    assert total >= 20_000, "all of them are read, by several writes"
    assert most <= 4096 + 1024
    names.num_read = 0
    for _ in store.scan():
        assert names.num_read <= 1024
        names.num_read = 0


@pytest.mark.parametrize("size", [0, SMALL])
def test_a_namespace_with_many_blank_files_gives_way(open_store, tmp_path: Path, size: int) -> None:
    """After a power failure, recent files are empty or full of zeros. Perhaps all of them."""
    write(open_store(namespace="old"), *keys_of(*range(100)))
    for path in files(tmp_path / "kv" / "old"):
        os.truncate(path, 0)
        os.truncate(path, size)
    store = open_store(max_bytes=room_for(8))
    assert "old" in StoreRoot(tmp_path / "kv").directories()
    for number in range(20):
        write(store, *keys_of(100 + number))
    assert files(tmp_path / "kv" / "old") == []
