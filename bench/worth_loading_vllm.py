# SPDX-License-Identifier: Apache-2.0
"""Run the benchmark ``worth_loading_engine`` with vLLM on its CPU platform, in the environment of ``make test-vllm``::

    .venv-vllm/bin/python -m bench.worth_loading_vllm [--requests N] [--seed N] [--speeds S...]

Each engine is a process, and they take turns, burst by burst. The forward pass also sleeps to reach its speed. This is
not one of ``BENCHES``, because the development environment lacks vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.stores import Link
from bench.vllm_serving import Child, transfer_config, write_model
from bench.worth_loading_engine import (
    BURST,
    DEVICE_TOKENS,
    HOST_TOKENS,
    KV_BYTES_PER_TOKEN,
    LAYERS,
    LINKS,
    LONGEST,
    SPEEDS,
    TOKENS_PER_S,
    Ask,
    Compared,
    LinkedDiskOptions,
    Workload,
    quantiles_of,
    stretch,
    table,
)
from kvoffload.tiering.options import STORES

BLOCK_TOKENS = 32
WAYS = ("no disk", "no disk, again", "always", "cost")


def compare(num_requests: int, seed: int, speed: float) -> Compared:
    """Compare four engines. The disk has ``speed`` times their own speed."""
    with ExitStack() as stack:
        model = stack.enter_context(tempfile.TemporaryDirectory())
        write_model(Path(model), layers=LAYERS, hidden=128)
        place = os.environ.get("KVOFFLOAD_BENCH_DIR")
        children = {}
        for way in WAYS:
            disk = stack.enter_context(tempfile.TemporaryDirectory(dir=place)) if way in ("always", "cost") else "cpu"
            offload = json.dumps([way, speed, disk])
            children[way] = stack.enter_context(Child(model, offload, "bench.worth_loading_vllm"))
        workload = Workload(seed, 1.0, TOKENS_PER_S)
        for _ in range(2):
            for document in workload.documents:
                for child in children.values():
                    child.ask("serve", asks=[(0.0, document)])
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        order = random.Random(seed)
        for _ in range(-(-num_requests // BURST)):
            burst = [(ask.at_s, ask.prompt) for ask in workload.burst()]
            for way in order.sample(WAYS, len(WAYS)):
                times[way] += children[way].ask("serve", asks=burst)
    return Compared(f"{speed:g}", *(quantiles_of(times[way]) for way in WAYS))


class BenchEngine:
    """One engine in a child process."""

    def __init__(self, model: str, way: str, speed: float, disk: str) -> None:
        from vllm import LLM

        extra: dict[str, Any] = {"cpu_bytes_to_use": HOST_TOKENS * KV_BYTES_PER_TOKEN, "eviction_policy": "lru"}
        if disk != "cpu":
            STORES.register("linked_disk", LinkedDiskOptions)
            LINKS["disk"] = Link(speed * TOKENS_PER_S * KV_BYTES_PER_TOKEN)
            tier = {"type": "linked_disk", "name": "disk", "path": disk, "max_bytes": "1GiB"}
            extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier], "load_policy": way}
        self._llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2 * LONGEST,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=DEVICE_TOKENS // BLOCK_TOKENS,
            kv_cache_memory_bytes=2 * DEVICE_TOKENS * KV_BYTES_PER_TOKEN,
            max_num_batched_tokens=128,
            max_num_seqs=BURST,
            disable_log_stats=False,
            kv_transfer_config=transfer_config(extra),
        )
        self._llm.apply_model(lambda module: stretch(module, TOKENS_PER_S))
        self._num_requests = 0

    def serve(self, asks: list[tuple[float, list[int]]]) -> list[float]:
        """Serve a burst, and return the seconds from each request's arrival to its first token."""
        from vllm import SamplingParams

        engine, start_s = self._llm.llm_engine, time.perf_counter()
        left = [Ask(*ask) for ask in asks]
        arrivals: dict[str, float] = {}
        first_tokens: dict[str, float] = {}
        core = engine.engine_core.engine_core
        while left or engine.has_unfinished_requests():
            while left and time.perf_counter() - start_s >= left[0].at_s:
                ask = left.pop(0)
                self._num_requests += 1
                name = f"r{self._num_requests}"
                parameters = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
                engine.add_request(name, {"prompt_token_ids": ask.prompt}, parameters)
                arrivals[name] = start_s + ask.at_s
            if engine.has_unfinished_requests():
                for output in engine.step():
                    if output.outputs[0].token_ids:
                        first_tokens.setdefault(output.request_id, time.perf_counter())
            elif left:
                time.sleep(max(0.0, start_s + left[0].at_s - time.perf_counter()))
        while core.scheduler.has_requests():
            engine.step()
        return [first_tokens[name] - at_s for name, at_s in arrivals.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare load policies in vLLM on its CPU platform.")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speeds", type=float, nargs="+", default=SPEEDS)
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--offload", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        engine = BenchEngine(options.child, *json.loads(options.offload))
        for line in sys.stdin:
            question, details = json.loads(line)
            print("ANSWER", json.dumps(getattr(engine, question)(**details)), flush=True)
        return
    print(table([compare(options.requests, options.seed, speed) for speed in options.speeds]))


if __name__ == "__main__":
    main()
