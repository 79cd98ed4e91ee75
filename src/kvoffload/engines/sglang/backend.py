# SPDX-License-Identifier: Apache-2.0
"""The class that SGLang loads. It implements SGLang's storage interface with ``PoolStorage``. This module imports
SGLang."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_context, get_server_args, get_serving

from kvoffload.engines.sglang.hits import restorable_pages
from kvoffload.engines.sglang.identity import (
    architecture_of,
    environment_of,
    ranks_of,
    server_facts,
    weights_of,
    without_paths,
)
from kvoffload.engines.sglang.options import SGLangOptions, parse_options
from kvoffload.engines.sglang.rejections import MEDIA, NUMBER_FORMAT
from kvoffload.engines.sglang.storage import PoolStorage, pages_of
from kvoffload.engines.sglang.tiers import Page
from kvoffload.engines.sglang.updates import SERVED, watch_from_the_start
from kvoffload.engines.sglang.versions import sglang_version, untried_version
from kvoffload.engines.weights import Files, in_background
from kvoffload.errors import ConfigError
from kvoffload.exporter import PrometheusExporter
from kvoffload.logs import RateLimitedLog
from kvoffload.metrics import add_stats

logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)

_KV = PoolName.KV.value


class _Named(NamedTuple):
    """The weights whose pages are stored and found."""

    num_changes: int
    """The number of weight changes in this process until then; -1: the weights have no name."""
    version: str
    salt: bytes


class KVOffloadStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types for others
    """SGLang's HiCache storage on kvoffload's tiers. SGLang creates one per rank, and calls it from three of its
    threads: one asks, one reads, and one writes. Mistakes in the options raise ``ConfigError`` at the start. Later
    calls never raise."""

    _is_first: ClassVar[bool] = True

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        self._config = storage_config
        if (untried := untried_version()) is not None:
            logger.warning(
                "%s. kvoffload starts with it, because it has all functions that kvoffload uses. But its answers were "
                "never compared, and some settings may have another meaning.",
                untried,
            )
        extra = storage_config.extra_config or {}
        self._options = parse_options(extra)
        # This uses the given argument, not the current value, because SGLang changes it when it attaches a storage
        # later.
        is_start = KVOffloadStorage._is_first and get_server_args().hicache_storage_backend is not None
        watch_from_the_start(is_start)
        self._ranks = ranks_of(storage_config)
        version = get_serving().weight_version
        self._model = _model_facts(self._options, version) | {
            "name": storage_config.model_name,
            "pages": bool(extra.get("interface_v1", 0)),
        }
        weights = self._model.pop("weights", {})
        if weights and "version" not in weights:
            self._model = without_paths(self._model) | {"name": self._model["class"]}
            self._ranks = without_paths(self._ranks)
        self._weights_name = str if not weights else in_background(lambda: _name_of(weights))
        self._named = _Named(SERVED.num_changes, version, SERVED.salt)
        if (reason := SERVED.why_not_named_by(version)) is not None:
            logger.warning(reason)
            self._named = _Named(-1, version, b"")
        KVOffloadStorage._is_first = False
        self._pools: dict[str, PoolStorage] = {}
        self._publishing = threading.Lock()
        self._stop_metrics: Callable[[], None] | None = None
        self._exporter: PrometheusExporter | None = None
        if self._options.metrics_port is not None:
            rank = _number_of(storage_config)
            names = [tier.label for tier in self._options.tiers]
            self._exporter = PrometheusExporter(names, {"rank": str(rank)})
            try:
                self._stop_metrics = self._exporter.serve(self._options.metrics_port + rank)
            except ConfigError as exc:  # ranks of plain data parallelism do not know their numbers
                logger.warning("%s This process serves no metrics.", exc)

    def __repr__(self) -> str:
        return f"KVOffloadStorage({list(self._pools.values())!r})"

    # -------------------------------------------------------------------------------------------------------- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._open(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._open(str(host_pool_name), host_pool)

    def _open(self, name: str, host_pool: Any) -> None:
        known = self._pools.get(name)
        if known is not None and known.host_pool is host_pool:
            return
        if known is not None:
            known.close()
        self._pools[name] = pool = PoolStorage(
            name,
            host_pool,
            torch.arange(host_pool.page_size),
            self._options,
            model=self._model,
            ranks=self._ranks,
            salt=self._salt,
        )
        logger.info(
            "kvoffload: pages of SGLang's pool %r, %d bytes each, in namespace %s: %s",
            name,
            pool.page_bytes,
            pool.namespace,
            "; ".join(f"tier {tier.label!r}, {tier.quota}" for tier in self._options.tiers),
        )

    # ------------------------------------------------------------------------------------------- pages of the KV pool

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._move(PoolStorage.load, _KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._move(PoolStorage.store, _KV, keys, host_indices)

    # ------------------------------------------------------------------------------------------- pages of all pools

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        kv_pages = sum(self._pools[_KV].present(keys))
        hits = {_KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of the same pages, which never limits the hit
            trailing = None
            if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                trailing = max(1, len(transfer.keys or ()))
            pool = self._pools.get(str(transfer.name))
            found = pool.present(keys[:kv_pages], leading=trailing is None) if pool else []
            ends = restorable_pages(found, kv_pages, trailing)
            if ends:
                hits[transfer.name] = max(ends)
            restorable = [end for end in restorable if end in ends]
        self._publish()
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._transfer(PoolStorage.load, each) for each in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._transfer(PoolStorage.store, each) for each in transfers}

    # ---------------------------------------------------------------------- pages as tensors, without "interface_v1"

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        loaded = self._pools[_KV].load(keys, lambda: _pages_at(target_locations))
        self._publish()
        return [target if is_loaded else None for target, is_loaded in zip(target_locations, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        tensors = [value.contiguous() for value in values]
        stored = self._pools[_KV].store(keys, lambda: _pages_at(tensors))
        self._publish()
        return all(stored)

    # ---------------------------------------------------------------------------------------------------- the rest

    def clear(self) -> None:
        """Hide all earlier pages from this process, and all of its later pages from other processes. Tiers evict the
        old pages over time. SGLang's operator calls it after loading new weights."""
        SERVED.clear()
        self._named = _Named(SERVED.num_changes, get_serving().weight_version, SERVED.salt)

    def _salt(self) -> bytes | None:
        """Return a part of all keys. Returns ``None`` while the weights have no name, and after they changed, because
        SGLang may still have pages of the old weights and does not identify them."""
        named, version = self._named, get_serving().weight_version  # together, because another thread may clear
        if named.version == version and named.num_changes == SERVED.num_changes:
            if (weights_name := self._weights_name()) is None:
                return None
            if SERVED.is_flushed:
                return named.salt + weights_name.encode()
            _log.warning(
                "SGLang may still have pages of the weights before its update, and would store them again. "
                "kvoffload finds and stores nothing until you send POST /flush_cache."
            )
            return None
        _log.warning(
            f"SGLang's weights (version {version!r}) have changed since its storage was attached or cleared. kvoffload "
            "finds and stores nothing until you clear the storage, or attach it again after an update with a new "
            "weight_version."
        )
        return None

    def close(self) -> None:
        """End the tiers. SGLang calls it when the backend is detached."""
        for pool in self._pools.values():
            pool.close()
        if self._stop_metrics is not None:
            self._stop_metrics()
            self._stop_metrics = None

    def _transfer(self, call: Callable[..., list[bool]], transfer: Any) -> list[bool]:
        return self._move(call, str(transfer.name), transfer.keys or [], transfer.host_indices)

    def _move(self, call: Callable[..., list[bool]], name: str, keys: list[str], host_indices: Any) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or not keys:
            return [False] * len(keys)
        moved = call(pool, keys, lambda: pages_of(pool.host_pool, host_indices, len(keys)))
        self._publish()
        return moved

    def _publish(self) -> None:
        if self._exporter is not None:
            with self._publishing:  # otherwise the older of two threads' figures might be published last
                self._exporter.publish(add_stats(pool.stats() for pool in [*self._pools.values()]))


