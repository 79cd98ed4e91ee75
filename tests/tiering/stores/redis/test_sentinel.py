# SPDX-License-Identifier: Apache-2.0
"""Sentinels say who is the primary: their URL is read, and a real failover is followed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from tests.ports import free_port
from tests.redis_server import RedisSentinel, RedisServer, wait_until
from tests.tiering.stores.blocks import BLOCK_BYTES, read, write
from tests.tiering.stores.redis.inside import servers_of
from tests.tiering.stores.redis.strangers import Mute, answering_server

from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.connector import Address, Timeouts, parse_url
from kvoffload.tiering.stores.redis.servers import Primary

OpenStore = Callable[..., RedisStore]
SERVICE = "kv"


class Watched(NamedTuple):
    primary: RedisServer
    replica: RedisServer
    sentinel: RedisSentinel


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    started: list[RedisServer] = []

    def place(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    try:
        started.append(primary := RedisServer(place("primary"), repl_diskless_sync_delay="0"))
        started.append(replica := RedisServer(place("replica")))
        with replica.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", primary.port)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
        started.append(sentinel := RedisSentinel(place("sentinel"), primary, SERVICE))
        with sentinel.client() as client:
            # Otherwise ten and eight seconds pass until it notices the changes of a failover.
            client.execute_command("SENTINEL", "DEBUG", "INFO-PERIOD", 200, "PUBLISH-PERIOD", 200)
            wait_until(lambda: len(client.sentinel_slaves(SERVICE)) == 1, "the sentinel knows the replica")
        yield Watched(primary, replica, sentinel)
    finally:
        for server in started:
            server.stop()


def address_of(store: RedisStore) -> Address:
    (node,) = servers_of(store).split([b"name"])
    return node.address


def answers(call: Callable[[], list[bool]], expected: list[bool]) -> bool:
    try:
        return call() == expected
    except StoreError:
        return False


def begins_failover(client: redis.Redis) -> bool:
    try:
        return bool(client.execute_command("SENTINEL", "FAILOVER", SERVICE))
    except redis.exceptions.ResponseError:
        return False


def is_replica(client: redis.Redis) -> bool:
    try:
        return bool(client.info("replication")["role"] == "slave")
    except redis.exceptions.ConnectionError:  # a server that changes its role drops its clients
        return False


def test_a_failover_is_followed(watched: Watched, open_store: OpenStore) -> None:
    store = open_store(watched.sentinel.url)
    assert write(store, keys(1, 2)) == [True, True]
    assert address_of(store).port == watched.primary.port
    with watched.replica.client() as client:
        wait_until(lambda: client.dbsize() == 2, "the replica has the blocks")
    with watched.sentinel.client() as client:
        client.sentinel_set(SERVICE, "down-after-milliseconds", 500)
    watched.primary.kill()
    wait_until(lambda: answers(lambda: read(store, keys(1, 2, 3)), [True, True, False]), "the replica is asked")
    assert address_of(store).port == watched.replica.port
    assert write(store, keys(3)) == [True]


def test_a_primary_that_became_a_replica_is_left(watched: Watched, open_store: OpenStore) -> None:
    """It is alive, and still has its connections: only its answers to writes say so."""
    store = open_store(watched.sentinel.url)
    assert write(store, keys(1)) == [True]
    with watched.sentinel.client() as client:
        wait_until(lambda: begins_failover(client), "the sentinel knows the replica well enough")
        wait_until(
            lambda: client.sentinel_get_master_addr_by_name(SERVICE)[1] == watched.replica.port, "the roles changed"
        )
    with watched.primary.client() as client:
        wait_until(lambda: is_replica(client), "the old primary is a replica")
    number = iter(range(10, 10_000))
    wait_until(lambda: answers(lambda: write(store, keys(next(number))), [True]), "the new primary is written to")
    assert address_of(store).port == watched.replica.port


def test_sentinels_that_are_lost_later_cost_nothing(watched: Watched, open_store: OpenStore) -> None:
    url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{watched.sentinel.port}/{SERVICE}"
    store = open_store(url)
    assert write(store, keys(1)) == [True]  # by the second of them
    watched.sentinel.kill()
    (node,) = servers_of(store).split([b"name"])
    servers_of(store).record(node, is_good=False)
    assert read(store, keys(1)) == [True]


def test_no_sentinel_and_no_such_service_are_one_sentence(watched: Watched, open_store: OpenStore) -> None:
    for url in (f"redis+sentinel://me:hush@127.0.0.1:{free_port()}/kv", watched.sentinel.url + "-other"):
        with pytest.raises(StoreError, match="No sentinel knows the primary kv") as caught:
            open_store(url).contains(keys(1))
        assert "hush" not in str(caught.value)


def test_a_sentinel_that_answers_with_an_error_hides_no_other(
    watched: Watched, tmp_path: Path, open_store: OpenStore
) -> None:
    (tmp_path / "strict").mkdir()
    strict = RedisSentinel(
        tmp_path / "strict", watched.primary, SERVICE, ["user default on nopass -@all +client +ping"]
    )
    try:
        useless = [f"127.0.0.1:{watched.primary.port}", f"127.0.0.1:{strict.port}"]
        store = open_store(f"redis+sentinel://{','.join(useless)},127.0.0.1:{watched.sentinel.port}/{SERVICE}")
        assert write(store, keys(1)) == [True]
        assert address_of(store).port == watched.primary.port
        for address, reason in zip(useless, ("unknown command 'SENTINEL'", "NOPERM"), strict=True):
            with pytest.raises(StoreError, match=f"No sentinel knows the primary kv.*{address} fails: .*{reason}"):
                open_store(f"redis+sentinel://{address}/{SERVICE}").contains(keys(1))
    finally:
        strict.stop()


def test_a_sentinel_that_hangs_delays_no_other(watched: Watched) -> None:
    mute = Mute()
    url = f"redis+sentinel://127.0.0.1:{mute.port},127.0.0.1:{watched.sentinel.port}/{SERVICE}"
    store = RedisStore(url, BLOCK_BYTES, timeouts=Timeouts(connect_s=1e6, window_s=60.0))
    assert write(store, keys(1)) == [True]  # long before the first one's deadline
    mute.close()
    store.close()


def masters(port: int, epoch: int) -> bytes:
    """Return a sentinel's answer: the service's primary is at this port since this epoch."""
    fields = ("name", SERVICE, "ip", "127.0.0.1", "port", str(port), "flags", "master", "config-epoch", str(epoch))
    words = b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in fields)
    return b"*1\r\n*%d\r\n" % len(fields) + words


@pytest.mark.parametrize("place", range(3))
def test_a_sentinel_that_was_cut_off_names_no_primary_of_long_ago(watched: Watched, place: int) -> None:
    """It answers first. The others know of a failover since."""
    was_asked = threading.Event()
    stale, fresh = masters(free_port(), 1), masters(watched.primary.port, 2)
    with ExitStack() as stack:
        late = [stack.enter_context(answering_server(fresh, was_asked.wait)) for _ in range(2)]
        ports = [*late[:place], stack.enter_context(answering_server(stale, was_asked.set)), *late[place:]]
        url = f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in ports)}/{SERVICE}"
        store = RedisStore(url, BLOCK_BYTES, timeouts=Timeouts(connect_s=60.0, window_s=60.0))
        assert write(store, keys(1)) == [True]
        assert address_of(store).port == watched.primary.port
        store.close()


class TestCredentials:
    @pytest.fixture
    def guarded(self, tmp_path: Path) -> Iterator[RedisSentinel]:
        """Yield a sentinel with a user and another password than its primary, whose password it knows."""
        started: list[RedisServer] = []
        places = [tmp_path / name for name in ("primary", "sentinel")]
        for place in places:
            place.mkdir()
        try:
            started.append(primary := RedisServer(places[0], requirepass="hush"))
            lines = [f"sentinel auth-pass {SERVICE} hush", "user default off", "user watcher on >shush +@all ~* &*"]
            started.append(sentinel := RedisSentinel(places[1], primary, SERVICE, lines))
            yield sentinel
        finally:
            for server in started:
                server.stop()

    def test_sentinels_are_asked_with_their_own(self, guarded: RedisSentinel, open_store: OpenStore) -> None:
        url = guarded.url.replace("//", "//:hush@")
        own = {"sentinel_username": "watcher", "sentinel_password": "shush"}
        store = open_store(url, **own)
        wait_until(lambda: answers(lambda: write(store, keys(1)), [True]), "the sentinel knows the primary")
        assert read(store, keys(1)) == [True]
        for wrong in ({}, own | {"sentinel_password": "hush"}):
            with pytest.raises(StoreError, match="No sentinel knows the primary kv") as caught:
                open_store(url, **wrong).contains(keys(1))
            assert "hush" not in str(caught.value)
        assert "hush" not in repr(store)

    def test_they_come_from_a_file_or_the_environment(
        self, guarded: RedisSentinel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "password").write_text("shush\n")
        monkeypatch.setenv("KV_PASSWORD", "hush")
        tier = {"type": "redis", "url": guarded.url, "password": {"env": "KV_PASSWORD"}}
        options = parse_tier(
            tier | {"sentinel_username": "watcher", "sentinel_password": {"file": str(tmp_path / "password")}}
        )
        store = options.open_store(BLOCK_BYTES, "")
        assert isinstance(store, RedisStore)
        wait_until(lambda: answers(lambda: write(store, keys(1)), [True]), "the sentinel knows the primary")
        store.close()
        assert "hush" not in repr(options)
        with pytest.raises(ConfigError, match="sentinel_password of the 'redis' tier must be"):
            parse_tier(tier | {"sentinel_password": {"path": "x"}})


def test_its_url() -> None:
    parsed = parse_url("rediss+sentinel://me:p%40w@a:1,b,[::1]:3,[::2]/kv/4")
    assert (parsed.has_tls, parsed.username, parsed.password, parsed.database) == (True, "me", "p@w", 4)
    assert parsed.addresses == (Address("a", 1), Address("b", 26379), Address("::1", 3), Address("::2", 26379))
    assert parsed.service == "kv"


@pytest.mark.parametrize("url", ["redis+sentinel://a:1", "redis+sentinel://a:x/kv", "redis+sentinel:///kv"])
def test_a_mistake_in_the_url_is_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="host:port,host:port/SERVICE"):
        RedisStore(url, 4096)


def test_a_cluster_has_no_sentinels(open_store: OpenStore) -> None:
    with pytest.raises(ConfigError, match="use a url without sentinels"):
        open_store("redis+sentinel://a:1/kv", cluster=True)
    store = open_store("redis+sentinel://me:hush@a:1/kv")
    assert isinstance(servers_of(store), Primary)
    assert "primary kv of the sentinels a:1" in repr(store)
    assert "hush" not in repr(store)
