# SPDX-License-Identifier: Apache-2.0
"""Which server gets a request.

A router is a function of a request and of the servers that returns the number of a server::

    def mine(asked: Asked, fleet: Fleet) -> int: ...

``ROUTERS`` has classes: an instance routes one replay. A router of one's own is named ``package.module:name``: a
function, or a class without arguments.
"""

from __future__ import annotations

import importlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from kvoffload.errors import ConfigError, UnknownNameError, suggest


@dataclass(frozen=True, slots=True)
class Asked:
    """The facts about a request that a router knows."""

    time_s: float
    tokens: int
    """Of the prompt."""
    session: int
    """``NO_SESSION``: the client named none."""
    path: Sequence[bytes]
    """Hashes of the prompt's whole blocks, head to tail."""


@dataclass(slots=True)
class ServerState:
    """The facts about a server that a router knows: requests without a first token, and the tokens of their prompts."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Fleet:
    """The servers that may be chosen, by number."""

    servers: list[ServerState]


class Router(Protocol):
    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        """Return the number of a server."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        self._next += 1
        return (self._next - 1) % len(fleet.servers)


class LeastLoad:
    """The server with the fewest prompt tokens that wait or are computed. Of several, the one that was sent the fewest
    tokens."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        tokens = [server.tokens for server in fleet.servers]
        least = min(tokens)
        chosen = min((number for number, waiting in enumerate(tokens) if waiting == least), key=self._sent.__getitem__)
        self._sent[chosen] += asked.tokens
        return chosen


class Session:
    """All requests of a session go to one server, chosen by a hash. The others go where the fewest tokens wait."""

    def __init__(self) -> None:
        self._least_load = LeastLoad()

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        if asked.session < 0:
            return self._least_load(asked, fleet)
        return xxhash.xxh3_64_intdigest(b"%d" % asked.session) % len(fleet.servers)


class PrefixAffinity:
    """The server that has the fewest tokens to compute until this prompt is computed: the tokens that wait there, and
    the tokens of the prompt that it was not sent before. Of several, the server that was sent the fewest tokens.

    Less than half of a prompt does not count as sent before: else one server would get all that share a system prompt.
    It remembers which blocks it sent to which server, up to ``_REMEMBERED`` blocks. It does not know
    which blocks servers evict.
    """

    _REMEMBERED = 1 << 20

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, int] = OrderedDict()
        """A bit for each server, by block. Heads come after their tails, so that they are forgotten later."""
        self._sent_tokens: Counter[int] = Counter()

    def __call__(self, asked: Asked, fleet: Fleet) -> int:
        numbers = range(len(fleet.servers))
        matched = self._matched(asked.path, (1 << len(numbers)) - 1)
        block_tokens = asked.tokens // max(len(asked.path), 1)

        def to_compute(number: int) -> tuple[int, int, int]:
            blocks = matched.get(number, 0)
            known = block_tokens * blocks if 2 * blocks >= len(asked.path) else 0
            return fleet.servers[number].tokens - known, self._sent_tokens[number], number

        chosen = min(numbers, key=to_compute)
        self._sent_tokens[chosen] += asked.tokens
        for key in reversed(asked.path):
            self._sent[key] = self._sent.pop(key, 0) | 1 << chosen
        while len(self._sent) > self._REMEMBERED:
            self._sent.popitem(last=False)
        return chosen

    def _matched(self, path: Sequence[bytes], bits: int) -> dict[int, int]:
        """Return how many blocks at the head of ``path`` each server was sent, if any."""
        found: dict[int, int] = {}
        for at, key in enumerate([*path, None]):
            kept = bits & self._sent.get(key, 0) if key is not None else 0
            lost, bits = bits & ~kept, kept
            while lost and at:
                low = lost & -lost
                found[low.bit_length() - 1] = at
                lost ^= low
            if not bits:
                break
        return found


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "session": Session,
    "prefix": PrefixAffinity,
}


def router_of(name: str) -> Router:
    """Return a new router of this name, or one's own as ``"package.module:name"``. Raises ``ConfigError``."""
    if name in ROUTERS:
        return ROUTERS[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownNameError(f"Unknown router: {name!r}.{suggest(name, ROUTERS)}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"The router {name}: {exc}. Give a function of (asked, fleet) that can be imported.") from exc
    router: Router = found() if isinstance(found, type) else found
    if not callable(router):
        raise ConfigError(f"The router {name} is not a function of (asked, fleet).")
    return router
