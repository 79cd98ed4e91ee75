# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiering.stores.rig import SMALL

from kvoffload.tiering.stores.fs import FileSystemStore, batch


@pytest.fixture(params=["in batches", "one by one"])
def open_store(tmp_path: Path, request, monkeypatch) -> Iterator[Callable[..., FileSystemStore]]:
    """Stores whose files are moved by machine code in batches, and by Python one by one."""
    opened = []
    if request.param == "one by one":
        monkeypatch.setattr(batch, "native_files", lambda: None)
    elif batch.native_files() is None:
        pytest.skip("numba is not installed here")

    def make(size: int = SMALL, namespace: str = "", max_bytes: int | None = None, **options) -> FileSystemStore:
        opened.append(FileSystemStore(tmp_path / "kv", size, namespace, max_bytes, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()
