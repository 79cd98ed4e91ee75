# SPDX-License-Identifier: Apache-2.0
"""The table of setups of vLLM that kvoffload rejects. Loads neither vLLM nor torch.

``BEFORE_LOAD`` needs vLLM's configuration, and ``WITH_KV_CACHE`` also its KV groups. For ``WHILE_STARTING``, the code
that finds a setup raises the row's error. ``docs/compatibility.md`` lists all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvoffload.config import GroupKind, OffloadingConfig
from kvoffload.cpu.memory_limits import SHM, check_all_engines
from kvoffload.engines.facts import UnclearError
from kvoffload.engines.rejections import Rejection, check, problems_of
from kvoffload.engines.vllm.arguments import CRYPTOGRAPHIC_HASHES, config_of
from kvoffload.engines.vllm.identity import rope_follows_batch
from kvoffload.engines.vllm.slices import KINDS, kind_of, layers_are_alike, stage_sizes, window_of
from kvoffload.engines.vllm.versions import tells_of_sleep
from kvoffload.engines.vllm.weights import DRAFTERS_WITH_KV, drafter_with_kv, why_unnamed
from kvoffload.engines.weights import outliving_tier
from kvoffload.errors import Problems

DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Speculative methods whose drafter keeps no KV. A connector only sees tokens that may be rejected."""

_ACCEPTED = "vLLM's offloading accepts it."
_NAMES_FILES = "vLLM's file tier accepts it, and separates blocks only by model name, ranks and dtype."
_WITHOUT = "serve this model without kvoffload"


@dataclass(frozen=True, slots=True)
class Setup:
    """The facts about a server that the conditions read."""

    engine: Any
    """vLLM's ``VllmConfig``."""
    config: OffloadingConfig
    kv_cache: Any = None
    """vLLM's ``KVCacheConfig`` of this process, once there is one."""
    rank: int = 0

    @property
    def persistent_tier(self) -> str | None:
        tier = outliving_tier(self.config)
        return None if tier is None else f"the tier {tier!r}"

    @property
    def groups(self) -> list[Any]:
        """The KV groups in vLLM's prefix cache."""
        return [self.kv_cache.kv_cache_groups[index] for index in self.kv_cache.prefix_cacheable_group_ids]

    @property
    def states(self) -> list[Any]:
        """The specs of the groups with recurrent states."""
        specs = [group.kv_cache_spec for group in self.groups]
        return [spec for spec in specs if KINDS.get(kind_of(spec)) is GroupKind.SINGLE_STATE]


def _if(condition: object, found: str = "") -> str | None:
    return found if condition else None


# ------------------------------------------------------------------------------------------------------- conditions


def _policy(setup: Setup) -> str | None:
    policy = setup.engine.kv_transfer_config.kv_load_failure_policy
    return _if(policy != "recompute", f"it is {policy!r}")


def _role(setup: Setup) -> str | None:
    role = setup.engine.kv_transfer_config.kv_role
    return _if(role != "kv_both", f"it is {role!r}")


def _launcher(setup: Setup) -> str | None:
    parallel = setup.engine.parallel_config
    is_external = parallel.distributed_executor_backend == "external_launcher"
    return _if(parallel.world_size > 1 and is_external, f"{parallel.world_size} ranks")


def _engines_over_nodes(setup: Setup) -> str | None:
    parallel = setup.engine.parallel_config
    engines, nodes = parallel.data_parallel_size, parallel.nnodes_within_dp
    return _if(setup.config.secondary_tiers and nodes > 1 and engines > 1, f"{engines} engines, {nodes} nodes each")


def _prefill_context(setup: Setup) -> str | None:
    size = setup.engine.parallel_config.prefill_context_parallel_size
    return _if(size > 1, f"prefill_context_parallel_size is {size}")


def _drafter(setup: Setup) -> str | None:
    speculative = setup.engine.speculative_config
    if speculative is None:
        return None
    if speculative.method not in DRAFTERS_WITH_KV + DRAFTERS_WITHOUT_KV:
        return f"the method {speculative.method!r}"
    if speculative.parallel_drafting:
        return f"{speculative.method!r} with parallel drafting"
    # With num_speculative_tokens 1, vLLM uses one module.
    return _if(speculative.use_multi_module_mtp(), "several MTP modules")


