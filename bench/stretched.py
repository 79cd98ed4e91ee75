# SPDX-License-Identifier: Apache-2.0
"""Engines for the benchmarks of a loaded server: models that take their time, and disks behind a bounded link.

The models are small, and their forward pass sleeps until it has reached a speed, like a CPU that waits for its
accelerator. So other work on the machine hardly changes the figures.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bench.stores import Link, Linked
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk.options import DiskOptions

LAYERS = 8
KV_BYTES_PER_TOKEN = LAYERS * 2 * 2 * 64 * 4
LONGEST = 1024
"""The number of tokens in the longest document."""
VLLM_BLOCK_TOKENS = 32

LINKS: dict[str, Link] = {}
"""The links by tier name."""


class LinkedDiskOptions(DiskOptions, frozen=True, kw_only=True):
    """``{"type": "linked_disk", ...}``: a local disk behind the link with the tier's name."""

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        return Linked(super().open_store(block_bytes, namespace), LINKS[self.label])


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and when it arrives."""

    at_s: float
    prompt: list[int]


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
        from bench.vllm_serving import open_engine

        llm = open_engine(
            model,
            offloading,
            max_model_len=2 * LONGEST,
            block_size=VLLM_BLOCK_TOKENS,
            num_gpu_blocks_override=device_tokens // VLLM_BLOCK_TOKENS,
            kv_cache_memory_bytes=2 * device_tokens * KV_BYTES_PER_TOKEN,
            max_num_batched_tokens=max_batch_tokens,
            max_num_seqs=max_requests,
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
