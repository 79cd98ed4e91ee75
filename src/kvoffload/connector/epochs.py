# SPDX-License-Identifier: Apache-2.0
"""Epochs: a reset, or an update of weights, makes the keys of all blocks others, so that no tier finds what was
computed before it."""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
from collections.abc import Iterable
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
    """The time between two resets or updates of weights. Blocks of epochs with other weights have other keys.

    The key of a block has the engine's hash as it is if ``seed`` is empty. Otherwise the hash is masked, byte by byte
    (exclusive or), with a mask made of ``seed``. So keys keep their length, masking twice gives the hash again, and
    keys of two epochs are equal as rarely as two hashes are.
    """

    seed: bytes = b""
    is_closed: bool = False
    """What requests compute may rest on KV of earlier weights that the device has kept, so they store nothing."""

    def mask(self, block_hash: bytes) -> bytes:
        """The engine's hash as keys have it, and back."""
        if not self.seed:
            return block_hash
        size = len(block_hash)
        return (int.from_bytes(block_hash, "big") ^ _mask(self.seed, size)).to_bytes(size, "big")

    def engine_keys(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Keys of this epoch with the engine's own hashes. Those of other epochs become keys that no engine knows."""
        return [make_offload_key(self.mask(get_offload_block_hash(key)), get_offload_group_idx(key)) for key in keys]

    def engine_events(self, events: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """Events with ``engine_keys``."""
        if not self.seed:
            return list(events)
        return [replace(event, keys=self.engine_keys(event.keys)) for event in events]


FIRST = Epoch()
"""Of an engine without a ``weights_version``, until it is reset."""

_OWN = b"own\0"
"""How the seeds begin of epochs that nobody else knows."""


@functools.lru_cache(maxsize=16)
def _mask(seed: bytes, size: int) -> int:
    return int.from_bytes(hashlib.shake_256(seed).digest(size), "big")


_MEANINGS = {
    "own": "No older block is found again, in any tier; new ones are found by this engine alone, until it ends.",
    "named": "In the tiers blocks of this version are found, those of other servers too.",
    "kept": "Host memory is empty, and the tiers keep their blocks.",
}
"""What a reset may begin, and what it means."""
_CLOSED = "Nothing is stored until a reset of the engine's own cache succeeds, since it has blocks of before."


class Epochs:
    """The ``current`` epoch, and the one that a reset puts in its place (``OffloadingConfig.weights_version`` has the
    rule). The constructor raises ``ConfigError`` for a version that cannot be read. Scheduler thread only."""

    def __init__(self, config: OffloadingConfig) -> None:
        self._config = config
        self._version = config.read_weights_version()
        """What was read last."""
        self.current = Epoch(_seed_of(self._version))
        self._is_unused = False
        """A reset named the current epoch, and no request has computed anything since."""
        self._has_changed = False
        """The weights have changed since ``_version`` was given to them, which names no others."""
        self._used: Epoch | None = None
        """The last one in which a request looked for its blocks, or was admitted."""
        self._counts: dict[str, int] = {}
        self._num_stale_jobs = 0
        self._untaken: list[OffloadingEvent] = []
        """Events of earlier epochs."""

    def __repr__(self) -> str:
        return f"Epochs(weights_version={self._version!r}, resets={sum(self._counts.values())})"

    def use(self) -> Epoch:
        """The current epoch, for a request whose blocks are to have its keys."""
        self._is_unused = False
        self._used = self.current
        return self.current

    @property
    def is_used(self) -> bool:
        """Whether a request has looked for blocks in the current epoch, or was admitted in it. If not, no block has
        its keys."""
        return self.current is self._used

    def reset(self, events: Iterable[OffloadingEvent] = (), device_is_empty: bool = True) -> None:
        """Begins an epoch. ``events``: those of the current one that the engine has not taken. ``device_is_empty``: the
        engine has forgotten all that it had computed; otherwise the epoch is closed."""
        self._untaken = self.take_events(events)
        try:
            version = self._config.read_weights_version()
        except ConfigError as exc:
            logger.warning("%s", exc)
            self._begin("own", _own_seed(), device_is_empty)
            return
        seed = _seed_of(version)
        if version == self._version and not self._is_unused and (self._config.reset_tiers or self._has_changed):
            self._begin("own", _own_seed(), device_is_empty, version)
        elif seed == self.current.seed:
            self._begin("kept", seed, device_is_empty or not self.current.is_closed, version)
        else:
            self._version, self._has_changed = version, False
            self._begin("named", seed, device_is_empty, version)
            self._is_unused = True

    def change(self, events: Iterable[OffloadingEvent] = (), device_is_empty: bool = True) -> None:
        """Weights may have changed, and nobody has said which they are now: begins an epoch of the engine's own.
        Arguments as for ``reset``."""
        self._untaken = self.take_events(events)
        self._has_changed = True
        if self.current.seed.startswith(_OWN) and not self.is_used:
            # One more step of the same update. With a seed of its own: the engine may have been copied in between.
            self.current = Epoch(_own_seed(), is_closed=not device_is_empty)
        else:
            self._begin("own", _own_seed(), device_is_empty)

    def open(self) -> None:
        """The engine has forgotten what it had computed, so blocks of the current epoch may be stored."""
        if self.current.is_closed:
            is_used = self.is_used
            self.current = replace(self.current, is_closed=False)
            if is_used:
                self._used = self.current

    def is_over(self, epoch: Epoch) -> bool:
        """Whether requests of ``epoch`` store nothing more, since what they compute rests on what they have."""
        return epoch is not self.current or epoch.is_closed

    def take_events(self, events: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """``events``, which are of the current epoch, after those that ``reset`` kept, with the engine's own hashes."""
        untaken, self._untaken = self._untaken, []
        return untaken + self.current.engine_events(events)

    def job_ended(self, epoch: Epoch) -> None:
        """A job ended that had begun in ``epoch``."""
        if epoch is not self.current:
            self._num_stale_jobs += 1

    def get_stats(self) -> Stats:
        stats: Stats = {("cache_resets", epoch): count for epoch, count in self._counts.items()}
        if self._num_stale_jobs:
            stats["stale_jobs",] = self._num_stale_jobs
        return stats

    def _begin(self, kind: str, seed: bytes, device_is_empty: bool, version: str = "") -> None:
        self.current = Epoch(seed, is_closed=not device_is_empty)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        name = f", weights_version {version!r}" if version else ""
        meaning = _MEANINGS[kind] if device_is_empty else f"{_MEANINGS[kind]} {_CLOSED}"
        logger.info("Cache reset %d: %s epoch%s. %s", sum(self._counts.values()), kind, name, meaning)


def _seed_of(version: str) -> bytes:
    return b"version\0" + version.encode() if version else FIRST.seed


def _own_seed() -> bytes:
    return _OWN + secrets.token_bytes(16)
