# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from kvoffload.demo.setup import (
    BLOCK_TOKENS,
    check_length,
    engine_options,
    make_model,
    offloading_config,
    use_device,
    ways_of,
)
from kvoffload.demo.workload import ChatWorkload
from kvoffload.errors import ConfigError

CHAT = ChatWorkload(conversations=8, turns=4, system_tokens=0, message_tokens=84, reply_tokens=16, users=2)
"""3,200 tokens, 400 a conversation."""


def test_the_pool_is_a_quarter_of_the_chat_unless_the_users_need_more() -> None:
    assert engine_options(CHAT, None).num_blocks == 2 * (400 + BLOCK_TOKENS) // BLOCK_TOKENS
    many = ChatWorkload(conversations=40, turns=4, system_tokens=0, message_tokens=84, reply_tokens=16, users=2)
    assert engine_options(many, None).num_blocks == 40 * 400 // 4 // BLOCK_TOKENS
    assert engine_options(CHAT, 640).num_blocks == 40
    with pytest.raises(ConfigError, match="at least 416"):
        engine_options(CHAT, 415)


def test_host_memory_holds_the_whole_chat_by_default_and_a_disk_adds_a_way(tmp_path: Path) -> None:
    llm = make_model(None, "attention", "cpu", layers=1, hidden=128)
    per_token = 2 * 2 * 64 * 4  # keys and values, two KV heads of 64, float32
    config = offloading_config(llm, CHAT, "lru", None, 1.0)
    assert config.cpu_bytes == int(1.2 * 8 * (400 + 16) * per_token)
    assert [way.name for way in ways_of(config)] == ["no cache", "device cache", "offloading"]
    config = offloading_config(llm, CHAT, "lru", tmp_path, 2.0)
    assert config.secondary_tiers[0]["max_bytes"] == 2 << 30
    assert [way.name for way in ways_of(config)][3:] == ["restarted"]
    with pytest.raises(ConfigError, match="lower --turns"):
        check_length(ChatWorkload(turns=1000), llm)


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="cpu or cuda"):
        use_device("tpu", None)
