# SPDX-License-Identifier: Apache-2.0
"""The reads of one tier: the outstanding ones, the speed of earlier ones, and the expected end of a new one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from math import inf
from statistics import median

from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.speeds import AnswerEstimator, LinkSpeedEstimator
from kvoffload.tiering.worth import Pace

LATE = 1.25
"""A read is late once it has taken this many times as long as expected. Estimates of undisturbed reads differ by
less."""
_ORDER = 7
"""Number of reads whose times, each measured from the end of the previous read, show whether a tier ends reads one by
one. If a tier reads several in parallel, the first one takes as long as all of them."""


class Link:
    """Measures one tier by its own reads. It uses the time of ``clock``, and one thread.

    The calls for each job are ``begin`` (queued), ``submit`` and ``end``, or ``drop`` before its submit. A read that
    its tier reports as overdue is skipped: no request waits for its blocks, and the reads after it are expected as if
    it did not exist. It does not count as a sample once a later read has ended, or has begun while all others were
    overdue. The link notices that a read is overdue once that read is the oldest, so no call lists all reads.
    """

    def __init__(self, name: str, expected: Pace | None, clock: Callable[[], float]):
        self.name = name
        self._clock = clock
        self.estimator = LinkSpeedEstimator(clock, expected)
        self.answers = AnswerEstimator()
        self._ratios: deque[float] = deque(maxlen=_ORDER)
        """The ratios of actual to expected time for the last reads."""
        self._usual = 1.0
        """The median of these ratios, but at least 1."""
        self.num_begun = 0
        """Number of blocks of all reads so far."""
        self.num_outstanding = 0
        """Number of blocks of reads that were begun and have not ended, including overdue ones."""
        self._num_skipped = 0
        """Number of these blocks that belong to overdue reads."""
        self._due: OrderedDict[JobMetadata, int] = OrderedDict()
        """Reads that the tier has not ended, oldest first, with their numbers."""
        self._overdue: dict[JobMetadata, int] = {}
        """The same for reads that were the oldest when they were found to be overdue."""
        self._busy_since_s = self._last_end_s = 0.0
        """The time since which the tier has been reading, or at which it last ended a read; and the time at which the
        last read ended."""
        self._num_ended = 0
        """Number of blocks read since then."""
        self._num_reads = self._first_counted = 0
        """Number of reads so far, and the number of the oldest read whose time counts even if it is overdue."""

    def __repr__(self) -> str:
        return f"Link({self.name!r}, {self.estimator.speed}, outstanding={self.num_outstanding})"

    @property
    def speed(self) -> Pace | None:
        """The tier's pace; ``None`` if it was never measured and no pace was expected."""
        return self.estimator.speed

    @property
    def num_due(self) -> int:
        """Number of blocks that were begun and have not ended, without the blocks of overdue reads."""
        self._oldest()
        return self.num_outstanding - self._num_skipped

    def _oldest(self) -> JobMetadata | None:
        """Return the oldest read that is not overdue."""
        while self._due:
            read = next(iter(self._due))
            if not read.is_overdue:
                return read
            self._overdue[read] = self._due.pop(read)
            self._num_skipped += len(read.keys)
        return None

    def begin(self, num_blocks: int) -> int:
        """Note that blocks will be read. Returns ``num_begun``, by which the caller finds their place in the queue."""
        self.num_outstanding += num_blocks
        self.num_begun += num_blocks
        return self.num_begun

    def drop(self, num_blocks: int) -> None:
        self.num_outstanding -= num_blocks

    def submit(self, read: JobMetadata) -> None:
        """Note that a promotion's job was submitted to the tier."""
        self._num_reads += 1
        if self._oldest() is None:
            self._busy_since_s, self._num_ended, self._first_counted = self._clock(), 0, self._num_reads
        self._due[read] = self._num_reads

    def end(self, read: JobMetadata, num_read: int, ended_s: float | None) -> None:
        """Note the end of a read, at ``ended_s`` if the tier knows the time; ``num_read`` of its blocks arrived.
        ``measure`` adds the sample, because reads that are seen to end together were read in parallel."""
        self.num_outstanding -= len(read.keys)
        number = self._due.pop(read, None)
        if number is None:
            number = self._overdue.pop(read)
            self._num_skipped -= len(read.keys)
        if read.is_overdue and number < self._first_counted:
            return
        self._first_counted = max(self._first_counted, number)
        self._num_ended += num_read
        now_s = self._clock()
        end_s = max(self._last_end_s, now_s if ended_s is None else min(ended_s, now_s))
        if self.speed is not None and num_read:
            self._ratios.append((end_s - self._reading_since_s) / max(self.speed.seconds(len(read.keys)), 1e-9))
            self._usual = max(1.0, median(self._ratios))
        self._last_end_s = end_s

    def measure(self) -> bool:
        """Add a sample of the reads that have ended, after all of them were recorded. Returns whether they show the
        tier's speed."""
        if self._last_end_s <= self._busy_since_s:
            return False
        num_ended = self._num_ended
        if num_ended and self.estimator.add(num_ended, self._last_end_s - self._busy_since_s):
            self._ratios.clear()
            self._usual = 1.0
        self._num_ended, self._busy_since_s = 0, self._last_end_s
        return num_ended > 0

    @property
    def _reading_since_s(self) -> float:
        """Return the time since which the oldest read has been in progress."""
        return max(self._busy_since_s, self._last_end_s)

    def _expected_s(self, read: JobMetadata) -> float:
        """Return the time that ``read``, the oldest, may take before it is late."""
        assert self.speed is not None
        return self._usual * max(self.speed.seconds(len(read.keys)), 1e-9)

    def slowdown(self) -> float:
        """Return the current ratio of actual to expected time per block. It exceeds 1 while the oldest read is late,
        because that read is expected to be late by the same amount again."""
        oldest = self._oldest()
        if oldest is None or self.speed is None:
            return 1.0
        usual_s, elapsed_s = self._expected_s(oldest), self._clock() - self._reading_since_s
        if elapsed_s <= LATE * usual_s:
            return 1.0
        return (2 * elapsed_s - usual_s) / max(self.speed.seconds(len(oldest.keys)), 1e-9)

    def late_s(self) -> float:
        """Return the number of seconds until the oldest read is late; ``inf`` if there are no reads."""
        oldest = self._oldest()
        if oldest is None or self.speed is None:
            return inf
        return LATE * self._expected_s(oldest) - (self._clock() - self._reading_since_s)

    def queue_s(self) -> float:
        """Return the number of seconds until all due blocks have arrived. A late read is expected to be late by the
        same amount again, and the blocks queued after it are expected to be slower by the same factor."""
        num_due, oldest = self.num_due, self._oldest()
        if not num_due or self.speed is None:
            return 0.0
        elapsed_s = self._clock() - self._reading_since_s if oldest is not None else 0.0
        if oldest is not None and (slowdown := self.slowdown()) > 1:
            num_first = len(oldest.keys)
            return slowdown * (self.speed.seconds(num_first) + self.speed.block_s * (num_due - num_first)) - elapsed_s
        return abs(self.speed.seconds(num_due) - elapsed_s)

    def behind_s(self, begun: int) -> float:
        """Return the part of ``queue_s`` that is due to the blocks that were begun after the first ``begun`` ones."""
        return 0.0 if self.speed is None else (self.num_begun - begun) * self.speed.block_s * self.slowdown()

    def check_invariants(self, num_outstanding: int, num_reading: int) -> None:
        """Check the counts: ``num_outstanding`` blocks are being promoted, and the tier reads ``num_reading`` of
        them."""
        assert self.num_outstanding == num_outstanding
        assert sum(len(read.keys) for read in (*self._due, *self._overdue)) == num_reading
        assert self._num_skipped == sum(len(read.keys) for read in self._overdue)
