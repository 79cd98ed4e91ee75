# SPDX-License-Identifier: Apache-2.0
"""Compare the time to first token with a disk, by ``load_policy``, with the same machine without a disk.

The simulator runs the shared traces with disks that read 300 MB/s to 20 GB/s, a prefill of 10,000 and 60,000 tokens per
second at 128 KiB of KV per token (1.3 and 7.9 GB/s of KV), and arrival rates at which the machine without a disk is
busy 30% and 85% of the time. Host memory holds 2% of the trace's blocks, and the disk holds 20%. In a separate run,
another program temporarily uses most of the disk's bandwidth.

``KVOFFLOAD_BENCH_TRACES`` is a folder with traces (default: ``../shared/traces``). Without it, traces are synthetic.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bench.core import Row, trace_of
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import SimConfig
from kvoffload.sim.result import Result
from kvoffload.sim.trace import Trace

KV_BYTES_PER_TOKEN = 128 << 10
DISKS_GB_S = (0.3, 1.0, 5.0, 20.0)
PREFILLS = (10_000.0, 60_000.0)
LOADS = (0.3, 0.85)
"""The shares of the time for which the machine without a disk is busy."""
QUANTILES = ("p50", "p90", "p99")
SETTLED_S = 30.0
"""The time after a change of speed within which the bounds must hold again."""


@dataclass(frozen=True, slots=True)
class Source:
    trace: str
    synthetic: str
    """The kind of the synthetic trace that replaces a missing trace."""
    max_requests: int


SOURCES = (
    Source("mooncake_conversation", "chat", 3000),
    Source("weka_cc_64_s60", "agents", 400),
    Source("lmcache_agent_b256", "agents", 1619),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """A trace with an arrival rate, and a machine without a disk."""

    trace: Trace
    hashes: list[bytes]
    config: SimConfig
    busy: float

    @property
    def name(self) -> str:
        speed = f"{self.config.prefill_tokens_per_s / 1000:g}k tokens/s"
        return f"{self.trace.name}, {speed}, {100 * self.busy:.0f} % busy"

    def run(self, **changes: object) -> Result:
        return simulate(self.trace, replace(self.config, **changes), hashes=self.hashes)  # type: ignore[arg-type]

    def with_disk(self, gb_per_s: float, load_policy: str) -> Result:
        return self.run(
            disk_blocks=max(1, self.trace.num_unique // 5),
            disk_read_bytes_per_s=gb_per_s * 1e9,
            load_policy=load_policy,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """The results of the same requests without a disk, with ``"always"`` and with ``"cost"``."""

    machine: Machine
    gb_per_s: float
    without: Result
    always: Result
    cost: Result

    @property
    def is_faster_than_computing(self) -> bool:
        return self.gb_per_s * 1e9 > self.machine.config.prefill_tokens_per_s * KV_BYTES_PER_TOKEN

    @property
    def worst_ratio(self) -> float:
        """The largest ratio of a TTFT quantile with the disk to the same quantile without it."""
        return max(self.cost.ttft_s[at] / self.without.ttft_s[at] for at in QUANTILES)

    @property
    def gain(self) -> float | None:
        """The least share, over the quantiles, of the gain of ``"always"``, or ``None`` if that gain is below 1%."""
        shares = []
        for at in QUANTILES:
            without, always, cost = (run.ttft_s[at] for run in (self.without, self.always, self.cost))
            if always < 0.99 * without:
                shares.append((without - cost) / (without - always))
        return min(shares) if shares else None


def machines(short: bool) -> Iterator[Machine]:
    for source in SOURCES[-1:] if short else SOURCES:
        trace = trace_of(source.trace, source.synthetic, source.max_requests, short)
        config = SimConfig(max(2, trace.num_unique // 50), KV_BYTES_PER_TOKEN * trace.block_tokens, policy="lru")
        for prefill in PREFILLS[-1:] if short else PREFILLS:
            served = replace(config, prefill_tokens_per_s=prefill)
            for busy in LOADS[:1] if short else LOADS:
                yield _at_load(trace, served, busy)


def _at_load(trace: Trace, config: SimConfig, busy: float) -> Machine:
    """Return a machine with this load.

    One run suffices, because a request's compute time does not depend on the rate.
    """
    hashes = trace.hashes()
    sparse = trace.stretched(1e6)
    used_s = simulate(sparse, config, hashes=hashes).utilisation * float(sparse.times_s[-1] - sparse.times_s[0])
    stretch = used_s / busy / max(float(trace.times_s[-1] - trace.times_s[0]), 1e-9)
    return Machine(trace.stretched(stretch), hashes, config, busy)


def compare(short: bool) -> Iterator[Compared]:
    for machine in machines(short):
        without = machine.run()
        for speed in DISKS_GB_S[-1:] if short else DISKS_GB_S:
            always, cost = machine.with_disk(speed, "always"), machine.with_disk(speed, "cost")
            yield Compared(machine, speed, without, always, cost)


def run(short: bool) -> list[Row]:
    rows = []
    for each in compare(short):
        name = f"{each.machine.name}, disk of {each.gb_per_s:g} GB/s"
        median_s = each.cost.ttft_s["p50"]
        rows.append(Row(name, median_s, "s", "no disk, worst quantile", each.worst_ratio, "<= 1.05"))
        if each.is_faster_than_computing and each.gain is not None:
            rows.append(Row(name, median_s, "s", "gain of always, worst", each.gain, ">= 0.9"))
    return [*rows, *_neighbour(short)]


def _neighbour(short: bool) -> list[Row]:
    """Test a disk of 20 GB/s of which another program leaves only a fiftieth for a third of the time.

    Requests that arrive within ``SETTLED_S`` after a change are left out.
    """
    machine = next(iter(machines(short)))
    trace, config = machine.trace, machine.config
    first_s, last_s = float(trace.times_s[0]), float(trace.times_s[-1])
    begin_s, end_s = first_s + (last_s - first_s) / 3, first_s + 2 * (last_s - first_s) / 3
    disk = replace(config, disk_blocks=max(1, trace.num_unique // 5), disk_read_bytes_per_s=20e9)
    slow = replace(disk, disk_slow=((begin_s, end_s, 0.02),))
    without, calm, cost, always = (
        _first_tokens(machine, each) for each in (config, disk, slow, replace(slow, load_policy="always"))
    )
    times_s = trace.times_s
    phases = {
        "before": times_s < begin_s,
        "beside a neighbour": (times_s >= begin_s + SETTLED_S) & (times_s < end_s),
        "after": times_s >= end_s + SETTLED_S,
    }
    rows = []
    for phase, chosen in phases.items():
        if not chosen.any():
            continue
        for reference, than in (("no disk", without), ("a disk of its own", calm), ("always", always)):
            ratio = max(_quantile(cost, chosen, share) / _quantile(than, chosen, share) for share in (50, 90, 99))
            name = f"{machine.name}, disk of 20 GB/s, {phase}"
            target = "<= 1.05" if reference == "no disk" else ""
            rows.append(Row(name, statistics.median(cost[chosen]), "s", f"{reference}, worst", ratio, target))
    return rows


def _first_tokens(machine: Machine, config: SimConfig) -> np.ndarray:
    found: dict[int, float] = {}
    simulate(machine.trace, config, hashes=machine.hashes, on_request=lambda n, _, __, at_s: found.update({n: at_s}))
    return np.array([found[n] for n in range(len(found))]) - machine.trace.times_s


def _quantile(values: np.ndarray, chosen: np.ndarray, share: float) -> float:
    return float(np.percentile(values[chosen], share))
