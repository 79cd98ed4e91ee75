# SPDX-License-Identifier: Apache-2.0
"""The versions of vLLM that kvoffload works with, and what the adapter does differently in some of them.

A difference has a function here and a line in ``tests/engines/vllm/test_interface.py``. Importing this module loads
neither vLLM nor torch.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any, cast

from kvoffload.engines.vllm.sources import Sources
from kvoffload.errors import ConfigError

OLDEST, NEWEST = (0, 30), (0, 33)
"""Major and minor version. The tests run with all of them but the newest, which was compared by its sources alone. What
comes later starts if it has all that the adapter touches (``surface.py``)."""

_0_31, _0_32, _0_33 = (0, 31), (0, 32), (0, 33)


def release_of(version: str) -> tuple[int, int]:
    """Major and minor version of ``version``. Raises ``ConfigError`` for one that is older than all that are supported,
    or has no number."""
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release is None or release < OLDEST:
        raise ConfigError(
            f"kvoffload works with {_range()} and newer, and this is vLLM {version}: install one of those versions."
        )
    return release


def _range() -> str:
    return f"vLLM {_text(OLDEST)} to {_text(NEWEST)}"


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def installed_version() -> str:
    """vLLM's own number counts, since its builds have various names."""
    from vllm.version import __version__

    return str(__version__)


@functools.cache
def vllm_release() -> tuple[int, int]:
    """``release_of`` the vLLM in this process. Raises ``ConfigError`` for one that is newer than all that were tried
    and lacks something that the adapter touches."""
    version = installed_version()
    release = release_of(version)
    if release > NEWEST:
        from kvoffload.engines.vllm.surface import missing

        package = importlib.util.find_spec("vllm")
        assert package is not None
        assert package.submodule_search_locations
        lacks = missing(Sources(Path(package.submodule_search_locations[0]).parent), release)
        if lacks:
            more = f" and {len(lacks) - 3} more" if len(lacks) > 3 else ""
            raise ConfigError(
                f"kvoffload works with {_range()}, and vLLM {version} differs in {'; '.join(lacks[:3])}{more}: install "
                "one of those versions, or a newer kvoffload."
            )
    return release


def untried_version() -> str | None:
    """What to tell whoever runs a vLLM that is newer than all that were tried; ``None``: it is one of those."""
    if vllm_release() <= NEWEST:
        return None
    return (
        f"kvoffload was tried with {_range()}, and this is vLLM {installed_version()}: it has all that kvoffload "
        "touches, and its answers were compared with nothing"
    )


def hit_source(medium: str, locality: str | None) -> Any:
    """What vLLM calls hits from a tier in its metrics. ``None`` before 0.32, which does not tell sources apart."""
    if vllm_release() < _0_32:
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    if medium == "CPU":
        return CacheHitSource.HOST
    return CacheHitSource.DISK if locality == "LOCAL" else CacheHitSource.EXTERNAL_UNSPECIFIED


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens that one of the engine's block hashes covers. Before 0.32 the KV cache's configuration does not say."""
    if vllm_release() >= _0_32:
        return int(kv_cache_config.hash_block_size)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(tokens)


def kv_tp_replicas(kv_cache_config: Any) -> int:
    """Consecutive ranks of which vLLM says that they hold the same KV in every layer. Before 0.31 it does not say."""
    return int(kv_cache_config.kv_tp_replicas) if vllm_release() >= _0_31 else 1


def loaded_requests_go_first() -> bool:
    """Whether an asynchronous scheduler runs requests that have loaded before one that it preempted and that needs more
    blocks than are free. Before 0.31 that one waits for their blocks, and they come after it, for ever."""
    return vllm_release() >= _0_31


def drafters_are_proven() -> bool:
    """Whether the KV of drafters was shown to be good after a load. Not before 0.31, whose CPU build cannot draft."""
    return vllm_release() >= _0_31


def hashes_have_adapter_paths() -> bool:
    """Whether the path of a LoRA adapter goes into block hashes. Before 0.31 its name alone does."""
    return vllm_release() >= _0_31


def has_wrong_hashes(request: Any) -> bool:
    """Whether block hashes of the request may be those of other tokens. Before 0.32, the next input of a session
    replaces the last token that was sampled, and a block that this token had filled keeps its hash."""
    return vllm_release() < _0_32 and bool(request.resumable)


def says_what_is_sharded() -> bool:
    """Whether KV groups say if decode context parallelism divides the tokens of their blocks. Not before 0.31."""
    return vllm_release() >= _0_31


def returns_routed_experts(vllm_config: Any) -> bool:
    """Whether answers have the experts that computed each token of the prompt. Before 0.31 that is the model's
    option."""
    if vllm_release() >= _0_31:
        return bool(vllm_config.aux_output_config.enabled)
    return bool(vllm_config.model_config.enable_return_routed_experts)


def tells_of_sleep() -> bool:
    """Whether a connector hears before its KV cache is unmapped, and when it is mapped again. Not before 0.33."""
    return vllm_release() >= _0_33


def names_states() -> bool:
    """Whether a step's output names the recurrent states to store in the form that ``steps.py`` reads."""
    return vllm_release() >= _0_32


def event_extra_keys(hashed: list[tuple[Any, ...] | None]) -> list[Any] | None:
    """``hashed``, what went into each block's hash beside its tokens, as vLLM's events have it. Before 0.31 they have
    it as it was hashed."""
    if vllm_release() < _0_31:
        return hashed
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys

    return cast("list[Any] | None", to_event_extra_keys(hashed))


def hash_lookahead_tokens(vllm_config: Any) -> int:
    """Tokens after a block that its hash covers too. None before 0.33."""
    return int(vllm_config.num_hash_lookahead_tokens) if vllm_release() >= _0_33 else 0
