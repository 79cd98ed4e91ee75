# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration in plain objects, and KV caches, made of vLLM's own classes in the lane, and of plain objects
elsewhere.

``test_interface`` checks that vLLM's classes have the attributes of these objects.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engines.vllm.counted import judged
from tests.engines.vllm.harness import HAS_VLLM

from kvoffload.engines.vllm import identity, layout, rejections, slices, versions, weights
from kvoffload.engines.vllm.fields import FIELDS

PAGE_BYTES = 2 * 16 * 2 * 8 * 4
SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def know_plain_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM, let plain KV groups report the results of vLLM's functions for its own groups.

    This is vLLM 0.32, and all hosts are alike.
    """
    monkeypatch.setattr(identity, "cpu_packing", lambda vllm_config, spec: "vec")
    monkeypatch.setattr(identity, "cpu_build", lambda: "a build")
    monkeypatch.setattr(identity, "platform", lambda is_quantized: "a platform")
    monkeypatch.setattr(identity, "kernels", lambda: "kernels")
    if not HAS_VLLM:
        for module in (layout, rejections, slices):
            monkeypatch.setattr(module, "kind_of", lambda spec: spec.kind)
        for module in (identity, rejections, slices):
            monkeypatch.setattr(module, "stage_sizes", _equal_stages)
        monkeypatch.setattr(weights, "_loader_of", lambda load_format: "vllm.model_executor")
        for module in (layout, rejections):
            monkeypatch.setattr(module, "window_of", lambda spec: spec.sliding_window)
        monkeypatch.setattr(versions, "vllm_release", lambda: (0, 32))
        monkeypatch.setattr(identity, "installed_version", lambda: "0.32.0")


def _equal_stages(config: Any) -> list[int]:
    stages = config.parallel_config.pipeline_parallel_size
    return [12 // stages] * stages


def know_plain_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes are published as bytes. Without vLLM: its events are plain objects too, and this is vLLM 0.32."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    if HAS_VLLM:
        return
    events, hashing = ModuleType("vllm.distributed.kv_events"), ModuleType("vllm.v1.core.kv_cache_utils")
    events.__dict__.update({name: type(name, (SimpleNamespace,), {}) for name in ("BlockStored", "BlockRemoved")})
    hashing.__dict__.update(
        generate_block_hash_extra_keys=lambda *_: (None, 0),
        maybe_convert_block_hash=lambda block_hash: block_hash,
        to_event_extra_keys=lambda hashed: None,
    )
    for module in (events, hashing):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(versions, "vllm_release", lambda: (0, 32))


@functools.cache
def _plain_class(name: str) -> Any:
    return dataclasses.make_dataclass(name, _fields_of(name), eq=False, repr=False)


def _fields_of(name: str) -> list[tuple[str, Any, None]]:
    """Return the fields of vLLM's class ``name`` that someone has judged."""
    return [(field, Any, None) for names in judged(name).values() for field in names.split()]


def stub(name: str, **values: Any) -> Any:
    """Return an object with the fields of vLLM's class ``name``. They are ``None`` unless ``values``
    contains them.

    Other entries of ``values`` become attributes.
    """
    config = _plain_class(name)()
    for attribute, value in values.items():
        setattr(config, attribute, value)
    return config


class HFConfig:
    """A model's configuration in the form of transformers."""

    def __init__(self, theta: float = 1.0, **more: Any) -> None:
        self.values = {"model_type": "small", "rope_theta": theta, "transformers_version": "5.19.0", **more}

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def heads(total: int, **more: Any) -> dict[str, Any]:
    """Return the entries about KV heads in a model's configuration."""
    text = HFConfig(num_key_value_heads=total, **more)
    return {"get_total_num_kv_heads": lambda: total, "hf_text_config": text}


def registry(module: str) -> Any:
    """Return a registry of vLLM's models that contains the small one in ``module``."""
    return SimpleNamespace(
        models={"SmallForCausalLM": SimpleNamespace(module_name=module, class_name="SmallForCausalLM")}
    )


