# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines that must share the blocks of a store, and pairs that must not.

Marked ``vllm(elsewhere=True)``: in the lane with vLLM's own KV groups, elsewhere with plain objects (``configs.py``).
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engines.vllm.configs import (
    HFConfig,
    attention,
    chunked,
    know_plain_specs,
    kv_cache_config,
    mamba,
    registry,
    sliding,
    speculative,
    stub,
    vllm_config,
)
from tests.engines.vllm.counted import COUNTS, judged

from kvoffload.config import parse_config
from kvoffload.engines.vllm import adapters as adapters_module
from kvoffload.engines.vllm import identity
from kvoffload.engines.vllm.adapters import adapters_of
from kvoffload.engines.vllm.arguments import ALONE
from kvoffload.engines.vllm.layout import layout_of
from kvoffload.engines.vllm.rejections import check_engine
from kvoffload.errors import ConfigError
from kvoffload.tiering.spec import persistent_namespace

pytestmark = pytest.mark.vllm(elsewhere=True)

DISK = {"type": "disk", "path": "/blocks", "max_bytes": "1GiB"}
NAMED = {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [DISK], "weights_version": "one"}
UNNAMED = {name: value for name, value in NAMED.items() if name != "weights_version"}


PACKING, BUILD, PLATFORM = identity.cpu_packing, identity.cpu_build, identity.platform


@pytest.fixture(autouse=True)
def _plain_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    know_plain_specs(monkeypatch)
    for name in os.environ:
        if name.startswith("VLLM_") or name == "PYTHONHASHSEED":
            monkeypatch.delenv(name)
    monkeypatch.setattr(adapters_module, "Adapter", PlainAdapter)


class PlainAdapter(adapters_module.Adapter):
    """An adapter whose files were read at once."""

    def read(self) -> None:
        digest, name = getattr(self.request, "digest", self.request.content), self.request.content
        self._content = lambda: adapters_module._Content(digest, name)


@dataclass(frozen=True)
class Engine:
    """The differences from ``vllm_config()`` with one KV group."""

    changes: dict[str, Any] = field(default_factory=dict)
    caches: Callable[[], Any] = lambda: kv_cache_config(attention())
    extra: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    """A field of a newer vLLM: its name, and whether it has its default."""
    adapter: dict[str, Any] | None = None
    """The content of a LoRA adapter's files, and other attributes of vLLM's ``LoRARequest``."""

    def namespace(self) -> str:
        extra = NAMED | self.extra
        config = parse_config(extra)
        engine = vllm_config(kv_transfer_config__kv_connector_extra_config=extra | {ALONE: True}, **self.changes)
        for part, value in self.fields.items():
            setattr(engine, part, of_newer_vllm(getattr(engine, part), value))
        check_engine(engine)
        namespace = persistent_namespace(layout_of(engine, self.caches(), config), config.block_size or 1)
        if self.adapter is None:
            return namespace
        adapter = SimpleNamespace(lora_name="a", lora_path="/a", lora_int_id=1, load_inplace=False, **self.adapter)
        request = SimpleNamespace(request_id="1", lora_request=adapter, block_hashes=[b"0" * 32], mm_features=[])
        adapters = adapters_of(engine, config)
        own = adapters.of(request)
        assert not adapters.leaves_out(own)
        return f"{namespace} {own.block_hashes[0].hex()}"


def of_newer_vllm(part: Any, value: Any) -> Any:
    """Return the same part with a field that kvoffload does not know, whose default is 1."""
    kind = dataclasses.make_dataclass(
        type(part).__name__,
        [("invented", Any, dataclasses.field(default=1, kw_only=True))],
        bases=(type(part),),
        frozen=type(part).__dataclass_params__.frozen,
    )
    newer = kind.__new__(kind)
    for name, each in (vars(part) | {"invented": value}).items():
        object.__setattr__(newer, name, each)  # vLLM's specs are frozen
    return newer


def engine(**changes: Any) -> Engine:
    return Engine(changes)


def over(*specs: Callable[[], Any], extra: dict[str, Any] | None = None, **caches: Any) -> Engine:
    return Engine({}, lambda: kv_cache_config(*(spec() for spec in specs), **caches), extra or {})


def model(**hf: Any) -> Any:
    """Changes that give the model's configuration ``hf``; ``limit`` is the longest request."""
    limit = hf.pop("limit", None)
    return {
        "model_config__hf_config": HFConfig(**hf),
        "model_config__original_max_model_len": limit,
        "model_config__max_model_len": limit if limit and limit > 0 else 4096,
    }


def rope(kind: str, limit: int | None, **more: Any) -> Engine:
    return Engine(model(rope_parameters={"rope_type": kind, "rope_theta": 1e4, **more}, limit=limit))


def adapters(**changes: Any) -> Engine:
    return Engine({"lora_config": stub("LoRAConfig", **changes)}, extra={"adapters_never_change": True})


