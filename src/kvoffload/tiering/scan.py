# SPDX-License-Identifier: Apache-2.0
"""The scan of a store, which fills a tier's presence index."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvoffload.base import OffloadKey
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.runner import IoQueue, IoResult, IoStatus, IoTask, TierRunner
from kvoffload.tiering.stores.base import BlockStore

_log = logging.getLogger(__name__)

_KEYS_PER_STEP = 64
"""Keys that a step takes in: a bound on the time of a step."""
_MAX_BATCHES = 64
"""Batches of ``_KEYS_PER_STEP`` keys that wait for steps. A scan that has found more rests until half are taken in."""
_DURATION_SHARE = 4
"""A store is not scanned again before this many times the duration of the last scan."""


class StoreScan:
    """Adds the keys of ``store`` to ``index``, a bounded number in each step.

    The upkeep thread lists the store, and the keys that it finds wait for the scheduler's thread, on which every method
    runs. A scan rests while some thousand keys wait, and the upkeep thread is free meanwhile. A
    store that declares ``rescan_s`` is scanned again and again; blocks that were deleted from outside are forgotten
    then.
    """

    def __init__(
        self, tier_type: str, store: BlockStore, index: PresenceIndex, runner: TierRunner, clock: Callable[[], float]
    ) -> None:
        self._tier_type = tier_type
        self._store = store
        self._index = index
        self._runner = runner
        self._clock = clock
        self._found: deque[Sequence[OffloadKey]] = deque()
        """Batches that wait to be taken in. The upkeep thread appends them."""
        self.num_taken = 0
        """Batches that were taken in."""
        self._budget = _KEYS_PER_STEP
        """Keys that this step may still take in."""
        self._listing: Iterator[bool] | None = None
        """The scan that has not ended. Only the upkeep thread goes on with it."""
        self._rests = False
        self._duration_s = 0.0
        """Without its rests."""
        self._next_s = math.inf
        self._has_ended = False

    @property
    def is_complete(self) -> bool:
        """A scan has ended, and all that was found is in the index."""
        return self._has_ended and not self._found

    def begin(self) -> None:
        """Begins a scan, in place of one that has not ended."""
        self._listing, self._duration_s, self._next_s = self._list_keys(), 0.0, math.inf
        self._index.begin_scan()
        self._resume()

    def step(self) -> list[OffloadKey]:
        """A new step takes in what was found, up to another bounded number of keys. Forgets some of the blocks that the
        last scan did not find, and returns them. Resumes a scan that rests, or begins the next one, when it is time."""
        self._budget = _KEYS_PER_STEP
        if self._found:
            self.take_in()
        gone = [] if self._found else self._index.forget_unseen()
        if self._rests and len(self._found) <= _MAX_BATCHES // 2:
            self._resume()
        elif self._clock() >= self._next_s and not self._found and not self._runner.backlog(IoQueue.UPKEEP):
            self.begin()
        return gone

    def take_in(self) -> None:
        """Adds what was found to the index, as far as the step allows."""
        while self._found and self._budget >= len(self._found[0]):
            batch = self._found.popleft()
            self._index.add(batch)
            self.num_taken += 1
            self._budget -= len(batch)

    def stop(self) -> None:
        """The tier ends, and lets go of what the scan holds."""
        self._listing, self._rests = None, False

    def _resume(self) -> None:
        listing, self._rests = self._listing, False
        assert listing is not None

        def go_on(start: int, stop: int) -> list[bool]:
            for has_keys in listing:
                if not has_keys or len(self._found) >= _MAX_BATCHES or self._runner.is_closing:
                    return [False]
            return [True]

        task = IoTask(IoQueue.UPKEEP, 1, go_on, on_result=lambda result: self._stopped(listing, result))
        self._runner.submit(task, 1)

    def _list_keys(self) -> Iterator[bool]:
        """In the upkeep thread. The keys of the store come in batches small enough for one step. ``False``: the store
        has none for now."""
        for batch in self._store.scan():
            for first in range(0, len(batch), _KEYS_PER_STEP):
                self._found.append(batch[first : first + _KEYS_PER_STEP])
            yield bool(batch)

    def _stopped(self, listing: Iterator[bool], result: IoResult) -> None:
        """It rests, has ended or has failed."""
        if listing is not self._listing:
            return  # another one has begun
        self._duration_s += result.seconds
        if result.status is IoStatus.DONE and not all(result.outcomes):
            self._rests = True
            return
        self._listing = None
        if result.status is IoStatus.DONE:
            self._has_ended = True
            self._index.end_scan()
        elif result.status is IoStatus.FAILED:
            _log.warning(
                "Tier %r could not be scanned, so unknown blocks are asked for: %s", self._tier_type, result.error
            )
        if self._store.rescan_s is not None:
            self._next_s = self._clock() + max(self._store.rescan_s, _DURATION_SHARE * self._duration_s)
