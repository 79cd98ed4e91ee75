# SPDX-License-Identifier: Apache-2.0
"""Who may use a root: modes, owners, and links that lead nowhere. With real links and real users."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from tests.files import disk_bytes
from tests.tiering.stores.rig import KEY, OTHER, PAGED, SMALL, files, read, room_for, write
from tests.users import GROUP, NOBODY, SOMEBODY, as_user, needs_root

from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.fs import FileSystemStore, quota
from kvoffload.tiering.stores.fs.admin import StoreRoot
from kvoffload.tiering.stores.fs.quota import FileSeen
from kvoffload.tiering.stores.root import CONTROL_DIR


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def modes(root: Path) -> tuple[set[int], set[int]]:
    """Return the modes of the directories and of the files, including ``root``."""
    every = [root, *root.rglob("*")]
    return {mode(path) for path in every if path.is_dir()}, {mode(path) for path in every if path.is_file()}


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory with another user's file, which no store may touch."""
    path = tmp_path / "victim"
    path.mkdir()
    (path / "precious").write_bytes(b"p" * 1128)
    yield path
    assert (path / "precious").read_bytes() == b"p" * 1128
    assert [entry.name for entry in path.iterdir()] == ["precious"]


class TestModes:
    @pytest.mark.usefixtures("umask")
    def test_what_is_made_is_private(self, open_store, tmp_path: Path) -> None:
        store = open_store(max_bytes=room_for(2))
        write(store, *keys_of(1, 2, 3))
        assert modes(tmp_path / "kv") == ({0o700}, {0o600})

    @pytest.mark.usefixtures("umask")
    def test_or_the_groups(self, open_store, tmp_path: Path) -> None:
        store = open_store(max_bytes=room_for(2), mode="group")
        write(store, *keys_of(1, 2, 3))
        assert modes(tmp_path / "kv") == ({0o2770}, {0o660})

    def test_what_is_there_keeps_its_mode(self, open_store, tmp_path: Path) -> None:
        root = tmp_path / "kv"
        write(open_store(), KEY)
        for path in (root, root / CONTROL_DIR, root / "=", files(root)[0].parent):
            path.chmod(0o755)
        again = open_store()
        assert write(again, OTHER) == [True]
        assert read(again, KEY) == block_of(KEY, SMALL)
        assert {mode(path) for path in (root, root / CONTROL_DIR, root / "=")} == {0o755}

    def test_the_option_of_a_tier(self, tmp_path: Path) -> None:
        tier = {"type": "fs", "path": str(tmp_path / "kv"), "max_bytes": "1MiB"}
        store = parse_tier(tier | {"mode": "group"}).open_store(SMALL, "")
        store.close()
        assert mode(tmp_path / "kv") == 0o2770
        for wrong in ("public", ""):
            with pytest.raises(ConfigError, match="mode"):
                parse_tier(tier | {"mode": wrong})
            with pytest.raises(ConfigError, match="mode"):
                FileSystemStore(tmp_path / "other", SMALL, mode=wrong)  # type: ignore[arg-type]

    @needs_root
    def test_nobody_else_can_read_a_private_block(self, public: Path) -> None:
        root = public / "kv"
        old = os.umask(0)
        store = FileSystemStore(root, SMALL)
        write(store, KEY)
        os.umask(old)
        (path,) = files(root)
        for one in (root, path):
            with pytest.raises(PermissionError):
                as_user(NOBODY, lambda one=one: os.listdir(one) if one.is_dir() else one.read_bytes())
        root.chmod(0o755)
        with pytest.raises(PermissionError):
            as_user(NOBODY, path.read_bytes)
        store.close()
        root.chmod(0o711)
        with pytest.raises(ConfigError, match=r"cannot be opened .*; run as its owner"):
            as_user(NOBODY, lambda: FileSystemStore(root, SMALL))

    @needs_root
    def test_two_users_of_a_group_share_a_root_and_its_quota(self, public: Path) -> None:
        root = public / "kv"
        root.mkdir()
        os.chown(root, 0, GROUP)
        root.chmod(0o2770)

        def session(first: int) -> list[bool]:
            store = FileSystemStore(root, SMALL, max_bytes=room_for(6), mode="group")
            try:
                answers = [read(store, key) == block_of(key, SMALL) for key in keys_of(*range(first))]
                answers += write(store, *keys_of(*range(first, first + 4)))
                store.touch(keys_of(*range(first + 4)))
                return answers
            finally:
                store.close()

        assert as_user(NOBODY, lambda: session(0), gid=GROUP, umask=0o077) == [True] * 4
        assert as_user(SOMEBODY, lambda: session(4), gid=GROUP, umask=0o077) == [True] * 8
        assert as_user(NOBODY, lambda: session(0), gid=GROUP).count(True) >= 2, "those that were not the oldest"
        assert {path.lstat().st_gid for path in [root, *root.rglob("*")]} == {GROUP}
        assert {path.lstat().st_uid for path in files(root)} == {NOBODY, SOMEBODY}
        assert disk_bytes(root) <= room_for(6)
        with pytest.raises(PermissionError):
            as_user(SOMEBODY, files(root)[0].read_bytes)


