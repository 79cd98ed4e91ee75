# SPDX-License-Identifier: Apache-2.0
"""Blocks that go down on their way out of the primary tier, before they have to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.primary import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.tier_jobs import EndedJob, GuardedTier

__all__ = ["WriteBehind"]

_MOST_WATCHED = 4096
_PER_STEP = 512
_PER_JOB = 64
_STEPS_TO_FIND_OUT = 4
_MOST_SKIPPED = 15
_TOLERATED = 0.05

Send = Callable[[GuardedTier, Sequence[OffloadKey], ReqContext], None]


class _Below:
    """What is known of one tier: which blocks of the primary tier it has, and which it should get."""

    __slots__ = ("dropped", "in_flight", "looks_to_skip", "queue", "settled", "skipped", "tier")

    def __init__(self, tier: GuardedTier) -> None:
        self.tier = tier
        self.in_flight = 0
        self.looks_to_skip = self.skipped = 0
        self.settled: dict[OffloadKey, int] = {}
        """Blocks of the primary tier that are below or on their way there, and the look that saw them last."""
        self.queue: dict[OffloadKey, int] = {}
        """Blocks to write, the first to be evicted first, with the steps left to find out whether they are below."""
        self.dropped = 0


class WriteBehind:
    """Watches the blocks that the primary tier would evict next, and has those written that a tier lacks.

    *Watched* are the blocks that the next ``window`` reservations would evict. They are looked at when a quarter of the
    window was reserved since the last look, sooner if blocks were evicted that had not been written; a step without
    reservations costs nothing. The window is 1/32 of the primary tier, since what is written too early is below while
    it is still above. It doubles, up to half of the tier and 4096 blocks, while more than 5 % of what is reserved
    comes too soon for it, and shrinks again slowly.

    A block is written once as long as it stays watched; one that comes back to the window later is asked for again,
    since the tier may have dropped it. If it is there still, that is a use of it: what leaves the primary tier now is
    worth more below than what left long ago. A failed write is tried again at a later look, if the block is still
    there: the next one, or after failures in a row one of the next 16.

    No eviction waits for any of this. A block evicted before it was written is dropped, and counted. A block is pinned
    while it is written, for each tier no more of them than the largest window.

    Its jobs belong to no request of a client but to ``context``, which each tier hears of first and last.
    """

    def __init__(self, primary: CPUPrimaryTierOffloadingManager, tiers: Iterable[GuardedTier], send: Send) -> None:
        self._most = max(1, min(primary.num_blocks // 2, _MOST_WATCHED))
        self._least = max(1, min(primary.num_blocks // 32, _MOST_WATCHED))
        self.window = self._least
        self.context = ReqContext("kvoffload:write-behind")
        self._primary = primary
        self._send = send
        self._below = [_Below(tier) for tier in tiers]
        # Since the last look: blocks reserved, and blocks dropped for that.
        self._reserved = self._dropped = 0
        self._is_due = False
        self._look = 0
        self._is_closed = False
        for below in self._below:
            below.tier.wants_whole_request(self.context)

    def __repr__(self) -> str:
        queued = sum(len(below.queue) for below in self._below)
        return f"WriteBehind(window={self.window}, queued={queued})"

    @property
    def has_queued(self) -> bool:
        return any(below.queue for below in self._below)

    @property
    def dropped(self) -> int:
        """Blocks evicted from the primary tier before they were written, summed over tiers."""
        return sum(below.dropped for below in self._below)

    def reserved(self, num_blocks: int, evicted: Collection[OffloadKey]) -> None:
        """The primary tier gave ``num_blocks`` slots away, and evicted these blocks for it."""
        self._reserved += num_blocks
        self._is_due |= self._reserved * 4 >= self.window
        for below in self._below:
            forget = below.settled.pop
            lost = [key for key in evicted if forget(key, None) is None]
            if lost:
                below.dropped += len(lost)
                self._dropped += len(lost)
                self._is_due |= self._reserved * 16 >= self.window

    def step(self) -> None:
        """Has some blocks written, a bounded number per tier."""
        if self._is_due:
            self._look_at_window()
        for below in self._below:
            if below.queue:
                self._write(below)

    def ended(self, job: EndedJob) -> None:
        """A job has ended. Whoever it was for, its blocks are below now."""
        below = next((below for below in self._below if below.tier is job.tier), None)
        if below is None:
            return
        is_own = job.job.req_context is self.context
        if is_own:
            below.in_flight -= len(job.job.keys)
        if job.is_stale:
            return
        if not is_own:
            for key in job.succeeded:
                # One that overlapped with a write from before a reset may have come to nothing.
                if self._primary.peek(key) is not None:
                    below.settled.setdefault(key, 0)
            return
        for key in job.failed:
            below.settled.pop(key, None)
        below.skipped = 0
        below.looks_to_skip = 0 if job.succeeded else min(2 * below.looks_to_skip + 1, _MOST_SKIPPED)

    def forget(self) -> None:
        """The primary tier was reset."""
        for below in self._below:
            below.settled.clear()
            below.queue.clear()
        self._reserved = self._dropped = 0
        self._is_due = False

    def close(self, poll: Callable[[], object], clock: Callable[[], float], seconds: float) -> None:
        """Has what is not below yet written, the most recently used first, for about so many ``seconds``; then tells
        the tiers that nothing more comes in this name. ``poll`` hears of ended jobs. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        end_s = clock() + seconds
        for below in self._below:
            below.queue.clear()
            idle = self._primary.next_victims(self._primary.num_blocks) or []
            rest = idle[::-1]
            for start in range(0, len(rest), _PER_JOB):
                if below.in_flight or clock() >= end_s:
                    break  # it hangs, or is too slow
                below.queue = dict.fromkeys(reversed(rest[start : start + _PER_JOB]), 1)
                self._write(below)
                below.tier.drain_jobs()
                poll()
            below.tier.on_request_finished(self.context)

    def check_invariants(self, jobs: Iterable[JobMetadata]) -> None:
        """``jobs``: all that tiers have in hand."""
        in_flight = sum(len(job.keys) for job in jobs if job.req_context is self.context)
        assert sum(below.in_flight for below in self._below) == in_flight
        for below in self._below:
            assert below.in_flight <= self._most
            for key in below.settled:
                assert self._primary.peek(key) is not None, f"{key!r} is remembered although it was evicted"
            assert len(below.queue) <= self.window

    def _look_at_window(self) -> None:
        too_many = _TOLERATED * self._reserved * len(self._below)
        wanted = self.window * 2 if self._dropped > too_many else self.window - self.window // 32
        self.window = max(self._least, min(wanted, self._most))
        self._reserved = self._dropped = 0
        self._is_due = False
        watched = self.window - self._primary.num_free_blocks
        keys = self._primary.next_victims(watched) if watched > 0 else []
        assert keys is not None, "write-behind needs a policy that says what goes next"
        last_look = self._look
        self._look += 1
        for below in self._below:
            settled = below.settled
            below.queue.clear()
            if below.skipped < below.looks_to_skip:
                below.skipped += 1
                continue
            for key in keys[: max(watched - below.in_flight, 0)]:
                if settled.get(key, -1) == last_look:
                    settled[key] = self._look
                else:
                    below.queue[key] = _STEPS_TO_FIND_OUT

    def _write(self, below: _Below) -> None:
        missing: list[OffloadKey] = []
        there: list[OffloadKey] = []
        for key, steps in list(islice(below.queue.items(), _PER_STEP)):
            block = self._primary.peek(key)
            # One that is pinned meanwhile goes down all the same: it may be another tier that reads it.
            is_there = block is not None and block.is_ready
            found = below.tier.lookup(key, self.context) if is_there else None
            if is_there and found is None and steps > 1:
                below.queue[key] = steps - 1
                continue
            del below.queue[key]
            if found is not None:
                below.settled[key] = self._look
                (there if found else missing).append(key)
        # In the order of eviction: stores take the last block of a job for the most recently used, and the head of a
        # prefix, which is evicted last, shall outlive its tail below too. The jobs are small, since the pins of one
        # are held until all of it has ended.
        for start in range(0, len(missing), _PER_JOB):
            keys = missing[start : start + _PER_JOB]
            below.in_flight += len(keys)
            self._send(below.tier, keys, self.context)
        if there:
            below.tier.touch(there[::-1], self.context)