def _pages_at(tensors: Sequence[torch.Tensor]) -> list[Page]:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("a tensor to read into is not contiguous")
    return [[(tensor.data_ptr(), tensor.nbytes)] for tensor in tensors]


def _number_of(config: HiCacheStorageConfig) -> int:
    """Return a unique number for each rank that SGLang names."""
    number: int = config.dp_rank
    for rank, size in (
        (config.pp_rank, config.pp_size),
        (config.attn_cp_rank, config.attn_cp_size),
        (config.tp_rank, config.tp_size),
    ):
        number = number * size + rank
    return number


def _model_facts(options: SGLangOptions, version: str) -> dict[str, Any]:
    """Return all facts about the model and its weights that change the bytes of a page."""
    args = get_server_args()
    resolved = get_context().resolved_server_args_dict()
    config = model_config_of(args)
    architecture = json.loads(config.hf_config.to_json_string(use_diff=False))
    is_persistent = any(tier.is_persistent for tier in options.tiers)
    if is_persistent and not options.media_never_change and (config.is_multimodal or config.is_audio_model):
        raise MEDIA.error()
    facts = server_facts(args, resolved) | {
        "sglang": sglang_version(),
        "architecture": architecture_of(architecture),
        "class": ", ".join(architecture.get("architectures") or ["model"]),
        "environment": environment_of(os.environ),
    }
    try:
        facts |= _number_formats()
    except (ImportError, AttributeError) as exc:
        if is_persistent:
            raise NUMBER_FORMAT.error(str(exc)) from exc
    if is_persistent:
        facts["weights"] = weights_of(args, resolved, version, SERVED.files)
    return facts


def _name_of(weights: Mapping[str, str | Files]) -> str:
    """Return the name of the weights. It reads their files, and raises ``OSError`` if one cannot be read."""
    return json.dumps({what: each.name() if isinstance(each, Files) else each for what, each in weights.items()})


def _number_formats() -> dict[str, str]:
    """Return the meaning of ``fp8_e4m3`` on this machine. On AMD's gfx94x it is a different format, with doubled
    scales. Stored pages are bare bytes and do not identify their format."""
    from sglang.kernels.ops.quantization import fp8_kernel

    # With quantized weights, the GPU's generation determines the precision of activations.
    generation = str(torch.cuda.get_device_capability()) if torch.cuda.is_available() else "none"
    return {"fp8": str(fp8_kernel.fp8_dtype), "is_hip": str(torch.version.hip is not None), "generation": generation}