def with_adapter(content: str = "one", lora: dict[str, Any] | None = None, **more: Any) -> Engine:
    """Return an engine that serves an adapter without a promise."""
    return Engine({"lora_config": stub("LoRAConfig", **(lora or {}))}, adapter={"content": content, **more})


def drafter(**changes: Any) -> Engine:
    config = speculative()
    for name, value in changes.items():
        setattr(config.draft_model_config if name != "method" else config, name, value)
    return engine(speculative_config=config)


def ranks(number: int, kv_heads: int = 2) -> Engine:
    """Tensor parallel, in the layout that lets all numbers of ranks share."""
    changes: dict[str, Any] = {
        "parallel_config__tensor_parallel_size": number,
        "parallel_config__world_size": number,
        "parallel_config__distributed_executor_backend": "mp",
    }
    return Engine(changes, lambda: kv_cache_config(attention(num_kv_heads=kv_heads)))


def pipeline(stages: int) -> Engine:
    """Return an engine whose 12 layers are divided among ``stages``. Its scheduler sees the layers of the first one."""
    changes: dict[str, Any] = {
        "parallel_config__pipeline_parallel_size": stages,
        "parallel_config__world_size": stages,
        "parallel_config__distributed_executor_backend": "mp",
    }
    return Engine(changes, lambda: kv_cache_config(attention(), layers=12 // stages))


def tensors(*records: list[str]) -> Engine:
    """Return one group of four layers, with a tensor record for each set of equal layers."""

    def caches() -> Any:
        config = kv_cache_config(attention(), layers=4)
        (tensor,) = config.kv_cache_tensors
        config.kv_cache_tensors = [
            dataclasses.replace(tensor, layers=[f"group0.layer{n}" for n in record])
            if dataclasses.is_dataclass(tensor)
            else type(tensor)(size=tensor.size, layers=[f"group0.layer{n}" for n in record])
            for record in records
        ]
        return config

    return Engine({}, caches)


def two_groups(first: list[str], second: list[str]) -> Engine:
    def caches() -> Any:
        config = kv_cache_config(attention(), sliding(64))
        for group, names in zip(config.kv_cache_groups, (first, second), strict=True):
            group.layer_names = names
        return config

    return Engine({}, caches)


class Backend(Enum):
    FLASH = 1
    TRITON = 2


class Mode(Enum):
    FP8 = 1
    is_per_token_head = property(lambda self: False)


PLAIN = Engine()
PROMISE = {"adapters_never_change": True}
OTHER = SimpleNamespace(models={"Other": SimpleNamespace(module_name="other", class_name="Other")})
LLAMA_4 = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}
QUANTIZED = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}

