# SPDX-License-Identifier: Apache-2.0
"""The agent's end of its talk with the scheduler: which packets count, and what goes back. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from kvoffload.tiering.nodes.messages import Item, Order, Packet
from kvoffload.tiering.nodes.stream import Stream

_MAX_KEPT = 64


class AgentLink:
    """``Nodes``' counterpart in the process that is the agent of ``node`` now. One thread."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.process = int.from_bytes(os.urandom(7), "little") + 1
        """This process's number: no two are equal, whenever and wherever they were started."""
        self._stream = Stream()
        self.session = 0
        """0: the scheduler has not spoken to this process yet."""
        self._past_sessions: set[int] = set()
        self._introduce_in: int | None = None
        """The session in which the scheduler is to be told who is the agent here."""
        self._owes_reply = False

    def __repr__(self) -> str:
        return f"AgentLink({self.node}, session={self.session}, {self._stream!r})"

    def receive(self, packets: Iterable[Packet], is_idle: Callable[[], bool]) -> list[Order]:
        """The orders to begin. Packets for others are ignored, and all of another session while ``is_idle`` says that
        an order has not ended: its scheduler might use the slots."""
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
        """Whether there is a session, and its scheduler takes what it is sent. Otherwise what is no answer waits."""
        return self.session > 0 and self._stream.num_kept < _MAX_KEPT

    def put(self, item: Item) -> None:
        self._stream.put(item)

    def take_packets(self) -> list[Packet]:
        """What goes back with this step: a reply to whatever arrived, and what there is to say."""
        packets = []
        if self._introduce_in is not None:
            packets.append(Packet(self.node, self._introduce_in, self.process))
            self._introduce_in = None
        if self.session and (self._owes_reply or self._stream.is_due):
            self._owes_reply = False
            packets.append(self._stream.packet(self.node, self.session, self.process))
        return packets
