# SPDX-License-Identifier: Apache-2.0
"""vLLM over a fast and a slow tier, of which the fast one becomes the slowest while it serves."""

from __future__ import annotations

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
    summary = read_explanations(tmp_path / "trace.jsonl")
    for title, table in explanation_tables(summary, []).items():
        print(title, *table.rows, sep="\n  ")
    print({name: value for name, value in tiered["metrics"].items() if "plans" in name or "ended_early" in name})
    assert summary.explained == 100
    assert {*summary.weighed_s} <= {"fast", "slow"}
    assert summary.found.get("fast", 0) + summary.found.get("slow", 0) > 0
