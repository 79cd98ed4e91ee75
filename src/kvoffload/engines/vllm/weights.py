# SPDX-License-Identifier: Apache-2.0
"""Identify the files from which vLLM loads a model's weights, because the keys of persistent blocks must include
them."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.facts import UnclearError
from kvoffload.engines.weights import (
    WEIGHT_FILES,
    Files,
    Known,
    in_background,
    local_directory,
    outliving_tier,
    why_not_of_hub,
)

logger = logging.getLogger(__name__)

DRAFTERS_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model")
"""Speculative methods whose drafter keeps KV. Tests have shown that this KV is correct after a load."""

_READ_FROM_FILES = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "gguf"),
    *("bitsandbytes", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
)
"""The ``load_format``s with which vLLM's own loaders read the files in the model's directory."""

_before_load: dict[str, list[Files | str | OSError]] = {}
"""The files as they were right before vLLM loaded them, by ``instance_id`` of an engine in this process."""

_IS_SCALE_UP = "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"


def drafter_with_kv(vllm_config: Any) -> Any:
    """Return vLLM's ``SpeculativeConfig`` if blocks contain KV of its drafter, and ``None`` otherwise."""
    speculative = vllm_config.speculative_config
    return speculative if speculative is not None and speculative.method in DRAFTERS_WITH_KV else None


def why_unnamed(vllm_config: Any, config: OffloadingConfig) -> str | None:
    """Return why kvoffload cannot distinguish the weights from others, if blocks could outlive this process: vLLM does
    not read them from the model's files, or may replace them while it serves. Return ``None`` if it can."""
    if outliving_tier(config) is None or config.weights_version is not None:
        return None
    for load, model in _loaded(vllm_config):
        if (why := _why_unnamed(load, model)) is not None:
            return why
    is_replaced = vllm_config.weight_transfer_config is not None
    return "the weights may be replaced while it serves (--weight-transfer-config)" if is_replaced else None


def note_files(vllm_config: Any) -> None:
    """Record the files of the weights. Call it right before vLLM loads them, in the scheduler's process."""
    _before_load[vllm_config.instance_id] = _files(vllm_config)


def name_of_weights(vllm_config: Any, config: OffloadingConfig) -> Known:
    """Return the name of the weights of the model and of a drafter with KV. The name is empty if no block outlives the
    process, or if the user names the weights.

    Call it after the load. Raises ``UnclearError`` if the files cannot be read. If vLLM may have loaded other files,
    the name stays unknown, and the log says so.
    """
    if outliving_tier(config) is None or config.weights_version is not None:
        return str
    after = _files(vllm_config)
    for found in after:
        if isinstance(found, OSError):
            raise UnclearError(f"files of weights: {found.strerror or found}")
    if (doubt := _doubt(_before_load.get(vllm_config.instance_id), after)) is not None:
        logger.warning(
            "%s. So kvoffload cannot name the weights: this engine shares no blocks with other engines, and later "
            "engines will not find its blocks. To avoid that, set weights_version.",
            doubt,
        )
        return lambda: None
    return in_background(lambda: _name_of(after))


def name_of_current_files(vllm_config: Any) -> str:
    """Return the name of the weights in the current files of this node. Reads them; raises ``OSError``."""
    return _name_of(_files(vllm_config))


def _name_of(sources: list[Files | str | OSError]) -> str:
    for found in sources:
        if isinstance(found, OSError):
            raise found
    texts = [found for found in sources if isinstance(found, str)]
    return " ".join([*texts, *(each.name() for each in sources if isinstance(each, Files))])


def _doubt(before: list[Files | str | OSError] | None, after: list[Files | str | OSError]) -> str | None:
    """Return a sentence that explains why vLLM may not have loaded the current files, or ``None``."""
    if os.environ.get(_IS_SCALE_UP, "") not in ("", "0"):
        return "Elastic scaling has added this engine, and its weights come from others, which may have been updated"
    if before is None:
        return "vLLM has not loaded kvoffload's plug-in (VLLM_PLUGINS), which looks at the files before vLLM loads them"
    for old, new in zip(before, after, strict=True):
        changed = None if old == new else "A file of scales"
        if isinstance(new, Files):
            changed = new.why_not(old if isinstance(old, Files) else None)
        if changed is not None:
            return f"{changed} has changed since vLLM began to load the weights"
    return None