def _sleeps_on_gpu(setup: Setup) -> bool:
    return bool(setup.engine.model_config.enable_sleep_mode) and setup.engine.device_config.device_type != "cpu"


def _sleep_backend(setup: Setup) -> str | None:
    backend = setup.engine.model_config.sleep_mode_backend
    return _if(_sleeps_on_gpu(setup) and tells_of_sleep() and backend != "cumem", f"{backend!r}")


def _early_sleep(setup: Setup) -> str | None:
    return _if(_sleeps_on_gpu(setup) and not tells_of_sleep())


def _pooled(setup: Setup) -> str | None:
    model = setup.engine.model_config
    return _if(model.pooler_config is not None and not model.is_prefix_caching_supported)


def _one_piece(setup: Setup) -> str | None:
    is_cut = setup.engine.scheduler_config.enable_chunked_prefill or setup.engine.cache_config.enable_prefix_caching
    return _if(not is_cut)


def _rope(setup: Setup) -> str | None:
    model = setup.engine.model_config
    return _if(rope_follows_batch(model), f"--max-model-len is {model.max_model_len}")


def _hashes(setup: Setup) -> str | None:
    algorithm = setup.engine.cache_config.prefix_caching_hash_algo
    is_other = setup.persistent_tier is not None and algorithm not in CRYPTOGRAPHIC_HASHES
    return _if(is_other, f"{setup.persistent_tier} and {algorithm!r}")


def _measured_scales(setup: Setup) -> str | None:
    images = setup.engine.model_config.multimodal_config
    is_measured = (
        setup.persistent_tier is not None
        and images is not None
        and images.mm_encoder_attn_dtype == "fp8"
        and images.mm_encoder_fp8_scale_path is None
    )
    option = "--mm-encoder-attn-dtype fp8 without --mm-encoder-fp8-scale-path"
    return _if(is_measured, f"{setup.persistent_tier} and {option}")


def _unnamed_weights(setup: Setup) -> str | None:
    why = why_unnamed(setup.engine, setup.config)
    return None if why is None else f"{setup.persistent_tier}, and {why}"


def _numbered_media(setup: Setup) -> str | None:
    media = setup.engine.model_config.multimodal_config
    are_numbered = media is not None and media.mm_processor_cache_gb == 0
    are_numbered = are_numbered and not setup.engine.cache_config.enable_prefix_caching
    applies = are_numbered and setup.config.media_never_change and setup.persistent_tier
    return _if(applies, f"{setup.persistent_tier}")


def _unknown_layout(setup: Setup) -> str | None:
    asked = setup.config.kv_cache_layout
    if asked is None:
        return None
    from vllm.v1.kv_cache_layout import KVCacheLayout

    choices = KVCacheLayout.__members__
    return _if(asked not in choices, f"{asked!r}; this vLLM has {', '.join(choices)}")


def _latent_layout(setup: Setup) -> str | None:
    asked = setup.config.kv_cache_layout
    return _if(asked is not None and setup.engine.model_config.use_mla, f"{asked}")


def _other_layout(setup: Setup) -> str | None:
    asked, used = setup.config.kv_cache_layout, setup.kv_cache.kv_cache_layout
    return _if(asked is not None and asked != used, f"it asks for {asked}, and vLLM uses {used}")  # vLLM only warns


def _drafter_beside_groups(setup: Setup) -> str | None:
    speculative = setup.engine.speculative_config
    is_model = speculative is not None and speculative.method == "draft_model"
    return _if(is_model and len(setup.kv_cache.kv_cache_groups) > 1)


def _unknown_groups(setup: Setup) -> str | None:
    for index in setup.kv_cache.prefix_cacheable_group_ids:
        spec = setup.kv_cache.kv_cache_groups[index].kv_cache_spec
        if kind_of(spec) not in KINDS or hasattr(spec, "rswa_window"):
            return f"KV group {index} is a {type(spec).__name__} of the kind {kind_of(spec)!r}"
    return None


