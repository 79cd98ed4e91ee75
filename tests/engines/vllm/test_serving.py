# SPDX-License-Identifier: Apache-2.0
"""vLLM with kvoffload answers as vLLM does, from another memory: one engine per test, several scenarios each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cpu.copy import fake_cuda
from tests.engines.greedy import Baseline
from tests.engines.models import SmallModel
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.scenarios import OUTCOMES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

EXTRA = {"cpu_bytes_to_use": "64MiB"}
PAGE_BYTES = 2 * 32 * 2 * 64 * 4
"""The bytes of one layer and GPU block: key/value heads, tokens, keys and values, head size, float32."""


def assert_idle(state: dict[str, Any]) -> None:
    """Nothing leaked: no job, request, pinned slot or GPU block is left."""
    assert {name: value for name, value in state.items() if name != "used_blocks"} == {
        "jobs": 0,
        "requests": 0,
        "pinned": 0,
        "gpu_blocks_in_use": 0,
    }


def test_evicted_prefixes_come_back_and_a_crowd_is_answered_right(llama: SmallModel, llama_baseline: Baseline) -> None:
    seen = run_child("evict_and_return", model=llama.path, extra=EXTRA)

    assert llama_baseline.wrong(seen["first"]) == []
    assert set(seen["first_cached"].values()) == {0}
    # All full blocks of each prompt come from the CPU tier: the device's own prefix cache was emptied before.
    assert llama_baseline.wrong(seen["again"]) == []
    assert set(seen["again_cached"].values()) == {992}
    metrics = seen["metrics"]
    assert metrics["hit_tokens"] == 8 * 992
    assert metrics["primary_blocks_stored"] == 8 * 31
    assert metrics["load_bytes"] == metrics["store_bytes"] == 8 * 31 * 4 * PAGE_BYTES
    assert metrics["load_jobs|ok"] == 8
    assert_idle(seen["idle"])

    for wave in seen["waves"]:
        assert llama_baseline.wrong(wave["answers"]) == []
        assert len(wave["answers"]) + len(wave["aborted"]) >= 64
    assert seen["preemptions"] > 20
    assert seen["waves"][2]["resets"] > 0
    later = seen["metrics_after_waves"]
    assert later["hit_tokens"] > metrics["hit_tokens"]
    assert later["fenced_jobs"] > 0  # GPU blocks were handed out again under stores that still read them
    assert not any(count for name, count in later.items() if name.endswith("|failed"))
    assert_idle(seen["idle_after_waves"])
    # Flat: equal waves leave equal amounts of Python objects behind.
    memory = seen["memory"]
    assert max(memory[1:]) - min(memory[1:]) < 64 * 1024
    assert_idle(seen["idle_after_reset"])
    assert seen["idle_after_reset"]["used_blocks"] == 0


def test_a_hit_in_host_memory_takes_as_many_steps_as_one_on_the_device(
    llama: SmallModel, llama_baseline: Baseline
) -> None:
    seen = run_child("steps_to_first_token", model=llama.path, extra=EXTRA)
    assert seen["steps"]["in host memory"] == seen["steps"]["on the device"] < seen["steps"]["computed"]
    assert all(llama_baseline.wrong({"long0": tokens}) == [] for tokens in seen["answers"].values())
    assert seen["metrics"]["load_jobs|ok"] == 1
    assert_idle(seen["idle"])


def test_copies_through_a_fake_driver_that_is_late_and_keeps_no_order(
    llama: SmallModel, llama_baseline: Baseline
) -> None:
    if (reason := fake_cuda.missing()) is not None:
        pytest.skip(reason)
    seen = run_child("late_copies", model=llama.path, extra=EXTRA)

    assert llama_baseline.wrong(seen["first"]) == []
    assert llama_baseline.wrong(seen["again"]) == []
    assert set(seen["again_cached"].values()) == {992}
    for wave in seen["waves"]:
        assert llama_baseline.wrong(wave["answers"]) == []
    assert llama_baseline.wrong(seen["woken"]) == []
    assert any(seen["woken_cached"].values())
    metrics = seen["metrics"]
    assert metrics["load_jobs|ok"] >= 8
    assert metrics["fenced_jobs"] > 0
    assert not any(count for name, count in metrics.items() if name.endswith("|failed"))
    assert_idle(seen["idle"])
    assert seen["driver"]["batches"] >= metrics["load_jobs|ok"] + metrics["store_jobs|ok"]
    assert seen["driver"]["copies"] > 1000
    assert seen["driver"]["pageable"] == 0
    assert seen["driver"]["registrations"] == 1
    assert seen["after_shutdown"] == {"faults": 0, "registrations": 0}


def test_failures_cost_a_recomputation_and_corruption_would_be_noticed(
    llama: SmallModel, llama_baseline: Baseline
) -> None:
    seen = run_child("faults", model=llama.path, extra=EXTRA)

    # One GPU block with wrong bytes, reported as a success: the comparison notices it. So it would notice all that
    # follows.
    assert llama_baseline.wrong(seen["corrupted"]) == ["long0"]
    for wave in seen["waves"]:
        assert llama_baseline.wrong(wave["answers"]) == []
    for answers in (*seen["rounds"], seen["nothing_works"]):
        assert llama_baseline.wrong(answers) == []
    metrics = seen["metrics"]
    assert all(metrics[outcome] > 0 for outcome in OUTCOMES)
    assert_idle(seen["idle"])


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's FP8 KV needs AVX-512 on a CPU")
def test_fp8_kv_comes_back(llama: SmallModel) -> None:
    right = Baseline(run_child("baseline", model=llama.path, family="long", kv_cache_dtype="fp8"))
    seen = run_child("return_once", model=llama.path, extra=EXTRA, kv_cache_dtype="fp8")
    assert right.wrong(seen["first"]) == []
    assert right.wrong(seen["again"]) == []
    assert set(seen["again_cached"].values()) == {992}
    assert seen["metrics"]["store_bytes"] == 4 * 31 * 4 * PAGE_BYTES // 4  # one byte per value instead of four
    assert_idle(seen["idle"])


def test_hybrid_model(gemma: SmallModel, gemma_baseline: Baseline) -> None:
    seen = run_child("hybrid", model=gemma.path, extra=EXTRA)

    assert seen["groups"] == gemma.num_groups
    assert gemma_baseline.wrong(seen["first"]) == []
    for name in ("again", "once more"):
        assert gemma_baseline.wrong(seen[name]) == []
        # 1000 tokens are longer than the window of 512, 330 are shorter.
        assert seen[f"{name} cached"] == {f"long{n}": 992 for n in range(6)} | {f"short{n}": 320 for n in range(6)}
    assert gemma_baseline.wrong(seen["branches"]) == []
    assert seen["branches cached"] == {
        "branch96": 96,
        "branch500": 480,
        "branch512": 512,
        "branch700": 672,
        "branch992": 992,
    }
    # Windows are loaded, not whole prefixes: less than three groups' worth of every hit.
    metrics = seen["metrics"]
    whole = metrics["hit_tokens"] / 32 * 3 * 2 * PAGE_BYTES
    assert 0.5 * whole < metrics["load_bytes"] < 0.9 * whole

    assert gemma_baseline.wrong(seen["corrupted"]) == ["long0"]
    for answers in seen["failing"]:
        assert gemma_baseline.wrong(answers) == []
    assert all(seen["failing metrics"][outcome] > 0 for outcome in OUTCOMES)
    assert_idle(seen["idle"])


def test_two_ranks_share_every_block(llama: SmallModel, llama_baseline: Baseline) -> None:
    """Each rank's heads are in its slice of the slot. Blocks that rank 1 fails to load are computed on both ranks."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "KVOFFLOAD_TEST_FAULTS": "1:0.3"}
    seen = run_child("two_ranks", model=llama.path, extra=EXTRA, environment=environment)

    assert llama_baseline.wrong(seen["first"]) == []
    for answers in seen["rounds"]:
        assert llama_baseline.wrong(answers) == []
    metrics = seen["metrics"]
    assert all(metrics[outcome] > 0 for outcome in OUTCOMES)
    assert metrics["primary_blocks_stored"] >= 31
    assert any(count == 992 for cached in seen["cached"] for count in cached.values())
    assert_idle(seen["idle"])


