# SPDX-License-Identifier: Apache-2.0
"""``check-config --model`` with the real vLLM: the same reasons as a server gives, all at once, without an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.engines.models import write_falcon_h1, write_gemma3, write_llama

from kvoffload.cli import main
from kvoffload.cli.judge import Verdict, judge
from kvoffload.cpu.memory_limits import memory_bytes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "intermediate_size_mlp": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 64,
    "max_position_embeddings": 4096,
}


HIDE = """
import sys


class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm.model_executor.models.llama" and ({condition}):
            raise ModuleNotFoundError("No module named 'needed_by_llama'", name="needed_by_llama")
        return None


sys.meta_path.insert(0, Hide())
"""
"""In new processes, the import of Llama's code fails as if a package were missing."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with small models. Some of them have only a ``config.json``."""
    root = tmp_path_factory.mktemp("models")
    write_llama(root / "dense", num_layers=3)
    write_gemma3(root / "window")
    write_falcon_h1(root / "hybrid")
    for name, config in (("latent", DEEPSEEK | {"quantization_config": FP8}), ("chunked", LLAMA4)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def verdict(models: Path, tmp_path: Path, model: str, arguments: str, **keys: object) -> Verdict:
    file = tmp_path / "offload.json"
    file.write_text(json.dumps({"cpu_bytes_to_use": "64MiB", **keys}))
    return judge(file, str(models / model), arguments.split())


@pytest.mark.parametrize(("model", "arguments"), [("hybrid", "--enable-prefix-caching"), ("chunked", "")])
def test_a_setup_that_works_is_accepted(model: str, arguments: str, models: Path, tmp_path: Path) -> None:
    found = verdict(models, tmp_path, model, arguments)
    assert found.problems == []
    assert found.judged_by.startswith("vLLM ")
    assert found.unknown == "", "vLLM has built the model"


def test_latent_attention_is_judged_as_far_as_a_cpu_can_tell(models: Path, tmp_path: Path) -> None:
    found = verdict(models, tmp_path, "latent", "--pipeline-parallel-size 2", kv_cache_layout="BLNHC")
    assert any("kv_cache_layout with latent attention (BLNHC)" in each for each in found.problems)
    assert not any("chunked prefill" in each for each in found.problems)
    assert any("chunked prefill" in each for each in found.unjudged)
    # vLLM's CPU platform lacks a kernel for these weights.
    assert found.unknown == ""


def test_over_a_pipeline_the_drafter_counts_for_the_last_stage(models: Path, tmp_path: Path) -> None:
    method = '--speculative-config {"method":"mtp","num_speculative_tokens":1}'
    found = verdict(models, tmp_path, "latent", f"--pipeline-parallel-size 2 {method}")
    assert found.problems == []
    assert found.unknown == ""


def test_states_without_a_prefix_cache_are_rejected(models: Path, tmp_path: Path) -> None:
    (problem,) = verdict(models, tmp_path, "hybrid", "--no-enable-prefix-caching").problems
    assert "recurrent states without vLLM's prefix cache" in problem


def test_engines_that_do_not_fit_into_this_machine_together_are_rejected(models: Path, tmp_path: Path) -> None:
    total = memory_bytes()
    assert total is not None
    file, one = tmp_path / "offload.json", str(models / "dense")
    file.write_text(json.dumps({"cpu_bytes_to_use": total * 2 // 3}))
    assert judge(file, one, []).problems == []
    problems = judge(file, one, ["--data-parallel-size", "2"]).problems
    assert any("2 engines on this machine" in each for each in problems), problems


def test_an_argument_that_vllm_does_not_know_is_named(models: Path, tmp_path: Path) -> None:
    (problem,) = verdict(models, tmp_path, "dense", "--tensor-parallel-sise 2").problems
    assert "--tensor-parallel-sise" in problem


@pytest.mark.parametrize("is_while_reading", [True, False])
def test_a_missing_package_is_named_and_no_verdict_on_the_model(
    is_while_reading: bool,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # vLLM imports a model's code in another process while it reads a model for the first time, and again to build it.
    condition = "True" if is_while_reading else "'kvoffload.cli.judge' in sys.orig_argv"
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(condition=condition))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))  # vLLM remembers what it has read of a model
    found = verdict(models, tmp_path, "dense", "")
    assert found.problems == []
    assert "'needed_by_llama'" in found.unknown
    assert "pip install needed_by_llama" in found.unknown
    code, lines = run(tmp_path / "offload.json", models / "dense", "", capsys)
    assert code == 0
    assert not [line for line in lines if line.startswith(("Yes, ", "No, "))]
    assert any("needed_by_llama" in line for line in lines)


def test_a_vllm_that_cannot_be_imported_is_no_verdict_on_the_arguments(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import needed_by_vllm\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    found = verdict(models, tmp_path, "dense", "")
    assert found.problems == []
    assert "needed_by_vllm" in found.unknown


def run(file: Path, model: Path, arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, list[str]]:
    with pytest.raises(SystemExit) as exit_info:
        main(["check-config", str(file), "--model", str(model), "--", *arguments.split()])
    printed = capsys.readouterr()
    return exit_info.value.code, (printed.out + printed.err).splitlines()


def test_the_command_answers_yes(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "offload.yaml"
    file.write_text("cpu_bytes_to_use: 64MiB\n")
    code, lines = run(file, models / "dense", "--pipeline-parallel-size 2 --enable-lora --port 8001", capsys)
    assert code == 0
    assert any(line.startswith("Yes, ") for line in lines)


def test_the_command_answers_no_with_all_reasons(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "max_bytes": "128MiB"}
    file = tmp_path / "offload.json"
    file.write_text(json.dumps({"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}))
    arguments = "--pipeline-parallel-size 4 --prefix-caching-hash-algo xxhash --load-format tensorizer"
    code, lines = run(file, models / "window" / "config.json", arguments, capsys)
    assert code == 1
    assert any(line.startswith("No, ") for line in lines)
    reasons = [line for line in lines if line.startswith(str(file))]
    words = ["--prefix-caching-hash-algo", "weights that kvoffload cannot tell", "its stages have 1, 2, 2, 1 layers"]
    assert len(reasons) == len(words)
    for word in words:
        assert any(word in reason for reason in reasons)
    assert not (tmp_path / "kv").exists()