def _unequal_windows(setup: Setup) -> str | None:
    specs = [group.kv_cache_spec for group in setup.groups]
    windows = [spec for spec in specs if KINDS.get(kind_of(spec)) is GroupKind.SLIDING_WINDOW]
    return _if(any(window_of(spec) is None for spec in windows))


def _unequal_stages(setup: Setup) -> str | None:
    sizes = stage_sizes(setup.engine)
    may_differ = len(set(sizes)) > 1 or (len(sizes) > 1 and drafter_with_kv(setup.engine) is not None)
    is_wrong = may_differ and not layers_are_alike(setup.engine, setup.kv_cache, setup.rank)
    return _if(is_wrong, f"its stages have {', '.join(map(str, sizes))} layers")


def _several_allocations(setup: Setup) -> str | None:
    num_sizes = len({tensor.size for tensor in setup.kv_cache.kv_cache_tensors})
    are_several = num_sizes != 1 or setup.kv_cache.num_blocks < 1
    return _if(setup.groups and are_several, f"{num_sizes} sizes")


def _hashes_between_states(setup: Setup) -> str | None:
    hashed = setup.kv_cache.hash_block_size
    sizes = {spec.block_size for spec in setup.states} - {hashed}
    return _if(sizes, f"states every {', '.join(map(str, sorted(sizes)))} tokens, hashes every {hashed}")


# ------------------------------------------------------------------------------------------------------------- rows

FAILURE_POLICY = Rejection(
    setup="any kv_load_failure_policy except 'recompute'",
    applies=_policy,
    reason="vLLM would fail a request whose load fails",
    remedy='set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
    opened_by="None is planned, because a failed load must cost only time.",
    peers="vLLM's offloading accepts it, but raises an error in the worker if a load fails.",
)
ROLE = Rejection(
    setup="any kv_role except 'kv_both'",
    applies=_role,
    reason="kvoffload both stores and loads",
    remedy='set "kv_role": "kv_both" in --kv-transfer-config',
    opened_by="A user who needs a server that only stores or only loads.",
    peers="vLLM's offloading ignores the role.",
)
EXPERTS = Rejection(
    setup="--enable-return-routed-experts",
    applies=lambda setup: _if(setup.engine.aux_output_config.enabled),
    reason="a loaded block does not contain the experts that computed it",
    remedy="leave it out, or serve without kvoffload",
    opened_by="A test on a GPU. vLLM 0.33 limits hits to tokens whose experts it knows, but only its V2 model runner "
    "returns experts, and the CPU platform lacks this runner.",
    peers=_ACCEPTED,
)
HASHES = Rejection(
    setup="persistent tiers with a --prefix-caching-hash-algo other than " + " and ".join(CRYPTOGRAPHIC_HASHES),
    applies=_hashes,
    reason="a client can create two prompts with one hash, and readers of the tier would get the KV of the wrong one",
    remedy=f"set --prefix-caching-hash-algo to one of {', '.join(CRYPTOGRAPHIC_HASHES)}, or leave out the tier",
    opened_by="Nothing, unless vLLM adds another cryptographic hash.",
    peers=_ACCEPTED,
)
PREFILL_CONTEXT = Rejection(
    setup="prefill context parallelism",
    applies=_prefill_context,
    reason="its ranks divide the tokens of a block in a way that kvoffload does not know",
    remedy="set prefill_context_parallel_size to 1",
    opened_by="Slices for these parts of the tokens, and a test with vLLM's scheduler.",
    peers=_ACCEPTED,
)

