# SPDX-License-Identifier: Apache-2.0
"""From vLLM's configuration to kvoffload's: the layout both planes agree on, and the refusal of what cannot be served.

The scheduler side in the engine core and the worker side in every worker run this on their own copies of vLLM's
configuration. Both must compute the same layout, but for ``rank``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.config_file import with_config_file
from kvoffload.cpu.memory_limits import SHM, check_all_engines
from kvoffload.engines.vllm.arguments import (
    CRYPTOGRAPHIC_HASHES,
    refuse_hashes,
    refuse_routed_experts,
    refuse_transfer,
)
from kvoffload.engines.vllm.identity import identity_of, rope_follows_batch
from kvoffload.engines.vllm.slices import kind_of, offloaded_groups, page_bytes, slice_of, why_not_rank_free
from kvoffload.engines.vllm.versions import tells_of_sleep
from kvoffload.engines.vllm.weights import DRAFTERS_WITH_KV, refuse_unnamed_weights
from kvoffload.engines.weights import outliving_tier
from kvoffload.errors import ConfigError, LayoutError
from kvoffload.specs import read_config

_KINDS = {
    "full_attention": GroupKind.FULL_ATTENTION,
    "mla_attention": GroupKind.FULL_ATTENTION,
    "sliding_window": GroupKind.SLIDING_WINDOW,
    "sliding_window_mla": GroupKind.SLIDING_WINDOW,
    "chunked_local_attention": GroupKind.LOCAL_CHUNK,
    "mamba": GroupKind.SINGLE_STATE,
}
"""vLLM's kinds of KV groups that can be restored from block hashes alone, by ``KVCacheSpecKind`` value."""

_DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Those without KV of their own. To a connector they only mean tokens that are scheduled and may be rejected."""


def config_of(extra: Mapping[str, Any]) -> OffloadingConfig:
    """The user's ``kv_connector_extra_config``, over a file that it or the environment names, validated as far as this
    needs neither a model nor a layout."""
    return read_config(with_config_file(extra))


def check_engine(vllm_config: Any) -> OffloadingConfig:
    """The user's configuration. Raises ``ConfigError``, with the reason, for an engine that cannot be served correctly,
    whatever its KV cache: vLLM need not load a model to find that out."""
    config = config_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    transfer = vllm_config.kv_transfer_config
    refuse_transfer(transfer.kv_load_failure_policy, transfer.kv_role)
    _refuse_parallel(vllm_config.parallel_config, config)
    _refuse_sum(config, vllm_config.parallel_config)
    _refuse_stages(vllm_config)
    if vllm_config.speculative_config is not None:
        _refuse_speculation(vllm_config.speculative_config)
    _refuse_other_answers(vllm_config)
    if vllm_config.attention_config.hisparse_config is not None:
        raise ConfigError("kvoffload does not work with HiSparse, which keeps KV in host memory itself.")
    if vllm_config.model_config.enable_sleep_mode and vllm_config.device_config.device_type != "cpu":
        _refuse_sleep(vllm_config.model_config.sleep_mode_backend)
    tier = outliving_tier(config)
    if tier is not None:
        refuse_hashes(vllm_config.cache_config.prefix_caching_hash_algo, tier)
        _refuse_measured_scales(vllm_config, tier)
        refuse_unnamed_weights(vllm_config, config)
        if config.media_never_change and _numbers_media(vllm_config):
            raise ConfigError(
                "With --mm-processor-cache-gb 0 and without prefix caching vLLM does not hash media but numbers them, "
                f"anew in each server, and the secondary tier {tier!r} would serve the KV of one for another: leave "
                "out one of the two, or media_never_change."
            )
    if config.kv_cache_layout is not None:
        _refuse_layout(config.kv_cache_layout, vllm_config.model_config)
    return config


def _numbers_media(vllm_config: Any) -> bool:
    media = vllm_config.model_config.multimodal_config
    return media is not None and media.mm_processor_cache_gb == 0 and not vllm_config.cache_config.enable_prefix_caching


def _refuse_sleep(backend: str) -> None:
    if not tells_of_sleep():
        # Xid 31, and a dead engine: vLLM issues 45363 and 45615.
        raise ConfigError(
            "Before 0.33, vLLM's sleep takes the GPU's memory away while kvoffload may be copying: leave out "
            "--enable-sleep-mode, or use a newer vLLM."
        )
    if backend != "cumem":
        raise ConfigError(
            f"kvoffload does not know what the sleep mode {backend!r} does to pinned memory: leave out "
            "--sleep-mode-backend, or --enable-sleep-mode."
        )


def _refuse_layout(asked: str, model: Any) -> None:
    """Layouts that this vLLM does not have, and models that were not shown to be right with another than vLLM's."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    if asked not in KVCacheLayout.__members__:
        raise ConfigError(
            f"This vLLM has no kv_cache_layout {asked!r}: use one of {', '.join(KVCacheLayout.__members__)}."
        )
    if model.use_mla:
        raise ConfigError(
            f"This model has latent attention, for which the layout {asked} was not shown to be right: leave out "
            "kv_cache_layout."
        )


