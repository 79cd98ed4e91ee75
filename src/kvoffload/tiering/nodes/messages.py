# SPDX-License-Identifier: Apache-2.0
"""All messages between the scheduler and the agents of the nodes.

They are plain, small and picklable values that are never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.base import LossCause, StoreStats


class Act(Enum):
    """The call of a node's store that an order asks for."""

    CONTAINS = "contains"
    READ = "read"
    WRITE = "write"
    DISCARD = "discard"
    TOUCH = "touch"
    """An order to mark blocks as used. It has no answer."""
    SCAN = "scan"
    """An order for the next keys of the node's store. An answer without keys means that there are no more."""
    SCAN_ANEW = "scan anew"
    """Like ``SCAN``, but from the first key on."""


@dataclass(slots=True)
class Order:
    """A message to a node: a call for the node's part of each block."""

    number: int
    """The order's number, which is the same on all nodes, or 0 if the order has no answer."""
    tier: int
    """The index of the tier, in the order of the configuration."""
    act: Act
    keys: Sequence[OffloadKey] = ()
    slots: Sequence[int] = ()
    """The slots of ``keys`` in the node's region, for reads and writes only. A read without slots is a probe, which
    reads into temporary memory of the node."""

    @property
    def size(self) -> int:
        return 1 + len(self.keys)


@dataclass(slots=True)
class Answer:
    """A message from a node: the order with this number has ended there, and the node no longer touches its slots."""

    number: int
    outcomes: Sequence[bool] = ()
    """The outcome for each key."""
    keys: Sequence[OffloadKey] = ()
    """The keys that a scan found."""
    error: str = ""
    """The text of the error that the node's store raised, or an empty string."""
    errno: int | None = None
    """The operating system's number for ``error``, or ``None``."""

    @property
    def size(self) -> int:
        return 1 + len(self.outcomes) + len(self.keys)


@dataclass(slots=True)
class News:
    """An unsolicited message from a node: the statistics and losses of one tier's store there."""

    tier: int
    stats: StoreStats
    lost: dict[OffloadKey, LossCause] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return 1 + len(self.lost)


Item = Order | Answer | News


@dataclass(slots=True)
class Packet:
    """Some items of one stream, in one step. A packet may be late, lost, repeated, or overtaken by another packet.

    A *session* is the scheduler's exchange with one process of an agent. ``Nodes`` numbers the sessions of a node, and
    starts another session for each new process.
    """

    node: int
    session: int
    agent: int
    """The number of the agent's process that sends or receives this packet. With 0, the process that currently runs
    must reply with its number."""
    number: int = 0
    """The packet's number in this session and direction, from 1, or 0 if the packet only introduces the agent."""
    seen: int = 0
    """The highest number of the other side's packets that have arrived."""
    expects: int = 0
    """The number of the other side's next item. All items before it have arrived."""
    first: int = 0
    """The number of ``items[0]`` among this side's items, from 0."""
    items: tuple[Item, ...] = ()
