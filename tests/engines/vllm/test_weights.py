# SPDX-License-Identifier: Apache-2.0
"""Which weights an engine says it has, and when it cannot say.

Marked ``vllm(elsewhere=True)``: in the lane with vLLM's own KV groups, elsewhere with plain objects (``configs.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.configs import (
    HAS_VLLM,
    HFConfig,
    know_plain_specs,
    speculative,
    stub,
    vllm_config,
)

from kvoffload.config import parse_config
from kvoffload.engines.vllm import weights as module
from kvoffload.engines.vllm.rejections import UNREADABLE_WEIGHTS, check_engine, unclear_is_rejected
from kvoffload.engines.vllm.weights import name_of_weights, note_files
from kvoffload.errors import ConfigError

pytestmark = pytest.mark.vllm(elsewhere=True)

DISK = {"type": "disk", "path": "/blocks", "max_bytes": "1GiB"}
UNNAMED = {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [DISK]}
NAMED = UNNAMED | {"weights_version": "one"}


@pytest.fixture(autouse=True)
def _plain_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    know_plain_specs(monkeypatch)
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    monkeypatch.setattr(module, "_before_load", {})


def write_model(directory: Path, content: bytes = b"weights") -> str:
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(content)
    return str(directory)


def weights(extra: dict[str, Any], meanwhile: Callable[[], object] = str, **changes: Any) -> str | None:
    """Return the name that an engine gives the weights. vLLM loads them during ``meanwhile``."""
    config = vllm_config(**changes | {"kv_transfer_config__kv_connector_extra_config": extra})
    note_files(config)
    meanwhile()
    ours = check_engine(config)  # as in the connector
    with unclear_is_rejected(ours, UNREADABLE_WEIGHTS):
        return name_of_weights(config, ours)()


def test_weights_replaced_at_their_path_are_others(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    before = weights(UNNAMED, model_config__model=path)
    assert before == weights(UNNAMED, model_config__model=path)
    write_model(tmp_path / "model", b"trained")
    assert weights(UNNAMED, model_config__model=path) != before
    assert weights(NAMED, model_config__model="nowhere") == "", "a name wins, and nothing is read"


def test_a_file_of_weights_is_itself(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"one")
    (tmp_path / "two.gguf").write_bytes(b"two")
    one = weights(UNNAMED, model_config__model=str(tmp_path / "one.gguf"))
    (tmp_path / "two.gguf").write_bytes(b"other")
    assert weights(UNNAMED, model_config__model=str(tmp_path / "one.gguf")) == one
    (tmp_path / "one.gguf").write_bytes(b"other")
    assert weights(UNNAMED, model_config__model=str(tmp_path / "one.gguf")) != one


def test_a_drafter_s_weights_count_if_it_has_kv(tmp_path: Path) -> None:
    target, draft = write_model(tmp_path / "target"), write_model(tmp_path / "draft")

    def of(method: str) -> str:
        config = speculative(method=method)
        config.draft_model_config.model = draft
        return weights(UNNAMED, model_config__model=target, speculative_config=config)

    before = {method: of(method) for method in ("eagle", "ngram")}
    write_model(tmp_path / "draft", b"trained")
    assert of("eagle") != before["eagle"]
    assert of("ngram") == before["ngram"]


def test_a_model_s_own_code_counts_if_it_runs(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    changes = {"model_config__model": path}
    trusting = changes | {"model_config__trust_remote_code": True}
    (tmp_path / "model" / "modeling.py").write_text("a")
    before = weights(UNNAMED, **changes), weights(UNNAMED, **trusting)
    (tmp_path / "model" / "modeling.py").write_text("b")
    assert weights(UNNAMED, **changes) == before[0]
    assert weights(UNNAMED, **trusting) != before[1]


def test_scales_in_a_file_count(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    images = stub("MultiModalConfig", mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales))
    changes = {"model_config__model": write_model(tmp_path / "model"), "model_config__multimodal_config": images}
    scales.write_text("1")
    before = weights(UNNAMED, **changes)
    scales.write_text("2")
    assert weights(UNNAMED, **changes) != before


def test_made_up_weights_are_named_by_their_seed_and_ranks() -> None:
    dummy = {"load_config__load_format": "dummy"}
    names = [
        weights(UNNAMED, **dummy, **change)
        for change in ({}, {"model_config__seed": 1}, {"parallel_config__tensor_parallel_size": 2})
    ]
    assert len(set(names)) == 3
    assert weights(UNNAMED, **dummy) == names[0]


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__model": "no/such-model"},
        {"model_config__model_weights": "s3://bucket/model"},
        {"load_config__load_format": "tensorizer"},
        {"load_config__load_format": "of a plug-in"},
        {"weight_transfer_config": object()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_weights_without_a_name_are_refused_where_blocks_outlive_them(change: dict[str, Any], tmp_path: Path) -> None:
    changes = {"model_config__model": write_model(tmp_path / "model")} | change
    with pytest.raises(ConfigError, match=r"weights .*cannot .*'disk'.* set weights_version"):
        weights(UNNAMED, **changes)
    assert weights(NAMED, **changes) == ""
    assert weights({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [{"type": "memory"}]}, **changes) == ""
    assert weights({"cpu_bytes_to_use": "1MiB"}, **changes) == ""


def test_weights_from_elsewhere_are_refused_before_an_engine_starts() -> None:
    for change in ({"load_config__load_format": "tensorizer"}, {"weight_transfer_config": object()}):
        changes = {"kv_transfer_config__kv_connector_extra_config": UNNAMED, **change}
        with pytest.raises(ConfigError, match="weights_version"):
            check_engine(vllm_config(**changes))


def test_a_copy_has_the_same_weights_whatever_its_path(tmp_path: Path) -> None:
    names = {weights(UNNAMED, model_config__model=write_model(tmp_path / name)) for name in ("mount", "renamed")}
    assert len(names) == 1


def test_files_that_change_while_vllm_loads_have_no_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM may have loaded the old files. Its blocks serve only itself, and it starts."""
    path = write_model(tmp_path / "model")
    before = weights(UNNAMED, model_config__model=path)
    trained = functools.partial(write_model, tmp_path / "model", b"trained")
    assert weights(UNNAMED, trained, model_config__model=path) is None
    assert "model.safetensors has changed since" in caplog.text
    assert "set weights_version" in caplog.text
    assert weights(NAMED, trained, model_config__model=path) == ""
    assert weights(UNNAMED, model_config__model=path) not in (None, before)