def model_config(total_heads: int, **more: Any) -> Any:
    """Return a model's configuration. ``more`` contains other entries of its text part."""
    values = {
        "model": "small",
        "model_weights": "",
        "dtype": "torch.float32",
        "seed": 0,
        "trust_remote_code": False,
        "hf_config": HFConfig(),
        "original_max_model_len": None,
        "override_generation_config": {},
        "try_get_generation_config": dict,
        "use_mla": False,
        "is_hybrid": False,
        "is_diffusion": False,
        "get_total_num_hidden_layers": lambda: 12,
        "get_and_verify_max_len": lambda asked: 4096,
        "architecture": "SmallForCausalLM",
        "registry": registry("vllm.model_executor.models.small"),
    }
    return stub("ModelConfig", **values | heads(total_heads, **more))


def vllm_config(**changes: Any) -> Any:
    """Return a working configuration. ``part__attribute=value`` changes one attribute of one part."""
    parts = {
        "kv_transfer_config": {
            "kv_load_failure_policy": "recompute",
            "kv_role": "kv_both",
            "engine_id": "engine",
            "kv_connector_extra_config": {"cpu_bytes_to_use": "1MiB"},
        },
        "parallel_config": {
            "nnodes_within_dp": 1,
            "data_parallel_size": 1,
            "data_parallel_size_local": 1,
            "world_size": 1,
            "rank": 0,
            "distributed_executor_backend": "uni",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "cp_kv_cache_interleave_size": 1,
        },
        "cache_config": {
            "prefix_caching_hash_algo": "sha256",
            "cache_dtype": "auto",
            "block_size": 16,
            "prefix_match_unit": None,
            "enable_prefix_caching": True,
            "use_replayssm": False,
        },
        "device_config": {"device_type": "cpu"},
        "load_config": {"load_format": "auto"},
        "attention_config": {},
        "mamba_config": {},
        "compilation_config": {},
        "kernel_config": {},
    }
    kinds = {name: "".join(word.capitalize() for word in name.split("_")) for name in parts}
    stubs = {name: stub(kinds[name], **values) for name, values in parts.items() if kinds[name] in FIELDS}
    others = {name: SimpleNamespace(**values) for name, values in parts.items() if name not in stubs}
    scheduler = SimpleNamespace(async_scheduling=False, enable_chunked_prefill=True)
    config = stub(
        "VllmConfig",
        **stubs | others,
        model_config=model_config(2),
        scheduler_config=scheduler,
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        aux_output_config=SimpleNamespace(enabled=False),
        ec_manager_config=stub("EncoderCacheManagerConfig"),
        use_v2_model_runner=False,
        instance_id="1",
    )
    for path, value in changes.items():
        part, _, attribute = path.partition("__")
        if attribute:
            setattr(getattr(config, part), attribute, value)
        else:
            setattr(config, part, value)
    return config


def kv_cache_config(*specs: Any, num_blocks: int = 10, layers: int = 3, **changes: Any) -> Any:
    names = [[f"group{g}.layer{n}" for n in range(layers)] for g in range(len(specs))]
    page_bytes = max(getattr(spec, "num_kv_heads", 2) for spec in specs) * PAGE_BYTES // 2
    size = num_blocks * layers * page_bytes
    if HAS_VLLM:
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

        config: Any = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[
                KVCacheTensor(size=size, layers=each, layer_stride=num_blocks * page_bytes, block_stride=page_bytes)
                for each in names
            ],
            kv_cache_groups=[KVCacheGroupSpec(each, spec) for each, spec in zip(names, specs, strict=True)],
            kv_cache_layout="LBHNC",
            hash_block_size=16,
        )
    else:
        config = SimpleNamespace(
            num_blocks=num_blocks,
            kv_cache_tensors=[SimpleNamespace(size=size, layers=each) for each in names],
            kv_cache_groups=[
                SimpleNamespace(layer_names=each, kv_cache_spec=spec, is_eagle_group=False)
                for each, spec in zip(names, specs, strict=True)
            ],
            kv_cache_layout="LBHNC",
            hash_block_size=16,
            prefix_cacheable_group_ids=tuple(n for n, spec in enumerate(specs) if spec.kind != "unknown"),
            kv_tp_replicas=1,
            needs_kv_cache_zeroing=len({getattr(spec, "dtype", "a state's") for spec in specs}) > 1,
        )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


