# SPDX-License-Identifier: Apache-2.0
"""Connections to hosts by name, with one deadline for everything. The system's name resolution does not support
deadlines."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

_MOST_NAMES = 1024
"""Maximum number of remembered names. A cluster names its nodes, and may name others later."""

_NO_SUCH_NAME = [getattr(socket, name, socket.EAI_NONAME) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY")]
"""Failures that concern the name itself. Other failures come from a name server that rejects the query, or from a
process without free file descriptors."""

Endpoint = tuple[Any, ...]
"""An address as ``getaddrinfo`` returns it."""


class _Question:
    """A query to the system for one name. The asking thread may stay blocked long after all callers have left."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.answer: list[Endpoint] | OSError | UnicodeError | None = None


class Resolver:
    """A resolver for any thread. For each name, a separate thread asks the system, one query at a time, so that a
    hanging name does not delay another. If the system does not answer within half of the time, or fails temporarily,
    the previous answer is used. So known servers stay reachable while a name server is down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], _Question] = {}
        self._known: dict[tuple[str, int], list[Endpoint]] = {}

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """Return a TCP connection to the first address of ``host`` that accepts it. Raises ``OSError``."""
        deadline_s = time.monotonic() + timeout_s
        endpoints = self._resolve(host, port, timeout_s)
        for left in reversed(range(len(endpoints))):
            # Each address gets its share of the time, so that an address that drops packets leaves time for the next.
            share_s = max(0.001, (deadline_s - time.monotonic()) / (left + 1))
            try:
                return _connected(endpoints[-1 - left], share_s)
            except OSError:  # also for a family that this host lacks, such as IPv6
                if not left:
                    raise
        raise OSError("the name has no address")

    def _resolve(self, host: str, port: int, timeout_s: float) -> list[Endpoint]:
        try:  # an address does not need the system
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            pass
        name = host, port
        with self._lock:
            question, known = self._open.get(name), self._known.get(name)
            if question is None:
                question = self._open[name] = self._ask(name)
        question.has_ended.wait(timeout_s if known is None else timeout_s / 2)
        if isinstance(question.answer, list):
            return question.answer
        if known is not None and (question.answer is None or _is_passing(question.answer)):
            return known
        raise question.answer or TimeoutError("the name of its host is not resolved in time")

    def _ask(self, name: tuple[str, int]) -> _Question:
        question = _Question()

        def ask() -> None:
            try:
                question.answer = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as exc:  # the second error is for an invalid host name
                question.answer = exc
            self._end(name, question.answer)
            question.has_ended.set()

        try:
            threading.Thread(target=ask, name="kvoffload-resolve", daemon=True).start()
        except (RuntimeError, MemoryError) as exc:
            raise OSError(f"no thread can be started to resolve its name: {exc}") from exc
        return question

    def _end(self, name: tuple[str, int], answer: list[Endpoint] | Exception) -> None:
        with self._lock:
            self._open.pop(name, None)
            if isinstance(answer, list):
                if len(self._known) >= _MOST_NAMES:
                    del self._known[next(iter(self._known))]
                self._known[name] = answer
            elif not _is_passing(answer):
                self._known.pop(name, None)


def _connected(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    family, kind, protocol, _, address = endpoint
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_passing(failure: Exception) -> bool:
    """Return whether an error is temporary, because it does not concern the name itself. Unknown errors count as
    temporary."""
    return isinstance(failure, OSError) and failure.errno not in _NO_SUCH_NAME
