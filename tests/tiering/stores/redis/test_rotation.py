# SPDX-License-Identifier: Apache-2.0
"""Passwords that are replaced while the server runs, in the files and on the servers that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.redis_server import PATIENT_OPTIONS, RedisServer
from tests.tiering.stores.blocks import BLOCK_BYTES, read, write

from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.redis import connector as connector_module
from kvoffload.tiering.stores.redis.connector import Access, Connector, Timeouts

OpenTier = Callable[..., BlockStore]


@pytest.fixture
def open_tier() -> Iterator[OpenTier]:
    opened: list[BlockStore] = []

    def make(**options: Any) -> BlockStore:
        opened.append(parse_tier({"type": "redis"} | PATIENT_OPTIONS | options).open_store(BLOCK_BYTES, "ns"))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def drop_connections(server: RedisServer, **login: str) -> None:
    client = server.client(**login)
    own = client.client_id()
    for each in client.client_list():
        if int(each["id"]) != own:
            client.client_kill_filter(_id=each["id"])
    client.close()


@pytest.mark.parametrize("place", ["password", "url"])
def test_a_new_connection_has_the_new_password(
    place: str, tmp_path: Path, start_server: Callable[..., RedisServer], open_tier: OpenTier
) -> None:
    server = start_server(requirepass="first-secret")
    file = tmp_path / "secret"

    def put(password: str) -> None:
        file.write_text(f"{password}\n" if place == "password" else f"redis://:{password}@127.0.0.1:{server.port}\n")

    put("first-secret")
    options: dict[str, Any] = {"url": server.url, "password": {"file": str(file)}}
    store = open_tier(**options if place == "password" else {"url": {"file": str(file)}})
    assert write(store, keys(1, 2)) == [True, True]
    server.client(password="first-secret").config_set("requirepass", "second-secret")
    drop_connections(server, password="second-secret")
    with pytest.raises(StoreError, match="rejects the tier's user and password with WRONGPASS"):
        read(store, keys(1, 2))
    put("second-secret")
    assert read(store, keys(1, 2)) == [True, True]
    file.unlink()
    assert read(store, keys(1, 2)) == [True, True], "connections that are there go on"
    drop_connections(server, password="second-secret")
    with pytest.raises(StoreError, match="No such file") as caught:
        read(store, keys(1, 2))
    assert "secret'" not in str(caught.value)
    put("second-secret")
    assert read(store, keys(1, 2)) == [True, True]


def test_a_password_that_is_replaced_during_the_login_is_read_again(
    start_server: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(requirepass="second-secret")
    reads = iter(["first-secret", "second-secret"])
    connector = Connector(server.url, Timeouts(30.0, 30.0), Access(password={"file": "/nowhere"}))
    original = connector_module.read_secret

    def read_secret(secret: Any, what: str) -> str:
        return next(reads) if isinstance(secret, dict) else original(secret, what)

    monkeypatch.setattr(connector_module, "read_secret", read_secret)
    connector.connect(connector.address).close()
    assert list(reads) == []


def test_a_file_that_is_missing_at_the_start_is_one_sentence(tmp_path: Path, open_tier: OpenTier) -> None:
    with pytest.raises(ConfigError, match=r"^password of the 'redis' tier .*nowhere.*No such file"):
        open_tier(url="redis://127.0.0.1:1", password={"file": str(tmp_path / "nowhere")})
