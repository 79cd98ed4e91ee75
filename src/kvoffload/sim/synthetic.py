# SPDX-License-Identifier: Apache-2.0
"""Synthetic traffic for people without a trace. The same kind and seed give the same trace."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvoffload.errors import ConfigError, UnknownNameError, suggest
from kvoffload.sim.trace import Trace

_BLOCK_TOKENS = 64


@dataclass(slots=True)
class _Session:
    """One conversation: its path so far, and how it goes on."""

    number: int
    path: list[int]
    turns_left: int
    grow_blocks: float
    """Mean blocks that a turn adds: the previous answer and the next message."""
    pause_s: float
    """Median pause before the next turn."""
    other_pauses: tuple[tuple[float, float], ...] = ()
    """Shares of turns before which the median pause is another, in seconds."""

    def next_pause_s(self, random: np.random.Generator) -> float:
        median_s = self.pause_s
        if self.other_pauses:
            drawn = random.random()
            for share, other_s in self.other_pauses:
                if 0 <= drawn < share:
                    median_s = other_s
                drawn -= share
        return median_s * float(random.lognormal(0, 1))


@dataclass(slots=True)
class _Traffic:
    """Sessions of one sort: mean lengths in blocks, mean turns, median pause."""

    prompts: list[list[int]]
    """Shared ones. The ``n``-th is used in proportion to ``n ** -skew``."""
    skew: float
    first_blocks: float
    turns: float = 1.0
    grow_blocks: float = 1.0
    pause_s: float = 1.0


@dataclass(slots=True)
class _World:
    """The state that all sessions of a trace share."""

    random: np.random.Generator
    prompts: list[list[int]] = field(default_factory=list)
    documents: dict[int, list[int]] = field(default_factory=dict)
    sorts: list[tuple[float, _Traffic]] = field(default_factory=list)
    """The sorts of sessions that ``_assistants`` begins, and the share of each."""
    next_block: int = 0
    next_session: int = 0

    def blocks(self, count: float) -> list[int]:
        number = max(1, round(count))
        self.next_block += number
        return list(range(self.next_block - number, self.next_block))

    def random_length(self, mean: float) -> float:
        """Log-normal: up to a few times shorter or longer than ``mean``."""
        return float(self.random.lognormal(np.log(mean) - 0.245, 0.7))

    def shared_prompt(self, choices: int, mean_blocks: float) -> list[int]:
        """One of ``choices`` system prompts; the first are far more frequent than the last."""
        while len(self.prompts) < choices:
            self.prompts.append(self.blocks(self.random_length(mean_blocks)))
        return self.prompts[min(int(self.random.zipf(1.6)), choices) - 1]

    def between(self, least: float, most: float) -> float:
        """Any order of magnitude between the two is as likely as any other."""
        return float(np.exp(self.random.uniform(np.log(least), np.log(most))))

    def shared_prompts(self, choices: int, mean_blocks: float) -> list[list[int]]:
        return [self.blocks(self.random_length(mean_blocks)) for _ in range(choices)]

    def session(self, start: list[int], turns: float, grow_blocks: float, pause_s: float) -> _Session:
        self.next_session += 1
        left = int(self.random.geometric(1 / turns))
        return _Session(self.next_session - 1, start, left, grow_blocks, pause_s)


def _chat(world: _World) -> _Session:
    start = world.shared_prompt(20, 10) + world.blocks(world.random_length(8))
    return world.session(start, turns=3.5, grow_blocks=7, pause_s=60)


def _agents(world: _World) -> _Session:
    start = world.shared_prompt(4, 150) + world.blocks(world.random_length(60))
    return world.session(start, turns=40, grow_blocks=8, pause_s=6)


def _documents(world: _World) -> _Session:
    wanted = int(world.random.zipf(1.35)) % 2000
    if wanted not in world.documents:
        world.documents[wanted] = world.shared_prompt(1, 5) + world.blocks(world.random_length(200))
    start = world.documents[wanted] + world.blocks(world.random_length(2))
    return world.session(start, turns=2, grow_blocks=3, pause_s=40)


def _mixed(world: _World) -> _Session:
    return (_chat, _chat, _chat, _agents, _documents)[int(world.random.integers(5))](world)


def _assistants(world: _World) -> _Session:
    if not world.sorts:
        world.sorts = _drawn_sorts(world)
    shares = [share for share, _ in world.sorts]
    sort = world.sorts[int(world.random.choice(len(shares), p=shares))][1]
    popularity = np.arange(1, len(sort.prompts) + 1) ** -sort.skew
    start = sort.prompts[int(world.random.choice(len(popularity), p=popularity / popularity.sum()))]
    start = start + world.blocks(world.random_length(sort.first_blocks))
    return world.session(start, sort.turns, sort.grow_blocks, sort.pause_s)


def _drawn_sorts(world: _World) -> list[tuple[float, _Traffic]]:
    """Draw the kinds of sessions of this seed's assistants: single long prompts, chats, agents, tool calls."""
    uniform, between = world.random.uniform, world.between
    once = float(uniform(0.2, 0.5))
    chats = float(uniform(0.4, 0.7)) * (1 - once)
    rest = 1 - once - chats
    system = world.shared_prompts(30, 2), 1.0
    num_tools, tool_blocks, skew = int(between(20, 300)), between(4, 40), float(uniform(0.4, 1.2))
    tools = world.shared_prompts(num_tools, tool_blocks), skew
    chat = _Traffic(*system, between(4, 16), float(uniform(3, 10)), between(2, 6), between(200, 2000))
    agent = _Traffic(*tools, between(4, 16), float(uniform(4, 15)), between(1.5, 5), between(60, 1200))
    return [
        (once, _Traffic(*system, between(15, 60))),
        (chats, chat),
        (0.7 * rest, agent),
        (0.3 * rest, _Traffic(*tools, 2)),
    ]


