# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.redis_server import RedisCluster, RedisServer

from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.connector import Access, Timeouts

BLOCK_BYTES = 4096


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield a server for tests that do not damage it and have their own namespace."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """The same of three servers: they are writable two seconds after their start. Whoever freezes one thaws it."""
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers that a test may treat badly."""
    started: list[RedisServer] = []

    def start(**options: str) -> RedisServer:
        started.append(RedisServer(tmp_path, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    made = RedisCluster(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def open_store() -> Iterator[Callable[..., RedisStore]]:
    """Opens stores on a URL, with deadlines that end a test's bad day soon, and closes them."""
    opened: list[RedisStore] = []

    def make(url: str, block_bytes: int = BLOCK_BYTES, namespace: str = "", window_s: float = 30.0, **options):
        timeouts = Timeouts(connect_s=min(window_s, 10.0), window_s=window_s)
        access = Access(**{name: options.pop(name) for name in Access._fields if name in options})
        opened.append(RedisStore(url, block_bytes, namespace, timeouts=timeouts, access=access, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()
