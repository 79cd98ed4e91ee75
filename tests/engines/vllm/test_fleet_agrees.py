# SPDX-License-Identifier: Apache-2.0
"""Test that the simulated fleet finds the same blocks as two vLLM engines over one Valkey, behind our own router."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.models import VOCAB, SmallModel
from tests.engines.vllm.harness import ROOT, child_environment
from tests.engines.vllm.prompts import BLOCK_BYTES, BLOCK_TOKENS
from tests.integration.test_fleet_agrees import route, simulated
from tests.integration.test_simulator_agrees import conversations, prompt
from tests.redis_server import PATIENT_OPTIONS, RedisServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

CPU_BLOCKS, GPU_BLOCKS, CHUNK_TOKENS = 100, 70, 512


class OneByOne:
    """A vLLM engine in its own process, which is idle again when it has answered."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines

    def cached_tokens(self, prompt: list[int], new_tokens: int) -> int:
        print(json.dumps([prompt, new_tokens]), file=self._lines, flush=True)
        line = self._lines.readline()
        assert line, "the engine has ended: its log says why"
        return int(line)


@contextmanager
def one_by_one(model: str, place: Path, url: str) -> Iterator[OneByOne]:
    tier = {"type": "redis", "url": url, "cascade": "on_store", **PATIENT_OPTIONS}
    extra = {
        "cpu_bytes_to_use": CPU_BLOCKS * BLOCK_BYTES,
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [tier],
        "offload_prompt_only": True,
        "eviction_policy": "lru",
        "load_policy": "always",
        "max_wait_s": 120,
    }
    ours, theirs = socket.socketpair()
    options = {
        "model": model,
        "channel": theirs.fileno(),
        "extra": extra,
        "gpu_blocks": GPU_BLOCKS + 1,  # one is vLLM's own
        "max_model_len": 2048,
        "max_num_batched_tokens": CHUNK_TOKENS,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.vllm.scenarios", "serve_one_by_one", json.dumps(options), str(place)],
        cwd=ROOT,
        env=child_environment(),
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    try:
        with ours, ours.makefile("rw") as lines:
            yield OneByOne(lines)
            ours.shutdown(socket.SHUT_WR)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("router", ["round-robin", "prefix"])
def test_hit_tokens_of_two_engines(router: str, llama: SmallModel, tmp_path: Path) -> None:
    trace = conversations(40, seed=3)
    lengths = trace.offsets[1:] - trace.offsets[:-1]
    odd = trace.input_tokens - lengths * trace.block_tokens
    trace = replace(trace, block_tokens=BLOCK_TOKENS, input_tokens=lengths * BLOCK_TOKENS + odd)
    simulated_hits, result = simulated(trace, router, 2, CPU_BLOCKS, GPU_BLOCKS, CHUNK_TOKENS)
    server = RedisServer(tmp_path)
    found = []
    try:
        with (
            one_by_one(llama.path, tmp_path / "first", server.url) as first,
            one_by_one(llama.path, tmp_path / "second", server.url) as second,
        ):
            for request, chosen in route(trace, router, 2):
                tokens = prompt(trace, request, range(2, VOCAB - 1)), int(trace.output_tokens[request])
                found.append((chosen, (first, second)[chosen].cached_tokens(*tokens)))
    finally:
        server.stop()
    expected = [(number, (device + below) * BLOCK_TOKENS) for number, device, below in simulated_hits]
    assert [number for number, _ in found] == [number for number, _ in expected]
    hits, simulated_tokens = (sum(tokens for _, tokens in each) for each in (found, expected))
    assert abs(hits - simulated_tokens) <= 0.01 * hits, [pair for pair in zip(found, expected) if pair[0] != pair[1]]
    assert result.hit_blocks["shared"] > 0
    assert result.hit_blocks["host"] > 0
    assert result.hit_blocks["device"] > 0
