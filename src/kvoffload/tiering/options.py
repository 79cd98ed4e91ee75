# SPDX-License-Identifier: Apache-2.0
"""Parse the options of secondary tiers, check them before anything is touched, and build the tiers.

``STORES`` maps a ``type`` to its options class. Other distributions add classes through the entry-point group
``kvoffload.stores``, as ``docs/authors.md`` shows.
"""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from kvoffload.base import OffloadPolicy
from kvoffload.config import parse_struct
from kvoffload.cpu.policies.base import with_options
from kvoffload.errors import ConfigError, Problems
from kvoffload.lost_blocks import NO_LOSSES, LostBlocks
from kvoffload.metrics import HOST
from kvoffload.registry import Registry
from kvoffload.tiering.base import CascadeMode, SecondaryTierManager
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.root import check_apart
from kvoffload.tiering.stores.seal import EncryptionKey, require_ciphers, secret_id
from kvoffload.tiering.stores.secrets import Keys, Secret, check_keys, read_keys, read_secret
from kvoffload.tiering.stores.wrappers import Rotating
from kvoffload.tiering.tier import StoreTier, TierLimits
from kvoffload.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

_FASTEST = 10**15
"""A rate in bytes per second that is higher than that of any link."""

_LARGE = 2
"""A tier at least this many times as large as host memory can hold a copy of all its blocks
(docs/design/0010-placement.md)."""


def default_cascade(tier_bytes: int | None, primary_bytes: int) -> CascadeMode:
    """Return the default of ``cascade`` for a tier of ``tier_bytes`` below ``primary_bytes`` of host memory.

    ``None`` means a tier without a bound.
    """
    return "on_evict" if tier_bytes is not None and tier_bytes < _LARGE * primary_bytes else "on_store"


