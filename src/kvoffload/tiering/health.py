# SPDX-License-Identifier: Apache-2.0
"""Track whether a tier's store can be read and written, from failures, hanging calls and probes."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

from kvoffload.base import OffloadKey
from kvoffload.errors import causes, errno_of, text_of
from kvoffload.metrics import Sample, Stats
from kvoffload.tiering.circuit_breaker import CircuitBreaker
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.runner import READS, IoQueue, IoResult, IoStatus, TierRunner

_log = logging.getLogger(__name__)

_PROBED_BLOCKS = 3
"""The number of blocks for which a probe asks. One readable block is enough."""


class StoreHealth:
    """A circuit breaker for a store's reads or its writes. Each direction has one, because a full disk is still
    readable.

    It opens if calls keep failing, or if half of their threads hang. (One hung read does not disable a tier.) Then all
    queued calls are cancelled. Successful lookups do not hide that every load fails. One thread.
    """

    def __init__(
        self, tier_type: str, direction: Literal["read", "write"], runner: TierRunner, clock: Callable[[], float]
    ) -> None:
        self._labels = tier_type, direction
        self._queues = READS if direction == "read" else (IoQueue.STORE,)
        self._runner = runner
        self.breaker = CircuitBreaker("reading" if direction == "read" else "writing", clock=clock)
        self._failed_transfers = 0
        """The number of stores, or of loads and read probes, that failed in a row."""
        self._failed_keys: Sequence[OffloadKey] = ()
        """The blocks of the last failed call."""
        self._num_probes = self._num_trips = 0
        self._last_trips_s: dict[str, float] = {}
        """The Unix time at which the breaker was last opened or kept open, for each reason."""
        self._reason = self._why_off = ""
        """The reason why the breaker is open or was last open, as one word and as a text for people."""

    # ------------------------------------------------------------------------------------------ calls of the store

    def record(self, result: IoResult) -> None:
        """Record that a call of the store has ended, was cancelled before it started, or is overdue.

        If an overdue call returns after all, its end is recorded with another call of this method.
        """
        if result.task.queue is not IoQueue.LOOKUP and result.status in (IoStatus.DONE, IoStatus.FAILED):
            self._failed_transfers = self._failed_transfers + 1 if result.status is IoStatus.FAILED else 0
        match result.status:
            case IoStatus.DONE if self._failed_transfers:  # a lookup, which proves nothing about loads
                if self.breaker.is_closed:
                    self.breaker.failures = min(self.breaker.failures, self._failed_transfers)
            case IoStatus.DONE:
                if self.breaker.failures and self.breaker.record_success():
                    self._warn("is used for %s again. It was off: %s", self._why_off)
            case IoStatus.FAILED:
                self._failed_keys = result.keys or self._failed_keys
                assert result.error is not None, "a failed call has an error"
                self.record_failure(_reason_of(result.error), text_of(result.error))
            case IoStatus.CANCELLED:
                self.breaker.cancel_probe()
            case IoStatus.OVERDUE:
                self._record_hang()

    def _record_hang(self) -> None:
        _log.warning(
            "Tier %r: a call for %s has been running for more than %g s; its thread is lost until it returns.",
            self._labels[0],
            self.breaker.name,
            self._runner.timeout_s,
        )
        if self._too_many_hang():
            self.record_failure("hang", "Too many calls hang.", is_grave=True)
        elif not self.breaker.is_closed:
            # The hanging call may be the probe, and no other probe is due until it ends.
            self.record_failure("hang", "A probe hangs.")

    def record_failure(self, reason: str, text: str, *, is_grave: bool = False) -> None:
        """Record that a call failed. A grave failure opens the breaker at once.

        ``reason`` is one word, and ``text`` explains the failure to people.
        """
        if self.breaker.record_failure(is_grave=is_grave):
            self._num_trips += 1
            self._warn("is not used for %s until it recovers: %s", text)
            # Queued slices would only fail one by one, and would hold slots until then.
            self._runner.cancel_queued(*self._queues)
        elif self.breaker.is_closed or reason == self._reason:
            return
        else:
            self._warn("is still not used for %s: %s", text)
        self._reason, self._why_off = reason, text
        self._last_trips_s[reason] = time.time()

    def _warn(self, message: str, why: str) -> None:
        _log.warning(f"Tier %r {message}", self._labels[0], self.breaker.name, why)

    def _too_many_hang(self) -> bool:
        return 2 * self._runner.num_overdue(self._queues) >= self._runner.num_threads

    # ------------------------------------------------------------------------------------------------------ probes

    def begin_probe(self) -> bool:
        """Return whether the breaker is open and a probe is due. If so, the caller makes one and records its end."""
        # Hanging calls serve as probes, and no other thread is risked before they return.
        return not self.breaker.is_closed and not self._too_many_hang() and self.breaker.begin_probe()

    def keys_to_probe(self, index: PresenceIndex) -> list[OffloadKey]:
        """Return a few blocks for a probe, different ones each time and none from the last failed call."""
        self._num_probes += 1
        return index.sample(_PROBED_BLOCKS, self._num_probes - 1, self._failed_keys) or [OffloadKey(b"probe")]

    # ----------------------------------------------------------------------------------------------------- metrics

    def stats(self) -> Stats:
        stats: dict[Sample, float] = {
            ("tier_breaker_open", *self._labels): int(not self.breaker.is_closed),
            ("tier_breaker_trips", *self._labels): self._num_trips,
        }
        for reason, at_s in self._last_trips_s.items():
            stats["tier_breaker_last_trip_timestamp_seconds", *self._labels, reason] = at_s
        return stats


def _reason_of(error: BaseException) -> str:
    """Return one of a few words for a failure: the name of its errno, or the class of its first cause."""
    if (number := errno_of(error)) is not None:
        return errno.errorcode[number]
    *_, first = causes(error)
    return type(first).__name__
