# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.errors import ConfigError
from kvoffload.sim.driver import SimConfig
from kvoffload.sim.kv_size import model_kv_bytes_per_token
from kvoffload.sim.report import as_json, as_page, best_policy, curve, knee_of, table
from kvoffload.sim.sweep import knee, sweep
from kvoffload.sim.trace import Trace


def test_knee() -> None:
    assert knee([1, 2, 3, 4, 10], [10, 60, 62, 63, 64]) == 1
    assert knee([1, 2, 3], [5, 5, 5]) == 2
    assert knee([1], [5]) == 0


def test_whole_blocks_leaves_partial_ones_out(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1, 2], [0, 3], [0, 1, 4]])
    trace.input_tokens[:] = [40, 32, 48]
    whole = trace.whole_blocks()
    assert whole.ids.tolist() == [0, 1, 0, 2, 0, 1, 3]
    assert whole.offsets.tolist() == [0, 2, 4, 7]


def test_reports_of_a_sweep(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1, 2], [0, 3, 4], [0, 1, 2], [0, 3, 4]] * 5)
    configs = [SimConfig(size, 2**30, policy=policy) for policy in ("lru", "arc") for size in (2, 3, 9)]
    reported: list[int] = []
    report = sweep(trace, configs, processes=1, progress=reported.append)
    assert reported == [60] * 6
    assert [(each.policy, each.cpu_blocks) for each in report.results] == [(c.policy, c.cpu_blocks) for c in configs]
    for result, bound in zip(report.results, report.optimum_rates, strict=True):
        assert result.hit_rate <= bound <= report.reachable_rate
    assert best_policy(report) in ("lru", "arc")
    assert [run.cpu_blocks for run, _ in curve(report, "arc")] == [2, 3, 9]
    assert knee_of(report, "lru").cpu_blocks in (2, 3, 9)
    headings, rows = table(report)
    assert "disk" not in headings
    assert [len(row) for row in rows] == [len(headings)] * 6
    assert json.loads(json.dumps(as_json([report])))[0]["accesses"] == 60
    assert as_page([report], "<?xml?><svg></svg>").count("<tr>") == 7


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
    assert model_kv_bytes_per_token(tmp_path) == expected
    assert model_kv_bytes_per_token(tmp_path / "config.json", dtype="fp8") in (expected // 2, expected // 4)


@pytest.mark.parametrize(
    ("layers", "attention"),
    [
        ({"layer_types": ["mamba", "mamba", "attention", "mamba"]}, 1),  # Granite 4
        ({"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}, 1),
        ({"layer_types": ["sliding_attention", "full_attention", "conv", "sliding_attention"]}, 3),
        ({"layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba", "attention"]}, 2),  # Nemotron-H
        ({"hybrid_override_pattern": "M-M*-ME*", "num_hidden_layers": 8}, 2),
        ({"full_attn_idxs": [2, 5, 8], "num_hidden_layers": 10}, 3),  # LFM2
        ({"full_attention_interval": 4, "num_hidden_layers": 48}, 12),  # Qwen3-Next
        ({"attn_layer_period": 8, "attn_layer_offset": 4, "num_hidden_layers": 32}, 4),  # Jamba
    ],
)
def test_layers_with_a_recurrent_state_take_no_bytes_per_token(
    tmp_path: Path, layers: dict[str, object], attention: int
) -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "dtype": "float16"} | layers
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_kv_bytes_per_token(tmp_path) == attention * 2 * 2 * 8 * 2


def test_a_model_without_attention_needs_a_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"layer_types": ["mamba", "mamba"], "num_attention_heads": 4}')
    with pytest.raises(ConfigError, match="has no attention"):
        model_kv_bytes_per_token(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_hidden_layers": 3}'])
def test_a_config_that_says_too_little(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_kv_bytes_per_token(tmp_path)
