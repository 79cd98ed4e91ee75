# SPDX-License-Identifier: Apache-2.0
"""The cases of ``bench.busy`` on vLLM's CPU platform. In the environment of ``make test-vllm``::

    .venv-vllm/bin/python -m bench.busy_vllm [--loads L...] [--disks D...] [--requests N] [--seed N]

Each case runs in its own process. This is not one of ``BENCHES``, because the development environment lacks vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.busy import DEVICE_TOKENS, LONGEST, Server, Stretched, loaded_of, main, offloading, set_disk
from bench.vllm_serving import Child, transfer_config, write_model
from bench.worth_loading_engine import KV_BYTES_PER_TOKEN, LAYERS, Ask

BLOCK_TOKENS = 32


class ChildServer:
    """Asks an engine in a child process."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def set_speed(self, tokens_per_s: float, disk: float) -> None:
        self._child.ask("set_speed", tokens_per_s=tokens_per_s, disk=disk)

    def serve(self, asks: Sequence[Ask]) -> tuple[float, list[float]]:
        seconds, ttft_s = self._child.ask("serve", asks=[(ask.at_s, ask.prompt) for ask in asks])
        return seconds, ttft_s

    def loaded_tokens(self) -> tuple[float, float]:
        host, disk = self._child.ask("loaded_tokens")
        return host, disk


@contextmanager
def vllm_server(policy: str) -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory() as model,
        tempfile.TemporaryDirectory(dir=os.environ.get("KVOFFLOAD_BENCH_DIR")) as disk,
    ):
        write_model(Path(model), layers=LAYERS, hidden=128)
        with Child(model, json.dumps([policy, disk]), "bench.busy_vllm") as child:
            yield ChildServer(child)


class BenchEngine:
    """The engine in the child process."""

    def __init__(self, model: str, policy: str, directory: str) -> None:
        from vllm import LLM

        llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2 * LONGEST,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=DEVICE_TOKENS // BLOCK_TOKENS,
            kv_cache_memory_bytes=2 * DEVICE_TOKENS * KV_BYTES_PER_TOKEN,
            max_num_batched_tokens=512,
            max_num_seqs=32,
            disable_log_stats=False,
            kv_transfer_config=transfer_config(offloading(policy, directory)),
        )
        self._stretched: Stretched
        llm.apply_model(lambda module: setattr(self, "_stretched", Stretched(module)))
        self._engine = llm.llm_engine
        self._core = llm.llm_engine.engine_core.engine_core
        self._num_requests = 0

    def set_speed(self, tokens_per_s: float, disk: float) -> None:
        self._stretched.tokens_per_s = tokens_per_s
        set_disk(disk)

    def serve(self, asks: list[tuple[float, list[int]]]) -> tuple[float, list[float]]:
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
            else:
                time.sleep(max(0.0, start_s + coming[-1][0] - time.perf_counter()))
        seconds = time.perf_counter() - start_s
        while self._core.scheduler.has_requests():  # transfers
            engine.step()
        return seconds, [first_tokens[name] - at_s for name, at_s in arrivals.items()]

    def loaded_tokens(self) -> tuple[float, float]:
        return loaded_of(self._core.scheduler.connector.scheduler.core.get_stats())


if __name__ == "__main__":
    if "--child" in sys.argv:
        bench_engine = BenchEngine(sys.argv[2], *json.loads(sys.argv[4]))
        for line in sys.stdin:
            question, details = json.loads(line)
            print("ANSWER", json.dumps(getattr(bench_engine, question)(**details)), flush=True)
    else:
        main(vllm_server, "vLLM on its CPU platform")
