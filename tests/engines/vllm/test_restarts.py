# SPDX-License-Identifier: Apache-2.0
"""A restart with something exchanged, over one store: the new engine finds nothing of the old one's KV, and answers as
vLLM alone does. ``test_identity.py`` has all pairs over plain configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.engines.greedy import Baseline
from tests.engines.models import HEAD_DIM, SEED, SmallModel, write_llama
from tests.engines.vllm.drafts import Speculation
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.pairs import CACHED, alone, over_one_store, serve
from tests.engines.vllm.prompts import ONE_BLOCK_A_STEP

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

WEIGHTS = "model.safetensors"
HAS_FP8 = "avx512f" in Path("/proc/cpuinfo").read_text()


def nothing_found(seen: dict[str, Any], right: Baseline) -> bool:
    return set(seen["cached"].values()) == {0} and right.wrong(seen["tokens"]) == []


def test_longrope_at_another_limit_finds_nothing(tmp_path: Path) -> None:
    """Up to 2048 tokens the model has its short factors, for longer limits its long ones."""
    model = write_llama(tmp_path / "model").path
    file = Path(model) / "config.json"
    config = json.loads(file.read_text())
    factors = HEAD_DIM // 2
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * factors,
        "long_factor": [1.0 + 7 * n / factors for n in range(factors)],
        "original_max_position_embeddings": 2048,
        "factor": 8.0,
    }
    config |= {"original_max_position_embeddings": 2048, "max_position_embeddings": 16384}
    file.write_text(json.dumps(config))
    extra = over_one_store(tmp_path)
    serve(model, extra, max_model_len=1280)
    assert set(serve(model, extra, max_model_len=1280)["cached"].values()) == {CACHED}
    long = serve(model, extra, max_model_len=3000)
    assert nothing_found(long, alone(model, max_model_len=3000))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Baseline]:
    """Return the Llama with other weights, and its answers."""
    path = write_llama(tmp_path_factory.mktemp("other"), seed=SEED + 1).path
    return path, alone(path)


def test_weights_replaced_at_their_path_find_nothing(
    llama: SmallModel, other: tuple[str, Baseline], tmp_path: Path
) -> None:
    shutil.copytree(llama.path, model := tmp_path / "model")
    extra = over_one_store(tmp_path)
    serve(str(model), extra, prompts=2)
    shutil.copy(Path(other[0]) / WEIGHTS, model / WEIGHTS)
    assert nothing_found(serve(str(model), extra, prompts=2), other[1])


def test_another_revision_finds_nothing(llama: SmallModel, other: tuple[str, Baseline], tmp_path: Path) -> None:
    """The model is a revision of a model of the Hub in its cache."""
    repo = tmp_path / "hub" / "models--org--tiny"
    for revision, directory in (("main", llama.path), ("v2", other[0])):
        commit = revision.encode().hex().ljust(40, "0")
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
        shutil.copytree(directory, repo / "snapshots" / commit)
    extra = over_one_store(tmp_path)
    hub: dict[str, Any] = {"environment": {"HF_HUB_CACHE": str(tmp_path / "hub")}, "prompts": 2}
    serve("org/tiny", extra, **hub)
    assert nothing_found(serve("org/tiny", extra, revision="v2", **hub), other[1])


@pytest.mark.skipif(not HAS_FP8, reason="vLLM's FP8 KV needs AVX-512 on a CPU")
def test_other_skipped_layers_find_nothing(llama: SmallModel, tmp_path: Path) -> None:
    extra = over_one_store(tmp_path)
    first, second = ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": [layer]} for layer in ("0", "1"))
    serve(llama.path, extra, prompts=2, **first)
    assert set(serve(llama.path, extra, prompts=2, **first)["cached"].values()) == {CACHED}
    # Answers over FP8 KV have too many near ties to be compared.
    assert set(serve(llama.path, extra, prompts=2, **second)["cached"].values()) == {0}


def write_adapter(directory: Path, seed: int) -> str:
    """LoRA of rank 8 on the values of all layers of the Llama."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, 256, generator=generator) / 16
        weights[f"{name}.lora_B.weight"] = torch.randn(2 * HEAD_DIM, 8, generator=generator)
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def test_an_adapter_replaced_at_its_path_finds_nothing(llama: SmallModel, tmp_path: Path) -> None:
    """Unless a promise says that none ever is."""
    path, extra = write_adapter(tmp_path / "adapter", seed=1), over_one_store(tmp_path)
    promise = extra | {"adapters_never_change": True}
    first, again = (run_child("adapter", model=llama.path, extra=promise, path=path) for _ in range(2))
    assert first["tokens"] == again["tokens"]
    assert set(again["cached"].values()) == {CACHED}
    write_adapter(tmp_path / "adapter", seed=2)
    right, seen = (run_child("adapter", model=llama.path, extra=each, path=path) for each in (None, extra))
    assert right["tokens"] != first["tokens"], "the adapters differ"
    assert seen["tokens"] == right["tokens"]
    assert set(seen["cached"].values()) == {0}


def test_a_drafter_replaced_at_its_path_finds_nothing(
    drafts: dict[str, Speculation], drafts_baseline: Baseline, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    eagle = drafts["eagle"]
    shutil.copytree(eagle.config["model"], drafter := tmp_path / "drafter")
    options: dict[str, Any] = {"prompts": 2, "speculative_config": eagle.config | {"model": str(drafter)}}
    extra = over_one_store(tmp_path)
    serve(eagle.target, extra, **options)
    weights = load_file(drafter / WEIGHTS)
    generator = torch.Generator().manual_seed(SEED)
    other = {name: torch.randn(each.shape, generator=generator) / 16 for name, each in weights.items()}
    save_file(other, drafter / WEIGHTS, metadata={"format": "pt"})
    assert nothing_found(serve(eagle.target, extra, **options), drafts_baseline)


def test_another_dtype_of_states_finds_nothing(falcon: SmallModel, tmp_path: Path) -> None:
    extra = over_one_store(tmp_path)
    options: dict[str, Any] = {"prompts": 2, "family": "states", **ONE_BLOCK_A_STEP}
    serve(falcon.path, extra, **options)
    # That of the recurrent state itself vLLM sets to float32 on some processors.
    other = {"mamba_cache_dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    right = Baseline(run_child("baseline", model=falcon.path, family="states", **ONE_BLOCK_A_STEP, **other))
    assert nothing_found(serve(falcon.path, extra, **options, **other), right)
