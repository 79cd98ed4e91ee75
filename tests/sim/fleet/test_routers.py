# SPDX-License-Identifier: Apache-2.0
"""Routers, over made-up servers."""

from __future__ import annotations

import random

import pytest

from kvoffload.base import OffloadingEvent, OffloadKey
from kvoffload.errors import ConfigError
from kvoffload.sim.fleet.routers import (
    ROUTERS,
    Asked,
    Dynamo,
    Fleet,
    KnownBlocks,
    LeastTokens,
    LlmD,
    PrefixTree,
    RoundRobin,
    ServerState,
    Session,
    router_of,
)
from kvoffload.testing import keys


def asked(*numbers: int, session: int = -1, tokens: int = 0) -> Asked:
    return Asked(0.0, tokens or 16 * len(numbers), session, keys(*numbers))


def fleet(*requests: int, tokens: tuple[int, ...] = (), blocks: tuple[int, ...] = ()) -> Fleet:
    states = [ServerState(requests=count) for count in requests]
    for state, count in zip(states, tokens, strict=False):
        state.tokens = count
    for state, count in zip(states, blocks, strict=False):
        state.blocks = count
    return Fleet(states)


def test_round_robin_leaves_out_who_is_gone() -> None:
    servers, route = fleet(0, 0, 0), RoundRobin()
    assert [route(asked(1), servers) for _ in range(4)] == [0, 1, 2, 0]
    servers.servers[1].is_alive = False
    assert {route(asked(1), servers) for _ in range(4)} == {0, 2}


def test_least_tokens() -> None:
    assert LeastTokens()(asked(1), fleet(1, 9, 5, tokens=(300, 200, 250))) == 1


def test_a_session_stays_and_only_those_of_a_server_that_goes_move() -> None:
    servers, route = fleet(0, 0, 0, 0), Session()
    before = {session: route(asked(1, session=session), servers) for session in range(400)}
    assert {route(asked(2, session=session), servers) == number for session, number in before.items()} == {True}
    counts = [list(before.values()).count(number) for number in range(4)]
    assert min(counts) > 40, "the ring is even enough"
    servers.servers[2].is_alive = False
    after = {session: route(asked(1, session=session), servers) for session in range(400)}
    moved = {session for session in before if before[session] != after[session]}
    assert moved == {session for session, number in before.items() if number == 2}
    assert route(asked(1), fleet(3, 1, 2)) == 1


def test_the_tree_follows_prefixes_until_the_load_is_uneven() -> None:
    route = PrefixTree()
    idle = fleet(0, 0, 0)
    first = route(asked(1, 2, 3, 4), idle)
    other = route(asked(7, 8), idle)
    assert other != first, "new prompts go where the tree is smallest"
    assert route(asked(1, 2, 3, 9), idle) == first
    assert route(asked(1, 5, 6, 9), idle) not in (first,), "a match of a quarter is none"
    busy = fleet(0, 0, 0)
    busy.servers[first].requests = 65
    assert route(asked(1, 2, 3, 4), busy) != first
    busy.servers[first].requests = 64
    assert route(asked(7, 8, 9), busy) == other


def test_dynamo_weighs_blocks_to_compute_against_blocks_at_work() -> None:
    servers = fleet(0, 0, blocks=(0, 3))
    servers.known.apply(1, [OffloadingEvent(keys(1, 2, 3, 4), "CPU", False)])
    assert Dynamo()(asked(1, 2, 3, 4), servers) == 1
    servers.servers[1].blocks = 5
    assert Dynamo()(asked(1, 2, 3, 4), servers) == 0


def test_llm_d_weighs_the_share_of_the_prompt_against_the_queue() -> None:
    servers = fleet(0, 4)
    servers.known.apply(1, [OffloadingEvent(keys(1, 2, 3), "GPU", False)])
    assert LlmD()(asked(1, 2, 3, 4), servers) == 1, "3 * 0.75 against 2"
    assert LlmD()(asked(1, 2, 5, 6), servers) == 0, "3 * 0.5 against 2"


def test_what_events_say_equals_sets() -> None:
    chance = random.Random(5)
    known, truth = KnownBlocks(), [{medium: set[OffloadKey]() for medium in ("GPU", "CPU")} for _ in range(5)]
    pool = keys(*range(40))
    for _ in range(3000):
        server, medium = chance.randrange(5), chance.choice(("GPU", "CPU"))
        some, removed = chance.sample(pool, 5), chance.random() < 0.5
        known.apply(server, [OffloadingEvent(some, medium, removed)])
        held = truth[server][medium]
        held.difference_update(some) if removed else held.update(some)
        if chance.random() < 0.01:
            known.forget(server)
            for held in truth[server].values():
                held.clear()
        path = chance.sample(pool, 8)
        expected = []
        for media in truth:
            everything = media["GPU"] | media["CPU"]
            expected.append(next((at for at, key in enumerate(path) if key not in everything), len(path)))
        assert known.overlaps(path, 5) == expected


def mine(asked: Asked, fleet: Fleet) -> int:
    return len(fleet.servers) - 1


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_each_router_chooses_a_server_that_is_alive(name: str) -> None:
    route, servers = router_of(name), fleet(3, 0, 5)
    servers.servers[1].is_alive = False
    for number in range(20):
        assert route(asked(*range(number, number + 5), session=number), servers) in (0, 2)


def test_a_router_of_ones_own() -> None:
    assert router_of(f"{__name__}:mine")(asked(1), fleet(0, 0, 0)) == 2
    with pytest.raises(ConfigError, match="Did you mean 'session'"):
        router_of("sessions")
    with pytest.raises(ConfigError, match="can be imported"):
        router_of("no.such.module:route")
