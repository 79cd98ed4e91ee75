# SPDX-License-Identifier: Apache-2.0
"""A real engine in virtual time, and the simulator's prediction for it.

The engine schedules, stores and loads as it always does, but time passes only by a rule: a step takes a fixed time, and
each token that it computes takes another. Every transfer has ended when its step ends. So nothing depends on the speed
of the machine, and each difference is one of the model's.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np

from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import SimConfig
from kvoffload.sim.trace import NO_SESSION, Trace

STEP_S, TOKENS_PER_S = 0.01, 2000
SIDE_BY_SIDE, CHUNK_TOKENS = 16, 512


@dataclass(frozen=True, slots=True)
class Workload:
    """Questions about documents, some of which are asked about often, at random times."""

    load: float
    """The prompt tokens that arrive, as a share of those that the engine can compute without hits."""
    block_tokens: int
    requests: int = 70
    documents: int = 20
    seed: int = 5

    def prompts(self) -> list[list[int]]:
        chance = random.Random(self.seed)
        documents = [
            [chance.randrange(2, 90) for _ in range(chance.randrange(200, 800))] for _ in range(self.documents)
        ]
        asked = [documents[min(int(chance.expovariate(0.15)), self.documents - 1)] for _ in range(self.requests)]
        return [[*document, *[chance.randrange(2, 90) for _ in range(chance.randint(3, 40))]] for document in asked]

    def trace(self) -> Trace:
        prompts, size = self.prompts(), self.block_tokens
        chance = random.Random(-self.seed)
        times, now_s = [], 0.0
        for prompt in prompts:
            times.append(now_s)
            now_s += chance.expovariate(1.0) * len(prompt) / TOKENS_PER_S / self.load
        numbers: dict[tuple[int, ...], int] = {}
        ids = [
            [numbers.setdefault(tuple(prompt[:end]), len(numbers)) for end in range(size, len(prompt) + 1, size)]
            for prompt in prompts
        ]
        counts = np.array([len(path) for path in ids], dtype=np.int64)
        return Trace(
            name="questions",
            block_tokens=size,
            times_s=np.array(times),
            input_tokens=np.array([len(prompt) for prompt in prompts], dtype=np.int64),
            output_tokens=np.array([chance.choice([1, 4, 30]) for _ in prompts], dtype=np.int64),
            sessions=np.full(len(prompts), NO_SESSION, dtype=np.int64),
            offsets=np.concatenate(([0], np.cumsum(counts))),
            ids=np.array([number for path in ids for number in path], dtype=np.int32),
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """What an engine did, or what the simulator says that it does."""

    seconds: float
    """From the first arrival to the last token."""
    ttft_s: list[float]
    """By request."""
    device_tokens: int
    host_tokens: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Stepped(Protocol):
    """An engine whose ``step`` returns the number of tokens that it computed, and the requests whose first token is
    among its results."""

    now_s: float
    """When the step begins."""

    def add(self, number: int, prompt: list[int], output: int) -> None: ...
    def step(self) -> tuple[int, list[int]]: ...
    @property
    def has_requests(self) -> bool: ...


def serve(engine: Stepped, workload: Workload) -> tuple[float, list[float]]:
    """The seconds from the first arrival to the last token, and the time to first token by request."""
    trace, prompts = workload.trace(), workload.prompts()
    times, outputs = trace.times_s.tolist(), trace.output_tokens.tolist()
    ttft_s = [0.0] * len(prompts)
    now_s, arrived = 0.0, 0
    while arrived < len(prompts) or engine.has_requests:
        if not engine.has_requests:
            now_s = max(now_s, times[arrived])
        while arrived < len(prompts) and times[arrived] <= now_s:
            engine.add(arrived, prompts[arrived], outputs[arrived])
            arrived += 1
        engine.now_s = now_s
        tokens, first = engine.step()
        if tokens:
            now_s += STEP_S + tokens / TOKENS_PER_S
        for number in first:
            ttft_s[number] = now_s - times[number]
    return now_s - times[0], ttft_s


def predict(workload: Workload, gpu_blocks: int, cpu_blocks: int, engine: Literal["vllm", "reference"]) -> Observed:
    config = SimConfig(
        cpu_blocks,
        1 << 16,
        gpu_blocks,
        policy="lru",
        prefill_tokens_per_s=TOKENS_PER_S,
        step_s=STEP_S,
        decode_s=1 / TOKENS_PER_S,
        chunk_tokens=CHUNK_TOKENS,
        max_requests=SIDE_BY_SIDE,
        load_bytes_per_s=float("inf"),
        load_latency_s=0.0,
        engine=engine,
    )
    trace = workload.trace()
    found: dict[int, float] = {}
    result = simulate(trace, config, on_request=lambda number, _, __, at_s: found.update({number: at_s}))
    ttft_s = [found[number] - float(trace.times_s[number]) for number in range(len(trace))]
    size = trace.block_tokens
    return Observed(result.duration_s, ttft_s, result.hit_blocks["device"] * size, result.hit_blocks["host"] * size)


def compare(predicted: Observed, served: Observed, prompt_tokens: int) -> dict[str, float]:
    """Relative errors of the prediction: of throughput, of quantiles of TTFT, and of hits as a share of all tokens."""
    errors = {"throughput": served.seconds / predicted.seconds - 1}
    for share in (50, 90, 99):
        real = float(np.percentile(served.ttft_s, share))
        errors[f"TTFT p{share}"] = float(np.percentile(predicted.ttft_s, share)) / real - 1
    differences = {
        tier: getattr(predicted, f"{tier}_tokens") - getattr(served, f"{tier}_tokens") for tier in ("device", "host")
    }
    errors |= {f"{tier} hits": tokens / prompt_tokens for tier, tokens in differences.items()}
    return errors | {"hits": sum(differences.values()) / prompt_tokens}


SEEDS = [11, 12]
"""Of the workloads that predictions are tested with. The model was made with another one."""
BOUNDS = {
    "throughput": 0.1,
    "TTFT p50": 0.15,
    "TTFT p90": 0.15,
    "TTFT p99": 0.15,
    "device hits": 0.01,
    "host hits": 0.01,
    "hits": 0.01,
}
"""The largest error of a prediction."""


def assert_close(predicted: Observed, served: Observed, workload: Workload) -> None:
    errors = compare(predicted, served, workload.trace().total_input_tokens)
    print(workload, errors)
    assert all(abs(errors[name]) <= most for name, most in BOUNDS.items()), errors
    assert served.host_tokens > 0 < served.device_tokens, "or hits are not compared"
