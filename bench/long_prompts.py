# SPDX-License-Identifier: Apache-2.0
"""Time to first token (TTFT) of short and long prompts whose blocks are on a disk, on vLLM's CPU platform. In the
environment of ``make test-vllm``::

    .venv-vllm/bin/python -m bench.long_prompts [--json FILE]

Computing a token of a long prompt takes longer than computing one at its head. The disk is faster than computing a long
prompt and slower than computing a short one, so the right choice is to load the long prompts and to compute the short
ones. The model is small, so attention takes most of the time. ``KVOFFLOAD_BENCH_DIR`` chooses the disk.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.core import Row, bench_directory, report
from bench.stores import Link
from bench.stretched import LINKS, LinkedDiskOptions
from bench.vllm_serving import Child, answer_questions, finish_transfers, open_engine, write_model
from kvoffload.tiering.options import STORES

SHORT, LONG = 1024, 8000
ROUNDS = 9
_BLOCK_TOKENS, _STEP_TOKENS = 32, 512
_LAYERS, _HIDDEN = 2, 128
_KV_BYTES_PER_TOKEN = _LAYERS * 2 * 2 * 64 * 4


class BenchEngine:
    """The engine in the child process."""

    def __init__(self, model: str, policy: str, directory: str) -> None:
        STORES.register("linked_disk", LinkedDiskOptions)
        LINKS["disk"] = Link(1e12)
        tier = {"type": "linked_disk", "name": "disk", "path": directory, "max_bytes": "2GiB"}
        extra = {"cpu_bytes_to_use": "256MiB", "spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
        extra |= {"load_policy": policy, "weights_version": "one", "reset_tiers": False}
        self._llm = open_engine(
            model,
            extra,
            max_model_len=8192,
            block_size=_BLOCK_TOKENS,
            num_gpu_blocks_override=600,
            kv_cache_memory_bytes=1 << 28,
            max_num_batched_tokens=_STEP_TOKENS,
        )
        self._random = random.Random(5)

    def set_disk(self, tokens_per_s: float) -> None:
        LINKS["disk"].bytes_per_s = tokens_per_s * _KV_BYTES_PER_TOKEN

    def ttft(self, length: int) -> tuple[float, float]:
        """Return the seconds to the first token of a new prompt, and of the same prompt when only the disk has it."""
        prompt = [self._random.randrange(2, 500) for _ in range(length)]
        fresh_s = self._first_token_s(prompt)
        # The reset waits until the blocks are on the disk.
        assert self._llm.reset_prefix_cache(reset_connector=True)
        return fresh_s, self._first_token_s(prompt)

    def _first_token_s(self, prompt: list[int]) -> float:
        from vllm import SamplingParams

        start = time.perf_counter()
        parameters = SamplingParams(temperature=0, max_tokens=1)
        self._llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        seconds = time.perf_counter() - start
        finish_transfers(self._llm)
        return seconds


def run() -> list[Row]:
    found: dict[str, dict[int, tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as model:
        write_model(Path(model), layers=_LAYERS, hidden=_HIDDEN)
        tokens_per_s = 0.0
        for policy in ("always", "cost"):
            with bench_directory() as disk, Child(model, json.dumps([policy, disk]), "bench.long_prompts") as child:
                for _ in range(3):
                    speeds = [length / child.ask("ttft", length=length)[0] for length in (SHORT, LONG)]
                tokens_per_s = tokens_per_s or (speeds[0] * speeds[1]) ** 0.5  # the same disk for both policies
                child.ask("set_disk", tokens_per_s=tokens_per_s)
                rounds = [[child.ask("ttft", length=length) for length in (SHORT, LONG)] for _ in range(ROUNDS + 3)]
                found[policy] = {
                    length: tuple(statistics.median(each[at][way] for each in rounds[3:]) for way in range(2))
                    for at, length in enumerate((SHORT, LONG))
                }
    rows = []
    for length in (SHORT, LONG):
        fresh_s, loaded_s = found["cost"][length][0], found["always"][length][1]
        best_s, own_s = min(fresh_s, loaded_s), found["cost"][length][1]
        text = f"computed {fresh_s * 1e3:.0f} ms, always loaded {loaded_s * 1e3:.0f} ms"
        rows.append(Row(f"first token of {length} tokens on a disk", own_s * 1e3, "ms", text, own_s / best_s, "<= 1.1"))
    return rows


if __name__ == "__main__":
    if "--child" in sys.argv:
        answer_questions(BenchEngine(sys.argv[2], *json.loads(sys.argv[4])))
    else:
        parser = argparse.ArgumentParser(description="TTFT of short and long prompts whose blocks are on a disk.")
        parser.add_argument("--json", metavar="FILE", type=Path, help="Also write the rows to this file.")
        report(run(), parser.parse_args().json)
