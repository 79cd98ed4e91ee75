# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: orders go to the agents of all nodes, and an order has ended when it ended on all of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.tiering.nodes.messages import Act, Answer, News, Order, Packet
from kvoffload.tiering.nodes.stream import Stream
from kvoffload.tiering.stores.base import LossCause, StoreStats

_log = logging.getLogger(__name__)

_MAX_UNASKED = 64
"""Orders without an answer that may wait for a node. More are dropped: they are hints."""
_MAX_LOST = 65_536
_SILENT_PACKETS = 32
"""Packets without a reply, more than an engine has steps in flight, ..."""
_SILENT_S = 2.0
"""... and for this long: the agent is dead or frozen. Its node is asked for nothing more until it has replied."""


class Pending:
    """An order that all of ``left`` have yet to end. ``Nodes`` changes it; whoever gave the order waits for ``ended``,
    and reads the others then."""

    __slots__ = ("bad_nodes", "ended", "errno", "errors", "keys", "left", "outcomes")

    def __init__(self, num_keys: int, nodes: Iterable[int]) -> None:
        self.left = set(nodes)
        self.outcomes = [True] * num_keys
        """By key: ``True`` if all nodes said so."""
        self.bad_nodes: dict[int, int] = {}
        """By the index of a key that is not ``True``: the first node that said so."""
        self.keys: Sequence[OffloadKey] = ()
        """What a scan found."""
        self.errors: list[str] = []
        """Why nodes failed as a whole."""
        self.errno: int | None = None
        self.ended = threading.Event()

    def take(self, node: int, answer: Answer) -> None:
        if node not in self.left:
            return
        self.left.remove(node)
        if not answer.error and len(answer.outcomes) != len(self.outcomes):
            answer = Answer(answer.number, error=f"{len(answer.outcomes)} outcomes for {len(self.outcomes)} keys")
        if answer.error:
            self.errors.append(f"node {node}: {answer.error}")
            self.errno = self.errno or answer.errno
        else:
            self.keys = answer.keys
            for index, is_good in enumerate(answer.outcomes):
                if not is_good:
                    self.outcomes[index] = False
                    self.bad_nodes.setdefault(index, node)
        if not self.left:
            self.ended.set()


