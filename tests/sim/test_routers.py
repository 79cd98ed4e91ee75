# SPDX-License-Identifier: Apache-2.0
"""Routers, over made-up servers."""

from __future__ import annotations

import random

import pytest

from kvoffload.errors import ConfigError
from kvoffload.sim.routers import (
    ROUTERS,
    Asked,
    Fleet,
    LeastLoad,
    PrefixAffinity,
    RoundRobin,
    ServerState,
    Session,
    router_of,
)
from kvoffload.testing import keys


def asked(*numbers: int, session: int = -1, tokens: int = 0) -> Asked:
    return Asked(0.0, tokens or 16 * len(numbers), session, keys(*numbers))


def fleet(*requests: int, tokens: tuple[int, ...] = ()) -> Fleet:
    states = [ServerState(requests=count) for count in requests]
    for state, count in zip(states, tokens, strict=False):
        state.tokens = count
    return Fleet(states)


def test_round_robin() -> None:
    servers, route = fleet(0, 0, 0), RoundRobin()
    assert [route(asked(1), servers) for _ in range(4)] == [0, 1, 2, 0]


def test_least_load() -> None:
    assert LeastLoad()(asked(1), fleet(1, 9, 5, tokens=(300, 200, 250))) == 1


def test_a_session_stays() -> None:
    servers, route = fleet(0, 0, 0, 0), Session()
    before = {session: route(asked(1, session=session), servers) for session in range(400)}
    assert {route(asked(2, session=session), servers) == number for session, number in before.items()} == {True}
    counts = [list(before.values()).count(number) for number in range(4)]
    assert min(counts) > 40, "the hash is even enough"
    assert route(asked(1), fleet(0, 0, 0, tokens=(3, 1, 2))) == 1


def test_prefixes_are_followed_until_others_have_less_to_compute() -> None:
    route = PrefixAffinity()
    idle = fleet(0, 0, 0)
    first = route(asked(1, 2, 3, 4), idle)
    other = route(asked(7, 8), idle)
    assert other != first, "new prompts go where the least was sent"
    assert route(asked(1, 2, 3, 9), idle) == first
    assert route(asked(1, 5, 6, 9), idle) not in (first, other), "less than half of a prompt decides nothing"
    busy = fleet(0, 0, 0)
    busy.servers[first].tokens = 4 * 16 - 1
    assert route(asked(1, 2, 3, 9), busy) == first
    busy.servers[first].tokens = 4 * 16 + 1
    assert route(asked(1, 2, 3, 9), busy) != first


def test_prefix_affinity_equals_sets() -> None:
    chance, route, servers = random.Random(5), PrefixAffinity(), fleet(0, 0, 0)
    sent: list[set[int]] = [set(), set(), set()]
    tokens = [0, 0, 0]
    for _ in range(500):
        for server in servers.servers:
            server.tokens = chance.randrange(100)
        path = [chance.randrange(3) + 10 * at for at in range(chance.randrange(1, 7))]
        known = []
        for held in sent:
            matched = next((at for at, number in enumerate(path) if number not in held), len(path))
            known.append(16 * matched if 2 * matched >= len(path) else 0)
        costs = [
            (server.tokens - saved, total) for server, saved, total in zip(servers.servers, known, tokens, strict=True)
        ]
        chosen = route(asked(*path), servers)
        assert costs[chosen] == min(costs)
        sent[chosen].update(path)
        tokens[chosen] += 16 * len(path)


def mine(asked: Asked, fleet: Fleet) -> int:
    return len(fleet.servers) - 1


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_each_router_uses_every_server(name: str) -> None:
    route, servers = router_of(name), fleet(3, 0, 5)
    chosen = {route(asked(*range(number, number + 5), session=number), servers) for number in range(0, 200, 10)}
    assert chosen == {0, 1, 2}


def test_a_router_of_ones_own() -> None:
    assert router_of(f"{__name__}:mine")(asked(1), fleet(0, 0, 0)) == 2
    with pytest.raises(ConfigError, match="Did you mean 'session'"):
        router_of("sessions")
    with pytest.raises(ConfigError, match="can be imported"):
        router_of("no.such.module:route")
