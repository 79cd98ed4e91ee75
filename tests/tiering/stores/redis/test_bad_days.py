# SPDX-License-Identifier: Apache-2.0
"""Test that failures of a real server are misses, end by their deadline, leave nothing behind, and are temporary."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import socket
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import redis
from tests.ports import free_port
from tests.proxy import Proxy
from tests.redis_server import RedisServer, wait_until
from tests.tiering.stores.blocks import BLOCK_BYTES, UNTOUCHED, buffers, read, succeeds, write
from tests.tiering.stores.redis.inside import idle_of, name_of, servers_of
from tests.tiering.stores.redis.strangers import Mute, answering_server

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.connector import Timeouts
from kvoffload.tiering.stores.redis.wire import Wire, encode

OpenStore = Callable[..., RedisStore]
StartServer = Callable[..., RedisServer]

SOON_S = 0.3
"""A deadline that a test waits for. Where an answer is expected, the deadline is long."""


@pytest.fixture
def proxy_of() -> Iterator[Callable[[RedisServer], Proxy]]:
    made: list[Proxy] = []

    def make(server: RedisServer) -> Proxy:
        made.append(Proxy(server.port))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


def only_name(server: RedisServer) -> bytes:
    """Return the only name on the server."""
    with server.client() as client:
        (name,) = client.scan_iter()
    return bytes(name)


# ------------------------------------------------------------------------------------------------- not to be used


def test_a_refused_connection_is_an_error_that_names_the_server(open_store: OpenStore) -> None:
    port = free_port()
    store = open_store(f"redis://someone:hush@127.0.0.1:{port}")
    for call in (store.contains, store.discard):
        with pytest.raises(StoreError, match=f"Redis at 127.0.0.1:{port} fails: .*refused") as caught:
            call(keys(1))
        assert "hush" not in str(caught.value) and "Errno" not in str(caught.value)
    with pytest.raises(StoreError):
        read(store, keys(1))
    with pytest.raises(StoreError):
        write(store, keys(1))
    store.touch(keys(1))  # only an order of use is lost


def test_a_wrong_password_is_an_error_without_the_password(start_server: StartServer, open_store: OpenStore) -> None:
    server = start_server(requirepass="right")
    with pytest.raises(StoreError, match="rejects the tier's user and password with WRONGPASS") as caught:
        open_store(f"redis://:hush@127.0.0.1:{server.port}").contains(keys(1))
    assert "hush" not in str(caught.value)
    with pytest.raises(StoreError, match=r"[Aa]uthentication required"):
        open_store(server.url).contains(keys(1))
    assert open_store(f"redis://:right@127.0.0.1:{server.port}").contains(keys(1)) == [False]


@pytest.mark.parametrize("credentials", [{"password": "hunter2"}, {"password": "hunter2", "username": "engines"}])
def test_what_a_server_repeats_of_an_unknown_command_is_not_shown(
    credentials: dict[str, str], start_server: StartServer, open_store: OpenStore
) -> None:
    server = start_server(lacks="AUTH")
    with pytest.raises(StoreError, match="rejects the tier's user and password with ERR") as caught:
        open_store(server.url, **credentials).contains(keys(1))
    for secret in credentials.values():
        assert secret not in str(caught.value)
        assert secret not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("reply", [b"-ERR no user with hunter2", b"-hunter2 is wrong", b"+hunter2", b"hunter2"])
def test_what_a_server_says_to_a_password_is_not_shown(reply: bytes, open_store: OpenStore) -> None:
    password = "hunter2"
    with answering_server(reply + b"\r\n") as port, pytest.raises(StoreError) as caught:
        open_store(f"redis://127.0.0.1:{port}", username="engines", password=password).contains(keys(1))
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("password", ["is", "index", "DB", "fails"])
def test_a_password_that_is_a_common_word_hides_no_reason(
    password: str, start_server: StartServer, open_store: OpenStore
) -> None:
    server = start_server(requirepass=password)
    with pytest.raises(StoreError, match="DB index is out of range"):
        open_store(f"{server.url}/99", password=password).contains(keys(1))


def test_a_database_that_is_not_there_is_an_error(shared_server: RedisServer, open_store: OpenStore) -> None:
    with pytest.raises(StoreError, match=r"DB index is out of range"):
        open_store(f"{shared_server.url}/99").contains(keys(1))
    with pytest.raises(StoreError):
        write(open_store(f"{shared_server.url}/99"), keys(1))


def test_a_user_who_may_not_write_reads_on(start_server: StartServer, open_store: OpenStore) -> None:
    server = start_server()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~kvoffload:*", "+@read", "+select", "+client")
    assert write(open_store(server.url), keys(1)) == [True]
    store = open_store(server.url, username="reader", password="pw")
    assert read(store, keys(1, 2)) == [True, False]
    with pytest.raises(StoreError, match="NOPERM"):
        write(store, keys(2))
    elsewhere = open_store(server.url, username="reader", password="pw", prefix="other")
    with pytest.raises(StoreError, match="NOPERM"):
        elsewhere.contains(keys(1))


@pytest.mark.parametrize("password", [None, "hunter2"])
def test_a_server_with_too_many_clients_is_named_as_such(
    password: str | None, start_server: StartServer, open_store: OpenStore
) -> None:
    """It answers before it has read a command, and closes the connection."""
    options = {} if password is None else {"requirepass": password}
    server = start_server(maxclients="1", **options)
    with server.client(password=password) as client:

        def is_the_only_one() -> bool:
            try:
                return bool(client.ping())
            except redis.ConnectionError:  # the connection that waited for the server's start is still open there
                return False

        wait_until(is_the_only_one, "the server accepts a client")
        store = open_store(server.url, password=password)
        for call in (lambda: read(store, keys(1)), lambda: write(store, keys(1, 2)), lambda: store.contains(keys(1))):
            with pytest.raises(StoreError, match="as many clients as its maxclients allows") as caught:
                call()
            assert "password" not in str(caught.value)
    wait_until(lambda: succeeds(lambda: store.contains(keys(1)) == [False]), "the other client is gone")


PROTECTED = (
    b"-DENIED Redis is running in protected mode because protected mode is enabled and no password is set for the "
    b"default user. In this mode connections are only accepted from the loopback interface. "
    + b"You may ... " * 40
    + b"\r\n"
)
"""The beginning of a long line."""


@pytest.mark.parametrize("password", [None, "hunter2"])
def test_a_server_in_protected_mode_is_named_as_such(password: str | None, open_store: OpenStore) -> None:
    """It accepts connections from its own machine, so another server takes its part."""
    with answering_server(PROTECTED) as port:
        store = open_store(f"redis://127.0.0.1:{port}", password=password)
        for call in (lambda: read(store, keys(1)), lambda: write(store, keys(1, 2)), lambda: store.contains(keys(1))):
            with pytest.raises(StoreError, match="is in protected mode"):
                call()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("block_bytes", [2 << 20, 16 << 20])
def test_a_block_that_is_too_large_for_a_server_is_named_as_such(
    block_bytes: int, count: int, start_server: StartServer, open_store: OpenStore
) -> None:
    """The server rejects the length and closes the connection while the block is being sent."""
    store = open_store(start_server(proto_max_bulk_len="1mb").url, block_bytes)
    for _ in range(2):
        with pytest.raises(StoreError, match="invalid bulk length"):
            write(store, keys(*range(count)), block_bytes)
    assert store.contains(keys(1)) == [False], "the next exchange uses another connection"


# --------------------------------------------------------------------------------------------- frozen, killed, slow


def test_a_frozen_server_costs_a_deadline_and_touches_no_buffer_later(
    start_server: StartServer, open_store: OpenStore
) -> None:
    server = start_server()
    patient = open_store(server.url)
    assert write(patient, keys(1, 2, 3)) == [True] * 3
    store = open_store(server.url, window_s=SOON_S)
    wait_until(lambda: _succeeds(lambda: read(store, keys(1)) == [True]), "the store is connected")
    server.freeze()
    targets = buffers(3)
    with pytest.raises(StoreError, match="no answer in time"):
        store.read_into(keys(1, 2, 3), targets)
    with pytest.raises(StoreError):  # a new connection fares no better
        store.contains(keys(1))
    server.thaw()
    assert read(patient, keys(1, 2, 3)) == [True] * 3  # by now the server has answered the old connection as well
    assert all(bytes(target) == UNTOUCHED * BLOCK_BYTES for target in targets)
    wait_until(lambda: _succeeds(lambda: read(store, keys(1, 2, 3)) == [True] * 3), "the store works again")


def test_a_stop_in_the_middle_of_a_value(
    start_server: StartServer, open_store: OpenStore, proxy_of: Callable[[RedisServer], Proxy]
) -> None:
    server = start_server()
    proxy = proxy_of(server)
    store = open_store(f"redis://127.0.0.1:{proxy.port}", window_s=SOON_S)
    assert write(open_store(server.url), keys(1, 2)) == [True, True]
    wait_until(lambda: _succeeds(lambda: store.contains(keys(1, 2)) == [True, True]), "the store is connected")
    for limit in (proxy.stall_after, proxy.cut_after):
        limit(BLOCK_BYTES + BLOCK_BYTES // 2)
        with pytest.raises(StoreError, match=r"in time|[Cc]onnection closed|closed the connection"):
            read(store, keys(1, 2))
        proxy.heal()
        wait_until(lambda: _succeeds(lambda: read(store, keys(1, 2)) == [True, True]), "the store works again")


def test_a_server_that_drips_is_left_at_the_deadline_and_read_by_who_waits(
    start_server: StartServer, open_store: OpenStore, proxy_of: Callable[[RedisServer], Proxy]
) -> None:
    """The deadline is for a whole window, so bytes that still arrive do not extend it."""
    server, size = start_server(), 1 << 18
    proxy = proxy_of(server)
    url = f"redis://127.0.0.1:{proxy.port}"
    hasty, patient = open_store(url, size, window_s=SOON_S), open_store(url, size)
    wait_until(lambda: _succeeds(lambda: write(hasty, keys(1), size) == [True]), "the store is connected")
    proxy.throttle(2 * size // 3)
    targets = buffers(1, size)
    with pytest.raises(StoreError, match="no answer in time"):
        hasty.read_into(keys(1), targets)
    found = bytes(targets[0])
    assert found.endswith(UNTOUCHED * (size // 2))
    assert read(patient, keys(1), size) == [True]
    assert bytes(targets[0]) == found
    proxy.heal()
    wait_until(lambda: _succeeds(lambda: read(hasty, keys(1), size) == [True]), "the store works again")


def test_a_greeting_that_drips_ends_by_the_deadline(
    start_server: StartServer, open_store: OpenStore, proxy_of: Callable[[RedisServer], Proxy]
) -> None:
    proxy = proxy_of(start_server(requirepass="right"))
    proxy.throttle(1)  # 5 ms for each of about 60 bytes
    with pytest.raises(StoreError) as caught:
        open_store(f"redis://:wrong@127.0.0.1:{proxy.port}", window_s=0.1).contains(keys(1))
    assert "invalid username-password pair" not in str(caught.value)


def test_a_greeting_that_does_not_end_takes_no_memory(open_store: OpenStore) -> None:
    sent, most = 0, 64 << 20

    def serve() -> None:
        nonlocal sent
        peer, _ = listener.accept()
        with peer:
            try:
                while sent < most:
                    sent += peer.send(bytes(1 << 16))
            except OSError:
                pass

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(StoreError, match="a line does not end"):
        open_store(f"redis://:hush@127.0.0.1:{listener.getsockname()[1]}").contains(keys(1))
    thread.join()
    listener.close()
    assert sent < most


def test_idle_connections_that_a_firewall_forgot_cost_one_deadline_together(
    start_server: StartServer, open_store: OpenStore, proxy_of: Callable[[RedisServer], Proxy]
) -> None:
    proxy = proxy_of(start_server())
    store = open_store(f"redis://127.0.0.1:{proxy.port}")
    (node,) = servers_of(store).split([b"name"])
    together = threading.Barrier(5)

    def ping(wire: Wire) -> bytes:
        together.wait(60)
        wire.send([encode(b"PING")])
        return wire.read_line()

    threads = [threading.Thread(target=node.exchange, args=(ping,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(idle_of(node)) == 5
    proxy.forget()
    node._connector.timeouts = Timeouts(window_s=SOON_S)
    with pytest.raises(StoreError, match="no answer in time"):
        store.contains(keys(1))
    assert idle_of(node) == []
    wait_until(lambda: _succeeds(lambda: store.contains(keys(1)) == [False]), "the store works again")


def test_an_idle_connection_that_the_kernel_gave_up_is_no_timeout(
    shared_server: RedisServer, open_store: OpenStore
) -> None:
    (node,) = servers_of(open_store(shared_server.url)).split([b"name"])
    answers: list[int | bytes] = [errno.ETIMEDOUT]

    def ping(wire: Wire) -> bytes:
        if answers == [errno.ETIMEDOUT] and node_is_used:
            answers.clear()
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))  # the error of a dead connection
        wire.send([encode(b"PING")])
        return wire.read_line()

    node_is_used = False
    assert node.exchange(ping) == b"+PONG"
    node_is_used = True
    assert node.exchange(ping) == b"+PONG"
    assert answers == []


def test_the_kernel_looks_after_idle_connections(shared_server: RedisServer, open_store: OpenStore) -> None:
    store = open_store(shared_server.url)
    assert store.contains(keys(1)) == [False]
    ((wire,),) = (idle_of(node) for node in servers_of(store).split([b"name"]))
    assert wire.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert wire.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


def test_a_server_that_takes_no_more_of_a_block(start_server: StartServer, open_store: OpenStore) -> None:
    server = start_server()
    large = 16 << 20  # more than the socket's buffers hold
    store = open_store(server.url, large, window_s=SOON_S)
    wait_until(lambda: _succeeds(lambda: store.contains(keys(1)) == [False]), "the store is connected")
    server.freeze()
    block = [memoryview(bytearray(large))]
    with pytest.raises(StoreError):
        store.write(keys(1), block)
    server.thaw()
    wait_until(lambda: _succeeds(lambda: open_store(server.url, large).write(keys(1), block) == [True]), "it is taken")


def test_killed_during_transfers_restarted_empty_and_used_again(
    start_server: StartServer, open_store: OpenStore
) -> None:
    server = start_server()
    store = open_store(server.url, 1 << 20)
    wanted = keys(*range(4))
    assert write(store, wanted, 1 << 20) == [True] * 4
    begun, failed = threading.Barrier(3), []

    def work() -> None:
        begun.wait()
        try:
            while True:
                read(store, wanted, 1 << 20)
        except StoreError:
            failed.append(True)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    server.kill()
    for thread in threads:
        thread.join()
    assert failed == [True, True]
    server.start()
    assert store.contains(wanted) == [False] * 4  # at once: old connections do not cause failures
    assert write(store, wanted, 1 << 20) == [True] * 4
    assert read(store, wanted, 1 << 20) == [True] * 4


@pytest.mark.parametrize("is_cluster", [True, False])
def test_threads_that_wait_for_servers_to_be_known_fail_with_the_one_that_asks(
    is_cluster: bool, open_store: OpenStore
) -> None:
    mute = Mute()
    url = f"redis://127.0.0.1:{mute.port}/0" if is_cluster else f"redis+sentinel://127.0.0.1:{mute.port}/kv"
    store, reasons = open_store(url, cluster=is_cluster), list[str]()

    def ask() -> None:
        with pytest.raises(StoreError) as caught:
            store.contains(keys(1))
        reasons.append(str(caught.value))

    def waits(thread: threading.Thread) -> bool:
        assert thread.ident is not None
        return sys._current_frames()[thread.ident].f_code.co_name == "_refresh"

    mute.gives_up.set()
    ask()
    connections_of_one = mute.num_connections
    mute.gives_up.clear()
    threads = [threading.Thread(target=ask) for _ in range(8)]
    threads[0].start()
    wait_until(lambda: mute.num_connections == connections_of_one + 1, "the first one asks")
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: all(waits(thread) for thread in threads[1:]), "the others wait for it")
    mute.gives_up.set()
    for thread in threads:
        thread.join()
    assert len(set(reasons[1:])) == 1
    assert len(reasons) == 9
    assert mute.num_connections == 2 * connections_of_one
    mute.close()


def test_failures_leave_no_sockets(start_server: StartServer, open_store: OpenStore) -> None:
    server = start_server()
    store = open_store(server.url, window_s=30.0)
    assert write(store, keys(1)) == [True]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        server.kill()
        with pytest.raises(StoreError):
            read(store, keys(1))
        server.start()
        assert read(store, keys(1)) == [False]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert server.num_clients() == 1
    store.close()
    wait_until(lambda: server.num_clients() == 0, "the server has no connection left")


def test_failures_leave_no_memory(open_store: OpenStore) -> None:
    store = open_store(f"redis://127.0.0.1:{free_port()}")
    wanted, targets = keys(*range(8)), buffers(8)

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(StoreError):
                store.read_into(wanted, targets)

    fail(20)
    gc.collect()
    tracemalloc.start()
    try:
        fail(20)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        fail(200)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 64 << 10
    finally:
        tracemalloc.stop()


def test_many_threads_keep_one_connection_each(shared_server: RedisServer, open_store: OpenStore) -> None:
    store = open_store(shared_server.url, namespace="threads")
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(30):
            write(store, keys(1, 2))
            assert read(store, keys(1, 2)) == [True, True]

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (node,) = servers_of(store).split([b"name"])
    assert 1 <= len(idle_of(node)) <= 8


# --------------------------------------------------------------------------------------------- full, evicting, aging


def test_a_full_server_refuses_writes_and_reads_on(start_server: StartServer, open_store: OpenStore) -> None:
    server = start_server(maxmemory="6mb", maxmemory_policy="noeviction")
    store = open_store(server.url, 1 << 20)
    stored = [key for key in keys(*range(12)) if _succeeds(lambda key=key: write(store, [key], 1 << 20) == [True])]
    assert 0 < len(stored) < 12
    with pytest.raises(StoreError, match="OOM"):
        write(store, keys(99), 1 << 20)
    with pytest.raises(StoreError, match="OOM"):  # otherwise no one would notice it if some blocks of a batch are there
        write(store, [*stored[:1], *keys(98, 99)], 1 << 20)
    assert write(store, stored, 1 << 20) == [True] * len(stored)
    assert read(store, stored, 1 << 20) == [True] * len(stored)
    store.discard(stored)
    wait_until(lambda: _succeeds(lambda: write(store, keys(99), 1 << 20) == [True]), "there is room again")


def test_what_a_server_evicts_is_a_miss(start_server: StartServer, open_store: OpenStore) -> None:
    server = start_server(maxmemory="12mb", maxmemory_policy="allkeys-lru")
    store = open_store(server.url, 1 << 20)
    wanted = keys(*range(24))
    for key in wanted:
        assert write(store, [key], 1 << 20) == [True]
    here = store.contains(wanted)
    assert 0 < here.count(True) < 24
    # The answers take the server's memory too, so that it may evict some more before it reads them.
    loaded = [read(store, [key], 1 << 20)[0] for key in reversed(wanted)][::-1]
    assert any(loaded)
    assert all(is_here for is_here, is_loaded in zip(here, loaded, strict=True) if is_loaded)


def test_blocks_expire_at_their_age(start_server: StartServer, open_store: OpenStore) -> None:
    server = start_server()
    assert write(open_store(server.url, ttl_s=3600), keys(1)) == [True]
    with server.client() as client:
        assert 3500 < client.ttl(only_name(server)) <= 3600
        client.pexpire(only_name(server), 1)
    store = open_store(server.url)
    wait_until(lambda: store.contains(keys(1)) == [False], "it has expired")
    assert read(store, keys(1)) == [False]


def test_a_wall_clock_that_jumps_changes_nothing(
    start_server: StartServer, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the clock is a day away from the previous one.

    No deadline may be early or late, and no age is used.
    """
    now_s = itertools.chain.from_iterable(zip(itertools.count(0, 86_400), itertools.count(1e9, -86_400), strict=False))
    monkeypatch.setattr(time, "time", lambda: float(next(now_s)))
    monkeypatch.setattr(time, "time_ns", lambda: int(next(now_s) * 1e9))
    server = start_server()
    store = open_store(server.url, ttl_s=3600)
    for _ in range(20):
        assert write(store, keys(1, 2)) == [True, True]
        assert read(store, keys(1, 2, 3)) == [True, True, False]
    soon = open_store(server.url, window_s=SOON_S)
    wait_until(lambda: _succeeds(lambda: read(soon, keys(1)) == [True]), "the store is connected")
    server.freeze()
    with pytest.raises(StoreError, match="no answer in time"):
        read(soon, keys(1))
    server.thaw()
    assert read(store, keys(1)) == [True]


