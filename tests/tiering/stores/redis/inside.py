# SPDX-License-Identifier: Apache-2.0
"""A short deadline for a node of a cluster that a test freezes. On a busy machine the others need a long one."""

from __future__ import annotations

import copy

from tests.redis_server import RedisServer

from kvoffload.tiering.stores.redis.connector import Address, Timeouts
from kvoffload.tiering.stores.redis.servers import Cluster


def set_deadline(nodes: Cluster, server: RedisServer, window_s: float) -> None:
    """For whatever is asked of ``server``, which the store has used before."""
    node = nodes._nodes[Address("127.0.0.1", server.port)]
    node._connector = copy.copy(node._connector)
    node._connector.timeouts = Timeouts(window_s, window_s)
