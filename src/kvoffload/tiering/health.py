# SPDX-License-Identifier: Apache-2.0
"""Whether a tier's store is fit for reading, and whether for writing: failures, calls that hang, probes."""

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
"""Blocks that a probe asks for. One that can be read is enough."""


class StoreHealth:
    """A circuit breaker over a store's reads or its writes. Each has its own, as a full disk can still be read.

    It opens when calls keep failing, and when half of the threads for them hang: one hung read does not disable a tier.
    Then all that is queued is cancelled. Lookups that succeed do not hide that every load fails. One thread.
    """

    def __init__(
        self, tier_type: str, direction: Literal["read", "write"], runner: TierRunner, clock: Callable[[], float]
    ) -> None:
        self._labels = tier_type, direction
        self._queues = READS if direction == "read" else (IoQueue.STORE,)
        self._runner = runner
        self.breaker = CircuitBreaker("reading" if direction == "read" else "writing", clock=clock)
        self._failed_transfers = 0
        """Loads, probes of reading included, or stores that failed in a row."""
        self._failed_keys: Sequence[OffloadKey] = ()
        """The blocks of the call that failed last."""
        self._num_probes = self._num_trips = 0
        self._last_trips_s: dict[str, float] = {}
        """When the breaker was last opened, or kept open, for each reason; in Unix time."""
        self._reason = self._why_off = ""
        """Why the breaker is open, or was last: in one word, and for people."""

    # ------------------------------------------------------------------------------------------ calls of the store

    def record(self, result: IoResult) -> None:
        """A call of the store has ended, was cancelled before it began, or is overdue: then its end follows, if it
        returns after all."""
        if result.task.queue is not IoQueue.LOOKUP and result.status in (IoStatus.DONE, IoStatus.FAILED):
            self._failed_transfers = self._failed_transfers + 1 if result.status is IoStatus.FAILED else 0
        match result.status:
            case IoStatus.DONE if self._failed_transfers:  # a lookup, which shows nothing of loads
                if self.breaker.is_closed:
                    self.breaker.failures = min(self.breaker.failures, self._failed_transfers)
            case IoStatus.DONE:
                if self.breaker.failures and self.breaker.record_success():
                    self._warn("is used for %s again. It was off: %s", self._why_off)
            case IoStatus.FAILED:
                self._failed_keys = result.keys or self._failed_keys
                assert result.error is not None, "what has failed has raised"
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
            # It may be the probe, without whose end no other is due.
            self.record_failure("hang", "A probe hangs.")

    def record_failure(self, reason: str, text: str, *, is_grave: bool = False) -> None:
        """A call failed for ``reason``, one word, and ``text``, which is for people. A grave failure opens the breaker
        at once."""
        if self.breaker.record_failure(is_grave=is_grave):
            self._num_trips += 1
            self._warn("is not used for %s until it recovers: %s", text)
            # Queued slices would only fail one by one, and meanwhile hold slots.
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
        """Whether the breaker is open and a probe is due. If so, the caller makes one and records its end."""
        # Calls that hang are their own probe: no other thread is risked before they return.
        return not self.breaker.is_closed and not self._too_many_hang() and self.breaker.begin_probe()

    def keys_to_probe(self, index: PresenceIndex) -> list[OffloadKey]:
        """A few blocks other than those that failed last, and others for each probe."""
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
    """One of few words for a failure, without any of its text: an errno's name, or the class."""
    if (number := errno_of(error)) is not None:
        return errno.errorcode[number]
    *_, first = causes(error)
    return type(first).__name__