_BASES = {
    "AttentionSpec": "KVCacheSpec",
    "FullAttentionSpec": "AttentionSpec",
    "MLAAttentionSpec": "FullAttentionSpec",
    "RSWASpec": "FullAttentionSpec",
    "ChunkedLocalAttentionSpec": "AttentionSpec",
    "CircularBufferSpec": "AttentionSpec",
    "SlidingWindowSpec": "AttentionSpec",
    "SlidingWindowMLASpec": "SlidingWindowSpec",
    "MambaSpec": "KVCacheSpec",
}


@functools.cache
def _plain_spec(name: str) -> Any:
    """Return a dataclass with the fields of vLLM's class ``name``."""
    base = [_plain_spec(_BASES[name])] if name in _BASES else []
    return dataclasses.make_dataclass(name, _fields_of(name), bases=tuple(base))


class _Mode(Enum):
    NONE = 0
    is_per_token_head = property(lambda self: False)


def _spec(name: str, kind: str, **values: Any) -> Any:
    if not HAS_VLLM:
        plain: dict[str, Any] = {"dcp_sharded": kind != "mamba"}
        if kind != "mamba":
            plain |= {"kv_quant_mode": _Mode.NONE}
        if "sliding_window" in values:
            plain |= {"extra_retained_tokens": 0}
        spec = _plain_spec(name)(**plain | values)
        spec.kind = kind
        return spec
    from vllm.v1 import kv_cache_interface

    return getattr(kv_cache_interface, name)(**values)


def attention(**changes: Any) -> Any:
    return _spec("FullAttentionSpec", "full_attention", **SHAPE | changes)


def sliding(window: int, **changes: Any) -> Any:
    return _spec("SlidingWindowSpec", "sliding_window", **SHAPE | {"sliding_window": window} | changes)


def latent(window: int | None = None, **changes: Any) -> Any:
    shape = SHAPE | {"num_kv_heads": 1} | changes
    if window is None:
        return _spec("MLAAttentionSpec", "mla_attention", **shape)
    return _spec("SlidingWindowMLASpec", "sliding_window_mla", **shape, sliding_window=window)


def chunked(chunk: int = 64, **changes: Any) -> Any:
    shape = SHAPE | {"attention_chunk_size": chunk} | changes
    return _spec("ChunkedLocalAttentionSpec", "chunked_local_attention", **shape)


def ring() -> Any:
    """Return the spec of a request's own buffer, which is not in the prefix cache."""
    return _spec("CircularBufferSpec", "unknown", **SHAPE)


def replayed_window() -> Any:
    return _spec("RSWASpec", "full_attention", **SHAPE, rswa_window=64)


def mamba(mamba_type: str = "MAMBA2", **changes: Any) -> Any:
    if HAS_VLLM:
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

        backend: Any = MambaAttentionBackendEnum[mamba_type]
    else:
        backend = Enum("MambaAttentionBackendEnum", ["MAMBA2", "SHORT_CONV"])[mamba_type]
    values = {"block_size": 16, "shapes": ((2, 3), (4,)), "dtypes": (torch.float32, torch.bfloat16)}
    values |= {"mamba_cache_mode": "align", "page_size_padded": PAGE_BYTES, "mamba_type": backend}
    return _spec("MambaSpec", "mamba", **values | changes)


def speculative(**changes: Any) -> Any:
    """vLLM's ``SpeculativeConfig`` in plain words."""
    draft = model_config(2)
    draft.model = "draft"
    draft.get_total_num_hidden_layers = lambda: 1
    values = {"method": "eagle", "parallel_drafting": False, "draft_model_config": draft, "drop": True, "modules": 1}
    config = stub("SpeculativeConfig", **values | changes)
    config.use_eagle_block_drop = lambda: config.drop
    config.use_multi_module_mtp = lambda: config.modules > 1
    return config
