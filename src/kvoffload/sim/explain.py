# SPDX-License-Identifier: Apache-2.0
"""Summarise the explanations that ``record_trace`` wrote, and let the simulator compute the effect of changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec

from kvoffload.config import DEFAULTS
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.errors import ConfigError
from kvoffload.metrics import HOST
from kvoffload.miss import Miss
from kvoffload.sim.config import USUAL, Prices, SimConfig
from kvoffload.sim.result import Result
from kvoffload.sim.sweep import sweep
from kvoffload.sim.trace import Trace, TraceError
from kvoffload.sim.trace_files import Line, load_trace
from kvoffload.tiering.base import CascadeMode
from kvoffload.tiering.load_policy import LoadPolicy
from kvoffload.tiering.options import STORES, default_cascade
from kvoffload.units import exact_size

_INTERVALS = 48
"""Number of intervals of the trace's time for which the course is kept."""


def advice_on(cause: str) -> str:
    """Return the explanation of a cause in a trace, or an empty text for a cause of another version."""
    miss = Miss.of(cause)
    return miss.advice if miss is not None else ""


# ------------------------------------------------------------------------------------------------------- explanations


class MachineTier(msgspec.Struct, frozen=True):
    """The configuration of one tier of the recording server."""

    type: str | None = None
    max_bytes: int | None = None
    """``None``: there is no limit."""
    cascade: CascadeMode | None = None
    """``None``: the sizes decide. Traces of older versions lack it."""


class Machine(msgspec.Struct, frozen=True):
    """The configuration of the server that recorded the trace, as far as the simulator needs it."""

    block_bytes: int
    cpu_bytes: int
    policy: str
    store_threshold: int = 1
    load_policy: LoadPolicy = DEFAULTS.load_policy
    tiers: tuple[MachineTier, ...] = ()

    @property
    def has_unbounded_tier(self) -> bool:
        return any(tier.max_bytes is None for tier in self.tiers)

    @property
    def tier_of_unknown_size(self) -> str | None:
        """The type of a tier whose size only its servers know, or ``None``."""
        known = (tier.type for tier in self.tiers if tier.type in STORES.names() and tier.max_bytes is None)
        return next((name for name in known if STORES.get(name).server_evicts), None)

    @property
    def cascade(self) -> CascadeMode | None:
        """The mode of all tiers as one: ``on_store`` if any of them is ``on_store``, ``on_evict`` if all of them are,
        and ``None`` if the sizes decide."""
        modes = {tier.cascade for tier in self.tiers}
        if "on_store" in modes:
            return "on_store"
        return "on_evict" if modes == {"on_evict"} else None


class _Weighed(msgspec.Struct):
    tier: str
    expected_s: float
    blocks: int = 0
    others_s: dict[str, float] = {}
    computing_s: float | None = None


class _Explanation(msgspec.Struct):
    found: dict[str, int]
    missed: dict[str, int]
    lost_s: dict[str, float] = {}
    waited_s: dict[str, float] = {}
    weighed: list[_Weighed] = []


@dataclass(frozen=True, slots=True)
class Explanations:
    """The sums of a trace's explanations."""

    trace: Trace
    explained: int
    """Number of requests with an explanation. The others were never admitted, or the recording ended earlier."""
    tokens: int
    """Number of prompt tokens of the explained requests: ``found`` and ``missed`` together."""
    found: dict[str, int]
    """Number of found tokens by source: the GPU, host memory, tiers."""
    missed: dict[str, int]
    """Number of computed tokens by cause, the largest first."""
    lost_s: dict[str, float]
    """For causes with a time: the seconds between the loss and the miss, as the mean over tokens."""
    waits_s: dict[str, list[float]]
    """For each reason to wait, the seconds of each request that waited."""
    weighed_s: dict[str, dict[str, list[float]]]
    """For each tier that supplied blocks, and for each possible source of these blocks (including ``computing``): the
    expected seconds of each request."""
    course: list[tuple[float, dict[str, int]]]
    """For each interval: its end in seconds, and its tokens by source. Computed tokens have the source ``computed``."""
    read_blocks_per_s: float | None
    """How fast the server read from the tiers below host memory, by its own estimates: the median. ``None`` if it made
    none."""
    hints: dict[str, int]
    """Number of explained requests by their client's hint about the next use, without requests that gave no hint."""
    hinted_tokens: int
    """Number of ``tokens`` that belong to requests with a hint."""
    hinted_found: int
    """Number of these tokens that were found."""
    machine: Machine | None

    @property
    def hints_text(self) -> str:
        """One sentence that compares requests with and without hints; empty if no client gave a hint."""
        if not self.hints:
            return ""
        by_hint = ", ".join(f"{name} {count:,}" for name, count in sorted(self.hints.items()))
        others, found = self.tokens - self.hinted_tokens, sum(self.found.values()) - self.hinted_found
        rest = f", and of the others' {100 * found / others:.1f}%" if others else ""
        return (
            f"Clients gave hints with {sum(self.hints.values()):,} requests ({by_hint}). Of their tokens "
            f"{100 * self.hinted_found / max(self.hinted_tokens, 1):.1f}% were found{rest}."
        )

    @property
    def avoidable(self) -> int:
        """Number of computed tokens that were missing for an avoidable cause."""
        return sum(
            tokens for cause, tokens in self.missed.items() if (miss := Miss.of(cause)) is None or miss.is_avoidable
        )


