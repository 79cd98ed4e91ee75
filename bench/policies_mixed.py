# SPDX-License-Identifier: Apache-2.0
"""Compare the default policy's hit rates on mixed traffic with the better of LRU and ARC on the same cell.

A cell is a trace with a cache that holds a share of its distinct blocks. Replays are flat (``bench.policy_replay``), so
the figures are the same on every machine.

The policy's two constants, ``horizon`` and ``prior``, were chosen with the tuning half of the seeds. The first rows
show each choice on both halves, and the other rows show each cell of the other half.

``KVOFFLOAD_BENCH_TRACES`` is a folder with traces (default: ``../shared/traces``). If it exists, some of its traces are
also merged in pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from bench.core import TRACES, Row
from bench.policy_replay import replay_policy
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.cpu.policies.density import DensityCachePolicy
from kvoffload.cpu.policies.density.model import HitDensity
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import NO_SESSION, Trace, numbered
from kvoffload.sim.trace_files import load_trace

TUNING, HELD_OUT = (1, 2, 3, 4), (5, 6, 7, 8)
PERCENT = (1, 2, 5, 10, 20, 35, 50)
PERCENT_OF_CHOICES = (2, 10, 35)
HORIZONS = (12, 32)
PRIORS = (5.0, 15.0)
PAIRS = (
    (("mooncake_conversation", 4000), ("lmcache_agent_b256", 1619)),
    (("mooncake_conversation", 1000), ("weka_cc_64_s60", 200)),
)
"""Pairs of traces whose first requests are merged."""
POINTS = 0.5
"""The most percentage points by which the policy may be below the better of LRU and ARC."""


def assistants(seeds: Sequence[int], short: bool) -> Iterator[tuple[str, Trace]]:
    """Yield two traces per seed. The crowded one has four times as many sessions at a time."""
    for seed in seeds:
        for form, sessions_per_s in (("", 0.25), (", crowded", 1.0)):
            trace = synthesize("assistants", 60 if short else 4000, seed, sessions_per_s)
            yield f"{trace.name}{form}", trace


def shuffled(left: Trace, right: Trace) -> Trace:
    """Return the requests of two traces, each spread evenly over the result. Only the order of block uses matters."""
    positions = np.concatenate([(np.arange(len(each)) + 0.5) / len(each) for each in (left, right)])
    order = np.argsort(positions, kind="stable").tolist()
    paths = [left.blocks(at) if at < len(left) else right.blocks(at - len(left)) + left.num_unique for at in order]
    counts = np.array([len(path) for path in paths], dtype=np.int64)
    return Trace(
        name=f"{left.name} + {right.name}",
        block_tokens=1,
        times_s=np.arange(len(order), dtype=np.float64),
        input_tokens=counts,
        output_tokens=np.ones(len(order), dtype=np.int64),
        sessions=np.full(len(order), NO_SESSION, dtype=np.int64),
        offsets=np.concatenate(([0], np.cumsum(counts))),
        ids=numbered(np.concatenate(paths)),
    )


def held_out(short: bool) -> Iterator[tuple[str, Trace]]:
    yield from assistants(HELD_OUT[:1] if short else HELD_OUT, short)
    for pair in () if short else PAIRS:
        paths = [TRACES / f"{name}.jsonl.zst" for name, _ in pair]
        if all(path.exists() for path in paths):
            left, right = (load_trace(path, max_requests=most) for path, (_, most) in zip(paths, pair, strict=True))
            trace = shuffled(left, right)
            yield trace.name, trace


def run(short: bool) -> list[Row]:
    choices = [(32, 5.0)] if short else list(product(HORIZONS, PRIORS))
    halves = {"tuning": TUNING[:1], "held out": HELD_OUT[:1]} if short else {"tuning": TUNING, "held out": HELD_OUT}
    rows = [_row_of_choice(*choice, half, seeds, short) for choice in choices for half, seeds in halves.items()]
    for name, trace in held_out(short):
        for percent in PERCENT[-2:] if short else PERCENT:
            capacity = _capacity(trace, percent)
            best = _best(trace, capacity)
            rate = 100 * replay_policy(trace, "density", capacity).hit_rate
            target = f">= {1 - POINTS / best:.4f}"
            rows.append(Row(f"{name}, {percent} %", rate, "% hits", f"better: {best:.2f}", rate / best, target))
    return rows


def _row_of_choice(horizon: int, prior: float, half: str, seeds: tuple[int, ...], short: bool) -> Row:
    """Return the row with the mean hit rate over the cells of one half of the seeds."""

    class Chosen(DensityCachePolicy):
        def __init__(self, cache_capacity: int) -> None:
            super().__init__(cache_capacity)
            self._model = HitDensity(cache_capacity, horizon, prior)
            self._forget_fronts()

    name = f"density, horizon {horizon}, prior {prior:g}"
    POLICIES.register(name, Chosen)
    try:
        rates, bests = [], []
        for _, trace in assistants(seeds, short):
            for percent in PERCENT_OF_CHOICES[-1:] if short else PERCENT_OF_CHOICES:
                capacity = _capacity(trace, percent)
                rates.append(100 * replay_policy(trace, name, capacity).hit_rate)
                bests.append(_best(trace, capacity))
    finally:
        POLICIES.unregister(name)
    mean, reference = float(np.mean(rates)), float(np.mean(bests))
    worst = min(rate - best for rate, best in zip(rates, bests, strict=True))
    against = f"better: {reference:.2f}; at worst {worst:+.2f}"
    return Row(f"{name}, {half}", mean, "% hits", against, mean / reference)


def _capacity(trace: Trace, percent: int) -> int:
    return max(trace.num_unique * percent // 100, 1)


_BESTS: dict[tuple[str, int], float] = {}


def _best(trace: Trace, capacity: int) -> float:
    """Return the hit rate of the better of LRU and ARC, in percent."""
    cell = f"{trace!r}", capacity
    if cell not in _BESTS:
        _BESTS[cell] = 100 * max(replay_policy(trace, policy, capacity).hit_rate for policy in ("lru", "arc"))
    return _BESTS[cell]
