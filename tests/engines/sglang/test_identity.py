# SPDX-License-Identifier: Apache-2.0
"""Test the parts that SGLang's settings, model and weights add to a namespace, and the rejection of unknown parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engines.sglang.counted import COUNTED

from kvoffload.engines.sglang.facts import FIELDS, WEIGHTS_FROM_ELSEWHERE
from kvoffload.engines.sglang.identity import (
    architecture_of,
    environment_of,
    files_now,
    ranks_of,
    server_facts,
    weights_of,
)
from kvoffload.engines.weights import Files
from kvoffload.errors import ConfigError

HARMLESS = [name for names in FIELDS["ServerArgs"].values() for name in names.split()]
Args = msgspec.defstruct(
    "ServerArgs",
    [
        (name, Any, {"load_format": "auto", "kv_cache_dtype": "auto", "weight_version": "default"}.get(name))
        for name in (*COUNTED.split(), *HARMLESS)
    ],
)
"""A replacement for ``ServerArgs`` with its names. The sglang lane compares the names."""


def resolved(**values: Any) -> dict[str, Any]:
    return dict(msgspec.structs.asdict(Args())) | values


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def make(name: str, content: bytes = b"weights", file: str = "model.safetensors") -> str:
        (directory := tmp_path / name).mkdir(exist_ok=True)
        (directory / file).write_bytes(content)
        return str(directory)

    return make


def weights(version: str = "default", meanwhile: Callable[[], object] = str, **values: Any) -> dict[str, str]:
    """``meanwhile``: called while SGLang loads the weights."""
    before = files_now(resolved(**values))
    meanwhile()
    found = weights_of(Args(), resolved(**values), version, before)
    return {what: each.name() if isinstance(each, Files) else each for what, each in found.items()}


# --------------------------------------------------------------------------------------------- settings and ranks


def test_settings_that_change_bytes_count_and_harmless_ones_do_not() -> None:
    def counts(**values: Any) -> dict[str, Any]:
        return server_facts(Args(), resolved(**values))

    assert counts() == counts(port=1, chunked_prefill_size=2, weight_version="x")
    settings = set(COUNTED.split()) - {"quantization_param_path"}
    before, after = counts(), counts(**dict.fromkeys(settings, "another"))
    assert {name for name in after if after[name] != before.get(name)} == settings


def test_a_setting_of_a_newer_sglang_counts_unless_it_is_at_its_default() -> None:
    newer = msgspec.defstruct("ServerArgs", [("rope_precision", Any, "exact")], bases=(Args,))

    def counts(value: str) -> dict[str, Any]:
        return server_facts(newer(), resolved() | {"rope_precision": value})

    assert counts("exact") == server_facts(Args(), resolved())
    assert counts("rough") != counts("exact")


@pytest.mark.parametrize("record", [object(), msgspec.defstruct("ServerArgs", [("model_path", str, "")])()])
def test_settings_that_cannot_be_read_are_refused(record: Any) -> None:
    with pytest.raises(ConfigError, match="server arguments"):
        server_facts(record, {"model_path": ""})


def test_scales_of_pages_count_by_the_content_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"

    def counts() -> dict[str, Any]:
        return server_facts(Args(), resolved(quantization_param_path=str(path)))

    with pytest.raises(ConfigError, match="--quantization-param-path"):
        counts()
    path.write_text("1.0")
    before = counts()
    path.write_text("2.0")
    assert counts() != before


@pytest.mark.parametrize("dtype", ["mxfp8", "nvfp4", "fp4_mx_block16"])
def test_pages_whose_scales_lie_elsewhere_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype"):
        server_facts(Args(), resolved(kv_cache_dtype=dtype))


def storage(without: str = "", **more: Any) -> Any:
    """Return a replacement for ``HiCacheStorageConfig``."""
    names = [name for name in ("tp_rank", "pp_rank", "dp_rank", "is_mla_model", "newer") if name != without]
    fields = [(name, Any, dataclasses.field(default=0)) for name in names]
    return dataclasses.make_dataclass("HiCacheStorageConfig", fields)(**more)


def test_two_ranks_never_share_and_replicas_do() -> None:
    assert ranks_of(storage(tp_rank=0)) != ranks_of(storage(tp_rank=1))
    assert ranks_of(storage(dp_rank=0)) == ranks_of(storage(dp_rank=1))
    assert ranks_of(storage(newer=0)) != ranks_of(storage(newer=1))


@pytest.mark.parametrize("name", ["tp_rank", "is_mla_model"])
def test_a_rank_that_cannot_be_read_is_refused(name: str) -> None:
    """A renamed ``tp_rank`` would give two ranks the same namespace."""
    with pytest.raises(ConfigError, match=f"storage configuration.*it has no {name}"):
        ranks_of(storage(without=name))


@pytest.mark.parametrize(
    "name",
    [
        *("SGLANG_USE_HND_KVCACHE", "SGLANG_OF_A_NEWER_SGLANG_PORT", "SGLANG_PLUGINS", "SGLANG_DUMP_LOADER_DIR"),
        *("SGLANG_OPT_USE_INKLING_FUSED_LOG_TAU", "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE", "SGLANG_QWEN4_PLE_FILE_DIR"),
        *("AITER_FORCE_A8W4", "AITER_SITUV2_A4W4", "ROCM_QUICK_REDUCE_QUANTIZATION", "DEEP_NORMAL_MODE_USE_INT8_QUANT"),
        *("FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "USE_TRITON_W8A8_FP8_KERNEL", "VIDEO_MAX_PIXELS"),
        "XHS_VIDEO_JPEG_QUALITY",
    ],
)
def test_a_variable_that_is_set_counts(name: str) -> None:
    assert environment_of({name: "1"}) == {name: "1"}


def test_where_a_process_is_and_what_it_tells_does_not_count() -> None:
    harmless = ("SGLANG_RUN_ID", "SGLANG_HOST_IP", "SGLANG_LOG_GC", "PATH", "CUDA_VISIBLE_DEVICES", "MASTER_PORT")
    assert environment_of(dict.fromkeys(harmless, "1")) == {}


# ------------------------------------------------------------------------------------------------------ the model


def rope(**values: Any) -> dict[str, Any]:
    return {"hidden_size": 64, "rope_scaling": values or None}


KNOWN = [
    rope(),
    rope(rope_type="linear", factor=2),
    rope(type="yarn", original_max_position_embeddings=512),
    {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "default"}}}},
]
UNKNOWN = [
    rope(rope_type="yarn"),
    rope(rope_type="of_a_newer_sglang"),
    rope(factor=2),
    {"text_config": {"rope_parameters": {"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}}}},
]


@pytest.mark.parametrize("config", KNOWN, ids=str)
def test_the_context_length_does_not_count_where_rotary_embeddings_are_independent_of_it(config: Any) -> None:
    assert architecture_of(config | {"context_len": 512}) == architecture_of(config | {"context_len": 1024})
    assert architecture_of(config) != architecture_of(config | {"num_layers": 3})
    assert architecture_of(config) == architecture_of(config | {"transformers_version": "6"})


@pytest.mark.parametrize("config", UNKNOWN, ids=str)
def test_the_context_length_counts_where_that_is_not_known(config: Any) -> None:
    assert architecture_of(config | {"context_len": 512}) != architecture_of(config | {"context_len": 1024})


@pytest.mark.parametrize("original", [{"rope": 512}, {"config": 512}, {}], ids=str)
def test_long_rope_is_refused_where_a_batch_may_change_its_factors(original: dict[str, int]) -> None:
    name = "original_max_position_embeddings"
    scaling = {"rope_type": "longrope"} | ({name: 512} if "rope" in original else {})
    config = {"rope_scaling": scaling} | ({name: 512} if "config" in original else {})
    with pytest.raises(ConfigError, match="--context-length"):
        architecture_of(config | {"context_len": 1024})
    if original:
        assert architecture_of(config | {"context_len": 512}) != architecture_of(config | {"context_len": 256})
    else:
        with pytest.raises(ConfigError, match="--context-length"):
            architecture_of(config | {"context_len": 512})


# ---------------------------------------------------------------------------------------------------- the weights


def test_weights_replaced_at_their_path_are_others_and_copies_are_not(write) -> None:
    before = weights(model_path=write("model"))
    assert weights(model_path=write("copy")) == before
    assert weights(model_path=write("model", b"trained")) != before


def test_files_that_change_while_the_server_loads_are_not_those_it_serves(write) -> None:
    path = write("model")
    with pytest.raises(ConfigError, match=r"changed since SGLang began to load it.*--weight-version"):
        weights(meanwhile=lambda: write("model", b"trained"), model_path=path)
    with pytest.raises(ConfigError, match=r"plugin.*not loaded.*--weight-version"):
        weights_of(Args(), resolved(model_path=path), "default", None)
    assert weights_of(Args(), resolved(model_path=path), "v2", None) == {"version": "v2"}


def test_a_drafter_of_another_revision_of_the_same_repository_is_another(tmp_path: Path) -> None:
    def found(draft: str) -> dict[str, str]:
        repository = "org/model"
        names = {"speculative_draft_model_path": repository, "speculative_draft_model_revision": draft}
        return weights(model_path=repository, revision="a" * 40, download_dir=str(tmp_path), **names)

    for revision in ("a", "b"):
        directory = tmp_path / "models--org--model" / "snapshots" / (revision * 40)
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(revision.encode())
    assert found("a" * 40)["model"] == found("a" * 40)["draft"] == found("b" * 40)["model"]
    assert found("b" * 40)["draft"] != found("a" * 40)["draft"]


def test_a_version_wins_whatever_the_files_say(write) -> None:
    assert weights("v2", model_path="nowhere") == weights("v2", model_path=write("model")) == {"version": "v2"}


@pytest.mark.parametrize(
    "values",
    [
        {"model_path": "nowhere/at-all"},
        {"load_format": "remote_instance"},
        {"load_format": "of_a_newer_sglang"},
        *({name: "elsewhere"} for name in WEIGHTS_FROM_ELSEWHERE),
    ],
    ids=str,
)
def test_weights_that_files_do_not_tell_want_a_version(values: dict[str, Any], write) -> None:
    given = {"model_path": write("model")} | values
    with pytest.raises(ConfigError, match="--weight-version"):
        weights(**given)
    assert weights("v2", **given) == {"version": "v2"}


def test_random_weights_are_the_same_everywhere() -> None:
    assert weights(model_path="nowhere", load_format="dummy") == {"model": "dummy"}


def test_a_gguf_is_read_itself(write) -> None:
    path = write("model", file="a[0].gguf") + "/a[0].gguf"
    before = weights(model_path=path)
    write("model", b"another", file="b.gguf")
    assert weights(model_path=path) == before
    write("model", b"trained", file="a[0].gguf")
    assert weights(model_path=path) != before


def test_a_drafter_replaced_at_its_path_is_another(write) -> None:
    given = {"model_path": write("model"), "speculative_draft_model_path": write("draft")}
    before = weights(**given)
    write("draft", b"trained")
    assert weights(**given) != before


def test_an_adapter_replaced_at_its_path_is_another_also_with_a_version(write) -> None:
    adapter = {"lora_id": "a" * 32, "lora_name": "sql", "lora_path": write("lora", file="adapter_model.safetensors")}
    before = weights("v2", lora_paths=[adapter])
    write("lora", b"trained", file="adapter_model.safetensors")
    trained = weights("v2", lora_paths=[adapter])
    write("lora", b'{"lora_alpha": 8}', file="adapter_config.json")
    assert len({str(each) for each in (before, trained, weights("v2", lora_paths=[adapter]))}) == 3
    with pytest.raises(ConfigError, match="/load_lora_adapter"):
        weights("v2", lora_paths=[adapter | {"lora_path": "nowhere/at-all"}])
