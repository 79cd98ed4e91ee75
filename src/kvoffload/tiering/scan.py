# SPDX-License-Identifier: Apache-2.0
"""Scan a store to fill a tier's presence index."""

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
"""The most keys that one step adds to the index, to bound the time of a step."""
_MAX_BATCHES = 64
"""The number of waiting batches of ``_KEYS_PER_STEP`` keys at which a scan pauses, until steps have added half of
them."""
_DURATION_SHARE = 4
"""The pause between two scans is at least this many times the duration of the last scan."""


class StoreScan:
    """Adds the keys of ``store`` to ``index``, a bounded number in each step.

    The upkeep thread lists the store. The keys that it finds wait for the scheduler's thread, on which every method
    runs. A scan pauses while a few thousand keys wait, which leaves the upkeep thread free. A store that declares
    ``rescan_s`` is scanned periodically, so that the index forgets blocks that another program deleted.
    """

    def __init__(
        self,
        tier_type: str,
        store: BlockStore,
        index: PresenceIndex,
        runner: TierRunner,
        clock: Callable[[], float],
        on_found: Callable[[Sequence[OffloadKey]], object] = lambda keys: None,
    ) -> None:
        """``on_found`` is called with each batch of keys that was taken in."""
        self._tier_type = tier_type
        self._store = store
        self._index = index
        self._runner = runner
        self._clock = clock
        self._found: deque[Sequence[OffloadKey]] = deque()
        """Batches that wait to be added to the index. The upkeep thread appends them."""
        self._on_found = on_found
        self._budget = _KEYS_PER_STEP
        """The number of keys that this step may still add."""
        self._listing: Iterator[bool] | None = None
        """The scan in progress, or ``None``. Only the upkeep thread advances it."""
        self._rests = False
        self._duration_s = 0.0
        """The duration of the scan so far, without pauses."""
        self._next_s = math.inf
        self._has_ended = False

    @property
    def is_complete(self) -> bool:
        """Whether a scan has ended and all keys that it found are in the index."""
        return self._has_ended and not self._found

    def begin(self) -> None:
        """Start a scan. It replaces a scan that has not ended."""
        self._listing, self._duration_s, self._next_s = self._list_keys(), 0.0, math.inf
        self._index.begin_scan()
        self._resume()

    def step(self) -> list[OffloadKey]:
        """Start a new step: add a bounded number of found keys, and return blocks that the index has forgotten.

        These are some of the blocks that the last scan did not find. If it is time, this also resumes a paused scan or
        starts the next one.
        """
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
        """Add found keys to the index, as far as the step's budget allows."""
        while self._found and self._budget >= len(self._found[0]):
            batch = self._found.popleft()
            self._index.add(batch)
            self._on_found(batch)
            self._budget -= len(batch)

    def stop(self) -> None:
        """Stop scanning, and release the scan's iterator, because the tier shuts down."""
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
        """List the store's keys on the upkeep thread, in batches small enough for one step.

        Yields whether the store had keys; ``False`` means that it has none at the moment.
        """
        for batch in self._store.scan():
            for first in range(0, len(batch), _KEYS_PER_STEP):
                self._found.append(batch[first : first + _KEYS_PER_STEP])
            yield bool(batch)

    def _stopped(self, listing: Iterator[bool], result: IoResult) -> None:
        """Handle the end of an upkeep task: the scan pauses, has ended or has failed."""
        if listing is not self._listing:
            return  # another scan has started
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
                "Tier %r could not be scanned, so kvoffload asks it for unknown blocks: %s",
                self._tier_type,
                result.error,
            )
        if self._store.rescan_s is not None:
            self._next_s = self._clock() + max(self._store.rescan_s, _DURATION_SHARE * self._duration_s)
