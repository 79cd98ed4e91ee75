# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.s3_server import BUCKET, S3Server
from tests.tiering.stores.blocks import BLOCK_BYTES

from kvoffload.tiering.stores.object.client import Deadlines
from kvoffload.tiering.stores.object.store import ObjectStore


@pytest.fixture(scope="session")
def shared_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Yield a server for tests that do not damage it and have their own prefix."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    """Yield a server that a test may damage."""
    server = S3Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def open_store() -> Iterator[Callable[..., ObjectStore]]:
    opened: list[ObjectStore] = []

    def make(server: S3Server, prefix: str, block_bytes: int = BLOCK_BYTES, request_s: float = 60.0, **options):
        config = server.config | options.pop("config", {})
        url = f"s3://{options.pop('bucket', BUCKET)}/{prefix}"
        opened.append(ObjectStore(url, block_bytes, config=config, deadlines=Deadlines(10.0, request_s), **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()
