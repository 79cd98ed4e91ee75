# SPDX-License-Identifier: Apache-2.0
"""How the tests run vLLM: child processes on the parent's side, an in-process engine on the child's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.engines.greedy import Baseline, Prompt
from tests.engines.vllm.prompts import BLOCK_TOKENS, ONE_BLOCK_A_STEP
from tests.engines.vllm.sources import Sources

ROOT = Path(__file__).parents[3]
HAS_VLLM = importlib.util.find_spec("vllm") is not None
CONNECTOR = {
    "kv_connector": "KVOffloadConnector",
    "kv_connector_module_path": "kvoffload.engines.vllm",  # the server test uses the bare name
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def installed_sources() -> Sources:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Sources(Path(found.origin).parents[1])


def child_environment(in_process: bool = True) -> dict[str, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # One thread: threads that spin at barriers are far slower than none on a machine that is shared.
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
    }
    environment.pop("PYTHONHASHSEED", None)
    return environment


def run_child(scenario: str, timeout_s: float = 400, environment: dict[str, str] | None = None, **options: Any) -> Any:
    """Run ``scenarios.<scenario>(**options)`` in a new process, and return its result (through JSON)."""
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "answer.json"
        result = subprocess.run(
            [
                *(sys.executable, "-m", "tests.engines.vllm.scenarios"),
                *(scenario, json.dumps(options), str(answer), str(0.925 * timeout_s)),
            ],
            cwd=ROOT,
            env=child_environment() | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if result.returncode or not answer.exists():
            raise AssertionError(f"scenario {scenario} ended with {result.returncode}:\n{result.stdout[-8000:]}")
        print(result.stdout[-4000:])
        return json.loads(answer.read_text())


def states_baseline(model: str) -> Baseline:
    """Return vLLM's own answers to the prompts for models with recurrent states."""
    return Baseline(run_child("baseline", model=model, family="states", **ONE_BLOCK_A_STEP))


def settings(
    gpu_blocks: int = 400, extra: dict[str, Any] | None = None, transfer: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of a small vLLM; with ``extra``, kvoffload's options, it offloads."""
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1280,
        "num_gpu_blocks_override": gpu_blocks,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": 1 << 28,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "disable_log_stats": False,
        "seed": 0,
    }
    if extra is not None:
        arguments["kv_transfer_config"] = {**CONNECTOR, **(transfer or {}), "kv_connector_extra_config": extra}
    return arguments


class Engine:
    """vLLM in this process, small."""

    def __init__(
        self,
        model: str,
        *,
        gpu_blocks: int = 400,
        extra: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from vllm import LLM

        self.llm = LLM(model, **(settings(gpu_blocks, extra, transfer) | options))

    @property
    def core(self) -> Any:
        """The engine core, which exists only with the engine in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def parameters(self, prompt: Prompt, logprobs: int | None = None, limits: dict[str, int] | None = None) -> Any:
        from vllm import SamplingParams

        extra = None if limits is None else {"kv_transfer_params": limits}
        return SamplingParams(
            temperature=0, max_tokens=prompt.new_tokens, ignore_eos=True, logprobs=logprobs, extra_args=extra
        )

    def generate(
        self, prompts: Sequence[Prompt], logprobs: int | None = None, limits: dict[str, int] | None = None
    ) -> list[Any]:
        return self.llm.generate(
            [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts],
            [self.parameters(prompt, logprobs, limits) for prompt in prompts],
            use_tqdm=False,
        )

    def answers(
        self, prompts: Sequence[Prompt], limits: dict[str, int] | None = None
    ) -> tuple[dict[str, list[int]], dict[str, int]]:
        """Return generated tokens and cached tokens by prompt name. ``limits`` is sent in ``kv_transfer_params``."""
        outputs = self.generate(prompts, limits=limits)
        tokens = {p.name: list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)}
        cached = {p.name: int(o.num_cached_tokens or 0) for p, o in zip(prompts, outputs, strict=True)}
        return tokens, cached

    def forget_device_cache(self) -> None:
        """Empties vLLM's own prefix cache, and nothing else; the engine must be idle."""
        assert self.llm.reset_prefix_cache()

    def drain(self) -> None:
        """Steps until neither the engine nor the connector has work."""
        while self.core.scheduler.has_requests():
            self.llm.llm_engine.step()

    def metrics(self) -> dict[str, float]:
        """kvoffload's series, labels other than vLLM's own joined to the name."""
        from prometheus_client import REGISTRY

        values: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples if metric.name.startswith("kvoffload_") else ():
                labels = [v for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name")]
                if not sample.name.endswith("_created"):
                    values["|".join([sample.name.removeprefix("kvoffload_").removesuffix("_total"), *labels])] = (
                        sample.value
                    )
        return values

    def vllm_metric(self, name: str) -> float:
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def acceptance(self) -> tuple[int, int]:
        """Draft tokens so far, and how many of them were accepted."""
        return tuple(int(self.vllm_metric(f"vllm:spec_decode_num_{name}_tokens")) for name in ("draft", "accepted"))  # type: ignore[return-value]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def idle_state(engine: Engine) -> dict[str, Any]:
    """Return the counts that must be zero in an idle engine."""
    engine.drain()
    stats = engine.connector.scheduler.core.get_stats()
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return {
        "jobs": stats[("jobs_in_flight",)],
        "requests": stats[("requests_tracked",)],
        "pinned": stats[("primary_blocks_pinned",)],
        "gpu_blocks_in_use": pool.num_gpu_blocks - pool.get_num_free_blocks() - 1,
        "used_blocks": stats[("primary_blocks_used",)],
    }


def names_of(prompts: Iterable[Prompt]) -> list[str]:
    return [prompt.name for prompt in prompts]
