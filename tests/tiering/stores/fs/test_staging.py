# SPDX-License-Identifier: Apache-2.0
"""Staging directories: whose they are, and when they go."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvoffload.tiering.stores.fs.staging import StagingDirectory, sweep, writers_alive


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
    assert writers_alive(str(tmp_path), besides=alive.path)
    dead._release()  # as the kernel does when a process dies
    assert not writers_alive(str(tmp_path), besides=alive.path)
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
