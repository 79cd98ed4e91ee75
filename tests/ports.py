# SPDX-License-Identifier: Apache-2.0
"""Ports for the servers that tests start."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

_PORTS = range(10_240, 22_000)
"""The ports to choose from. Linux assigns ports from 32,768 on to outgoing connections, which could take such a port
between its choice and the start of its server, or while the server is down. A cluster's bus port, 10,000 above, is also
below that limit."""
_given: set[int] = set()


def free_port() -> int:
    """Return a port that nobody uses, and that no other test of this process gets. Its bus port is unused as well."""
    chance = random.SystemRandom()  # other processes also choose, with equal seeds
    while True:
        port = chance.choice(_PORTS)
        if port not in _given and _is_free(port) and _is_free(port + 10_000):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
