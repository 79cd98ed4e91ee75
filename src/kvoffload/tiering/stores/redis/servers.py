# SPDX-License-Identifier: Apache-2.0
"""Find the server of a key: one server, the primary that sentinels name, or a node of a cluster."""

from __future__ import annotations

import binascii
import bisect
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.redis.connector import Address, Connector, address_of
from kvoffload.tiering.stores.redis.node import Node
from kvoffload.tiering.stores.redis.wire import ErrorReply

_REFRESH_INTERVAL_S = 1.0
_MOST_ASKED = 8
"""Maximum number of servers to ask concurrently for the others."""
_NUM_SLOTS = 16_384
_MOST_MEMBERS = 4096
"""Maximum number of nodes of a cluster. A server that names more is not believed."""

_Answer = tuple[int, Callable[[], None]]
"""A server's good answer: its epoch, and a function that adopts it."""


class Servers(ABC):
    """The mapping from names to servers. ``StoreTier``'s circuit breaker covers all of them together."""

    @abstractmethod
    def split(self, names: Sequence[bytes]) -> Mapping[Node, Sequence[int]]:
        """Return the indexes of ``names`` by server, without names whose server cannot be reached now. Raises
        ``StoreError`` if no server can."""

    @property
    def has_others(self) -> bool:
        """Whether other servers continue when one is lost."""
        return False

    def redirect(self, reply: ErrorReply) -> Node | None:
        """Return the node at which to repeat a request that was answered with ``reply``; ``None`` if that is not a
        redirection. Raises ``StoreError`` if it points outside the cluster."""
        return None

    def may_ask(self, node: Node) -> bool:
        """Return whether to send a request that was redirected to ``node``. If so, the caller must ``record`` its
        end."""
        return True

    def record(self, node: Node, is_good: bool) -> None:
        """Record the end of an exchange with ``node``."""
        return

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


class OneServer(Servers):
    """The server that the URL names, which stores every key."""

    def __init__(self, connector: Connector) -> None:
        self._node = Node(connector.address, connector)

    def __repr__(self) -> str:
        return str(self._node.address)

    def split(self, names: Sequence[bytes]) -> Mapping[Node, Sequence[int]]:
        return {self._node: range(len(names))}

    def close(self) -> None:
        self._node.close()


class DiscoveredServers(Servers):
    """Servers that are found by asking servers. The map of keys to servers is read when it is first needed, and again
    once it is stale: at most once a second, by the thread that needs it. Other threads use the previous map meanwhile.
    Without one, they wait for that thread, and fail if it does.

    All servers that may know are asked concurrently. The latest of the first ``_num_wanted`` good answers counts.
    Servers that hang, fail, or send unreadable answers do not delay the others. Each of them occupies its thread until
    its deadline.
    """

    _question: tuple[bytes, ...]

    def __init__(self, connector: Connector, clock: Callable[[], float] = time.monotonic) -> None:
        self._connector = connector
        self._clock = clock
        self._lock = threading.Lock()
        self._is_refreshing = threading.Lock()
        self._next_refresh_s = 0.0
        self._is_stale = True
        self._is_known = False
        # The number of failed reads while no map was known, and the reason of the last failure.
        self._num_failures, self._failure = 0, ""

    @abstractmethod
    def _informants(self) -> Sequence[Node]:
        """Return the servers to ask now, at least one."""

    @abstractmethod
    def _learn(self, informant: Address, reply: Any) -> Callable[[], None]:
        """Read a server's ``reply`` to ``_question``, in any thread, and return a function that adopts it. Raises
        ``StoreError`` if the server does not know, and some other error if the reply cannot be read."""

    def _epoch_of(self, reply: Any) -> int:
        """Return a number that is highest for the latest of several good replies."""
        return 0

    def _num_wanted(self, num_asked: int) -> int:
        """Return the number of good answers to wait for."""
        return 1

    def _refresh(self) -> None:
        """Read the map if it is stale and a read is due. Raises ``StoreError`` if no map is known."""
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
                raise StoreError(self._failure)  # or has tried: one attempt per thread would take long
            self._try_to_read(was_known)
        finally:
            self._is_refreshing.release()

    def _try_to_read(self, was_known: bool) -> None:
        self._next_refresh_s = self._clock() + _REFRESH_INTERVAL_S
        try:
            self._latest_answer()()
            self._is_known, self._is_stale = True, False
        except StoreError as exc:
            if not was_known:
                self._num_failures += 1
                self._failure = str(exc)
                raise

    def _latest_answer(self) -> Callable[[], None]:
        informants = self._informants()[:_MOST_ASKED]
        ends: queue.SimpleQueue[tuple[int, _Answer | StoreError]] = queue.SimpleQueue()
        asks = [partial(self._ask, index, node, ends) for index, node in enumerate(informants)]
        for ask in asks:
            try:
                threading.Thread(target=ask, name="kvoffload-redis-ask", daemon=True).start()
            except (RuntimeError, MemoryError):  # no thread can be started
                ask()
        errors, learned = dict[int, StoreError](), list[_Answer]()
        for _ in informants:
            index, end = ends.get()
            if isinstance(end, StoreError):
                errors[index] = end
                continue
            learned.append(end)
            if len(learned) >= self._num_wanted(len(informants)):
                break
        if not learned:
            raise errors[min(errors)]
        return max(learned, key=lambda answer: answer[0])[1]

    def _ask(self, index: int, node: Node, ends: queue.SimpleQueue[tuple[int, _Answer | StoreError]]) -> None:
        try:
            reply = node.ask(*self._question)
            ends.put((index, (self._epoch_of(reply), self._learn(node.address, reply))))
        except StoreError as exc:
            ends.put((index, exc))
        except BaseException:  # noqa: BLE001 - the reply was invalid, and the waiting thread must learn it
            question = b" ".join(self._question).decode()
            ends.put((index, StoreError(f"Redis at {node.address} answers {question} with an unreadable reply.")))


