# SPDX-License-Identifier: Apache-2.0
"""Epochs: a reset, or an update of weights, makes the keys of all blocks others, so that no tier finds what was
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
"""The epoch of an engine whose weights need no name, until it is reset."""

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
    rule). The constructor raises ``ConfigError`` for a version that cannot be read. Scheduler thread only.

    ``weights_name`` returns a name of the weights that the engine has loaded, which counts if the user gave them no
    version: empty if none is needed, and ``None`` while it is not known. Until then the epoch is the engine's own.
    """

    def __init__(self, config: OffloadingConfig, weights_name: Callable[[], str | None] = str) -> None:
        self._config = config
        self._weights_name = weights_name
        self._version = config.read_weights_version()
        """The version that was read last."""
        seed = self._seed_of(self._version)
        self._is_unnamed = seed is None
        """The epoch is the engine's own because the name of the weights is not known yet."""
        self.current = Epoch(_own_seed() if seed is None else seed)
        self._is_unused = False
        """A reset named the current epoch, and no request has computed anything since."""
        self._has_changed = False
        """The weights have changed since ``_version`` was given to them, which names no others."""
        self._used: Epoch | None = None
        """The last one in which a request looked for its blocks, or was admitted."""
        self._before_reset: tuple[Epoch, bool] | None = None
        """The epoch that a reset ended, and its ``_is_unnamed``, while ``undo_reset`` may bring it back."""
        self._counts: dict[str, int] = {}
        self._num_stale_jobs = 0
        self._untaken: list[OffloadingEvent] = []
        """Events of earlier epochs."""

    def __repr__(self) -> str:
        return f"Epochs(weights_version={self._version!r}, resets={sum(self._counts.values())})"

    def use(self) -> Epoch:
        """The current epoch, for a request whose blocks are to have its keys."""
        self._is_unused = False
        self._before_reset = None
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
        """Weights may have changed, and nobody has said which they are now: begins an epoch of the engine's own.
        Arguments as for ``reset``."""
        self._untaken = self.take_events(events)
        self._has_changed, self._is_unnamed, self._before_reset = True, False, None
        if self.current.seed.startswith(_OWN) and not self.is_used:
            # One more step of the same update. With a seed of its own: the engine may have been copied in between.
            self.current = Epoch(_own_seed(), is_closed=not device_is_empty)
        else:
            self._begin("own", _own_seed(), device_is_empty)

    def undo_reset(self, events: Iterable[OffloadingEvent] = ()) -> None:
        """The last reset was a part of something that leaves the weights alone, so it need not have emptied the tiers.
        Does nothing if the weights have changed since, or a request has looked for its blocks. ``events`` as for
        ``reset``."""
        self._untaken = self.take_events(events)
        if self._before_reset is not None:
            ended, is_unnamed = self._before_reset
            self._begin("kept", ended.seed, not ended.is_closed)
            self._is_unnamed = is_unnamed

    @property
    def can_be_named(self) -> bool:
        """Whether ``name`` would begin an epoch: the name of the weights was unknown until now."""
        return self._is_unnamed and self._weights_name() is not None

    def name(self, events: Iterable[OffloadingEvent] = ()) -> None:
        """Begins the epoch of the weights' name, in which the blocks of other engines are found. Call it if
        ``can_be_named``; ``events`` as for ``reset``."""
        seed = self._seed_of(self._version)
        assert seed is not None
        self._untaken = self.take_events(events)
        self._is_unnamed = False
        self.current = Epoch(seed, self.current.is_closed)
        logger.info("The weights' files are hashed. The tiers' blocks of the same weights are found from now on.")

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
