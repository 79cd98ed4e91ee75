# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.cli.kv_size import ModelKV, model_kv
from kvoffload.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 2 * 2 * 4 * 16 * 2),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "float32"},
            2 * 2 * 4 * 16 * 4,
        ),
        (
            {
                "text_config": {
                    "num_hidden_layers": 3,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 2,
                    "head_dim": 5,
                }
            },
            120,
        ),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 61 * 576 * 2),
    ],
)
def test_kv_bytes_of_a_model(tmp_path: Path, config: dict[str, object], expected: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_kv(tmp_path).bytes_per_token == expected
    assert model_kv(tmp_path / "config.json", dtype="fp8").bytes_per_token in (expected // 2, expected // 4)


_MAMBA2 = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1}
_NEMOTRON = {"ssm_state_size": 16, "conv_kernel": 4, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1}
_MAMBA2_BYTES = 2 * (3 * (8 * 32 + 2 * 16) + 8 * 32 * 16)
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 128,
}
_LINEAR_BYTES = 2 * (3 * (2 * 256 + 512) + 4 * 128 * 128)
_JAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "hidden_size": 64}
_LFM2 = {"conv_L_cache": 3, "hidden_size": 64}


@pytest.mark.parametrize(
    ("config", "attention", "states", "layer_bytes"),
    [
        (_MAMBA2 | {"layer_types": ["mamba", "mamba", "attention", "mamba"]}, 1, 3, _MAMBA2_BYTES),  # Granite 4
        (
            _LINEAR | {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]},
            1,
            3,
            _LINEAR_BYTES,
        ),
        (_LFM2 | {"layer_types": ["sliding_attention", "full_attention", "conv", "conv"]}, 2, 2, 2 * 2 * 64),
        (
            _NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba", "attention"]},
            2,
            2,
            _MAMBA2_BYTES,
        ),
        (_NEMOTRON | {"hybrid_override_pattern": "M-M*-ME*"}, 2, 3, _MAMBA2_BYTES),
        (_LFM2 | {"full_attn_idxs": [2, 5, 7]}, 3, 5, 2 * 2 * 64),
        (_MAMBA2 | {"model_type": "bamba", "attn_layer_indices": [1, 4]}, 2, 6, _MAMBA2_BYTES),
        (_LINEAR | {"full_attention_interval": 4}, 2, 6, _LINEAR_BYTES),  # Qwen3-Next
        (_JAMBA | {"attn_layer_period": 4, "attn_layer_offset": 2}, 2, 6, 2 * (3 * 128 + 128 * 16)),
        (_MAMBA2 | {"model_type": "falcon_h1", "mamba_d_head": "auto", "mamba_d_ssm": 256}, 8, 8, _MAMBA2_BYTES),
        (
            _MAMBA2 | {"layer_types": ["mamba", "attention"], "mamba_ssm_dtype": "float32"},
            1,
            1,
            _MAMBA2_BYTES + 2 * 8 * 32 * 16,
        ),
    ],
)
def test_a_recurrent_state_takes_bytes_by_layer_and_none_per_token(
    tmp_path: Path, config: dict[str, object], attention: int, states: int, layer_bytes: int
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 8} | sizes | config))
    groups = -(-states // attention)
    model = model_kv(tmp_path)
    assert model == ModelKV(attention * 2 * 2 * 8 * 2, states * layer_bytes, groups)
    assert model.state_slots(1) == states * layer_bytes
    assert model.state_slots(1 << 30) == groups


def test_attention_alone_has_no_states(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}')
    assert model_kv(tmp_path).state_slots(100) == 0


def test_a_model_without_attention_needs_a_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"layer_types": ["mamba", "mamba"], "num_attention_heads": 4}')
    with pytest.raises(ConfigError, match="has no attention"):
        model_kv(tmp_path)


@pytest.mark.parametrize(
    ("more", "kv_heads"),
    [
        ({"text_config": None}, 8),
        ({"multi_query": True, "model_type": "falcon"}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": False}, 8),
    ],
)
def test_kv_heads(tmp_path: Path, more: dict[str, object], kv_heads: int) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(sizes | more))
    assert model_kv(tmp_path).bytes_per_token == 2 * 2 * kv_heads * 64 * 2


@pytest.mark.parametrize("more", [{"num_key_value_heads": [4, 8]}, {"head_dim": [64]}, {"torch_dtype": [16]}])
def test_a_config_with_lists_for_numbers(tmp_path: Path, more: dict[str, object]) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(sizes | more))
    with pytest.raises(ConfigError):
        model_kv(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_hidden_layers": 3}'])
def test_a_config_that_says_too_little(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_kv(tmp_path)
