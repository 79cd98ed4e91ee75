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
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.stores import Link
from bench.vllm_serving import Child, answer_questions, transfer_config, write_model
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
    Compared,
    LinkedDiskOptions,
    Stretched,
    Workload,
    quantiles_of,
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
                times[way] += children[way].ask("serve", asks=burst)[1]
    return Compared(f"{speed:g}", *(quantiles_of(times[way]) for way in WAYS))


class StretchedVllm:
    """vLLM in a child process, whose forward pass takes as long as it would at some speed."""

    def __init__(
        self,
        model: str,
        offloading: dict[str, Any],
        *,
        tokens_per_s: float,
        device_tokens: int,
        max_batch_tokens: int,
        max_requests: int,
    ) -> None:
        from vllm import LLM

        llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2 * LONGEST,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=device_tokens // BLOCK_TOKENS,
            kv_cache_memory_bytes=2 * device_tokens * KV_BYTES_PER_TOKEN,
            max_num_batched_tokens=max_batch_tokens,
            max_num_seqs=max_requests,
            disable_log_stats=False,
            kv_transfer_config=transfer_config(offloading),
        )
        self.stretched: Stretched
        llm.apply_model(lambda module: setattr(self, "stretched", Stretched(module, tokens_per_s)))
        self._engine = llm.llm_engine
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._num_requests = 0

    def serve(self, asks: list[tuple[float, list[int]]]) -> tuple[float, list[float]]:
        """Serve requests. Returns the seconds until the last one ended, and each one's seconds to its first token."""
        from vllm import SamplingParams

        engine, start_s = self._engine, time.perf_counter()
        coming, arrivals, first_tokens = asks[::-1], dict[str, float](), dict[str, float]()
        while coming or engine.has_unfinished_requests():
            while coming and time.perf_counter() - start_s >= coming[-1][0]:
                at_s, prompt = coming.pop()
                self._num_requests += 1
                name = f"r{self._num_requests}"
                parameters = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
                engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
                arrivals[name] = at_s
            if engine.has_unfinished_requests():
                for output in engine.step():
                    if output.outputs[0].token_ids:
                        first_tokens.setdefault(output.request_id, time.perf_counter() - start_s)
            elif coming:
                time.sleep(max(0.0, start_s + coming[-1][0] - time.perf_counter()))
        seconds = time.perf_counter() - start_s
        while self.scheduler.has_requests():  # transfers
            engine.step()
        return seconds, [first_tokens[name] - at_s for name, at_s in arrivals.items()]


class BenchEngine(StretchedVllm):
    """One engine in a child process."""

    def __init__(self, model: str, way: str, speed: float, disk: str) -> None:
        extra: dict[str, Any] = {"cpu_bytes_to_use": HOST_TOKENS * KV_BYTES_PER_TOKEN, "eviction_policy": "lru"}
        if disk != "cpu":
            STORES.register("linked_disk", LinkedDiskOptions)
            LINKS["disk"] = Link(speed * TOKENS_PER_S * KV_BYTES_PER_TOKEN)
            tier = {"type": "linked_disk", "name": "disk", "path": disk, "max_bytes": "1GiB"}
            extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier], "load_policy": way}
        super().__init__(
            model,
            extra,
            tokens_per_s=TOKENS_PER_S,
            device_tokens=DEVICE_TOKENS,
            max_batch_tokens=128,
            max_requests=BURST,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare load policies in vLLM on its CPU platform.")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speeds", type=float, nargs="+", default=SPEEDS)
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--offload", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        answer_questions(BenchEngine(options.child, *json.loads(options.offload)))
        return
    print(table([compare(options.requests, options.seed, speed) for speed in options.speeds]))


if __name__ == "__main__":
    main()
