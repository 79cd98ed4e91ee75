# SPDX-License-Identifier: Apache-2.0
"""Access to the inside of a ``RedisStore``. Tests depend on its implementation only through this module."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from tests.redis_server import RedisServer

from kvoffload.base import OffloadKey
from kvoffload.testing.clock import ManualClock
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.connector import Address, Timeouts
from kvoffload.tiering.stores.redis.servers import Cluster


def name_of(store: RedisStore, key: OffloadKey) -> bytes:
    """Return the name of a block on the server."""
    return store._name(key)


def servers_of(store: RedisStore) -> Any:
    return store._servers


def idle_of(node: Any) -> list[Any]:
    """Return the idle connections of a server."""
    return node._idle  # type: ignore[no-any-return]


def nodes_of(cluster: Cluster) -> Any:
    """Return the nodes by address."""
    return cluster._nodes


def open_ports(cluster: Cluster) -> list[int]:
    """Return the ports of nodes that are currently not contacted."""
    return [address.port for address, node in nodes_of(cluster).items() if not node.breaker.is_closed]


def slots_of(cluster: Cluster) -> Any:
    """Return the map of all slots."""
    return cluster._slots


def learn(cluster: Cluster, asked: Address, answer: Sequence[Any]) -> None:
    """Store the answer of the node ``asked`` about all slots."""
    cluster._learn(asked, answer)()


def ask_for_the_map(cluster: Cluster) -> None:
    """At its next call."""
    cluster._is_stale, cluster._next_refresh_s = True, 0.0


def ask_nobody(cluster: Cluster) -> None:
    cluster._is_known, cluster._is_stale, cluster._next_refresh_s = True, False, math.inf


def set_clock(cluster: Cluster, clock: ManualClock) -> None:
    cluster._clock = clock


def set_deadline(nodes: Cluster, server: RedisServer, window_s: float) -> None:
    """A short one for whatever is asked of ``server``, which the store has used before. On a busy machine the other
    nodes need a long one."""
    node = nodes_of(nodes)[Address("127.0.0.1", server.port)]
    node._connector = copy.copy(node._connector)
    node._connector.timeouts = Timeouts(window_s, window_s)
