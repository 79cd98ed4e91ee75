# SPDX-License-Identifier: Apache-2.0
"""Synthetic traffic for people without a trace. The same kind and seed give the same trace."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvoffload.errors import ConfigError, UnknownNameError, suggest
from kvoffload.sim.trace import Trace

__all__ = ["KINDS", "synthesize"]

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


@dataclass(slots=True)
class _World:
    """The state that all sessions of a trace share."""

    random: np.random.Generator
    prompts: list[list[int]] = field(default_factory=list)
    documents: dict[int, list[int]] = field(default_factory=dict)
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


KINDS: dict[str, Callable[[_World], _Session]] = {
    "chat": _chat,
    "agents": _agents,
    "documents": _documents,
    "mixed": _mixed,
}
"""Chat of several turns under shared system prompts; agents whose context grows by tool calls; questions about
documents, some of which are far more popular; and a mix of these."""


def synthesize(kind: str, requests: int = 4000, seed: int = 0, sessions_per_s: float = 0.25) -> Trace:
    """A trace of ``requests`` requests. Sessions begin at random, ``sessions_per_s`` per second on average.

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
            pause_s = session.pause_s * float(world.random.lognormal(0, 1))
            heapq.heappush(waiting, (now_s + pause_s, session.number, session))
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
