# SPDX-License-Identifier: Apache-2.0
"""The options are checked before anything is touched, and namespaces differ where bytes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout
from kvoffload.engines.sglang.options import namespace_of, parse_options
from kvoffload.errors import ConfigError
from kvoffload.tiering.spec import persistent_namespace

PAGE = {"layout": "page_first", "dtype": "torch.bfloat16", "page_size": 64, "pieces": [4096, 4096]}
MODEL = {"name": "org/Qwen3-8B", "revision": None}
RANKS = {"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "is_mla_model": False}


def of(pool: str = "kv", page: Any = PAGE, model: Any = MODEL, ranks: Any = RANKS) -> str:
    return namespace_of(pool, page, model, ranks)


def test_options_have_defaults_and_tiers_by_order(tmp_path: Path) -> None:
    tiers = [{"type": "memory", "max_bytes": "1MiB"}, {"type": "disk", "path": str(tmp_path / "d")}]
    options = parse_options({"interface_v1": 1, "kvoffload": {"secondary_tiers": tiers, "max_wait_s": "2s"}})
    assert [tier.label for tier in options.tiers] == ["memory", "disk"]
    assert options.max_wait_s == 2
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "lacks 'secondary_tiers'"),
        ({"secondary_tiers": []}, "is empty"),
        ({"secondary_tiers": [{"type": "memory"}], "max_wait": 1}, "Did you mean 'max_wait_s'"),
        ({"secondary_tiers": [{"type": "memory"}], "max_wait_s": 0}, "must be positive"),
        ({"secondary_tiers": [{"type": "memory"}], "metrics_port": -1}, "from 0 to 65535"),
        ({"secondary_tiers": [{"type": "memory"}], "staging_bytes": "lots"}, "staging_bytes"),
        ({"secondary_tiers": [{"type": "memory", "cascade": "on_evict"}]}, "--hicache-write-policy"),
        ({"secondary_tiers": [{"type": "dsik"}]}, "disk"),
        ("disk", "must be a mapping"),
    ],
)
def test_mistakes_are_one_clear_sentence(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_options({"kvoffload": given})


def test_a_namespace_is_readable_and_stable() -> None:
    assert of().startswith("sglang-Qwen3-8B-bfloat16-")
    assert of() == of()
    assert of("mamba").startswith("sglang-Qwen3-8B-bfloat16-mamba-")


@pytest.mark.parametrize(
    "other",
    [
        {"pool": "indexer"},
        {"page": PAGE | {"layout": "layer_first"}},
        {"page": PAGE | {"dtype": "torch.float16"}},
        {"page": PAGE | {"page_size": 32}},
        {"page": PAGE | {"pieces": [8192]}},
        {"model": MODEL | {"name": "other/Qwen3-8B"}},
        {"model": MODEL | {"revision": "main"}},
        {"ranks": RANKS | {"tp_rank": 1}},
        {"ranks": RANKS | {"tp_size": 4}},
        {"ranks": RANKS | {"pp_rank": 1}},
    ],
    ids=str,
)
def test_what_changes_bytes_changes_the_namespace(other: dict[str, Any]) -> None:
    assert of(**other) != of()


def test_latent_attention_is_the_same_on_all_ranks_but_states_and_drafts_are_not() -> None:
    ranks = [RANKS | {"is_mla_model": True, "tp_rank": rank} for rank in (0, 1)]
    assert of(ranks=ranks[0]) == of(ranks=ranks[1])
    for pool in ("mamba", "draft", "draft_swa"):
        assert of(pool, ranks=ranks[0]) != of(pool, ranks=ranks[1])
    # The exception is a drafter with latent attention, whose pages SGLang also writes on one rank.
    latent = {"pool": "MLATokenToKVPoolHost"}
    assert of("draft", latent, ranks=ranks[0]) == of("draft", latent, ranks=ranks[1])
    assert of("mamba", latent, ranks=ranks[0]) != of("mamba", latent, ranks=ranks[1])


def test_engines_do_not_share_a_namespace() -> None:
    """Even where all facts that both have are equal."""
    group = KVGroupLayout(GroupKind.FULL_ATTENTION, 64, 8192)
    layout = EngineLayout((group,), 64, "one", identity={"model": "Qwen3-8B", "dtype": "bfloat16"})
    assert persistent_namespace(layout, 1) != of()