APART: dict[str, tuple[Engine, Engine]] = {
    "model": (PLAIN, engine(model_config__model="other")),
    "revision": (PLAIN, engine(model_config__revision="v2")),
    "revision of the code": (PLAIN, engine(model_config__code_revision="v2")),
    "dtype": (PLAIN, engine(model_config__dtype="torch.bfloat16")),
    "dtype of torch": (engine(model_config__dtype=torch.float16), engine(model_config__dtype=torch.bfloat16)),
    "quantization": (PLAIN, engine(model_config__quantization="fp8")),
    "quantization's options": (PLAIN, engine(model_config__quantization_config={"linear": "fp8"})),
    "a field of the model": (PLAIN, Engine(model(theta=2.0))),
    "a nested field of the model": (
        Engine(model(vision_config={"depth": 2})),
        Engine(model(vision_config={"depth": 3})),
    ),
    "a field that the model lacks": (PLAIN, Engine(model(invented=1))),
    "quantization of the checkpoint": (PLAIN, Engine(model(quantization_config=QUANTIZED))),
    "text part of the model": (PLAIN, engine(model_config__hf_text_config=HFConfig(3.0, num_key_value_heads=2))),
    "window switched off": (PLAIN, engine(model_config__disable_sliding_window=True)),
    "implementation": (PLAIN, engine(model_config__model_impl="transformers")),
    "runner": (PLAIN, engine(model_config__runner="pooling")),
    "class of the model": (PLAIN, engine(model_config__model_class_overrides={"A": "m:B"})),
    "images processed otherwise": (
        engine(model_config__multimodal_config=stub("MultiModalConfig", mm_processor_kwargs={"size": 1})),
        engine(model_config__multimodal_config=stub("MultiModalConfig", mm_processor_kwargs={"size": 2})),
    ),
    "tokens of videos left out": (
        engine(model_config__multimodal_config=stub("MultiModalConfig", video_pruning_rate=0.5)),
        engine(model_config__multimodal_config=stub("MultiModalConfig")),
    ),
    "KV dtype": (PLAIN, engine(cache_config__cache_dtype="fp8")),
    "two formats of 8 bits": (
        engine(cache_config__cache_dtype="fp8_e4m3"),
        engine(cache_config__cache_dtype="fp8_e5m2"),
    ),
    "skipped layers": (
        engine(cache_config__kv_cache_dtype_skip_layers=["0"]),
        engine(cache_config__kv_cache_dtype_skip_layers=["1"]),
    ),
    "dtype of states as an option": (PLAIN, engine(cache_config__mamba_ssm_cache_dtype="float32")),
    "prefill that skips layers": (PLAIN, engine(cache_config__kv_sharing_fast_prefill=True)),
    "worker of a plug-in": (PLAIN, engine(parallel_config__worker_extension_cls="mine.Worker")),
    "platform": (PLAIN, engine(device_config__device_type="cuda")),
    "files left out": (PLAIN, engine(load_config__ignore_patterns=["*.bin"])),
    "made-up weights": (PLAIN, engine(load_config__load_format="dummy")),
    "attention backend": (
        engine(attention_config__backend=Backend.FLASH),
        engine(attention_config__backend=Backend.TRITON),
    ),
    "attention backend of a kind": (PLAIN, engine(attention_config__backend_per_kind={"mla": Backend.FLASH})),
    "flash attention, of which version 3 has queries of 8 bits": (
        PLAIN,
        engine(attention_config__flash_attn_version=2),
    ),
    "queries of TensorRT-LLM": (PLAIN, engine(attention_config__use_trtllm_attention=False)),
    "prefill of latent attention": (PLAIN, engine(attention_config__mla_prefill_backend=Backend.FLASH)),
    "values packed by a fused kernel": (
        engine(compilation_config__pass_config=stub("PassConfig", fuse_qk_norm_rope_kvcache=True)),
        engine(compilation_config__pass_config=stub("PassConfig", fuse_qk_norm_rope_kvcache=False)),
    ),
    "dtype of an indexer": (PLAIN, engine(attention_config__indexer_kv_dtype="fp8")),
    "random rounding of states": (PLAIN, engine(mamba_config__enable_stochastic_rounding=True)),
    "backend of experts": (PLAIN, engine(kernel_config__moe_backend="emulation")),
    "backend of linear layers": (PLAIN, engine(kernel_config__linear_backend="emulation")),
    "backend of a quantization": (PLAIN, engine(kernel_config__linear_backend_per_quant={"mxfp4": "emulation"})),
    "precision between experts": (PLAIN, engine(parallel_config__all2all_backend="deepep_low_latency")),
    "class of a plug-in": (PLAIN, engine(model_config__registry=registry("plugin"))),
    "class that is imported": (
        engine(model_config__registry=SimpleNamespace(models={"SmallForCausalLM": SimpleNamespace(model_cls=Backend)})),
        engine(model_config__registry=SimpleNamespace(models={"SmallForCausalLM": SimpleNamespace(model_cls=Mode)})),
    ),
    "architecture": (PLAIN, engine(model_config__architecture="Other", model_config__registry=OTHER)),
    "passes of a compiler": (PLAIN, engine(compilation_config__inductor_passes={"post": "mine.pass"})),
    "a platform's options": (PLAIN, engine(additional_config={"graph": {"enabled": True}})),
    "encodings from elsewhere": (
        PLAIN,
        engine(ec_transfer_config=stub("ECTransferConfig", ec_connector="Mine")),
    ),
    "content of an adapter": (with_adapter(), with_adapter("other")),
    "an adapter and none": (engine(lora_config=stub("LoRAConfig")), with_adapter()),
    "an adapter with a promise and one without": (replace(with_adapter(), extra=PROMISE), with_adapter()),
    "dtype of a hashed adapter": (with_adapter(), with_adapter(lora={"lora_dtype": "float32"})),
    "modules with hashed adapters": (with_adapter(), with_adapter(lora={"target_modules": ["q_proj"]})),
    "experts of an adapter": (with_adapter(), with_adapter(is_3d_lora_weight=True)),
    "dtype of adapters": (adapters(lora_dtype="float16"), adapters(lora_dtype="float32")),
    "modules with adapters": (adapters(), adapters(target_modules=["q_proj"])),
    "a drafter": (PLAIN, drafter()),
    "method of drafting": (drafter(), drafter(method="eagle3")),
    "model of the drafter": (drafter(), drafter(model="other")),
    "revision of the drafter": (drafter(), drafter(revision="v2")),
    "a field of the drafter": (drafter(), drafter(hf_config=HFConfig(2.0))),
    "class of the drafter": (drafter(), drafter(registry=registry("plugin"))),
    "backend of the drafter's experts": (
        drafter(),
        engine(speculative_config=speculative(moe_backend="emulation")),
    ),
    "quantization of the drafter": (drafter(), drafter(quantization="fp8")),
    "a number of layers": (PLAIN, over(attention, layers=4)),
    "a second group": (PLAIN, over(attention, lambda: sliding(64))),
    "order of groups": (over(attention, lambda: sliding(64)), over(lambda: sliding(64), attention)),
    "size of a window": (over(lambda: sliding(64)), over(lambda: sliding(128))),
    "dtype of a layer": (PLAIN, over(lambda: attention(dtype=torch.float16))),
    "size of heads": (PLAIN, over(lambda: attention(head_size=16))),
    "tokens of a block": (PLAIN, over(lambda: attention(block_size=32))),
    "quantization of a layer": (PLAIN, over(lambda: attention(kv_quant_mode=Mode.FP8))),
    "which layers are alike": (tensors(["1", "2", "3"], ["0"]), tensors(["0", "2", "3"], ["1"])),
    "order of layers": (tensors(["0", "1", "2", "3"]), tensors(["1", "0", "2", "3"])),
    "layers of two groups exchanged": (
        two_groups(["a", "b", "c"], ["d", "e", "f"]),
        two_groups(["a", "b", "d"], ["c", "e", "f"]),
    ),
    "dtypes of states": (
        over(attention, mamba),
        over(attention, lambda: mamba(dtypes=(torch.float32, torch.float32))),
    ),
    "shapes of states": (over(attention, mamba), over(attention, lambda: mamba(shapes=((3, 2), (4,))))),
    "layout": (PLAIN, over(attention, kv_cache_layout="BLHNC")),
    "tokens of an offloaded block": (PLAIN, Engine(extra={"block_size": 32})),
    "stages": (PLAIN, pipeline(2)),
    "other stages": (pipeline(2), pipeline(3)),
    "stages of unequal size": (pipeline(5), pipeline(4)),
    "stages and ranks": (pipeline(2), ranks(2, kv_heads=1)),
    "chunks": (over(attention, chunked), over(attention, lambda: chunked(32))),
    "chunks and windows of one size": (over(attention, chunked), over(attention, lambda: sliding(64))),
    "chunks and full attention": (over(attention, chunked), over(attention, attention)),
    "heads of chunks": (over(attention, chunked), over(attention, lambda: chunked(num_kv_heads=1))),
    "context": (
        over(attention, kv_cache_layout="BLNHC"),
        Engine(
            {"parallel_config__cp_kv_cache_interleave_size": 2},
            lambda: kv_cache_config(attention(), kv_cache_layout="BLNHC"),
        ),
    ),
    "ranks with too few heads": (ranks(1), ranks(4, kv_heads=2)),
    "hash": (PLAIN, engine(cache_config__prefix_caching_hash_algo="sha256_cbor")),
    "LongRoPE at two limits": (rope("longrope", 1024), rope("longrope", 4096)),
    "LongRoPE at its own limit": (rope("longrope", None), rope("longrope", 4096)),
    "LongRoPE that vLLM fits to memory": (rope("longrope", -1), rope("longrope", 4096)),
    "LongRoPE by its old name": (
        Engine(model(rope_scaling={"type": "su"}, limit=1024)),
        Engine(model(rope_scaling={"type": "su"}, limit=4096)),
    ),
    "LongRoPE's own length": (
        rope("longrope", 1024, original_max_position_embeddings=512),
        rope("longrope", 1024, original_max_position_embeddings=2048),
    ),
    "LongRoPE of some layers": tuple(
        Engine(
            model(
                rope_parameters={
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "longrope"},
                },
                limit=limit,
            )
        )
        for limit in (1024, 4096)
    ),
    "LongRoPE of the text part": tuple(
        Engine(model(text_config={"rope_parameters": {"rope_type": "longrope"}}, limit=limit)) for limit in (1024, 4096)
    ),
    "LongRoPE of a drafter": tuple(
        drafter(hf_config=HFConfig(rope_parameters={"rope_type": "longrope"}), original_max_model_len=limit)
        for limit in (1024, 4096)
    ),
    "LongRoPE of a drafter that the target bounds": tuple(
        Engine(model(limit=limit) | drafter(hf_config=HFConfig(rope_parameters={"rope_type": "longrope"})).changes)
        for limit in (1024, 4096)
    ),
    "LongRoPE at the limit of a tokenizer": tuple(
        Engine(rope("longrope", None).changes | {"model_config__get_and_verify_max_len": lambda asked, own=own: own})
        for own in (512, 4096)
    ),
    "LongRoPE fitted below the limit of a tokenizer": tuple(
        Engine(rope("longrope", -1).changes | {"model_config__get_and_verify_max_len": lambda asked, own=own: own})
        for own in (512, 4096)
    ),
    **{
        f"LongRoPE {where}": (Engine(model(**config, limit=1024)), Engine(model(**config, limit=4096)))
        for where, config in {
            "in a list": {"rope_parameters": [{"rope_type": "default"}, {"rope_type": "longrope"}]},
            "under another name": {"global_rope_scaling": {"type": "longrope"}},
            "of the whole model": {"rope_type": "longrope"},
            "deeper inside": {"rope_parameters": {"layers": {"full": {"type": "longrope"}}}},
        }.items()
    },
    "a rope that grows": (rope("dynamic", 1024), rope("dynamic", 4096)),
    "a rope that nobody knows": (rope("invented", 1024), rope("invented", 4096)),
    "factor of a rope": (rope("linear", 1024, factor=2.0), rope("linear", 1024, factor=4.0)),
    "Llama 4 at two limits": (Engine(model(**LLAMA_4, limit=8192)), Engine(model(**LLAMA_4, limit=65536))),
    "Llama 4 tuned otherwise": (
        Engine(model(**LLAMA_4)),
        Engine(model(**LLAMA_4) | {"model_config__override_generation_config": {"attn_temperature_tuning": True}}),
    ),
    "an option of a newer vLLM": (PLAIN, Engine(fields={"cache_config": 2})),
    "an option of a newer vLLM's layers": (
        PLAIN,
        over(lambda: of_newer_vllm(attention(), 2)),
    ),
    "two values of a newer vLLM's option": (
        Engine(fields={"attention_config": 2}),
        Engine(fields={"attention_config": 3}),
    ),
    "a part of a newer vLLM": (PLAIN, engine(mamba_config=of_newer_vllm(stub("MambaConfig"), Backend.FLASH))),
}

