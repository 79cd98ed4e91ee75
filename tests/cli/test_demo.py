# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.sizes import by_size

pytest.importorskip("typer")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvoffload.cli import main
from kvoffload.cpu.copy import host
from kvoffload.cpu.copy.plan import Runs

SMALL = {
    "--conversations": 4,
    "--turns": 3,
    "--system-tokens": 16,
    "--document-tokens": 0,
    "--message-tokens": 40,
    "--reply-tokens": 4,
    "--device-tokens": 256,
    "--layers": 2,
    "--hidden": 128,
    "--threads": 1,
}
PAGE_BYTES = 2 * 2 * 16 * 2 * 64 * 4
"""The bytes of a GPU block of this model: layers, keys and values, tokens, heads, head size, float32."""


def demo(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a small demo; ``message_tokens=8`` overrides ``--message-tokens``."""
    chosen = SMALL | {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    with pytest.raises(SystemExit) as caught:
        main(["demo", *(f"{name}={value}" for name, value in chosen.items())])
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_three_ways_agree_and_offloading_computes_least(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = demo(capsys, out=tmp_path / "out.json")
    assert code == 0, out
    # No terminal: the progress is ten lines.
    lines = [line.rpartition(",")[0] for line in err.splitlines()]
    assert (len(lines), lines[-1]) == (10, "demo: 36 of 36 turns")
    assert "Identical: all 3 ways generated the same tokens." in out
    assert "Only a wrong block" in out
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 100
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["tokens"]["identical"] is True
    none, device, offloading = figures["ways"]
    assert none["computed_tokens"] > device["computed_tokens"] > offloading["computed_tokens"]
    assert offloading["offloaded_hit_tokens"] > 0
    assert offloading["metrics"]["load_bytes"] > 0
    assert offloading["metrics"]["primary_blocks_pinned"] == 0
    assert len(offloading["time_to_first_token"]["by_turn"]) == 3


def test_another_policy_and_more_users(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = demo(capsys, policy="arc", users=3)
    assert code == 0, out
    assert "Identical" in out


def test_after_a_restart_the_first_turn_comes_from_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = demo(capsys, disk=tmp_path / "kv", disk_gib=1, out=tmp_path / "out.json")
    assert code == 0, out
    assert "Identical: all 4 ways" in out
    *_, offloading, restarted = json.loads((tmp_path / "out.json").read_text())["ways"]
    assert offloading["metrics"].get("tier_blocks_loaded disk", 0) == 0
    assert restarted["metrics"]["tier_blocks_loaded disk"] > 0
    # All prompts were served before, so of each at most the last block and a bit are computed, in every turn.
    assert restarted["computed_tokens"] < offloading["computed_tokens"] / 2


def test_a_model_with_states_and_its_states_on_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = demo(capsys, model_kind="hybrid", disk=tmp_path / "kv", out=tmp_path / "out.json")
    assert code == 0, out
    assert out.startswith("random Falcon-H1")
    assert "Identical: all 4 ways" in out and "Only a wrong block" in out
    none, device, offloading, restarted = json.loads((tmp_path / "out.json").read_text())["ways"]
    computed = [way["computed_tokens"] for way in (none, device, offloading, restarted)]
    assert computed == sorted(computed, reverse=True) and len(set(computed)) == 4
    for way in (offloading, restarted):
        # Each hit brought one state, and its blocks of attention.
        assert 0 < way["metrics"]["load_blocks single_state"] < way["metrics"]["load_blocks full_attention"]
    assert restarted["metrics"]["tier_blocks_loaded disk"] > 0


def test_a_model_from_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "qwen")
    code, out, _ = demo(capsys, model=tmp_path / "qwen")
    assert code == 0, out
    assert out.startswith(str(tmp_path / "qwen"))
    assert "Identical" in out


@pytest.mark.parametrize("wrong_load", range(1, by_size(2, 6)))
def test_one_wrong_block_is_caught(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong_load: int
) -> None:
    """The first GPU block of one load gets the bytes of the last one, so 16 of a few hundred tokens are wrong."""
    monkeypatch.setattr(host, "copy_to_device", wrong_once(host.copy_to_device, wrong_load))
    code, out, _ = demo(capsys, out=tmp_path / "out.json", users=1)
    assert code == 1, out
    assert "Different tokens" in out
    assert "a block was wrong" in out
    tokens = json.loads((tmp_path / "out.json").read_text())["tokens"]
    assert tokens["identical"] is False
    assert {each["way"] for each in tokens["differences"]} == {"offloading"}


def wrong_once(copy: Callable[[Runs], None], wrong_load: int) -> Callable[[Runs], None]:
    calls = 0

    def wrong_copy(runs: Runs) -> None:
        nonlocal calls
        copy(runs)
        calls += runs.num_bytes >= 2 * PAGE_BYTES
        if calls == wrong_load:
            calls += 1
            ctypes.memmove(int(runs.device[0]), int(runs.host[-1] + runs.lengths[-1]) - PAGE_BYTES, PAGE_BYTES)

    return wrong_copy


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "lfu"}, "lru"),
        ({"device": "tpu"}, "cpu or cuda"),
        ({"model_kind": "rwkv"}, "attention or hybrid"),
        ({"device_tokens": 64}, "--device-tokens must be at least"),
        ({"disk": "unused", "disk_gib": float("inf")}, "--disk-gib must be positive and less than"),
        ({"turns": 400}, "lower --turns"),
        ({"hidden": 100}, "multiple of 128"),
        ({"out": "no/such/folder/out.json"}, "--out"),
        ({"model": "no/such/model"}, "no/such/model"),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = demo(capsys, **options)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert out == ""
