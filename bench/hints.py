# SPDX-License-Identifier: Apache-2.0
"""Measure the value of clients' hints for ``density``, with true hints and every kind of wrong hints.

Each result is compared with the same cell without hints. A cell is a trace with a cache that holds a share of its
distinct blocks. Replays are flat (``bench.policy_replay``), so the hit rates are the same on every machine.

``KVOFFLOAD_BENCH_TRACES`` is a folder with traces (default: ``../shared/traces``), ``KVOFFLOAD_BENCH_REQUESTS`` is the
most requests to use from each trace, and ``KVOFFLOAD_BENCH_ONLY`` is a word that a trace's name must contain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bench.core import TRACES, Row
from bench.policy_replay import replay_policy
from kvoffload.base import NextUse
from kvoffload.sim.hints import true_hints, wrong_hints
from kvoffload.sim.optimum import optimum
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace
from kvoffload.sim.trace_files import load_trace

PERCENT = (1, 2, 5, 10)
FILES = ("mooncake_conversation", "weka_cc_64_s60", "lmcache_agent_b256")
MADE_UP = (("tools", 1), ("assistants", 5), ("agents", 1))
"""The kinds and seeds of synthetic traces."""
SEEDS = (1, 2, 3)
"""The seeds of shuffled hints."""
POINTS = 1.0
"""The most percentage points of hit rate that hints of any kind may cost."""
_REVERSED = np.array([NextUse.UNKNOWN, NextUse.NEVER, NextUse.LATER, NextUse.SOON], np.int8)


def traces(short: bool) -> Iterator[Trace]:
    most = int(os.environ.get("KVOFFLOAD_BENCH_REQUESTS", 1 << 30))
    only = os.environ.get("KVOFFLOAD_BENCH_ONLY", "")
    for path in () if short else (TRACES / f"{name}.jsonl.zst" for name in FILES):
        if only in path.name and path.exists():
            yield load_trace(path, max_requests=most)
    for kind, seed in MADE_UP[:1] if short else MADE_UP:
        if short or only in f"synthetic-{kind}-{seed}":
            yield synthesize(kind, 100 if short else min(4000, most), seed)


def variants(true: Trace) -> Iterator[tuple[str, Trace]]:
    hints = true.next_uses
    assert hints is not None
    yield "true", true
    yield "30 % wrong", wrong_hints(true, 0.3)
    yield "all reversed", _with(true, _REVERSED[hints])
    yield "reversed midway", _with(true, np.where(np.arange(len(hints)) < len(hints) // 2, hints, _REVERSED[hints]))
    for seed in SEEDS:
        yield f"shuffled {seed}", _with(true, np.random.default_rng(seed).permutation(hints))


def run(short: bool) -> list[Row]:
    rows: list[Row] = []
    for trace in traces(short):
        true = true_hints(trace)
        percents = PERCENT[-1:] if short else PERCENT
        capacities = [max(round(trace.num_unique * percent / 100), 1) for percent in percents]
        for percent, capacity, best in zip(percents, capacities, optimum(trace, capacities)):
            without = _rate(trace, capacity)
            bound = 100 * best / trace.num_accesses
            for name, hinted in variants(true):
                rate = _rate(hinted, capacity)
                closed = 100 * (rate - without) / max(bound - without, 1e-9)
                rows.append(
                    Row(
                        f"{trace.name}, {percent} %, {name}",
                        rate,
                        "% hits",
                        f"without {without:.2f}: {rate - without:+.2f}; optimum {bound:.2f}: {closed:.0f} % closed",
                        rate / without,
                        f">= {1 - POINTS / without:.4f}",
                    )
                )
    return rows


def _with(trace: Trace, hints: npt.NDArray[np.int8]) -> Trace:
    return replace(trace, next_uses=hints)


def _rate(trace: Trace, capacity: int) -> float:
    return 100 * replay_policy(trace, "density", capacity).hit_rate