class StoreOptions(TierLimits, frozen=True, kw_only=True):
    """The keys that every entry of ``secondary_tiers`` may contain. A store's own options subclass it."""

    is_persistent: ClassVar[bool] = True
    """Whether blocks may outlive the process or be read by other processes. If so, the engine's block hashes must be
    the same in every process, and kvoffload must know which weights the engine serves."""
    medium: ClassVar[str] = "STORAGE"
    """The store's medium in events: ``STORAGE``, or ``CPU`` if the store is in host memory."""
    locality: ClassVar[str | None] = None
    """``LOCAL`` if only this host can read the blocks, ``REMOTE`` if other hosts can, or ``None`` if this is
    unknown."""

    type: str
    """The kind of the tier: one of the sections below, or a type that another package adds."""
    name: str | None = None
    """The tier's name in metrics and messages. Default: its type, numbered from the second tier of that type on."""
    cascade: CascadeMode | None = None
    """When kvoffload writes blocks to the tier: ``"on_store"`` (or ``"write_through"``), as soon as they are in host
    memory, or ``"on_evict"`` (``"write_back"``), shortly before host memory would evict them. Default: ``"on_evict"``
    if the tier's ``max_bytes`` is less than twice the host memory, otherwise ``"on_store"``."""
    offload_policy: str = OffloadPolicy.BLOCK_LEVEL.value
    """``"request_level"`` writes all blocks of a request to the tier, hits included."""
    read_bytes_per_s: int | str | None = None
    """The tier's read speed in bytes per second, such as ``"3GB"``. ``load_policy`` uses it until it has measured the
    speed. Default: measured."""
    exclusive: bool = False
    """Set it if no other process writes to this tier. Unknown blocks then count as misses once the initial scan has
    ended. It has no effect on ``redis``, ``object`` and ``mooncake``, which are always asked."""

    def check(self, block_bytes: int | None = None) -> None:
        """Raise a ``ConfigError`` with all mistakes in the options, for blocks of ``block_bytes``. Touches nothing."""
        problems = Problems()
        with problems:
            self.check_limits(self.type)
        if self.name == "":
            problems.add(f"name of the {self.type!r} tier is empty; set a name, or leave the key out.")
        if self.name is not None and self.name.upper() == HOST:
            problems.add(
                f"name of the {self.type!r} tier is {self.name!r}, which means host memory in metrics; choose another."
            )
        with problems:
            _ = self.expected_bytes_per_s
        policies = [policy.value for policy in OffloadPolicy]
        if self.offload_policy not in policies:
            problems.add(
                f"offload_policy of the {self.type!r} tier must be one of {', '.join(policies)}, "
                f"not {self.offload_policy!r}."
            )
        problems.raise_found()

    @property
    def label(self) -> str:
        """The tier's name, or its type if it has none."""
        return self.name or self.type

    @property
    def bound_bytes(self) -> int | None:
        """The most bytes that the tier may hold, or ``None`` without a bound. The default of ``cascade`` uses it."""
        return None

    @property
    def expected_bytes_per_s(self) -> int | None:
        """Return ``read_bytes_per_s`` in bytes per second, or ``None`` if it is not set. Raises ``ConfigError`` for a
        value that is not a size."""
        if self.read_bytes_per_s is None:
            return None
        return min(parse_bytes(self.read_bytes_per_s, f"read_bytes_per_s of the {self.type!r} tier"), _FASTEST)

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories that contain the blocks; empty if the tier uses none. No two tiers may share a directory."""
        return ()

    @property
    def place(self) -> str:
        """The location of the blocks, for people to read, without credentials."""
        return ", ".join(self.directories)

    @property
    def quota(self) -> str:
        """The amount that the tier may hold, for people to read."""
        if self.bound_bytes is not None:
            return f"at most {format_bytes(self.bound_bytes)}"
        return "as much as its servers keep" if self.server_evicts else "no bound"

    def describe(self, primary_bytes: int) -> str:
        """Return one line about the tier for the log of a server with ``primary_bytes`` of host memory."""
        kind = f"tier {self.label!r}" if self.label == self.type else f"tier {self.label!r} (type {self.type})"
        place = f"{self.place}, " if self.place else ""
        return f"{kind}: {place}{self.quota}, written {self.cascade_above(primary_bytes)}"

    def cascade_above(self, primary_bytes: int) -> CascadeMode:
        """Return ``cascade``, or its default below ``primary_bytes`` of host memory."""
        if self.cascade is not None:
            return self.cascade
        if self.offload_policy == OffloadPolicy.REQUEST_LEVEL.value:
            return "on_store"
        return default_cascade(self.bound_bytes, primary_bytes)

    @abstractmethod
    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        """Open the store for blocks of ``block_bytes``.

        ``namespace`` covers everything except the key that changes a block's bytes. A persistent store must keep
        namespaces apart.
        """

    def build(
        self,
        primary_kv_view: memoryview,
        namespace: str,
        lost: LostBlocks = NO_LOSSES,
        enable_events: bool = False,
    ) -> SecondaryTierManager:
        """Return the tier over ``primary_kv_view``, host memory of shape (num_blocks, block_bytes).

        The tier records lost blocks in ``lost`` and, with ``enable_events``, changes for ``take_events``. Override this
        for a tier that is not built on a ``BlockStore``, and leave unsupported parameters out of the signature.
        """
        shape = primary_kv_view.shape
        assert shape is not None
        self.check(shape[1])
        store = self.open_store(shape[1], namespace)
        try:
            tier = StoreTier(
                primary_kv_view,
                self.label,
                store,
                self,
                offload_policy=OffloadPolicy(self.offload_policy),
                exclusive=self.exclusive and self.locality != "REMOTE",
                enable_events=enable_events,
                lost=lost,
            )
        except BaseException:
            store.close()
            raise
        tier.medium, tier.locality = self.medium, self.locality
        return tier


class SealedOptions(StoreOptions, frozen=True, kw_only=True):
    """Options of a store that other or later processes read. A secret may seal its blocks."""

    seal_key: Keys | None = None
    """A secret of the fleet, as text, ``{"file": path}`` or ``{"env": name}``. Blocks made without it are not served.
    If this is a list, the first secret seals and all of them are accepted for reading. Default: none."""
    encryption_key: Keys | None = None
    """Like ``seal_key``, which it replaces, but also encrypts blocks (AES-256-GCM). Default: none."""

    def __repr__(self) -> str:
        # Only options that are known not to be credentials are shown, so a new option is hidden.
        known = {name: getattr(self, name) for name in ("type", "name", "cascade", "threads", "timeout_s")}
        if self.place:
            known["place"] = self.place
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in known.items())})"

    def check(self, block_bytes: int | None = None) -> None:
        problems = Problems()
        with problems:
            StoreOptions.check(self, block_bytes)
        for name in ("seal_key", "encryption_key"):
            with problems:
                check_keys(getattr(self, name), self._called(name))
        if self.seal_key is not None and self.encryption_key is not None:
            problems.add(
                f"The {self.type!r} tier has seal_key and encryption_key; leave out seal_key, because encryption also "
                "seals."
            )
        if (self.seal_key, self.encryption_key) != (None, None):
            with problems:
                require_ciphers()
        problems.raise_found()

    def secret(self, name: str) -> str | None:
        """Return the text of the secret in option ``name``, or ``None`` if the option is not set."""
        value: Secret | None = getattr(self, name)
        return None if value is None else read_secret(value, self._called(name))

    def read_keys(self) -> list[bytes]:
        """Return the secrets of blocks. The first one seals, and all of them open. The list may be empty."""
        if self.encryption_key is not None:
            return [EncryptionKey(key) for key in read_keys(self.encryption_key, self._called("encryption_key"))]
        return read_keys(self.seal_key, self._called("seal_key"))

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        stores, keys = list[BlockStore](), self.read_keys()
        try:
            for secret in keys or (None,):
                stores.append(self._open(block_bytes, namespace, secret))
            self._check_opened(stores[0])
        except BaseException:
            for store in stores:
                store.close()
            raise
        if keys:
            logger.info("Tier %r seals its blocks with the key %s.", self.label, secret_id(keys[0]))
        return Rotating(stores[0], stores[1:]) if len(stores) > 1 else stores[0]

    @abstractmethod
    def _open(self, block_bytes: int, namespace: str, secret: bytes | None) -> BlockStore:
        """Open the store whose blocks ``secret`` seals."""

    def _check_opened(self, store: BlockStore) -> None:
        """Raise ``StoreError``, in one sentence, if ``store`` is required but cannot be used."""
        return

    def _called(self, name: str) -> str:
        return f"{name} of the {self.type!r} tier"


class MemoryOptions(StoreOptions, frozen=True, kw_only=True):
    """``{"type": "memory", "max_bytes": "8GiB"}``: a second tier in host memory, for tests and trials."""

    is_persistent: ClassVar[bool] = False
    medium: ClassVar[str] = "CPU"
    locality: ClassVar[str | None] = "LOCAL"

    max_bytes: int | str | None = None
    """The most bytes in the store, for all namespaces together: a number, or text with a unit. Default: no bound."""

    @property
    def bound_bytes(self) -> int | None:
        return None if self.max_bytes is None else parse_bytes(self.max_bytes, f"max_bytes of the {self.type!r} tier")

    def check(self, block_bytes: int | None = None) -> None:
        StoreOptions.check(self, block_bytes)
        max_bytes = self.bound_bytes
        if max_bytes is not None and block_bytes and max_bytes < block_bytes:
            raise ConfigError(
                f"max_bytes of the 'memory' tier is {max_bytes}, less than one block ({block_bytes}); raise it."
            )

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        return MemoryStore(block_bytes, self.bound_bytes)


STORES: Registry[type[StoreOptions]] = Registry("secondary tier type", "kvoffload.stores")
STORES.register("disk", "kvoffload.tiering.stores.disk.options:DiskOptions")
STORES.register("fs", "kvoffload.tiering.stores.fs.options:FileSystemOptions")
STORES.register("memory", MemoryOptions)
STORES.register("mooncake", "kvoffload.tiering.stores.mooncake.options:MooncakeOptions")
STORES.register("object", "kvoffload.tiering.stores.object.options:ObjectOptions")
STORES.register("redis", "kvoffload.tiering.stores.redis.options:RedisOptions")


ALSO_CALLED = {"fail_fast": "required", "single_writer": "exclusive", "root_dir": "path"}
"""Aliases of keys: two plainer names, and one name that vLLM uses."""
_CASCADES_ALSO_CALLED = {"write_through": "on_store", "write_back": "on_evict"}
_FROM_VLLM = {
    "n_read_threads": "Use threads instead: the number of concurrent reads, and of concurrent writes.",
    "n_write_threads": "Use threads instead: the number of concurrent reads, and of concurrent writes.",
    "io_threads": "Use threads instead, or requests for an 'object' tier.",
    "store_config": "Use url and config instead (docs/fleet.md).",
    "backpressure": "Leave it out, because a tier that cannot keep up drops writes by itself (max_backlog_blocks).",
    "enable_kv_events": "Leave it out, because tiers announce blocks if KV events are on in vLLM.",
    "module_path": "Register the store's options with the entry point kvoffload.stores instead (docs/authors.md).",
}
"""Keys of vLLM's own tiers, with the remedy."""


