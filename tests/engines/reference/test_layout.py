# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from tests.engines.reference.zoo import tiny_model
from transformers import AutoConfig

from kvoffload.config import GroupKind
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


def test_other_families_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="'gpt2' is another family"):
        kv_shape(AutoConfig.for_model("gpt2"))
    config = tiny_model("gemma3_text").config
    config.attn_logit_softcapping = 30.0
    with pytest.raises(LayoutError, match="soft-capped"):
        kv_shape(config)


def test_a_fingerprint_tells_weights_and_configurations_apart() -> None:
    def of(family: str, seed: int) -> str:
        model = tiny_model(family, seed)
        return fingerprint(model.config, list(model.named_parameters()))

    assert of("llama", 0) == of("llama", 0)
    assert len({of("llama", 0), of("llama", 1), of("qwen3", 0)}) == 3
