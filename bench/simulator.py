# SPDX-License-Identifier: Apache-2.0
"""Block accesses per second of the simulator, and what a policy's choices cost beside LRU's."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace

from bench.core import Row, interleaved_medians
from bench.policy_replay import replay_policy
from kvoffload.base import OffloadKey
from kvoffload.sim.driver import SimConfig, simulate
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace


def run(short: bool) -> list[Row]:
    trace = synthesize("agents", 60 if short else 1500, seed=1, sessions_per_s=0.05)
    keys = trace.keys()
    capacity = trace.num_unique // 10
    config = SimConfig(cpu_blocks=capacity, block_bytes=2**20, policy="lru")
    tiers = replace(config, gpu_blocks=capacity // 2, disk_blocks=3 * capacity)
    bare, *others = interleaved_medians(
        lambda: _bare_lru(trace, keys, capacity),
        lambda: replay_policy(trace, "lru", capacity, keys=keys),
        lambda: replay_policy(trace, "arc", capacity, keys=keys),
        lambda: replay_policy(trace, "density", capacity, keys=keys),
        lambda: simulate(trace, config, keys=keys),
        lambda: simulate(trace, tiers, keys=keys),
        repeats=1 if short else 3,
    )
    names = ("flat, lru", "flat, arc", "flat, density", "driver, lru", "driver, lru, device and disk")
    rows = []
    for name, seconds in zip(names, others, strict=True):
        rate = trace.num_accesses / seconds
        if name.endswith(", lru"):
            rows.append(Row("simulator", name, rate, "accesses/s", "300,000 a second", rate / 300_000, ">= 1"))
        else:
            rows.append(Row("simulator", name, rate, "accesses/s", "an LRU on a bare OrderedDict", seconds / bare))
    return rows


def _bare_lru(trace: Trace, keys: list[OffloadKey], capacity: int) -> int:
    """The same walk with nothing around an ``OrderedDict``."""
    cache: OrderedDict[OffloadKey, int] = OrderedDict()
    hits = 0
    offsets = trace.offsets.tolist()
    for start, end in itertools.pairwise(offsets):
        path = [keys[number] for number in trace.ids[start:end].tolist()]
        for key in path:
            if key not in cache:
                break
            hits += 1
        for key in reversed(path):
            if key in cache:
                cache.move_to_end(key)
            else:
                if len(cache) == capacity:
                    cache.popitem(last=False)
                cache[key] = 0
    return hits
