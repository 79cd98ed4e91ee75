# SPDX-License-Identifier: Apache-2.0
"""The servers: their connections, which of them has a key, and which of them is left alone for a while."""

from __future__ import annotations

import binascii
import bisect
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvoffload.errors import ConfigError, MissingExtraError, StoreError
from kvoffload.tiering.circuit_breaker import CircuitBreaker
from kvoffload.tiering.stores.redis.wire import ErrorReply, Wire, open_wire

__all__ = ["Address", "Cluster", "Connector", "Node", "Nodes", "Server", "Timeouts", "slot_of"]

T = TypeVar("T")

_REFRESH_INTERVAL_S = 1.0
_NUM_SLOTS = 16_384


def slot_of(name: bytes) -> int:
    """The cluster slot of ``name``, which has no braces and so no hash tag."""
    return binascii.crc_hqx(name, 0) % _NUM_SLOTS


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
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ConfigError("url of the 'redis' tier must begin with redis://, rediss:// or unix://.")
        if parts.query and parts.scheme != "unix":
            raise ConfigError("url of the 'redis' tier has a '?': give these settings as options of the tier instead.")
        try:
            known: dict[str, Any] = dict(parse_url(url))
        except ValueError as exc:
            raise ConfigError("url of the 'redis' tier is not one that redis-py reads.") from exc
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

    def exchange(self, send: Callable[[Wire], None], receive: Callable[[Wire], T]) -> T:
        """One window: ``send``, then what ``receive`` returns. Raises ``StoreError`` if the server cannot be reached or
        does not answer in time; the connection is closed by then, so nothing is written to any buffer any more."""
        wire = self._take_idle()
        if wire is not None:
            try:
                return self._exchange(wire, send, receive)
            except TimeoutError as exc:
                raise self._failed(exc) from exc
            except OSError:
                # The server may have been restarted since this connection was last used, and so all the others.
                self.close_idle()
        try:
            return self._exchange(open_wire(self._connector.connection(self.address)), send, receive)
        except self._connector.errors as exc:
            raise self._failed(exc) from exc

    @contextmanager
    def conversation(self, reply_s: float) -> Iterator[Callable[..., Any]]:
        """A function that sends a command which moves no block and returns its reply, by the library, on a connection
        of its own. It raises ``StoreError``, also if a reply takes longer than ``reply_s``."""
        connection = self._connector.connection(self.address, socket_timeout=reply_s)

        def ask(*words: str | int | bytes) -> Any:
            try:
                connection.connect()
                connection.send_command(*words)
                return connection.read_response()
            except self._connector.errors as exc:
                raise self._failed(exc) from exc

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

    def _exchange(self, wire: Wire, send: Callable[[Wire], None], receive: Callable[[Wire], T]) -> T:
        wire.begin(self._connector.timeouts.window_s)
        try:
            send(wire)
            received = receive(wire)
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
    def split(self, names: Sequence[bytes]) -> dict[Node, list[int]]:
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

    def split(self, names: Sequence[bytes]) -> dict[Node, list[int]]:
        return {self._node: list(range(len(names)))}

    def all(self) -> list[Node]:
        return [self._node]

    def close(self) -> None:
        self._node.close()


