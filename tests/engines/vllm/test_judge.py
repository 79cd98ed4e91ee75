# SPDX-License-Identifier: Apache-2.0
"""``check-config --model`` with the real vLLM: the same reasons as a server gives, all at once, without an engine."""

from __future__ import annotations

import json
import os
import shlex
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.engines.models import write_falcon_h1, write_gemma3, write_llama
from tests.engines.vllm.harness import run_child

from kvoffload.cli import main
from kvoffload.cli.judge import Verdict, judge
from kvoffload.cpu.memory_limits import memory_bytes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]

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


WITH_OWN_CODE = {
    "architectures": ["OwnForCausalLM"],
    "model_type": "own",
    "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
}
MAMBA = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 32,
    "state_size": 16,
    "n_groups": 1,
    "expand": 2,
}

NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "hybrid_override_pattern": "M*M*M---",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 2,
    "chunk_size": 128,
    "max_position_embeddings": 4096,
}
"""The second half of its layers keeps less KV than the first half, and the last quarter none."""

DISK = {"secondary_tiers": [{"type": "disk", "path": "/tmp/never-made", "max_bytes": "128MiB"}]}
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
OURS = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
EXAMPLE = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "/tmp/never-made"},
}


def _transfer(*children: dict[str, Any], **more: Any) -> str:
    value = MULTI | {"kv_connector_extra_config": {"connectors": children}} | more if children else OURS | more
    return f"--kv-transfer-config '{json.dumps(value)}'"


def _drafts(**more: Any) -> str:
    return f"--speculative-config '{json.dumps({'num_speculative_tokens': 3} | more)}'"


LISTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nothing": ("dense", "", {}),
    "several engines": ("dense", "--data-parallel-size 2 --api-server-count 1", {}),
    "two ways to balance load": ("dense", "-dp 2 --data-parallel-hybrid-lb --data-parallel-external-lb", {}),
    "a server for each engine": ("chunked", "-dp 2 -dpl 2 --data-parallel-multi-port-external-lb", {}),
    "a server for each engine of a dense model": ("dense", "-dp 2 -dpl 2 --data-parallel-multi-port-external-lb", {}),
    "servers without an engine": ("dense", "--headless --api-server-count 2", {}),
    "neither a server nor an engine": ("dense", "--headless -dp 2 -dpl 0", {}),
    "stages and ranks": ("dense", "-pp 3 -tp 2", {}),
    "a stage without a layer": ("dense", "-pp 4", {}),
    "unequal stages of unlike layers": ("window", "-pp 4", {}),
    "ranks that do not divide the heads": ("dense", "-tp 3", {}),
    "experts of a dense model": ("dense", "-tp 2 --enable-expert-parallel", {}),
    "decode context": ("dense", "-tp 4 --decode-context-parallel-size 2", {}),
    "prefill context": ("dense", "--prefill-context-parallel-size 2", {}),
    "several nodes": ("dense", "-tp 4 --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --headless", {}),
    "external launcher": ("dense", "--distributed-executor-backend external_launcher -tp 2", {}),
    "executor that is not installed": ("dense", "--distributed-executor-backend none.such.Executor", {}),
    "adapters": ("dense", "--enable-lora --max-lora-rank 32", DISK),
    "adapters with a promise": ("dense", "--enable-lora", DISK | {"adapters_never_change": True}),
    "drafts from the prompt": ("dense", _drafts(method="ngram"), {}),
    "drafts and states": ("hybrid", _drafts(method="ngram") + " --enable-prefix-caching", {}),
    "parallel drafts": ("dense", _drafts(model="{models}/dense", parallel_drafting=True), {}),
    "drafter on the Hub": ("dense", _drafts(method="eagle3", model="no/where"), {}),
    "drafter that is not there": ("dense", _drafts(method="eagle3", model="/no/where"), {}),
    "unknown method": ("dense", _drafts(method="magic"), {}),
    "misspelt key of drafts": ("dense", _drafts(method="ngram", num_tokens=3), {}),
    "half of a JSON text": ("dense", """--speculative-config '{"method": "ngram",'""", {}),
    "fp8": ("dense", "--kv-cache-dtype fp8", {}),
    "unknown dtype of KV": ("dense", "--kv-cache-dtype fp9", {}),
    "another connector": ("dense", f"--kv-transfer-config '{json.dumps(EXAMPLE)}'", {}),
    "beside another connector": ("dense", _transfer(EXAMPLE, OURS, kv_load_failure_policy="recompute"), {}),
    "beside another connector, without the policy": ("dense", _transfer(EXAMPLE, OURS), {}),
    "twice beside each other": ("dense", _transfer(OURS, OURS, kv_load_failure_policy="recompute"), {}),
    "connector that only stores": ("dense", _transfer(kv_role="kv_producer"), {}),
    "connector without a role": ("dense", _transfer(kv_role=None), {}),
    "misspelt key of kvoffload": ("dense", _transfer(kv_connector_extra_config={"cpu_byte_to_use": "1GiB"}), {}),
    "vLLM's own offloading": ("dense", "--kv-offloading-size 1", {}),
    "sleep": ("dense", "--enable-sleep-mode", {}),
    "experts in answers": ("dense", "--enable-return-routed-experts", {}),
    "prompts in one piece": ("dense", "--no-enable-chunked-prefill --no-enable-prefix-caching", {}),
    "without a prefix cache": ("dense", "--no-enable-prefix-caching", {}),
    "states": ("hybrid", "--enable-prefix-caching", {}),
    "states without a prefix cache": ("hybrid", "--no-enable-prefix-caching", {}),
    "chunked local attention": ("chunked", "", {}),
    "block that does not fit": ("dense", "--block-size 32", {"block_size": 48}),
    "block that fits": ("dense", "--block-size 32", {"block_size": 64}),
    "memory for less than a block": ("dense", "--block-size 32", {"cpu_bytes_to_use": "16KiB"}),
    "length beyond the model's": ("dense", "--max-model-len 1M", {}),
    "length in words": ("dense", "--max-model-len 4k", {}),
    "pooling": ("dense", "--runner pooling --convert embed", {}),
    "old task": ("dense", "--task embed", {}),
    "prompts as embeddings": ("dense", "--enable-prompt-embeds --mm-processor-cache-gb 0", DISK),
    "random weights": ("dense", "--load-format dummy", DISK),
    "weights from elsewhere": ("dense", "--load-format tensorizer", DISK),
    "misspelt format of weights": ("dense", "--load-format safetensor", {}),
    "misspelt key of the loader": ("dense", "--model-loader-extra-config.threads 3", {}),
    "weak hashes": ("dense", "--prefix-caching-hash-algo xxhash", DISK | {"weights_version": "1"}),
    "file of arguments": ("dense", "--config {models}/arguments.yaml", {}),
    "file with a misspelt argument": ("dense", "--config {models}/misspelt.yaml", {}),
    "file that is not there": ("dense", "--config {models}/none.yaml", {}),
    "misspelt argument": ("dense", "--tensor-parallel-sise 2", {}),
    "argument without its value": ("dense", "--tensor-parallel-size", {}),
    "argument given twice": ("dense", "-tp 2 -tp 4", {}),
    "help": ("dense", "--help", {}),
    "number out of range": ("dense", "--gpu-memory-utilization 90", {}),
    "tools without a parser": ("dense", "--enable-auto-tool-choice", {}),
    "tools with an unknown parser": ("dense", "--enable-auto-tool-choice --tool-call-parser none", {}),
    "tools": ("dense", "--enable-auto-tool-choice --tool-call-parser hermes", {}),
    "template that is not there": ("dense", "--chat-template /no/where.jinja", {}),
    "other load policy": ("dense", "", DISK | {"load_policy": "always", "store_threshold": 2}),
    "model on the Hub": ("no/where", "", {}),
    "model's own code is not there": ("own", "--trust-remote-code", {}),
    "model's own code is not allowed": ("own", "", {}),
    "model that is not there": ("/no/where", "", {}),
}
"""Models, vLLM's arguments and kvoffload's keys."""
MTP = _drafts(method="mtp", num_speculative_tokens=1)
TOO_MUCH = {"cpu_bytes_to_use": (memory_bytes() or 0) * 2 // 3}
ONLY_JUDGED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "latent attention": ("latent", "-pp 2", {"kv_cache_layout": "BLNHC"}),
    "equal stages of unlike layers": ("uneven", "-pp 2 --enable-prefix-caching", {}),
    "a stage without a state": ("uneven", "-pp 4 --enable-prefix-caching", {}),
    "drafter over a pipeline": ("latent", f"-pp 2 {MTP}", {}),
    "one engine that fits": ("dense", "", TOO_MUCH),
    "two engines that do not fit together": ("dense", "-dp 2", TOO_MUCH),
}
"""Lists that vLLM would reject on this machine for other reasons, or whose memory is too large for a test."""
NOT_JUDGED_HERE = {
    *("prefill context", "sleep", "experts in answers"),
    *("drafter on the Hub", "model on the Hub", "model's own code is not there", "executor that is not installed"),
}
"""Lists that the platform, or files and packages that are missing here, keep vLLM from reading."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with small models. Some of them have only a ``config.json``."""
    root = tmp_path_factory.mktemp("models")
    write_llama(root / "dense", num_layers=3)
    write_gemma3(root / "window")
    write_falcon_h1(root / "hybrid")
    for name, config in {
        "latent": DEEPSEEK | {"quantization_config": FP8},
        "chunked": LLAMA4,
        "own": WITH_OWN_CODE,
        "uneven": NEMOTRON,
    }.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    (root / "mamba.json").write_text(json.dumps(MAMBA))
    (root / "arguments.yaml").write_text("tensor-parallel-size: 2\n")
    (root / "misspelt.yaml").write_text("tensor-parallel-sise: 2\n")
    return root


