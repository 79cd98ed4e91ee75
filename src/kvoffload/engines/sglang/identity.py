# SPDX-License-Identifier: Apache-2.0
"""Collect all facts about SGLang's model, weights and settings that change the bytes of a page. Facts that cannot be
read are rejected with one sentence. This module loads neither SGLang nor torch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvoffload.engines.facts import UnclearError, facts_of, of_model, ropes_in
from kvoffload.engines.sglang.facts import ENVIRONMENT_IS_HARMLESS, FIELDS, WEIGHTS_FROM_ELSEWHERE
from kvoffload.engines.sglang.rejections import ADAPTER, KV_DTYPE, LONG_ROPE, SCALES, UNREADABLE, WEIGHTS
from kvoffload.engines.sglang.updates import DEFAULT_VERSION
from kvoffload.engines.variables import counted
from kvoffload.engines.weights import WEIGHT_FILES, Files, local_directory
from kvoffload.errors import ConfigError

_READS_THE_MODELS_FILES = (
    *("auto", "safetensors", "pt", "npcache", "gguf", "bitsandbytes", "layered", "mistral", "sharded_state"),
    *("fastsafetensors", "instanttensor"),
)
"""Supported values of ``--load-format``."""

_ROPES = ("default", "linear", "proportional")
_ROPES_OF_ANOTHER_LENGTH = ("llama3", "yarn", "deepseek_yarn")
"""Rope types that do not depend on the context length if they name the length that the model was trained with."""

_ORIGINAL = "original_max_position_embeddings"

_PLACES = ("model_path", "revision", "speculative_draft_model_path", "speculative_draft_model_revision", "model_name")
"""Where a model is, and its name, which is its path unless a user sets ``--served-model-name``."""

_NOT_OF_RANKS = ("dp_rank", "enable_storage_metrics", "extra_config")
"""Fields of ``HiCacheStorageConfig`` without effect on pages: all ranks of data parallelism compute the same, and
``interface_v1`` of ``extra_config`` counts by itself."""

_UNPROVEN_KV_DTYPES = ("mxfp8", "nvfp4", "fp4_mx_block16")


def ranks_of(config: Any) -> dict[str, Any]:
    """Return the ranks that determine this process's part of each page, from SGLang's ``HiCacheStorageConfig``. Raises
    ``ConfigError`` if the configuration lacks them."""
    try:
        names = [field.name for field in dataclasses.fields(config) if field.name not in _NOT_OF_RANKS]
        if missing := {"tp_rank", "is_mla_model"}.difference(names):
            raise LookupError(f"it has no {min(missing)}")
    except (TypeError, LookupError) as exc:
        raise _unreadable("storage configuration", exc) from exc
    return {name: getattr(config, name) for name in names}


def server_facts(args: Any, resolved: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of SGLang's ``ServerArgs`` that count, with their ``resolved`` values."""
    try:
        facts = facts_of(_record_of(args, resolved), FIELDS)
        kv_dtype, path = resolved["kv_cache_dtype"], resolved["quantization_param_path"]
    except (TypeError, LookupError, UnclearError) as exc:
        raise _unreadable("server arguments", exc) from exc
    if kv_dtype in _UNPROVEN_KV_DTYPES:
        raise KV_DTYPE.error(f"it is {kv_dtype}")
    if path is not None:
        try:
            facts["quantization_param_path"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as exc:
            raise SCALES.error(str(exc)) from exc
    return facts


def without_paths(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``facts`` without the places of the models, for weights that are named by the content of their files."""
    return {name: value for name, value in facts.items() if name not in _PLACES}


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return a hash of the model's configuration. SGLang has added the context length to it as ``context_len``, which
    counts unless all rotary embeddings are known not to depend on it."""
    ropes = list(ropes_in(config))
    for rope in ropes:
        if _type_of(rope) in ("longrope", "su"):
            _check_long_rope(rope, config)
    counted = of_model(config)
    if all(_ignores_context(rope) for rope in ropes):
        counted.pop("context_len", None)
    return hashlib.sha256(json.dumps(counted, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _type_of(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _ignores_context(rope: Mapping[str, Any]) -> bool:
    kind = _type_of(rope)
    return kind in _ROPES or (kind in _ROPES_OF_ANOTHER_LENGTH and _ORIGINAL in rope)


def _check_long_rope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if SGLang may use the long factors, because it uses them for a whole batch if one position
    in it exceeds the original length."""
    original, context = rope.get(_ORIGINAL, config.get(_ORIGINAL)), config.get("context_len")
    if not isinstance(original, int) or not isinstance(context, int) or context > original:
        raise LONG_ROPE.error(f"{context} tokens instead of {original}")


def environment_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set and count, including variables of other libraries."""
    own = [name for name in sorted(environment) if name.startswith("SGLANG_") and name not in ENVIRONMENT_IS_HARMLESS]
    return {name: environment[name] for name in (*own, *counted(environment))}


def files_now(resolved: Mapping[str, Any]) -> dict[str, Files]:
    """Return the files of all weights on this host, by the part that they belong to. It reads no content."""
    found = {}
    for what, path, revision, _ in (*_adapters_of(resolved), *_models_of(resolved)):
        with contextlib.suppress(OSError, TypeError, ValueError):  # SGLang itself rejects some paths
            found[what] = _files_of(path, revision, resolved)
    return found


def weights_of(
    args: Any, resolved: Mapping[str, Any], version: str, before: Mapping[str, Files] | None
) -> dict[str, str | Files]:
    """Return the identity of the weights that SGLang serves: ``version``, its ``--weight-version``, if the user gave
    one, or else the files. Files of adapters that have the same keys in all processes always count.

    ``before`` is the result of ``files_now`` before SGLang loaded the files, or ``None`` if nobody called it. Raises
    ``ConfigError`` if the files do not identify the weights, or if SGLang may have loaded other files.
    """
    found: dict[str, str | Files] = {}
    for what, path, revision, _ in _adapters_of(resolved):
        try:
            found[what] = _loaded_files(what, path, revision, resolved, before)
        except OSError as exc:
            raise ADAPTER.error(f"{path!r}: {exc}") from exc
    if version != DEFAULT_VERSION:
        return found | {"version": version}
    defaults = {field.name: field.default for field in msgspec.structs.fields(args)}
    elsewhere = [name for name in WEIGHTS_FROM_ELSEWHERE if resolved[name] != defaults[name]]
    if elsewhere:
        raise WEIGHTS.error(f"with --{elsewhere[0].replace('_', '-')} they need not be the files of the model")
    for what, path, revision, load in _models_of(resolved):
        if load == "dummy":  # SGLang uses its own seed for it, which is the same everywhere
            found[what] = "dummy"
        elif load not in _READS_THE_MODELS_FILES:
            raise WEIGHTS.error(f"--load-format {load} need not read the files of the model")
        else:
            try:
                found[what] = _loaded_files(what, path, revision, resolved, before)
            except OSError as exc:
                raise WEIGHTS.error(str(exc)) from exc
    return found


def _adapters_of(resolved: Mapping[str, Any]) -> Iterator[tuple[str, str, None, str]]:
    for ref in resolved["lora_paths"] or ():
        yield f"adapter {_field(ref, 'lora_id')}", _field(ref, "lora_path"), None, "auto"


def _models_of(resolved: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None, str]]:
    """Yield the part, path, revision and load format of each model."""
    yield "model", resolved["model_path"], resolved["revision"], resolved["load_format"]
    if (path := resolved["speculative_draft_model_path"]) is not None:
        load = resolved["speculative_draft_load_format"] or resolved["load_format"]
        yield "draft", path, resolved["speculative_draft_model_revision"], load


def _unreadable(what: str, exc: Exception) -> ConfigError:
    return UNREADABLE.error(f"{what}: {exc}")


def _record_of(args: Any, resolved: Mapping[str, Any]) -> Any:
    """Return SGLang's struct as a dataclass with the ``resolved`` values."""
    fields: list[tuple[str, Any, Any]] = []
    for each in msgspec.structs.fields(args):
        field = dataclasses.field()
        if each.default_factory is not msgspec.NODEFAULT:
            field = dataclasses.field(default_factory=each.default_factory)
        elif each.default is not msgspec.NODEFAULT:  # as a factory, because dataclasses reject mutable defaults
            field = dataclasses.field(default_factory=functools.partial(copy.copy, each.default))
        fields.append((each.name, Any, field))
    record = dataclasses.make_dataclass(type(args).__name__, fields, kw_only=True)
    return record(**{name: resolved[name] for name, *_ in fields})


def _field(record: Any, name: str) -> str:
    value: str = record[name] if isinstance(record, Mapping) else getattr(record, name)
    return value


def _files_of(path: str, revision: str | None, resolved: Mapping[str, Any]) -> Files:
    if os.path.isfile(path):  # a GGUF
        return Files.of(Path(path).parent, (glob.escape(os.path.basename(path)),))
    patterns = (*WEIGHT_FILES, "adapter_config.json", *(["*.py"] if resolved["trust_remote_code"] else []))
    return Files.of(local_directory(path, revision, resolved["download_dir"]), patterns)


def _loaded_files(
    what: str, path: str, revision: str | None, resolved: Mapping[str, Any], before: Mapping[str, Files] | None
) -> Files:
    if before is None:
        raise OSError("kvoffload's plugin, which looks at the files before SGLang loads them, is not loaded")
    found = _files_of(path, revision, resolved)
    if (changed := found.why_not(before.get(what))) is not None:
        raise OSError(f"{changed!r} has changed since SGLang began to load it")
    return found
