# SPDX-License-Identifier: Apache-2.0
"""The greeting of a new connection, which redis-py speaks, with one deadline and a bound on what is read."""

from __future__ import annotations

import socket
import time
from typing import Any

__all__ = ["MOST_BYTES", "greet"]

MOST_BYTES = 1 << 16
"""Of all answers to a greeting. Each of them is a line."""


def greet(connection: Any, timeout_s: float) -> None:
    """Authenticates ``connection``, one of redis-py's with a connected socket, and chooses its database. By itself
    redis-py would wait ``timeout_s`` for each piece of an answer, and would read a line that does not end for ever."""
    sock = connection._sock
    connection._sock = _LimitedSocket(sock, timeout_s)
    connection.on_connect()
    connection._sock = sock


class _LimitedSocket:
    """A socket for as long as a greeting takes. What it raises redis-py raises as errors of its own."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._socket = sock
        self._end_s = time.monotonic() + timeout_s
        self._bytes_left = MOST_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendall(self, data: bytes) -> None:
        self._limit()
        self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        self._limit()
        data = self._socket.recv(min(size, self._bytes_left))
        self._bytes_left -= len(data)
        return data

    def recv_into(self, buffer: bytearray) -> int:  # hiredis reads in this way
        self._limit()
        count = self._socket.recv_into(buffer, min(len(buffer), self._bytes_left))
        self._bytes_left -= count
        return count

    def _limit(self) -> None:
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("no answer in time")
        if not self._bytes_left:
            raise ConnectionError("the greeting does not end")
        self._socket.settimeout(remaining_s)
