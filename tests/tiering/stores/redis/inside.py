# SPDX-License-Identifier: Apache-2.0
"""The inside of a ``RedisStore``, for tests that look there: nothing else of them depends on how it is made."""

from __future__ import annotations

import copy
from typing import Any

from tests.redis_server import RedisServer

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.connector import Address, Timeouts
from kvoffload.tiering.stores.redis.servers import Cluster


def name_of(store: RedisStore, key: OffloadKey) -> bytes:
    """What a block is called on the server."""
    return store._name(key)


def servers_of(store: RedisStore) -> Any:
    return store._servers


def set_deadline(nodes: Cluster, server: RedisServer, window_s: float) -> None:
    """A short one for whatever is asked of ``server``, which the store has used before. On a busy machine the other
    nodes need a long one."""
    node = nodes._nodes[Address("127.0.0.1", server.port)]
    node._connector = copy.copy(node._connector)
    node._connector.timeouts = Timeouts(window_s, window_s)