def test_a_servers_clock_that_jumps_past_every_age_is_a_restart_with_nothing(
    start_server: StartServer, open_store: OpenStore
) -> None:
    server = start_server()
    store = open_store(server.url, ttl_s=3600)
    assert write(store, keys(1, 2)) == [True, True]
    with server.client() as client:
        for name in client.scan_iter():
            client.pexpireat(name, 1)  # as if the server's day were a later one
    assert read(store, keys(1, 2)) == [False, False]
    assert store.stats().corrupt_blocks == 0
    assert write(store, keys(1, 2)) == [True, True]
    assert read(store, keys(1, 2)) == [True, True]


# ----------------------------------------------------------------------------------------------------- wrong values


@pytest.mark.parametrize("secret", [None, b"the fleet's own secret"])
@pytest.mark.parametrize(
    "value_from",
    [
        lambda value: value[:-1],
        lambda value: value + b"x",
        lambda value: b"",
        lambda value: b"hello",
        lambda value: bytes(10 * len(value)),
        lambda value: value[:9] + bytes([value[9] ^ 1]) + value[10:],
        lambda value: value[:-1] + bytes([value[-1] ^ 1]),
        lambda value: bytes(len(value)),
    ],
)
def test_a_wrong_value_is_a_miss_is_deleted_and_written_anew(
    shared_server: RedisServer,
    open_store: OpenStore,
    secret: bytes | None,
    value_from: Callable[[bytes], bytes],
) -> None:
    store = open_store(shared_server.url, prefix=f"wrong-{os.urandom(8).hex()}", secret=secret)
    wanted = keys(1, 2, 3)
    assert write(store, wanted) == [True] * 3
    with shared_server.client() as client:
        name = name_of(store, wanted[1])
        client.set(name, value_from(client.get(name)))
    assert read(store, wanted) == [True, False, True]
    assert store.stats().corrupt_blocks == 1
    assert store.take_lost() == {wanted[1]: "corrupt"}
    assert store.contains(wanted) == [True, False, True]
    assert write(store, wanted) == [True] * 3
    assert read(store, wanted) == [True] * 3


