# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.leaks import open_in
from tests.tiering.stores.rig import SMALL

from kvoffload.tiering.stores.fs import FileSystemStore


@pytest.fixture(autouse=True)
def _no_file_stays_open(request: pytest.FixtureRequest) -> Iterator[None]:
    if "tmp_path" not in request.fixturenames:
        yield
        return
    directory = request.getfixturevalue("tmp_path")
    yield
    assert not open_in(directory)


@pytest.fixture
def public() -> Iterator[Path]:
    """Yield a directory in which everybody may write, as in /tmp."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., FileSystemStore]]:
    """Opens stores on one root, and closes them."""
    opened = []

    def make(size: int = SMALL, namespace: str = "", max_bytes: int | None = None, **options) -> FileSystemStore:
        opened.append(FileSystemStore(tmp_path / "kv", size, namespace, max_bytes, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()