SHARED: dict[str, tuple[Engine, Engine]] = {
    "another process": (PLAIN, engine(kv_transfer_config__engine_id="another")),
    "memory of the GPU": (PLAIN, engine(cache_config__gpu_memory_utilization=0.5)),
    "number of blocks": (PLAIN, over(attention, num_blocks=20)),
    "host memory": (PLAIN, Engine(extra={"cpu_bytes_to_use": "2MiB"})),
    "size of the disk": (PLAIN, Engine(extra={"secondary_tiers": [DISK | {"max_bytes": "2GiB"}]})),
    "no graphs": (PLAIN, engine(model_config__enforce_eager=True)),
    "graphs of other sizes": (PLAIN, engine(compilation_config__cudagraph_capture_sizes=[1, 2])),
    "what compiling found": (PLAIN, engine(compilation_config__static_forward_context={"layer": object()})),
    "name of the model": (PLAIN, engine(model_config__served_model_name="mine")),
    "tokenizer": (PLAIN, engine(model_config__tokenizer="other")),
    "seed": (PLAIN, engine(model_config__seed=7)),
    "log probabilities": (PLAIN, engine(model_config__max_logprobs=5)),
    "sampling": (PLAIN, engine(model_config__override_generation_config={"temperature": 0.5})),
    "version of transformers": (PLAIN, Engine(model(transformers_version="5.24.0"))),
    "version of transformers in a part": (
        Engine(model(text_config={"transformers_version": "5.19.0"})),
        Engine(model(text_config={"transformers_version": "5.24.0"})),
    ),
    "where the configuration lay": (PLAIN, Engine(model(_name_or_path="/elsewhere"))),
    "order of fields": (Engine(model(a={"x": 1, "y": 2})), Engine(model(a={"y": 2, "x": 1}))),
    "how the configuration was changed": (PLAIN, engine(model_config__hf_overrides={"rope_theta": 1.0})),
    "a limit": (rope("default", 1024), rope("default", 4096)),
    "a limit with YaRN": (rope("yarn", 1024), rope("yarn", 4096)),
    "a limit with Llama's rope": (rope("llama3", 1024), rope("llama3", 4096)),
    "a limit without a rope": (Engine(model(limit=1024)), Engine(model(limit=4096))),
    "LongRoPE at one limit": (rope("longrope", 4096), rope("longrope", 4096)),
    "LongRoPE in less memory": (
        Engine(rope("longrope", -1).changes | {"model_config__max_model_len": 3000}),
        Engine(rope("longrope", -1).changes | {"model_config__max_model_len": 2000}),
    ),
    "rewritten dtype": (engine(cache_config__cache_dtype="fp8"), engine(cache_config__cache_dtype="fp8_ds_mla")),
    "several processes": (PLAIN, engine(parallel_config__distributed_executor_backend="mp")),
    "ranks": (ranks(1), ranks(2, kv_heads=1)),
    "more ranks than heads": (ranks(2, kv_heads=1), ranks(4, kv_heads=1)),
    "replicas of the engine": (PLAIN, engine(parallel_config__data_parallel_size=4)),
    "experts in parallel": (PLAIN, engine(parallel_config__enable_expert_parallel=True)),
    "ports": (PLAIN, engine(parallel_config__master_port=1234)),
    "where a library is": (PLAIN, engine(load_config__download_dir="/elsewhere")),
    "threads that load": (PLAIN, engine(load_config__safetensors_prefetch_num_threads=1)),
    "batches": (PLAIN, engine(scheduler_config__async_scheduling=True)),
    "kernels": (PLAIN, engine(kernel_config__enable_jit_warmup=True)),
    "logs": (PLAIN, engine(observability_config__kv_cache_metrics=True)),
    "adapters that are left out": (PLAIN, engine(lora_config=stub("LoRAConfig", lora_dtype="float16"))),
    "adapters that lie elsewhere": (adapters(), adapters(max_cpu_loras=7)),
    "copies of an adapter": (with_adapter(digest="1"), with_adapter(digest="2")),
    "memory for hashed adapters": (with_adapter(), with_adapter(lora={"max_cpu_loras": 7})),
    "drafts from the prompt": (PLAIN, engine(speculative_config=speculative(method="ngram"))),
    "number of drafts": (
        drafter(),
        engine(speculative_config=speculative(num_speculative_tokens=7)),
    ),
    "size of the cache of images": (
        engine(model_config__multimodal_config=stub("MultiModalConfig", mm_processor_cache_gb=1)),
        engine(model_config__multimodal_config=stub("MultiModalConfig", mm_processor_cache_gb=2)),
    ),
    "how long windows are kept": (
        over(lambda: sliding(64, extra_retained_tokens=0)),
        over(lambda: sliding(64, extra_retained_tokens=0)),
    ),
    "stages alike": (pipeline(3), pipeline(3)),
    "stages of several engines": (
        pipeline(2),
        Engine(pipeline(2).changes | {"parallel_config__data_parallel_size": 4}, pipeline(2).caches),
    ),
    "chunks alike": (over(attention, chunked), over(attention, lambda: chunked(64))),
    "padding of states": (over(attention, mamba), over(attention, lambda: mamba(page_size_padded=9216))),
    "an option of a newer vLLM at its default": (PLAIN, Engine(fields={"cache_config": 1})),
    "an option of a newer vLLM that is set alike": (
        Engine(fields={"cache_config": {"a": {3, 1, 2}}}),
        Engine(fields={"cache_config": {"a": {2, 3, 1}}}),
    ),
}


