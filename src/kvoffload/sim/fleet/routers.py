# SPDX-License-Identifier: Apache-2.0
"""Which server gets a request: the routers that people deploy, each as its documents describe it.

A router is a function of what a request asks for and of the servers, which gives a server's number::

    def mine(asked: Asked, fleet: Fleet) -> int: ...

``ROUTERS`` has classes: an instance routes one replay. A router of one's own is ``--router package.module:name``, a
function or a class without arguments.
"""

from __future__ import annotations

import bisect
import hashlib
import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvoffload.base import OffloadingEvent, OffloadKey
from kvoffload.errors import ConfigError, UnknownNameError, suggest

__all__ = ["ROUTERS", "Asked", "Fleet", "KnownBlocks", "Router", "ServerState", "router_of"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a router knows of a request."""

    time_s: float
    tokens: int
    """Of the prompt."""
    session: int
    """``NO_SESSION``: the client named none."""
    path: Sequence[OffloadKey]
    """The prompt's whole blocks, head to tail."""


@dataclass(slots=True)
class ServerState:
    """What a router knows of a server: requests that it has and did not answer yet, with their prompts."""

    is_alive: bool = True
    requests: int = 0
    tokens: int = 0
    blocks: int = 0


class KnownBlocks:
    """Which server has which blocks, by the KV events that have come so far. Rows of bits, a bit for each server."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[OffloadKey, int]] = {}

    def apply(self, server: int, events: Sequence[OffloadingEvent]) -> None:
        bit = 1 << server
        for event in events:
            holders = self._holders.setdefault(event.medium, {})
            for key in event.keys:
                bits = holders.get(key, 0)
                bits = bits & ~bit if event.removed else bits | bit
                if bits:
                    holders[key] = bits
                else:
                    holders.pop(key, None)

    def forget(self, server: int) -> None:
        """The server is gone, with all that it had."""
        for medium, holders in self._holders.items():
            left = {key: bits & ~(1 << server) for key, bits in holders.items()}
            self._holders[medium] = {key: bits for key, bits in left.items() if bits}

    def overlaps(self, path: Sequence[OffloadKey], num_servers: int) -> list[int]:
        """Blocks at the head of ``path`` that each server has, in any medium."""
        found = [0] * num_servers
        media = list(self._holders.values())
        bits = (1 << num_servers) - 1
        for at, key in enumerate(path):
            here = 0
            for holders in media:
                here |= holders.get(key, 0)
            lost, bits = bits & ~here, bits & here
            while lost:
                low = lost & -lost
                found[low.bit_length() - 1] = at
                lost ^= low
            if not bits:
                return found
        while bits:
            low = bits & -bits
            found[low.bit_length() - 1] = len(path)
            bits ^= low
        return found


@dataclass(slots=True)
class Fleet:
    """The servers that may be chosen, by number."""

    servers: list[ServerState]
    known: KnownBlocks = field(default_factory=KnownBlocks)
    """Empty unless the router has ``wants_events``."""

    def alive(self) -> list[int]:
        """At least one."""
        return [number for number, server in enumerate(self.servers) if server.is_alive]

    def overlaps(self, path: Sequence[OffloadKey]) -> list[int]:
        """Blocks at the head of ``path`` that each server has, by its events."""
        return self.known.overlaps(path, len(self.servers))


class Router(Protocol):
    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        """The number of a server that is alive."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        alive = fleet.alive()
        self._next += 1
        return alive[(self._next - 1) % len(alive)]


class LeastTokens:
    """The server with the fewest prompt tokens that wait or are computed."""

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        alive = fleet.alive()
        tokens = [fleet.servers[number].tokens for number in alive]
        return alive[tokens.index(min(tokens))]


class Session:
    """A session's requests go to one server, by a ring of hashes; others go where the fewest requests are.

    As the session router of vLLM's production stack. When a server goes, only its sessions move.
    """

    _POINTS = 160

    def __init__(self) -> None:
        self._ring: list[tuple[int, int]] = []

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        alive = fleet.alive()
        if asked.session < 0:
            return min(alive, key=lambda number: (fleet.servers[number].requests, number))
        if not self._ring:
            points = range(self._POINTS)
            self._ring = sorted((_hash(f"{n}-{point}"), n) for n in range(len(fleet.servers)) for point in points)
        at = bisect.bisect(self._ring, (_hash(str(asked.session)), -1))
        for step in range(len(self._ring)):
            number = self._ring[(at + step) % len(self._ring)][1]
            if fleet.servers[number].is_alive:
                return number
        return alive[0]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class PrefixTree:
    """Remembers which prompts went where, and sends a prompt to where its longest prefix went.

    As SGLang's router (``cache_aware``), with its defaults of 2025: a match of more than 0.3 of the prompt decides,
    otherwise the server that has the least of the tree; servers whose numbers of requests lie more than 64 and more
    than a factor of 1.5 apart get what the shortest queue gets. Its tree is of characters, and this one of blocks: of
    2**26 characters, at some four for a token, ``2**24 / block_tokens`` blocks are left, the least recently used of
    which go.
    """

    CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5
    _MAX_TOKENS = 2**24

    def __init__(self) -> None:
        self._sent: OrderedDict[tuple[OffloadKey, int], None] = OrderedDict()
        self._holders: dict[OffloadKey, int] = {}
        self._size: dict[int, int] = {}

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        alive = fleet.alive()
        loads = [fleet.servers[number].requests for number in alive]
        low, high = min(loads), max(loads)
        if high - low > self.BALANCE_ABS and high > self.BALANCE_REL * low:
            chosen = alive[loads.index(low)]
        else:
            matched, number = self._longest(asked.path, alive)
            if asked.path and matched > self.CACHE_THRESHOLD * len(asked.path):
                chosen = number
            else:
                chosen = min(alive, key=lambda each: (self._size.get(each, 0), each))
        self._insert(asked, chosen)
        return chosen

    def _longest(self, path: Sequence[OffloadKey], alive: list[int]) -> tuple[int, int]:
        """(blocks, a server that was sent them)."""
        mask = sum(1 << number for number in alive)
        for at, key in enumerate(path):
            if not (left := mask & self._holders.get(key, 0)):
                return at, (mask & -mask).bit_length() - 1
            mask = left
        return len(path), (mask & -mask).bit_length() - 1

    def _insert(self, asked: Asked, number: int) -> None:
        bit = 1 << number
        num_sent = len(self._sent)
        for key in reversed(asked.path):  # heads last: they are dropped last
            self._holders[key] = self._holders.get(key, 0) | bit
            self._sent[key, number] = None
            self._sent.move_to_end((key, number))
        self._size[number] = self._size.get(number, 0) + len(self._sent) - num_sent
        most = self._MAX_TOKENS * max(len(asked.path), 1) // max(asked.tokens, 1)
        while len(self._sent) > most:
            (key, owner), _ = self._sent.popitem(last=False)
            self._size[owner] -= 1
            self._holders[key] &= ~(1 << owner)
            if not self._holders[key]:
                del self._holders[key]


class Dynamo:
    """The server with the lowest cost: prompt blocks that it would have to compute, and blocks of its requests.

    As Dynamo's KV router with its defaults (weight 1, temperature 0), over the index that KV events build.
    """

    wants_events = True
    OVERLAP_WEIGHT = 1.0

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        found = fleet.overlaps(asked.path)

        def cost(number: int) -> tuple[float, int]:
            to_compute = len(asked.path) - found[number]
            return self.OVERLAP_WEIGHT * to_compute + fleet.servers[number].blocks, number

        return min(fleet.alive(), key=cost)


class LlmD:
    """The server with the highest score: the share of the prompt that it has counts 3, the shortness of its queue 2.

    As llm-d's scheduler with its precise prefix scorer and the default weights, over the index that KV events build.
    """

    wants_events = True
    PREFIX_WEIGHT, QUEUE_WEIGHT = 3.0, 2.0

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        alive = fleet.alive()
        found = fleet.overlaps(asked.path)
        queues = [fleet.servers[number].requests for number in alive]
        low, high = min(queues), max(queues)

        def score(number: int) -> tuple[float, int]:
            prefix = found[number] / len(asked.path) if asked.path else 0.0
            queue = 1.0 if high == low else (high - fleet.servers[number].requests) / (high - low)
            return self.PREFIX_WEIGHT * prefix + self.QUEUE_WEIGHT * queue, -fleet.servers[number].requests

        return max(alive, key=score)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-tokens": LeastTokens,
    "session": Session,
    "prefix-tree": PrefixTree,
    "dynamo": Dynamo,
    "llm-d": LlmD,
}


def router_of(name: str) -> Router:
    """A new router of this name, or one's own as ``"package.module:name"``. Raises ``ConfigError``."""
    if name in ROUTERS:
        return ROUTERS[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownNameError(f"Unknown router: {name!r}.{suggest(name, ROUTERS)}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"--router {name}: {exc}. Give a function of (asked, fleet) that can be imported.") from exc
    router: Router = found() if isinstance(found, type) else found
    if not callable(router):
        raise ConfigError(f"--router {name} is not a function of (asked, fleet).")
    return router
