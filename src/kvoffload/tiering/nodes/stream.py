# SPDX-License-Identifier: Apache-2.0
"""One end of a stream of items that arrive once and in order, over packets that may not."""

from __future__ import annotations

from collections import deque
from itertools import islice

from kvoffload.tiering.nodes.messages import Item, Packet

MAX_PACKET_SIZE = 8192
"""Keys of one packet, some 300 KiB: it travels with a step, which waits for it. An item that is larger goes alone."""


class Stream:
    """Numbers what it sends, and keeps it until the other end has it. No clock: an item is sent again once the other
    end has seen the packet that had it, or a later one, and still expects it. So packets must go both ways as long as
    something is open. The owner calls from one thread at a time."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Item, int]] = deque()
        """Items that the other end may lack, and in which packet each was last sent; 0: in none."""
        self._first_kept = 0
        self._next = 0
        """Number of the item that is sent next."""
        self._expects = 0
        self._number = 0
        self._seen = 0
        self._owes_word = False
        """Items have arrived, and the other end was not told."""

    def __repr__(self) -> str:
        return f"Stream(kept={len(self._kept)}, next={self._next}, expects={self._expects})"

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def is_due(self) -> bool:
        """There is something to send."""
        return self._owes_word or self._next < self._first_kept + len(self._kept)

    def put(self, item: Item) -> None:
        self._kept.append((item, 0))

    def packet(self, node: int, session: int, agent: int) -> Packet:
        """The next packet: what the other end lacks, or may lack, as far as it fits."""
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
        """What has arrived with ``packet``, of this session: the items that come next."""
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