def read_explanations(path: Path) -> Explanations:
    """Return the sums of the explanations in a file that ``record_trace`` wrote.

    Raises ``TraceError`` for a file without explanations, and for one whose tokens do not add up.
    """
    timed: list[tuple[float, _Explanation]] = []
    hinted: list[tuple[str, _Explanation]] = []
    machines: list[Machine | None] = []

    def note(number: int, line: Line) -> None:
        try:
            machines.append(msgspec.convert(line.machine, Machine | None))
            each = msgspec.convert(line.story, _Explanation | None)
        except msgspec.ValidationError as exc:
            raise TraceError(
                f"{path}, line {number}: this is not a line that record_trace of this version writes: {exc}."
            ) from exc
        if each is None:
            return
        if sum(each.found.values()) + sum(each.missed.values()) != line.input_length:
            raise TraceError(
                f"{path}, line {number}: its explanation does not cover the tokens of its prompt, so the line "
                "is damaged."
            )
        timed.append(((line.timestamp or 0.0) / 1000, each))
        if line.next_use:
            hinted.append((line.next_use, each))

    trace = load_trace(path, note=note)
    if not timed:
        raise TraceError(
            f"{path} contains no explanations of hits and misses; record the trace again with record_trace of "
            "this version."
        )
    found: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    lost: dict[str, float] = defaultdict(float)
    waits: dict[str, list[float]] = defaultdict(list)
    weighed: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, each in timed:
        for where, tokens in each.found.items():
            found[where] += tokens
        for cause, tokens in each.missed.items():
            missed[cause] += tokens
            if cause in each.lost_s:
                lost[cause] += tokens * each.lost_s[cause]
        for phase, seconds in each.waited_s.items():
            waits[phase].append(seconds)
        for one in each.weighed:
            computing_s = {} if one.computing_s is None else {"computing": one.computing_s}
            for where, seconds in {one.tier: one.expected_s, **one.others_s, **computing_s}.items():
                weighed[one.tier][where].append(seconds)
    return Explanations(
        trace=trace,
        explained=len(timed),
        tokens=found.total() + missed.total(),
        found=dict(found),
        missed=dict(missed.most_common()),
        lost_s={cause: total / missed[cause] for cause, total in lost.items()},
        waits_s=waits,
        weighed_s=weighed,
        course=_course(timed),
        read_blocks_per_s=_median(
            one.blocks / one.expected_s for _, each in timed for one in each.weighed if one.blocks and one.expected_s
        ),
        hints=dict(Counter(next_use for next_use, _ in hinted)),
        hinted_tokens=sum(sum(each.found.values()) + sum(each.missed.values()) for _, each in hinted),
        hinted_found=sum(sum(each.found.values()) for _, each in hinted),
        machine=machines[0],
    )


def _median(values: Iterable[float]) -> float | None:
    found = [*values]
    return median(found) if found else None


def _course(timed: Sequence[tuple[float, _Explanation]]) -> list[tuple[float, dict[str, int]]]:
    end_s = max(timed[-1][0], 1e-3)
    course = [Counter[str]() for _ in range(_INTERVALS)]
    for at_s, each in timed:
        tokens = course[min(int(at_s / end_s * _INTERVALS), _INTERVALS - 1)]
        for where, count in (*each.found.items(), ("computed", sum(each.missed.values()))):
            tokens[where] += count
    return [(end_s * (at + 1) / _INTERVALS, dict(tokens)) for at, tokens in enumerate(course)]


