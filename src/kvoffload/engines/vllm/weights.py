# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads a model's weights from, as blocks that outlive the process must know it."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.weights import WEIGHT_FILES, fingerprint, local_directory, outliving_tier
from kvoffload.errors import ConfigError

__all__ = ["DRAFTERS_WITH_KV", "drafter_with_kv", "refuse_unnamed_weights", "weights_of"]

DRAFTERS_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model")
"""Speculative methods whose drafter keeps KV that was shown to be good after a load."""

_READ_FROM_FILES = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "gguf"),
    *("bitsandbytes", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
)
"""``load_format``s that read what lies in the model's directory."""


def drafter_with_kv(vllm_config: Any) -> Any:
    """vLLM's ``SpeculativeConfig`` if blocks hold KV of its drafter; ``None`` otherwise."""
    speculative = vllm_config.speculative_config
    return speculative if speculative is not None and speculative.method in DRAFTERS_WITH_KV else None


def refuse_unnamed_weights(vllm_config: Any, config: OffloadingConfig) -> None:
    """Raises ``ConfigError`` if blocks could outlive weights that cannot be told from others: those that are read from
    elsewhere than the model's files, or replaced while vLLM serves."""
    tier = outliving_tier(config)
    if tier is None or config.weights_version is not None:
        return
    for load, model in _loaded(vllm_config):
        source = model.model_weights or (load.load_format not in (*_READ_FROM_FILES, "dummy") and load.load_format)
        if source:
            raise _unnamed(f"the weights come from {source!r}", tier)
    if vllm_config.weight_transfer_config is not None:
        raise _unnamed("the weights may be replaced while it serves (--weight-transfer-config)", tier)


def weights_of(vllm_config: Any, config: OffloadingConfig) -> str:
    """Tells the weights of the model, and of a drafter with KV, from others; empty if no block outlives the process.

    Reads some 16 MiB of each model's files, once in a process. Raises ``ConfigError`` if they cannot be read.
    """
    tier = outliving_tier(config)
    if tier is None:
        return ""
    if config.weights_version is not None:
        return "by weights_version"  # which is in the keys
    refuse_unnamed_weights(vllm_config, config)
    parallel = vllm_config.parallel_config
    found = []
    for load, model in _loaded(vllm_config):
        if load.load_format == "dummy":
            found.append(
                f"dummy {model.seed} {parallel.tensor_parallel_size} {parallel.pipeline_parallel_size} "
                f"{parallel.data_parallel_size}"
            )
            continue
        try:
            found.append(_of_files(model.model, model.revision, load.download_dir, model.trust_remote_code))
        except OSError as exc:
            raise _unnamed(f"the files of its weights cannot be read ({exc.strerror or exc})", tier) from exc
    scales = getattr(vllm_config.model_config.multimodal_config, "mm_encoder_fp8_scale_path", None)
    if scales is not None:
        try:
            found.append(hashlib.sha256(Path(scales).read_bytes()).hexdigest())
        except OSError as exc:
            raise _unnamed(f"{scales} cannot be read ({exc.strerror})", tier) from exc
    return " ".join(found)


def _loaded(vllm_config: Any) -> list[tuple[Any, Any]]:
    """How weights are loaded, and of which model: the target's, and those of a drafter with KV."""
    loaded = [(vllm_config.load_config, vllm_config.model_config)]
    speculative = drafter_with_kv(vllm_config)
    if speculative is not None:
        loaded.append((speculative.draft_load_config or vllm_config.load_config, speculative.draft_model_config))
    return loaded


@functools.cache
def _of_files(model: str, revision: str | None, download_dir: str | None, runs_code: bool) -> str:
    if Path(model).is_file():  # GGUF
        return fingerprint(Path(model).parent, (Path(model).name,))
    directory = local_directory(model, revision, download_dir)
    return fingerprint(directory, (*WEIGHT_FILES, "*.py") if runs_code else WEIGHT_FILES)


def _unnamed(why: str, tier: str) -> ConfigError:
    return ConfigError(
        f"kvoffload cannot tell these weights from others, because {why}, and the secondary tier {tier!r} would serve "
        'their KV to others: set weights_version to a name of the weights or to {"file": path}, or leave out the tier.'
    )