def test_a_restarted_engine_finds_its_prefixes_on_disk(
    llama: SmallModel, llama_baseline: Baseline, tmp_path: Path
) -> None:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 128 * 4 * PAGE_BYTES,  # host memory for four of the eight prompts
        "secondary_tiers": [{"type": "fs", "path": str(tmp_path / "blocks"), "max_bytes": "unlimited"}],
        "load_policy": "always",  # the test counts hits, whatever the speed
        "max_wait_s": 300.0,
    }
    before = run_child("disk", model=llama.path, extra=extra)
    after = run_child("disk", model=llama.path, extra=extra)

    assert llama_baseline.wrong(before["tokens"]) == []
    assert set(before["cached"].values()) == {0}
    assert before["metrics"]["tier_blocks_stored|fs"] == 8 * 31
    assert llama_baseline.wrong(after["tokens"]) == []
    assert set(after["cached"].values()) == {992}
    assert after["metrics"]["promotions|ok"] == 8 * 31
    assert_idle(before["idle"])
    assert_idle(after["idle"])


def test_another_connector_beside_this_one(llama: SmallModel, llama_baseline: Baseline, tmp_path: Path) -> None:
    seen = run_child("beside_another_connector", model=llama.path, extra=EXTRA, directory=str(tmp_path))
    for name in ("first", "again", "from the other"):
        assert llama_baseline.wrong(seen[name]) == []
    assert set(seen["first cached"].values()) == {0}
    assert set(seen["again cached"].values()) == {992}
    assert seen["again metrics"]["hit_tokens"] == 4 * 992
    # kvoffload has forgotten them, and the other connector has not.
    assert seen["from the other metrics"]["hit_tokens"] == 4 * 992
    assert set(seen["from the other cached"].values()) == {992}


def test_what_cannot_work_is_refused_at_start_with_the_reason(llama: SmallModel) -> None:
    said = run_child("refusals", model=llama.path, extra=EXTRA)
    assert '"kv_load_failure_policy": "recompute"' in said["policy"]
    assert '"kv_role": "kv_both"' in said["role"]
    assert "'cpu_bytes'" in said["key"]
    assert "Did you mean 'cpu_bytes_to_use'?" in said["key"]
    assert "lacks 'cpu_bytes_to_use'" in said["size"]
    assert "lacks 'cpu_bytes_to_use'" in said["child"]
    assert '"kv_load_failure_policy": "recompute"' in said["policy of the whole"]
    assert "multiple of the engine's block of 32 tokens" in said["block"]
    assert "it asks for BLNHC, and vLLM uses LBHNC" in said["layout"]
    assert "'NHD'; this vLLM has LBHNC, " in said["layout's name"]
    assert [name for name, words in said.items() if words.startswith("loaded: ")] == ["block", "layout"]