def preferred_layout(vllm_config: Any, config: OffloadingConfig) -> str | None:
    """The layout of the KV cache that vLLM is asked for; ``None``: any.

    The user's choice; or, if there are tiers in which engines with other numbers of ranks may find blocks, the one that
    vLLM's own connectors ask for. ``MultiConnector`` takes no two.
    """
    model = vllm_config.model_config
    if config.kv_cache_layout is not None or not config.secondary_tiers or model.use_mla or model.is_hybrid:
        return config.kv_cache_layout
    return "LBHNC"


def refuse_kv_cache(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ``ConfigError`` or ``LayoutError``, with the reason, if the KV cache that vLLM made cannot be restored."""
    asked = config_of(vllm_config.kv_transfer_config.kv_connector_extra_config).kv_cache_layout
    if asked is not None and asked != kv_cache_config.kv_cache_layout:
        # vLLM only warns when it takes another.
        raise ConfigError(
            f"kv_cache_layout asks for {asked}, and vLLM uses {kv_cache_config.kv_cache_layout}, because this model's "
            "attention backend lacks the other or VLLM_KV_CACHE_LAYOUT is set: leave out kv_cache_layout, or choose "
            "another attention backend."
        )
    speculative, groups = vllm_config.speculative_config, kv_cache_config.kv_cache_groups
    if speculative is not None and speculative.method == "draft_model" and len(groups) > 1:
        raise _unproven_drafter("'draft_model' beside several KV groups")
    if not kv_cache_config.prefix_cacheable_group_ids:
        raise LayoutError("No KV group of this model is in vLLM's prefix cache, so there is nothing to offload.")
    for index in kv_cache_config.prefix_cacheable_group_ids:
        group = groups[index]
        kind = kind_of(group.kv_cache_spec)
        if kind not in _KINDS or hasattr(group.kv_cache_spec, "rswa_window"):
            raise LayoutError(
                f"KV group {index} of this model (kind {kind!r}, {type(group.kv_cache_spec).__name__}) cannot be "
                f"restored from block hashes; kvoffload supports {', '.join(_KINDS)}."
            )
        if _KINDS[kind] is GroupKind.SINGLE_STATE:
            _refuse_states(vllm_config, kv_cache_config, group.kv_cache_spec)


def fails_by_block(kv_cache_config: Any) -> bool:
    """Whether failed loads are reported by block, so that vLLM keeps what lies before the first of them. Otherwise they
    are reported by request, which vLLM computes anew.

    With one group of full attention that is what the request had before the load. A load of a window or a state leaves
    out what lies before it, which vLLM would take for computed. And the blocks of several groups come from one pool:
    vLLM cannot find the request from a block id.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and _KINDS[kind_of(groups[0].kv_cache_spec)] is GroupKind.FULL_ATTENTION


def _refuse_states(vllm_config: Any, kv_cache_config: Any, spec: Any) -> None:
    """Recurrent states that were not shown to be right after a load."""
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            "This model has recurrent states, which vLLM keeps only with its prefix cache: add --enable-prefix-caching."
        )
    if spec.mamba_type.name == "SHORT_CONV":
        raise ConfigError(
            "This model has short convolutions (LFM2), which were not shown to be right after a load: serve it without "
            "kvoffload."
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "kvoffload cannot vouch for recurrent states under speculative decoding, where a rejected draft rolls them "
            "back: serve this model without a speculative_config, or without kvoffload."
        )
    if vllm_config.cache_config.use_replayssm:
        raise ConfigError(
            "With --use-replayssm a block may lack the latest tokens of its state: leave it out, or serve without "
            "kvoffload."
        )
    if kv_cache_config.hash_block_size != spec.block_size:
        raise ConfigError(
            f"This model's states lie at every {spec.block_size} tokens, and vLLM hashes every "
            f"{kv_cache_config.hash_block_size}: leave out --prefix-match-unit and "
            "--mamba-block-size, or serve without kvoffload."
        )


