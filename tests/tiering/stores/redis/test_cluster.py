# SPDX-License-Identifier: Apache-2.0
"""Test a cluster of three nodes: keys are spread, moved slots are followed, and a lost node costs only its own keys."""

from __future__ import annotations

import bisect
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot
from tests.ports import free_port
from tests.redis_server import RedisCluster, RedisServer, wait_until
from tests.tiering.stores.blocks import BLOCK_BYTES, read, write
from tests.tiering.stores.redis.inside import (
    ask_for_the_map,
    ask_nobody,
    learn,
    name_of,
    nodes_of,
    open_ports,
    servers_of,
    set_clock,
    set_deadline,
    slots_of,
)
from tests.tiering.stores.redis.strangers import Mute, answering_server

from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.clock import ManualClock
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.redis import RedisStore, servers
from kvoffload.tiering.stores.redis.connector import Address, Connector, Timeouts
from kvoffload.tiering.stores.redis.node import Node
from kvoffload.tiering.stores.redis.servers import Cluster, slot_of
from kvoffload.tiering.stores.redis.wire import ErrorReply

OpenStore = Callable[..., RedisStore]
WANTED = keys(*range(60))


def by_node(cluster: RedisCluster, store: RedisStore) -> list[list[bool]]:
    """Which of ``WANTED`` each node has."""
    answers = []
    for node in cluster.nodes:
        with node.client() as client:
            names = set(client.keys())
        answers.append([name_of(store, key) in names for key in WANTED])
    return answers


