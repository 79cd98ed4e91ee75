# SPDX-License-Identifier: Apache-2.0
"""Determine the part of a block that each of vLLM's ranks holds, and the ranks that hold the same part.

Ranks of tensor parallelism divide the KV heads, and stages of a pipeline divide the layers. With decode context
parallelism, ranks with the same heads divide the tokens of a block. With fewer heads than ranks, and with latent
attention, some ranks hold the same KV: they are *replicas*. Replicas on one node share a slice of the slot, so that the
KV is kept once.

If all layers divide their heads in the same way, blocks can be *rank-free*: they contain the same bytes as blocks of an
engine with one rank, so that engines with other numbers of ranks find them in a tier.

If a layer were wrongly taken for replicated, its KV would be lost on all ranks but one, and a wrong head gives wrong
tokens. So every uncertain case counts as not replicated and not divided by heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvoffload.config import GroupKind, RankSlice
from kvoffload.engines.vllm.weights import drafter_with_kv

KINDS = {
    "full_attention": GroupKind.FULL_ATTENTION,
    "mla_attention": GroupKind.FULL_ATTENTION,
    "sliding_window": GroupKind.SLIDING_WINDOW,
    "sliding_window_mla": GroupKind.SLIDING_WINDOW,
    "chunked_local_attention": GroupKind.LOCAL_CHUNK,
    "mamba": GroupKind.SINGLE_STATE,
}
"""vLLM's kinds of KV groups that block hashes alone can restore, by ``KVCacheSpecKind`` value."""

HEADS_BEFORE_TOKENS = ("LBHNC", "LHBNC", "BLHNC", "BHLNC")
"""Layouts that keep the tokens of a head together, so that a rank's part of a page is in few pieces."""


def offloaded_groups(kv_cache_config: Any) -> list[Any]:
    """Return the KV groups that block hashes can restore. Other groups, such as ring buffers, belong to one request:
    vLLM computes them again after a hit in its own prefix cache, and also after a hit in kvoffload."""
    return [kv_cache_config.kv_cache_groups[index] for index in kv_cache_config.prefix_cacheable_group_ids]


def offloaded_ids(kv_cache_config: Any) -> Sequence[int] | None:
    """Return vLLM's numbers of these groups; ``None`` if they are all groups."""
    ids: Sequence[int] = kv_cache_config.prefix_cacheable_group_ids
    return ids if len(ids) < len(kv_cache_config.kv_cache_groups) else None