# ------------------------------------------------------------------------------------------------------------ what if


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change, and its effect on the same trace according to the simulator."""

    change: str
    config: SimConfig
    result: Result
    more_tokens: int
    """Number of prompt tokens found in addition to the original configuration."""
    saved_s: float
    """Seconds of prefill for these tokens."""


def base_config(
    machine: Machine | None,
    *,
    disk_bytes: int | None = None,
    gpu_blocks: int = 0,
    footprint_blocks: int,
    prefill_tokens_per_s: float,
    disk_read_bytes_per_s: float | None = None,
) -> SimConfig:
    """Return the machine that recorded the trace, for the simulator. Arguments override the trace.

    The tiers below host memory become one disk, as large as all of them together. If one of them is unlimited, the disk
    holds the ``footprint_blocks`` of the trace. Raises ``ConfigError`` if a size, such as the size of a Redis, is not
    known.
    """
    if machine is None:
        raise ConfigError("The trace lacks its first line, which contains the server's sizes; use the whole file.")
    cascade = machine.cascade
    if disk_bytes is None and (name := machine.tier_of_unknown_size) is not None:
        raise ConfigError(
            f"The trace does not contain the size of its {name!r} tier; give --disk, the total size of all tiers below "
            "host memory."
        )
    if disk_bytes is None and machine.has_unbounded_tier:
        disk_blocks = max(footprint_blocks, 1)
        cascade = cascade or default_cascade(None, machine.cpu_bytes)
    else:
        bounds = [tier.max_bytes or 0 for tier in machine.tiers] if disk_bytes is None else [disk_bytes]
        disk_blocks = sum(bounds) // machine.block_bytes
    return SimConfig(
        cpu_blocks=max(machine.cpu_bytes // machine.block_bytes, 1),
        block_bytes=machine.block_bytes,
        gpu_blocks=gpu_blocks,
        disk_blocks=disk_blocks,
        prefill_tokens_per_s=prefill_tokens_per_s,
        disk_read_bytes_per_s=disk_read_bytes_per_s or USUAL.disk_read_bytes_per_s,
        cascade=cascade if disk_blocks else None,
        policy=machine.policy if machine.policy in POLICIES.names() else DEFAULTS.eviction_policy,
        load_policy=machine.load_policy,
        store_threshold=machine.store_threshold,
    )


def what_ifs(base: SimConfig, *, has_unbounded_disk: bool = False) -> list[tuple[str, SimConfig]]:
    """Return the changes to try, each with its configuration. The first one is no change. An unlimited disk is not
    enlarged."""
    changes = [
        ("as it was, unbounded disk" if has_unbounded_disk else "as it was", base),
        ("twice the host memory", replace(base, cpu_blocks=2 * base.cpu_blocks)),
        ("four times the host memory", replace(base, cpu_blocks=4 * base.cpu_blocks)),
    ]
    if has_unbounded_disk:
        pass
    elif base.disk_blocks:
        changes.append(("twice the disk", replace(base, disk_blocks=2 * base.disk_blocks)))
    else:
        changes.append(("a disk of 10x the memory", replace(base, disk_blocks=10 * base.cpu_blocks)))
    changes += [
        (f"policy {name}", replace(base, policy=name)) for name in ("lru", "arc", "density") if name != base.policy
    ]
    for threshold in (1, 2):
        if threshold != max(base.store_threshold, 1):
            changes.append((f"store_threshold {threshold}", replace(base, store_threshold=threshold)))
    return changes


def ask_what_if(
    trace: Trace,
    changes: Sequence[tuple[str, SimConfig]],
    processes: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> list[WhatIf]:
    """Simulate ``changes``, and return the results: first the original configuration, then the changes in descending
    order of their savings."""
    report = sweep(trace, [config for _, config in changes], processes, progress)
    rate = changes[0][1].prefill_tokens_per_s

    base = report.results[0].hit_tokens
    asked = [
        WhatIf(change, config, result, result.hit_tokens - base, (result.hit_tokens - base) / rate)
        for (change, config), result in zip(changes, report.results, strict=True)
    ]
    return [asked[0], *sorted(asked[1:], key=lambda each: -each.more_tokens)]


WORTH_IT = 0.01
"""The share of the prompt tokens that a change must find to be recommended."""
_ENOUGH = 0.95
"""Of the changes that find at least so much of what the best one finds, the cheapest is recommended."""


def recommendation(asked: Sequence[WhatIf], tokens: int) -> str:
    """Return a sentence that recommends one change or none. ``tokens`` is the number of all prompt tokens."""
    found = [each for each in asked[1:] if each.more_tokens >= WORTH_IT * tokens]
    if not found:
        return "Change nothing: no change finds 1% more of the prompt tokens."
    was_s = asked[0].result.ttft_s
    harmless = [each for each in found if all(each.result.ttft_s[name] <= was_s[name] for name in ("mean", "p90"))]
    if not harmless:
        return "Change nothing: changes that find more make first tokens later, because loading takes long."
    most = max(each.more_tokens for each in harmless)
    enough = [each for each in harmless if each.more_tokens >= _ENOUGH * most]
    best = min(enough, key=lambda each: (Prices().of_tiers(each.config), -each.more_tokens))
    config, base = best.config, asked[0].config
    sets = []
    if config.cpu_blocks != base.cpu_blocks:
        sets.append(f"cpu_bytes_to_use: {exact_size(config.cpu_bytes)}")
    if config.disk_blocks != base.disk_blocks:
        sets.append(f"a disk tier with max_bytes: {exact_size(config.disk_bytes)}")
    if config.policy != base.policy:
        sets.append(f"eviction_policy: {config.policy}")
    if config.store_threshold != base.store_threshold:
        sets.append(f"store_threshold: {config.store_threshold}")
    share = 100 * best.more_tokens / max(tokens, 1)
    return f"Set {', '.join(sets)} ({best.change}). It finds {share:.1f}% more of the prompt tokens."


def where_names(found: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the keys of ``found`` in the order of display, each with its name for people."""
    words = {"device": "on the device", HOST: "host memory"}
    order = ["device", HOST, *sorted(found.keys() - {"device", HOST})]
    return [(key, words.get(key, key)) for key in order if key in found]
