# SPDX-License-Identifier: Apache-2.0
"""Test the maintenance of a root. ``tests/cli/test_store.py`` runs it from the command line while a server runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffload.errors import ConfigError
from kvoffload.testing import block_of, keys
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.admin import StoreRoot, is_sound
from kvoffload.tiering.stores.fs.format import TEMPORARY_PREFIX
from kvoffload.tiering.stores.fs.quota import time_at
from kvoffload.tiering.stores.root import CONTROL_DIR

SIZE = 1000


@pytest.fixture
def root(tmp_path: Path) -> StoreRoot:
    """Two blocks without a namespace and three of a model; the store is closed."""
    for namespace, numbers in (("", (1, 2)), ("model", (3, 4, 5))):
        store = FileSystemStore(tmp_path, SIZE, namespace)
        blocks = keys(*numbers)
        assert store.write(blocks, [memoryview(block_of(key, SIZE)) for key in blocks]) == [True] * len(blocks)
        store.close()
    return StoreRoot(tmp_path)


def test_usage_is_by_namespace(root: StoreRoot) -> None:
    usage = {one.name: one for one in root.usage()}
    assert {name: one.num_blocks for name, one in usage.items()} == {"(default)": 2, "model": 3}
    assert usage["model"].size_bytes == sum(file.size_bytes for file in root.files(root.directory("model")))
    assert 0 < usage["model"].oldest_use_ns <= usage["model"].last_use_ns


def test_a_damaged_file_is_not_sound_and_a_missing_one_is_neither(root: StoreRoot) -> None:
    good, bad, gone = root.files(root.directory("model"))
    path = root.path / bad.path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (root.path / gone.path).unlink()
    assert [root.is_sound(file) for file in (good, bad, gone)] == [True, False, None]
    assert is_sound(str(path)) is False
    assert root.remove([bad]) == 1
    assert not path.exists()


def test_leftovers_of_dead_writers_are_removed(root: StoreRoot) -> None:
    fan = (root.path / next(iter(root.files())).path).parent
    old_s = time_at(str(root.path)) / 1e9 - 7200  # type: ignore[operator]
    dead = [fan / f"{TEMPORARY_PREFIX}1", root.path / CONTROL_DIR / f"{TEMPORARY_PREFIX}2"]
    for path in dead:
        path.write_bytes(b"half")
    alive = fan / f"{TEMPORARY_PREFIX}3"
    alive.write_bytes(b"half")
    assert root.sweep() == 0
    for path in dead:
        os.utime(path, (old_s, old_s))
    assert root.sweep() == 2
    assert not any(path.exists() for path in dead)
    assert alive.exists()
    assert sum(one.num_blocks for one in root.usage()) == 5


def test_a_quota_is_enforced_and_reported(root: StoreRoot) -> None:
    evicted, used_bytes = root.shrink(None)
    assert evicted == 0
    assert root.shrink(used_bytes // 2)[0] >= 2
    assert sum(one.num_blocks for one in root.usage()) <= 3


def test_a_namespace_is_cleared_by_its_name(root: StoreRoot) -> None:
    assert root.clear(root.directory("model")) == 3
    assert [one.name for one in root.usage()] == ["(default)"]
    with pytest.raises(ConfigError, match="has no namespace 'model'"):
        root.directory("model")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a kvoffload store"):
        StoreRoot(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        StoreRoot(tmp_path / "none")