def test_a_key_of_another_kind_is_a_miss_and_is_deleted(shared_server: RedisServer, open_store: OpenStore) -> None:
    store = open_store(shared_server.url, prefix="kind")
    with shared_server.client() as client:
        client.hset(name_of(store, keys(1)[0]), mapping={"a": 1})
    write(store, keys(2))
    assert read(store, keys(1, 2)) == [False, True]
    assert store.stats().corrupt_blocks == 1
    assert write(store, keys(1)) == [True]
    assert read(store, keys(1)) == [True]


def test_another_blocks_value_is_a_miss(shared_server: RedisServer, open_store: OpenStore) -> None:
    store = open_store(shared_server.url, prefix="mixed")
    one, other = keys(1, 2)
    write(store, [one, other])
    with shared_server.client() as client:
        client.set(name_of(store, one), client.get(name_of(store, other)))
    assert read(store, [one, other]) == [False, True]


def test_who_lacks_the_secret_cannot_make_a_block(shared_server: RedisServer, open_store: OpenStore) -> None:
    ours = open_store(shared_server.url, namespace="keyed", secret=b"ours, and ours alone")
    theirs = open_store(shared_server.url, namespace="keyed", secret=b"made up by somebody")
    open_ = open_store(shared_server.url, namespace="keyed")
    write(theirs, keys(1))
    write(open_, keys(1))
    assert ours.contains(keys(1)) == [False]  # other names, so that they never delete each other's blocks
    with shared_server.client() as client:
        for other in (theirs, open_):
            client.set(name_of(ours, keys(1)[0]), client.get(name_of(other, keys(1)[0])))
            assert read(ours, keys(1)) == [False]


def test_other_namespaces_and_sizes_never_mix(shared_server: RedisServer, open_store: OpenStore) -> None:
    one = open_store(shared_server.url, namespace="model a")
    write(one, keys(1))
    assert open_store(shared_server.url, namespace="model b").contains(keys(1)) == [False]
    assert open_store(shared_server.url, 2 * BLOCK_BYTES, namespace="model a").contains(keys(1)) == [False]
    assert one.contains(keys(1)) == [True]


def test_a_server_that_is_none(open_store: OpenStore) -> None:
    """Whatever listens there does not speak the protocol."""
    with answering_server(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100) as port:
        store = open_store(f"redis://127.0.0.1:{port}")
        for call in (store.contains, store.discard, partial(read, store), partial(write, store)):
            for wanted in (keys(1), keys(1, 2)):
                with pytest.raises(StoreError):
                    call(wanted)


def _succeeds(call: Callable[[], bool]) -> bool:
    try:
        return call()
    except StoreError:
        return False