class _Node:
    """What the scheduler knows of one node's agent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # Another scheduler's numbers are others: an agent that has served one must not take this session for that one.
        self.session = int.from_bytes(os.urandom(6), "little") + 1
        self.agent = 0
        """0: none has spoken yet. Until one has, items wait."""
        self.stream = Stream()
        self._clock = clock
        self._num_unanswered = 0
        self._unanswered_since_s = 0.0

    def sent(self) -> None:
        if not self._num_unanswered:
            self._unanswered_since_s = self._clock()
        self._num_unanswered += 1

    def replied(self) -> None:
        self._num_unanswered = 0

    @property
    def is_silent(self) -> bool:
        is_late = self._num_unanswered >= _SILENT_PACKETS
        return is_late and self._clock() - self._unanswered_since_s >= _SILENT_S


class Nodes:
    """Gives orders to the agents of ``num_nodes`` nodes, and puts their answers together.

    I/O threads call ``order`` and ``tell``. The engine's thread calls ``take_packets`` once in each step, sends them to
    the agents, and calls ``receive`` with what they sent; a packet may be lost or late on either way. Nothing here
    waits.

    An order ends on a node when the agent has answered it; or when another process of the agent speaks, which is
    started only after the one before has ended (``NodeAgent``); or at ``close``. Nothing else ends it, however long it
    takes: the agent may still read or write its slots.
    """

    def __init__(self, num_nodes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._nodes = [_Node(clock) for _ in range(num_nodes)]
        self._open: dict[int, Pending] = {}
        self._last_number = 0
        self._stats: dict[int, dict[int, StoreStats]] = {}
        """By tier and node."""
        self._lost: dict[int, dict[OffloadKey, tuple[LossCause, int]]] = {}
        """By tier: the cause and the node of losses that nobody has taken yet."""
        self._is_closed = False

    def __repr__(self) -> str:
        agents = ["none" if not node.agent else "silent" if node.is_silent else "speaks" for node in self._nodes]
        return f"Nodes({agents}, {len(self._open)} orders open)"

    def __len__(self) -> int:
        return len(self._nodes)

    # ----------------------------------------------------------------------------------------------- I/O threads

    def order(
        self,
        tier: int,
        act: Act,
        keys: Sequence[OffloadKey],
        slots: Sequence[int] = (),
        *,
        among: Iterable[int] | None = None,
    ) -> Pending:
        """Gives an order to the nodes ``among``; ``None``: to all. Raises ``StoreError`` if one of them is silent."""
        among = range(len(self._nodes)) if among is None else tuple(among)
        with self._lock:
            if self._is_closed:
                raise StoreError("The engine ends.")
            for index in among:
                if self._nodes[index].is_silent:
                    raise StoreError(f"node {index}: its agent does not answer")
            pending = Pending(len(keys), among)
            self._last_number += 1
            self._open[self._last_number] = pending
            self._put(Order(self._last_number, tier, act, tuple(keys), tuple(slots)), among)
        return pending

    def tell(self, tier: int, act: Act, keys: Sequence[OffloadKey]) -> None:
        """Gives an order that has no answer. Dropped by nodes that are busy."""
        with self._lock:
            if not self._is_closed:
                among = [at for at, node in enumerate(self._nodes) if node.stream.num_kept < _MAX_UNASKED]
                self._put(Order(0, tier, act, tuple(keys)), among)

    def _put(self, order: Order, among: Iterable[int]) -> None:
        for index in among:
            self._nodes[index].stream.put(order)

    def stats(self, tier: int) -> list[StoreStats]:
        """The last that each node has said."""
        with self._lock:
            return list(self._stats.get(tier, {}).values())

    def take_lost(self, tier: int) -> dict[OffloadKey, tuple[LossCause, int]]:
        """What any node lost since the last call: why, and which node."""
        with self._lock:
            return self._lost.pop(tier, {})

    # ------------------------------------------------------------------------------------------- engine's thread

    def take_packets(self) -> tuple[Packet, ...]:
        """What goes out with this step."""
        packets = []
        with self._lock:
            for index, node in enumerate(self._nodes):
                if not (self._open or node.stream.is_due or node.is_silent):  # who is silent must be asked to speak
                    continue
                node.sent()
                if node.agent:
                    packets.append(node.stream.packet(index, node.session, node.agent))
                else:
                    packets.append(Packet(index, node.session, 0))
        return tuple(packets)

    def receive(self, packets: Iterable[Packet]) -> None:
        """What came back with a step."""
        with self._lock:
            for packet in packets:
                node = self._nodes[packet.node]
                if packet.session != node.session:
                    continue  # late: of a process that has ended
                node.replied()
                if packet.agent != node.agent:
                    self._begin_session(packet.node, packet.agent)
                    continue
                for item in node.stream.receive(packet):
                    self._take(packet.node, item)

    def close(self) -> None:
        """The engine ends, and no step follows: all open orders fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            for index in range(len(self._nodes)):
                self._fail_all(index, "the engine ends")

    def _take(self, node: int, item: object) -> None:
        if isinstance(item, News):
            self._stats.setdefault(item.tier, {})[node] = item.stats
            lost = self._lost.setdefault(item.tier, {})
            room = max(0, _MAX_LOST - len(lost))  # the rest is found out by reading it
            lost.update((key, (cause, node)) for key, cause in islice(item.lost.items(), room))
        elif isinstance(item, Answer) and item.number in self._open:
            self._end(node, item)

    def _end(self, node: int, answer: Answer) -> None:
        pending = self._open[answer.number]
        pending.take(node, answer)
        if not pending.left:
            del self._open[answer.number]

    def _begin_session(self, index: int, agent: int) -> None:
        """A process that was not known says that it is the agent. What the one before was sent, it has taken along."""
        node = self._nodes[index]
        if node.agent:
            _log.warning("The agent of node %d was started again. Its open calls have failed.", index)
            self._fail_all(index, "its agent was started again")
            node.stream = Stream()
        node.session += 1
        node.agent = agent

    def _fail_all(self, node: int, why: str) -> None:
        for number in [number for number, pending in self._open.items() if node in pending.left]:
            self._end(node, Answer(number, error=why))
