# SPDX-License-Identifier: Apache-2.0
"""The servers: their connections, and what is to be known of them."""

from __future__ import annotations

import copy
import errno
import math
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvoffload.errors import ConfigError, MissingExtraError, StoreError
from kvoffload.tiering.stores.redis.greeting import greet
from kvoffload.tiering.stores.redis.wire import ErrorReply, Wire, encode, open_wire, without_arguments
from kvoffload.tiering.stores.remote import check_credentials

__all__ = ["Address", "Connector", "DiscoveredServers", "Node", "Nodes", "Server", "Timeouts"]

T = TypeVar("T")

_REFRESH_INTERVAL_S = 1.0
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds without a byte before the kernel asks, seconds between its probes, and their number. They keep firewalls from
dropping an idle connection, and find one that was dropped."""
_MOST_CHARACTERS = 300


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


class Timeouts(NamedTuple):
    connect_s: float = 1.0
    """For the connection, then for TLS, then for the greeting (authentication); and for an answer about the servers."""
    window_s: float = 5.0
    """For one window of requests and all of its answers."""


class Connector:
    """Makes connections by redis-py, from a URL: ``redis://``, ``rediss://`` (TLS) or ``unix://``."""

    def __init__(
        self,
        url: str,
        timeouts: Timeouts,
        *,
        username: str | None = None,
        password: str | None = None,
        sentinel_username: str | None = None,
        sentinel_password: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_verify: bool = True,
    ) -> None:
        try:
            from redis import connection as library
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
            from redis.retry import Retry
        except ImportError as exc:
            raise MissingExtraError("The 'redis' tier needs redis-py: pip install 'kvoffload[redis]'.") from exc
        parse_url: Any = library.parse_url
        try:
            parts = urlsplit(url)
        except ValueError:
            # Here and below: the library's text may have a part of the password.
            raise ConfigError("url of the 'redis' tier is not one that can be read.") from None
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ConfigError(
                "url of the 'redis' tier must begin with redis://, rediss://, unix:// or redis+sentinel://."
            )
        check_credentials(url, "url of the 'redis' tier")
        if parts.query and parts.scheme != "unix":
            raise ConfigError("url of the 'redis' tier has a '?': give these settings as options of the tier instead.")
        if parts.scheme != "unix" and not re.fullmatch(r"/?|/[0-9]+/?", parts.path):
            raise ConfigError(
                "url of the 'redis' tier has something other than the number of a database after the '/'."
            )
        tls = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key, "tls_verify: false": not tls_verify}
        if parts.scheme != "rediss" and any(tls.values()):
            (first, *_) = (name for name, is_given in tls.items() if is_given)
            raise ConfigError(
                f"A 'redis' tier with {first} needs a url of rediss:// or rediss+sentinel://: the others have no TLS."
            )
        try:
            known: dict[str, Any] = dict(parse_url(url))
        except ValueError:
            raise ConfigError("url of the 'redis' tier is not one that redis-py reads.") from None
        self._class: Any = known.pop("connection_class", library.Connection)
        self._known = known | {
            "protocol": 2,
            # A refused connection is an answer: a retry would make seconds of it, and the tier probes anyway.
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": timeouts.connect_s,
            "socket_timeout": timeouts.connect_s,
            "redis_connect_func": lambda connection: greet(connection, timeouts.connect_s),
        }
        if parts.scheme != "unix":
            known_here = {name: value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}
            self._known["socket_keepalive"] = True  # before redis-py 8 there is none by default
            self._known["socket_keepalive_options"] = {getattr(socket, name): it for name, it in known_here.items()}
        if username is not None:
            self._known["username"] = username
        if password is not None:
            self._known["password"] = password
        if parts.scheme == "rediss":
            self._known |= {"ssl_ca_certs": tls_ca, "ssl_certfile": tls_cert, "ssl_keyfile": tls_key}
            self._known["ssl_cert_reqs"] = "required" if tls_verify else "none"
            self._known["ssl_check_hostname"] = tls_verify  # before redis-py 6 it is not checked by default
        given = {"username": sentinel_username, "password": sentinel_password}
        self._for_sentinels = {name: value for name, value in given.items() if value is not None}
        passwords = (self._known.get("password"), sentinel_password)
        self._secrets = tuple(spelling for secret in passwords if secret for spelling in _spellings(secret))
        self.errors: tuple[type[Exception], ...] = (RedisError, OSError)
        """What connecting may raise."""
        self.is_socket_file = parts.scheme == "unix"
        self.address = (
            Address(known["path"], 0)
            if self.is_socket_file
            else Address(known.get("host", "localhost"), known.get("port", 6379))
        )
        """Of the server that the URL names. It has no credentials."""
        self.timeouts = timeouts

    def __repr__(self) -> str:
        return f"Connector({self.address})"

    def connection(self, address: Address, **changes: Any) -> Any:
        """One of redis-py's connections, not connected yet."""
        where = {} if self.is_socket_file else {"host": address.host, "port": address.port}
        return self._class(**(self._known | where | changes))

    def for_sentinels(self) -> Connector:
        """The same for sentinels: with these timeouts and TLS, and with credentials of their own. They never see the
        servers'."""
        made = copy.copy(self)
        made._known = {name: value for name, value in self._known.items() if name not in ("username", "password", "db")}
        made._known |= self._for_sentinels
        return made

    def quote(self, text: str) -> str:
        """What a server or the library says, for people to read: in one line, without a password."""
        text = without_arguments(text)
        line = " ".join(text.split()).rstrip(".")
        if any(secret in said for secret in self._secrets for said in (text, line)):
            return "what it says has a password in it, and is not shown"
        return line[:_MOST_CHARACTERS]


