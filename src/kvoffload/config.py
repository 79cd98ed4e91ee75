# SPDX-License-Identifier: Apache-2.0
"""The user's configuration, validated, and the record in which an engine describes its KV cache.

Untyped mappings become typed records here (``parse_config``, ``parse_struct``) and are never changed. Unknown keys fail
with a suggestion.
"""

from __future__ import annotations

import difflib
import functools
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from kvoffload.errors import ConfigError, LayoutError, Problems, reason_of, suggest
from kvoffload.files import read_file
from kvoffload.units import parse_bytes, parse_seconds


class OffloadingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's settings: the keys of vLLM's ``kv_connector_extra_config``, and their defaults.

    Create it with ``parse_config``. The constructor itself checks no values.
    """

    cpu_bytes_to_use: int | str
    """Host memory for the offloaded KV of one engine, for all of its ranks together. With data parallelism, each engine
    core allocates this much."""
    block_size: int | None = None
    """Tokens per offloaded block, a multiple of the engine's block size. Larger blocks mean fewer and larger copies,
    and coarser hits. Default: the engine's block size."""
    eviction_policy: str = "density"
    """``density``, ``lru``, ``arc``, or another registered cache policy."""
    store_threshold: int = 1
    """Store a block at the n-th request that asks for it. With 2, prompts that are seen once are not stored; 0 and 1
    store at the first."""
    max_tracker_size: int = 64_000
    """Keys that the reuse filter counts requests for; used with a ``store_threshold`` of 2 or more."""
    spec_name: str | None = None
    """Another way to offload: the name of a registered offloading spec, or of a class in ``spec_module_path``. Default:
    ``TieringOffloadingSpec`` where there are ``secondary_tiers``, else ``CPUOffloadingSpec``."""
    spec_module_path: str | None = None
    """Module that holds ``spec_name``, for specs that are not installed as plug-ins. Default: none."""
    offload_prompt_only: bool = False
    """Do not offload blocks that hold generated tokens."""
    self_describing_kv_events: bool = True
    """Include token ids and block sizes in the engine's events of stored blocks. Some routers drop events that lack
    these fields."""
    kv_cache_layout: str | None = None
    """Layout of the engine's KV cache, by the engine's own name for it. Default: the engine's own, or with tiers vLLM's
    ``LBHNC``."""
    record_trace: str | None = None
    """File that receives a trace of the served requests: ids, hashes and lengths, but no tokens. Only its owner can
    read it. ``{pid}`` in it becomes the process id, which is also added if another process records to the same file.
    Default: none."""
    secondary_tiers: tuple[dict[str, Any], ...] = ()
    """Tiers below host memory, nearest first: mappings with ``type`` and that tier's own options. Default: none."""
    weights_version: str | dict[str, str] | None = None
    """A name for the weights: text, or ``{"file": path}``, which kvoffload reads at startup and at every reset. Tiers
    store blocks under that name. A reset that reads a new name continues with the blocks of that name; any other reset
    starts a new epoch, private to this engine. Without a name, the weights' files identify the weights until the first
    reset. Default: none."""
    adapters_never_change: bool = False
    """A promise that no LoRA adapter is ever replaced under the same name and path. Without it, kvoffload hashes
    the files of adapters if there is a persistent tier. Set it if the files are not on the engine's host."""
    media_never_change: bool = False
    """A promise that a ``uuid`` always names the same image, video or sound. Without it, kvoffload hashes the content
    of media if there is a persistent tier."""
    reset_tiers: bool = True
    """If false, a reset under the same ``weights_version`` resets only host memory."""
    load_policy: Literal["cost", "always"] = "cost"
    """Which hits in ``secondary_tiers`` to load: with ``"cost"``, hits that load faster than the engine computes them,
    as measured while serving; with ``"always"``, all hits."""
    prefill_tokens_per_s: float | None = None
    """Prompt tokens that the engine computes per second. ``load_policy`` uses this value until it has measured its own.
    Default: measured."""
    max_wait_s: float = 10.0
    """Seconds that a request may wait for tiers in total. Blocks that have not arrived by then are misses."""
    promotion_share: float = 0.75
    """Share of host memory that waiting requests and reads from tiers may use together, above 0 and at most 1."""

    @property
    def cpu_bytes(self) -> int:
        """``cpu_bytes_to_use`` as a number of bytes."""
        return parse_bytes(self.cpu_bytes_to_use, "cpu_bytes_to_use")

    def read_weights_version(self) -> str:
        """Return the name in ``weights_version``, read from its file, or ``""`` without one. Raises ``ConfigError``."""
        version = self.weights_version
        if version is None:
            return ""
        if isinstance(version, str):
            where = "weights_version"
        elif version.keys() == {"file"}:
            where = f"weights_version is read from {version['file']}, which"
            try:
                version = read_file(version["file"]).decode("utf-8-sig").strip()
            except (OSError, ValueError) as exc:
                raise ConfigError(f"{where} cannot be read: {reason_of(exc)}.") from exc
        else:
            raise ConfigError('weights_version must be text or {"file": path}.')
        if not version or len(version) > _LONGEST_VERSION or not version.isprintable():
            raise ConfigError(f"{where} must have one line of 1 to {_LONGEST_VERSION} printable characters.")
        return version


