# SPDX-License-Identifier: Apache-2.0
"""Follow the recipes of docs/weights.md on the real vLLM: which blocks survive a sleep, a release and new weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.greedy import Baseline
from tests.engines.models import SmallModel
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.test_new_weights import extra_with
from tests.engines.vllm.test_serving import assert_idle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_recipes_keep_the_blocks_that_the_page_says(
    llama: SmallModel,
    llama_baseline: Baseline,
    other_llama: SmallModel,
    other_llama_baseline: Baseline,
    tmp_path: Path,
) -> None:
    """vLLM's CPU worker keeps its memory during a sleep, so the scenario overwrites the KV cache instead."""
    extra = extra_with("disk", tmp_path) | {"cpu_bytes_to_use": "64MiB"}
    version = str(tmp_path / "VERSION")
    seen = run_child("sleeps", model=llama.path, other=other_llama.path, extra=extra, version_file=version)

    for name in ("first", "slept", "released", "first weights again"):
        assert llama_baseline.wrong(seen[name]) == [], name
    for name in ("other weights", "other weights, slept", "without a reset"):
        assert other_llama_baseline.wrong(seen[name]) == [], name
    # Only the tiers keep blocks, of each name of the weights.
    for name in ("slept", "released", "other weights, slept", "first weights again"):
        assert set(seen[f"{name} cached"].values()) == {992}, name
        assert seen[f"{name} read"] == 4 * 31, name
    for name in ("first", "other weights", "without a reset"):
        assert set(seen[f"{name} cached"].values()) == {0}, name
    assert_idle(seen["idle"])
