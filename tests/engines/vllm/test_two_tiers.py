# SPDX-License-Identifier: Apache-2.0
"""Test vLLM over a fast and a slow tier. The fast one becomes the slowest while vLLM serves."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.harness import run_child

from kvoffload.sim.explain import read_explanations
from kvoffload.sim.report import explanation_tables

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_tokens_are_the_same_and_sources_are_explained(llama: SmallModel, tmp_path: Path) -> None:
    alone, tiered = (
        run_child("two_tiers", model=llama.path, directory=str(tmp_path), is_tiered=is_tiered)
        for is_tiered in (False, True)
    )
    assert tiered["answers"] == alone["answers"]
    for part in (slice(8, 50), slice(50, 100)):  # for people to read: no speed is asserted
        times = sorted(tiered["seconds"][part]), sorted(alone["seconds"][part])
        print("median, longest with tiers:", median(times[0]), times[0][-1], "alone:", median(times[1]), times[1][-1])
    trace = tmp_path / "trace.jsonl"
    waited = [json.loads(line)["story"]["waited_s"].get("tiers", 0.0) for line in trace.read_text().splitlines()]
    print("latest; of its time alone it may wait for tiers 0.1 and a step in vain (note 14):")
    requests = zip(range(100), tiered["seconds"], alone["seconds"], waited, strict=True)
    for number, with_s, alone_s, waited_s in sorted(requests, key=lambda each: each[1] / each[2])[-5:]:
        print(f"  {number}: {with_s:.3f} of {alone_s:.3f} s ({with_s / alone_s:.2f}), waited {waited_s / alone_s:.2f}")
    summary = read_explanations(trace)
    for title, table in explanation_tables(summary, []).items():
        print(title, *table.rows, sep="\n  ")
    shown = ("plans", "ended_early", "prefill_tokens_per_second")
    print({name: value for name, value in tiered["metrics"].items() if any(part in name for part in shown)})
    assert summary.explained == 100
    assert {*summary.weighed_s} <= {"fast", "slow"}
    assert summary.found.get("fast", 0) + summary.found.get("slow", 0) > 0
