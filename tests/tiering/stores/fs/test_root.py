# SPDX-License-Identifier: Apache-2.0
"""FileSystemStore and its root: failing disks, namespaces, and mistakes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.files import disk_bytes
from tests.tiering.stores.rig import (
    KEY,
    OTHER,
    SMALL,
    files,
    here,
    read,
    room_for,
    write,
)

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores import local, root
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.admin import StoreRoot
from kvoffload.tiering.stores.root import directory_of, namespace_of


def test_a_root_that_goes_away_and_comes_back(open_store, tmp_path: Path) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, KEY, OTHER)
    shutil.rmtree(tmp_path / "kv")
    for call in (lambda: store.contains([KEY]), lambda: read(store, KEY), lambda: write(store, KEY)):
        with pytest.raises(StoreError):
            call()
    store.touch([KEY])
    store.discard([OTHER])
    assert not (tmp_path / "kv").exists(), "a mount that went away is not written under"
    (tmp_path / "kv").mkdir()
    assert store.contains([KEY]) == [False]
    assert read(store, KEY) is None
    for _ in range(3):
        assert write(store, *keys_of(*range(10, 14))) == [True] * 4
    assert here(store, *keys_of(*range(10, 14))) == set(keys_of(*range(10, 14)))
    assert disk_bytes(tmp_path / "kv") <= room_for(4)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces ``/``: with ``mnt``, and ``data`` that ``fstab`` mounts."""
    for name in ("mnt/nvme", "data", "home"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "fstab").write_text(
        f"# comment\n\n/dev/sda1 / ext4\n/dev/sdb1 {tmp_path}/data ext4\n/dev/sdc1 {tmp_path}/home/disk xfs\n"
    )
    monkeypatch.setattr(root, "_SYSTEM", str(tmp_path))
    monkeypatch.setattr(root, "_MOUNTS", (str(tmp_path / "mnt"),))
    monkeypatch.setattr(root, "_FSTAB", str(tmp_path / "fstab"))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "is_warned"),
    [("mnt/nvme/kv", True), ("data/kv", True), ("new/kv", True), ("home/disk", True), ("home/kv", False)],
)
def test_a_disk_that_was_not_mounted_is_a_warning_once(
    system: Path, caplog: pytest.LogCaptureFixture, path: str, is_warned: bool
) -> None:
    for warned in (is_warned, False):
        caplog.clear()
        parse_tier({"type": "fs", "path": str(system / path), "max_bytes": "1MiB"}).open_store(SMALL, "ns").close()
        assert ("on the system's disk" in caplog.text) == warned


def test_a_mounted_disk_is_no_warning(system: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root, "_MOUNTS", (str(small_disk),))
    assert not root.lacks_mount(str(small_disk / "kv"))


