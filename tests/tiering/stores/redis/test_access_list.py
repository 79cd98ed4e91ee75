# SPDX-License-Identifier: Apache-2.0
"""Users whose access list lacks a command of the store."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.redis_server import RedisServer
from tests.tiering.stores.blocks import read, write
from tests.tiering.stores.redis.inside import name_of

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.redis import RedisStore

OpenStore = Callable[..., RedisStore]
StartServer = Callable[..., RedisServer]
KEYS = keys(*range(40))
ALL = ["TOUCH", "EXISTS", "UNLINK", "GET", "SET"]


def url_of(server: RedisServer, without: str) -> str:
    """Return the URL of a user who may use all commands that a store needs, except one."""
    with server.client() as client:
        allowed = [f"+{command.lower()}" for command in ALL if command != without]
        client.execute_command("ACL", "SETUSER", "few", "reset", "on", ">hush-hush", "~*", *allowed)
    return f"redis://few:hush-hush@127.0.0.1:{server.port}"


def test_without_touch_a_write_sends_every_block(start_server: StartServer, open_store: OpenStore) -> None:
    store = open_store(url_of(start_server(), "TOUCH"))
    for _ in range(2):
        assert write(store, KEYS) == [True] * len(KEYS)
    store.touch(KEYS)
    assert store.contains(KEYS) == [True] * len(KEYS)
    assert all(read(store, KEYS))


def test_a_damaged_value_that_cannot_be_deleted_is_not_found_again(
    start_server: StartServer, open_store: OpenStore
) -> None:
    server = start_server()
    store = open_store(url_of(server, "UNLINK"))
    write(store, KEYS[:2])
    with server.client() as client:
        client.setrange(name_of(store, KEYS[0]), 5, b"damage")
    assert read(store, KEYS[:2]) == [False, True]
    assert store.contains(KEYS[:2]) == [False, True]
    assert write(store, KEYS[:2]) == [False, True]
    with server.client() as client:
        client.delete(name_of(store, KEYS[0]))  # as its age does
    assert write(store, KEYS[:2]) == [True, True]
    assert store.contains(KEYS[:2]) == [True, True]
    assert all(read(store, KEYS[:2]))


@pytest.mark.parametrize(("without", "call"), [("SET", "write"), ("EXISTS", "contains")])
def test_the_error_names_a_command_that_is_missing(
    start_server: StartServer, open_store: OpenStore, without: str, call: str
) -> None:
    store = open_store(url_of(start_server(), without))
    with pytest.raises(StoreError, match=rf"(?i)NOPERM.*{without}"):
        write(store, KEYS) if call == "write" else store.contains(KEYS)