def parse_tier(options: Mapping[str, Any], block_bytes: int | None = None) -> StoreOptions:
    """Parse and check one entry of ``secondary_tiers``.

    Allocates and touches nothing. Mistakes raise ``ConfigError``.
    """
    name = options.get("type")
    if not isinstance(name, str):
        raise ConfigError(
            f"Each of secondary_tiers needs a 'type', such as 'disk'; this one has only {', '.join(sorted(options))}."
        )
    if name == "obj":
        raise ConfigError(
            "The type of vLLM's 'obj' tier is 'object' in kvoffload, with its location in url (docs/fleet.md)."
        )
    kind, what = STORES.get(name), f"the {name!r} tier"
    given: dict[str, Any] = {}
    for key, value in options.items():
        known = key if key in kind.__struct_fields__ else ALSO_CALLED.get(key, key)
        if known in given or (known != key and known in options):
            raise ConfigError(f"{key} and {known} of {what} are the same key; keep one of them.")
        is_cascade = known == "cascade" and isinstance(value, str)
        given[known] = _CASCADES_ALSO_CALLED.get(value, value) if is_cascade else value
    parsed: StoreOptions = parse_struct(kind, given, what, _FROM_VLLM)
    parsed.check(block_bytes)
    return parsed


def parse_tiers(tiers: Iterable[Mapping[str, Any]], block_bytes: int | None = None) -> tuple[StoreOptions, ...]:
    """Parse and check all of ``secondary_tiers``, and give each tier a unique name.

    Raises ``ConfigError`` for mistakes, and if two tiers share a name or a place.
    """
    problems = Problems()
    parsed: list[StoreOptions] = []
    for tier in tiers:
        with problems:
            parsed.append(parse_tier(tier, block_bytes))
    problems.raise_found()
    for one, other in itertools.combinations(parsed, 2):
        _check_apart(one, other)
    given = Counter(options.name for options in parsed if options.name)
    for name, count in given.items():
        if count > 1:
            raise ConfigError(f"{count} secondary tiers are called {name!r}; give each tier its own name.")
    taken = set(given)
    named: list[StoreOptions] = []
    for options in parsed:
        numbered = (f"{options.type}-{number}" for number in itertools.count(2))
        free = next(name for name in itertools.chain([options.type], numbered) if name not in taken)
        named.append(options if options.name else msgspec.structs.replace(options, name=free))
        taken.add(named[-1].label)
    return tuple(named)


def _check_apart(one: StoreOptions, other: StoreOptions) -> None:
    """Raise ``ConfigError`` if the two tiers would keep their blocks in the same place."""
    if one.directories and other.directories:
        for pair in itertools.product(one.directories, other.directories):
            check_apart(*pair, "Two secondary tiers have")
    elif one.is_persistent and type(one) is type(other):
        own = (name for name in one.__struct_fields__ if name not in StoreOptions.__struct_fields__)
        if all(getattr(one, name) == getattr(other, name) for name in own):
            raise ConfigError(f"Two secondary tiers of type {one.type!r} are the same store; drop one of them.")


def build_tier(
    options: Mapping[str, Any] | StoreOptions,
    primary_kv_view: memoryview,
    namespace: str = "",
    lost: LostBlocks = NO_LOSSES,
    enable_events: bool = False,
) -> SecondaryTierManager:
    """Build the tier of ``options`` over host memory of shape (num_blocks, block_bytes).

    With ``enable_events``, the caller must call the tier's ``take_events``.
    """
    parsed = options if isinstance(options, StoreOptions) else parse_tier(options)
    build = with_options(parsed.build, "lost", "enable_events")
    return build(primary_kv_view, namespace, lost=lost, enable_events=enable_events)
