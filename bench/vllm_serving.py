# SPDX-License-Identifier: Apache-2.0
"""Measure vLLM with kvoffload on vLLM's CPU platform. Run it in the environment of ``make test-vllm``::

    .venv-vllm/bin/python -m bench.vllm_serving [--short]

* Time to first token of a long prompt in four ways, one after the other in each round: computed, found in vLLM's own
  prefix cache, loaded from host memory, and read from the local disk below it. ``KVOFFLOAD_BENCH_DIR`` chooses the
  disk.
* The additional cost of a decode step with the connector if nothing hits. Two engines in two processes take turns of a
  few dozen steps.
* The additional cost of whole requests if nothing hits: a saturated vLLM with host memory, and with a disk below it,
  compared with vLLM alone. The four engines take turns. One more vLLM alone shows how much two equal engines differ.
  The forward pass has that difference, and nothing of kvoffload, so its time is left out of the thread's time.

This is not one of ``BENCHES``, because the development environment lacks vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.core import Row, bench_directory, report

ROOT = Path(__file__).parents[1]
BLOCK_TOKENS = 128
VOCAB = 512


def run(short: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), layers=2 if short else 8, hidden=128 if short else 1024)
        rows = [*time_to_first_token(directory, short), *step_overhead(directory, short)]
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), layers=2 if short else 4, hidden=128 if short else 256)
        return [*rows, *zero_hits(directory, short)]


def write_model(directory: Path, layers: int, hidden: int) -> None:
    from tests.engines.models import write_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)


# ----------------------------------------------------------------------------------------------- parent's side


def time_to_first_token(model: str, short: bool) -> list[Row]:
    lengths, rounds = ([300], 2) if short else ([1024, 4096], 9)
    with Child(model, "cpu") as child:
        medians = child.ask("first_token", lengths=lengths, rounds=rounds, ways=3)
    rows = []
    for length, (fresh, device, offloaded) in zip(lengths, medians, strict=True):
        case, value = f"first token of {length} tokens from the CPU tier", offloaded * 1e3
        for reference, seconds, target in (("afresh", fresh, "<= 1"), ("device prefix cache", device, "<= 1.2")):
            text = f"{reference} ({seconds * 1e3:.1f} ms)"
            rows.append(Row(case, value, "ms", text, offloaded / seconds, target))
    with bench_directory() as disk, Child(model, disk) as child:
        medians = child.ask("first_token", lengths=lengths, rounds=rounds, ways=4)
    for length, (fresh, _, _, from_disk) in zip(lengths, medians, strict=True):
        text, case = f"afresh ({fresh * 1e3:.1f} ms)", f"first token of {length} tokens from disk"
        rows.append(Row(case, from_disk * 1e3, "ms", text, from_disk / fresh, "<= 1"))
    return rows


def step_overhead(model: str, short: bool) -> list[Row]:
    turns, steps, requests = (2, 3, 4) if short else (30, 40, 16)
    with Child(model, "") as bare, Child(model, "cpu") as offload:
        for child in (bare, offload):
            child.ask("fill", requests=requests)
        pairs = [(bare.ask("steps", count=steps), offload.ask("steps", count=steps)) for _ in range(turns)]
    rows = []
    for index, clock in enumerate(("wall clock", "processor time of the engine's thread")):
        without = statistics.median(pair[0][index] for pair in pairs)
        ratio = statistics.median(pair[1][index] / pair[0][index] for pair in pairs)
        case = f"decode step of {requests} requests, nothing hits, {clock}"
        text = f"vLLM without a connector ({without * 1e3:.2f} ms)"
        rows.append(Row(case, ratio * without * 1e3, "ms", text, ratio, "<= 1.01"))
    return rows


def zero_hits(model: str, short: bool) -> list[Row]:
    turns, requests = (2, 4) if short else (21, 24)
    with bench_directory() as disk, ExitStack() as stack:
        ways = {"vLLM alone": "", "vLLM again": "", "host memory": "cpu", "host memory and a disk": disk}
        children = {way: stack.enter_context(Child(model, offload)) for way, offload in ways.items()}
        taken: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
        for turn in range(turns + 2):  # the first two are a warm-up
            for way in ways if turn % 2 else reversed(ways):
                taken[way].append(children[way].ask("serve", requests=requests))
    alone, *others = (times[2:] for times in taken.values())
    wall_s, thread_s = (statistics.median(times[index] for times in alone) for index in (0, 1))
    rows = []
    for way, own in zip([*ways][1:], others):
        wall = statistics.median(times[0] / base[0] for times, base in zip(own, alone))
        added_s = statistics.median((times[1] - times[2]) - (base[1] - base[2]) for times, base in zip(own, alone))
        case = f"{requests} requests of 256 and 64 tokens, nothing hits, {way}"
        text = f"vLLM alone ({thread_s:.2f} s)"
        rows.append(Row(f"{case}, engine's thread", thread_s + added_s, "s", text, 1 + added_s / thread_s, "<= 1.01"))
        rows.append(Row(f"{case}, wall clock", wall * wall_s, "s", f"vLLM alone ({wall_s:.2f} s)", wall))
    return rows


class Child:
    """A process with an engine, which answers questions one at a time.

    ``offload`` is ``None``, ``"cpu"`` for host memory, or a directory for a disk tier below host memory. ``module``
    implements the engine and the answers.
    """

    def __init__(self, model: str, offload: str, module: str = "bench.vllm_serving") -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # glibc would return large tensors to the kernel in some processes and not in others, which costs up to 7%.
            "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
            "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--child", model, "--offload", offload],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, question: str, **options: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([question, options]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"The engine ended with {self._process.wait()} while asked for {question}.")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)  # closes its input, which makes it end


# ------------------------------------------------------------------------------------------------ child's side


def transfer_config(extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": "kvoffload.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def open_engine(model: str, offloading: dict[str, Any] | None, **options: Any) -> Any:
    """Return vLLM's ``LLM`` for a small model, with these options and with kvoffload unless ``offloading`` is
    ``None``."""
    from vllm import LLM

    config = None if offloading is None else transfer_config(offloading)
    return LLM(
        model, dtype="float32", enforce_eager=True, disable_log_stats=False, kv_transfer_config=config, **options
    )


def finish_transfers(llm: Any) -> None:
    """Let the engine step until no transfer runs."""
    while llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
        llm.llm_engine.step()


class BenchEngine:
    def __init__(self, model: str, offload: str) -> None:
        extra: dict[str, Any] = {"cpu_bytes_to_use": "512MiB"}
        if offload not in ("", "cpu"):
            extra |= {"spec_name": "TieringOffloadingSpec", "load_policy": "always"}
            extra["secondary_tiers"] = [{"type": "disk", "path": offload, "max_bytes": "2GiB"}]
            extra |= {"weights_version": "one", "reset_tiers": False}  # a reset leaves the blocks on the disk
        self._llm = open_engine(
            model,
            extra if offload else None,
            max_model_len=8192,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=200,
            kv_cache_memory_bytes=1 << 29,
            max_num_seqs=32,
            max_num_batched_tokens=8192,
        )
        self._rng = random.Random(5)
        self._forward_s = 0.0
        self._llm.apply_model(self._time_forward)

    def _time_forward(self, model: Any) -> None:
        begun_s: list[float] = []

        def end(*_: Any) -> None:
            self._forward_s += time.thread_time() - begun_s.pop()

        model.register_forward_pre_hook(lambda *_: begun_s.append(time.thread_time()))
        model.register_forward_hook(end)

    def _prompt(self, length: int) -> dict[str, Any]:
        return {"prompt_token_ids": [self._rng.randrange(2, VOCAB - 1) for _ in range(length)]}

    def _generate(self, prompt: dict[str, Any]) -> tuple[float, int]:
        """Return the seconds to the first token, and the number of cached prompt tokens."""
        from vllm import SamplingParams

        start = time.perf_counter()
        (output,) = self._llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        return time.perf_counter() - start, output.num_cached_tokens or 0

    def first_token(self, lengths: list[int], rounds: int, ways: int) -> list[list[float]]:
        """Return medians per length for the four ways: computed, vLLM's own cache, host memory, and disk."""
        answers = []
        for length in lengths:
            times: list[list[float]] = [[] for _ in range(ways)]
            for _ in range(rounds + 1):
                prompt = self._prompt(length)
                for way in range(ways):
                    if way > 1:
                        # The connector's reset waits until the blocks in host memory are on the disk.
                        assert self._llm.reset_prefix_cache(reset_connector=way == 3)
                    seconds, cached = self._generate(prompt)
                    assert (cached > 0) == (way > 0)
                    times[way].append(seconds)
                    finish_transfers(self._llm)
            answers.append([statistics.median(log[1:]) for log in times])  # the first round is a warm-up
        return answers

    def fill(self, requests: int) -> None:
        """Start requests that decode for a long time, and step until all of them have computed their prompt."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        for number in range(requests):
            parameters = SamplingParams(temperature=0, max_tokens=1800, ignore_eos=True)
            engine.add_request(f"long{number}", self._prompt(140), parameters)
        for _ in range(10):
            engine.step()

    def serve(self, requests: int) -> tuple[float, float, float]:
        """Serve new prompts of 256 tokens at once, with 64 generated tokens each. Returns the elapsed seconds, this
        thread's CPU seconds, and those of its forward passes."""
        from vllm import SamplingParams

        prompts = [self._prompt(256) for _ in range(requests)]
        self._forward_s, start, start_cpu = 0.0, time.perf_counter(), time.thread_time()
        self._llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - start, time.thread_time() - start_cpu, self._forward_s

    def steps(self, count: int) -> tuple[float, float]:
        """Return the mean elapsed seconds of a step, and this thread's CPU seconds, which other work disturbs less."""
        start, start_cpu = time.perf_counter(), time.thread_time()
        for _ in range(count):
            self._llm.llm_engine.step()
        return (time.perf_counter() - start) / count, (time.thread_time() - start_cpu) / count


def answer_questions(engine: object) -> None:
    """Answer the questions of the parent's ``Child`` by methods of ``engine``, until it closes this process's input."""
    for line in sys.stdin:
        question, options = json.loads(line)
        print("ANSWER", json.dumps(getattr(engine, question)(**options)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure kvoffload in vLLM on vLLM's CPU platform.")
    parser.add_argument("--short", action="store_true", help="Only check that everything runs.")
    parser.add_argument("--json", metavar="FILE", type=Path, help="Also write the rows to this file.")
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--offload", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        answer_questions(BenchEngine(options.child, options.offload))
        return
    report(run(options.short), options.json)


if __name__ == "__main__":
    main()
