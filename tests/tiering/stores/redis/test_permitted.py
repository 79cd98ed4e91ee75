# SPDX-License-Identifier: Apache-2.0
"""Servers without some commands, renamed away or left out of an access list: blocks are stored, read and deleted."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
from tests.redis_server import RedisServer
from tests.tiering.stores.blocks import read, write
from tests.tiering.stores.redis.inside import name_of

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.permitted import is_refusal, to_use
from kvoffload.tiering.stores.redis.wire import ErrorReply

OpenStore = Callable[..., RedisStore]
StartServer = Callable[..., RedisServer]
KEYS = keys(*range(40))
REFUSAL = ErrorReply("ERR unknown command")
ALL = ["TOUCH", "EXISTS", "UNLINK", "DEL", "GET", "SET"]


def url_of(server: RedisServer, *without: str) -> str:
    """Return the URL of a user who may use all commands that a store needs, except ``without``."""
    with server.client() as client:
        allowed = [f"+{command.lower()}" for command in ALL if command not in without]
        client.execute_command("ACL", "SETUSER", "few", "reset", "on", ">hush-hush", "~*", *allowed)
    return f"redis://few:hush-hush@127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    ("answer", "says_so"),
    [
        ("ERR unknown command 'TOUCH'", True),
        ("ERR unsupported command 'touch'", True),
        ("unsupported command 'touch'", True),
        ("ERR Command is not available: 'TOUCH'. See the documentation", True),
        ("ERR command 'TOUCH' is not allowed", True),
        ("ERR handle request, command 'TOUCH' is not allowed", True),
        ("ERR command 'touch' not support for normal user", True),
        ("ERR This command has been disabled", True),
        ("NOPERM User few has no permissions to run the 'touch' command", True),
        ("NOPERM this user has no permissions to access one of the keys used as arguments", False),
        ("OOM command not allowed when used memory > 'maxmemory'.", False),
        ("MISCONF Commands that may modify the data set are disabled", False),
        ("READONLY You can't write against a read only replica.", False),
        ("MOVED 3999 127.0.0.1:6381", False),
        ("ERR upstream failure", False),
        ("ERR the command took too long", False),
        ("ERR max number of clients reached", False),
    ],
)
def test_answers_of_servers_and_proxies_that_lack_a_command(answer: str, says_so: bool) -> None:
    assert is_refusal(ErrorReply(answer)) is says_so


def test_a_command_that_others_have_found_missing_is_not_tried_again() -> None:
    permitted = to_use()
    first = permitted.wording
    assert first is not None
    assert permitted.note(first, [REFUSAL])
    second = permitted.wording
    assert second is not None
    assert permitted.note(first, [REFUSAL]), "another thread asked with the first one, too"
    assert permitted.wording == second
    assert not permitted.note(second, [REFUSAL])
    assert permitted.wording is None
    assert not permitted.note(first, [REFUSAL]), "nothing is left to ask with"


@pytest.mark.parametrize("without", [["TOUCH"], ["EXISTS"], ["UNLINK"], ["UNLINK", "DEL"], ["TOUCH", "UNLINK", "DEL"]])
@pytest.mark.parametrize("how", ["renamed", "access list"])
def test_blocks_are_stored_found_read_and_deleted(
    start_server: StartServer,
    open_store: OpenStore,
    caplog: pytest.LogCaptureFixture,
    without: list[str],
    how: str,
) -> None:
    if how == "renamed" and len(without) > 1:
        pytest.skip("one command can be renamed")
    server = start_server(lacks=without[0]) if how == "renamed" else start_server()
    store = open_store(server.url if how == "renamed" else url_of(server, *without))
    with caplog.at_level(logging.WARNING, "kvoffload"):
        for _ in range(2):
            assert write(store, KEYS) == [True] * len(KEYS)
            assert store.contains(KEYS) == [True] * len(KEYS)
        assert all(read(store, KEYS))
        store.touch(KEYS)
        store.discard(KEYS[:20])
        with server.client() as client:
            client.get("nothing")  # expired names are gone once the server has resumed
        store.discard(KEYS[:20])
    said = [record.getMessage() for record in caplog.records]
    assert [text for command in without for text in said if f" {command} (" in text] == said
    assert len(said) == len(without), "once for each"
    assert sum(read(store, KEYS)) == 20


def test_without_both_questions_a_write_sends_every_block(start_server: StartServer, open_store: OpenStore) -> None:
    server = start_server()
    store = open_store(url_of(server, "TOUCH", "EXISTS"))
    assert write(store, KEYS) == [True] * len(KEYS)
    assert write(store, KEYS) == [True] * len(KEYS)
    assert all(read(store, KEYS))
    with pytest.raises(StoreError, match=r"(?i)NOPERM.*(exists|touch)"):
        store.contains(KEYS)


@pytest.mark.parametrize("without", [["UNLINK"], ["UNLINK", "DEL"]])
def test_a_damaged_value_is_written_again(start_server: StartServer, open_store: OpenStore, without: list[str]) -> None:
    server = start_server()
    store = open_store(url_of(server, *without))
    write(store, KEYS[:2])
    with server.client() as client:
        client.setrange(name_of(store, KEYS[0]), 5, b"damage")
    assert read(store, KEYS[:2]) == [False, True]
    with server.client() as client:
        deadline = 1000
        while client.exists(name_of(store, KEYS[0])) and deadline:
            deadline -= 1
        assert not client.exists(name_of(store, KEYS[0]))
    assert store.contains(KEYS[:2]) == [False, True]
    assert write(store, KEYS[:2]) == [True, True]
    assert read(store, KEYS[:2]) == [True, True]


def test_a_user_who_may_not_write_is_told_so(start_server: StartServer, open_store: OpenStore) -> None:
    server = start_server()
    store = open_store(url_of(server, "SET"))
    with pytest.raises(StoreError, match=r"(?i)NOPERM.*set"):
        write(store, KEYS)


@pytest.fixture
def closing_proxy() -> Iterator[Callable[[RedisServer, list[str]], str]]:
    """``closing_proxy(server, words)``: the URL of a proxy that closes a connection on each of these commands, as some
    do, and passes everything else on."""
    listeners = list[socket.socket]()

    def copy(source: socket.socket, target: socket.socket, words: Sequence[bytes]) -> None:
        with source, target:
            with suppress(OSError):
                while (data := source.recv(1 << 16)) and not any(word in data for word in words):
                    target.sendall(data)
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def start(server: RedisServer, words: list[str]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        asked = [f"\r\n{word}\r\n".encode() for word in words]

        def serve() -> None:
            with suppress(OSError):
                while True:
                    near = listener.accept()[0]
                    far = socket.create_connection(("127.0.0.1", server.port))
                    threading.Thread(target=copy, args=(near, far, asked), daemon=True).start()
                    threading.Thread(target=copy, args=(far, near, ()), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        return f"redis://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize("words", [["TOUCH"], ["EXISTS"], ["TOUCH", "EXISTS"], ["UNLINK"], ["UNLINK", "DEL"]])
def test_a_proxy_that_closes_connections_on_commands(
    start_server: StartServer,
    open_store: OpenStore,
    closing_proxy: Callable[[RedisServer, list[str]], str],
    caplog: pytest.LogCaptureFixture,
    words: list[str],
) -> None:
    server = start_server()
    store = open_store(closing_proxy(server, words))
    with caplog.at_level(logging.WARNING, "kvoffload"):
        for _ in range(2):
            assert write(store, KEYS) == [True] * len(KEYS)
            if words != ["TOUCH", "EXISTS"]:
                assert store.contains(KEYS) == [True] * len(KEYS)
        assert all(read(store, KEYS))
        for _ in range(2 * (len(words) + 1)):
            with suppress(StoreError):
                store.discard(KEYS[:20])
    assert sum(record.getMessage().count("rejects") for record in caplog.records) <= len(words) + 1
    with server.client() as client:
        deadline = 1000
        while any(client.exists(name_of(store, key)) for key in KEYS[:20]) and deadline:
            deadline -= 1
    assert sum(read(store, KEYS)) == 20


def test_a_server_that_is_down_proves_nothing_about_commands(
    start_server: StartServer, open_store: OpenStore, closing_proxy: Callable[[RedisServer, list[str]], str]
) -> None:
    server = start_server()
    store = open_store(closing_proxy(server, ["TOUCH", "EXISTS", "SET", "GET"]))
    for _ in range(3):
        with pytest.raises(StoreError):
            write(store, KEYS)
        with pytest.raises(StoreError):
            store.contains(KEYS)
    assert store._to_use.is_first and store._to_look.is_first
