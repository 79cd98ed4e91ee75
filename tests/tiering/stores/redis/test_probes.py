# SPDX-License-Identifier: Apache-2.0
"""However the probe of a lost node ends, another one follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.redis_server import RedisCluster, wait_until
from tests.tiering.stores.blocks import write
from tests.tiering.stores.redis.inside import open_ports, servers_of, set_clock, set_deadline

from kvoffload.errors import StoreError
from kvoffload.testing.clock import ManualClock
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.node import Node
from kvoffload.tiering.stores.redis.servers import Cluster
from kvoffload.tiering.stores.requests import Requests

WANTED = keys(*range(60))
OpenStore = Callable[..., RedisStore]


@pytest.mark.parametrize("fault", ["no thread", "unforeseen"])
def test_a_probe_that_ends_in_any_other_way_is_followed_by_another(
    shared_cluster: RedisCluster, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    store, clock = open_store(shared_cluster.url, prefix=fault.replace(" ", "-"), cluster=True), ManualClock()
    nodes, lost = servers_of(store), shared_cluster.nodes[2]
    assert isinstance(nodes, Cluster)
    set_clock(nodes, clock)
    assert all(write(store, WANTED))
    set_deadline(nodes, lost, 0.5)
    lost.freeze()
    try:
        assert _open_ports(store, nodes) == [lost.port]
    finally:
        lost.thaw()
    set_deadline(nodes, lost, 30.0)
    clock.advance(1.0)  # a probe is due
    start, exchange = threading.Thread.start, Node.exchange

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("kvoffload-redis"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def broken(node: Node, *work: Any) -> Any:
        if node.address.port == lost.port:
            raise ValueError("unforeseen")
        return exchange(node, *work)

    with monkeypatch.context() as patched:
        if fault == "no thread":
            store._requests.close()
            store._requests = Requests("redis", 64)
            patched.setattr(threading.Thread, "start", limited)
        else:
            patched.setattr(Node, "exchange", broken)
        with pytest.raises((StoreError, ValueError), match=r"can't start new thread|unforeseen"):
            store.contains(WANTED)
    wait_until(lambda: _found_later(store, clock) == len(WANTED), "the node is used again")


def _open_ports(store: RedisStore, nodes: Cluster) -> list[int]:
    store.contains(WANTED)
    return open_ports(nodes)


def _found_later(store: RedisStore, clock: ManualClock) -> int:
    clock.advance(8.0)
    try:
        return sum(store.contains(WANTED))
    except StoreError:
        return 0
