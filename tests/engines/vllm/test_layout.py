# SPDX-License-Identifier: Apache-2.0
"""From vLLM's configuration to our layout, or to a refusal with its reason.

Marked ``vllm(elsewhere=True)``: in the lane with vLLM's own KV groups, elsewhere with plain objects (``configs.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engines.vllm.configs import (
    PAGE_BYTES,
    HFConfig,
    attention,
    chunked,
    know_plain_specs,
    kv_cache_config,
    latent,
    mamba,
    registry,
    replayed_window,
    ring,
    sliding,
    speculative,
    vllm_config,
)

from kvoffload.config import GroupKind, RankSlice, parse_config
from kvoffload.connector import NO_BLOCK, BoundaryState
from kvoffload.cpu.memory_limits import SHM
from kvoffload.engines.vllm.arguments import config_of
from kvoffload.engines.vllm.held_blocks import are_written_early
from kvoffload.engines.vllm.layout import layout_of
from kvoffload.engines.vllm.rejections import (
    NO_SHARED_MEMORY,
    UNCLEAR,
    UNKNOWN_TENSORS,
    UNREADABLE_WEIGHTS,
    WHILE_STARTING,
    Setup,
    check_engine,
    check_kv_cache,
    undecided,
)
from kvoffload.engines.vllm.steps import StepTranslator, with_states
from kvoffload.errors import ConfigError

EXTRA = {"cpu_bytes_to_use": "1MiB"}
CONFIG = parse_config(EXTRA)
TIERING = {"spec_name": "TieringOffloadingSpec"}
DISK = TIERING | {"secondary_tiers": [{"type": "disk", "path": "/kv", "max_bytes": "1GiB"}]}
NO_GROUPS: dict[str, Any] = {
    "prefix_cacheable_group_ids": [],
    "kv_cache_groups": [],
    "needs_kv_cache_zeroing": False,
}
BOTH = pytest.mark.vllm(elsewhere=True)


@pytest.fixture(autouse=True)
def _plain_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    know_plain_specs(monkeypatch)


# ---------------------------------------------------------------------------------------------------- refusals


@BOTH
def test_engine_cores_that_take_more_than_the_machine_has_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "kvoffload.engines.vllm.rejections.check_all_engines", lambda *args, **mount: asked.append((args, mount))
    )
    check_engine(vllm_config())
    assert not asked
    check_engine(vllm_config(parallel_config__data_parallel_size_local=4))
    check_engine(
        vllm_config(parallel_config__data_parallel_size_local=2, parallel_config__distributed_executor_backend="mp")
    )
    assert asked == [((1 << 20, 4), {"mount": None}), ((1 << 20, 2), {"mount": SHM})]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"kv_transfer_config__kv_role": "kv_consumer"}, '"kv_role": "kv_both"'),
        ({"parallel_config__prefill_context_parallel_size": 4}, "prefill_context_parallel_size is 4"),
        (
            {"parallel_config__world_size": 2, "parallel_config__distributed_executor_backend": "external_launcher"},
            "--distributed-executor-backend to mp or ray",
        ),
        (
            {"speculative_config": speculative(method="dflash")},
            "the method 'dflash'.*: use one of eagle",
        ),
        ({"speculative_config": speculative(parallel_drafting=True)}, "'eagle' with parallel drafting"),
        ({"speculative_config": speculative(method="mtp", modules=2)}, "several MTP modules"),
        ({"attention_config__hisparse_config": object()}, "HiSparse"),
        ({"parallel_config__enable_fault_tolerance": True}, "--enable-fault-tolerance"),
        # A mean of all tokens, though --enable-chunked-prefill says otherwise.
        (
            {"model_config__pooler_config": object(), "model_config__is_prefix_caching_supported": False},
            "needs all tokens of the prompt",
        ),
        # Such as a prefix LM, or latent attention on a CPU.
        (
            {"scheduler_config__enable_chunked_prefill": False, "cache_config__enable_prefix_caching": False},
            "computes each prompt in one piece",
        ),
        ({"model_config__is_diffusion": True}, "diffusion models"),
        ({"aux_output_config__enabled": True}, "--enable-return-routed-experts"),
    ],
)
def test_engines_that_cannot_be_served_say_why_before_they_have_a_kv_cache(change: dict[str, Any], words: str) -> None:
    assert check_engine(vllm_config()) == CONFIG
    with pytest.raises(ConfigError, match=words):
        check_engine(vllm_config(**change))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "of a newer transformers"])
def test_rotary_frequencies_of_the_longest_request_of_a_batch_are_refused(kind: str) -> None:
    """This is the case in transformers' code, but not in vLLM's own."""

    def config(limit: int, module: str = "vllm.model_executor.models.transformers", **rope: int) -> Any:
        return vllm_config(
            model_config__hf_config=HFConfig(rope_parameters={"rope_type": kind, **rope}),
            model_config__hf_text_config=HFConfig(max_position_embeddings=8192),
            model_config__registry=registry(module),
            model_config__max_model_len=limit,
        )

    check_engine(config(16384, "vllm.model_executor.models.small"))
    check_engine(config(8192))
    for wrong in (config(8193), config(8192, original_max_position_embeddings=4096)):
        with pytest.raises(ConfigError, match=r"equal tokens have unequal KV: set --max-model-len"):
            check_engine(wrong)


def test_a_prefix_cache_that_is_off_alone_is_no_reason() -> None:
    check_engine(vllm_config(cache_config__enable_prefix_caching=False))
    check_engine(vllm_config(scheduler_config__enable_chunked_prefill=False))


def test_sleep_is_refused_where_it_takes_memory_away_from_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = {"model_config__enable_sleep_mode": True}
    check_engine(vllm_config(**asleep))  # on a CPU nothing is taken away
    on_gpu = asleep | {"device_config__device_type": "cuda", "model_config__sleep_mode_backend": "cumem"}
    monkeypatch.setattr("kvoffload.engines.vllm.rejections.tells_of_sleep", lambda: False)
    with pytest.raises(ConfigError, match=r"before vLLM 0\.33, because .* or use a newer vLLM"):
        check_engine(vllm_config(**on_gpu))
    monkeypatch.setattr("kvoffload.engines.vllm.rejections.tells_of_sleep", lambda: True)
    check_engine(vllm_config(**on_gpu))
    with pytest.raises(ConfigError, match=r"cumem \('snapshot'\), because"):
        check_engine(vllm_config(**on_gpu | {"model_config__sleep_mode_backend": "snapshot"}))


def test_tiers_are_refused_where_each_of_several_engines_spans_nodes() -> None:
    nodes = {"nnodes_within_dp": 2, "world_size": 2, "distributed_executor_backend": "mp"}
    one = {f"parallel_config__{name}": value for name, value in nodes.items()}
    two = one | {"parallel_config__data_parallel_size": 2}
    tiers = EXTRA | TIERING | {"secondary_tiers": [{"type": "memory"}]}
    check_engine(vllm_config(**one, kv_transfer_config__kv_connector_extra_config=tiers))
    check_engine(vllm_config(**two))
    with pytest.raises(ConfigError, match=r"2 engines, 2 nodes each.*: leave out secondary_tiers, or"):
        check_engine(vllm_config(**two, kv_transfer_config__kv_connector_extra_config=tiers))


def of_stages(stages: int, **changes: Any) -> Any:
    """An engine of 12 layers in a pipeline."""
    return vllm_config(
        parallel_config__pipeline_parallel_size=stages,
        parallel_config__world_size=stages,
        parallel_config__distributed_executor_backend="mp",
        **changes,
    )


def of_stage(num_layers: int, *more_groups: Any) -> Any:
    """The KV cache of a rank with ``num_layers`` of one group; pages of 4 KiB per layer."""
    caches = kv_cache_config(attention(), *more_groups)
    caches.kv_cache_groups[0].layer_names = [f"layers.{n}" for n in range(num_layers)]
    for tensor in caches.kv_cache_tensors:
        tensor.size = num_layers * 4096 * caches.num_blocks
    return caches


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("stages", "partition", "method", "sizes"),
    [
        (5, None, "ngram", (2, 2, 3, 3, 2)),
        (2, "5,7", None, (5, 7)),
        (2, "7,5", None, (7, 5)),
        (3, None, None, (4, 4, 4)),
        (3, None, "eagle", (4, 4, 5)),  # the last stage has the drafter's layer
        (2, "7,5", "mtp", (7, 6)),
        (2, "7,5", "draft_model", (7, 6)),
        (2, "6,6", "eagle3", (6, 7)),
    ],
)
def test_each_slice_is_as_large_as_the_largest_stage_s(
    stages: int,
    partition: str | None,
    method: str | None,
    sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if partition is not None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    config = of_stages(stages, speculative_config=None if method is None else speculative(method=method))
    check_engine(config)
    for rank, size in enumerate(sizes):
        check_kv_cache(config, of_stage(size), rank)
    layouts = [
        layout_of(config, of_stage(size), parse_config(EXTRA), rank, is_worker=True) for rank, size in enumerate(sizes)
    ]
    assert {layout.slice_bytes(1) for layout in layouts} == {max(sizes) * 4096}
    assert layout_of(config, of_stage(sizes[0]), parse_config(EXTRA)).slice_bytes(1) == max(sizes) * 4096
    assert [layout.slice.index for layout in layouts] == list(range(stages))


@pytest.mark.vllm
def test_unequal_stages_of_layers_that_differ_are_refused() -> None:
    config = of_stages(5)
    without_groups = of_stage(2)
    without_groups.kv_cache_groups, without_groups.prefix_cacheable_group_ids = [], ()
    for caches in (of_stage(2, sliding(64)), of_stage(1), of_stage(3), without_groups):
        with pytest.raises(ConfigError, match=r"stages have 2, 2, 3, 3, 2 layers.*a divisor of"):
            check_kv_cache(config, caches)
    check_kv_cache(of_stages(3), of_stage(4, sliding(64)))  # equal stages


def with_indexers(num_layers: int, without: int = 0, is_worker: bool = True) -> Any:
    """The KV cache of a rank whose layers also have the cache of an indexer (DeepSeek V3.2), except ``without``."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    caches = of_stage(num_layers)
    (group,) = caches.kv_cache_groups
    own, indexer = latent(), latent(head_size=4)
    specs = {f"model.layers.{n + 5}.self_attn.attn": own for n in range(num_layers)}
    specs |= {f"model.layers.{n + 5}.self_attn.indexer.k_cache": indexer for n in range(without, num_layers)}
    group.layer_names = list(specs)
    num_bytes = sum(spec.page_size_bytes for spec in specs.values())
    group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs) if is_worker else own
    for tensor in caches.kv_cache_tensors:
        tensor.size = num_bytes * caches.num_blocks
    return caches


