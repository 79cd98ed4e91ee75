# SPDX-License-Identifier: Apache-2.0
"""Test the maintenance of a root. ``tests/cli/test_store.py`` runs it from the command line while a server runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.files import disk_bytes

from kvoffload.errors import ConfigError
from kvoffload.testing import block_of, keys
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.admin import StoreRoot

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


def test_usage_is_by_namespace(root: StoreRoot, tmp_path: Path) -> None:
    usage = {one.name: one for one in root.usage()}
    assert {name: one.num_blocks for name, one in usage.items()} == {"(default)": 2, "model": 3}
    assert usage["model"].size_bytes == disk_bytes(tmp_path / "model")
    assert 0 < usage["model"].oldest_use_ns <= usage["model"].last_use_ns


def test_a_namespace_is_cleared_by_its_name(root: StoreRoot) -> None:
    assert root.clear("model") == 3
    assert [one.name for one in root.usage()] == ["(default)"]
    assert root.directories() == ["="]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a kvoffload store"):
        StoreRoot(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        StoreRoot(tmp_path / "none")