ONE_PIECE = Rejection(
    setup="servers with chunked prefill and prefix caching both turned off",
    applies=_one_piece,
    # For want of causal attention, or of a kernel that continues from a prefix.
    reason="vLLM then computes each prompt in one piece, so no part of one can be loaded. vLLM turns both off for "
    "models in which a token sees later tokens (HRM), and for latent attention on CPUs without AMX",
    remedy="serve this model without kvoffload, or leave out --no-enable-chunked-prefill and "
    "--no-enable-prefix-caching",
    opened_by="Nothing, because there is nothing to load.",
    peers="vLLM asks its connectors in this case too, which can cause wrong answers.",
)
BEFORE_LOAD = (
    Rejection(
        setup="unsupported speculative methods, parallel drafting, and several MTP modules at once",
        applies=_drafter,
        reason="no test has shown that the drafter's KV is right after a load",
        remedy=f"use one of {', '.join(DRAFTERS_WITH_KV + DRAFTERS_WITHOUT_KV)} with sequential drafting by one "
        "module, or serve without kvoffload",
        opened_by="Tests that compare how many drafts are accepted after a load.",
        peers=_ACCEPTED,
    ),
    Rejection(
        setup="sleep mode on GPUs before vLLM 0.33",
        applies=_early_sleep,
        # Xid 31, and a dead engine: vLLM issues 45363 and 45615.
        reason="vLLM frees the GPU's memory while kvoffload may be copying",
        remedy="leave out --enable-sleep-mode, or use a newer vLLM",
        opened_by="An upgrade to vLLM 0.33.",
        peers="vLLM's offloading accepts it, and may crash.",
    ),
    Rejection(
        setup="sleep mode with a backend other than cumem",
        applies=_sleep_backend,
        reason="kvoffload does not know how the backend treats pinned memory",
        remedy="leave out --sleep-mode-backend, or --enable-sleep-mode",
        opened_by="A test of the other backends on a GPU.",
        peers=_ACCEPTED,
    ),
    EXPERTS,
    Rejection(
        setup="--enable-fault-tolerance",
        applies=lambda setup: _if(setup.engine.parallel_config.enable_fault_tolerance),
        reason="a worker that fails before it starts the transfers of a step never reports that they ended",
        remedy="leave it out, or serve without kvoffload",
        opened_by="vLLM would have to report which steps failed. vLLM 0.33 returns the reports of failed workers only "
        "if they got as far as their transfers.",
        peers=_ACCEPTED,
    ),
    PREFILL_CONTEXT,
    Rejection(
        setup="several ranks under the external launcher",
        applies=_launcher,
        reason="each rank has its own scheduler, and their lookups may get different answers",
        remedy="set --distributed-executor-backend to mp or ray",
        opened_by="One rank would have to decide for all ranks.",
        peers=_ACCEPTED,
    ),
    Rejection(
        setup="lower tiers if several data-parallel engines each span several nodes",
        applies=_engines_over_nodes,
        reason="no test has shown that their tiers return correct blocks",
        remedy="leave out secondary_tiers, or run each engine without --data-parallel-size",
        opened_by="A test that runs two such engines.",
        peers=_ACCEPTED,
    ),
    Rejection(
        setup="HiSparse",
        applies=lambda setup: _if(setup.engine.attention_config.hisparse_config is not None),
        reason="HiSparse keeps KV in host memory itself",
        remedy="leave out its configuration, or serve without kvoffload",
        opened_by="Offloading only the groups of the indexer, as vLLM does.",
        peers="vLLM's offloading stores only the groups of HiSparse's indexer.",
    ),
    Rejection(
        setup="diffusion models",
        applies=lambda setup: _if(setup.engine.model_config.is_diffusion),
        reason="vLLM may end a request whose last tokens have the KV of a draft",
        remedy=_WITHOUT,
        opened_by="vLLM would have to say which blocks are final.",
        peers=_ACCEPTED,
    ),
    Rejection(
        setup="models whose answer needs all tokens of the prompt, such as some embedding models",
        applies=_pooled,
        reason="vLLM cannot skip any token of these prompts",
        remedy=_WITHOUT,
        opened_by="Nothing, because there is nothing to load.",
        peers="vLLM turns its own prefix cache off for them, but asks its connectors.",
    ),
    Rejection(
        setup="models that transformers code computes with dynamic or LongRoPE frequencies beyond their trained length",
        applies=_rope,
        reason="one longer request changes the rotary frequencies of its whole batch, so equal tokens have unequal KV",
        remedy=f"set --max-model-len to the trained length at most, or {_WITHOUT}",
        opened_by="transformers would have to compute the frequencies of each request separately.",
        peers="vLLM's prefix cache and offloading accept it, and may return wrong answers.",
    ),
    ONE_PIECE,
    Rejection(
        setup="persistent tiers with weights that kvoffload cannot tell from others",
        applies=_unnamed_weights,
        reason="the tier would serve their KV to servers with other weights",
        remedy='set weights_version to a name of the weights or to {"file": path}, or leave out the tier',
        opened_by="A hash of weights that do not come from the model's files.",
        peers=_NAMES_FILES,
    ),
    HASHES,
    Rejection(
        setup="persistent tiers with scales that a process measures",
        applies=_measured_scales,
        reason="each process measures its own scales, so another process would misread the blocks",
        remedy="leave out the option or the tier",
        opened_by="Scales that are fixed before the first block, and are part of its key.",
        peers=_NAMES_FILES,
    ),
    Rejection(
        setup="media_never_change with --mm-processor-cache-gb 0 and without prefix caching",
        applies=_numbered_media,
        reason="vLLM then numbers media instead of hashing them, and each server starts with the same numbers",
        remedy="leave out one of these options, or media_never_change",
        opened_by="vLLM would have to hash all media. Without media_never_change, kvoffload hashes them itself.",
        peers=_NAMES_FILES,
    ),
    Rejection(
        setup="a kv_cache_layout that this vLLM does not have",
        applies=_unknown_layout,
        reason="vLLM would not start with it",
        remedy="choose one of these, or leave out kv_cache_layout",
        opened_by="A version of vLLM that has this layout.",
        peers="vLLM's offloading always asks for LBHNC.",
    ),
    Rejection(
        setup="kv_cache_layout with latent attention",
        applies=_latent_layout,
        reason="no test has shown that other layouts of latent attention are right",
        remedy="leave out kv_cache_layout",
        opened_by="A test of these layouts on a GPU.",
        peers="vLLM's offloading always asks for LBHNC.",
    ),
    FAILURE_POLICY,
    ROLE,
)
"""Rows that need only vLLM's configuration. Setups that users look for first come first, as in ``WITH_KV_CACHE``."""

