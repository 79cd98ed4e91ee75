# SPDX-License-Identifier: Apache-2.0
"""Make the demo's model, engine options, offloading configuration, and ways to compare."""

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
"""The number of tokens in a block, on the device and offloaded."""
SEED = 39
"""The seed of the weights and the messages."""


def use_device(device: str, threads: int | None) -> None:
    """Set the number of torch's threads. Raises ``ConfigError`` for a device that this machine does not have."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, not {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu.")
    if threads is not None:
        torch.set_num_threads(threads)


def make_model(model: str | None, kind: str, device: str, layers: int, hidden: int) -> Any:
    """Return a float32 model, whose rounding is too small to change a token.

    It is ``model``, or a random model of ``kind`` if ``model`` is ``None``.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # warnings about missing kernels for recurrent states do not matter in a demo
    if kind not in KINDS:
        raise ConfigError(f"--model-kind must be {' or '.join(KINDS)}, not {kind!r}.")
    if model is not None:
        return load_model(model, device=device)
    if hidden % 128:
        raise ConfigError(f"--hidden must be a multiple of 128, not {hidden}.")
    return build_random_model(
        kind, layers=layers, hidden=hidden, heads=hidden // 64, kv_heads=2, seed=SEED, device=device
    )


def check_length(workload: ChatWorkload, llm: Any) -> None:
    """Raise ``ConfigError`` if a conversation grows beyond the model's context."""
    longest = int(llm.config.max_position_embeddings)
    if workload.longest_tokens > longest:
        raise ConfigError(
            f"A conversation grows to {workload.longest_tokens} tokens, but the model accepts only {longest}; "
            "lower --turns or --message-tokens."
        )


def engine_options(workload: ChatWorkload, device_tokens: int | None) -> EngineOptions:
    """Return the engine's options with a pool of ``device_tokens`` tokens.

    The default is a quarter of the whole chat, or room for the turns of all users if that is larger. Raises
    ``ConfigError`` if the pool is too small for one conversation.
    """
    whole = workload.conversations * workload.longest_tokens
    least = workload.longest_tokens + BLOCK_TOKENS
    if device_tokens is None:
        device_tokens = max(whole // 4, workload.users * least)
    elif device_tokens < least:
        raise ConfigError(f"--device-tokens must be at least {least}, to hold one whole conversation.")
    return EngineOptions(device_tokens // BLOCK_TOKENS, BLOCK_TOKENS, max_requests=workload.users)


def offloading_config(
    llm: Any, workload: ChatWorkload, policy: str, disk: Path | None, disk_gib: float
) -> OffloadingConfig:
    """Return the configuration as a user would write it. Host memory has room for the whole chat and 20% more."""
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
        values["load_policy"] = "always"  # the demo shows hits on disk, even if a toy model computes faster
    return parse_config(values)


def ways_of(config: OffloadingConfig) -> tuple[Way, ...]:
    """Return the three ways to serve the chat, and a fourth one with a disk.

    The fourth way serves the chat again on a new engine whose host memory is empty.
    """
    ways = (
        Way("no cache", prefix_caching=False),
        Way("device cache", prefix_caching=True),
        Way("offloading", prefix_caching=True, offloading=config),
    )
    return (*ways, Way("restarted", True, config, after_restart=True)) if config.secondary_tiers else ways


def _kv_bytes_per_token(llm: Any) -> int:
    """Return the bytes per token of all layers, if every block of every group is stored.

    Each block takes a slot of the largest group's size.
    """
    layout = engine_layout(kv_shape(llm.config), BLOCK_TOKENS, llm.dtype, {})
    return len(layout.groups) * layout.slice_bytes(1) // BLOCK_TOKENS