def _files(vllm_config: Any) -> list[Files | str | OSError]:
    """Return all sources of the weights: files, or a text for random weights. An error represents files that are not on
    this host."""
    parallel = vllm_config.parallel_config
    found: list[Files | str | OSError] = []
    for load, model in _loaded(vllm_config):
        if load.load_format == "dummy":
            found.append(
                f"dummy {model.seed} {parallel.tensor_parallel_size} {parallel.pipeline_parallel_size} "
                f"{parallel.data_parallel_size}"
            )
            continue
        try:
            found.append(Files.of(*_files_of(model, load)))
        except OSError as exc:
            found.append(exc)
    scales = getattr(vllm_config.model_config.multimodal_config, "mm_encoder_fp8_scale_path", None)
    if scales is not None:
        try:
            found.append(f"scales {hashlib.sha256(Path(scales).read_bytes()).hexdigest()}")
        except OSError as exc:
            found.append(exc)
    return found


def _loaded(vllm_config: Any) -> list[tuple[Any, Any]]:
    """Return the load configuration and the model configuration of the target, and of a drafter with KV."""
    loaded = [(vllm_config.load_config, vllm_config.model_config)]
    speculative = drafter_with_kv(vllm_config)
    if speculative is not None:
        loaded.append((speculative.draft_load_config or vllm_config.load_config, speculative.draft_model_config))
    return loaded


def _why_unnamed(load: Any, model: Any) -> str | None:
    """Return why the weights may differ from the files in the directory of ``model``, or ``None``."""
    if model.model_weights or load.load_format not in (*_READ_FROM_FILES, "dummy"):
        return f"the weights come from {model.model_weights or load.load_format!r}"
    loader = _loader_of(load.load_format)
    if loader.partition(".")[0] != "vllm":
        return f"{loader} loads --load-format {load.load_format}"
    if load.load_format == "dummy":
        return None
    if (why := why_not_of_hub(model.model)) is not None:
        return why
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else {}
    elsewhere = next(_elsewhere([model.hf_config.to_dict(), dict(overrides)], model.model), None)
    return None if elsewhere is None else f"the model's configuration names others, {elsewhere}"


def _loader_of(load_format: str) -> str:
    """Return the module of the loader that vLLM uses. Plug-ins may add formats and replace vLLM's own."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    loader = _LOAD_FORMAT_TO_MODEL_LOADER.get(load_format)
    return "a plug-in" if loader is None else str(loader.__module__)


def _elsewhere(part: Any, model: str, name: str = "") -> Iterator[str]:
    """Yield repositories and files besides ``model`` that its configuration names."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _elsewhere(value, model, str(key))
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _elsewhere(value, model, name)
    elif isinstance(part, str) and name != "_name_or_path":  # it says where the configuration was read or created
        # A bare word, such as the name of an activation, may also be the name of a local directory, but does not mean a
        # file.
        is_path = os.path.isfile(part) or (os.sep in part and os.path.exists(part))
        if (name.endswith("_model_id") and part) or (is_path and os.path.realpath(part) != os.path.realpath(model)):
            yield f"{name} {part!r}"


def _files_of(model: Any, load: Any) -> tuple[Path, tuple[str, ...]]:
    """Return the directory of the weights, and patterns of file names in it."""
    if os.path.isfile(model.model):  # GGUF, maybe in several parts
        file = Path(model.model)
        part = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", file.name)
        name = glob.escape(file.name) if part is None else f"{glob.escape(part[1])}-?????{part[2]}"
        return file.parent, (name, "*mmproj*.gguf")
    directory = local_directory(model.model, model.revision, load.download_dir)
    return directory, (*WEIGHT_FILES, "*.py") if model.trust_remote_code else WEIGHT_FILES
