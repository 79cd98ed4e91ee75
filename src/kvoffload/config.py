# SPDX-License-Identifier: Apache-2.0
"""One validated configuration object, and the record in which an engine describes its KV cache.

This is the only module that reads untyped mappings. A mapping is never changed; unknown keys fail with a
suggestion; every default lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from kvoffload.errors import ConfigError, LayoutError, suggest
from kvoffload.units import parse_bytes

__all__ = [
    "EngineLayout",
    "GroupKind",
    "KVGroupLayout",
    "OffloadingConfig",
    "parse_config",
    "parse_struct",
]


class OffloadingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may set; the keys of vLLM's ``kv_connector_extra_config``.

    Make it with ``parse_config``, which turns every mistake into one sentence.
    """

    cpu_bytes_to_use: int | str
    """Size of the primary tier on this node, all ranks together: bytes, or text with a unit."""
    block_size: int | None = None
    """Tokens per offloaded block; a multiple of the engine's block size, which is also the default."""
    eviction_policy: str = "density"
    """Name of a registered cache policy."""
    store_threshold: int = 1
    """Store a block once this many requests asked for it; 0 and 1 store at once."""
    max_tracker_size: int = 64_000
    """Keys the reuse filter remembers."""
    spec_name: str = "CPUOffloadingSpec"
    """Name of a registered offloading spec, or of a class in ``spec_module_path``."""
    spec_module_path: str | None = None
    """Module that holds ``spec_name``, for specs that are not installed as plug-ins."""
    offload_prompt_only: bool = False
    """Leave out blocks that hold generated tokens."""
    self_describing_kv_events: bool = False
    """Give the engine's stored-events token ids and block sizes, for routers that need them."""
    record_trace: str | None = None
    """File to write a trace of what is served to, for ``kvoffload simulate``: hashes of block keys and lengths, no
    tokens. ``{pid}`` in it becomes the process id, for engines with several schedulers."""
    secondary_tiers: tuple[dict[str, Any], ...] = ()
    """Tiers below host memory, nearest first: mappings with ``type`` and that tier's own options."""
    max_wait_s: float = 10.0
    """How long a request may wait for promotions and remote lookups before they count as misses."""
    claim_share: float = 0.75
    """Share of the primary tier that one waiting request may claim for blocks being promoted for it."""
    promotion_share: float = 0.75
    """Share of the primary tier that promotions and claims of all waiting requests may hold together."""

    @property
    def cpu_bytes(self) -> int:
        return parse_bytes(self.cpu_bytes_to_use, "cpu_bytes_to_use")


def parse_struct(kind: type[Any], values: Mapping[str, Any], what: str) -> Any:
    """``values`` as an instance of the msgspec struct ``kind``; every mistake is one ``ConfigError`` sentence."""
    known = kind.__struct_fields__
    for name in values:
        if name not in known:
            raise ConfigError(f"Unknown key {name!r} in {what}.{suggest(str(name), known)}")
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"Bad value in {what}: {exc}.") from exc


def parse_config(values: Mapping[str, Any]) -> OffloadingConfig:
    """Validates a user's mapping. Raises ``ConfigError`` before anything is allocated."""
    config: OffloadingConfig = parse_struct(OffloadingConfig, values, "the kvoffload configuration")
    parse_bytes(config.cpu_bytes_to_use, "cpu_bytes_to_use")
    _at_least("block_size", config.block_size if config.block_size is not None else 1, 1)
    _at_least("store_threshold", config.store_threshold, 0)
    _at_least("max_tracker_size", config.max_tracker_size, 1)
    if not config.max_wait_s >= 0:
        raise ConfigError(f"max_wait_s must be 0 or more seconds, not {config.max_wait_s}.")
    for name in ("claim_share", "promotion_share"):
        if not 0 < getattr(config, name) <= 1:
            raise ConfigError(f"{name} must be above 0 and at most 1, not {getattr(config, name)}.")
    if config.record_trace is not None and not Path(config.record_trace).parent.is_dir():
        raise ConfigError(f"record_trace names a file in {Path(config.record_trace).parent}, which is no directory.")
    for tier in config.secondary_tiers:
        if not isinstance(tier.get("type"), str):
            raise ConfigError(f"Each of secondary_tiers needs a 'type', for example 'fs'; got {tier!r}.")
    return config


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, not {value}.")