def _tools(world: _World) -> _Session:
    start = world.shared_prompt(6, 40) + world.blocks(world.random_length(25))
    session = world.session(start, turns=8, grow_blocks=8, pause_s=6)
    session.other_pauses = ((0.2, 150), (0.1, 1500))
    return session


KINDS: dict[str, Callable[[_World], _Session]] = {
    "chat": _chat,
    "agents": _agents,
    "documents": _documents,
    "mixed": _mixed,
    "assistants": _assistants,
    "tools": _tools,
}
"""Chat of several turns under shared system prompts; agents whose context grows by tool calls; questions about
documents, a few of them far more popular; a mix of these; and assistants that chat and call tools, with long pauses
and many long prompts that never come back. The seed of assistants also draws the traffic's properties: lengths, turns,
pauses, and how many shared prompts there are and how popular they are. The last are agents whose tools take seconds or
minutes, and who ask people, which takes longer."""


def synthesize(kind: str, requests: int = 4000, seed: int = 0, sessions_per_s: float = 0.25) -> Trace:
    """Return a trace of ``requests`` requests. Sessions begin at random, ``sessions_per_s`` per second on average.

    Raises ``ConfigError`` for an unknown ``kind`` (of ``KINDS``), or if there is nothing to make.
    """
    if kind not in KINDS:
        raise UnknownNameError(f"Unknown kind of synthetic trace: {kind!r}.{suggest(kind, KINDS)}")
    if requests < 1 or sessions_per_s <= 0:
        raise ConfigError("A synthetic trace needs at least one request and a positive rate of sessions.")
    world = _World(np.random.default_rng(seed))
    begin = KINDS[kind]
    waiting: list[tuple[float, int, _Session | None]] = [(0.0, -1, None)]  # None: the next new session
    times: list[float] = []
    outputs: list[int] = []
    sessions: list[int] = []
    paths: list[list[int]] = []
    while len(paths) < requests:
        now_s, _, session = heapq.heappop(waiting)
        if session is None:
            gap_s = float(world.random.exponential(1 / sessions_per_s))
            heapq.heappush(waiting, (now_s + gap_s, -1, None))
            session = begin(world)
        times.append(now_s)
        sessions.append(session.number)
        paths.append(session.path)
        outputs.append(round(world.random_length(0.4 * session.grow_blocks) * _BLOCK_TOKENS) + 1)
        session.turns_left -= 1
        if session.turns_left:
            session.path = session.path + world.blocks(world.random_length(session.grow_blocks))
            heapq.heappush(waiting, (now_s + session.next_pause_s(world.random), session.number, session))
    counts = np.array([len(path) for path in paths], dtype=np.int64)
    numbers: dict[int, int] = {}
    return Trace(
        name=f"synthetic-{kind}-{seed}",
        block_tokens=_BLOCK_TOKENS,
        times_s=np.array(times),
        input_tokens=counts * _BLOCK_TOKENS + 1,
        output_tokens=np.array(outputs, dtype=np.int64),
        sessions=np.array(sessions, dtype=np.int64),
        offsets=np.concatenate(([0], np.cumsum(counts))),
        ids=np.array([numbers.setdefault(block, len(numbers)) for path in paths for block in path], dtype=np.int32),
    )
