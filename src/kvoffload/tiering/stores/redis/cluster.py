# SPDX-License-Identifier: Apache-2.0
"""A cluster: which of its nodes has a key, and which of them is left alone for a while."""

from __future__ import annotations

import binascii
import bisect
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.circuit_breaker import CircuitBreaker
from kvoffload.tiering.stores.redis.nodes import Address, Connector, DiscoveredServers, Node
from kvoffload.tiering.stores.redis.wire import ErrorReply

__all__ = ["Cluster", "slot_of"]

_NUM_SLOTS = 16_384


def slot_of(name: bytes) -> int:
    """The cluster slot of ``name``, which has no braces and so no hash tag."""
    return binascii.crc_hqx(name, 0) % _NUM_SLOTS


class _Slots(NamedTuple):
    """Ranges of slots: ``owners[i]`` has those from ``starts[i]`` on."""

    starts: Sequence[int]
    owners: Sequence[Address | None]


class Cluster(DiscoveredServers):
    """The primaries of a cluster. The one that the URL names tells which others there are.

    A node that fails is left alone for a second, then for longer, with one exchange now and then as a probe. The keys
    of all others go on. The map of slots is stale when a node fails or redirects.
    """

    def __init__(self, connector: Connector, *, clock: Callable[[], float] = time.monotonic) -> None:
        if connector.is_socket_file:
            raise ConfigError("A 'redis' tier with cluster=true needs a redis:// or rediss:// url, not unix://.")
        super().__init__(connector, clock)
        self._nodes: dict[Address, Node] = {}
        self._breakers: dict[Address, CircuitBreaker] = {}
        self._slots = _Slots((), ())
        """Replaced as a whole, so that whoever reads it once needs no lock."""

    def __repr__(self) -> str:
        return f"cluster of {self._connector.address}"

    def split(self, names: Sequence[bytes]) -> dict[Node, list[int]]:
        self._refresh()
        slots = self._slots
        by_owner: dict[Address, list[int]] = {}
        for index, name in enumerate(names):
            at = bisect.bisect_right(slots.starts, slot_of(name)) - 1
            if at >= 0 and (owner := slots.owners[at]) is not None:
                by_owner.setdefault(owner, []).append(index)
        with self._lock:
            usable = {self._node(owner): indexes for owner, indexes in by_owner.items() if self._admits(owner)}
            is_dead = not self._has_good_ones()
            if any(not self._breaker(owner).is_closed for owner in self._slots.owners if owner is not None):
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

    def may_ask(self, node: Node) -> bool:
        with self._lock:
            return self._admits(node.address)

    def record(self, node: Node, is_good: bool) -> None:
        with self._lock:
            breaker = self._breaker(node.address)
            if is_good:
                breaker.record_success()
            else:
                breaker.record_failure(is_grave=True)
                self._is_stale = True

    def all(self) -> list[Node]:
        self._refresh()
        with self._lock:
            return [self._node(owner) for owner in dict.fromkeys(self._slots.owners) if owner is not None]

    def close(self) -> None:
        with self._lock:
            for node in self._nodes.values():
                node.close()

    # -------------------------------------------------------------------------------------------- with _lock held

    def _node(self, address: Address) -> Node:
        return self._nodes.setdefault(address, Node(address, self._connector))

    def _has_good_ones(self) -> bool:
        return any(self._breaker(owner).is_closed for owner in self._slots.owners if owner is not None)

    def _admits(self, address: Address) -> bool:
        """Whether it is asked now, perhaps as a probe, whose end is to be recorded."""
        return self._breaker(address).is_closed or self._breaker(address).begin_probe()

    def _breaker(self, address: Address) -> CircuitBreaker:
        if address not in self._breakers:
            self._breakers[address] = CircuitBreaker(str(address), longest_wait_s=8.0, clock=self._clock)
        return self._breakers[address]

    # ------------------------------------------------------------------------------------------------ map of slots

    @property
    def _is_known(self) -> bool:
        return bool(self._slots.owners)

    def _read(self) -> None:
        self._adopt(*self._read_map())

    def _read_map(self) -> tuple[Address, Any]:
        with self._lock:
            known = dict.fromkeys(owner for owner in self._slots.owners if owner is not None)
            good = [owner for owner in known if self._breaker(owner).is_closed]
        first: StoreError | None = None
        for address in dict.fromkeys([*good, self._connector.address]):
            with self._lock:
                node = self._node(address)
            try:
                with node.conversation(self._connector.timeouts.connect_s) as ask:
                    return address, ask(b"CLUSTER", b"SLOTS")
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
                    owners.append(None)  # slots that no node serves
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
            self._slots = _Slots(starts, owners)
            gone = [node for address, node in self._nodes.items() if address not in owners]
        for node in gone:
            node.close_idle()
