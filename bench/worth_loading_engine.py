# SPDX-License-Identifier: Apache-2.0
"""Compare the reference engine's time to first token with a throttled disk, by ``load_policy``, to that without a disk.

Requests arrive in bursts. Each request is a document and a question. Every engine serves a burst before the next burst
starts: an engine without a disk, a second one like it, whose difference from the first is the noise, and for each speed
of the disk one engine with ``"always"`` and one with ``"cost"``. Speeds are multiples of the engine's own speed, in
bytes of KV computed per second. Device and host memory hold some of the documents, and the disk holds all of them.
Every engine has seen each document twice before it is measured.

The model is small, and its forward pass sleeps to reach ``TOKENS_PER_S``, like a CPU that waits for its accelerator. So
other work on the machine hardly changes the figures. ::

    python -m bench.worth_loading_engine [--requests N] [--seed N]

prints the whole table. ``KVOFFLOAD_BENCH_DIR`` chooses the disk.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.core import Row
from bench.stores import Link, Linked
from kvoffload.config import parse_config
from kvoffload.engines.reference import Engine, EngineOptions, SamplingParams, build_random_model
from kvoffload.tiering.options import STORES
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk.options import DiskOptions

TOKENS_PER_S = 2500
SPEEDS = (0.25, 1.0, 4.0)
BUSY = 0.8
"""The share of a burst's time for which an engine without any hits computes."""
BURST = 6
QUANTILES = (50, 90, 99)
BLOCK_TOKENS = 16
LAYERS = 8
KV_BYTES_PER_TOKEN = LAYERS * 2 * 2 * 64 * 4
DOCUMENTS, SHORTEST, LONGEST = 24, 256, 1024
DEVICE_TOKENS, HOST_TOKENS = 4096, 4096
PHASE_S, SETTLED_S = 90.0, 30.0
"""The duration of a speed, and the time after a change of speed within which the bounds must hold again."""


LINKS: dict[str, Link] = {}
"""The links by tier name."""


class LinkedDiskOptions(DiskOptions, frozen=True, kw_only=True):
    """``{"type": "linked_disk", ...}``: a local disk behind the link with the tier's name."""

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        return Linked(super().open_store(block_bytes, namespace), LINKS[self.label])


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a burst."""

    at_s: float
    prompt: list[int]


@dataclass(slots=True)
class Way:
    """One engine and its times to first token."""

    name: str
    engine: Engine
    first_tokens_s: list[float] = field(default_factory=list)

    def serve(self, asks: Sequence[Ask]) -> None:
        """Serve a burst, and record the time from each request's arrival to its first token."""
        start_s = time.perf_counter()
        left, requests = list(asks), []
        while left or self.engine.has_requests:
            while left and time.perf_counter() - start_s >= left[0].at_s:
                ask = left.pop(0)
                request = self.engine.add_request(ask.prompt, SamplingParams(max_tokens=2))
                requests.append((start_s + ask.at_s, request))
            if self.engine.has_requests:
                self.engine.step()
            elif left:
                time.sleep(max(0.0, start_s + left[0].at_s - time.perf_counter()))
        for at_s, request in requests:
            assert request.first_token_s is not None
            self.first_tokens_s.append(request.first_token_s - at_s)

    def quantiles(self) -> list[float]:
        return quantiles_of(self.first_tokens_s)


def quantiles_of(times_s: Sequence[float]) -> list[float]:
    return [float(np.percentile(times_s, share)) for share in QUANTILES]


class Workload:
    """Documents that are asked about repeatedly, some of them more often than others."""

    def __init__(self, seed: int, scale: float, tokens_per_s: float) -> None:
        self._chance = random.Random(seed)
        self._tokens_per_s = tokens_per_s
        lengths = np.linspace(SHORTEST, LONGEST, DOCUMENTS).astype(int)
        self.documents = [self._tokens(int(length * scale)) for length in self._chance.sample(list(lengths), DOCUMENTS)]

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(2, 500) for _ in range(count)]

    def burst(self) -> list[Ask]:
        weights = [1 / (rank + 3) for rank in range(DOCUMENTS)]
        asks, at_s = [], 0.0
        for document in self._chance.choices(self.documents, weights, k=BURST):
            asks.append(Ask(at_s, document + self._tokens(8)))
            at_s += self._chance.expovariate(BUSY) * len(document) / self._tokens_per_s
        return asks


@contextmanager
def ways(speeds: Sequence[float]) -> Iterator[list[Way]]:
    """Yield the engines to compare."""
    import torch

    torch.set_num_threads(1)
    model = build_random_model(layers=LAYERS, hidden=128, heads=2, kv_heads=2, vocab=1024, context_tokens=2 * LONGEST)
    Stretched(model, TOKENS_PER_S)
    options = EngineOptions(DEVICE_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS, max_batch_tokens=128, max_requests=BURST)
    common = {"cpu_bytes_to_use": HOST_TOKENS * KV_BYTES_PER_TOKEN, "eviction_policy": "lru"}
    STORES.register("linked_disk", LinkedDiskOptions)
    with ExitStack() as stack:
        place = tempfile.TemporaryDirectory(dir=os.environ.get("KVOFFLOAD_BENCH_DIR"))
        directory = Path(stack.enter_context(place))

        def make(name: str, **config: Any) -> Way:
            return Way(name, stack.enter_context(Engine(model, options, parse_config({**common, **config}))))

        found = [make("no disk"), make("no disk, again")]
        for speed in speeds:
            for policy in ("always", "cost"):
                name = f"{policy} {speed:g}"
                LINKS[name] = Link(speed * TOKENS_PER_S * KV_BYTES_PER_TOKEN)
                path = directory / name.replace(" ", "-")
                tier = {"type": "linked_disk", "name": name, "path": str(path), "max_bytes": "1GiB"}
                found.append(make(name, spec_name="TieringOffloadingSpec", secondary_tiers=[tier], load_policy=policy))
        yield found


