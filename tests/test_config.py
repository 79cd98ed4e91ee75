# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
from dataclasses import replace
from enum import Enum
from typing import Any

import msgspec
import pytest

from kvoffload.config import DEFAULTS, EngineLayout, GroupKind, KVGroupLayout, RankSlice, parse_config, parse_struct
from kvoffload.cpu.manager import CPUOffloadingManager, CPUPrimaryTierOffloadingManager
from kvoffload.errors import ConfigError, LayoutError


def test_a_config_has_defaults_and_leaves_its_mapping_alone() -> None:
    mapping = {"cpu_bytes_to_use": "1GiB"}
    config = parse_config(mapping)
    assert config.cpu_bytes == 1 << 30
    assert config.eviction_policy == "density"
    assert mapping == {"cpu_bytes_to_use": "1GiB"}


def test_a_request_need_not_wait_at_all() -> None:
    assert parse_config({"cpu_bytes_to_use": 1, "max_wait_s": 0}).max_wait_s == 0
    assert parse_config({"cpu_bytes_to_use": 1, "max_wait_s": "2 min"}).max_wait_s == 120


def test_the_managers_fixed_signatures_have_the_configurations_defaults() -> None:
    for manager in (CPUOffloadingManager, CPUPrimaryTierOffloadingManager):
        parameters = inspect.signature(manager).parameters
        for name in ("store_threshold", "max_tracker_size"):
            assert parameters[name].default == getattr(DEFAULTS, name)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 1, "evction_policy": "lru"}, "Did you mean 'eviction_policy'"),
        ({"cpu_bytes_to_use": "lots"}, "must be a size"),
        ({"cpu_bytes_to_use": 1, "store_threshold": "two"}, "store_threshold"),
        ({"cpu_bytes_to_use": 1, "store_threshold": -1}, "store_threshold"),
        ({"cpu_bytes_to_use": 1, "max_tracker_size": 0}, "max_tracker_size"),
        ({"cpu_bytes_to_use": 1, "block_size": 0}, "block_size"),
        ({"cpu_bytes_to_use": 1, "promotion_share": 1.5}, "promotion_share"),
        ({"cpu_bytes_to_use": 1, "claim_share": 0.5}, "promotion_share"),
        (
            {"cpu_bytes_to_use": 1, "prefill_tokens_per_s": 0},
            "prefill_tokens_per_s must be a number from 0.001 to 1e12",
        ),
        ({"cpu_bytes_to_use": 1, "prefill_tokens_per_s": float("inf")}, "prefill_tokens_per_s"),
        ({"cpu_bytes_to_use": 1, "prefill_tokens_per_s": float("nan")}, "prefill_tokens_per_s"),
        ({"cpu_bytes_to_use": 1, "prefill_tokens_per_s": "fast"}, "prefill_tokens_per_s"),
        ({"cpu_bytes_to_use": 1, "max_wait_s": -1}, "max_wait_s"),
        ({"cpu_bytes_to_use": 1, "max_wait_s": float("nan")}, "max_wait_s"),
        ({"cpu_bytes_to_use": 1, "max_wait_s": "soon"}, "must be a time"),
    ],
)
def test_mistakes_are_one_sentence(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(mapping)


def layout(*block_tokens: int) -> EngineLayout:
    groups = tuple(KVGroupLayout(GroupKind.FULL_ATTENTION, tokens, 1000) for tokens in block_tokens)
    return EngineLayout(groups=groups, hash_block_tokens=16, instance_id="x", num_ranks=2)


def test_the_factor_and_the_bytes_of_a_slot() -> None:
    assert layout(16).block_size_factor(parse_config({"cpu_bytes_to_use": 1})) == 1
    assert layout(16, 32).block_size_factor(parse_config({"cpu_bytes_to_use": 1, "block_size": 64})) == 4
    assert layout(16).block_bytes(4) == 8000
    with pytest.raises(ConfigError, match="multiple of the engine's block of 16 tokens"):
        layout(16).block_size_factor(parse_config({"cpu_bytes_to_use": 1, "block_size": 40}))


def test_layouts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(LayoutError, match="not a multiple"):
        layout(24)
    with pytest.raises(LayoutError, match="no KV cache groups"):
        layout()
    with pytest.raises(LayoutError, match="sliding_window_tokens"):
        KVGroupLayout(GroupKind.SLIDING_WINDOW, 16, 100)
    with pytest.raises(LayoutError, match="lookahead_tokens must be 0 or more"):
        KVGroupLayout(GroupKind.FULL_ATTENTION, 16, 100, lookahead_tokens=-1)
    with pytest.raises(LayoutError, match="hash_block_tokens must be at least 1"):
        EngineLayout(layout(16).groups, hash_block_tokens=0, instance_id="x")
    for tokens, page_bytes in ((0, 1), (1, 0)):
        with pytest.raises(LayoutError, match="positive block_tokens and page_bytes"):
            KVGroupLayout(GroupKind.FULL_ATTENTION, tokens, page_bytes)
    for window, kind in ((0, GroupKind.SLIDING_WINDOW), (1, GroupKind.FULL_ATTENTION)):
        with pytest.raises(LayoutError, match="sliding_window_tokens"):
            KVGroupLayout(kind, 1, 1, sliding_window_tokens=window)
    KVGroupLayout(GroupKind.SLIDING_WINDOW, 1, 1, sliding_window_tokens=1)
    for rank in (-1, 1):
        with pytest.raises(LayoutError, match="outside of 1 ranks"):
            EngineLayout(layout(16).groups, hash_block_tokens=1, instance_id="x", rank=rank)
    for part in ((-1, 1), (1, 1), (0, 1, -1, 1), (0, 1, 1, 1)):
        with pytest.raises(LayoutError, match="index must be below num_slices"):
            RankSlice(*part)
    assert RankSlice(1, 2, 1, 2)


def test_states_are_those_of_any_group() -> None:
    state = KVGroupLayout(GroupKind.SINGLE_STATE, 16, 1000)
    assert not layout(16, 32).has_states
    assert replace(layout(16), groups=(*layout(16).groups, state)).has_states


class Speed(Enum):
    SLOW = "slow"


class OfMyTier(msgspec.Struct):
    speed: Speed


def test_an_option_of_a_type_without_a_word_of_its_own_is_named_by_it() -> None:
    with pytest.raises(ConfigError, match="speed of my tier must be a Speed, not text"):
        parse_struct(OfMyTier, {"speed": "fast"}, "my tier")
