# SPDX-License-Identifier: Apache-2.0
"""Test that threads that may hang resolve names, and that nothing waits for them beyond a deadline."""

from __future__ import annotations

import errno
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.redis_server import wait_until
from tests.tiering.stores.redis.strangers import Mute

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores import resolver as module
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.connector import Timeouts
from kvoffload.tiering.stores.resolver import Resolver

SOON_S = 0.2


class NameServer:
    """A replacement for the system's name server.

    ``names`` maps names to results or errors, or to ``None``, for which the system waits until ``gives_up`` is set.
    """

    def __init__(self) -> None:
        self.names: dict[str, list[str] | OSError | None] = {}
        self.asked: Counter[str] = Counter()
        self.gives_up = threading.Event()
        self._system = socket.getaddrinfo

    def __call__(self, host: str, port: int, *args: Any, **more: Any) -> Any:
        if host not in self.names or more.get("flags"):
            return self._system(host, port, *args, **more)
        self.asked[host] += 1
        answer = self.names[host]
        if answer is None:
            self.gives_up.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "gave up")
        if isinstance(answer, OSError):
            raise answer
        return [found for address in answer for found in self._system(address, port, *args, **more)]


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    made = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.gives_up.set()
    wait_until(lambda: not any(thread.name == "kvoffload-resolve" for thread in threading.enumerate()), "all end")


@pytest.fixture
def server() -> Iterator[Mute]:
    made = Mute()
    yield made
    made.close()


def test_a_name_that_hangs_ends_by_the_deadline_of_the_connection(system: NameServer) -> None:
    system.names["kv.example"] = None
    store = RedisStore("redis://kv.example", 4096, timeouts=Timeouts(connect_s=SOON_S, window_s=SOON_S))
    with pytest.raises(StoreError, match="not resolved in time"):
        store.contains(keys(1))
    assert not system.gives_up.is_set()
    store.close()


def test_many_that_wait_for_a_name_have_one_thread(system: NameServer) -> None:
    system.names["kv.example"] = None
    resolver = Resolver()

    def attempt() -> None:
        with pytest.raises(TimeoutError):
            resolver.connect("kv.example", 1, SOON_S)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    attempt()
    assert system.asked["kv.example"] == 1


def test_a_name_that_hangs_delays_no_other(system: NameServer, server: Mute) -> None:
    system.names |= {"hangs.example": None, "kv.example": ["127.0.0.1"]}
    resolver = Resolver()
    with pytest.raises(TimeoutError):
        resolver.connect("hangs.example", server.port, SOON_S)
    resolver.connect("kv.example", server.port, 60).close()
    resolver.connect("127.0.0.1", server.port, 60).close()


@pytest.mark.parametrize(
    "trouble",
    [
        None,
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        socket.gaierror(socket.EAI_FAIL, "refused"),
        OSError(errno.EMFILE, "too many open files"),
    ],
)
def test_a_name_server_that_is_down_costs_no_server_that_was_found(
    system: NameServer, server: Mute, trouble: OSError | None
) -> None:
    system.names["kv.example"] = ["127.0.0.1"]
    resolver = Resolver()
    resolver.connect("kv.example", server.port, 60).close()
    system.names["kv.example"] = trouble
    resolver.connect("kv.example", server.port, 1.0).close()


def test_a_name_that_is_no_more_is_not_connected_to(system: NameServer, server: Mute) -> None:
    system.names["kv.example"] = ["127.0.0.1"]
    resolver = Resolver()
    resolver.connect("kv.example", server.port, 60).close()
    system.names["kv.example"] = socket.gaierror(socket.EAI_NONAME, "no such name")
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="no such name"):
            resolver.connect("kv.example", server.port, 60)


def test_a_name_that_changes_is_asked_for_at_each_connection(system: NameServer, server: Mute) -> None:
    resolver = Resolver()
    system.names["kv.example"] = ["127.0.0.2"]
    with pytest.raises(ConnectionRefusedError):
        resolver.connect("kv.example", server.port, 60)
    system.names["kv.example"] = ["127.0.0.2", "127.0.0.1"]  # the first refuses, the second takes it
    resolver.connect("kv.example", server.port, 60).close()


def test_an_address_of_a_family_that_the_host_lacks_leaves_the_others(server: Mute) -> None:
    resolver = Resolver()
    lacking = (99, socket.SOCK_STREAM, 6, "", ("::1", server.port, 0, 0))
    there = socket.getaddrinfo("127.0.0.1", server.port, type=socket.SOCK_STREAM)
    resolver._resolve = lambda *_: [lacking, *there]  # type: ignore[method-assign]
    resolver.connect("kv.example", server.port, 60).close()
    resolver._resolve = lambda *_: [lacking]  # type: ignore[method-assign]
    with pytest.raises(OSError, match="not supported"):
        resolver.connect("kv.example", server.port, 60)


def test_names_that_are_remembered_are_bounded(
    system: NameServer, server: Mute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_NAMES", 5)
    resolver = Resolver()
    for number in range(20):
        system.names[f"{number}.example"] = ["127.0.0.1"]
        resolver.connect(f"{number}.example", server.port, 60).close()
    assert len(resolver._known) <= 5


def test_what_no_host_is_called_is_an_error() -> None:
    connect: Callable[..., Any] = Resolver().connect
    with pytest.raises((OSError, UnicodeError)):
        connect("a" * 70 + ".example", 1, 60)
