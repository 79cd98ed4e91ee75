# SPDX-License-Identifier: Apache-2.0
"""Record the blocks that a tier's store lost, and the causes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

from kvoffload.base import OffloadKey
from kvoffload.logs import RateLimitedLog
from kvoffload.lost_blocks import LostBlocks
from kvoffload.miss import Miss
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.stores.base import BlockStore, LossCause

_log = logging.getLogger(__name__)

_KEYS_AT_ONCE = 256
_KEYS_PER_STEP = 1024
"""The number of losses that a step handles. A failed disk loses a quarter of a million blocks at once."""
_SHARE = 64
"""If more losses wait, a step handles at least one in this many, so that they do not pile up however fast a disk
evicts."""


class StoreLosses:
    """Removes the blocks that ``store`` lost from ``index``, and records them in ``lost``.

    If ``server_evicts`` is true, a block that the server no longer has counts as evicted. All methods except ``queue``
    run on the scheduler's thread.
    """

    def __init__(
        self,
        tier_type: str,
        store: BlockStore,
        index: PresenceIndex,
        lost: LostBlocks,
        *,
        server_evicts: bool,
        clock: Callable[[], float],
    ) -> None:
        self._tier_type = tier_type
        self._store = store
        self._index = index
        self._lost = lost
        self._server_evicts = server_evicts
        self._queued: deque[tuple[LossCause, Sequence[OffloadKey]]] = deque()
        self._left = _KEYS_PER_STEP
        """The number of losses that this step may still handle."""
        self._num_corrupt = 0
        self._corruption_log = RateLimitedLog(_log, clock=clock)

    def queue(self) -> None:
        """Queue the blocks that the store has lost for ``take_in``.

        Call this on any thread after a call of the store.
        """
        lost = self._store.take_lost()
        for cause in dict.fromkeys(lost.values()):
            keys = [key for key in lost if lost[key] == cause]
            for first in range(0, len(keys), _KEYS_AT_ONCE):
                self._queued.append((cause, keys[first : first + _KEYS_AT_ONCE]))

    def begin_step(self) -> None:
        """Start a new step with a new budget."""
        self._left = max(_KEYS_PER_STEP, len(self._queued) * _KEYS_AT_ONCE // _SHARE)

    def take_in(self) -> None:
        """Handle queued losses, as far as the step's budget allows."""
        while self._queued and self._left > 0:
            cause, keys = self._queued.popleft()
            self._left -= len(keys)
            self._index.remove(keys)
            self.record(keys, cause)
            if cause == "corrupt":
                self._num_corrupt += len(keys)
                self._corruption_log.warning(
                    f"Tier {self._tier_type!r} found corrupt blocks, {self._num_corrupt} since startup; each is "
                    f"a miss. The last one is {keys[-1].hex()} in {self._store!r}."
                )

    def forget(self, missing: Sequence[OffloadKey]) -> None:
        """Remove blocks that the store lacks from the index, so that the next lookup asks the store."""
        if not self._index.is_exact:  # an exact index no longer contains blocks that the store itself lost
            self.record([key for key in missing if key in self._index], "removed")
        self._index.remove(missing)

    def record(self, keys: Collection[OffloadKey], cause: LossCause) -> None:
        if cause == "removed" and self._server_evicts:
            cause = "evicted"
        self._lost.record(keys, Miss.of(cause) or Miss.UNKNOWN, self._tier_type)
