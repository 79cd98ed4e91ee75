# SPDX-License-Identifier: Apache-2.0
"""Test which ranks hold the same KV, compared with the parts that vLLM's layers give to each rank, and unknown cases.

Marked ``vllm(elsewhere=True)``: the tests use vLLM's own KV groups in the lane, and plain objects (``configs.py``)
elsewhere.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.vllm.configs import (
    attention,
    heads,
    know_plain_specs,
    kv_cache_config,
    latent,
    mamba,
    model_config,
    ring,
    sliding,
    speculative,
    vllm_config,
)

from kvoffload.config import EngineLayout, RankSlice, parse_config
from kvoffload.engines.vllm.layout import layout_of, preferred_layout
from kvoffload.engines.vllm.slices import offloaded_groups, offloaded_ids, slice_of, why_not_rank_free
from kvoffload.tiering.spec import persistent_namespace

pytestmark = pytest.mark.vllm(elsewhere=True)

TIER = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "memory"}]}
WITH_TIER = parse_config({"cpu_bytes_to_use": "1MiB"} | TIER)


@pytest.fixture(autouse=True)
def _plain_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    know_plain_specs(monkeypatch)


def of_ranks(ranks: int, caches: Any, **changes: Any) -> list[RankSlice]:
    """Return the slice of each of ``ranks`` ranks of tensor parallelism."""
    config = vllm_config(parallel_config__tensor_parallel_size=ranks, parallel_config__world_size=ranks, **changes)
    return [slice_of(config, caches, rank) for rank in range(ranks)]


def heads_of_rank(rank: int, ranks: int, total: int) -> tuple[int, ...]:
    """Return the KV heads that vLLM's ``QKVParallelLinear`` computes on a rank."""
    if total >= ranks:
        return tuple(range(rank * total // ranks, (rank + 1) * total // ranks))
    return (rank // (ranks // total),)


@pytest.mark.parametrize(
    ("total", "ranks"), [(1, 1), (1, 2), (1, 8), (2, 2), (2, 4), (2, 8), (4, 2), (4, 8), (8, 8), (8, 2), (8, 16)]
)
def test_ranks_with_the_same_heads_share_a_slice(total: int, ranks: int) -> None:
    specs = attention(num_kv_heads=max(1, total // ranks)), sliding(64, num_kv_heads=max(1, total // ranks))
    parts = of_ranks(ranks, kv_cache_config(*specs), model_config=model_config(total))
    assert {part.num_slices for part in parts} == {min(total, ranks)}
    held: dict[int, set[tuple[int, ...]]] = {}
    for rank, part in enumerate(parts):
        held.setdefault(part.index, set()).add(heads_of_rank(rank, ranks, total))
    assert sorted(held) == list(range(min(total, ranks)))
    assert all(len(each) == 1 for each in held.values()), "a slice of ranks that hold other heads"
    # In each slice, one rank stores a slot.
    by_slice = sorted((part.index, part.replica) for part in parts)
    replicas = ranks // min(total, ranks)
    assert by_slice == [(index, n) for index in range(min(total, ranks)) for n in range(replicas)]
    assert {part.num_replicas for part in parts} == {replicas}


@pytest.mark.parametrize(("stages", "context"), [(1, 2), (2, 1), (2, 2), (3, 4)])
@pytest.mark.parametrize(("total", "ranks"), [(1, 4), (2, 8), (1, 8), (8, 8)])
def test_stages_divide_layers_and_context_divides_tokens(total: int, ranks: int, stages: int, context: int) -> None:
    """Compare slices with a rank's contents: its stage's layers, its heads, and the tokens of its place in the context
    group.

    The place is the rank modulo the group's size.
    """
    if context > max(1, ranks // total):
        pytest.skip("vLLM refuses it: the ranks of a context group have the same heads")
    config = vllm_config(
        parallel_config__tensor_parallel_size=ranks,
        parallel_config__pipeline_parallel_size=stages,
        parallel_config__decode_context_parallel_size=context,
        parallel_config__world_size=ranks * stages,
        model_config=model_config(total),
    )
    caches = kv_cache_config(attention(num_kv_heads=max(1, total // ranks)))
    held: dict[int, set[Any]] = {}
    stored: list[tuple[int, int]] = []
    for rank in range(ranks * stages):
        part = slice_of(config, caches, rank)
        stage, within = divmod(rank, ranks)
        held.setdefault(part.index, set()).add((stage, heads_of_rank(within, ranks, total), within % context))
        stored.append((part.index, part.replica))
    num_slices = stages * min(total, ranks) * context
    assert sorted(held) == list(range(num_slices))
    assert all(len(each) == 1 for each in held.values()), "a slice of ranks that hold other bytes"
    assert len({tuple(each) for each in held.values()}) == num_slices, "bytes that two slices hold"
    assert sorted(stored) == [(index, n) for index in range(num_slices) for n in range(ranks * stages // num_slices)]


@pytest.mark.parametrize(
    ("make", "total", "nodes", "expected"),
    [
        (latent, 128, 2, [RankSlice(0, 1, n, 4) for n in range(4)] * 2),  # once on each node
        (attention, 8, 2, [RankSlice(n, 4) for n in range(4)] * 2),
        (lambda: attention(num_kv_heads=1), 4, 2, [RankSlice(n // 2, 2, n % 2, 2) for n in range(4)] * 2),
        (lambda: attention(num_kv_heads=1), 2, 4, [RankSlice(0, 1, n, 2) for n in range(2)] * 4),
    ],
)
def test_each_node_keeps_what_its_own_ranks_hold(make: Any, total: int, nodes: int, expected: list[RankSlice]) -> None:
    caches, model = kv_cache_config(make()), model_config(total)
    assert of_ranks(8, caches, model_config=model, parallel_config__nnodes_within_dp=nodes) == expected


def test_replicas_that_lie_on_unlike_nodes_have_slices_of_their_own() -> None:
    """Of six ranks on two nodes, two ranks hold each head. The ranks with the second head are on both nodes."""
    caches, model = kv_cache_config(attention(num_kv_heads=1)), model_config(3)
    apart = of_ranks(6, caches, model_config=model, parallel_config__nnodes_within_dp=2)
    assert apart == [RankSlice(n, 3) for n in range(3)] * 2


def test_latent_attention_is_the_same_on_all_ranks() -> None:
    config = {"model_config": model_config(128)}
    assert of_ranks(8, kv_cache_config(latent()), **config) == [RankSlice(0, 1, rank, 8) for rank in range(8)]
    with_window = kv_cache_config(latent(), latent(window=64))
    assert of_ranks(4, with_window, **config) == [RankSlice(0, 1, rank, 4) for rank in range(4)]


def test_what_vllm_says_of_replicas_counts_where_layers_differ() -> None:
    caches = kv_cache_config(latent(), kv_tp_replicas=4)
    caches.kv_cache_tensors = caches.kv_cache_tensors * 2  # two specs in one group, only one visible
    assert of_ranks(8, caches) == [RankSlice(rank // 4, 2, rank % 4, 4) for rank in range(8)]


DIFFERENT: dict[str, Any] = {
    "window layers with other heads": model_config(1, swa_num_key_value_heads=4),
    "heads layer by layer": model_config(1, num_key_value_heads_per_layer=[1, 2, 1]),
    "in a nested part": model_config(1, attention_other_setting={"num_attention_groups": 4}),
    "blocks": model_config(1, block_configs=[{"attention": {"n_heads_in_group": 8}}]),
}


@pytest.mark.parametrize("model", DIFFERENT.values(), ids=DIFFERENT)
def test_models_whose_layers_may_have_other_heads_count_as_not_replicated(model: Any) -> None:
    caches = kv_cache_config(attention(num_kv_heads=1))
    assert of_ranks(4, caches, model_config=model_config(1, num_kv_shared_layers=3))[0].num_replicas == 4
    assert of_ranks(4, caches, model_config=model) == [RankSlice(rank, 4) for rank in range(4)]


def test_states_and_drafters_of_other_heads_count_as_not_replicated() -> None:
    one = model_config(1)
    apart = [RankSlice(rank, 4) for rank in range(4)]
    assert of_ranks(4, kv_cache_config(attention(num_kv_heads=1), mamba()), model_config=one) == apart
    layers = kv_cache_config(attention(num_kv_heads=1))
    drafter = SimpleNamespace(**vars(speculative().draft_model_config) | heads(4))
    assert of_ranks(4, layers, model_config=one, speculative_config=speculative(draft_model_config=drafter)) == apart
    same = SimpleNamespace(**vars(drafter) | heads(1))
    shared = of_ranks(4, layers, model_config=one, speculative_config=speculative(draft_model_config=same))
    assert shared == [RankSlice(0, 1, rank, 4) for rank in range(4)]


def test_ranks_that_do_not_divide_evenly_count_as_not_replicated() -> None:
    caches = kv_cache_config(attention(num_kv_heads=1))
    assert of_ranks(3, caches, model_config=model_config(2)) == [RankSlice(rank, 3) for rank in range(3)]


# --------------------------------------------------------------------------------------------------- rank-free blocks


def layout_with(ranks: int, total_heads: int, *specs: Any, config: Any = WITH_TIER, **changes: Any) -> EngineLayout:
    each = max(1, total_heads // ranks)
    caches = kv_cache_config(*specs or (attention(num_kv_heads=each), sliding(64, num_kv_heads=each)))
    parallel = {"parallel_config__tensor_parallel_size": ranks, "parallel_config__world_size": ranks}
    changes = {"model_config": model_config(total_heads)} | parallel | changes
    return layout_of(vllm_config(**changes), caches, config)


def test_engines_of_any_number_of_ranks_share_blocks() -> None:
    layouts = [layout_with(ranks, 4) for ranks in (1, 2, 4, 8)]
    assert all(layout.rank_free for layout in layouts)
    assert len({persistent_namespace(layout, 1) for layout in layouts}) == 1
    assert len({layout.block_bytes(3) for layout in layouts}) == 1, "one slot holds all heads once"
    assert [layout.slice.num_replicas for layout in layouts] == [1, 1, 1, 2]
    assert persistent_namespace(layout_with(2, 8), 1) != persistent_namespace(layouts[0], 1)


def test_latent_attention_needs_no_heads_to_be_shared() -> None:
    layouts = [layout_with(ranks, 128, latent()) for ranks in (1, 2, 8)]
    assert len({persistent_namespace(layout, 1) for layout in layouts}) == 1
    assert not any(layout.rank_free for layout in layouts), "each rank has all bytes of a page"


def per_token_scales() -> Any:
    try:
        from vllm.v1.kv_cache_interface import KVQuantMode
    except ImportError:
        return attention(kv_quant_mode=SimpleNamespace(is_per_token_head=True))
    return attention(kv_quant_mode=next(mode for mode in KVQuantMode if mode.is_per_token_head))


@pytest.mark.parametrize(
    ("make", "change", "why"),
    [
        (lambda: (attention(), mamba()), {}, "kind 'mamba' is not divided by heads"),
        (lambda: (latent(),), {}, "kind 'mla_attention' is not divided by heads"),
        (lambda: (attention(num_head_slots=4),), {}, "keeps more than heads"),
        (lambda: (per_token_scales(),), {}, "keeps more than heads"),
        (lambda: (attention(num_kv_heads=1),), {}, "2 ranks have 1 KV heads each, of 4 in all"),
        (lambda: (attention(),), {"model_config": model_config(4, swa_num_key_value_heads=8)}, "may differ in their"),
    ],
)
def test_what_keeps_blocks_apart(make: Any, change: dict[str, Any], why: str) -> None:
    specs = make()
    two, four = layout_with(2, 4, *specs, **change), layout_with(4, 4, *specs, **change)
    assert not two.rank_free
    assert persistent_namespace(two, 1) != persistent_namespace(four, 1) or two.slice.num_slices == 1
    ranks = {"parallel_config__tensor_parallel_size": 2, "parallel_config__world_size": 2}
    config = vllm_config(**{"model_config": model_config(4)} | ranks | change)
    assert why in str(why_not_rank_free(config, kv_cache_config(*specs)))


def test_layers_of_several_specs_and_layouts_with_tokens_first_keep_blocks_apart() -> None:
    config = vllm_config(model_config=model_config(2))
    assert why_not_rank_free(config, kv_cache_config(attention())) is None
    several = kv_cache_config(attention())
    several.kv_cache_tensors = several.kv_cache_tensors * 2
    assert why_not_rank_free(config, several) == "layers of one KV group differ"
    tokens_first = kv_cache_config(attention(), kv_cache_layout="BLNHC")
    assert why_not_rank_free(config, tokens_first) == "the layout BLNHC has the heads of a token side by side"


def test_stages_and_context_keep_blocks_apart() -> None:
    names = set()
    for change in ({}, {"pipeline": 2}, {"decode_context": 2}):
        parallel = {f"parallel_config__{name}_parallel_size": size for name, size in change.items()}
        world = {"parallel_config__world_size": 2 * change.get("pipeline", 1)}
        layout = layout_with(2, 1, attention(num_kv_heads=1), **world | parallel)
        assert layout.rank_free == (not change)
        names.add(persistent_namespace(layout, 1))
    interleaved = {
        "parallel_config__decode_context_parallel_size": 2,
        "parallel_config__cp_kv_cache_interleave_size": 8,
    }
    names.add(persistent_namespace(layout_with(2, 1, attention(num_kv_heads=1), **interleaved), 1))
    assert len(names) == 4


def test_without_tiers_each_rank_has_a_slice() -> None:
    assert not layout_with(2, 4, config=parse_config({"cpu_bytes_to_use": "1MiB"})).rank_free


def test_the_layout_that_pages_need_is_a_preference() -> None:
    config = vllm_config()
    assert preferred_layout(config, WITH_TIER) == "LBHNC"
    chosen = parse_config({"cpu_bytes_to_use": "1MiB", "kv_cache_layout": "BHLNC"} | TIER)
    assert preferred_layout(config, chosen) == "BHLNC"
    assert preferred_layout(config, parse_config({"cpu_bytes_to_use": "1MiB"})) is None
    for other in ("use_mla", "is_hybrid"):
        assert preferred_layout(vllm_config(**{f"model_config__{other}": True}), WITH_TIER) is None


def test_groups_that_are_a_request_s_own_are_left_out() -> None:
    for specs, ids in (((attention(), mamba()), None), ((ring(), attention()), (1,))):
        caches = kv_cache_config(*specs)
        found = offloaded_ids(caches)
        assert (found and tuple(found)) == ids
        assert offloaded_groups(caches) == [caches.kv_cache_groups[index] for index in ids or (0, 1)]
