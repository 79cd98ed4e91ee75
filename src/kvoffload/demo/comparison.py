# SPDX-License-Identifier: Apache-2.0
"""Serve one chat workload in several ways, and compare their speed and their tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.demo.workload import Chat, ChatWorkload, Turn
from kvoffload.engines.reference.engine import Engine, EngineOptions
from kvoffload.metrics import Stats


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    prefix_caching: bool
    offloading: OffloadingConfig | None = None
    after_restart: bool = False
    """Whether the way serves the chat after the others, with the blocks that they left in tiers."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Time to first token over some turns, in seconds."""

    median_s: float
    p95_s: float

    @staticmethod
    def of(turns: Sequence[Turn]) -> Latency:
        """Return the median and the 95th percentile, which is the value that 95% of the turns do not exceed."""
        times = sorted(turn.time_to_first_token_s for turn in turns)
        return Latency(statistics.median(times), times[-(-95 * len(times) // 100) - 1])


@dataclass(frozen=True, slots=True)
class WayResult:
    """The result of serving in one way. ``stats`` are kvoffload's metrics at the end, empty without offloading."""

    name: str
    turns: tuple[Turn, ...]
    wall_s: float
    computed_tokens: int
    preemptions: int
    stats: Stats

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def device_hit_tokens(self) -> int:
        return sum(turn.device_hit_tokens for turn in self.turns)

    @property
    def external_hit_tokens(self) -> int:
        return sum(turn.external_hit_tokens for turn in self.turns)

    def latency(self, turn: int | None = None) -> Latency:
        """Return the time to first token of one turn (from 0) of all conversations, or of all turns."""
        return Latency.of([each for each in self.turns if turn is None or each.turn == turn])


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a conversation that differs from the first way's token."""

    way: str
    conversation: int
    turn: int
    token: int
    margin: float
    """The margin by which the first way chose its token."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing the tokens of all ways, and the sharpness of that comparison.

    The ways split and batch the same sums differently, so their logits differ by rounding. ``largest_rounding`` is the
    largest such difference over the ways whose tokens all agree (``None`` if no way agrees). ``smallest_margin`` is the
    margin of the first way's closest choice. If it is well above the rounding, only a wrong block can change a token.
    """

    differences: tuple[Difference, ...]
    smallest_margin: float
    largest_rounding: float | None

    @property
    def identical(self) -> bool:
        return not self.differences

    @property
    def is_sharp(self) -> bool:
        """Whether every choice was too clear for rounding alone to flip it."""
        return self.largest_rounding is not None and self.smallest_margin > 4 * self.largest_rounding


@dataclass(frozen=True, slots=True)
class Comparison:
    workload: ChatWorkload
    options: EngineOptions
    results: tuple[WayResult, ...]
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            "workload": asdict(self.workload),
            "engine": asdict(self.options),
            "ways": [_way_as_json(result, self.workload.turns) for result in self.results],
            "tokens": asdict(self.verdict) | {"identical": self.verdict.identical, "is_sharp": self.verdict.is_sharp},
        }


def _way_as_json(result: WayResult, turns: int) -> dict[str, Any]:
    return {
        "name": result.name,
        "wall_s": result.wall_s,
        "time_to_first_token": {
            "all": asdict(result.latency()),
            "by_turn": [asdict(result.latency(turn)) for turn in range(turns)],
        },
        "prompt_tokens": result.prompt_tokens,
        "device_hit_tokens": result.device_hit_tokens,
        "offloaded_hit_tokens": result.external_hit_tokens,
        "computed_tokens": result.computed_tokens,
        "preemptions": result.preemptions,
        "metrics": {" ".join(sample): value for sample, value in sorted(result.stats.items())},
    }


def compare(
    model: Any,
    options: EngineOptions,
    ways: Sequence[Way],
    workload: ChatWorkload,
    on_turn: Callable[[str, Turn], None] = lambda *_: None,
) -> Comparison:
    """Serve the workload in every way.

    A short chat about other words, which is not measured, warms up the machine. The ways then take turns after each
    round, so that other work on the machine affects all of them. A way that follows a restart starts after the others
    have ended.
    """
    warm_up = replace(workload, conversations=2, turns=2, seed=workload.seed + 1)
    _serve(model, options, [replace(way, after_restart=False) for way in ways[-1:]], warm_up, lambda *_: None)
    together = [way for way in ways if not way.after_restart]
    results = _serve(model, options, together, workload, on_turn)
    for way in ways:
        if way.after_restart:
            results += _serve(model, options, [way], workload, on_turn)
    return Comparison(workload, options, tuple(results), judge(results))


def _serve(
    model: Any,
    options: EngineOptions,
    ways: Sequence[Way],
    workload: ChatWorkload,
    on_turn: Callable[[str, Turn], None],
) -> list[WayResult]:
    """Serve the workload in these ways, each on a new engine of its own."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(Engine(model, replace(options, prefix_caching=way.prefix_caching), way.offloading))
            for way in ways
        ]
        chats = [
            Chat(engine, workload, lambda turn, name=way.name: on_turn(name, turn))  # type: ignore[misc]
            for engine, way in zip(engines, ways, strict=True)
        ]
        wall_s = [0.0] * len(ways)
        for _ in range(workload.turns):
            for number, chat in enumerate(chats):
                start = time.perf_counter()
                chat.serve_round()
                wall_s[number] += time.perf_counter() - start
        return [
            WayResult(
                way.name, chat.turns, wall, engine.counts.computed_tokens, engine.counts.preemptions, engine.get_stats()
            )
            for way, chat, wall, engine in zip(ways, chats, wall_s, engines, strict=True)
        ]


def judge(results: Sequence[WayResult]) -> Verdict:
    """Compare the tokens of every way with the first way's, up to the first difference in each conversation.

    Tokens after a difference are not compared, because they continue another history.
    """
    first, *others = results
    differences: list[Difference] = []
    margins = [margin for turn in first.turns for margin in turn.margins]
    roundings: list[float] = []
    for result in others:
        found = _first_differences(first, result)
        differences += found
        if not found:  # if tokens differ, a wrong block may also have changed the logits of earlier tokens
            roundings.append(_largest_distance(first, result))
    return Verdict(tuple(differences), min(margins), max(roundings, default=None))


def _first_differences(first: WayResult, other: WayResult) -> list[Difference]:
    """Return the first difference of each conversation."""
    differences: dict[int, Difference] = {}
    for expected, turn in zip(first.turns, other.turns, strict=True):
        for index, (wanted, got) in enumerate(zip(expected.tokens, turn.tokens, strict=True)):
            if wanted != got:
                found = Difference(other.name, turn.conversation, turn.turn, index, expected.margins[index])
                differences.setdefault(turn.conversation, found)
    return list(differences.values())


def _largest_distance(first: WayResult, other: WayResult) -> float:
    """Return the largest difference between the two ways' top logits of the same token."""
    return max(
        abs(wanted - got)
        for expected, turn in zip(first.turns, other.turns, strict=True)
        for wanted, got in zip(expected.top_logits, turn.top_logits, strict=True)
    )