@pytest.mark.vllm
def test_layers_of_unequal_stages_may_have_two_caches_each() -> None:
    config, sizes = of_stages(5), (2, 2, 3, 3, 2)
    for rank, size in enumerate(sizes):
        check_kv_cache(config, with_indexers(size), rank)
        with pytest.raises(ConfigError, match="stages have 2, 2, 3, 3, 2 layers"):
            check_kv_cache(config, with_indexers(size, without=1), rank)
    check_kv_cache(config, with_indexers(sizes[0], is_worker=False))
    layouts = [
        layout_of(config, with_indexers(size), parse_config(EXTRA), rank, is_worker=True)
        for rank, size in enumerate(sizes)
    ]
    layouts.append(layout_of(config, with_indexers(sizes[0], is_worker=False), parse_config(EXTRA)))
    per_layer = latent().page_size_bytes + latent(head_size=4).page_size_bytes
    assert {layout.slice_bytes(1) for layout in layouts} == {3 * per_layer}


@pytest.mark.vllm
def test_over_stages_a_drafter_needs_the_kv_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the last stage, whose size the other stages must know."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "6,5,1")
    config = of_stages(3, speculative_config=speculative())
    check_kv_cache(config, of_stage(2), rank=2)
    unlike = of_stage(2)
    target, drafter = unlike.kv_cache_groups[0].kv_cache_spec, attention(num_kv_heads=4)
    unlike.kv_cache_groups[0].kv_cache_spec = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"layers.0": target, "layers.1": drafter}
    )
    for caches in (unlike, of_stage(1), of_stage(2, sliding(64))):
        with pytest.raises(ConfigError, match="stages have 6, 5, 2 layers"):
            check_kv_cache(config, caches, rank=2)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "7,5")
    equal = of_stages(2, speculative_config=speculative())
    equal.speculative_config.draft_model_config.get_total_num_hidden_layers = lambda: 2
    with pytest.raises(ConfigError, match="stages have 7, 7 layers"):
        check_kv_cache(equal, of_stage(7, sliding(64)))


