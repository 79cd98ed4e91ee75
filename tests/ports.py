# SPDX-License-Identifier: Apache-2.0
"""Ports for the servers that tests start."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

_PORTS = range(10_240, 22_000)
"""Linux gives outgoing connections ports from 32,768 on. One of those could take a port of there between its choice and
the start of its server, or while the server is down. A cluster's bus port, 10,000 above, lies below that too."""
_given: set[int] = set()


def free_port() -> int:
    """A port that nobody uses, and that no other test of this process gets. Nobody uses its bus port either."""
    chance = random.SystemRandom()  # other processes choose as well, with equal seeds
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