class TestLinks:
    def test_directories_that_are_links_are_not_emptied(self, open_store, tmp_path: Path) -> None:
        store = open_store(max_bytes=room_for(1))
        write(store, KEY)
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "00.kvb").write_bytes(b"p")
        for fan in range(256):
            try:
                (tmp_path / "kv" / "=" / f"{fan:02x}").symlink_to(tmp_path / "precious")
            except FileExistsError:
                continue
        with pytest.raises(StoreError, match="not a directory of ours"):
            write(store, OTHER)
        assert StoreRoot(tmp_path / "kv").clear("=") == 1
        assert (tmp_path / "precious" / "00.kvb").read_bytes() == b"p"

    def test_a_control_directory_that_is_a_link_is_refused(self, open_store, tmp_path: Path, victim: Path) -> None:
        (tmp_path / "kv").mkdir()
        (tmp_path / "kv" / CONTROL_DIR).symlink_to(victim)
        with pytest.raises(ConfigError, match="is a link or a file"):
            open_store()
        with pytest.raises(ConfigError, match="is a link or a file"):
            StoreRoot(tmp_path / "kv").clear("=")

    def test_a_control_directory_that_becomes_one_is_not_written_to(
        self, open_store, tmp_path: Path, victim: Path
    ) -> None:
        store, control = open_store(max_bytes=room_for(2)), tmp_path / "kv" / CONTROL_DIR
        (control / "files").unlink()
        control.rmdir()
        control.symlink_to(victim)
        write(store, *keys_of(1, 2, 3))
        store.discard([KEY])
        assert len(files(tmp_path / "kv" / "=")) <= 2
        with pytest.raises(ConfigError, match="is a link or a file"):
            StoreRoot(tmp_path / "kv").clear("=")

    @pytest.mark.parametrize("size", [SMALL, PAGED])
    @pytest.mark.parametrize("to", ["same size", "directory", "nothing"])
    def test_a_link_in_a_blocks_place_is_no_block(
        self, open_store, tmp_path: Path, victim: Path, size: int, to: str
    ) -> None:
        store = open_store(size, max_bytes=room_for(4, size))
        write(store, KEY, size=size)
        (path,) = files(tmp_path)
        target = {"same size": tmp_path / "copy", "directory": victim, "nothing": tmp_path / "none"}[to]
        path.rename(tmp_path / "copy")
        path.symlink_to(target)
        copy = (tmp_path / "copy").read_bytes()
        written_ns = (tmp_path / "copy").stat().st_mtime_ns
        store.touch([KEY])
        assert store.contains([KEY]) == [False]
        assert read(store, KEY, size) is None
        assert store.stats().corrupt_blocks == 0
        assert write(store, KEY, size=size) == [True]
        assert not path.is_symlink()
        assert read(store, KEY, size) == block_of(KEY, size)
        path.unlink()
        path.symlink_to(target)
        store.discard([KEY])
        assert not path.is_symlink()
        assert (tmp_path / "copy").read_bytes() == copy
        assert (tmp_path / "copy").stat().st_mtime_ns == written_ns

    def test_a_pipe_in_a_blocks_place_holds_nobody_up(self, open_store, tmp_path: Path) -> None:
        store = open_store()
        write(store, KEY)
        (path,) = files(tmp_path)
        path.unlink()
        os.mkfifo(path)
        assert store.contains([KEY]) == [False]
        assert read(store, KEY) is None
        assert write(store, KEY) == [True]

    def test_a_namespaces_directory_that_is_a_link_is_not_followed(self, open_store, tmp_path: Path) -> None:
        store = open_store(max_bytes=room_for(4))
        write(store, KEY)
        linked = tmp_path / "kv" / "="
        linked.rename(tmp_path / "moved")
        linked.symlink_to(tmp_path / "moved")
        before = {one: one.read_bytes() for one in (tmp_path / "moved").rglob("*.kvb")}
        for call in (lambda: store.contains([KEY]), lambda: read(store, KEY), lambda: write(store, OTHER)):
            with pytest.raises(StoreError, match="not a directory of ours"):
                call()
        store.discard([KEY])
        store.touch([KEY])
        assert write(open_store(namespace="other", max_bytes=room_for(4)), KEY) == [True]
        StoreRoot(tmp_path / "kv").clear("=")
        with pytest.raises(ConfigError, match="not a directory of ours"):
            open_store()
        assert {one: one.read_bytes() for one in (tmp_path / "moved").rglob("*.kvb")} == before

    def test_a_fan_that_is_a_link_is_not_followed(self, open_store, tmp_path: Path) -> None:
        store = open_store(max_bytes=room_for(40))
        write(store, KEY)
        (path,) = files(tmp_path)
        moved = tmp_path / "moved"
        path.parent.rename(moved)
        path.parent.symlink_to(moved)
        (old,) = moved.iterdir()
        os.utime(old, ns=(0, 0))
        store._quota.old_before_ns = 1 << 62
        for call in (lambda: store.contains([KEY]), lambda: read(store, KEY), lambda: write(store, KEY)):
            with pytest.raises(StoreError, match="not a directory of ours"):
                call()
        store.discard([KEY])
        others = keys_of(*range(10, 30))
        assert write(store, KEY, *others) == [False] + [True] * 20, "it costs its own blocks"
        assert store.contains([KEY, *others]) == [False] + [True] * 20
        StoreRoot(tmp_path / "kv").clear("=")
        assert [(one.name, one.stat().st_mtime_ns) for one in moved.iterdir()] == [(old.name, 0)]
        path.parent.unlink()
        assert write(store, KEY) == [True], "until it is gone"

    def test_a_link_that_is_put_there_during_a_write_is_not_followed(
        self, open_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, victim, real = open_store(), tmp_path / "victim", os.writev
        write(store, KEY)
        (path,) = files(tmp_path)
        store.discard([KEY])
        victim.mkdir()

        def writev(fd: int, buffers: list[memoryview]) -> int:
            moved = real(fd, buffers)
            if not path.parent.is_symlink():
                path.parent.rename(tmp_path / "moved")
                path.parent.symlink_to(victim)
            return moved

        monkeypatch.setattr(os, "writev", writev)
        write(store, KEY)
        assert path.parent.is_symlink(), "the fault happened"
        assert list(victim.iterdir()) == []

    @pytest.mark.parametrize("part", ["namespace", "fan"])
    def test_a_link_that_is_put_there_while_files_are_listed_deletes_nothing_through_it(
        self, open_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
    ) -> None:
        store, real = open_store(max_bytes=room_for(4)), quota.in_order
        write(store, *keys_of(*range(4)))
        own, copy = tmp_path / "kv" / "=", tmp_path / "copy"
        shutil.copytree(own, copy)
        before = sorted(copy.rglob("*.kvb"))

        def exchange(seen: list[FileSeen], newest: Collection[str] = ()) -> list[FileSeen]:
            """Between the listing and the deletions."""
            for link in [own] if part == "namespace" else list(own.iterdir()):
                if not link.is_symlink():
                    link.rename(tmp_path / f"moved-{link.name}")
                    link.symlink_to(copy / link.relative_to(own))
            return real(seen, newest)

        monkeypatch.setattr(quota, "in_order", exchange)
        write(store, *keys_of(10, 11, 12))
        assert own.is_symlink() or all(fan.is_symlink() for fan in own.iterdir())
        assert sorted(copy.rglob("*.kvb")) == before


@needs_root
class TestOwners:
    def test_a_control_directory_of_another_user_is_refused(self, public: Path) -> None:
        as_user(NOBODY, lambda: (public / CONTROL_DIR).mkdir(0o777))
        with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}; .*mode='group'"):
            FileSystemStore(public, SMALL)
        with pytest.raises(ConfigError, match="belongs to user"):
            StoreRoot(public).clear("=")
        assert sorted(path.name for path in public.iterdir()) == [CONTROL_DIR]
        FileSystemStore(public, SMALL, mode="group").close()

    @pytest.mark.parametrize("kind", [FileSystemStore, DiskStore])
    def test_a_root_of_another_user_is_refused(self, public: Path, kind: type[FileSystemStore | DiskStore]) -> None:
        os.chown(public, NOBODY, NOBODY)
        with pytest.raises(ConfigError, match=f"{public} belongs to user {NOBODY}: name a directory in it"):
            kind(public, SMALL, "", 1 << 20)
        assert list(public.iterdir()) == []
        kind(public / "kv", SMALL, "", 1 << 20).close()
        kind(public, SMALL, "", 1 << 20, mode="group").close()

    @pytest.mark.parametrize("kind", [FileSystemStore, DiskStore])
    def test_a_root_of_the_administrator_is_used(self, public: Path, kind: type[FileSystemStore | DiskStore]) -> None:
        """An example is a volume that a cluster mounts for a server."""
        as_user(NOBODY, lambda: kind(public, SMALL, "", 1 << 20).close())
        assert (public / CONTROL_DIR).stat().st_uid == NOBODY

    def test_a_file_of_another_user_is_no_block(self, public: Path) -> None:
        store = FileSystemStore(public / "kv", SMALL, max_bytes=room_for(2))
        write(store, KEY)
        (path,) = files(public)
        os.chown(path, NOBODY, NOBODY)
        assert store.contains([KEY]) == [False]
        assert read(store, KEY) is None
        assert write(store, KEY) == [True]
        assert path.stat().st_uid == 0
        store.close()

    def test_a_fan_of_another_user_is_neither_counted_nor_emptied(self, open_store, tmp_path: Path) -> None:
        write(open_store(), *keys_of(*range(20)))
        theirs = next(path.parent for path in files(tmp_path))
        kept = sorted(theirs.iterdir())
        for path in kept:
            os.utime(path, ns=(0, 0))  # the oldest of all
        os.chown(theirs, NOBODY, NOBODY)
        store = open_store(max_bytes=room_for(4))
        write(store, *keys_of(*range(40, 60)))
        assert sorted(theirs.iterdir()) == kept
        assert len(files(tmp_path)) == 4 + len(kept)

    def test_nor_is_the_namespace_of_another_user(self, open_store, tmp_path: Path) -> None:
        write(open_store(namespace="theirs"), *keys_of(*range(4)))
        theirs = tmp_path / "kv" / "theirs"
        for path in files(theirs):
            os.utime(path, ns=(0, 0))
        os.chown(theirs, NOBODY, NOBODY)
        store = open_store(namespace="ours", max_bytes=room_for(4))
        write(store, *keys_of(*range(20)))
        assert (len(files(theirs)), len(files(tmp_path / "kv" / "ours"))) == (4, 4)


def test_a_mount_that_maps_user_ids(open_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with root on a network mount, files that we create belong to another user, every time."""
    monkeypatch.setattr(os, "geteuid", lambda: 424242)
    store = open_store(max_bytes=room_for(2))
    assert write(store, KEY) == [True]
    again = open_store(max_bytes=room_for(2))
    assert read(again, KEY) == block_of(KEY, SMALL)
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [CONTROL_DIR, "="]