@BOTH
def test_a_draft_model_beside_several_groups_is_refused() -> None:
    """There vLLM 0.32 answers with other tokens than without drafts, also when nothing is stored or loaded."""
    config = vllm_config(speculative_config=speculative(method="draft_model"))
    check_kv_cache(config, kv_cache_config(attention()))
    with pytest.raises(ConfigError, match="draft_model if vLLM creates several KV groups"):
        check_kv_cache(config, kv_cache_config(attention(), attention()))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "lacks .cpu_bytes_to_use."),
        (EXTRA | {"eviction_polcy": "arc"}, "Did you mean 'eviction_policy'"),
        (EXTRA | {"eviction_policy": "arcs"}, "Did you mean 'arc'"),
        (EXTRA | {"spec_name": "TieringOfloadingSpec"}, "Did you mean 'TieringOffloadingSpec'"),
        (EXTRA | {"spec_name": "CPUOffloadingSpec", "secondary_tiers": [{"type": "memory"}]}, "leave out spec_name"),
        (EXTRA | TIERING | {"secondary_tiers": [{"type": "dsk"}]}, "Did you mean 'disk'"),
        (EXTRA | TIERING | {"secondary_tiers": [{"type": "memory", "max_byte": 1}]}, "Did you mean 'max_bytes'"),
    ],
)
def test_mistakes_in_the_users_keys_need_no_engine_to_be_found(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(extra)
    with pytest.raises(ConfigError, match=words):
        check_engine(vllm_config(kv_transfer_config__kv_connector_extra_config=extra))


@pytest.mark.vllm
def test_hashes_have_the_path_of_an_adapter() -> None:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    adapter = SimpleNamespace(adapter_id=7, name="tuned", lora_name="tuned", lora_path="/adapters/7")
    asked = SimpleNamespace(lora_request=adapter, cache_salt=None, mm_features=[], prompt_embeds=None)
    keys, _ = generate_block_hash_extra_keys(asked, 0, 4, 0)
    assert "/adapters/7" in str(keys)


def asking_for(layout: str, **changes: Any) -> Any:
    return vllm_config(kv_transfer_config__kv_connector_extra_config=EXTRA | {"kv_cache_layout": layout}, **changes)


@pytest.mark.vllm
def test_a_layout_that_vllm_lacks_or_that_was_not_proven_is_refused() -> None:
    assert check_engine(asking_for("BLNHC")).kv_cache_layout == "BLNHC"
    with pytest.raises(ConfigError, match="'BNLHC'; this vLLM has LBHNC, "):
        check_engine(asking_for("BNLHC"))
    with pytest.raises(ConfigError, match=r"kv_cache_layout with latent attention \(BLNHC\), because"):
        check_engine(asking_for("BLNHC", model_config__use_mla=True))


@BOTH
def test_a_layout_that_vllm_did_not_take_is_refused() -> None:
    check_kv_cache(asking_for("BLNHC"), kv_cache_config(attention(), kv_cache_layout="BLNHC"))
    with pytest.raises(ConfigError, match="asks for BLNHC, and vLLM uses LBHNC"):
        check_kv_cache(asking_for("BLNHC"), kv_cache_config(attention()))


@BOTH
def test_groups_that_hashes_cannot_restore_are_refused() -> None:
    check_kv_cache(vllm_config(), kv_cache_config(attention(), sliding(64)))
    wrong = replayed_window()
    with pytest.raises(ConfigError, match=f"KV group 1 .*{type(wrong).__name__}"):
        check_kv_cache(vllm_config(), kv_cache_config(attention(), wrong))


@BOTH
def test_chunked_local_attention_needs_its_chunk_alone() -> None:
    caches = kv_cache_config(attention(), chunked())
    check_kv_cache(vllm_config(), caches)
    _, local = layout_of(vllm_config(), caches, CONFIG).groups
    assert (local.kind, local.sliding_window_tokens) == (GroupKind.LOCAL_CHUNK, 64)


@BOTH
def test_groups_outside_the_prefix_cache_are_left_out() -> None:
    """vLLM computes the contents of these groups again, even after a hit in its own cache."""
    caches = kv_cache_config(attention(), ring(), sliding(64))
    check_kv_cache(vllm_config(), caches)
    layout = layout_of(vllm_config(), caches, CONFIG)
    assert [group.kind for group in layout.groups] == [GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW]
    with pytest.raises(ConfigError, match="models without a KV group in vLLM's prefix cache"):
        check_kv_cache(vllm_config(), kv_cache_config(ring()))


@BOTH
@pytest.mark.parametrize("other", [mamba, lambda: attention(dtype=torch.bfloat16)], ids=["states", "two precisions"])
def test_blocks_that_the_v2_runner_writes_before_it_says_so_are_held(
    other: Callable[[], Any],
) -> None:
    mixed = kv_cache_config(attention(), other())
    for is_v2 in (False, True):
        config = vllm_config(use_v2_model_runner=is_v2)
        check_kv_cache(config, mixed)
        assert are_written_early(config, mixed) is is_v2
        assert not are_written_early(config, kv_cache_config(attention(), sliding(64)))


@BOTH
@pytest.mark.parametrize(
    ("change", "states", "words"),
    [
        ({"speculative_config": speculative(method="ngram")}, {}, "recurrent states with speculative decoding"),
        ({"cache_config__use_replayssm": True}, {}, "--use-replayssm"),
        ({}, {"mamba_cache_mode": "none"}, "--enable-prefix-caching"),
        ({}, {"block_size": 32}, "states every 32 tokens, hashes every 16"),
    ],
)
def test_states_that_were_not_shown_to_be_right_are_refused(
    change: dict[str, Any], states: dict[str, Any], words: str
) -> None:
    check_kv_cache(vllm_config(), kv_cache_config(attention(), mamba()))
    with pytest.raises(ConfigError, match=words):
        check_kv_cache(vllm_config(**change), kv_cache_config(attention(), mamba(**states)))


@BOTH
def test_short_convolutions_are_refused() -> None:
    with pytest.raises(ConfigError, match="short convolutions"):
        check_kv_cache(vllm_config(), kv_cache_config(attention(), mamba("SHORT_CONV")))


# ------------------------------------------------------------------------------------------------------ layout


@BOTH
def test_groups_windows_and_sizes() -> None:
    layout = layout_of(vllm_config(), kv_cache_config(attention(), sliding(64, extra_retained_tokens=3)), CONFIG)
    assert [group.kind for group in layout.groups] == [GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW]
    assert [group.sliding_window_tokens for group in layout.groups] == [None, 67]
    assert {group.page_bytes for group in layout.groups} == {3 * PAGE_BYTES}
    assert {group.block_tokens for group in layout.groups} == {16}
    assert layout.hash_block_tokens == 16
    assert layout.instance_id == "engine 1"
    other = layout_of(vllm_config(instance_id="2"), kv_cache_config(attention()), CONFIG)
    assert other.instance_id != layout.instance_id, "two engines with one engine_id share no memory"
    assert layout.device_tokens == 9 * 16 // 2, "the groups share ten blocks, one of which is never used"
    no_cache = vllm_config(cache_config__enable_prefix_caching=False)
    assert layout_of(no_cache, kv_cache_config(attention()), CONFIG).device_tokens == 0


@BOTH
def test_spans_are_made_where_vllm_has_an_endpoint_for_them() -> None:
    config = vllm_config()
    assert not layout_of(config, kv_cache_config(attention()), CONFIG).traces_enabled
    config.observability_config.otlp_traces_endpoint = "http://localhost:4318/v1/traces"
    assert layout_of(config, kv_cache_config(attention()), CONFIG).traces_enabled


@BOTH
def test_context_parallelism_makes_blocks_longer() -> None:
    config = vllm_config(parallel_config__decode_context_parallel_size=4)
    layout = layout_of(config, kv_cache_config(attention(), attention(dcp_sharded=False)), CONFIG)
    assert [group.block_tokens for group in layout.groups] == [64, 16]


@BOTH
def test_speculative_heads_look_a_token_ahead_where_vllm_drops_a_block() -> None:
    def lookahead(speculative_config: Any, *flags: bool) -> list[int]:
        caches = kv_cache_config(attention(), sliding(64), attention(), sliding(32))
        for group, flag in zip(caches.kv_cache_groups, flags or [False] * 4, strict=True):
            group.is_eagle_group = flag
        layout = layout_of(vllm_config(speculative_config=speculative_config), caches, CONFIG)
        return [group.lookahead_tokens for group in layout.groups]

    assert lookahead(None) == [0, 0, 0, 0]
    assert lookahead(speculative(drop=False), True, False, False, False) == [0, 0, 0, 0]
    assert lookahead(speculative()) == [1, 1, 1, 1], "nobody knows where the head is"
    assert lookahead(speculative(), True, False, False, False) == [1, 0, 1, 0], "equal groups are looked up together"
    assert lookahead(speculative(), False, False, False, True) == [0, 0, 0, 1]


@BOTH
def test_a_hash_covers_the_smallest_block() -> None:
    layout = layout_of(vllm_config(), kv_cache_config(attention(block_size=48), sliding(64)), CONFIG)
    assert [group.block_tokens for group in layout.groups] == [48, 16]
    assert layout.hash_block_tokens == 16


@BOTH
@pytest.mark.parametrize(
    ("world_size", "backend", "num_processes"), [(1, "uni", 1), (1, "mp", 2), (2, "mp", 3), (4, "mp", 5)]
)
def test_who_maps_the_primary_tier(world_size: int, backend: str, num_processes: int) -> None:
    config = vllm_config(
        parallel_config__world_size=world_size,
        parallel_config__tensor_parallel_size=world_size,
        parallel_config__distributed_executor_backend=backend,
    )
    layout = layout_of(config, kv_cache_config(attention()), CONFIG, rank=world_size - 1)
    assert (layout.num_ranks, layout.rank, layout.num_processes) == (world_size, world_size - 1, num_processes)


@BOTH
def test_the_scheduler_maps_host_memory_on_the_first_node() -> None:
    config = vllm_config(
        parallel_config__nnodes_within_dp=2,
        parallel_config__world_size=4,
        parallel_config__tensor_parallel_size=4,
        parallel_config__distributed_executor_backend="mp",
    )
    layouts = [layout_of(config, kv_cache_config(attention()), CONFIG, rank) for rank in range(4)]
    assert [layout.num_processes for layout in layouts] == [3, 3, 2, 2]
    assert [layout.slice for layout in layouts] == [RankSlice(0, 2), RankSlice(1, 2)] * 2
    assert {layout.num_ranks for layout in layouts} == {4}


@BOTH
@pytest.mark.parametrize(
    ("extra", "parallel", "rows"),
    [
        ({}, {}, []),
        ({}, {"world_size": 2}, [NO_SHARED_MEMORY]),
        (DISK, {}, [UNCLEAR, UNREADABLE_WEIGHTS]),
        (DISK | {"weights_version": "1"}, {"world_size": 2}, [NO_SHARED_MEMORY, UNCLEAR]),
        (DISK, {"world_size": 2, "nnodes_within_dp": 2}, list(WHILE_STARTING)),
    ],
)
def test_only_what_may_apply_is_left_to_a_starting_server(
    extra: dict[str, Any], parallel: dict[str, Any], rows: list[Any]
) -> None:
    changes = {f"parallel_config__{name}": value for name, value in parallel.items()}
    setup = Setup(vllm_config(**changes), parse_config(EXTRA | extra))
    assert [row.setup for row in undecided(setup)] == [
        row.setup for row in WHILE_STARTING if row in rows or row is UNKNOWN_TENSORS
    ]


# ------------------------------------------------------------------------------------------------------- steps


def scheduler_output(**changes: Any) -> Any:
    cached = SimpleNamespace(
        req_ids=["running", "resumed", "idle"],
        resumed_req_ids={"resumed"},
        new_block_ids=[([5], [0]), ([0, 7], [3]), None],
        num_computed_tokens=[40, 16, 50],
    )
    new = SimpleNamespace(req_id="new", block_ids=([1, 2], [0, 4]), num_computed_tokens=16)
    tokens = {"new": 10, "running": 1, "resumed": 20, "idle": 1}
    values = {
        "scheduled_new_reqs": [new],
        "scheduled_cached_reqs": cached,
        "num_scheduled_tokens": tokens,
        "preempted_req_ids": {"gone"},
    }
    return SimpleNamespace(**values | changes)


def test_steps_are_translated_with_the_null_block_as_no_block() -> None:
    step = StepTranslator().step(scheduler_output())
    by_id = {each.request_id: each for each in step.scheduled}
    assert list(by_id) == ["new", "running", "resumed", "idle"]
    assert by_id["new"].new_block_ids == ([1, 2], [NO_BLOCK, 4])
    assert by_id["new"].block_table_is_new
    assert by_id["running"].new_block_ids == ([5], [NO_BLOCK])
    assert not by_id["running"].block_table_is_new
    assert by_id["resumed"].block_table_is_new
    assert by_id["resumed"].new_block_ids == ([NO_BLOCK, 7], [3])
    assert by_id["idle"].new_block_ids == ()
    assert [each.num_scheduled_tokens for each in step.scheduled] == [10, 1, 20, 1]
    assert [each.num_computed_tokens for each in step.scheduled] == [16, 40, 16, 50]
    assert step.preempted_request_ids == {"gone"}


def test_states_and_copies_are_translated() -> None:
    named = SimpleNamespace(boundary_state_offloads={"new": [(1, 4, 32), (2, 6, 32)]})
    copies = [SimpleNamespace(src_block_id=3, dst_block_id=8)]
    output = scheduler_output(kv_connector_block_state=named, kv_cache_block_copies=copies)
    step = with_states(StepTranslator().step(output), output)
    assert step.boundary_states == (BoundaryState("new", 1, 4, 32), BoundaryState("new", 2, 6, 32))
    assert step.needed_block_ids == (8,)
    assert len(step.scheduled) == 4
    output = scheduler_output(kv_connector_block_state=None, kv_cache_block_copies=None)
    step = StepTranslator().step(output)
    assert with_states(step, output) == step


def test_the_null_block_may_have_another_id() -> None:
    translator = StepTranslator(null_block_id=9)
    assert translator.block_ids(([0, 9, 3],)) == ([0, NO_BLOCK, 3],)


def test_groups_that_are_not_offloaded_are_left_out_of_steps_and_their_blocks_are_needed() -> None:
    translator = StepTranslator(group_ids=(1,))
    assert translator.block_ids(([8, 9], [0, 4])) == ([NO_BLOCK, 4],)
    named = SimpleNamespace(boundary_state_offloads={"new": [(0, 3, 32), (1, 4, 32)]})
    output = scheduler_output(kv_connector_block_state=named, kv_cache_block_copies=None)
    step = with_states(translator.step(output), output, (1,))
    assert {each.request_id: each.new_block_ids for each in step.scheduled} == {
        "new": ([NO_BLOCK, 4],),
        "running": ([NO_BLOCK],),
        "resumed": ([3],),
        "idle": (),
    }
    assert sorted(step.needed_block_ids) == [0, 1, 2, 5, 7, 8, 9], "a store may read what these held before"
    assert step.boundary_states == (BoundaryState("new", 0, 4, 32),)
    assert translator.step(output).needed_block_ids == (1, 2, 5, 0, 7), "each once"


def test_preemptions_may_be_unknown() -> None:
    assert StepTranslator().step(scheduler_output(preempted_req_ids=None)).preempted_request_ids == frozenset()