def node_of(cluster: RedisCluster, slot: int) -> tuple[RedisServer, RedisServer]:
    """Return the node that serves ``slot``, and another node."""
    with cluster.nodes[0].client() as client:
        for start, stop, (_, port, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
            if start <= slot <= stop:
                (owner,) = (node for node in cluster.nodes if node.port == port)
                return owner, next(node for node in cluster.nodes if node is not owner)
    raise AssertionError(f"nobody serves slot {slot}")


def by_hand(store: RedisStore) -> tuple[Cluster, ManualClock]:
    """Return the nodes of ``store``, which is unused, and the clock that determines when they are asked again."""
    nodes, clock = servers_of(store), ManualClock()
    assert isinstance(nodes, Cluster)
    set_clock(nodes, clock)
    return nodes, clock


def all_are_found_later(store: RedisStore, clock: ManualClock) -> bool:
    clock.advance(8.0)  # a probe is due
    return read(store, WANTED) == [True] * len(WANTED)


def node_id(node: RedisServer) -> str:
    with node.client() as client:
        return str(client.execute_command("CLUSTER", "MYID").decode())


def test_slots_are_those_of_the_servers(open_store: OpenStore) -> None:
    store = open_store("redis://127.0.0.1:1", cluster=True)
    names = [name_of(store, key) for key in WANTED]
    assert [slot_of(name) for name in names] == [key_slot(name) for name in names]
    assert len({slot_of(name) for name in names}) > 50  # no tag holds them together


def test_keys_are_spread_over_all_nodes(shared_cluster: RedisCluster, open_store: OpenStore) -> None:
    store = open_store(shared_cluster.url, prefix="spread", cluster=True)
    assert write(store, WANTED) == [True] * len(WANTED)
    parts = by_node(shared_cluster, store)
    assert all(any(part) for part in parts)
    assert [sum(column) for column in zip(*parts, strict=True)] == [1] * len(WANTED)
    assert read(store, WANTED) == [True] * len(WANTED)


def test_a_lost_node_costs_its_own_keys(cluster: RedisCluster, open_store: OpenStore) -> None:
    store = open_store(cluster.url, cluster=True, window_s=5.0)
    _, clock = by_hand(store)
    assert write(store, WANTED) == [True] * len(WANTED)
    lost, kept = cluster.nodes[1], by_node(cluster, store)[1]
    others = [not is_lost for is_lost in kept]
    lost.kill()
    for _ in range(3):
        assert read(store, WANTED) == others
        assert store.contains(WANTED) == others
    only_lost = [key for key, is_lost in zip(WANTED, kept, strict=True) if is_lost]
    assert read(store, only_lost) == [False] * len(only_lost)  # no reason to leave the others alone
    assert write(store, only_lost) == [False] * len(only_lost)
    lost.start()  # without its blocks, but it still knows the cluster

    def are_written_later() -> bool:
        clock.advance(8.0)  # a probe is due
        return write(store, only_lost) == [True] * len(only_lost)

    wait_until(are_written_later, "the node is used again")
    assert read(store, WANTED) == [True] * len(WANTED)


def test_a_refusal_is_heard_while_another_node_is_lost(cluster: RedisCluster, open_store: OpenStore) -> None:
    store = open_store(cluster.url, cluster=True, window_s=5.0)
    assert write(store, WANTED) == [True] * len(WANTED)
    for node in cluster.nodes[:2]:
        with node.client() as client:
            client.config_set("maxmemory", 1)
            client.config_set("maxmemory-policy", "noeviction")
    cluster.nodes[2].kill()
    for first in (100, 200):
        with pytest.raises(StoreError, match="OOM"):
            write(store, keys(*range(first, first + 60)))
    assert any(read(store, WANTED))


def test_a_frozen_node_costs_its_own_keys_and_one_deadline(shared_cluster: RedisCluster, open_store: OpenStore) -> None:
    store = open_store(shared_cluster.url, prefix="frozen", cluster=True)
    cluster_nodes, clock = by_hand(store)
    assert all(write(store, WANTED))
    frozen, kept = shared_cluster.nodes[2], by_node(shared_cluster, store)[2]
    others = [not is_lost for is_lost in kept]
    set_deadline(cluster_nodes, frozen, 0.5)
    frozen.freeze()
    try:
        assert read(store, WANTED) == others
        assert open_ports(cluster_nodes) == [frozen.port]
    finally:
        frozen.thaw()
    set_deadline(cluster_nodes, frozen, 30.0)
    wait_until(lambda: all_are_found_later(store, clock), "the node is used again")


def test_the_nodes_of_a_batch_are_served_side_by_side(
    shared_cluster: RedisCluster, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(shared_cluster.url, prefix="together", cluster=True)
    assert write(store, WANTED) == [True] * len(WANTED)
    together, exchange = threading.Barrier(3), Node.exchange

    def at_once(node: Node, *work: Any) -> Any:
        together.wait(60)  # passes only if all three nodes are at it
        return exchange(node, *work)

    monkeypatch.setattr(Node, "exchange", at_once)
    assert read(store, WANTED) == [True] * len(WANTED)
    assert store.contains(WANTED) == [True] * len(WANTED)


def test_two_frozen_nodes_do_not_delay_the_third(shared_cluster: RedisCluster, open_store: OpenStore) -> None:
    """The batch ends by the deadline of the frozen nodes, and contains the earlier answers of the third node."""
    store = open_store(shared_cluster.url, prefix="two-frozen", cluster=True)
    nodes, clock = by_hand(store)
    assert all(write(store, WANTED))
    good = by_node(shared_cluster, store)[0]
    for node in shared_cluster.nodes[1:]:
        set_deadline(nodes, node, 1.0)
        node.freeze()
    try:
        assert read(store, WANTED) == good
    finally:
        for node in shared_cluster.nodes[1:]:
            node.thaw()
            set_deadline(nodes, node, 30.0)
    wait_until(lambda: all_are_found_later(store, clock), "they are used again")


def test_a_replica_that_takes_over_is_found(cluster: RedisCluster, open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(cluster.url, cluster=True)
    _, clock = by_hand(store)
    assert write(store, WANTED) == [True] * len(WANTED)
    primary = cluster.nodes[1]
    replica = cluster.add_replica(tmp_path, primary)
    with primary.client() as old, replica.client() as new:
        wait_until(lambda: old.dbsize() == new.dbsize(), "the replica has caught up")
        primary.kill()
        assert True in read(store, WANTED)
        new.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        wait_until(lambda: all_are_found_later(store, clock), "the replica is asked")


def test_a_node_that_hangs_does_not_delay_the_map(shared_cluster: RedisCluster) -> None:
    patience = Timeouts(connect_s=1e6, window_s=1.0)
    store = RedisStore(shared_cluster.url, BLOCK_BYTES, prefix="hangs", cluster=True, timeouts=patience)
    nodes = servers_of(store)
    assert isinstance(nodes, Cluster)
    wait_until(lambda: _all_written(store), "all is written")
    frozen = shared_cluster.nodes[0]  # which the URL names
    frozen.freeze()
    try:
        before = slots_of(nodes)
        ask_for_the_map(nodes)
        nodes.split([])
        assert slots_of(nodes) is not before  # by another node, long before the first one's deadline
    finally:
        frozen.thaw()
    store.close()


def _all_written(store: RedisStore) -> bool:
    try:
        return all(write(store, WANTED))
    except StoreError:
        return False


@pytest.mark.parametrize(
    "reply",
    [
        b":5",
        b"$-1",
        b"*1\r\n:5",
        b"*1\r\n*1\r\n:5",
        b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\nh\r\n:0",
        b"*1\r\n*3\r\n:0\r\n:x\r\n*2\r\n$1\r\nh\r\n:1",
        b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\n\xff\r\n:1",
        b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n:7\r\n:1",
    ],
)
@pytest.mark.parametrize("is_cluster", [True, False])
def test_an_answer_about_servers_that_cannot_be_read_is_an_error(
    reply: bytes, is_cluster: bool, open_store: OpenStore
) -> None:
    with answering_server(reply + b"\r\n") as port:
        url = f"redis://127.0.0.1:{port}" if is_cluster else f"redis+sentinel://127.0.0.1:{port}/kv"
        with pytest.raises(StoreError, match=f"Redis at 127.0.0.1:{port} (answers|fails)"):
            open_store(url, cluster=is_cluster).contains(keys(1))


def test_all_nodes_lost_is_an_error(cluster: RedisCluster, open_store: OpenStore) -> None:
    store = open_store(cluster.url, cluster=True)
    assert all(write(store, WANTED))
    for node in cluster.nodes:
        node.kill()
    assert read(store, WANTED[:1]) == [False]  # one node may be lost
    for _ in range(2):
        with pytest.raises(StoreError):
            read(store, WANTED)


def test_a_slot_that_moves_and_has_moved_is_followed(cluster: RedisCluster, open_store: OpenStore) -> None:
    store = open_store(cluster.url, cluster=True)
    key, new = WANTED[0], keys(1000)[0]
    assert write(store, WANTED) == [True] * len(WANTED)
    slot = slot_of(name_of(store, key))
    source, target = node_of(cluster, slot)
    with source.client() as old, target.client() as fresh:
        fresh.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
        old.execute_command("MIGRATE", "127.0.0.1", target.port, name_of(store, key), 0, 5000)
        # The block is at its new place, and the old one answers ASK.
        assert read(store, WANTED) == [True] * len(WANTED)
        assert store.contains([key, new]) == [True, False]
        fresh.execute_command("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
        old.execute_command("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
    # The old one answers MOVED.
    assert read(store, WANTED) == [True] * len(WANTED)
    nodes = servers_of(store)
    assert isinstance(nodes, Cluster)
    wait_until(lambda: _owner_after_a_read(store, nodes, slot) == target.port, "the new map is known")


def test_a_slot_that_moves_to_a_frozen_node_costs_one_deadline(
    shared_cluster: RedisCluster, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, exchange, asked = open_store(shared_cluster.url, prefix="moves", cluster=True), Node.exchange, list[int]()
    nodes, clock = by_hand(store)
    assert all(write(store, WANTED))
    source, frozen = shared_cluster.nodes[0], shared_cluster.nodes[2]
    missing = next(key for key in keys(*range(1000, 2000)) if slot_of(name_of(store, key)) < 5461)
    slot = slot_of(name_of(store, missing))
    batch = [key for key in WANTED if slot_of(name_of(store, key)) < 5461 and slot_of(name_of(store, key)) != slot]
    answers = [True] * len(batch) + [False]
    with source.client() as old, frozen.client() as fresh:
        fresh.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(frozen))
    wait_until(lambda: store.contains([*batch, missing]) == answers, "the nodes answer")

    def counted(node: Node, *work: Any) -> Any:
        asked.append(node.address.port)
        return exchange(node, *work)

    monkeypatch.setattr(Node, "exchange", counted)
    set_deadline(nodes, frozen, 1.0)
    frozen.freeze()
    try:
        assert store.contains([*batch, missing]) == answers
        assert asked == [source.port, frozen.port]
        asked.clear()
        for _ in range(3):
            assert store.contains([*batch, missing]) == answers
        assert asked == [source.port] * 3
        clock.advance(1.5)  # a probe is due, and no other after it
        for _ in range(3):
            assert store.contains([*batch, missing]) == answers
        assert asked.count(frozen.port) == 1
    finally:
        frozen.thaw()
        for node in (source, frozen):
            with node.client() as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
    set_deadline(nodes, frozen, 30.0)
    clock.advance(60.0)
    wait_until(lambda: store.contains(WANTED) == [True] * len(WANTED), "the node is used again")


def _owner_after_a_read(store: RedisStore, nodes: Cluster, slot: int) -> int:
    assert read(store, WANTED[:1]) == [True]
    (name,) = (name_of(store, key) for key in WANTED[:1])
    (node,) = nodes.split([name])
    return node.address.port


def test_a_server_that_is_no_cluster(shared_server: RedisServer, open_store: OpenStore) -> None:
    with pytest.raises(StoreError, match=f"Redis at 127.0.0.1:{shared_server.port} fails: .*cluster support disabled"):
        open_store(shared_server.url, cluster=True).contains(keys(1))


def test_a_cluster_that_is_not_set_up(start_server: Callable[..., RedisServer], open_store: OpenStore) -> None:
    server = start_server(cluster_enabled="yes")
    with pytest.raises(StoreError, match="serves no slots"):
        open_store(server.url, cluster=True).contains(keys(1))


def test_a_cluster_without_its_option_says_so(shared_cluster: RedisCluster, open_store: OpenStore) -> None:
    store = open_store(shared_cluster.url)
    with pytest.raises(StoreError, match=r"MOVED.*cluster"):
        store.contains(WANTED)


def test_a_cluster_has_no_socket_file(open_store: OpenStore) -> None:
    with pytest.raises(ConfigError, match="cluster=true needs"):
        open_store("unix:///nowhere", cluster=True)


def test_a_map_that_is_adopted_while_keys_are_split_is_not_mixed_with_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(Connector(f"redis://127.0.0.1:{free_port()}", Timeouts()), clock=ManualClock())
    asked = Address("127.0.0.1", 7000)
    ask_nobody(cluster)
    learn(cluster, asked, [[slot, slot, [b"127.0.0.1", 7001]] for slot in range(16_384)])
    find = bisect.bisect_right

    def adopt_meanwhile(*what: Any) -> int:
        found = find(*what)
        learn(cluster, asked, [[0, 16_383, [b"127.0.0.1", 7002]]])
        return found

    names = [b"a", b"b", b"c"]
    with monkeypatch.context() as patched:
        patched.setattr(bisect, "bisect_right", adopt_meanwhile)
        (node,) = cluster.split(names)
    assert node.address.port == 7001
    (node,) = cluster.split(names)
    assert node.address.port == 7002


def manual_cluster() -> Cluster:
    cluster = Cluster(Connector(f"redis://127.0.0.1:{free_port()}", Timeouts()), clock=ManualClock())
    ask_nobody(cluster)
    return cluster


def map_of(*nodes: tuple[str, int]) -> list[Any]:
    """Return a server's answer: the first of ``nodes`` serves all slots, and the others are its replicas."""
    return [[0, 16_383, *([host.encode(), port, b"id", []] for host, port in nodes)]]


def test_redirections_are_read_and_other_errors_are_none() -> None:
    cluster = manual_cluster()
    learn(cluster, Address("10.0.0.1", 1), map_of(("10.0.0.2", 6381), ("fe80::1", 6381), ("127.0.0.1", 6381)))
    for reply, address in (
        ("MOVED 3999 10.0.0.2:6381", "10.0.0.2:6381"),
        ("ASK 3999 [fe80::1]:6381", "fe80::1:6381"),
        ("MOVED 3999 :6381", "127.0.0.1:6381"),
    ):
        node = cluster.redirect(ErrorReply(reply))
        assert node is not None
        assert str(node.address) == address
    for reply in ("MOVED", "MOVED 1 x:y", "MOVED 1 x:0", "MOVED 1 x:65536", "OOM command not allowed", ""):
        assert cluster.redirect(ErrorReply(reply)) is None


def test_nodes_are_those_of_the_map_however_many_there_have_been() -> None:
    cluster = manual_cluster()
    for number in range(1, 300):
        learn(cluster, Address("10.0.0.1", 1), map_of(("10.0.0.1", number), ("10.0.0.2", number)))
        assert cluster.redirect(ErrorReply(f"MOVED 1 10.0.0.2:{number}")) is not None
        with pytest.raises(StoreError, match="not a node of the cluster"):
            cluster.redirect(ErrorReply(f"MOVED 1 10.0.0.3:{number}"))
    assert len(nodes_of(cluster)) <= 3
    learn(cluster, Address("10.0.0.1", 1), map_of(("10.0.0.1", 7), ("10.0.0.2", 0)))  # no such replica
    assert [str(node.address) for node in slots_of(cluster).nodes] == ["10.0.0.1:7"]
    with pytest.raises(StoreError, match="names 5000 nodes"):
        learn(cluster, Address("10.0.0.1", 1), map_of(*(("10.0.0.1", port) for port in range(1, 5001))))


def test_keys_in_slots_that_nobody_serves_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "slot_of", int)
    cluster = manual_cluster()
    served = [(9, 10, 2), (1, 3, 1)]
    learn(cluster, Address("10.0.0.1", 1), [[first, last, [b"10.0.0.1", port]] for first, last, port in served])
    split = cluster.split([b"%d" % slot for slot in range(16)])
    assert {node.address.port: [*indexes] for node, indexes in split.items()} == {1: [1, 2, 3], 2: [9, 10]}
    learn(cluster, Address("10.0.0.1", 1), [[0, 16_383, [b"10.0.0.1", 1]]])
    assert slots_of(cluster).starts == [0]


@pytest.mark.parametrize("kind", ["MOVED", "ASK"])
def test_a_redirection_out_of_the_cluster_is_a_miss_and_shows_nobody_the_password(
    open_store: OpenStore, kind: str
) -> None:
    stranger = Mute()
    try:
        with one_node_cluster(f"-{kind} 1 127.0.0.1:{stranger.port}\r\n".encode()) as port:
            store = open_store(f"redis://:hush@127.0.0.1:{port}", cluster=True, window_s=5.0)
            for _ in range(3):
                assert store.contains(keys(1)) == [False]
                assert read(store, keys(1)) == [False]
        assert stranger.num_connections == 0
    finally:
        stranger.close()


@contextmanager
def one_node_cluster(answer: bytes) -> Iterator[int]:
    """Yield the port of a node that serves all slots, according to its map, and answers everything else with
    ``answer``."""

    class Node(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                words = [self._word() for _ in range(int(line[1:]))]
                if words[0] == b"AUTH":
                    self.wfile.write(b"+OK\r\n")
                elif words[0] == b"CLUSTER":
                    self.wfile.write(b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:%d\r\n" % server.server_address[1])
                else:
                    self.wfile.write(answer)

        def _word(self) -> bytes:
            return self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2]

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Node) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()