class Stretched:
    """Makes a model's forward pass take as long as it would at some speed, by sleeping."""

    def __init__(self, model: Any, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s
        began_s: list[float] = []

        def begin(module: Any, args: Any, kwargs: Any) -> None:
            began_s.append(time.perf_counter())

        def end(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            num_tokens = (args[0] if args else kwargs["input_ids"]).numel()
            time.sleep(max(0.0, began_s.pop() + num_tokens / self.tokens_per_s - time.perf_counter()))

        model.register_forward_pre_hook(begin, with_kwargs=True)
        model.register_forward_hook(end, with_kwargs=True)


def warm_up(found: Sequence[Way], workload: Workload) -> None:
    for _ in range(2):
        for document in workload.documents:
            for way in found:
                way.serve([Ask(0.0, document)])
    for way in found:
        way.first_tokens_s.clear()


@dataclass(frozen=True, slots=True)
class Compared:
    """TTFT quantiles at one speed of the disk."""

    speed: str
    without: list[float]
    again: list[float]
    always: list[float]
    cost: list[float]

    @property
    def ratios(self) -> list[float]:
        return [cost / without for cost, without in zip(self.cost, self.without, strict=True)]

    @property
    def noise(self) -> list[float]:
        return [again / without for again, without in zip(self.again, self.without, strict=True)]

    @property
    def gains(self) -> list[float]:
        """The gain of ``"cost"`` as a share of the gain of ``"always"``, where the latter is at least 5%."""
        both = zip(self.without, self.always, self.cost, strict=True)
        return [(without - cost) / (without - always) for without, always, cost in both if always < 0.95 * without]


def compare(short: bool, num_requests: int, seed: int, speeds: Sequence[float] = SPEEDS) -> list[Compared]:
    """Compare the ways with speeds that last for the whole run."""
    speeds = speeds[-1:] if short else speeds
    with ways(speeds) as found:
        workload = Workload(seed, 0.1 if short else 1.0, TOKENS_PER_S)
        if not short:
            warm_up(found, workload)
        order = random.Random(seed)
        for _ in range(-(-num_requests // BURST)):
            burst = workload.burst()
            for way in order.sample(found, len(found)):
                way.serve(burst)
        by_name = {way.name: way.quantiles() for way in found}
    return [
        Compared(
            f"{speed:g}", by_name["no disk"], by_name["no disk, again"], by_name[f"always {speed:g}"],
            by_name[f"cost {speed:g}"],
        )
        for speed in speeds
    ]  # fmt: skip


def compare_changing(short: bool, seed: int) -> list[Compared]:
    """Compare the ways with a disk of 4 times the engine's speed that temporarily slows down to an eighth of it.

    Requests that arrive within ``SETTLED_S`` after a change are left out.
    """
    phases = (("4, then less", 4.0), ("1/8 for a while", 0.125), ("4 again", 4.0))
    phase_s, settled_s = (0.0, 0.0) if short else (PHASE_S, SETTLED_S)
    compared = []
    with ways([4.0]) as found:
        workload = Workload(seed, 0.1 if short else 1.0, TOKENS_PER_S)
        if not short:
            warm_up(found, workload)
        order = random.Random(seed)
        for name, speed in phases:
            for link in ("always 4", "cost 4"):
                LINKS[link].bytes_per_s = speed * TOKENS_PER_S * KV_BYTES_PER_TOKEN
            for way in found:
                way.first_tokens_s.clear()
            begin_s = time.perf_counter()
            while True:
                burst = workload.burst()
                is_settled = time.perf_counter() >= begin_s + settled_s
                for way in order.sample(found, len(found)):
                    way.serve(burst)
                    if not is_settled:
                        way.first_tokens_s.clear()
                if is_settled and time.perf_counter() >= begin_s + phase_s:
                    break
            compared.append(Compared(name, *(way.quantiles() for way in found)))
    return compared


def run(short: bool) -> list[Row]:
    num_requests = BURST if short else 300
    compared = [*compare(short, num_requests, seed=1), *compare_changing(short, seed=2)]
    rows = []
    for each in compared:
        name, median_ms = f"disk, by the engine's speed: {each.speed}", each.cost[0] * 1e3
        noise = ", ".join(f"{ratio:.2f}" for ratio in each.noise)
        text = f"no disk, worst quantile (another without: {noise})"
        rows.append(Row(name, median_ms, "ms", text, max(each.ratios), "<= 1.05"))
        if each.speed.startswith("4") and each.gains:
            gain = max(min(each.gains), 1e-3)
            rows.append(Row(name, median_ms, "ms", "gain of always, worst", gain, ">= 0.9"))
    return rows


def table(compared: Sequence[Compared]) -> str:
    lines = ["| disk | no disk | `always` | `cost` | `cost` / no disk | share of the gain | noise |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for each in compared:
        cells = [" / ".join(f"{s * 1e3:.0f}" for s in times) for times in (each.without, each.always, each.cost)]
        cells += [" / ".join(f"{value:.2f}" for value in values) for values in (each.ratios, each.gains, each.noise)]
        lines.append(f"| {each.speed} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare load policies on the reference engine.")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", choices=("steady", "changing", "both"), default="both")
    parser.add_argument("--speeds", type=float, nargs="+", default=SPEEDS, help="Steady speeds of the disk.")
    options = parser.parse_args()
    found = [] if options.part == "changing" else compare(False, options.requests, options.seed, options.speeds)
    if options.part != "steady":
        found += compare_changing(False, options.seed)
    print(table(found))