def _refuse_parallel(parallel: Any, config: OffloadingConfig) -> None:
    if config.secondary_tiers and parallel.nnodes_within_dp > 1 and parallel.data_parallel_size > 1:
        raise ConfigError(
            f"Each of {parallel.data_parallel_size} engines spans {parallel.nnodes_within_dp} nodes, where tiers were "
            "not shown to be right: leave out secondary_tiers, or run each engine without --data-parallel-size."
        )
    if parallel.world_size > 1 and parallel.distributed_executor_backend != "mp":
        raise ConfigError(
            "With several ranks kvoffload needs --distributed-executor-backend mp: under "
            f"{parallel.distributed_executor_backend!r} it cannot know that they share this node's memory."
        )
    if parallel.enable_fault_tolerance:
        raise ConfigError(
            "kvoffload does not work with --enable-fault-tolerance: vLLM goes on after a step that failed, and never "
            "tells which transfers have ended in it."
        )
    if parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            f"kvoffload does not support prefill_context_parallel_size above 1, and it is "
            f"{parallel.prefill_context_parallel_size}: set it to 1."
        )


def _refuse_stages(vllm_config: Any) -> None:
    """Drafters whose KV is in one stage alone. vLLM does not say how many layers of it there are."""
    speculative = vllm_config.speculative_config
    if vllm_config.parallel_config.pipeline_parallel_size == 1 or speculative is None:
        return
    if speculative.method in DRAFTERS_WITH_KV:
        raise ConfigError(
            f"The KV of {speculative.method!r} drafters is in the last pipeline stage alone, which was not shown to be "
            f"right: use one of {', '.join(_DRAFTERS_WITHOUT_KV)}, or pipeline_parallel_size 1."
        )


def _refuse_sum(config: OffloadingConfig, parallel: Any) -> None:
    """Data parallelism: every engine core on this machine takes all of ``cpu_bytes_to_use``."""
    if parallel.data_parallel_size_local > 1:
        mount = SHM if parallel.distributed_executor_backend == "mp" else None
        check_all_engines(config.cpu_bytes, parallel.data_parallel_size_local, mount=mount)


def _refuse_speculation(speculative: Any) -> None:
    """Drafters whose KV was not shown to be good after a load. A wrong draft costs no wrong token, but time."""
    if speculative.method not in DRAFTERS_WITH_KV + _DRAFTERS_WITHOUT_KV:
        raise _unproven_drafter(f"the speculative method {speculative.method!r}")
    if speculative.parallel_drafting:
        raise _unproven_drafter(f"{speculative.method!r} with parallel drafting")
    if speculative.use_multi_module_mtp():
        raise _unproven_drafter("several MTP modules at once (with num_speculative_tokens 1, vLLM uses one)")


def _unproven_drafter(what: str) -> ConfigError:
    return ConfigError(
        f"kvoffload cannot vouch for the KV of {what}: use one of "
        f"{', '.join(DRAFTERS_WITH_KV + _DRAFTERS_WITHOUT_KV)} with sequential drafting by one module, or serve "
        "without kvoffload."
    )


def _refuse_other_answers(vllm_config: Any) -> None:
    """Raises where a loaded prefix would give another answer: KV depends on later tokens, or an answer needs more of a
    prefix than its KV. vLLM's own prefix cache is off then, and vLLM asks connectors all the same."""
    model = vllm_config.model_config
    if model.pooler_config is not None and not model.is_prefix_caching_supported:
        raise ConfigError(
            "This model's answer is made of all its tokens, and vLLM can leave out none: serve it without kvoffload."
        )
    if not (vllm_config.scheduler_config.enable_chunked_prefill or vllm_config.cache_config.enable_prefix_caching):
        # For want of causal attention, or of a kernel that goes on from a prefix.
        raise ConfigError(
            "vLLM computes each prompt in one piece here, since chunked prefill and prefix caching are both off, so no "
            "part of one can be loaded: serve this model without kvoffload, or leave out --no-enable-chunked-prefill "
            "and --no-enable-prefix-caching."
        )
    if rope_follows_batch(model):
        raise ConfigError(
            f"Code of transformers computes this model, with other rotary frequencies while a request of the batch is "
            f"longer than the model was trained for, so equal tokens have unequal KV: set --max-model-len to that "
            f"length at most (it is {model.max_model_len}), or serve this model without kvoffload."
        )
    if model.is_diffusion:
        raise ConfigError(
            "kvoffload does not work with diffusion models: vLLM may end a request whose last tokens have the KV of a "
            "draft."
        )
    refuse_routed_experts(bool(vllm_config.aux_output_config.enabled))


def _refuse_measured_scales(vllm_config: Any, tier: str) -> None:
    """Scales that a process measures while it serves: to another one, its KV means something else."""
    images = vllm_config.model_config.multimodal_config
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        option = "--calculate-kv-scales"
    elif images is not None and images.mm_encoder_attn_dtype == "fp8" and images.mm_encoder_fp8_scale_path is None:
        option = "--mm-encoder-attn-dtype fp8 without --mm-encoder-fp8-scale-path"
    else:
        return
    raise ConfigError(
        f"With {option} each process measures scales of its own, so the secondary tier {tier!r} could serve no other "
        "process: leave out the option or the tier."
    )


