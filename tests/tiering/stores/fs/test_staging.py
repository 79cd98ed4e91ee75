# SPDX-License-Identifier: Apache-2.0
"""Staging directories: whose they are, and when they go."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
from pathlib import Path

import pytest
from tests.files import disk_bytes
from tests.tiering.stores.rig import KEY, OTHER, SMALL, read, room_for, write

from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.staging import StagingDirectory, sweep, writers_alive
from kvoffload.tiering.stores.root import CONTROL_DIR


def test_paths_are_unique_and_in_a_directory_of_the_writers_own(tmp_path: Path) -> None:
    one, two = StagingDirectory(str(tmp_path)), StagingDirectory(str(tmp_path))
    paths = [path for writer in (one, two, one) for path in writer.new_paths(3)]
    assert len(set(paths)) == 9
    assert {str(Path(path).parent) for path in paths} == {one.path, two.path}
    one.close()
    two.close()
    assert not Path(one.path).exists()


def test_a_sweep_removes_the_directories_of_dead_writers(tmp_path: Path) -> None:
    alive, dead = StagingDirectory(str(tmp_path)), StagingDirectory(str(tmp_path))
    for path in alive.new_paths(1) + dead.new_paths(1):
        Path(path).write_bytes(b"incomplete")
    assert writers_alive(str(tmp_path)) == {alive.token, dead.token}
    dead._release()  # as the kernel does when a process dies
    assert writers_alive(str(tmp_path)) == {alive.token, dead.token}, "until a sweep"
    assert sweep(str(tmp_path)) == 1
    assert not Path(dead.path).exists()
    assert [path.read_bytes() for path in Path(alive.path).iterdir()] == [b"incomplete"]
    alive.close()


def test_a_directory_that_was_removed_is_made_again_and_a_root_is_not(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    writer = StagingDirectory(str(root))
    writer.new_paths(1)
    shutil.rmtree(writer.path)
    (path,) = writer.new_paths(1)
    Path(path).write_bytes(b"")
    shutil.rmtree(root)
    with pytest.raises(FileNotFoundError, match="is gone"):
        writer.new_paths(1)
    assert not root.exists()
    writer.close()


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF], ids=errno.errorcode.get)
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks. It ends a test that asks again and again."""
    calls = itertools.count()

    def flock(fd: int, operation: int) -> None:
        if next(calls) > 50:
            pytest.fail("asked for a lock again and again")
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
class TestWithoutLocks:
    def test_a_store_is_refused_in_one_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot lock .*; choose a directory on a local disk"):
            FileSystemStore(tmp_path / "kv", SMALL)
        assert list((tmp_path / "kv").iterdir()) == []

    def test_a_writer_fails_and_leaves_no_directory_behind(self, tmp_path: Path) -> None:
        writer = StagingDirectory(str(tmp_path))
        for _ in range(3):
            with pytest.raises(OSError):
                writer.new_paths(1)
        assert list((tmp_path / CONTROL_DIR).iterdir()) == []

    def test_no_writer_counts_as_dead(self, tmp_path: Path) -> None:
        (tmp_path / CONTROL_DIR / "w-1").mkdir(parents=True)
        assert sweep(str(tmp_path)) == 0
        assert writers_alive(str(tmp_path))


def test_locks_that_fail_later_fail_writes_and_nothing_else(open_store, tmp_path: Path, monkeypatch) -> None:
    store = open_store(max_bytes=room_for(4))
    write(store, KEY)

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(StoreError, match="No locks"):
            write(store, OTHER)
        assert read(store, KEY) == block_of(KEY, SMALL)
    assert write(store, OTHER) == [True]
    assert store.stats().used_bytes == disk_bytes(tmp_path / "kv")