def test_scales_that_change_while_vllm_loads_have_no_name(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    images = stub("MultiModalConfig", mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales))
    changes = {"model_config__model": write_model(tmp_path / "model"), "model_config__multimodal_config": images}
    scales.write_text("1")
    assert weights(UNNAMED, lambda: scales.write_text("2"), **changes) is None


def test_the_first_start_downloads_the_model_without_symbolic_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("1" * 40)
    monkeypatch.setattr(module, "local_directory", lambda *_: snapshot)

    def download() -> None:
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_bytes(b"weights")

    first = weights(UNNAMED, download, model_config__model="org/tiny")
    assert first is not None
    assert weights(UNNAMED, model_config__model="org/tiny") == first
    assert weights(UNNAMED, model_config__model=write_model(tmp_path / "copy")) == first


def test_an_engine_that_elastic_scaling_adds_has_the_weights_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of other engines may have been updated since they were loaded."""
    path = write_model(tmp_path / "model")
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "1")
    assert weights(UNNAMED, model_config__model=path) is None
    assert weights(NAMED, model_config__model=path) == ""


def test_without_the_plug_in_nobody_has_seen_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config(model_config__model=write_model(tmp_path / "model"))
    assert name_of_weights(config, parse_config(UNNAMED))() is None
    assert "VLLM_PLUGINS" in caplog.text


def test_all_parts_of_a_gguf_count_and_names_are_no_patterns(tmp_path: Path) -> None:
    def of(name: str) -> str:
        return weights(UNNAMED, model_config__model=str(tmp_path / name))

    for name in ("a[1]-00001-of-00002.gguf", "a[1]-00002-of-00002.gguf", "b[1].gguf", "b1.gguf"):
        (tmp_path / name).write_bytes(b"weights")
    parts, single = of("a[1]-00001-of-00002.gguf"), of("b[1].gguf")
    (tmp_path / "a[1]-00002-of-00002.gguf").write_bytes(b"trained")
    (tmp_path / "b1.gguf").write_bytes(b"trained")
    assert of("a[1]-00001-of-00002.gguf") != parts
    assert of("b[1].gguf") == single
    (tmp_path / "b[1].gguf").write_bytes(b"trained")
    assert of("b[1].gguf") != single


def refused(tmp_path: Path, **changes: Any) -> str:
    """Before an engine starts, and when it names its blocks."""
    changes = {"model_config__model": write_model(tmp_path / "model")} | changes
    changes |= {"kv_transfer_config__kv_connector_extra_config": UNNAMED}
    with pytest.raises(ConfigError, match="set weights_version") as error:
        check_engine(vllm_config(**changes))
    with pytest.raises(ConfigError, match="set weights_version"):
        weights(UNNAMED, **changes)
    assert weights(NAMED, **changes) == ""
    return str(error.value)


@pytest.mark.parametrize("value", ["1", "True", "of a newer vLLM"])
def test_what_modelscope_s_cache_has_is_refused(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", value)
    assert "VLLM_USE_MODELSCOPE" in refused(tmp_path, model_config__model="org/tiny")
    weights(UNNAMED, model_config__model=write_model(tmp_path / "model"))  # loaded from there
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "False")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    check_engine(vllm_config(kv_transfer_config__kv_connector_extra_config=UNNAMED, model_config__model="org/tiny"))


def test_models_that_name_other_repositories_or_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model")
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    (tmp_path / "silu").mkdir()
    monkeypatch.chdir(tmp_path)
    fine = {
        "_name_or_path": str(tmp_path),
        "hidden_act": "silu",
        "text_model_id": None,
        "source": path,
        "x": ["a/b", 1],
    }
    weights(UNNAMED, model_config__model=path, model_config__hf_config=HFConfig(**fine))
    for more in (
        {"text_model_id": "org/text"},
        {"text_config": {"parts": [{"audio_model_id": "org/audio"}]}},
        {"quantization_config": {"file": str(scales)}},
        {"quantization_config": {"file": "scales.json"}},
        {"base": f"{tmp_path}/silu"},
    ):
        assert "configuration names" in refused(tmp_path, model_config__hf_config=HFConfig(**fine | more)), more
    overrides = {"quantization_config_file": "scales.json"}
    assert "quantization_config_file" in refused(tmp_path, model_config__hf_overrides=overrides)
    drafter = speculative()
    drafter.draft_model_config.model = path
    drafter.draft_model_config.hf_overrides = lambda config: config
    weights(UNNAMED, model_config__model=path, speculative_config=drafter)
    drafter.draft_model_config.hf_config = HFConfig(text_model_id="org/text")
    assert "text_model_id" in refused(tmp_path, speculative_config=drafter)


@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM's table of loaders")
def test_loaders_of_plug_ins_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import model_loader

    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    own = [name for name in module._READ_FROM_FILES if name in loaders]
    assert {"auto", "safetensors", "pt"} <= set(own)
    path = write_model(tmp_path / "model")
    for name in (*own, "dummy"):
        weights(UNNAMED, model_config__model=path, load_config__load_format=name)
    for name in set(module._READ_FROM_FILES) - set(own):
        assert "plug-in" in refused(tmp_path, load_config__load_format=name)
    for name in ("auto", "gguf", "dummy"):
        monkeypatch.setitem(loaders, name, type("Loader", (loaders["auto"],), {"__module__": "plugin.loaders"}))
        assert "plugin.loaders" in refused(tmp_path, load_config__load_format=name)