@pytest.fixture(scope="module")
def answers(models: Path) -> dict[str, dict[str, Any]]:
    """Return the verdict about each list, and the reasons of a server that rejects it."""
    lists = [
        (
            str(models / model) if (models / model).exists() else model,
            [each.replace("{models}", str(models)) for each in shlex.split(arguments)],
            keys,
            name in LISTS,
        )
        for name, (model, arguments, keys) in (LISTS | ONLY_JUDGED).items()
    ]
    return dict(zip(LISTS | ONLY_JUDGED, run_child("judged", timeout_s=900, lists=lists), strict=True))


@pytest.mark.parametrize("name", LISTS)
def test_the_verdict_is_what_a_server_says(name: str, answers: dict[str, dict[str, Any]]) -> None:
    verdict, rejected = answers[name]["verdict"], answers[name]["rejected"]
    if rejected is None:
        assert verdict["problems"] == []
    elif rejected["by"] == "kvoffload":
        assert set(rejected["reasons"]) <= set(verdict["problems"])
    else:
        assert verdict["problems"] or verdict["unknown"], rejected["reasons"]
    assert bool(verdict["unknown"]) == (name in NOT_JUDGED_HERE), verdict["unknown"]
    for text in (*verdict["problems"], verdict["unknown"]):
        assert "\n" not in text
        assert len(text) < 1000


class _Hub(BaseHTTPRequestHandler):
    """A Hub whose only model needs a licence."""

    def do_GET(self) -> None:
        is_gated = "/gated/" in self.path
        self.send_response(401 if is_gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if is_gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def test_a_model_that_the_hub_does_not_give_is_no_verdict_and_a_wrong_name_is_one(tmp_path: Path) -> None:
    hub = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    Thread(target=hub.serve_forever, daemon=True).start()
    try:
        environment = {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(tmp_path),
        }
        lists = [("gated/model", [], {}, False), ("misspelt/model", [], {}, False)]
        gated, misspelt = run_child("judged", environment=environment, lists=lists)
    finally:
        hub.shutdown()
    assert gated["verdict"]["problems"] == []
    assert "HF_TOKEN" in gated["verdict"]["unknown"]
    assert misspelt["verdict"]["unknown"] == ""
    (problem,) = misspelt["verdict"]["problems"]
    assert "misspelt/model" in problem


def verdict(models: Path, tmp_path: Path, model: str, arguments: str, **keys: object) -> Verdict:
    file = tmp_path / "offload.json"
    file.write_text(json.dumps({"cpu_bytes_to_use": "64MiB", **keys}))
    return judge(file, str(models / model), arguments.split())


def test_latent_attention_is_judged_as_far_as_a_cpu_can_tell(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["latent attention"]["verdict"]
    assert any("kv_cache_layout with latent attention (BLNHC)" in each for each in found["problems"])
    assert not any("chunked prefill" in each for each in found["problems"])
    assert any("AMX" in each for each in found["unjudged"])
    # vLLM's CPU platform lacks a kernel for these weights.
    assert found["unknown"] == ""


def test_over_a_pipeline_the_drafter_counts_for_the_last_stage(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["drafter over a pipeline"]["verdict"]
    assert found["problems"] == []
    assert found["unknown"] == ""


def test_engines_that_do_not_fit_into_this_machine_together_are_rejected(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["one engine that fits"]["verdict"]["problems"] == []
    problems = answers["two engines that do not fit together"]["verdict"]["problems"]
    assert any("2 engines on this machine" in each for each in problems), problems


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("misspelt argument", "--tensor-parallel-sise"),
        ("a stage without a layer", "stage 4 of 4"),
        ("a stage without a state", "stage 4 of 4"),
        ("equal stages of unlike layers", "pipeline stages of unequal size"),
        ("states without a prefix cache", "recurrent states without vLLM's prefix cache"),
    ],
)
def test_the_answer_names_the_cause(name: str, words: str, answers: dict[str, dict[str, Any]]) -> None:
    (problem,) = answers[name]["verdict"]["problems"]
    assert words in problem


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


def test_the_command_answers_yes_for_a_model_whose_sizes_it_cannot_tell(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "offload.yaml"
    file.write_text("cpu_bytes_to_use: 64MiB\n")
    code, lines = run(file, models / "mamba.json", "--enable-prefix-caching", capsys)
    assert code == 0
    assert any(line.startswith("Yes, ") for line in lines)


def test_the_command_answers_no_even_if_vllm_cannot_read_the_rest_here(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "offload.yaml"
    file.write_text("cpu_bytes_to_use: 64MiB\n")
    code, lines = run(file, models / "dense", "--prefill-context-parallel-size 2", capsys)
    assert code == 1
    assert any(line.startswith("No, kvoffload ") for line in lines)
    assert not any(line.startswith("No verdict") for line in lines)


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