def test_a_mount_that_hangs_at_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is NFS without its server, on which a system call waits forever."""
    options = {"type": "fs", "path": str(tmp_path / "kv"), "max_bytes": "1MiB", "timeout_s": 0.01}
    may_open, is_closed = threading.Event(), threading.Event()
    make: Callable[..., None] = FileSystemStore.__init__

    def hang(store: FileSystemStore, *args: object, **rest: object) -> None:
        may_open.wait(20)
        make(store, *args, **rest)

    monkeypatch.setattr(local, "_OPEN_S", 0.05)
    monkeypatch.setattr(FileSystemStore, "__init__", hang)
    monkeypatch.setattr(FileSystemStore, "close", lambda store: is_closed.set())
    with pytest.raises(ConfigError, match="kv of the 'fs' tier did not open within"):
        parse_tier(options).open_store(SMALL, "ns")
    may_open.set()
    assert is_closed.wait(60), "nobody uses what opens too late"


def test_a_disk_that_becomes_read_only(small_disk: Path) -> None:
    store = FileSystemStore(small_disk, SMALL, max_bytes=room_for(10))
    write(store, KEY)
    store.close()
    store = FileSystemStore(small_disk, SMALL, max_bytes=room_for(10))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert store.contains([KEY]) == [True]
    with pytest.raises(StoreError, match="Read-only"):
        write(store, OTHER)
    store.touch([KEY])
    store.discard([KEY])
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert write(store, OTHER) == [True]
    assert read(store, OTHER) == block_of(OTHER, SMALL)
    store.close()


def test_a_root_that_goes_away_in_the_middle_of_a_write_is_not_made_again(
    open_store, tmp_path: Path, monkeypatch
) -> None:
    """Files written to that path would be on another disk, to which the quota does not apply."""
    store, root = open_store(max_bytes=room_for(8)), tmp_path / "kv"
    real_rename = os.rename

    def rename(temporary: str, final: str) -> None:
        if root.exists():
            real_rename(root, tmp_path / "away")
        real_rename(temporary, final)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(StoreError):
            write(store, KEY)
    assert not root.exists()
    (tmp_path / "away").rename(root)
    assert write(store, KEY) == [True]
    assert read(store, KEY) == block_of(KEY, SMALL)


@pytest.mark.parametrize("path", ["disk", "link"])
def test_a_mount_point_without_its_mount_is_not_written_to(small_disk: Path, path: str) -> None:
    small_disk.with_name("link").symlink_to(small_disk)
    store = FileSystemStore(small_disk.with_name(path), SMALL)
    write(store, KEY)
    subprocess.run(["mount", "-t", "tmpfs", "none", small_disk], check=True)  # the files below are hidden
    assert write(store, KEY) == [True], "a mount all the same"
    subprocess.run(["umount", small_disk], check=True)
    assert read(store, KEY) == block_of(KEY, SMALL)
    subprocess.run(["umount", small_disk], check=True)
    with pytest.raises(StoreError, match="is gone"):
        write(store, OTHER)
    assert read(store, KEY) is None
    assert list(small_disk.iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "none", small_disk], check=True)
    assert write(store, OTHER) == [True]
    store.close()


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    store = FileSystemStore(tmp_path / "kv", SMALL, max_bytes=room_for(4))
    assert write(store, KEY) == [True]
    assert read(store, KEY) == block_of(KEY, SMALL)
    assert StoreRoot(tmp_path / "kv").clear("=") == 1
    store.close()


@pytest.mark.parametrize("namespace", ["", "a", "org/model", "..", ".kvoffload", "=", "%2F", "ü" * 20, "a b", "~~"])
def test_any_namespace_is_one_directory_and_readable_again(namespace: str) -> None:
    directory = directory_of(namespace)
    assert "/" not in directory
    assert not directory.startswith(".")
    assert namespace_of(directory) == namespace


def test_long_namespaces_are_kept_apart() -> None:
    long = ["m/" * 300 + str(number) for number in range(3)]
    assert len({directory_of(name) for name in long}) == 3
    assert all(len(directory_of(name)) <= 255 for name in long)


@pytest.mark.parametrize("length", [1, 112, 113, 255, 5000])
def test_keys_longer_than_a_file_name_are_blocks_like_any_other(open_store, tmp_path: Path, length: int) -> None:
    one, two = (OffloadKey(bytes(length - 1) + bytes([last])) for last in (1, 2))
    store = open_store(max_bytes=room_for(2))
    assert write(store, one, two) == [True, True]
    assert (read(store, one), read(store, two)) == (block_of(one, SMALL), block_of(two, SMALL))
    store.close()
    again = open_store(max_bytes=room_for(2))
    found = {key for batch in again.scan() for key in batch}
    assert found == ({one, two} if length <= 112 else set()), "a digest does not give the key back"
    assert here(again, one, two) == {one, two}
    again.discard([one])
    assert here(again, one, two) == {two}
    for path in files(tmp_path):
        os.utime(path, ns=(10**18, 10**18))  # older than later files, however long a tick of the file system's clock is
    assert write(again, KEY, OTHER) == [True, True]
    assert here(again, one, two) == set(), "evicted"


def test_foreign_names_are_nobodys_blocks(open_store, tmp_path: Path) -> None:
    """Upper case, white space, and the right name in the wrong place: no lookup would ever find these files."""
    store = open_store()
    (key,) = keys_of(0xABCDEF)
    write(store, key)
    (path,) = files(tmp_path)
    stem = path.stem
    (path.parent.parent / "zz").mkdir()
    for foreign in (stem.upper(), f" {stem}", f"{stem[:2]} {stem[2:]}", f"{stem}\n", f"../zz/{stem}", "xyz"):
        shutil.copy(path, path.parent / f"{foreign}.kvb")
    assert len(files(tmp_path)) == 7
    store.close()
    again = open_store()
    assert [key for batch in again.scan() for key in batch] == [key]


def test_mistakes_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    for options in ({"max_bytes": 100}, {"mode": "maybe"}):
        with pytest.raises(ConfigError):
            FileSystemStore(root, SMALL, **options)
    with pytest.raises(ConfigError):
        FileSystemStore(root, 0)
    assert not root.exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created"):
        FileSystemStore(tmp_path / "file", SMALL)


def test_a_root_of_a_disk_tier_is_refused(tmp_path: Path) -> None:
    """Neither counts the other's files, so the quota would hold twice."""
    DiskStore(tmp_path / "kv", SMALL, max_bytes=1 << 20).close()
    with pytest.raises(ConfigError, match="belongs to a tier of type 'disk'; choose another directory"):
        FileSystemStore(tmp_path / "kv", SMALL, max_bytes=1 << 20)