_LONGEST_VERSION = 200

DEFAULTS = OffloadingConfig(cpu_bytes_to_use=0)
"""The default of every key except ``cpu_bytes_to_use``, which has none. Other modules use the defaults of such options
from here. The fixed signature of ``CPUOffloadingManager`` repeats two of them; a test compares them."""


def parse_struct(
    kind: type[Any], values: Mapping[str, Any], what: str, elsewhere: Mapping[str, str] | None = None
) -> Any:
    """Return ``values`` as an instance of the msgspec struct ``kind``. A key in ``_s`` also accepts text such as
    ``"10s"``.

    Raises one ``ConfigError`` for all unknown keys, missing keys and wrong types, with a sentence for each that calls
    the mapping ``what``. ``elsewhere`` explains the replacement of another system's key. Values are shown only for keys
    that accept numbers, truth or a choice, because any other value may be a secret.
    """
    known, _, problems = read_struct(kind, values, what, elsewhere or {})
    problems.raise_found()
    return kind(**known)


def read_struct(
    kind: type[Any], values: Mapping[str, Any], what: str, elsewhere: Mapping[str, str]
) -> tuple[dict[str, Any], set[str], Problems]:
    """Return the good values of ``parse_struct``, the missing or bad keys, and the problems with ``values``."""
    fields = _fields_of(kind)  # type: ignore[arg-type]  # a class can be hashed
    problems = Problems()
    good: dict[str, Any] = {}
    bad: set[str] = set()
    for name in values:
        if name not in fields:
            hint = f" {elsewhere[name]}" if name in elsewhere else suggest(str(name), fields)
            problems.add(f"Unknown key {name!r} in {what}.{hint}")
    for name, known in fields.items():
        if name not in values:
            if known.required:
                bad.add(name)
                needs = _NEEDED.get(name, "")
                problems.add(f"{what[:1].upper()}{what[1:]} lacks {name!r}{needs}.")
            continue
        value = values[name]
        try:
            _check_usable(value, f"{name} of {what}")
            if isinstance(value, str) and name.endswith("_s") and not name.endswith("_per_s"):
                value = parse_seconds(value, f"{name} of {what}")
            good[name] = msgspec.convert(value, known.type)
        except msgspec.ValidationError:
            bad.add(name)
            shown = _show(value, known.type)
            near = difflib.get_close_matches(str(value), _literals(known.type), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            problems.add(f"{name} of {what} must be {_describe(known.type)}, not {shown}.{hint}")
        except ConfigError as exc:
            bad.add(name)
            problems.add(str(exc))
    return good, bad, problems


@functools.cache
def _fields_of(kind: type[Any]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of ``kind``, cached because msgspec evaluates all annotations on each call."""
    return {field.name: field for field in msgspec.structs.fields(kind)}


_MOST = 2**63
"""Larger than any number in a configuration: 64-bit integers cannot hold it."""


def _check_usable(value: Any, name: str) -> None:
    """Raise ``ConfigError``, which calls ``value`` by its ``name``, for a number that is too large, and for text that
    cannot name a file."""
    if isinstance(value, int) and abs(value) >= _MOST:
        raise ConfigError(f"{name} is a number too large for any machine; lower it.")
    texts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for text in texts:
        if isinstance(text, str) and ("\0" in text or not _is_encodable(text)):
            raise ConfigError(f"{name} contains a character that is not allowed, such as NUL; remove it.")


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


_MANY: dict[Any, str] = {dict: "mappings", str: "texts", int: "whole numbers", float: "numbers"}
_NEEDED = {
    "cpu_bytes_to_use": ", the host memory for offloaded KV, for example '8GiB'",
    "path": ", the directory for its blocks, for example '/mnt/nvme/kv'",
    "url": ", the address of its servers",
}
"""Explanations of the required keys."""

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a mapping",
    tuple: "a list",
    list: "a list",
}


def _choices(kind: Any) -> tuple[Any, ...]:
    """Return the types of the union ``kind``, without ``None``."""
    if get_origin(kind) in (Union, UnionType):
        return tuple(choice for part in get_args(kind) for choice in _choices(part))
    return () if kind is NoneType else (kind,)


def _literals(kind: Any) -> tuple[Any, ...]:
    """Return the values that a ``Literal`` in ``kind`` allows."""
    return tuple(value for choice in _choices(kind) if get_origin(choice) is Literal for value in get_args(choice))


def _describe(kind: Any) -> str:
    """Describe a value of the type ``kind``, for people."""
    words = []
    for choice in _choices(kind):
        origin = get_origin(choice) or choice
        if origin is Literal:
            words.append(f"one of {', '.join(repr(value) for value in get_args(choice))}")
        elif origin in (list, tuple):
            words.append(f"a list of {_many(get_args(choice)[0])}")
        elif origin is dict and get_args(choice):
            words.append(f"a mapping of {_many(get_args(choice)[1])}")
        else:
            words.append(_WORDS.get(origin) or f"a {origin.__name__}")
    return " or ".join(words)


def _many(kind: Any) -> str:
    """Describe several values of the type ``kind``, for people."""
    return " or ".join(_MANY.get(get_origin(choice) or choice, "values") for choice in _choices(kind))


def _show(value: Any, kind: Any) -> str:
    """Describe ``value``, which is not a ``kind``, for people: only its type, unless a ``kind`` cannot be a secret."""
    kinds = {get_origin(choice) or choice for choice in _choices(kind)}
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if kinds <= {int, float, bool, Literal} and isinstance(value, int | float | str):
        return reprlib.repr(value)
    word = next((word for known, word in _WORDS.items() if isinstance(value, known)), f"a {type(value).__name__}")
    has_other_things = (word == "a mapping" and dict in kinds) or (word == "a list" and kinds & {tuple, list})
    return f"{word} with other things" if has_other_things else word


_ELSEWHERE = {
    "blocks_per_chunk": "Here it is block_size, in tokens: that many times the engine's block size.",
    "canonical_layout": "Leave it out.",
    "backpressure": "Leave it out: a tier that cannot keep up drops writes by itself (max_backlog_blocks).",
    "lmcache_config_file": "docs/upgrading.md has kvoffload's key for each of LMCache's.",
    "claim_share": "promotion_share limits each request as it limits all of them.",
}
"""Keys of vLLM's own connectors, of LMCache and of older versions, and their replacements."""


def parse_config(values: Mapping[str, Any]) -> OffloadingConfig:
    """Validate a user's mapping, whose keys are the fields of ``OffloadingConfig``.

    Raises ``ConfigError`` with a sentence for each problem and its remedy. Allocates nothing. Names of policies, specs
    and tier types are checked at their first use, and all together in ``specs.read_config``.
    """
    config, problems = read_config_values(values)
    problems.raise_found()
    return config


def read_config_values(values: Mapping[str, Any]) -> tuple[OffloadingConfig, Problems]:
    """Return a configuration of the good keys in ``values``, with defaults for the rest, and the problems with them."""
    good, bad, problems = read_struct(OffloadingConfig, values, "the kvoffload configuration", _ELSEWHERE)
    config = OffloadingConfig(**{"cpu_bytes_to_use": 1, **good})
    if "cpu_bytes_to_use" not in bad:
        with problems:
            parse_bytes(config.cpu_bytes_to_use, "cpu_bytes_to_use")
    for name, value, least in (
        ("block_size", config.block_size, 1),
        ("store_threshold", config.store_threshold, 0),
        ("max_tracker_size", config.max_tracker_size, 1),
    ):
        if value is not None and value < least:
            problems.add(f"{name} must be at least {least}, not {value}.")
    with problems:
        config.read_weights_version()
    if config.prefill_tokens_per_s is not None and not 1e-3 <= config.prefill_tokens_per_s <= 1e12:
        problems.add(f"prefill_tokens_per_s must be a number from 0.001 to 1e12, not {config.prefill_tokens_per_s}.")
    if not config.max_wait_s >= 0:
        problems.add(f"max_wait_s must be 0 or more seconds, not {config.max_wait_s}.")
    if not 0 < config.promotion_share <= 1:
        problems.add(f"promotion_share must be above 0 and at most 1, not {config.promotion_share}.")
    if config.record_trace is not None:
        trace = Path(os.path.expanduser(config.record_trace))
        if not trace.parent.is_dir():
            problems.add(f"record_trace names a file in {trace.parent}, which is not a directory; create it first.")
        elif trace.is_dir():
            problems.add(f"record_trace is {trace}, which is a directory; name a file in it.")
    return config, problems


# ------------------------------------------------------------------------------------------------------- layout


class GroupKind(Enum):
    """Which blocks of a prefix a KV group needs to continue from it."""

    FULL_ATTENTION = "full_attention"
    """Every block of the prefix."""
    SLIDING_WINDOW = "sliding_window"
    """The blocks that cover the last ``sliding_window_tokens - 1`` tokens."""
    LOCAL_CHUNK = "local_chunk"
    """The blocks that cover the tokens since the last multiple of ``sliding_window_tokens``."""
    SINGLE_STATE = "single_state"
    """The recurrent state at its end alone (Mamba, linear attention, short convolutions)."""


_WINDOWS = (GroupKind.SLIDING_WINDOW, GroupKind.LOCAL_CHUNK)


@dataclass(frozen=True, slots=True)
class KVGroupLayout:
    """One KV cache group: layers that share a block table. Raises ``LayoutError`` for values that make no sense."""

    kind: GroupKind
    block_tokens: int
    """Tokens per GPU block."""
    page_bytes: int
    """Bytes of one GPU block on one rank, all layers of the group together."""
    sliding_window_tokens: int | None = None
    """The window of ``SLIDING_WINDOW`` groups, and the chunk of ``LOCAL_CHUNK`` groups; ``None`` for all others."""
    lookahead_tokens: int = 0
    """Number of following tokens that a token's KV depends on. It is 1 if the group contains layers of a speculative
    head, which see the next token; the hash of a full block does not cover that token."""

    def __post_init__(self) -> None:
        if self.lookahead_tokens < 0:
            raise LayoutError(f"lookahead_tokens must be 0 or more: {self!r}.")
        if self.block_tokens < 1 or self.page_bytes < 1:
            raise LayoutError(f"A KV group needs positive block_tokens and page_bytes, got {self!r}.")
        if (self.kind in _WINDOWS) != (self.sliding_window_tokens is not None):
            raise LayoutError(f"Groups with a window or a chunk need sliding_window_tokens, and no others: {self!r}.")
        if self.sliding_window_tokens is not None and self.sliding_window_tokens < 1:
            raise LayoutError(f"sliding_window_tokens must be positive: {self!r}.")


@dataclass(frozen=True, slots=True)
class RankSlice:
    """The part of every slot that one rank stores and loads. Raises ``LayoutError`` for values that make no sense."""

    index: int
    """Position of the slice in the slot, from 0."""
    num_slices: int
    """Number of slices of a slot, all of equal size."""
    replica: int = 0
    """Position of this rank among the ranks with the same slice, from 0."""
    num_replicas: int = 1
    """Number of ranks with the same slice, because they hold the same KV. Each of them loads every slot. Only replica s
    modulo ``num_replicas`` stores slot s."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_slices or not 0 <= self.replica < self.num_replicas:
            raise LayoutError(f"index must be below num_slices, and replica below num_replicas: {self!r}.")


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """How an engine lays out its KV cache: all facts that both planes must agree on. The scheduler process and every
    worker create the same record; only ``rank`` differs. Raises ``LayoutError`` for values that make no sense."""

    groups: tuple[KVGroupLayout, ...]
    hash_block_tokens: int
    """Tokens that one of the engine's block hashes covers; divides every group's ``block_tokens``."""
    instance_id: str
    """Names this engine instance among the processes of the host; the same in all of its processes."""
    num_ranks: int = 1
    """Workers that hold slices of the same blocks (tensor parallelism)."""
    rank: int = 0
    """Number of this worker, from 0; 0 in the scheduler process."""
    rank_slice: RankSlice | None = None
    """This worker's part of a slot; ``None`` if each rank has its own slice. Read ``slice`` instead."""
    rank_free: bool = False
    """Whether a slot contains the same bytes for any number of slices, because its pages span all ranks
    (``SharedPage``). Then engines with another number of ranks can use it."""
    num_processes: int = 1
    """Number of processes of this node that map the primary tier: 1 if scheduler and worker are one process; otherwise
    one for each rank of the node, plus one for the scheduler on its node."""
    events_enabled: bool = False
    """Whether the engine consumes events. Otherwise the manager records none."""
    traces_enabled: bool = False
    """Whether the engine traces requests. If so, losses of blocks are recorded to explain the requests' misses."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """Everything besides a block's key that changes its bytes: model, revision, dtype, layout. It excludes the number
    of ranks."""
    hashes_are_stable: bool = True
    """Whether the same tokens give the same block hashes in another process. Persistent tiers need that."""
    device_tokens: int | None = None
    """Number of prompt tokens that fit in the GPU's own prefix cache; ``None`` if it is not known. Only traces contain
    it."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("The engine has no KV cache groups, so there is nothing to offload.")
        if not 0 <= self.rank < self.num_ranks:
            raise LayoutError(f"rank {self.rank} is outside of {self.num_ranks} ranks.")
        if self.hash_block_tokens < 1:
            raise LayoutError(f"hash_block_tokens must be at least 1, not {self.hash_block_tokens}.")
        for group in self.groups:
            if group.block_tokens % self.hash_block_tokens:
                raise LayoutError(
                    f"A GPU block of {group.block_tokens} tokens is not a multiple of the {self.hash_block_tokens} "
                    "tokens that one block hash covers."
                )

    @property
    def slice(self) -> RankSlice:
        """This worker's part of a slot."""
        return self.rank_slice or RankSlice(self.rank, self.num_ranks)

    @property
    def ranks_per_node(self) -> int:
        """The ranks whose slices are in the memory of this node."""
        return self.slice.num_slices * self.slice.num_replicas

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the engine spans. Each has its own memory for the same slots, with the slices of its
        ranks."""
        return max(1, self.num_ranks // self.ranks_per_node)

    @property
    def node(self) -> int:
        """The node of this process, from 0: nodes have consecutive ranks."""
        return self.rank // self.ranks_per_node

    @property
    def has_states(self) -> bool:
        """Whether any group holds recurrent states."""
        return any(group.kind is GroupKind.SINGLE_STATE for group in self.groups)

    def block_size_factor(self, config: OffloadingConfig) -> int:
        """GPU blocks per offloaded block, the same for all groups. If block sizes differ, ``config.block_size`` counts
        tokens of the group with the smallest block. Raises ``ConfigError`` if it is not a multiple of that group's
        block."""
        base = min(group.block_tokens for group in self.groups)
        if config.block_size is None:
            return 1
        if config.block_size % base:
            raise ConfigError(
                f"block_size must be a multiple of the engine's block of {base} tokens, and {config.block_size} is not."
            )
        return config.block_size // base

    def slice_bytes(self, factor: int) -> int:
        """Bytes of one slice: the size for the largest group, so that any block fits any slot."""
        return factor * max(group.page_bytes for group in self.groups)

    def num_slots(self, config: OffloadingConfig) -> int:
        """Number of blocks that fit in host memory."""
        return config.cpu_bytes // self.block_bytes(self.block_size_factor(config))

    def block_bytes(self, factor: int) -> int:
        """Bytes of one slot: all slices."""
        return self.slice_bytes(factor) * self.slice.num_slices