class Primary(DiscoveredServers):
    """The primary of ``service``, by the latest answer of half of the sentinels, because a sentinel that was cut off
    from the others still names the previous primary. They are asked again when the primary fails, or answers that it no
    longer is one."""

    _question = (b"SENTINEL", b"MASTERS")

    def __init__(
        self,
        connector: Connector,
        sentinels: Sequence[Address],
        service: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(connector, clock)
        asking = connector.for_sentinels()
        self._sentinels, self._service = tuple(Node(address, asking) for address in sentinels), service
        self._node: Node | None = None

    def __repr__(self) -> str:
        sentinels = ", ".join(str(sentinel.address) for sentinel in self._sentinels)
        return f"primary {self._service} of the sentinels {sentinels}"

    def split(self, names: Sequence[bytes]) -> Mapping[Node, Sequence[int]]:
        try:
            self._refresh()
        except StoreError as exc:
            raise StoreError(f"No sentinel knows the {self}, or it is down ({str(exc).rstrip('.')}).") from exc
        assert self._node is not None, "a refresh without a node raises"
        return {self._node: range(len(names))}

    def record(self, node: Node, is_good: bool) -> None:
        if not is_good:
            self._is_stale = True

    def close(self) -> None:
        for node in (*self._sentinels, self._node):
            if node is not None:
                node.close()

    def _informants(self) -> Sequence[Node]:
        return self._sentinels

    def _num_wanted(self, num_asked: int) -> int:
        return (num_asked + 1) // 2

    def _epoch_of(self, reply: Any) -> int:
        states = [dict(zip(fields[::2], fields[1::2], strict=True)) for fields in reply]
        return max((int(state[b"config-epoch"]) for state in states if self._is_ours(state)), default=0)

    def _is_ours(self, state: Mapping[bytes, bytes]) -> bool:
        return state[b"name"] == self._service.encode() and b"config-epoch" in state

    def _learn(self, informant: Address, reply: Any) -> Callable[[], None]:
        for fields in reply:
            state = dict(zip(fields[::2], fields[1::2], strict=True))
            flags = set(state[b"flags"].split(b","))
            if state[b"name"] == self._service.encode() and b"master" in flags and not flags & {b"s_down", b"o_down"}:
                return partial(self._adopt, address_of(state[b"ip"].decode(), int(state[b"port"])))
        raise StoreError(f"Redis at {informant} does not name a running primary of this service")

    def _adopt(self, address: Address) -> None:
        old = self._node
        if old is None or old.address != address:
            self._node = Node(address, self._connector)
            if old is not None:
                old.close()


class _Slots(NamedTuple):
    """Ranges of slots: ``owners[i]`` owns the slots from ``starts[i]`` on. The first start is 0."""

    starts: Sequence[int]
    owners: Sequence[Node | None]
    members: Set[Address | None] = frozenset()
    """Primaries and their replicas. Only these are connected to and receive the password."""

    @property
    def nodes(self) -> list[Node]:
        return [node for node in dict.fromkeys(self.owners) if node is not None]


class Cluster(DiscoveredServers):
    """The primaries of a cluster. The node in the URL names the others.

    A failed node is not used for a second, then for longer, with an occasional exchange as a probe. Keys on all other
    nodes are still served. The map of slots is stale when a node fails or redirects.
    """

    _question = (b"CLUSTER", b"SLOTS")

    def __init__(self, connector: Connector, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not connector.address.port:
            raise ConfigError("A 'redis' tier with cluster=true needs a redis:// or rediss:// url, not unix://.")
        super().__init__(connector, clock)
        self._nodes: dict[Address, Node] = {}
        self._slots = _Slots((), ())
        """The map of slots. It is replaced as a whole, so that one read of it needs no lock."""

    def __repr__(self) -> str:
        return f"cluster of {self._connector.address}"

    def split(self, names: Sequence[bytes]) -> Mapping[Node, Sequence[int]]:
        self._refresh()
        slots = self._slots
        by_owner: dict[Node, list[int]] = {}
        for index, name in enumerate(names):
            owner = slots.owners[bisect.bisect_right(slots.starts, slot_of(name)) - 1]
            if owner is not None:
                by_owner.setdefault(owner, []).append(index)
        with self._lock:
            usable = {owner: indexes for owner, indexes in by_owner.items() if _admits(owner)}
            good = [node.breaker.is_closed for node in self._slots.nodes]
            if not all(good):
                self._is_stale = True  # a replica may own the failed node's slots now
        if names and not usable and not any(good):
            raise StoreError(f"No node of the Redis {self} can be reached.")
        return usable

    @property
    def has_others(self) -> bool:
        with self._lock:
            return any(node.breaker.is_closed for node in self._slots.nodes)

    def redirect(self, reply: ErrorReply) -> Node | None:
        kind, _, rest = reply.partition(" ")
        if kind not in ("MOVED", "ASK"):
            return None
        host, _, port = rest.partition(" ")[2].rpartition(":")
        try:
            address = address_of(host.strip("[]") or self._connector.address.host, int(port))
        except ValueError:
            return None
        if kind == "MOVED":
            self._is_stale = True
        if address not in self._slots.members:
            self._is_stale = True
            self._refresh()  # it may be new
        with self._lock:
            if address not in self._slots.members:
                raise StoreError(f"Redis redirects to {address}, which is not a node of the {self}.")
            return self._node(address)

    def may_ask(self, node: Node) -> bool:
        with self._lock:
            return _admits(node)

    def record(self, node: Node, is_good: bool) -> None:
        with self._lock:
            if is_good:
                node.breaker.record_success()
            else:
                node.breaker.record_failure(is_grave=True)
                self._is_stale = True

    def close(self) -> None:
        with self._lock:
            for node in self._nodes.values():
                node.close()

    def _informants(self) -> Sequence[Node]:
        with self._lock:
            good = [node for node in self._slots.nodes if node.breaker.is_closed]
            return list(dict.fromkeys([*good[: _MOST_ASKED - 1], self._node(self._connector.address)]))

    def _learn(self, informant: Address, reply: Any) -> Callable[[], None]:
        starts, owners, members = list[int](), list[Address | None](), set[Address | None]()
        next_slot = 0
        for start, stop, *nodes in sorted(reply, key=lambda entry: int(entry[0])):
            if int(start) > next_slot:
                starts.append(next_slot)
                owners.append(None)  # slots that no node serves
            starts.append(int(start))
            owners.append(_named(informant, nodes[0]))
            members.add(owners[-1])
            for replica in nodes[1:]:
                with suppress(ValueError, TypeError, AttributeError):  # an unreadable one hides no primary
                    members.add(_named(informant, replica))
            next_slot = int(stop) + 1
        if not owners:
            raise StoreError(f"Redis at {informant} serves no slots: the cluster is not set up.")
        if len(members) > _MOST_MEMBERS:
            raise StoreError(f"Redis at {informant} names {len(members)} nodes, more than any cluster has.")
        if next_slot < _NUM_SLOTS:
            starts.append(next_slot)
            owners.append(None)
        return partial(self._adopt, starts, owners, members)

    def _adopt(self, starts: Sequence[int], owners: Sequence[Address | None], members: Set[Address | None]) -> None:
        with self._lock:
            nodes = [None if address is None else self._node(address) for address in owners]
            self._slots = _Slots(starts, nodes, members)
            # The node in the URL is asked for the map, even if it owns no slots.
            gone = [self._nodes.pop(address) for address in self._nodes.keys() - members - {self._connector.address}]
        for node in gone:
            node.close()

    def _node(self, address: Address) -> Node:
        """Return the node at an address. The caller holds ``_lock``."""
        return self._nodes.setdefault(address, Node(address, self._connector, self._clock))


def _named(informant: Address, node: Sequence[Any]) -> Address:
    """Return the address of a node in a reply of ``informant``. Raises some error if it cannot be read."""
    host, port, *_ = node
    return address_of(informant.host if host in (None, b"", b"?") else host.decode(), int(port))


def _admits(node: Node) -> bool:
    """Return whether a node may be asked now, perhaps as a probe, whose end must be recorded. The caller holds the
    cluster's lock."""
    return node.breaker.is_closed or node.breaker.begin_probe()


def slot_of(name: bytes) -> int:
    """Return the cluster slot of ``name``, which does not contain braces and therefore no hash tag."""
    return binascii.crc_hqx(name, 0) % _NUM_SLOTS
