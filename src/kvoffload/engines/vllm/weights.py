# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads a model's weights from, as blocks that outlive the process must know it."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.weights import (
    WEIGHT_FILES,
    changed_since,
    fingerprint,
    local_directory,
    outliving_tier,
    process_start_s,
)
from kvoffload.errors import ConfigError

DRAFTERS_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model")
"""Speculative methods whose drafter keeps KV that was shown to be good after a load."""

_READ_FROM_FILES = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "gguf"),
    *("bitsandbytes", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
)
"""``load_format``s that read what lies in the model's directory, with vLLM's own loaders."""

_IS_MODELSCOPE = "VLLM_USE_MODELSCOPE"


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
        if (why := _why_unnamed(load, model)) is not None:
            raise _unnamed(why, tier)
    if vllm_config.weight_transfer_config is not None:
        raise _unnamed("the weights may be replaced while it serves (--weight-transfer-config)", tier)


def weights_of(vllm_config: Any, config: OffloadingConfig) -> str:
    """Tells the weights of the model, and of a drafter with KV, from others; empty if no block outlives the process.

    Call it after the load. Reads some 100 MiB of each model's files. Raises ``ConfigError`` if they cannot be read, or
    may be others than those that were loaded.
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
            directory, patterns = _files_of(model, load)
            found.append(fingerprint(directory, patterns))
            changed = changed_since(directory, process_start_s(), patterns)  # or while they were read here
        except OSError as exc:
            raise _unnamed(f"the files of its weights cannot be read ({exc.strerror or exc})", tier) from exc
        if changed is not None:
            raise _changed(changed, tier)
    scales = getattr(vllm_config.model_config.multimodal_config, "mm_encoder_fp8_scale_path", None)
    if scales is not None:
        try:
            found.append(hashlib.sha256(Path(scales).read_bytes()).hexdigest())
        except OSError as exc:
            raise _unnamed(f"{scales} cannot be read ({exc.strerror})", tier) from exc
        if os.stat(scales).st_ctime >= process_start_s():
            raise _changed(scales, tier)
    return " ".join(found)


def _loaded(vllm_config: Any) -> list[tuple[Any, Any]]:
    """How weights are loaded, and of which model: the target's, and those of a drafter with KV."""
    loaded = [(vllm_config.load_config, vllm_config.model_config)]
    speculative = drafter_with_kv(vllm_config)
    if speculative is not None:
        loaded.append((speculative.draft_load_config or vllm_config.load_config, speculative.draft_model_config))
    return loaded


def _why_unnamed(load: Any, model: Any) -> str | None:
    """Why the weights need not be what lies in the directory of ``model``."""
    if model.model_weights or load.load_format not in (*_READ_FROM_FILES, "dummy"):
        return f"the weights come from {model.model_weights or load.load_format!r}"
    loader = _loader_of(load.load_format)
    if loader.partition(".")[0] != "vllm":
        return f"{loader} loads --load-format {load.load_format}"
    if load.load_format == "dummy":
        return None
    if os.environ.get(_IS_MODELSCOPE, "").strip().lower() not in ("", "0", "false") and not os.path.exists(model.model):
        return f"{_IS_MODELSCOPE} has them loaded from elsewhere than the Hub's cache"
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else {}
    elsewhere = next(_elsewhere([model.hf_config.to_dict(), dict(overrides)], model.model), None)
    return None if elsewhere is None else f"the model's configuration names others, {elsewhere}"


def _loader_of(load_format: str) -> str:
    """The module whose loader vLLM takes. Plug-ins bring formats, and may take the place of vLLM's own."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    loader = _LOAD_FORMAT_TO_MODEL_LOADER.get(load_format)
    return "a plug-in" if loader is None else str(loader.__module__)


def _elsewhere(part: Any, model: str, name: str = "") -> Iterator[str]:
    """Repositories and files besides ``model`` that its configuration names."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _elsewhere(value, model, str(key))
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _elsewhere(value, model, name)
    elif isinstance(part, str) and name != "_name_or_path":  # which says where the configuration was read, or made
        # A bare word, like that of an activation, may be the name of a directory here, and means no file.
        is_path = os.path.isfile(part) or (os.sep in part and os.path.exists(part))
        if (name.endswith("_model_id") and part) or (is_path and os.path.realpath(part) != os.path.realpath(model)):
            yield f"{name} {part!r}"


def _files_of(model: Any, load: Any) -> tuple[Path, tuple[str, ...]]:
    """The directory, and patterns of names in it."""
    if os.path.isfile(model.model):  # GGUF, maybe in several parts
        file = Path(model.model)
        part = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", file.name)
        name = glob.escape(file.name) if part is None else f"{glob.escape(part[1])}-?????{part[2]}"
        return file.parent, (name, "*mmproj*.gguf")
    directory = local_directory(model.model, model.revision, load.download_dir)
    return directory, (*WEIGHT_FILES, "*.py") if model.trust_remote_code else WEIGHT_FILES


def _changed(path: str, tier: str) -> ConfigError:
    return _unnamed(
        f"{path} has changed since this process started, so it may have loaded others (start it again)", tier
    )


def _unnamed(why: str, tier: str) -> ConfigError:
    return ConfigError(
        f"kvoffload cannot tell these weights from others, because {why}, and the secondary tier {tier!r} would serve "
        'their KV to others: set weights_version to a name of the weights or to {"file": path}, or leave out the tier.'
    )