NO_GROUP = Rejection(
    setup="models without a KV group in vLLM's prefix cache",
    applies=lambda setup: _if(not setup.kv_cache.prefix_cacheable_group_ids),
    reason="there is nothing to offload",
    remedy=_WITHOUT,
    opened_by="Nothing, because there is nothing to load.",
    peers="vLLM's offloading rejects them too.",
)
UNEQUAL_STAGES = Rejection(
    setup="pipeline stages of unequal size, or with a drafter in the last one, if layers keep different KV",
    applies=_unequal_stages,
    reason="a process cannot compute the size of the other stages' blocks",
    remedy="use --tensor-parallel-size instead, or set pipeline_parallel_size to a divisor of the number of layers, "
    f"with a drafter only from {', '.join(DRAFTERS_WITHOUT_KV)}",
    opened_by="vLLM would have to show every process the KV cache of each stage. It shows the scheduler only rank 0's.",
    peers="vLLM's offloading accepts it. Each worker stores files of its own size.",
)

WITH_KV_CACHE = (
    Rejection(
        setup="recurrent states with speculative decoding",
        applies=lambda setup: _if(setup.states and setup.engine.speculative_config is not None),
        reason="a rejected draft rolls a state back after the step that computed it",
        remedy=f"serve this model without a speculative_config, or {_WITHOUT.removeprefix('serve this model ')}",
        opened_by="A test on a GPU that compares 300 answers. vLLM's CPU platform lacks the kernel that copies states "
        "between drafts.",
        peers=_ACCEPTED,
    ),
    Rejection(
        setup="KV groups that block hashes cannot restore, such as cross attention and encoders (Whisper)",
        applies=_unknown_groups,
        reason="block hashes do not determine their content",
        remedy=_WITHOUT,
        opened_by="vLLM would have to hash all inputs of these groups.",
        peers="vLLM's offloading rejects them too.",
    ),
    Rejection(
        setup="short convolutions (LFM2)",
        applies=lambda setup: _if(any(spec.mamba_type.name == "SHORT_CONV" for spec in setup.states)),
        reason="no test has shown that they are right after a load",
        remedy=_WITHOUT,
        opened_by="A test on a GPU, or a model of this kind that vLLM's CPU platform can run.",
        peers=_ACCEPTED,
    ),
    UNEQUAL_STAGES,
    Rejection(
        setup="the speculative method draft_model if vLLM creates several KV groups",
        applies=_drafter_beside_groups,
        reason="vLLM itself then returns other tokens than without drafts",
        remedy=f"use one of {', '.join(DRAFTERS_WITHOUT_KV)}, or serve without kvoffload",
        opened_by="A repair in vLLM.",
        peers=_ACCEPTED,
    ),
    Rejection(
        setup="KV groups with layers of different windows",
        applies=_unequal_windows,
        reason="kvoffload keeps one window for each group",
        remedy=_WITHOUT,
        opened_by="Using the largest window of the group, and a test.",
        peers="vLLM's offloading uses the window of one layer.",
    ),
    Rejection(
        setup="recurrent states without vLLM's prefix cache",
        applies=lambda setup: _if(any(spec.mamba_cache_mode != "align" for spec in setup.states)),
        reason="vLLM keeps states only with it",
        remedy="add --enable-prefix-caching",
        opened_by="Nothing, because there is no state to store.",
        peers="vLLM's offloading rejects it too, and names the same option.",
    ),
    Rejection(
        setup="recurrent states with --use-replayssm",
        applies=lambda setup: _if(setup.states and setup.engine.cache_config.use_replayssm),
        reason="a block may lack the latest tokens of its state",
        remedy="leave it out, or serve without kvoffload",
        opened_by="vLLM would have to say which states are complete.",
        peers=_ACCEPTED,
    ),
    Rejection(
        setup="recurrent states with --prefix-match-unit or --mamba-block-size",
        applies=_hashes_between_states,
        reason="vLLM then hashes blocks that end between two states",
        remedy="leave out both options, or serve without kvoffload",
        opened_by="Limiting hits to ends of states, and a test.",
        peers="vLLM's offloading accepts it if the hash size divides the block size.",
    ),
    NO_GROUP,
    Rejection(
        setup="KV caches in several allocations",
        applies=_several_allocations,
        reason="kvoffload expects one size of blocks for all groups",
        remedy=f"{_WITHOUT}, or use a vLLM version that kvoffload was tried with",
        opened_by="A model that has such a KV cache in a supported version of vLLM.",
        peers="vLLM's offloading reads the size of each group.",
    ),
    Rejection(
        setup="a kv_cache_layout that vLLM does not use",
        applies=_other_layout,
        reason="this model's attention backend lacks it, or VLLM_KV_CACHE_LAYOUT is set",
        remedy="leave out kv_cache_layout, or choose another attention backend",
        opened_by="An attention backend that supports this layout.",
        peers="vLLM's offloading uses the layout that it gets.",
    ),
)
"""Rows that need the KV groups of the loaded model."""

