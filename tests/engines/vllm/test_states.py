# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states in vLLM with kvoffload: the tokens of vLLM alone, from another memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engines.greedy import Baseline
from tests.engines.models import SmallModel, write_granite_hybrid, write_mamba2, write_nemotron_h, write_qwen3_next
from tests.engines.vllm.harness import run_child, states_baseline
from tests.engines.vllm.prompts import BLOCK_TOKENS, ONE_BLOCK_A_STEP, STATE_PROMPT_TOKENS
from tests.engines.vllm.scenarios import OUTCOMES
from tests.engines.vllm.test_serving import assert_idle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

EXTRA = {"cpu_bytes_to_use": "64MiB"}
FULL_TOKENS = STATE_PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
"""The cached tokens of each prompt: those in full blocks. vLLM keeps only the state at their end, and no earlier
one."""


def check_states(seen: dict[str, Any], baseline: Baseline) -> None:
    """Check facts that hold for every model of the scenario ``states``."""
    assert baseline.wrong(seen["first"]) == []
    assert set(seen["first cached"].values()) == {0}
    for name in ("again", "once more"):
        assert baseline.wrong(seen[name]) == [], name
        assert set(seen[f"{name} cached"].values()) == {FULL_TOKENS}
    assert seen["metrics"]["hit_tokens"] == 2 * 6 * FULL_TOKENS
    assert baseline.wrong(seen["corrupted"]) == ["state0"], "the comparison notices wrong bytes"
    assert seen["aborted loads"] == 3
    for answers in (seen["after aborts"], *seen["failing"]):
        assert baseline.wrong(answers) == []
    assert all(seen["failing metrics"][outcome] > 0 for outcome in OUTCOMES)
    for wave in seen["waves"]:
        assert baseline.wrong(wave["answers"]) == []
        assert len(wave["answers"]) + len(wave["aborted"]) >= 16
    assert_idle(seen["idle"])


def test_attention_and_states_side_by_side(falcon: SmallModel, falcon_baseline: Baseline) -> None:
    seen = run_child("states", model=falcon.path, extra=EXTRA)

    assert sorted(seen["kinds"]) == ["FullAttentionSpec", "MambaSpec"]
    check_states(seen, falcon_baseline)
    assert seen["preemptions"] > 0
    # Each prompt stores its nine blocks of attention, and one state, without the padding of its page.
    attention_bytes = 4 * 2 * BLOCK_TOKENS * 2 * 64 * 4
    assert seen["metrics"]["primary_blocks_stored"] == 6 * (9 + 1)
    assert seen["metrics"]["store_bytes"] == 6 * (9 * attention_bytes + seen["state bytes"])
    assert seen["metrics"]["store_blocks|full_attention"] == 6 * 9
    assert seen["metrics"]["store_blocks|single_state"] == 6
    assert seen["metrics"]["load_bytes"] == 2 * seen["metrics"]["store_bytes"]


@pytest.mark.parametrize("write", [write_granite_hybrid, write_nemotron_h, write_mamba2], ids=lambda f: f.__name__[6:])
def test_other_models(write: Callable[[Path], SmallModel], tmp_path: Path) -> None:
    model = write(tmp_path)
    seen = run_child("states", model=model.path, extra=EXTRA)
    assert "MambaSpec" in seen["kinds"]
    check_states(seen, states_baseline(model.path))


def test_vllm_takes_the_layout_that_it_is_asked_for(tmp_path: Path) -> None:
    """Layers of a block side by side. Of vLLM's models only those without attention may have that on a CPU."""
    model = write_mamba2(tmp_path)
    seen = run_child("states", model=model.path, extra=EXTRA | {"kv_cache_layout": "BLNHC"})
    assert seen["layout"] == "BLNHC"
    check_states(seen, states_baseline(model.path))


def test_with_all_states_kept_a_hit_may_end_at_any_block(falcon: SmallModel, falcon_baseline: Baseline) -> None:
    seen = run_child("states_at_branches", model=falcon.path, extra=EXTRA)

    for name in ("first", "branches"):
        assert falcon_baseline.wrong(seen[name]) == []
    assert seen["branches cached"] == {"leaves64": 64, "leaves100": 96, "leaves256": 256}
    assert_idle(seen["idle"])


def test_two_ranks(falcon: SmallModel, falcon_baseline: Baseline) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "KVOFFLOAD_TEST_FAULTS": "1:0.3"}
    options = {"family": "states"} | ONE_BLOCK_A_STEP
    seen = run_child("two_ranks", model=falcon.path, extra=EXTRA, environment=environment, **options)

    for answers in (seen["first"], *seen["rounds"]):
        assert falcon_baseline.wrong(answers) == []
    assert all(seen["metrics"][outcome] > 0 for outcome in OUTCOMES)
    assert any(count == FULL_TOKENS for cached in seen["cached"] for count in cached.values())
    assert_idle(seen["idle"])


def test_a_restarted_engine_finds_its_states_on_disk(
    falcon: SmallModel, falcon_baseline: Baseline, tmp_path: Path
) -> None:
    options = {"family": "states"} | ONE_BLOCK_A_STEP
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 30 * 4 * 2 * BLOCK_TOKENS * 2 * 64 * 4,  # host memory for three of the six prompts
        "load_policy": "always",  # whether a load is worth it on this machine is not asked here
        "secondary_tiers": [{"type": "disk", "path": str(tmp_path / "blocks"), "max_bytes": "64MiB"}],
    }
    before = run_child("disk", model=falcon.path, extra=extra, **options)
    after = run_child("disk", model=falcon.path, extra=extra, **options)

    assert falcon_baseline.wrong(before["tokens"]) == []
    assert set(before["cached"].values()) == {0}
    assert before["metrics"]["tier_blocks_stored|disk"] == 6 * 10
    assert falcon_baseline.wrong(after["tokens"]) == []
    assert set(after["cached"].values()) == {FULL_TOKENS}
    assert after["metrics"]["promotions|ok"] == 6 * 10
    assert_idle(before["idle"])
    assert_idle(after["idle"])


@pytest.mark.long
def test_linear_attention_in_bfloat16_after_a_restart(tmp_path: Path) -> None:
    """Rounding depends on batches, so one prompt is served at a time, in the same chunks each time."""
    (tmp_path / "model").mkdir()
    model = write_qwen3_next(tmp_path / "model")
    options = {"family": "states", "dtype": "bfloat16"} | ONE_BLOCK_A_STEP | {"max_num_seqs": 1}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": "2MiB",
        "load_policy": "always",
        "secondary_tiers": [{"type": "disk", "path": str(tmp_path / "blocks"), "max_bytes": "64MiB"}],
    }
    before = run_child("disk", model=model.path, extra=extra, **options)
    after = run_child("disk", model=model.path, extra=extra, **options)
    alone = run_child("baseline", model=model.path, **options)

    for seen in (before, after):
        assert seen["tokens"] == {name: alone[name]["tokens"] for name in seen["tokens"]}
        assert_idle(seen["idle"])
    assert set(before["cached"].values()) == {0}
    # vLLM makes blocks of 64 tokens here, so that a state fits into one.
    assert set(after["cached"].values()) == {256}
    assert after["metrics"]["load_blocks|single_state"] == 6 * 3
