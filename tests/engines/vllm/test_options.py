# SPDX-License-Identifier: Apache-2.0
"""Test kvoffload's options by their effects on the real vLLM, and the replay of a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engines.greedy import Baseline
from tests.engines.models import SmallModel
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.prompts import BLOCK_BYTES, crowd

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LONG = ["long0", "long1", "long2", "long3"]
FAMILY = [f"crowd{number}" for number in range(8)]


def served(model: SmallModel, baseline: Baseline, extra: dict[str, Any], *names: list[str]) -> list[dict[str, Any]]:
    """Return the result of each pass. All answers must be vLLM's own, and nothing may be left behind."""
    seen = run_child("passes", model=model.path, extra=extra, names=list(names))
    for each in seen["passes"]:
        assert baseline.wrong(each["tokens"]) == []
    assert {value for name, value in seen["idle"].items() if name != "used_blocks"} == {0}
    passes: list[dict[str, Any]] = seen["passes"]
    return passes


def test_blocks_larger_than_vllms_and_a_recorded_trace_that_replays(
    llama: SmallModel, llama_baseline: Baseline, tmp_path: Path
) -> None:
    path = tmp_path / "served.jsonl"
    extra = {"cpu_bytes_to_use": "64MiB", "block_size": 64, "record_trace": str(path)}
    first, again, _ = served(llama, llama_baseline, extra, LONG, LONG, FAMILY)
    assert set(first["cached"].values()) == {0}
    assert first["metrics"]["primary_blocks_stored"] == 4 * 15
    assert set(again["cached"].values()) == {960}, "15 whole blocks of 64 tokens"
    assert again["metrics"]["load_bytes"] == 4 * 15 * 2 * BLOCK_BYTES

    pytest.importorskip("numpy")
    from kvoffload.sim.cluster import simulate
    from kvoffload.sim.config import SimConfig
    from kvoffload.sim.trace_files import load_trace

    trace = load_trace(path)
    assert trace.block_tokens == 64
    prompts = {prompt.name: prompt for prompt in crowd(8)}
    # The prompts of a pass arrive in some order.
    lengths = [len(prompts[name].token_ids) for name in FAMILY]
    assert trace.input_tokens.tolist()[:8] == [1000] * 8
    assert sorted(trace.input_tokens.tolist()[8:]) == sorted(lengths)
    assert sorted(trace.output_tokens.tolist()) == [16] * 8 + [48] * 8
    paths = [tuple(trace.blocks(request).tolist()) for request in range(16)]
    assert set(paths[:4]) == set(paths[4:8]) and len({block for path in paths[:4] for block in path}) == 4 * 15
    assert {path[:3] for path in paths[8:]} == {paths[8][:3]}, "the family shares 192 tokens"
    tails = [block for path in paths[8:] for block in path[3:]]
    assert len(set(tails)) == len(tails)

    found: list[int] = []
    simulate(
        trace, SimConfig(cpu_blocks=500, block_bytes=1), on_request=lambda _, __, hit, ___: found.append(hit["host"])
    )
    assert found[:8] == [0] * 4 + [15] * 4, "as vLLM was served"
    assert sum(found[8:]) == 7 * 3, "but that vLLM served the family at once"


def test_a_block_is_stored_at_its_second_request_and_arc_evicts(llama: SmallModel, llama_baseline: Baseline) -> None:
    extra = {"cpu_bytes_to_use": 64 * BLOCK_BYTES, "store_threshold": 2, "eviction_policy": "arc"}
    two = LONG[:2]
    passes = served(llama, llama_baseline, extra, two, two, two, LONG, LONG, LONG)
    stored = [each["metrics"].get("primary_blocks_stored", 0) for each in passes]
    assert stored[:3] == [0, 62, 62]
    assert [set(each["cached"].values()) for each in passes[:3]] == [{0}, {0}, {992}]
    assert passes[-1]["metrics"]["primary_blocks_evicted"] > 0


def test_only_prompts_are_stored_and_density_evicts(llama: SmallModel, llama_baseline: Baseline) -> None:
    extra = {"cpu_bytes_to_use": 64 * BLOCK_BYTES, "offload_prompt_only": True, "eviction_policy": "density"}
    passes = served(llama, llama_baseline, extra, FAMILY, FAMILY, LONG[:2], LONG[2:], LONG[:2])
    own = sum(len(prompt.token_ids) // 32 - 6 for prompt in crowd(8))
    assert passes[0]["metrics"]["primary_blocks_stored"] == 6 + own, "48 more tokens each fill blocks too"
    for prompt in crowd(8):
        hit = (len(prompt.token_ids) - 1) // 32 * 32
        assert passes[1]["cached"][prompt.name] == hit
    assert passes[-1]["metrics"]["primary_blocks_evicted"] > 0