def _spellings(secret: str) -> tuple[str, ...]:
    """How ``secret`` may be written."""
    return secret, repr(secret)[1:-1], repr(secret.encode(errors="replace"))[2:-1]


class Node:
    """One server. Any thread: each exchange has a connection of its own, which is kept for the next one."""

    def __init__(self, address: Address, connector: Connector) -> None:
        self.address = address
        self._connector = connector
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Node({self.address}, idle={len(self._idle)})"

    def exchange(self, call: Callable[[Wire], T]) -> T:
        """What ``call`` returns, which sends one window and receives its answers. Raises ``StoreError`` if the server
        cannot be reached or does not answer in time; the connection is closed by then, so nothing is written to any
        buffer any more."""
        received, wire = self._served(self._take_idle(), call, self._connector.timeouts.window_s)
        wire.idle_since_s = time.monotonic()
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(wire)
        if not is_kept:
            wire.close()
        return received

    @contextmanager
    def conversation(self, reply_s: float) -> Iterator[Callable[..., Any]]:
        """A function that sends a command which moves no block and changes nothing, and returns its reply, on a
        connection of its own. It raises ``StoreError``, also if the server answers with an error, or if the whole reply
        takes longer than ``reply_s``. A server may close the connection between two commands."""
        wire: Wire | None = None

        def ask(*words: bytes) -> Any:
            nonlocal wire
            idle, wire = wire, None
            reply, wire = self._served(idle, lambda used: _reply_to(used, words), reply_s)
            if isinstance(reply, ErrorReply):
                raise self._failed(reply)
            return reply

        try:
            yield ask
        finally:
            if wire is not None:
                wire.close()

    def quote(self, text: str) -> str:
        """What this server says, for people to read."""
        return self._connector.quote(text)

    def close_idle(self, since_before_s: float = math.inf) -> None:
        """Closes the connections that are not in use, since before a point in time if one is given."""
        with self._lock:
            old = [wire for wire in self._idle if wire.idle_since_s <= since_before_s]
            self._idle = [wire for wire in self._idle if wire.idle_since_s > since_before_s]
        for wire in old:
            wire.close()

    def close(self) -> None:
        """Closes every connection, those in use at the end of their exchange."""
        self._is_closed = True
        self.close_idle()

    def _take_idle(self) -> Wire | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _served(self, idle: Wire | None, call: Callable[[Wire], T], timeout_s: float) -> tuple[T, Wire]:
        """What ``call`` returns, and the connection that it used: ``idle``, or a new one if there is none or it turns
        out to be dead. Raises ``StoreError``, outside of any ``except``: what the library raises may have a password,
        and would be shown as the context."""
        began_s = time.monotonic()
        failure: StoreError | None = None
        if idle is not None:
            try:
                return self._exchange(idle, call, timeout_s), idle
            except OSError as exc:
                # The kernel's own timeout ends a connection whose other end is gone.
                if isinstance(exc, TimeoutError) and exc.errno != errno.ETIMEDOUT:
                    failure = self._failed(exc)
            if failure is not None:
                # Either the server hangs, or what stands between has forgotten this connection, and then all that were
                # idle for as long: each of them would cost a deadline.
                self.close_idle(began_s)
                raise failure
            # The server may have been restarted since this connection was last used, and so all the others.
            self.close_idle()
        try:
            wire = open_wire(self._connector.connection(self.address))
            return self._exchange(wire, call, timeout_s), wire
        except self._connector.errors as exc:
            failure = self._failed(exc)
        raise failure

    def _exchange(self, wire: Wire, call: Callable[[Wire], T], timeout_s: float) -> T:
        wire.begin(timeout_s)
        try:
            return call(wire)
        except BaseException:
            wire.close()
            raise

    def _failed(self, reason: Exception | ErrorReply) -> StoreError:
        said = self.quote(str(reason)) or type(reason).__name__
        return StoreError(f"Redis at {self.address} fails: {said}.")


