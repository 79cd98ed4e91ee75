# SPDX-License-Identifier: Apache-2.0
"""The questions that only a serving engine answers on a new machine: ``python -m bench.gpu_serving [--out FILE]``

vLLM serves a small random model. Each part runs in a process of its own:

* the engine steps and milliseconds to the first token of a prompt, while other requests decode: computed, found in
  vLLM's own cache, and found in host memory
* throughput with zero hits, with and without kvoffload, in turn
* sleep and wake: the same tokens before and after, and the blocks that are found then (GPU only)

Ends with a table of what is expected, what was seen, and what to change. Needs vLLM; ``--small`` is a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu_probe import print_table
from bench.vllm_serving import Child, answer_questions, transfer_config, write_model

VOCAB = 500
PROMPT_TOKENS = 512


class BenchEngine:
    """vLLM in a child process. ``way`` is ``none``, ``host`` (with kvoffload) or ``sleep`` (also with sleep mode)."""

    def __init__(self, model: str, way: str) -> None:
        import torch
        from vllm import LLM

        self._has_gpu = torch.cuda.is_available()
        extra = {"cpu_bytes_to_use": 256 << 20, "eviction_policy": "lru"}
        self._llm = LLM(
            model,
            dtype="bfloat16" if self._has_gpu else "float32",
            enforce_eager=True,
            max_model_len=2048,
            block_size=32,
            num_gpu_blocks_override=128,
            kv_cache_memory_bytes=256 << 20,
            max_num_batched_tokens=1024,
            max_num_seqs=16,
            disable_log_stats=False,
            enable_sleep_mode=way == "sleep",
            kv_transfer_config=None if way == "none" else transfer_config(extra),
        )
        self._engine = self._llm.llm_engine
        self._random = random.Random(1)
        self._num_requests = 0

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(2, VOCAB) for _ in range(num_tokens)]

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams

        self._num_requests += 1
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(f"r{self._num_requests}", {"prompt_token_ids": prompt}, parameters)
        return f"r{self._num_requests}"

    def _drain(self) -> None:
        while self._engine.engine_core.engine_core.scheduler.has_requests() or self._engine.has_unfinished_requests():
            self._engine.step()

    def _first_token(self, prompt: list[int]) -> tuple[int, float]:
        for _ in range(4):
            self._add(self._prompt(16), 60)
        for _ in range(6):
            self._engine.step()
        began_s, steps, name = time.perf_counter(), 0, self._add(prompt, 1)
        while True:
            steps += 1
            if any(each.request_id.startswith(name) and each.outputs[0].token_ids for each in self._engine.step()):
                break
        seconds = time.perf_counter() - began_s
        self._drain()
        return steps, seconds

    def first_tokens(self, rounds: int) -> dict[str, tuple[float, float]]:
        """Return the median steps and milliseconds by way."""
        found: dict[str, list[tuple[int, float]]] = {"computed": [], "GPU": [], "host memory": []}
        for _ in range(rounds + 1):  # the first one is a warm-up
            prompt = self._prompt(PROMPT_TOKENS + 3)
            found["computed"].append(self._first_token(prompt))
            found["GPU"].append(self._first_token(prompt))
            for _ in range(10):  # vLLM's own cache forgets the prompt
                self._add(self._prompt(600), 1)
                self._drain()
            found["host memory"].append(self._first_token(prompt))
        return {
            way: (statistics.median(steps for steps, _ in rows[1:]), 1e3 * statistics.median(s for _, s in rows[1:]))
            for way, rows in found.items()
        }

    def serve(self, num_requests: int) -> float:
        """Return the seconds to serve requests, none of which finds anything."""
        began_s = time.perf_counter()
        for _ in range(num_requests):
            self._add(self._prompt(256), 64)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        seconds = time.perf_counter() - began_s
        self._drain()
        return seconds

    def sleep(self) -> dict[str, Any]:
        """Return the outcome of a sleep at level 1; nothing without a GPU, where vLLM cannot sleep."""
        from vllm import SamplingParams

        if not self._has_gpu:
            return {}
        prompts = [{"prompt_token_ids": self._prompt(PROMPT_TOKENS)} for _ in range(4)]

        def tokens() -> tuple[list[list[int]], int]:
            found = self._llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            return [list(each.outputs[0].token_ids) for each in found], sum(
                each.num_cached_tokens or 0 for each in found
            )

        before, _ = tokens()
        self._drain()
        self._llm.sleep(level=1)
        self._llm.wake_up()
        first, _ = tokens()
        self._drain()
        again, cached = tokens()
        return {"same_tokens": before == first == again, "found_again": cached > 0}


def measure(is_small: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as model:
        write_model(Path(model), layers=2 if is_small else 16, hidden=128 if is_small else 1024)
        with Child(model, "host", "bench.gpu_serving") as child:
            for way, (steps, ms) in child.ask("first_tokens", rounds=2 if is_small else 6).items():
                yield {"part": "first token", "way": way, "steps": steps, "ms": round(ms, 2)}
        requests, turns = (4, 1) if is_small else (100, 3)
        with Child(model, "none", "bench.gpu_serving") as bare, Child(model, "host", "bench.gpu_serving") as host:
            pairs = [[each.ask("serve", num_requests=requests) for each in (bare, host)] for _ in range(turns + 1)][1:]
        ratio = statistics.median(with_host / without for without, with_host in pairs)
        yield {"part": "zero hits", "ratio": round(ratio, 3)}
        if not is_small:
            with Child(model, "sleep", "bench.gpu_serving") as child:
                yield {"part": "sleep", **child.ask("sleep")}


def table(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    by_way = {row["way"]: row for row in rows if row["part"] == "first token"}
    for way, row in by_way.items():
        expected, advice = "", ""
        if way == "host memory":
            expected = f"{by_way['GPU']['steps']:g} steps"
            advice = "" if row["steps"] <= by_way["GPU"]["steps"] else "report this file"
        yield f"first token while others decode, {way}", expected, f"{row['steps']:g} steps, {row['ms']} ms", advice
    for row in rows:
        if row["part"] == "zero hits":
            advice = "" if row["ratio"] <= 1.01 else "store_threshold: 2, so that only reused prefixes are stored"
            yield "time to serve with zero hits", "<= 1.01 of vLLM alone", str(row["ratio"]), advice
        if "same_tokens" in row:
            seen = f"{row['same_tokens']}, {row['found_again']}"
            is_good = row["same_tokens"] and row["found_again"]
            yield "sleep and wake: same tokens, found again", "True, True", seen, "" if is_good else "report this file"


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM with kvoffload on a new machine.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="Write a line of JSON for each finding.")
    parser.add_argument("--small", action="store_true", help="Rehearse; the figures mean nothing.")
    options = parser.parse_args()
    rows = []
    for row in measure(options.small):
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        if options.out:
            options.out.write_text("".join(json.dumps(each) + "\n" for each in rows))
    print_table(table(rows))


if __name__ == "__main__":
    if "--child" in sys.argv:
        answer_questions(BenchEngine(sys.argv[2], sys.argv[4]))
    else:
        main()
