# SPDX-License-Identifier: Apache-2.0
"""Throughput and time to first token (TTFT) of the reference engine under load, with a slow disk below host memory.

The offered load and the speed of the disk vary, both as multiples of the engine's own speed: its prompt tokens per
second, and the bytes of KV that it computes in a second. Each case compares an engine without a disk with engines that
load always, or by cost. ``optimum`` is the throughput of a fluid model in which the engine and the disk work side by
side without a pause: ``1 + speed of the disk`` times the throughput without a disk, or the load if that is less.

The model is small. Its forward pass sleeps until it has taken as long as it would at ``TOKENS_PER_S``, so other work on
the machine hardly changes the figures. ::

    python -m bench.busy [--loads L...] [--disks D...] [--requests N] [--seed N] [--json FILE]

prints the whole table, which takes half an hour. ``KVOFFLOAD_BENCH_DIR`` chooses the disk. ``bench.busy_vllm`` runs the
same cases on vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.core import Row
from bench.stores import Link
from bench.stretched import KV_BYTES_PER_TOKEN, LAYERS, LINKS, Ask, LinkedDiskOptions, Stretched
from kvoffload.config import parse_config
from kvoffload.metrics import HOST, Stats
from kvoffload.tiering.options import STORES

TOKENS_PER_S = 2000
LOADS = (0.5, 0.9, 1.2, 3.0)
DISKS = (0.3, 0.6, 1.0, 3.0)
SATURATED = 1.2
"""From this load on, throughput is judged. Below it, TTFT is."""
QUANTILES = (50, 90, 99)
DOCUMENTS, SHORTEST, LONGEST = 100, 256, 1024
HOST_TOKENS, DEVICE_TOKENS = 16_384, 8192
"""Host memory holds a quarter of the documents, and the engine's own cache holds an eighth."""
UNLIMITED = 1e12
_PROMPTS_TO_MEASURE = 15
"""Of two steps each, so that estimates of the engine's speed contain no step of the faster warm-up."""


@dataclass(frozen=True, slots=True)
class Case:
    """A load, a disk and a policy. Without a disk, ``disk`` is 0 and ``policy`` is ``none``."""

    load: float
    disk: float
    policy: str


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of one case."""

    tokens_per_s: float
    """Prompt tokens per second, as a multiple of the engine's own speed."""
    ttft_s: tuple[float, ...]
    """The mean and ``QUANTILES``."""
    loaded: tuple[float, float]
    """The shares of prompt tokens that came from host memory and from the disk."""


class Server(Protocol):
    """An engine whose speed, and that of its disk, can be set."""

    def set_speed(self, tokens_per_s: float, disk: float) -> None: ...

    def serve(self, asks: Sequence[Ask]) -> tuple[float, list[float]]:
        """Serve requests. Returns the seconds until the last one ended, and each one's seconds to its first token."""

    def loaded_tokens(self) -> tuple[float, float]:
        """Return the tokens loaded so far from blocks that were in host memory, and on the disk."""


def offloading(policy: str, directory: str) -> dict[str, Any]:
    """Return the configuration of one case, whose disk, if any, is behind the link ``disk``."""
    config: dict[str, Any] = {"cpu_bytes_to_use": HOST_TOKENS * KV_BYTES_PER_TOKEN, "eviction_policy": "lru"}
    if policy != "none":
        STORES.register("linked_disk", LinkedDiskOptions)
        LINKS["disk"] = Link(UNLIMITED)
        tier = {"type": "linked_disk", "name": "disk", "path": directory, "max_bytes": "2GiB"}
        config |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier], "load_policy": policy}
    return config


def set_disk(disk: float) -> None:
    LINKS.setdefault("disk", Link(UNLIMITED)).bytes_per_s = disk * TOKENS_PER_S * KV_BYTES_PER_TOKEN or UNLIMITED


def loaded_of(stats: Stats) -> tuple[float, float]:
    by_tier = {labels[1]: float(value) for labels, value in stats.items() if labels[0] == "tier_hit_tokens"}  # type: ignore[arg-type]
    return by_tier.pop(HOST, 0.0), sum(by_tier.values())


