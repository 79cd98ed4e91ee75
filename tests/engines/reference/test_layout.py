# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any

import pytest
import torch
from tests.engines.reference.zoo import tiny_model
from transformers import AutoConfig

from kvoffload.config import GroupKind
from kvoffload.engines.facts import facts_of
from kvoffload.engines.reference.engine import FIELDS, Engine, EngineOptions
from kvoffload.engines.reference.layout import LayerPosition, engine_layout, fingerprint, kv_shape
from kvoffload.errors import LayoutError


def test_layers_with_one_window_form_a_group() -> None:
    shape = kv_shape(tiny_model("gemma3_text").config)
    assert shape.windows == (None, 11)
    assert shape.layer_positions == (LayerPosition(1, 0), LayerPosition(0, 0), LayerPosition(1, 1))
    layout = engine_layout(shape, 4, torch.float32, {"model": "x"})
    assert [group.kind for group in layout.groups] == [GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW]
    token_bytes = 2 * 2 * 8 * 4  # keys and values, heads, head size, float32
    assert [group.page_bytes for group in layout.groups] == [4 * token_bytes, 2 * 4 * token_bytes]
    assert layout.identity["model"] == "x" and layout.identity["dtype"] == "torch.float32"


def test_states_that_lie_in_blocks_make_them_others() -> None:
    shape = kv_shape(tiny_model("falcon_h1").config)
    layouts = [engine_layout(each, 4, torch.float32, {}) for each in (shape, dataclasses.replace(shape, states=None))]
    assert [len(layout.groups) for layout in layouts] == [2, 1]
    assert layouts[0].identity != layouts[1].identity


def test_other_families_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="does not support the family 'gpt2'"):
        kv_shape(AutoConfig.for_model("gpt2"))
    config = tiny_model("gemma3_text").config
    config.attn_logit_softcapping = 30.0
    with pytest.raises(LayoutError, match="soft-capped"):
        kv_shape(config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "of a newer transformers"])
def test_rotary_embeddings_that_follow_the_batch_are_refused(kind: str) -> None:
    config = tiny_model("llama").config
    config.rope_parameters = {**config.rope_parameters, "rope_type": kind}
    with pytest.raises(LayoutError, match=f"of the type {kind}, because"):
        kv_shape(config)


def test_the_code_that_computes_a_model_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    identities = []
    for version in ("5.19.0", "5.20.0"):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        with Engine(tiny_model("llama")) as engine:
            identities.append(engine.layout.identity)
    assert identities[0] != identities[1]


def of(model: Any) -> str:
    return fingerprint(model.config, [*model.named_parameters(), *model.named_buffers()])


def test_a_fingerprint_tells_weights_and_configurations_apart() -> None:
    assert of(tiny_model("llama", 0)) == of(tiny_model("llama", 0))
    assert len({of(tiny_model("llama", 0)), of(tiny_model("llama", 1)), of(tiny_model("qwen3", 0))}) == 3


def test_any_weight_counts_wherever_it_changed() -> None:
    before = of(tiny_model("llama"))
    for name, _ in tiny_model("llama").named_parameters():
        model = tiny_model("llama")
        with torch.no_grad():
            model.get_parameter(name).flatten()[-1] += 1
        assert of(model) != before, name


def test_any_field_of_a_configuration_counts_but_the_reader_s_version() -> None:
    model = tiny_model("llama")
    before = of(model)
    model.config.invented = 1
    assert of(model) != before
    del model.config.invented
    model.config.transformers_version = "5.99.0"
    assert of(model) == before
    model.config.invented = object()
    with pytest.raises(LayoutError, match="other processes cannot tell"):
        of(model)


def test_every_option_of_the_engine_counts_unless_it_is_known_to_be_harmless() -> None:
    known = {name for names in FIELDS["EngineOptions"].values() for name in names.split()}
    assert {each.name for each in dataclasses.fields(EngineOptions)} == known

    @dataclasses.dataclass(frozen=True)
    class Newer(EngineOptions):
        kv_dtype: str = "auto"

    assert facts_of(Newer(num_blocks=7), FIELDS) == {}
    assert facts_of(Newer(kv_dtype="fp8"), FIELDS) == {"kv_dtype": '"fp8"'}