def test_there_are_sixty_pairs() -> None:
    assert len(APART) + len(SHARED) >= 60


@pytest.mark.vllm
def test_pipelines_cut_at_other_layers_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for partition in ("5,7", "7,5", "5,7"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        num_layers = int(partition[0])
        cut = Engine(pipeline(2).changes, lambda num_layers=num_layers: kv_cache_config(attention(), layers=num_layers))
        names.append(cut.namespace())
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("pair", APART.values(), ids=APART)
def test_engines_whose_blocks_differ_are_apart(pair: tuple[Engine, Engine]) -> None:
    one, other = pair
    assert one.namespace() != other.namespace()


@pytest.mark.parametrize("pair", SHARED.values(), ids=SHARED)
def test_engines_whose_blocks_are_the_same_share(pair: tuple[Engine, Engine]) -> None:
    one, other = pair
    assert one.namespace() == other.namespace()


PARTS = {
    "ModelConfig": "model_config",
    "CacheConfig": "cache_config",
    "ParallelConfig": "parallel_config",
    "DeviceConfig": "device_config",
    "LoadConfig": "load_config",
    "AttentionConfig": "attention_config",
    "MambaConfig": "mamba_config",
    "CompilationConfig": "compilation_config",
    "KernelConfig": "kernel_config",
}


@pytest.mark.parametrize("kind", PARTS)
def test_each_field_does_what_the_table_says(kind: str) -> None:
    """Except for fields that, according to the table, are handled by code."""
    identity = layout_of(vllm_config(), kv_cache_config(attention()), parse_config(NAMED)).identity
    for reason, names in judged(kind).items():
        for name in names.split():
            if "(" in reason or name in ("model", "dtype", "hf_config", "hf_text_config", "multimodal_config"):
                continue
            changed = vllm_config(**{f"{PARTS[kind]}__{name}": "changed"})
            other = layout_of(changed, kv_cache_config(attention()), parse_config(NAMED)).identity
            assert (other != identity) is (reason == COUNTS), name


# ------------------------------------------------------------------------------------------- hosts and environment


def test_hosts_that_pack_keys_otherwise_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {}
    for isa in ("amx", "vec"):
        monkeypatch.setattr(identity, "cpu_packing", lambda vllm_config, spec, isa=isa: isa)
        names[isa] = PLAIN.namespace(), engine(device_config__device_type="cuda").namespace()
    assert names["amx"][0] != names["vec"][0]
    assert names["amx"][1] == names["vec"][1], "GPUs pack keys alike"


def test_gpus_of_other_makers_and_generations_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls all of them ``cuda``. On MI300, ``fp8`` has another bias than on MI350 and NVIDIA's."""
    monkeypatch.setattr(identity, "platform", PLATFORM)
    gpu = {"device_config__device_type": "cuda"}
    quantized, plain = engine(**gpu, cache_config__cache_dtype="fp8"), engine(**gpu)
    platforms = ModuleType("vllm.platforms")
    for module in (ModuleType("vllm"), platforms):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def namespace(
        name: str,
        generation: tuple[int, int] | None,
        dtype: torch.dtype = torch.float8_e4m3fn,
        engine: Engine = quantized,
    ) -> str:
        facts = {"get_device_capability": lambda: generation, "fp8_dtype": lambda: dtype}
        platforms.current_platform = SimpleNamespace(device_name=name, **facts)  # type: ignore[attr-defined]
        return engine.namespace()

    devices: list[Any] = [
        *(("cuda", (8, 0)), ("cuda", (9, 0)), ("rocm", (9, 5)), ("rocm", (9, 4), torch.float8_e4m3fnuz)),
        *(("rocm", (9, 4)), ("xpu", None)),
    ]
    assert len({namespace(*device) for device in devices * 2}) == len(devices)
    # Without quantization NVIDIA's generations differ in rounding alone. AMD's may pack keys in another order.
    assert namespace("cuda", (8, 0), engine=plain) == namespace("cuda", (9, 0), engine=plain)
    assert namespace("rocm", (9, 4), engine=plain) != namespace("rocm", (9, 5), engine=plain)
    assert namespace("cuda", (8, 0), engine=plain) != namespace("xpu", None, engine=plain)
    with pytest.raises(ConfigError, match=r"'disk'.*platform is not known.*generation.*leave out"):
        namespace("cuda", None)
    platforms.current_platform = SimpleNamespace(device_name="of others")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"'disk'.*platform is not known.*leave out"):
        quantized.namespace()


