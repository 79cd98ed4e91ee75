# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.sizes import IS_THOROUGH
from tests.tiering.stores.disk.rig import SMALL, slab_of

from kvoffload.tiering.stores.disk.store import DiskStore


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In the quick size, only tests of reads and writes run with both times of a checksum, unless they are marked
    ``once``."""
    if "open_store" in metafunc.fixturenames:
        both = metafunc.module.__name__.endswith((".test_store", ".test_bad_days"))
        both = IS_THOROUGH or (both and metafunc.definition.get_closest_marker("once") is None)
        metafunc.parametrize("open_store", ["before", "beside"][1 - both :], indirect=True)


@pytest.fixture
def open_store(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., DiskStore]]:
    """Open stores on one root, by default with one slab of eight slots, check them at the end and close them.

    Checksums are made before the write of their blocks, as for small blocks, or during it, as for large ones.
    """
    if request.param == "beside":
        monkeypatch.setattr("kvoffload.tiering.stores.disk.store._BESIDE_BYTES", 1)
    opened = []

    def make(size: int = SMALL, namespace: str = "", max_bytes: int | None = None, **options) -> DiskStore:
        max_bytes = slab_of(8, size) if max_bytes is None else max_bytes
        opened.append(DiskStore(tmp_path / "kv", size, namespace, max_bytes, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.check_invariants()
        store.close()
