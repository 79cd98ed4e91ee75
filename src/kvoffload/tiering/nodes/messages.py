# SPDX-License-Identifier: Apache-2.0
"""All that travels between the scheduler and the agents of the nodes. Plain, small, picklable.

They are values that are never changed.
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
    """Has no answer."""
    SCAN = "scan"
    """The answer has the next keys of the node's store; none: it has no more."""
    SCAN_ANEW = "scan anew"
    """The same, from the first key on."""


@dataclass(slots=True)
class Order:
    """To a node: something to do with the node's part of each block."""

    number: int
    """Of the order. All nodes get the same order under the same number."""
    tier: int
    """Index of the tier, in the order of the configuration."""
    act: Act
    keys: Sequence[OffloadKey] = ()
    slots: Sequence[int] = ()
    """Of ``keys``, in the node's region; only to read and to write. A read without any is a probe: into memory of the
    node's own."""

    @property
    def size(self) -> int:
        return 1 + len(self.keys)


@dataclass(slots=True)
class Answer:
    """From a node: the order with this number has ended there. The node touches none of its slots any more."""

    number: int
    outcomes: Sequence[bool] = ()
    """By key."""
    keys: Sequence[OffloadKey] = ()
    """What a scan found."""
    error: str = ""
    """What the node's store raised; empty: nothing."""
    errno: int | None = None
    """Of ``error``, if the operating system has a number for it."""

    @property
    def size(self) -> int:
        return 1 + len(self.outcomes) + len(self.keys)


@dataclass(slots=True)
class News:
    """From a node, unasked: what became of one tier's store there."""

    tier: int
    stats: StoreStats
    lost: dict[OffloadKey, LossCause] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return 1 + len(self.lost)


Item = Order | Answer | News


@dataclass(slots=True)
class Packet:
    """Some items of one stream, in one step. A packet may be late, lost, repeated, or overtaken by another.

    A *session* is the scheduler's talk with one process of an agent. ``Nodes`` numbers the sessions of a node, and
    begins another one for each new process.
    """

    node: int
    session: int
    agent: int
    """The process of the agent that sent this, or is meant; 0: whichever runs now, which shall say its number."""
    number: int = 0
    """Of the packets that this side sent in this session, from 1; 0: it only says which agent runs."""
    seen: int = 0
    """The highest number of a packet of the other side that has arrived."""
    expects: int = 0
    """The item of the other side that is to come next: all before have arrived."""
    first: int = 0
    """Number of ``items[0]`` among this side's items, from 0."""
    items: tuple[Item, ...] = ()