class Cluster(Nodes):
    """The primaries of a cluster. The one that the URL names tells which others there are.

    A node that fails is left alone for a second, then for longer, with one exchange now and then as a probe. The keys
    of all others go on. The map of slots is read again when a node fails or redirects, at most once a second, by the
    thread that needs it.
    """

    def __init__(self, connector: Connector, *, clock: Callable[[], float] = time.monotonic) -> None:
        if connector.is_socket_file:
            raise ConfigError("A 'redis' tier with cluster=true needs a redis:// or rediss:// url, not unix://.")
        self._connector = connector
        self._clock = clock
        self._lock = threading.Lock()
        self._is_refreshing = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._breakers: dict[Address, CircuitBreaker] = {}
        # Ranges of slots: self._owners[i] has those from self._starts[i] on.
        self._starts: list[int] = []
        self._owners: list[Address | None] = []
        self._next_refresh_s = 0.0
        self._is_stale = True

    def __repr__(self) -> str:
        return f"cluster of {self._connector.address}"

    def split(self, names: Sequence[bytes]) -> dict[Node, list[int]]:
        if self._is_stale:
            self._refresh()
        by_owner: dict[Address, list[int]] = {}
        for index, name in enumerate(names):
            at = bisect.bisect_right(self._starts, slot_of(name)) - 1
            if at >= 0 and (owner := self._owners[at]) is not None:
                by_owner.setdefault(owner, []).append(index)
        with self._lock:
            usable = {
                self._node(owner): indexes
                for owner, indexes in by_owner.items()
                if self._breaker(owner).is_closed or self._breaker(owner).begin_probe()
            }
            is_dead = not self._has_good_ones()
            if any(not self._breaker(owner).is_closed for owner in self._owners if owner is not None):
                self._is_stale = True  # a replica may have taken the slots of the node that failed
        if names and not usable and is_dead:
            raise StoreError(f"No node of the Redis {self} can be reached.")
        return usable

    @property
    def has_others(self) -> bool:
        with self._lock:
            return self._has_good_ones()

    def redirect(self, reply: ErrorReply) -> Node | None:
        kind, _, rest = reply.partition(" ")
        if kind not in ("MOVED", "ASK"):
            return None
        _, _, where = rest.partition(" ")
        host, _, port = where.rpartition(":")
        if not port.isdigit():
            return None
        if kind == "MOVED":
            self._is_stale = True
        with self._lock:
            return self._node(Address(host.strip("[]") or self._connector.address.host, int(port)))

    def record(self, node: Node, is_good: bool) -> None:
        with self._lock:
            breaker = self._breaker(node.address)
            if is_good:
                breaker.record_success()
            else:
                breaker.record_failure(is_grave=True)
                self._is_stale = True

    def all(self) -> list[Node]:
        if self._is_stale:
            self._refresh()
        with self._lock:
            return [self._node(owner) for owner in dict.fromkeys(self._owners) if owner is not None]

    def close(self) -> None:
        with self._lock:
            for node in self._nodes.values():
                node.close()

    # -------------------------------------------------------------------------------------------- with _lock held

    def _node(self, address: Address) -> Node:
        return self._nodes.setdefault(address, Node(address, self._connector))

    def _has_good_ones(self) -> bool:
        return any(self._breaker(owner).is_closed for owner in self._owners if owner is not None)

    def _breaker(self, address: Address) -> CircuitBreaker:
        if address not in self._breakers:
            self._breakers[address] = CircuitBreaker(str(address), longest_wait_s=8.0, clock=self._clock)
        return self._breakers[address]

    # ------------------------------------------------------------------------------------------------ map of slots

    def _refresh(self) -> None:
        """Reads the map of slots from the first node that answers. Whoever comes while another thread does so goes on
        with the old map, if there is one."""
        has_map = bool(self._owners)
        if has_map and self._clock() < self._next_refresh_s:
            return
        if not self._is_refreshing.acquire(blocking=not has_map):
            return
        try:
            if bool(self._owners) != has_map:
                return  # another thread has made the first map meanwhile
            self._next_refresh_s = self._clock() + _REFRESH_INTERVAL_S
            self._adopt(*self._read_map())
            self._is_stale = False
        except StoreError:
            if not has_map:
                raise
        finally:
            self._is_refreshing.release()

    def _read_map(self) -> tuple[Address, Any]:
        with self._lock:
            known = dict.fromkeys(owner for owner in self._owners if owner is not None)
            good = [owner for owner in known if self._breaker(owner).is_closed]
        first: StoreError | None = None
        for address in dict.fromkeys([*good, self._connector.address]):
            with self._lock:
                node = self._node(address)
            try:
                with node.conversation(self._connector.timeouts.connect_s) as ask:
                    return address, ask("CLUSTER", "SLOTS")
            except StoreError as exc:
                first = first or exc
        assert first is not None
        raise first

    def _adopt(self, asked: Address, ranges: Any) -> None:
        starts, owners = list[int](), list[Address | None]()
        next_slot = 0
        try:
            for start, stop, primary, *_ in sorted(ranges, key=lambda entry: int(entry[0])):
                if int(start) > next_slot:
                    starts.append(next_slot)
                    owners.append(None)  # slots that nobody serves
                host = primary[0].decode() if primary[0] else ""
                starts.append(int(start))
                owners.append(Address(asked.host if host in ("", "?") else host, int(primary[1])))
                next_slot = int(stop) + 1
        except (AttributeError, IndexError, TypeError, ValueError) as exc:
            raise StoreError(f"Redis at {asked} has no map of slots that can be read.") from exc
        if next_slot < _NUM_SLOTS:
            starts.append(next_slot)
            owners.append(None)
        if not any(owners):
            raise StoreError(f"Redis at {asked} serves no slots: the cluster is not set up.")
        with self._lock:
            self._starts, self._owners = starts, owners
            gone = [node for address, node in self._nodes.items() if address not in owners]
        for node in gone:
            node.close_idle()