def layout_of(
    vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, rank: int = 0, is_worker: bool = False
) -> EngineLayout:
    """The engine's KV cache as kvoffload describes it. Call ``check_engine`` and ``refuse_kv_cache`` first.

    The layout of a worker whose scheduler is another process has no identity, since it is the scheduler that names
    blocks in tiers.
    """
    bytes_per_block = page_bytes(vllm_config, kv_cache_config, rank)
    offloaded = offloaded_groups(kv_cache_config)
    lookahead = _lookahead_tokens(vllm_config.speculative_config, offloaded)
    groups = tuple(
        _group_layout(group.kv_cache_spec, bytes_per_block, ahead, vllm_config.parallel_config)
        for group, ahead in zip(offloaded, lookahead, strict=True)
    )
    # Without a tier no other engine finds the blocks, and whole slices are copied in fewer pieces.
    is_rank_free = bool(config.secondary_tiers) and why_not_rank_free(vllm_config, kv_cache_config) is None
    parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
    # vLLM's single-process executor runs the one worker on the scheduler's own thread.
    ranks_per_node = parallel.world_size // parallel.nnodes_within_dp
    one_process = parallel.world_size == 1 and parallel.distributed_executor_backend == "uni"
    # Of several nodes each names its own part, in the process that does the tiers' I/O there.
    has_agent = parallel.nnodes_within_dp > 1 and bool(config.secondary_tiers) and rank % ranks_per_node == 0
    names_blocks = one_process or not is_worker or has_agent
    return EngineLayout(
        groups=groups,
        hash_block_tokens=int(kv_cache_config.hash_block_size),
        # Users may give two engines one engine_id, whose processes would meet in one memory.
        instance_id=f"{vllm_config.kv_transfer_config.engine_id} {vllm_config.instance_id}",
        num_ranks=parallel.world_size,
        rank=rank,
        rank_slice=slice_of(vllm_config, kv_cache_config, rank),
        rank_free=is_rank_free,
        num_processes=1 if one_process else ranks_per_node + (rank < ranks_per_node),
        events_enabled=events is not None and events.enable_kv_cache_events,
        traces_enabled=vllm_config.observability_config.otlp_traces_endpoint is not None,
        identity=identity_of(vllm_config, kv_cache_config, config, is_rank_free) if names_blocks else {},
        hashes_are_stable=vllm_config.cache_config.prefix_caching_hash_algo in CRYPTOGRAPHIC_HASHES,
        device_tokens=(
            _device_tokens(kv_cache_config.num_blocks, groups) if vllm_config.cache_config.enable_prefix_caching else 0
        ),
    )


def _device_tokens(num_blocks: int, groups: Sequence[KVGroupLayout]) -> int | None:
    """Tokens of prompts that vLLM's prefix cache holds. All groups take their blocks from one pool, windows for each
    token too; those that left a window stay in the cache until they are taken again. States are few."""
    blocks_per_token = sum(1 / group.block_tokens for group in groups if group.kind is not GroupKind.SINGLE_STATE)
    # One block of the pool is never used.
    return int((num_blocks - 1) / blocks_per_token) if blocks_per_token else None


def _lookahead_tokens(speculative: Any, groups: Sequence[Any]) -> list[int]:
    """By group: 1 where layers of a speculative head may be in the group, so that vLLM drops the last block of a hit in
    its own prefix cache; otherwise 0.

    Where vLLM does not know which groups these are, it takes all. It looks groups of equal specs up together, and so
    drops the last block of all of them.
    """
    if speculative is None or not speculative.use_eagle_block_drop():
        return [0] * len(groups)
    flagged = [group.kv_cache_spec for group in groups if group.is_eagle_group]
    return [int(not flagged or group.kv_cache_spec in flagged) for group in groups]


def _group_layout(spec: Any, bytes_per_block: int, lookahead_tokens: int, parallel: Any) -> KVGroupLayout:
    kind = _KINDS[kind_of(spec)]
    window = None
    if kind is GroupKind.SLIDING_WINDOW:
        # vLLM keeps more tokens than the window when a speculative head needs them.
        window = _window_of(spec) + int(getattr(spec, "extra_retained_tokens", 0))
    elif kind is GroupKind.LOCAL_CHUNK:
        window = int(spec.attention_chunk_size)
    block_tokens = spec.block_size
    if parallel.decode_context_parallel_size > 1 and spec.dcp_sharded:
        block_tokens *= parallel.decode_context_parallel_size  # each rank has a part of them
    return KVGroupLayout(kind, block_tokens, bytes_per_block, window, lookahead_tokens)


def _window_of(spec: Any) -> int:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window

    window = get_kv_cache_spec_sliding_window(spec)
    if window is None:
        raise LayoutError(f"A sliding-window KV group has layers of different windows: {spec!r}.")
    return int(window)
