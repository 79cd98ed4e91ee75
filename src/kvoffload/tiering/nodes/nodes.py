# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side, which sends orders to the agents of all nodes and combines their answers."""

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
"""The number of waiting items for a node at which orders without an answer, which are hints, are dropped."""
_MAX_LOST = 65_536
_SILENT_PACKETS = 32
"""An agent may be silent if it leaves this many packets unanswered. An engine has fewer steps in flight."""
_SILENT_S = 2.0
"""An agent is silent (dead or frozen) if it has also not replied for this long. Its node gets no new orders until it
replies."""


class Pending:
    """An order that the nodes in ``left`` have not ended yet.

    ``Nodes`` changes it. The caller who gave the order waits for ``ended``, and then reads the other fields.
    """

    __slots__ = ("bad_nodes", "ended", "errno", "errors", "keys", "left", "outcomes")

    def __init__(self, num_keys: int, nodes: Iterable[int]) -> None:
        self.left = set(nodes)
        self.outcomes = [True] * num_keys
        """The outcome for each key: ``True`` if it is ``True`` on all nodes."""
        self.bad_nodes: dict[int, int] = {}
        """For the index of each key that failed, the first node that reported the failure."""
        self.keys: Sequence[OffloadKey] = ()
        """The keys that a scan found."""
        self.errors: list[str] = []
        """The errors of nodes that failed as a whole."""
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
    """The scheduler's view of one node's agent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # Numbers are random, so that an agent that has served another scheduler does not confuse their sessions.
        self.session = int.from_bytes(os.urandom(6), "little") + 1
        self.agent = 0
        """The number of the agent's process, or 0 if none has replied yet. Items wait until one has."""
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
    """Sends orders to the agents of ``num_nodes`` nodes, and combines their answers.

    I/O threads call ``order`` and ``tell``. In each step, the engine's thread calls ``take_packets`` once, sends the
    packets to the agents, and calls ``receive`` with the agents' packets. Packets may be lost or late in both
    directions. No method waits.

    An order ends on a node when the agent answers it, when another process of the agent replies (which is started only
    after the previous one has ended, see ``NodeAgent``), or at ``close``. Nothing else ends it, however long it takes,
    because the agent may still read or write its slots.
    """

    def __init__(self, num_nodes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._nodes = [_Node(clock) for _ in range(num_nodes)]
        self._open: dict[int, Pending] = {}
        self._last_number = 0
        self._stats: dict[int, dict[int, StoreStats]] = {}
        """The last statistics by tier and node."""
        self._lost: dict[int, dict[OffloadKey, tuple[LossCause, int]]] = {}
        """The cause and the node of losses that nobody has taken yet, by tier."""
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
        """Queue an order for the nodes ``among``, or for all nodes if it is ``None``.

        Raises ``StoreError`` if one of the nodes is silent, or after ``close``.
        """
        among = range(len(self._nodes)) if among is None else tuple(among)
        with self._lock:
            if self._is_closed:
                raise StoreError("The engine is shutting down.")
            for index in among:
                if self._nodes[index].is_silent:
                    raise StoreError(f"node {index}: its agent does not answer")
            pending = Pending(len(keys), among)
            self._last_number += 1
            self._open[self._last_number] = pending
            self._put(Order(self._last_number, tier, act, tuple(keys), tuple(slots)), among)
        return pending

    def tell(self, tier: int, act: Act, keys: Sequence[OffloadKey]) -> None:
        """Queue an order that has no answer. It is dropped for busy nodes."""
        with self._lock:
            if not self._is_closed:
                among = [at for at, node in enumerate(self._nodes) if node.stream.num_kept < _MAX_UNASKED]
                self._put(Order(0, tier, act, tuple(keys)), among)

    def _put(self, order: Order, among: Iterable[int]) -> None:
        for index in among:
            self._nodes[index].stream.put(order)

    def stats(self, tier: int) -> list[StoreStats]:
        """Return the last statistics of each node that has reported any."""
        with self._lock:
            return list(self._stats.get(tier, {}).values())

    def take_lost(self, tier: int) -> dict[OffloadKey, tuple[LossCause, int]]:
        """Return the blocks that nodes lost since the last call, with the cause and the node."""
        with self._lock:
            return self._lost.pop(tier, {})

    # ------------------------------------------------------------------------------------------- engine's thread

    def take_packets(self) -> tuple[Packet, ...]:
        """Return the packets to send with this step."""
        packets = []
        with self._lock:
            for index, node in enumerate(self._nodes):
                if not (self._open or node.stream.is_due or node.is_silent):  # a silent agent must be asked to reply
                    continue
                node.sent()
                if node.agent:
                    packets.append(node.stream.packet(index, node.session, node.agent))
                else:
                    packets.append(Packet(index, node.session, 0))
        return tuple(packets)

    def receive(self, packets: Iterable[Packet]) -> None:
        """Accept the packets that arrived with a step."""
        with self._lock:
            for packet in packets:
                node = self._nodes[packet.node]
                if packet.session != node.session:
                    continue  # a late packet of a process that has ended
                node.replied()
                if packet.agent != node.agent:
                    self._begin_session(packet.node, packet.agent)
                    continue
                for item in node.stream.receive(packet):
                    self._take(packet.node, item)

    def close(self) -> None:
        """Fail all open orders, because the engine shuts down and no step follows. Idempotent."""
        with self._lock:
            self._is_closed = True
            for index in range(len(self._nodes)):
                self._fail_all(index, "the engine is shutting down")

    def _take(self, node: int, item: object) -> None:
        if isinstance(item, News):
            self._stats.setdefault(item.tier, {})[node] = item.stats
            lost = self._lost.setdefault(item.tier, {})
            room = max(0, _MAX_LOST - len(lost))  # other losses show when the blocks are read
            lost.update((key, (cause, node)) for key, cause in islice(item.lost.items(), room))
        elif isinstance(item, Answer) and item.number in self._open:
            self._end(node, item)

    def _end(self, node: int, answer: Answer) -> None:
        pending = self._open[answer.number]
        pending.take(node, answer)
        if not pending.left:
            del self._open[answer.number]

    def _begin_session(self, index: int, agent: int) -> None:
        """Start a session with an unknown process that says that it is the agent.

        Items that were sent to the previous process are lost.
        """
        node = self._nodes[index]
        if node.agent:
            _log.warning("The agent of node %d was restarted. Its open calls have failed.", index)
            self._fail_all(index, "its agent was restarted")
            node.stream = Stream()
        node.session += 1
        node.agent = agent

    def _fail_all(self, node: int, why: str) -> None:
        for number in [number for number, pending in self._open.items() if node in pending.left]:
            self._end(node, Answer(number, error=why))
