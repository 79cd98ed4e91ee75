# SPDX-License-Identifier: Apache-2.0
"""The servers: their connections, and what is to be known of them."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvoffload.errors import ConfigError, MissingExtraError, StoreError
from kvoffload.tiering.stores.redis.wire import ErrorReply, Wire, open_wire
from kvoffload.tiering.stores.remote import check_credentials

__all__ = ["Address", "Connector", "Learned", "Node", "Nodes", "Server", "Timeouts"]

T = TypeVar("T")

_REFRESH_INTERVAL_S = 1.0


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


class Timeouts(NamedTuple):
    connect_s: float = 1.0
    """For the connection, and for each answer of the greeting (TLS, authentication)."""
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
                "url of the 'redis' tier has something other than the number of a database behind the '/'."
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
        }
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

    def ask_sentinels(self, sentinels: Sequence[Address], service: str) -> Address | None:
        """The primary of ``service`` by the first of ``sentinels`` that knows one that is up. They are asked with the
        same timeouts and TLS as the servers, and with credentials of their own: they never see the servers'."""
        from redis import sentinel as library

        make_client: Any = library.Sentinel
        shared = {name: value for name, value in self._known.items() if name.startswith(("socket_", "ssl_"))}
        shared |= {"retry": self._known["retry"], "protocol": 2, "ssl": "ssl_cert_reqs" in self._known}
        client: Any = make_client(list(sentinels), sentinel_kwargs=shared | self._for_sentinels)
        try:
            host, port = client.discover_master(service)
        except self.errors:
            return None
        finally:
            for sentinel in client.sentinels:
                sentinel.close()
        return Address(str(host), int(port))


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
        wire = self._take_idle()
        if wire is not None:
            try:
                return self._exchange(wire, call)
            except TimeoutError as exc:
                raise self._failed(exc) from exc
            except OSError:
                # The server may have been restarted since this connection was last used, and so all the others.
                self.close_idle()
        try:
            return self._exchange(open_wire(self._connector.connection(self.address)), call)
        except self._connector.errors as exc:
            raise self._failed(exc) from exc

    @contextmanager
    def conversation(self, reply_s: float) -> Iterator[Callable[..., Any]]:
        """A function that sends a command which moves no block and changes nothing, and returns its reply, by the
        library, on a connection of its own. It raises ``StoreError``, also if a reply takes longer than ``reply_s``.
        A server may close the connection between two commands."""
        from redis.exceptions import ConnectionError as LostConnection

        connection = self._connector.connection(self.address, socket_timeout=reply_s)
        was_answered = False

        def ask(*words: str | int | bytes) -> Any:
            nonlocal was_answered
            may_be_closed, was_answered = was_answered, False
            try:
                connection.connect()
                connection.send_command(*words)
                reply = connection.read_response()
            except LostConnection as exc:
                if not may_be_closed:
                    raise self._failed(exc) from exc
                connection.disconnect()
                reply = ask(*words)
            except self._connector.errors as exc:
                raise self._failed(exc) from exc
            was_answered = True
            return reply

        try:
            yield ask
        finally:
            connection.disconnect()

    def close_idle(self) -> None:
        """Closes the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def close(self) -> None:
        """Closes every connection, those in use at the end of their exchange."""
        self._is_closed = True
        self.close_idle()

    def _take_idle(self) -> Wire | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _exchange(self, wire: Wire, call: Callable[[Wire], T]) -> T:
        wire.begin(self._connector.timeouts.window_s)
        try:
            received = call(wire)
        except BaseException:
            wire.close()
            raise
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(wire)
        if not is_kept:
            wire.close()
        return received

    def _failed(self, exc: Exception) -> StoreError:
        reason = str(exc).rstrip(".") or type(exc).__name__
        return StoreError(f"Redis at {self.address} fails: {reason}.")


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
        """Where to repeat a request that was answered by ``reply``; ``None`` if that is no redirection."""
        return None

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


class Learned(Nodes):
    """Servers that others tell of. Who has which keys is read when it is first needed, and again once it is stale: at
    most once a second, by the thread that needs it. Whoever comes meanwhile goes on with what was known before. If
    nothing was, it waits for that thread, and fails if that one does."""

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