def _reply_to(wire: Wire, words: Sequence[bytes]) -> Any:
    wire.send([encode(*words)])
    return wire.read_reply()


class Nodes(ABC):
    """Which server has a name. ``StoreTier``'s circuit breaker stands above all of them."""

    @abstractmethod
    def split(self, names: Sequence[bytes]) -> Mapping[Node, Sequence[int]]:
        """The indexes of ``names`` by server. What is left out cannot be reached now. Raises ``StoreError`` if no
        server can."""

    @property
    def has_others(self) -> bool:
        """Whether some servers go on when one is lost."""
        return False

    def redirect(self, reply: ErrorReply) -> Node | None:
        """Where to repeat a request that was answered by ``reply``; ``None`` if that is not a redirection."""
        return None

    def may_ask(self, node: Node) -> bool:
        """Whether a request that was redirected to ``node`` goes there now. If so, its end is recorded."""
        return True

    def record(self, node: Node, is_good: bool) -> None:
        """The end of an exchange with ``node``."""
        return

    @abstractmethod
    def all(self) -> list[Node]:
        """Every server that has keys. Raises ``StoreError`` if that is not to be learned."""

    @abstractmethod
    def close(self) -> None:
        """Closes all connections."""


class Server(Nodes):
    """One server, which has every key."""

    def __init__(self, connector: Connector) -> None:
        self._node = Node(connector.address, connector)

    def __repr__(self) -> str:
        return str(self._node.address)

    def split(self, names: Sequence[bytes]) -> Mapping[Node, Sequence[int]]:
        return {self._node: range(len(names))}

    def all(self) -> list[Node]:
        return [self._node]

    def close(self) -> None:
        self._node.close()


class DiscoveredServers(Nodes):
    """Servers that are found by asking servers. Which server has which keys is read when it is first needed, and again
    once it is stale: at most once a second, by the thread that needs it. Other threads meanwhile use what was
    known before. If nothing was, they wait for that thread, and fail if it does."""

    def __init__(self, connector: Connector, clock: Callable[[], float] = time.monotonic) -> None:
        self._connector = connector
        self._clock = clock
        self._lock = threading.Lock()
        self._is_refreshing = threading.Lock()
        self._next_refresh_s = 0.0
        self._is_stale = True
        # Of reads while nothing was known: how many failed, and why the last one did.
        self._num_failures, self._failure = 0, ""

    @property
    @abstractmethod
    def _is_known(self) -> bool:
        """Whether it was read once."""

    @abstractmethod
    def _read(self) -> None:
        """Reads and adopts it. Raises ``StoreError``."""

    def _refresh(self) -> None:
        """Reads it if it is stale and that is due. Raises ``StoreError`` if nothing is known."""
        if not self._is_stale:
            return
        was_known = self._is_known
        if was_known and self._clock() < self._next_refresh_s:
            return
        num_failures = self._num_failures
        if not self._is_refreshing.acquire(blocking=not was_known):
            return
        try:
            if self._is_known != was_known:
                return  # another thread has read it meanwhile
            if self._num_failures != num_failures:
                raise StoreError(self._failure)  # or has tried to: all of them one after the other would take long
            self._try_to_read(was_known)
        finally:
            self._is_refreshing.release()

    def _try_to_read(self, was_known: bool) -> None:
        self._next_refresh_s = self._clock() + _REFRESH_INTERVAL_S
        try:
            self._read()
            self._is_stale = False
        except StoreError as exc:
            if not was_known:
                self._num_failures += 1
                self._failure = str(exc)
                raise
