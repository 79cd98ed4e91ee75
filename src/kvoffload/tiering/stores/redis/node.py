# SPDX-License-Identifier: Apache-2.0
"""One server, and the connections to it."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvoffload.errors import StoreError, reason_of
from kvoffload.tiering.circuit_breaker import CircuitBreaker
from kvoffload.tiering.stores.redis.connector import Address, Connector
from kvoffload.tiering.stores.redis.wire import ErrorReply, Wire, encode, in_one_line

T = TypeVar("T")


class Node:
    """One server. Any thread may use it: each exchange uses its own connection, which is kept for a later exchange."""

    def __init__(self, address: Address, connector: Connector, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.breaker = CircuitBreaker(str(address), longest_wait_s=8.0, clock=clock)
        """Circuit breaker in a cluster, which does not use this node while it is open. The cluster's lock guards it."""
        self._connector = connector
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Node({self.address}, idle={len(self._idle)})"

    def exchange(self, call: Callable[[Wire], T], timeout_s: float | None = None) -> T:
        """Return the result of ``call``, which sends one window and receives its answers. Raises ``StoreError`` if the
        server cannot be reached or does not answer in time. The connection is closed by then, so nothing writes to a
        buffer afterwards. The default of ``timeout_s`` is the time limit of a window."""
        timeout_s = self._connector.timeouts.window_s if timeout_s is None else timeout_s
        received, wire = self._served(call, timeout_s)
        wire.idle_since_s = time.monotonic()
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(wire)
        if not is_kept:
            wire.close()
        return received

    def ask(self, *words: bytes) -> Any:
        """Return the reply to a command that moves no block and changes nothing. Raises ``StoreError``, also if the
        server answers with an error, or if the whole reply takes longer than a connection may."""

        def reply_of(wire: Wire) -> Any:
            wire.send([encode(*words)])
            return wire.read_reply()

        reply = self.exchange(reply_of, self._connector.timeouts.connect_s)
        if isinstance(reply, ErrorReply):
            raise self._failed(reply)
        return reply

    def close_idle(self, since_before_s: float = math.inf) -> None:
        """Close the connections that are not in use, or only those idle since before the given time."""
        with self._lock:
            old = [wire for wire in self._idle if wire.idle_since_s <= since_before_s]
            self._idle = [wire for wire in self._idle if wire.idle_since_s > since_before_s]
        for wire in old:
            wire.close()

    def close(self) -> None:
        """Close every connection; a connection in use is closed at the end of its exchange."""
        with self._lock:
            self._is_closed = True
        self.close_idle()

    def _served(self, call: Callable[[Wire], T], timeout_s: float) -> tuple[T, Wire]:
        """Return the result of ``call``, and the connection that it used: an idle one, or a new one if none is idle or
        the idle one is dead."""
        began_s = time.monotonic()
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            try:
                return _exchanged(idle, call, timeout_s), idle
            except OSError as exc:
                # The kernel's own timeout ends a connection whose other end is gone.
                if isinstance(exc, TimeoutError) and exc.errno != errno.ETIMEDOUT:
                    # Either the server hangs, or a firewall has forgotten this connection. In the second case, all
                    # connections that were idle for as long are lost, and each would cost a deadline.
                    self.close_idle(began_s)
                    raise self._failed(exc) from exc
            # The server may have restarted since this connection was last used. Then all other idle connections are
            # lost as well.
            self.close_idle()
        try:
            wire = self._connector.connect(self.address)
        except (OSError, UnicodeError) as exc:  # the second error is for an invalid host name
            raise self._failed(exc) from exc
        try:
            return _exchanged(wire, call, timeout_s), wire
        except OSError as exc:
            raise self._failed(exc) from exc

    def _failed(self, reason: Exception | ErrorReply) -> StoreError:
        text = reason_of(reason) if isinstance(reason, Exception) else reason
        return StoreError(f"Redis at {self.address} fails: {in_one_line(text) or type(reason).__name__}.")


def _exchanged(wire: Wire, call: Callable[[Wire], T], timeout_s: float) -> T:
    wire.begin(timeout_s)
    try:
        return call(wire)
    except BaseException:
        wire.close()
        raise