def slice_of(vllm_config: Any, kv_cache_config: Any, rank: int) -> RankSlice:
    """Return the slice of ``rank`` in the host memory of its node. In every process of an engine, all ranks have the
    same number of slices and replicas."""
    parallel = vllm_config.parallel_config
    per_node = parallel.world_size // parallel.nnodes_within_dp
    held = _held(vllm_config, kv_cache_config)
    nodes = [held[first : first + per_node] for first in range(0, len(held), per_node)]
    if len({(len(set(node)), node.count(each)) for node in nodes for each in node}) > 1:
        nodes = [list(range(per_node)) for _ in nodes]  # replicas are on different nodes, so each rank gets its own
    node, place = nodes[rank // per_node], rank % per_node
    mine, different = node[place], sorted(set(node))
    return RankSlice(different.index(mine), len(different), node[:place].count(mine), node.count(mine))


def _held(vllm_config: Any, kv_cache_config: Any) -> list[int]:
    """Return a number for each rank, which is equal for ranks that hold the same KV.

    vLLM counts ranks stage by stage. In a stage, consecutive ranks have the same heads, and among these, each
    ``decode_context_parallel_size``-th has the same tokens.
    """
    parallel = vllm_config.parallel_config
    divisions, of_same_heads = parallel.decode_context_parallel_size, _ranks_of_same_heads(vllm_config, kv_cache_config)
    if of_same_heads % divisions:
        return list(range(parallel.world_size))  # not known
    return [rank // of_same_heads * divisions + rank % divisions for rank in range(parallel.world_size)]


def stage_sizes(vllm_config: Any) -> list[int]:
    """Return the number of layers in each stage of the pipeline. The last stage also has the layers of a drafter."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    num_layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    sizes = [num_layers]
    if stages > 1:
        from vllm.distributed.utils import get_pp_indices

        bounds = [get_pp_indices(num_layers, stage, stages) for stage in range(stages)]
        sizes = [end - start for start, end in bounds]
    if (drafter := drafter_with_kv(vllm_config)) is not None:
        sizes[-1] += int(drafter.draft_model_config.get_total_num_hidden_layers())
    return sizes


def page_bytes(vllm_config: Any, kv_cache_config: Any, rank: int) -> int:
    """Return the bytes of one GPU block id on the rank with the most layers.

    This is the same in every process of an engine. Each rank knows only its own KV cache, and the scheduler knows only
    the KV cache of rank 0.
    """
    own_bytes, sizes = _bytes_per_gpu_block(kv_cache_config), stage_sizes(vllm_config)
    if len(set(sizes)) == 1:
        return own_bytes
    return own_bytes // sizes[stage_of(vllm_config, rank)] * max(sizes)


def stage_of(vllm_config: Any, rank: int) -> int:
    """Return the pipeline stage of ``rank``."""
    parallel = vllm_config.parallel_config
    return int(rank // (parallel.world_size // parallel.pipeline_parallel_size))


def layers_are_alike(vllm_config: Any, kv_cache_config: Any, rank: int) -> bool:
    """Return whether all layers of the rank keep the same KV in one group, so that its size determines the size of
    stages with other numbers of layers. A layer may have several caches, such as one for an indexer."""
    num_layers = stage_sizes(vllm_config)[stage_of(vllm_config, rank)]
    if len(kv_cache_config.kv_cache_groups) != 1:
        return False
    (group,) = kv_cache_config.kv_cache_groups
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})  # in a worker, if the group's caches differ
    sizes_of_layers: dict[str, list[int]] = {}
    for name in group.layer_names:
        size = specs[name].page_size_bytes if specs else 0
        sizes_of_layers.setdefault(_layer_of(name), []).append(size)
    kinds = {tuple(sorted(sizes)) for sizes in sizes_of_layers.values()}
    return (
        len(sizes_of_layers) == num_layers
        and len(kinds) == 1
        and not _bytes_per_gpu_block(kv_cache_config) % num_layers
    )


def _layer_of(cache: str) -> str:
    """Return the layer of a cache, such as ``model.layers.3`` of ``model.layers.3.self_attn.attn``."""
    parts = cache.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def _bytes_per_gpu_block(kv_cache_config: Any) -> int:
    """Return the bytes of one GPU block id on this rank.

    All groups of vLLM share one allocation, so this is the size of the largest group's block, including padding.
    """
    return int(kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks)


def why_not_rank_free(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return why blocks depend on the number of ranks, as a clause, or ``None`` if they can be rank-free. It is the
    same in every process of an engine."""
    groups = _groups_of_one_spec(kv_cache_config)
    if groups is None:
        return "layers of one KV group differ"
    if kv_cache_config.kv_cache_layout not in HEADS_BEFORE_TOKENS:
        return f"the layout {kv_cache_config.kv_cache_layout} has the heads of a token side by side"
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "its ranks divide more than KV heads"
    heads = _kv_heads(vllm_config)
    if heads is None:
        return "its layers may differ in their numbers of KV heads"
    ranks = parallel.tensor_parallel_size
    for spec in map(spec_of_layer, groups):
        if kind_of(spec) not in ("full_attention", "sliding_window"):
            return f"a KV group of the kind {kind_of(spec)!r} is not divided by heads"
        if spec.num_kv_heads * min(ranks, heads) != heads or max(ranks, heads) % min(ranks, heads):
            return f"{ranks} ranks have {spec.num_kv_heads} KV heads each, of {heads} in all"
        if spec.kv_quant_mode.is_per_token_head or spec.num_head_slots not in (None, spec.num_kv_heads):
            return "its attention backend keeps more than heads in a block"
    return None


def kind_of(spec: Any) -> str:
    """Return vLLM's kind of a KV group or layer: the value of a ``KVCacheSpecKind``."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return str(get_kv_cache_spec_kind(spec).value)


def window_of(spec: Any) -> int | None:
    """Return the window of a KV group's layers, or ``None`` if they differ."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window

    window = get_kv_cache_spec_sliding_window(spec)
    return None if window is None else int(window)


def _ranks_of_same_heads(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of consecutive ranks of a stage that certainly have the same heads in every layer."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    groups = _groups_of_one_spec(kv_cache_config)
    if groups is None:
        return int(kv_cache_config.kv_tp_replicas)
    return math.gcd(*(_replicas_of_layer(spec_of_layer(group), vllm_config, ranks) for group in groups))


def _groups_of_one_spec(kv_cache_config: Any) -> list[Any] | None:
    """Return the offloaded groups with layers, if each group has one spec for all of its layers. The scheduler sees
    only one of several specs. But vLLM creates a tensor record for each spec, and the scheduler sees these records."""
    num_groups = sum(bool(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    is_one_each = len(kv_cache_config.kv_cache_tensors) == num_groups
    return [group for group in offloaded_groups(kv_cache_config) if group.layer_names] if is_one_each else None


def spec_of_layer(group: Any) -> Any:
    """Return the spec of a KV group's layers, or of its first layer."""
    spec = group.kv_cache_spec
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def _replicas_of_layer(spec: Any, vllm_config: Any, ranks: int) -> int:
    kind = kind_of(spec)
    if kind in ("mla_attention", "sliding_window_mla"):
        return ranks
    if kind not in ("full_attention", "sliding_window"):
        return 1
    heads = _kv_heads(vllm_config)
    return ranks // heads if heads and ranks % heads == 0 and spec.num_kv_heads == 1 else 1


def _kv_heads(vllm_config: Any) -> int | None:
    """Return the number of KV heads of every layer, for all ranks together, or ``None`` if layers may differ."""
    models = [vllm_config.model_config]
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        models.append(speculative.draft_model_config)
    heads = {int(model.get_total_num_kv_heads()) for model in models}
    for model in models:
        heads.update(_numbers_of_heads(model.hf_text_config.to_dict()))
    return heads.pop() if len(heads) == 1 else None


_KV_HEADS = re.compile(r"(kv|key_value).*head|head.*_kv|attention_groups|query_group|multi_query|heads_in_group")
"""Names of entries in models' configurations that contain numbers of KV heads: for all layers, for some, or layer by
layer."""


def _numbers_of_heads(value: Any, is_named: bool = False) -> Iterator[int]:
    """Yield all numbers below a name that may mean KV heads."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _numbers_of_heads(each, is_named or _KV_HEADS.search(str(name)) is not None)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _numbers_of_heads(each, is_named)
    elif is_named and isinstance(value, (int, float)) and not isinstance(value, bool):
        yield int(value)