# ------------------------------------------------------------------------------------------------------- layout


class GroupKind(Enum):
    """What of a prefix a KV group needs to continue from it."""

    FULL_ATTENTION = "full_attention"
    """Every block of the prefix."""
    SLIDING_WINDOW = "sliding_window"
    """The blocks that cover the last ``sliding_window_tokens - 1`` tokens."""
    SINGLE_STATE = "single_state"
    """The last block alone, which holds a state (Mamba and its kin)."""


@dataclass(frozen=True, slots=True)
class KVGroupLayout:
    """One KV cache group: layers that share a block table."""

    kind: GroupKind
    block_tokens: int
    """Tokens per GPU block."""
    page_bytes: int
    """Bytes of one GPU block on one rank, all layers of the group together."""
    sliding_window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.page_bytes < 1:
            raise LayoutError(f"A KV group needs positive block_tokens and page_bytes, got {self!r}.")
        if (self.kind is GroupKind.SLIDING_WINDOW) != (self.sliding_window_tokens is not None):
            raise LayoutError(f"sliding_window_tokens belongs to sliding-window groups, and only there: {self!r}.")
        if self.sliding_window_tokens is not None and self.sliding_window_tokens < 1:
            raise LayoutError(f"sliding_window_tokens must be positive: {self!r}.")


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """How an engine lays out its KV cache: everything that both planes must agree on.

    The same record is made in the scheduler process and in every worker (``rank`` differs).
    """

    groups: tuple[KVGroupLayout, ...]
    hash_block_tokens: int
    """Tokens that one of the engine's block hashes covers."""
    instance_id: str
    """Names this engine instance among the processes of the host; the same in all of its processes."""
    num_ranks: int = 1
    """Workers of this node that hold slices of the same blocks (tensor parallelism)."""
    rank: int = 0
    num_processes: int = 1
    """Processes of this node that map the primary tier: 1 where scheduler and worker are one process, else one for the
    scheduler and one for each rank."""
    events_enabled: bool = False
    """Whether somebody drains ``take_events``."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """All that changes the bytes of a block besides its key: model, revision, dtype, layout, parallel sizes."""
    hashes_are_stable: bool = True
    """Whether the same tokens give the same block hashes in another process; persistent tiers need it."""
    unstable_hash_hint: str = ""
    """Which option of the engine makes hashes stable, for the error message."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("The engine has no KV cache groups, so there is nothing to offload.")
        if not 0 <= self.rank < self.num_ranks:
            raise LayoutError(f"rank {self.rank} is outside of {self.num_ranks} ranks.")
        for group in self.groups:
            if group.block_tokens % self.hash_block_tokens:
                raise LayoutError(
                    f"A GPU block of {group.block_tokens} tokens is no multiple of the {self.hash_block_tokens} tokens "
                    "that one block hash covers."
                )

    def block_size_factor(self, config: OffloadingConfig) -> int:
        """GPU blocks per offloaded block, the same for all groups.

        With groups of different block sizes, ``config.block_size`` counts tokens of the smallest.
        """
        base = min(group.block_tokens for group in self.groups)
        if config.block_size is None:
            return 1
        if config.block_size % base:
            raise ConfigError(
                f"block_size must be a multiple of the engine's block of {base} tokens, and {config.block_size} is not."
            )
        return config.block_size // base

    def slice_bytes(self, factor: int) -> int:
        """Bytes of one offloaded block that one rank owns: the largest group's, so that any block fits any slot."""
        return factor * max(group.page_bytes for group in self.groups)

    def block_bytes(self, factor: int) -> int:
        """Bytes of one slot: a slice for every rank."""
        return self.slice_bytes(factor) * self.num_ranks
