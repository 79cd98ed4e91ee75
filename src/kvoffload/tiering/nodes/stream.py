# SPDX-License-Identifier: Apache-2.0
"""One end of a stream that delivers items once and in order, over packets that may be lost, repeated or reordered."""

from __future__ import annotations

from collections import deque
from itertools import islice

from kvoffload.tiering.nodes.messages import Item, Packet

MAX_PACKET_SIZE = 8192
"""The most keys in one packet, about 300 KiB, because a step waits for its packets. A larger item has its own
packet."""


class Stream:
    """Numbers the items that it sends, and keeps them until the other end has received them.

    It uses no clock. It sends an item again once the other end has seen the packet with that item, or a later packet,
    and still expects the item. So packets must flow in both directions as long as anything is open. The owner calls it
    from one thread at a time.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[Item, int]] = deque()
        """Items that the other end may lack, each with the number of the packet that last contained it, or 0."""
        self._first_kept = 0
        self._next = 0
        """The number of the item that is sent next."""
        self._expects = 0
        self._number = 0
        self._seen = 0
        self._owes_word = False
        """Whether items have arrived that are not acknowledged yet."""

    def __repr__(self) -> str:
        return f"Stream(kept={len(self._kept)}, next={self._next}, expects={self._expects})"

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def is_due(self) -> bool:
        """Whether there is something to send."""
        return self._owes_word or self._next < self._first_kept + len(self._kept)

    def put(self, item: Item) -> None:
        self._kept.append((item, 0))

    def packet(self, node: int, session: int, agent: int) -> Packet:
        """Return the next packet, with as many items as fit of those that the other end lacks or may lack."""
        self._number += 1
        self._owes_word = False
        first, room = self._next, MAX_PACKET_SIZE
        items: list[Item] = []
        for item, _ in islice(self._kept, first - self._first_kept, None):
            if items and item.size > room:
                break
            room -= item.size
            items.append(item)
        for at, item in enumerate(items, first - self._first_kept):
            self._kept[at] = (item, self._number)
        self._next += len(items)
        return Packet(node, session, agent, self._number, self._seen, self._expects, first, tuple(items))

    def receive(self, packet: Packet) -> tuple[Item, ...]:
        """Accept a packet of this session, and return the new items in it that are next in order."""
        self._seen = max(self._seen, packet.number)
        while self._kept and self._first_kept < packet.expects:
            self._kept.popleft()
            self._first_kept += 1
        self._next = max(self._next, self._first_kept)
        if self._next > self._first_kept and self._kept[0][1] <= packet.seen:
            self._next = self._first_kept
        self._owes_word |= bool(packet.items)
        skipped = self._expects - packet.first
        if skipped < 0:
            return ()  # an earlier packet is missing
        new = packet.items[skipped:]
        self._expects += len(new)
        return new
