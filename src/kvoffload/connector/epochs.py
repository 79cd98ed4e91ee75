# SPDX-License-Identifier: Apache-2.0
"""Epochs: a reset or an update of weights changes the keys of all blocks, so that no tier finds blocks that were
computed before it."""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvoffload.base import (
    OffloadingEvent,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvoffload.config import OffloadingConfig
from kvoffload.errors import ConfigError
from kvoffload.metrics import Stats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """The time between two resets or updates of weights. Blocks of epochs with different weights have different keys.

    If ``seed`` is empty, the key of a block contains the engine's hash unchanged. Otherwise the hash is masked, byte by
    byte (exclusive or), with a mask derived from ``seed``. So keys keep their length, masking twice restores the hash,
    and keys of two epochs are equal as rarely as two hashes.
    """

    seed: bytes = b""
    is_closed: bool = False
    """New tokens may depend on KV of earlier weights that is still on the GPU, so requests store nothing."""

    def mask(self, block_hash: bytes) -> bytes:
        """Return the form of the engine's hash that keys contain, or restore the hash from that form."""
        if not self.seed:
            return block_hash
        size = len(block_hash)
        return (int.from_bytes(block_hash, "big") ^ _mask(self.seed, size)).to_bytes(size, "big")

    def engine_keys(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys of this epoch with the engine's own hashes. Keys of other epochs become keys that no engine
        knows."""
        return [make_offload_key(self.mask(get_offload_block_hash(key)), get_offload_group_idx(key)) for key in keys]

    def engine_events(self, events: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """Return the events with ``engine_keys``."""
        if not self.seed:
            return list(events)
        return [replace(event, keys=self.engine_keys(event.keys)) for event in events]


FIRST = Epoch()
"""The epoch of an engine whose weights need no name, until the first reset."""

_OWN = b"own\0"
"""The first bytes of the seeds of private epochs."""


@functools.lru_cache(maxsize=16)
def _mask(seed: bytes, size: int) -> int:
    return int.from_bytes(hashlib.shake_256(seed).digest(size), "big")


_MEANINGS = {
    "own": "Older blocks are not found again, in any tier. Only this engine finds its new blocks, until it ends.",
    "named": "Requests find the tiers' blocks of this version, including blocks of other servers.",
    "kept": "Host memory is empty, and the tiers keep their blocks.",
}
"""The kinds of epochs that a reset can start, each with its effect."""
_CLOSED = "Nothing is stored until the engine's own cache is reset, because it contains older blocks."


class Epochs:
    """Holds the ``current`` epoch, and replaces it at a reset by the rule in ``OffloadingConfig.weights_version``.
    Scheduler thread only. The constructor raises ``ConfigError`` for a version that cannot be read.

    ``weights_name`` returns a name for the loaded weights, which is used if the user configured no version. It returns
    an empty text if the weights need no name, and ``None`` while the name is unknown; until then, the epoch is private
    to this engine.
    """

    def __init__(self, config: OffloadingConfig, weights_name: Callable[[], str | None] = str) -> None:
        self._config = config
        self._weights_name = weights_name
        self._version = config.read_weights_version()
        """The last version that was read."""
        seed = self._seed_of(self._version)
        self._is_unnamed = seed is None
        """The epoch is private because the name of the weights is not known yet."""
        self.current = Epoch(_own_seed() if seed is None else seed)
        self._is_unused = False
        """A reset named the current epoch, and no request has computed any token since."""
        self._has_changed = False
        """The weights have changed since they were named ``_version``, so this name cannot be used again."""
        self._used: Epoch | None = None
        """The last epoch in which a request looked up blocks or was admitted."""
        self._before_reset: tuple[Epoch, bool] | None = None
        """The epoch that the last reset ended, with its ``_is_unnamed``, while ``undo_reset`` may restore it."""
        self._counts: dict[str, int] = {}
        self._num_stale_jobs = 0
        self._untaken: list[OffloadingEvent] = []
        """Events of earlier epochs that the engine has not taken."""

    def __repr__(self) -> str:
        return f"Epochs(weights_version={self._version!r}, resets={sum(self._counts.values())})"

    def use(self) -> Epoch:
        """Return the current epoch, for a request that will use its keys."""
        self._is_unused = False
        self._before_reset = None
        self._used = self.current
        return self.current

    @property
    def is_used(self) -> bool:
        """Whether a request has looked up blocks in the current epoch, or was admitted in it. If not, no block uses its
        keys."""
        return self.current is self._used

    def reset(self, events: Iterable[OffloadingEvent] = (), device_is_empty: bool = True) -> None:
        """Start an epoch. ``events`` are the events of the current epoch that the engine has not taken.
        ``device_is_empty``: the engine has dropped all KV; otherwise the new epoch is closed."""
        self._untaken = self.take_events(events)
        try:
            version = self._config.read_weights_version()
        except ConfigError as exc:
            logger.warning("%s", exc)
            self._begin("own", _own_seed(), device_is_empty)
            return
        seed = self._seed_of(version)
        if version == self._version and not self._is_unused and (self._config.reset_tiers or self._has_changed):
            ended = self.current, self._is_unnamed
            self._begin("own", _own_seed(), device_is_empty, version)
            self._before_reset = ended
        elif seed is None or seed == self.current.seed:
            self._begin("kept", self.current.seed, device_is_empty or not self.current.is_closed, version)
        else:
            self._version, self._has_changed = version, False
            self._begin("named", seed, device_is_empty, version)
            self._is_unused = True

    def change(self, events: Iterable[OffloadingEvent] = (), device_is_empty: bool = True) -> None:
        """Start a private epoch, because the weights may have changed and the new ones have no name. Takes the same
        arguments as ``reset``."""
        self._untaken = self.take_events(events)
        self._has_changed, self._is_unnamed, self._before_reset = True, False, None
        if self.current.seed.startswith(_OWN) and not self.is_used:
            # This is another step of the same update. It gets a new seed, because the engine may have been copied in
            # between.
            self.current = Epoch(_own_seed(), is_closed=not device_is_empty)
        else:
            self._begin("own", _own_seed(), device_is_empty)

    def undo_reset(self, events: Iterable[OffloadingEvent] = ()) -> None:
        """Restore the epoch before the last reset, because that reset belonged to an operation that does not change the
        weights. Does nothing if the weights have changed since, or if a request has looked up blocks. ``events`` as for
        ``reset``."""
        self._untaken = self.take_events(events)
        if self._before_reset is not None:
            ended, is_unnamed = self._before_reset
            self._begin("kept", ended.seed, not ended.is_closed)
            self._is_unnamed = is_unnamed

    @property
    def can_be_named(self) -> bool:
        """Whether ``name`` can start an epoch, because the name of the weights has just become known."""
        return self._is_unnamed and self._weights_name() is not None

    def name(self, events: Iterable[OffloadingEvent] = ()) -> None:
        """Start the epoch of the weights' name, in which requests find the blocks of other engines. Call it only if
        ``can_be_named``. ``events`` as for ``reset``."""
        seed = self._seed_of(self._version)
        assert seed is not None
        self._untaken = self.take_events(events)
        self._is_unnamed = False
        self.current = Epoch(seed, self.current.is_closed)
        logger.info("The weights' files are hashed. Requests can now find the tiers' blocks of the same weights.")

    def open(self) -> None:
        """Allow stores in the current epoch, because the engine has dropped all earlier KV."""
        if self.current.is_closed:
            is_used = self.is_used
            self.current = replace(self.current, is_closed=False)
            if is_used:
                self._used = self.current

    def is_over(self, epoch: Epoch) -> bool:
        """Return whether requests of ``epoch`` must not store anything, because their new tokens depend on old
        blocks."""
        return epoch is not self.current or epoch.is_closed

    def take_events(self, events: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """Return the events that ``reset`` kept, followed by ``events`` of the current epoch, all with the engine's own
        hashes."""
        untaken, self._untaken = self._untaken, []
        return untaken + self.current.engine_events(events)

    def job_ended(self, epoch: Epoch) -> None:
        """Count the end of a job that began in ``epoch``."""
        if epoch is not self.current:
            self._num_stale_jobs += 1

    def get_stats(self) -> Stats:
        stats: Stats = {("cache_resets", epoch): count for epoch, count in self._counts.items()}
        if self._num_stale_jobs:
            stats["stale_jobs",] = self._num_stale_jobs
        return stats

    def _seed_of(self, version: str) -> bytes | None:
        if version:
            return b"version\0" + version.encode()
        name = self._weights_name()
        return None if name is None else b"weights\0" + name.encode() if name else FIRST.seed

    def _begin(self, kind: str, seed: bytes, device_is_empty: bool, version: str = "") -> None:
        self._is_unnamed &= kind == "kept"
        self._before_reset = None
        self.current = Epoch(seed, is_closed=not device_is_empty)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        name = f", weights_version {version!r}" if version else ""
        meaning = _MEANINGS[kind] if device_is_empty else f"{_MEANINGS[kind]} {_CLOSED}"
        logger.info("Cache reset %d: %s epoch%s. %s", sum(self._counts.values()), kind, name, meaning)


def _own_seed() -> bytes:
    return _OWN + secrets.token_bytes(16)
