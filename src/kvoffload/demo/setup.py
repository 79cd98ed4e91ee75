# SPDX-License-Identifier: Apache-2.0
"""What the demo serves with: a model, the engine's options, an offloading configuration, and the ways to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvoffload.config import OffloadingConfig, parse_config
from kvoffload.demo.comparison import Way
from kvoffload.demo.workload import ChatWorkload
from kvoffload.engines.reference import EngineOptions, build_random_model, load_model
from kvoffload.engines.reference.layout import engine_layout, kv_shape
from kvoffload.engines.reference.models import KINDS
from kvoffload.errors import ConfigError

BLOCK_TOKENS = 16
"""Of a block, on the device and offloaded."""
SEED = 39
"""Of the weights and the messages."""


def use_device(device: str, threads: int | None) -> None:
    """Sets torch's threads. Raises ``ConfigError`` for a device that this machine does not have."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is cpu or cuda, not {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu.")
    if threads is not None:
        torch.set_num_threads(threads)


def make_model(model: str | None, kind: str, device: str, layers: int, hidden: int) -> Any:
    """A float32 model, whose rounding is too small to change a token: ``model``, or a random one of ``KINDS``."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # that a state's kernels are not installed is nothing to tell of a demo
    if kind not in KINDS:
        raise ConfigError(f"--model-kind is {' or '.join(KINDS)}, not {kind!r}.")
    if model is not None:
        return load_model(model, device=device)
    if hidden % 128:
        raise ConfigError(f"--hidden must be a multiple of 128, not {hidden}.")
    return build_random_model(
        kind, layers=layers, hidden=hidden, heads=hidden // 64, kv_heads=2, seed=SEED, device=device
    )


def check_length(workload: ChatWorkload, llm: Any) -> None:
    """Raises ``ConfigError`` if a conversation grows beyond what the model takes."""
    longest = int(llm.config.max_position_embeddings)
    if workload.longest_tokens > longest:
        raise ConfigError(
            f"A conversation grows to {workload.longest_tokens} tokens, and the model takes {longest}: "
            "lower --turns or --message-tokens."
        )


def engine_options(workload: ChatWorkload, device_tokens: int | None) -> EngineOptions:
    """A pool of ``device_tokens``; by default a quarter of the whole chat, or room for all users' turns if larger."""
    whole = workload.conversations * workload.longest_tokens
    least = workload.longest_tokens + BLOCK_TOKENS
    if device_tokens is None:
        device_tokens = max(whole // 4, workload.users * least)
    elif device_tokens < least:
        raise ConfigError(f"--device-tokens must be at least {least}, room for one whole conversation.")
    return EngineOptions(device_tokens // BLOCK_TOKENS, BLOCK_TOKENS, max_requests=workload.users)


def offloading_config(
    llm: Any, workload: ChatWorkload, policy: str, disk: Path | None, disk_gib: float
) -> OffloadingConfig:
    """The configuration as a user would write it. Host memory holds the whole chat and a fifth more."""
    tokens = workload.conversations * (workload.longest_tokens + BLOCK_TOKENS)
    values: dict[str, Any] = {
        "cpu_bytes_to_use": int(1.2 * tokens * _kv_bytes_per_token(llm)),
        "eviction_policy": policy,
    }
    if disk is not None:
        if not 0 < disk_gib < 2**33:  # 2**63 bytes
            raise ConfigError(f"--disk-gib must be positive and less than {2**33}, not {disk_gib}.")
        tier = {"type": "disk", "path": str(disk), "max_bytes": int(disk_gib * 2**30)}
        values |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
        values["load_policy"] = "always"  # a demo of what is found on disk, however fast a toy model computes it
    return parse_config(values)


def ways_of(config: OffloadingConfig) -> tuple[Way, ...]:
    """Three ways; with a disk a fourth, which serves the chat again on a new engine whose host memory is empty."""
    ways = (
        Way("no cache", prefix_caching=False),
        Way("device cache", prefix_caching=True),
        Way("offloading", prefix_caching=True, offloading=config),
    )
    return (*ways, Way("restarted", True, config)) if config.secondary_tiers else ways


def _kv_bytes_per_token(llm: Any) -> int:
    """All layers together, if every block of every group is stored. Blocks take slots of the largest group's size."""
    layout = engine_layout(kv_shape(llm.config), BLOCK_TOKENS, llm.dtype, {})
    return len(layout.groups) * layout.slice_bytes(1) // BLOCK_TOKENS
