# SPDX-License-Identifier: Apache-2.0
"""Serve one chat workload in several ways, and compare their speed and their tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.demo.workload import ChatWorkload, Turn, run_chat
from kvoffload.engines.reference.engine import Engine, EngineOptions
from kvoffload.metrics import Stats


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    prefix_caching: bool
    offloading: OffloadingConfig | None = None


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


def _run_way(
    model: Any,
    options: EngineOptions,
    way: Way,
    workload: ChatWorkload,
    on_turn: Callable[[Turn], None] = lambda _: None,
) -> WayResult:
    """Serve the workload once, on a new engine."""
    with Engine(model, replace(options, prefix_caching=way.prefix_caching), way.offloading) as engine:
        start = time.perf_counter()
        turns = tuple(run_chat(engine, workload, on_turn))
        wall_s, counts = time.perf_counter() - start, engine.counts
        return WayResult(way.name, turns, wall_s, counts.computed_tokens, counts.preemptions, engine.get_stats())


def compare(
    model: Any,
    options: EngineOptions,
    ways: Sequence[Way],
    workload: ChatWorkload,
    on_turn: Callable[[str, Turn], None] = lambda *_: None,
) -> Comparison:
    """Run every way, after a short warm-up that is not measured."""
    _run_way(model, options, ways[0], replace(workload, conversations=1, turns=1))
    results = tuple(
        _run_way(model, options, way, workload, lambda turn, name=way.name: on_turn(name, turn))  # type: ignore[misc]
        for way in ways
    )
    return Comparison(workload, options, results, judge(results))


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
