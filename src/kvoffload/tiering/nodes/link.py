# SPDX-License-Identifier: Apache-2.0
"""The agent's end of its exchange with the scheduler: it accepts packets and makes replies. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from kvoffload.tiering.nodes.messages import Item, Order, Packet
from kvoffload.tiering.nodes.stream import Stream

_MAX_KEPT = 64


class AgentLink:
    """The counterpart of ``Nodes`` in the process that is currently the agent of ``node``. One thread."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.process = int.from_bytes(os.urandom(7), "little") + 1
        """The random number of this process, which no other process shares."""
        self._stream = Stream()
        self.session = 0
        """The number of the session, or 0 if the scheduler has not contacted this process yet."""
        self._past_sessions: set[int] = set()
        self._introduce_in: int | None = None
        """The session in which this process must introduce itself to the scheduler, or ``None``."""
        self._owes_reply = False

    def __repr__(self) -> str:
        return f"AgentLink({self.node}, session={self.session}, {self._stream!r})"

    def receive(self, packets: Iterable[Packet], is_idle: Callable[[], bool]) -> list[Order]:
        """Return the orders to start.

        Ignores packets for other agents. While ``is_idle()`` is false, because an order has not ended, it also ignores
        packets of another session, because that session's scheduler might use the slots.
        """
        orders: list[Order] = []
        for packet in packets:
            if packet.node != self.node:
                continue
            if packet.agent != self.process:
                self._introduce_in = packet.session
                continue
            if packet.session != self.session:
                if packet.session in self._past_sessions or orders or not is_idle():
                    continue
                self._past_sessions.add(self.session)
                self.session, self._stream = packet.session, Stream()
            self._owes_reply = True
            orders += (item for item in self._stream.receive(packet) if isinstance(item, Order))
        return orders

    @property
    def has_room(self) -> bool:
        """Whether there is a session whose scheduler keeps up with receiving. Otherwise news must wait."""
        return self.session > 0 and self._stream.num_kept < _MAX_KEPT

    def put(self, item: Item) -> None:
        self._stream.put(item)

    def take_packets(self) -> list[Packet]:
        """Return the packets to send with this step: replies to received packets, and new items."""
        packets = []
        if self._introduce_in is not None:
            packets.append(Packet(self.node, self._introduce_in, self.process))
            self._introduce_in = None
        if self.session and (self._owes_reply or self._stream.is_due):
            self._owes_reply = False
            packets.append(self._stream.packet(self.node, self.session, self.process))
        return packets