TWO_CONNECTORS = Rejection(
    setup="two of kvoffload's connectors in one engine",
    reason="both would write to one host memory",
    remedy="name KVOffloadConnector once in the MultiConnector",
    opened_by="Nothing, because one connector can use several tiers.",
    peers=_ACCEPTED,
)
NO_SHARED_MEMORY = Rejection(
    setup="ranks that do not share the memory of the scheduler's node",
    reason="the scheduler and the ranks must use the same host memory",
    remedy="put all ranks on one node, with one /dev/shm, or start vLLM on each node with --nnodes",
    opened_by="An executor that tells which ranks are on which node, as mp does. Each node then gets its own memory.",
    peers="vLLM's offloading accepts it. Each worker opens the region by its path in /dev/shm.",
)
UNCLEAR = Rejection(
    setup="persistent tiers with an option or a platform that kvoffload cannot read",
    reason="other servers could get KV that this server would not compute",
    remedy="leave out the option or the tier",
    opened_by="A rule in kvoffload for this option or platform.",
    peers=_NAMES_FILES,
)
UNREADABLE_WEIGHTS = Rejection(
    setup="persistent tiers with weights whose files cannot be read",
    reason="kvoffload cannot tell these weights from others",
    remedy='make the files readable, set weights_version to a name of the weights or to {"file": path}, or leave out '
    "the tier",
    opened_by="Nothing, because only the files prove which weights they contain.",
    peers=_NAMES_FILES,
)
UNKNOWN_TENSORS = Rejection(
    setup="KV tensors in a layout that kvoffload cannot read",
    reason="a wrong guess would give wrong tokens",
    remedy="choose another attention backend, or serve without kvoffload",
    opened_by="A rule in kvoffload for this layout.",
    peers="vLLM's offloading stops with an error.",
)
ONE_NODE_TIER = Rejection(
    setup="tiers of other packages that do their own I/O, if an engine spans several nodes",
    reason="such a tier runs only on the scheduler's node",
    remedy="leave the tier out, or run one engine per node",
    opened_by="The package would have to provide a store, which kvoffload can use on each node.",
    peers="vLLM's tiers run in each worker.",
)

