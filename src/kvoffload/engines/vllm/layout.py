# SPDX-License-Identifier: Apache-2.0
"""Translates vLLM's configuration into kvoffload's layout, which both planes agree on.

The scheduler side in the engine core and the worker side in every worker run this on their own copies of vLLM's
configuration. Both must compute the same layout, except for ``rank``. ``rejections.py`` rejects setups first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.engines.vllm.arguments import CRYPTOGRAPHIC_HASHES
from kvoffload.engines.vllm.identity import identity_of
from kvoffload.engines.vllm.rejections import unclear_is_rejected
from kvoffload.engines.vllm.slices import (
    KINDS,
    kind_of,
    offloaded_groups,
    page_bytes,
    slice_of,
    why_not_rank_free,
    window_of,
)


def preferred_layout(vllm_config: Any, config: OffloadingConfig) -> str | None:
    """Return the layout of the KV cache that kvoffload asks vLLM for, or ``None`` for any.

    This is the user's choice. If engines with other numbers of ranks may find blocks in tiers, it is the layout that
    vLLM's own connectors ask for, because ``MultiConnector`` accepts only one.
    """
    model = vllm_config.model_config
    if config.kv_cache_layout is not None or not config.secondary_tiers or model.use_mla or model.is_hybrid:
        return config.kv_cache_layout
    return "LBHNC"


def fails_by_block(kv_cache_config: Any) -> bool:
    """Return whether failed loads are reported by block, so that vLLM keeps the blocks before the first failed one.

    Otherwise they are reported by request, and vLLM computes the whole request again. A load of a window or a state
    leaves out the blocks before it, which vLLM would consider as computed. The blocks of several groups come from one
    pool, so vLLM cannot find the request by a block id.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and KINDS[kind_of(groups[0].kv_cache_spec)] is GroupKind.FULL_ATTENTION


def layout_of(
    vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, rank: int = 0, is_worker: bool = False
) -> EngineLayout:
    """Return the engine's KV cache as kvoffload describes it. Call ``check_engine`` and ``check_kv_cache`` first.

    If the scheduler is another process than the worker, the worker's layout has no identity, because the scheduler
    names the blocks in tiers.
    """
    bytes_per_block = page_bytes(vllm_config, kv_cache_config, rank)
    offloaded = offloaded_groups(kv_cache_config)
    lookahead = _lookahead_tokens(vllm_config.speculative_config, offloaded)
    groups = tuple(
        _group_layout(group.kv_cache_spec, bytes_per_block, ahead, vllm_config.parallel_config)
        for group, ahead in zip(offloaded, lookahead, strict=True)
    )
    # Without a tier, no other engine finds the blocks, and whole slices need fewer copies.
    is_rank_free = bool(config.secondary_tiers) and why_not_rank_free(vllm_config, kv_cache_config) is None
    parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
    # vLLM's single-process executor runs the one worker on the scheduler's own thread.
    ranks_per_node = parallel.world_size // parallel.nnodes_within_dp
    one_process = parallel.world_size == 1 and parallel.distributed_executor_backend == "uni"
    # Each of several nodes names its own part, in the process that does the I/O of the tiers there.
    has_agent = parallel.nnodes_within_dp > 1 and bool(config.secondary_tiers) and rank % ranks_per_node == 0
    names_blocks = one_process or not is_worker or has_agent
    identity: dict[str, str] = {}
    if names_blocks:
        with unclear_is_rejected(config):
            identity = identity_of(vllm_config, kv_cache_config, config, is_rank_free)
    return EngineLayout(
        groups=groups,
        hash_block_tokens=int(kv_cache_config.hash_block_size),
        # Users may give two engines the same engine_id, and their processes would open the same memory.
        instance_id=f"{vllm_config.kv_transfer_config.engine_id} {vllm_config.instance_id}",
        num_ranks=parallel.world_size,
        rank=rank,
        rank_slice=slice_of(vllm_config, kv_cache_config, rank),
        rank_free=is_rank_free,
        num_processes=1 if one_process else ranks_per_node + (rank < ranks_per_node),
        events_enabled=events is not None and events.enable_kv_cache_events,
        traces_enabled=vllm_config.observability_config.otlp_traces_endpoint is not None,
        identity=identity,
        hashes_are_stable=vllm_config.cache_config.prefix_caching_hash_algo in CRYPTOGRAPHIC_HASHES,
        device_tokens=(
            _device_tokens(kv_cache_config.num_blocks, groups) if vllm_config.cache_config.enable_prefix_caching else 0
        ),
    )


def _device_tokens(num_blocks: int, groups: Sequence[KVGroupLayout]) -> int | None:
    """Return how many tokens of prompts fit into vLLM's prefix cache, or ``None`` if that depends on states alone.

    All groups get their blocks from one pool. Windows also need blocks for every token, because blocks that left a
    window stay in the cache until vLLM needs them. There are few states.
    """
    blocks_per_token = sum(1 / group.block_tokens for group in groups if group.kind is not GroupKind.SINGLE_STATE)
    # One block of the pool is never used.
    return int((num_blocks - 1) / blocks_per_token) if blocks_per_token else None


def _lookahead_tokens(speculative: Any, groups: Sequence[Any]) -> list[int]:
    """Return 1 for each group that may contain layers of a speculative head, and 0 for each other group.

    vLLM drops the last block of a hit in such a group of its own prefix cache. If it does not know which groups these
    are, it drops the last block in all groups. It looks up groups with equal specs together, so it drops
    the last block of all of them.
    """
    if speculative is None or not speculative.use_eagle_block_drop():
        return [0] * len(groups)
    flagged = [group.kv_cache_spec for group in groups if group.is_eagle_group]
    return [int(not flagged or group.kv_cache_spec in flagged) for group in groups]


def _group_layout(spec: Any, bytes_per_block: int, lookahead_tokens: int, parallel: Any) -> KVGroupLayout:
    kind = KINDS[kind_of(spec)]
    window = None
    if kind is GroupKind.SLIDING_WINDOW:
        # vLLM keeps more tokens than the window if a speculative head needs them.
        window = (window_of(spec) or 0) + int(getattr(spec, "extra_retained_tokens", 0))
    elif kind is GroupKind.LOCAL_CHUNK:
        window = int(spec.attention_chunk_size)
    block_tokens = spec.block_size
    if parallel.decode_context_parallel_size > 1 and spec.dcp_sharded:
        block_tokens *= parallel.decode_context_parallel_size  # each rank has a part of them
    return KVGroupLayout(kind, block_tokens, bytes_per_block, window, lookahead_tokens)