def test_kernels_choose_the_precision_of_quantized_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs. With FlashInfer, MXFP4 has activations of eight bits on a B200, and without it of sixteen."""
    gpu = {"device_config__device_type": "cuda"}
    quantized, of_fp8 = {"model_config__quantization": "mxfp4"}, {"cache_config__cache_dtype": "fp8"}
    engines = PLAIN, engine(**gpu), engine(**quantized), engine(**gpu | quantized), engine(**gpu, **of_fp8)
    names = []
    for kernels in ("with", "without"):
        monkeypatch.setattr(identity, "kernels", lambda kernels=kernels: kernels)
        names.append([each.namespace() for each in engines])
    assert [one == other for one, other in zip(*names, strict=True)] == [True, True, True, False, False]


def test_versions_of_vllm_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also matters on GPUs: with the same options, a release may store a model's keys in another order."""
    gpu = engine(device_config__device_type="cuda")
    names = []
    for version in ("0.33.0", "0.32.0", "0.32.1", "0.32.0"):
        monkeypatch.setattr(identity, "installed_version", lambda version=version: version)
        names.append(gpu.namespace())
    assert names[1] == names[3]
    assert len(set(names)) == 3


def test_models_that_transformers_computes_are_apart_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are media that it prepares, where a tier may have any."""
    computed = engine(model_config__registry=registry("vllm.model_executor.models.transformers"))
    media = {"model_config__multimodal_config": stub("MultiModalConfig")}
    engines = PLAIN, Engine(media), computed, Engine(media, extra={"media_never_change": True})
    names = []
    for version in ("5.19.0", "5.20.0"):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        names.append([each.namespace() for each in engines])
    assert [one == other for one, other in zip(*names, strict=True)] == [True, True, False, False]


def test_builds_of_compiled_attention_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "cpu_build", BUILD)
    vllm = ModuleType("vllm")
    vllm.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    names = []
    for content in (b"one", b"two"):
        (tmp_path / "_C.abi3.so").write_bytes(content * 5000)
        names.append((PLAIN.namespace(), engine(device_config__device_type="cuda").namespace()))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "another host")
    names.append((PLAIN.namespace(), names[0][1]))
    assert len({name for name, _ in names}) == 3
    assert len({name for _, name in names}) == 1
    (tmp_path / "_C.abi3.so").unlink()
    with pytest.raises(ConfigError, match=r"'disk'.*build for this CPU is not known.*leave out"):
        PLAIN.namespace()


def test_a_cpu_whose_packing_is_not_known_is_refused_where_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    know_plain_specs(monkeypatch)
    monkeypatch.setattr(identity, "cpu_packing", PACKING)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.cpu_attn", ModuleType("without the function"))
    with pytest.raises(ConfigError, match=r"'disk'.*pack keys on this CPU is not known.*leave out"):
        PLAIN.namespace()
    layout_of(vllm_config(), kv_cache_config(attention()), parse_config({"cpu_bytes_to_use": "1MiB"}))


@pytest.mark.vllm
def test_vllm_is_asked_how_this_cpu_packs_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import cpu_attn

    spec, config = attention(block_size=32, head_size=64), vllm_config(model_config__dtype=torch.bfloat16)
    assert PACKING(config, spec) == cpu_attn._get_attn_isa(torch.bfloat16, 32, 64, "auto")
    for supported, isa in ((True, "amx"), (False, "vec")):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda supported=supported: supported)
        if platform.machine() == "x86_64":
            assert PACKING(config, spec) == isa


@pytest.mark.vllm
def test_vllm_is_asked_for_the_class_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    changes = {"model_config__registry": ModelRegistry, "model_config__architecture": "LlamaForCausalLM"}
    of_vllm = engine(**changes).namespace()
    assert of_vllm == engine(**changes).namespace()
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("LlamaForCausalLM", "plugin.models:Llama")
    assert engine(**changes).namespace() != of_vllm


def test_a_class_that_is_not_known_is_refused_where_others_read() -> None:
    with pytest.raises(ConfigError, match=r"'disk'.*class of 'small' is not known.*leave out"):
        engine(model_config__architecture="Unregistered").namespace()


def test_variables_that_count_keep_engines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PLAIN.namespace()
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert PLAIN.namespace() == plain
    found = {plain}
    for value in ("fp8", "int8"):
        monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", value)
        found.add(PLAIN.namespace())
    assert len(found) == 3


def test_plug_ins_keep_engines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PLAIN.namespace()
    monkeypatch.setattr(identity, "plugins", lambda: "another")
    assert PLAIN.namespace() != plain


# ------------------------------------------------------------------------------------------------------ media


def test_media_that_vllm_numbers_are_refused_where_others_would_find_them() -> None:
    """vLLM hashes them only for its own caches, and each server starts to count from the beginning."""
    media = {"model_config__multimodal_config": stub("MultiModalConfig", mm_processor_cache_gb=0)}
    numbered, promise = media | {"cache_config__enable_prefix_caching": False}, {"media_never_change": True}
    Engine(media, extra=promise).namespace()
    Engine(numbered).namespace()
    alone = {"cpu_bytes_to_use": "1MiB"} | promise
    check_engine(vllm_config(**numbered, kv_transfer_config__kv_connector_extra_config=alone))
    with pytest.raises(
        ConfigError, match=r"'disk'.*numbers media.*leave out one of these options, or media_never_change"
    ):
        Engine(numbered, extra=promise).namespace()


@pytest.mark.vllm
def test_embeddings_are_left_out_where_blocks_outlive_the_process_and_their_bytes_say_too_little() -> None:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    from kvoffload.engines.vllm.connector import _left_out

    def asked(embeddings: torch.Tensor | None, mask: list[bool] | None = None) -> Any:
        nothing = {"mm_features": [], "lora_request": None, "cache_salt": None, "_prompt_embeds_per_block_hashes": {}}
        values = {"resumable": False, "prompt_embeds": embeddings, "prompt_is_token_ids": mask}
        return SimpleNamespace(**nothing, **values)

    embeddings = torch.ones(4, 8, dtype=torch.bfloat16)
    one, other = asked(embeddings), asked(embeddings.view(torch.float16))
    keys = [generate_block_hash_extra_keys(request, 0, 4, 0)[0] for request in (one, other)]
    assert keys[0] == keys[1]
    requests = asked(None), one, other, asked(embeddings, [True, False, False, False])
    model = SimpleNamespace(enable_prompt_embeds=True, dtype=torch.bfloat16)
    is_left_out = _left_out(model, parse_config(NAMED))
    assert is_left_out is not None
    assert [*map(is_left_out, requests)] == [False, False, True, True]
    assert _left_out(model, parse_config({"cpu_bytes_to_use": "1MiB"})) is None


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin", "of a newer vLLM"])
def test_hashes_that_can_collide_are_refused_where_others_read(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for extra in ({"cpu_bytes_to_use": "1MiB"}, {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [{"type": "memory"}]}):
        check_engine(
            vllm_config(
                cache_config__prefix_caching_hash_algo=algorithm, kv_transfer_config__kv_connector_extra_config=extra
            )
        )
    with pytest.raises(ConfigError, match=rf"'{algorithm}'.* --prefix-caching-hash-algo to one of sha256"):
        engine(cache_config__prefix_caching_hash_algo=algorithm).namespace()


def test_scales_that_a_process_measures_are_refused_where_blocks_outlive_it() -> None:
    change = {"model_config__multimodal_config": stub("MultiModalConfig", mm_encoder_attn_dtype="fp8")}
    check_engine(vllm_config(**change))
    with pytest.raises(ConfigError, match="scales that a process measures"):
        engine(**change).namespace()


class Unlike:
    """Two of these cannot be told apart in another process."""


def test_a_value_without_a_text_is_refused_where_blocks_outlive_the_process() -> None:
    for part in ("cache_config", "attention_config"):
        with pytest.raises(ConfigError, match=rf"'disk'.*{part} has a value of type Unlike.*leave out the option"):
            Engine(fields={part: Unlike()}).namespace()
    with pytest.raises(ConfigError, match=r"'disk'.*invented has a value of type Unlike"):
        over(lambda: of_newer_vllm(attention(), Unlike())).namespace()
    alone = {"cpu_bytes_to_use": "1MiB"}
    config = vllm_config(additional_config={"hook": Unlike()})
    odd = kv_cache_config(of_newer_vllm(attention(), Unlike()))
    layout_of(vllm_config(), odd, parse_config(alone))
    identities = [layout_of(config, kv_cache_config(attention()), parse_config(alone)).identity for _ in range(2)]
    assert identities[0] != identities[1], "nothing finds such blocks"