WHILE_STARTING = (NO_SHARED_MEMORY, UNCLEAR, UNREADABLE_WEIGHTS, UNKNOWN_TENSORS, ONE_NODE_TIER)
"""Rows that only a starting engine can judge. The code that finds them raises the error; for the last one, that is
``tiering.spec``, with a sentence of its own, because tiers import no engine."""

TABLE = (*WITH_KV_CACHE, *BEFORE_LOAD, *WHILE_STARTING, TWO_CONNECTORS)
"""All rows in the order of the page: models, features, tiers, and mistakes in the configuration."""


# ---------------------------------------------------------------------------------------------------------- checks


def undecided(setup: Setup) -> list[Rejection]:
    """Return the rows of ``WHILE_STARTING`` that may still apply when a server with this setup starts."""
    parallel, has_tier = setup.engine.parallel_config, setup.persistent_tier is not None
    may_apply = {
        NO_SHARED_MEMORY.setup: parallel.world_size > 1,
        UNCLEAR.setup: has_tier,
        UNREADABLE_WEIGHTS.setup: has_tier and setup.config.weights_version is None,
        ONE_NODE_TIER.setup: parallel.nnodes_within_dp > 1 and bool(setup.config.secondary_tiers),
    }
    return [row for row in WHILE_STARTING if may_apply.get(row.setup, True)]


def check_engine(vllm_config: Any) -> OffloadingConfig:
    """Return the user's configuration.

    Raises ``ConfigError`` with all reasons that are known before vLLM loads the model.
    """
    config = config_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    problems = Problems()
    for problem in problems_of(BEFORE_LOAD, Setup(vllm_config, config)):
        problems.add(problem)
    with problems:
        check_memory(vllm_config, config)
    problems.raise_found()
    return config


def check_memory(vllm_config: Any, config: OffloadingConfig) -> None:
    """Raise ``CapacityError`` if this machine has too little memory for all of its data-parallel engines. Each of them
    uses all of ``cpu_bytes_to_use``."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size_local > 1:
        mount = SHM if parallel.distributed_executor_backend != "uni" else None
        check_all_engines(config.cpu_bytes, parallel.data_parallel_size_local, mount=mount)


def check_kv_cache(vllm_config: Any, kv_cache_config: Any, rank: int = 0) -> None:
    """Raise ``ConfigError`` with all reasons why vLLM's KV cache in this process cannot be restored."""
    config = config_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    check(WITH_KV_CACHE, Setup(vllm_config, config, kv_cache_config, rank))


@contextlib.contextmanager
def unclear_is_rejected(config: OffloadingConfig, row: Rejection = UNCLEAR) -> Iterator[None]:
    """Raise ``row``'s error instead of an ``UnclearError`` in the block."""
    try:
        yield
    except UnclearError as exc:
        raise row.error(f"the tier {outliving_tier(config)!r}, and vLLM's {exc}") from exc