class ReferenceServer:
    """The reference engine."""

    def __init__(self, policy: str, directory: str) -> None:
        import torch

        from kvoffload.engines.reference import Engine, EngineOptions, build_random_model

        torch.set_num_threads(1)
        model = build_random_model(
            layers=LAYERS, hidden=128, heads=2, kv_heads=2, vocab=1024, context_tokens=2 * LONGEST
        )
        self._stretched = Stretched(model, UNLIMITED)
        options = EngineOptions(DEVICE_TOKENS // 16, 16, max_batch_tokens=512, max_requests=32)
        self.engine = Engine(model, options, parse_config(offloading(policy, directory)))

    def set_speed(self, tokens_per_s: float, disk: float) -> None:
        self._stretched.tokens_per_s = tokens_per_s
        set_disk(disk)

    def serve(self, asks: Sequence[Ask]) -> tuple[float, list[float]]:
        from kvoffload.engines.reference import SamplingParams

        start_s = time.perf_counter()
        coming, requests = list(asks)[::-1], []
        while coming or self.engine.has_requests:
            while coming and time.perf_counter() - start_s >= coming[-1].at_s:
                ask = coming.pop()
                requests.append((ask.at_s, self.engine.add_request(ask.prompt, SamplingParams(max_tokens=2))))
            if self.engine.has_requests:
                self.engine.step()
            else:
                time.sleep(max(0.0, start_s + coming[-1].at_s - time.perf_counter()))
        seconds = time.perf_counter() - start_s
        self.engine.drain()
        return seconds, [request.first_token_s - start_s - at_s for at_s, request in requests]  # type: ignore[operator]

    def loaded_tokens(self) -> tuple[float, float]:
        return loaded_of(self.engine.get_stats())


@contextmanager
def reference_server(policy: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVOFFLOAD_BENCH_DIR")) as directory:
        server = ReferenceServer(policy, directory)
        with server.engine:
            yield server


def measure(
    case: Case, make: Callable[[str], AbstractContextManager[Server]], num_requests: int, seed: int, scale: float = 1.0
) -> Served:
    """Serve every document once, measure both speeds with prompts that are not cached, and serve the requests."""
    chance = random.Random(seed)

    def tokens(count: float) -> list[int]:
        return [chance.randrange(2, 500) for _ in range(max(8, int(count * scale)))]

    documents = [tokens(chance.randrange(SHORTEST, LONGEST + 1)) for _ in range(max(4, int(DOCUMENTS * scale)))]
    with make(case.policy) as server:
        for document in documents:
            server.serve([Ask(0.0, document)])
        server.set_speed(TOKENS_PER_S, 0.0)  # so that the disk has written these prompts when the requests arrive
        for _ in range(_PROMPTS_TO_MEASURE):
            server.serve([Ask(0.0, tokens(LONGEST))])
        server.set_speed(TOKENS_PER_S, case.disk)
        asks, at_s = [], 0.0
        for document in chance.choices(documents, k=num_requests):
            asks.append(Ask(at_s, document + tokens(8)))
            at_s += chance.expovariate(1.0) * len(document) / TOKENS_PER_S / case.load
        before = server.loaded_tokens()
        seconds, ttft_s = server.serve(asks)
        loaded = server.loaded_tokens()
    num_tokens = sum(len(ask.prompt) for ask in asks)
    quantiles = [float(np.percentile(ttft_s, share)) for share in QUANTILES]
    host, disk = ((after - start) / num_tokens for after, start in zip(loaded, before, strict=True))
    return Served(num_tokens / seconds / TOKENS_PER_S, (float(np.mean(ttft_s)), *quantiles), (host, disk))


def cases(loads: Sequence[float], disks: Sequence[float]) -> list[Case]:
    return [
        case
        for load in loads
        for case in (
            Case(load, 0.0, "none"),
            *(Case(load, disk, policy) for disk in disks for policy in ("always", "cost")),
        )
    ]


def rows_of(found: dict[Case, Served]) -> list[Row]:
    """Judge ``cost``: under a saturating load by throughput, and below by TTFT."""
    rows = []
    for case, served in found.items():
        if case.policy != "cost":
            continue
        none = found[Case(case.load, 0.0, "none")]
        always = found[Case(case.load, case.disk, "always")]
        name = f"load {case.load:g}, disk {case.disk:g}"
        if case.load >= SATURATED:
            best, throughput = optimum(case.load, case.disk, none.tokens_per_s), served.tokens_per_s
            rows.append(Row(name, throughput, "x engine", f"optimum {best:.2f}", throughput / best, ">= 0.8"))
            text = f"always {always.tokens_per_s:.2f}"
            rows.append(Row(name, throughput, "x engine", text, throughput / always.tokens_per_s, ">= 1"))
        else:
            worst = max(own / without for own, without in zip(served.ttft_s, none.ttft_s, strict=True))
            rows.append(Row(name, served.ttft_s[0], "s TTFT", f"no disk {none.ttft_s[0]:.2f}", worst, "<= 1.05"))
    return rows


def optimum(load: float, disk: float, none: float) -> float:
    """Return the throughput of an engine and a disk that never pause. ``none`` is the throughput without a disk."""
    return max(min(none * (1 + disk), load), none)


def table(found: dict[Case, Served]) -> str:
    lines = ["| load | disk | policy | throughput | optimum | TTFT, mean / 50 / 90 / 99% (s) | host memory | disk |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case, served in found.items():
        none = found[Case(case.load, 0.0, "none")]
        ttft = " / ".join(f"{seconds:.2f}" for seconds in served.ttft_s)
        best = optimum(case.load, case.disk, none.tokens_per_s)
        host, disk = (f"{share:.0%}" for share in served.loaded)
        lines.append(
            f"| {case.load:g} | {case.disk:g} | {case.policy} | {served.tokens_per_s:.2f} | {best:.2f} | {ttft} "
            f"| {host} | {disk} |"
        )
    return "\n".join(lines)


def run(short: bool) -> list[Row]:
    if short:
        found = {case: measure(case, reference_server, 4, 1, scale=0.1) for case in cases((3.0,), (1.0,))}
    else:
        found = {case: measure(case, reference_server, 80, 1) for case in cases(LOADS, DISKS)}
    return rows_of(found)


def main(make: Callable[[str], AbstractContextManager[Server]], engine: str) -> None:
    parser = argparse.ArgumentParser(description=f"{engine} under load, with a disk below host memory.")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, metavar="L")
    parser.add_argument("--disks", type=float, nargs="+", default=DISKS, metavar="D")
    parser.add_argument("--requests", type=int, default=80, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cases to a file as well")
    options = parser.parse_args()
    found = {}
    for case in cases(options.loads, options.disks):
        print(case, file=sys.stderr, flush=True)
        found[case] = measure(case, make, options.requests, options.seed)
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(case) | asdict(served) for case, served in found.items()]))


if __name__ == "__main__":
    main(reference_server, "The reference engine")
