# SPDX-License-Identifier: Apache-2.0
"""Write-back (``cascade: on_evict``): writes blocks to lower tiers shortly before they would be evicted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.cascades import Cascades
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob

_MOST_WATCHED = 4096
"""Blocks of the largest window. A review looks at each of them."""
_PER_STEP = 512
"""Blocks that a step looks up for a tier, and writes if it lacks them: a bound on the time of a step."""
_PER_JOB = 64
"""Blocks of a job. The pins of one last until all of it has ended."""
_STEPS_TO_FIND_OUT = 5
"""Steps in which a tier may find out whether it has a block. Then the block waits for the next review."""
_TOLERATED = 0.05
"""Share of the reservations that may evict an unwritten block. Above it the window doubles."""


class _Target:
    """One tier: which blocks of the primary tier it has, and which it should get."""

    __slots__ = ("dropped", "queue", "tier", "written")

    def __init__(self, tier: GuardedTier) -> None:
        self.tier = tier
        self.written: dict[OffloadKey, int] = {}
        """Blocks of the primary tier that the tier has or is getting, with the last review that saw them."""
        self.queue: dict[OffloadKey, int] = {}
        """Blocks to write, the next to be evicted first, with the steps left to find out whether the tier has them."""
        self.dropped = 0


class WriteBack:
    """Watches the blocks that the primary tier would evict next, and has those written that a tier lacks.

    The blocks that the next ``window`` reservations would evict are *watched*. A review looks at them after each
    quarter of a window of reservations, or sooner if blocks were evicted unwritten. A step without reservations costs
    nothing. The window is 1/32 of the primary tier, since a block that is written too early lies in both tiers. It
    doubles, up to half of the primary tier and 4096 blocks, while more than 5 % of the reservations evict an unwritten
    block, and shrinks again slowly.

    A block is written once as long as it stays watched. When it comes back to the window later, the tier is asked
    again, since it may have evicted the block. If the tier still has it, that is a use of it: a block that leaves the
    primary tier now is worth more below than one that left long ago. A failed write is tried again at the next
    review, if the block is still there. A tier that fails again and again is no matter of this class: its circuit
    breaker refuses its jobs.

    No eviction waits for any of this. A block that is evicted unwritten is dropped, and counted.

    The jobs belong to no client's request but to ``context``. Tiers are informed of its begin and its end.
    """

    def __init__(
        self, primary: CPUPrimaryTierOffloadingManager, tiers: Iterable[GuardedTier], cascades: Cascades
    ) -> None:
        self._most = max(1, min(primary.num_blocks // 2, _MOST_WATCHED))
        self._least = max(1, min(primary.num_blocks // 32, _MOST_WATCHED))
        self.window = self._least
        self.context = ReqContext("kvoffload:write-back")
        self._primary = primary
        self._cascades = cascades
        self._targets = [_Target(tier) for tier in tiers]
        # Since the last review: blocks reserved, and blocks evicted unwritten for that.
        self._reserved = self._dropped = 0
        self._is_due = False
        self._review_number = 0
        self._is_closed = False
        for target in self._targets:
            target.tier.wants_whole_request(self.context)  # announces it; the answer does not matter

    def __repr__(self) -> str:
        queued = sum(len(target.queue) for target in self._targets)
        return f"WriteBack(window={self.window}, queued={queued})"

    @property
    def has_queued(self) -> bool:
        return any(target.queue for target in self._targets)

    @property
    def dropped(self) -> int:
        """Blocks evicted from the primary tier unwritten, summed over tiers."""
        return sum(target.dropped for target in self._targets)

    def on_reserved(self, num_blocks: int, evicted: Collection[OffloadKey]) -> None:
        """The primary tier reserved ``num_blocks`` slots, and evicted these blocks for it."""
        self._reserved += num_blocks
        self._is_due |= self._reserved * 4 >= self.window
        for target in self._targets:
            forget = target.written.pop
            lost = [key for key in evicted if forget(key, None) is None]
            if lost:
                target.dropped += len(lost)
                self._dropped += len(lost)
                self._is_due |= self._reserved * 16 >= self.window

    def step(self) -> None:
        """Submits writes, a bounded number of blocks per tier."""
        if self._is_due:
            self._review()
        for target in self._targets:
            if target.queue:
                self._write(target)

    def end(self, jobs: Sequence[TierJob]) -> None:
        """Jobs of any requests have ended: their tiers have the blocks that succeeded."""
        for target in self._targets:
            for job in jobs:
                if target.tier is job.tier:
                    self._end(target, job)

    def _end(self, target: _Target, job: TierJob) -> None:
        if job.is_stale:
            return
        if job.req_context is self.context:
            self._failed(target, job.failed)
        else:
            for key in job.succeeded:
                target.written.setdefault(key, 0)

    @staticmethod
    def _failed(target: _Target, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            target.written.pop(key, None)

    def reset(self) -> None:
        """The primary tier was reset."""
        for target in self._targets:
            target.written.clear()
            target.queue.clear()
        self._reserved = self._dropped = 0
        self._is_due = False

    def close(self, poll: Callable[[], object], clock: Callable[[], float], seconds: float) -> None:
        """Writes what the tiers lack, the most recently used blocks first, for about ``seconds``, and informs the tiers
        of the end. ``poll`` takes in the jobs that have ended. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        end_s = clock() + seconds
        for target in self._targets:
            target.tier.drain_jobs()
        poll()
        for target in self._targets:
            target.queue.clear()
            idle = self._primary.slots.policy.next_victims(self._primary.num_blocks) or []
            rest = idle[::-1]
            for start in range(0, len(rest), _PER_JOB):
                if self._cascades.num_pinned[target.tier] or clock() >= end_s:
                    break  # it hangs, or is too slow
                target.queue = dict.fromkeys(reversed(rest[start : start + _PER_JOB]), 1)
                self._write(target)
                target.tier.drain_jobs()
                poll()
            target.tier.on_request_finished(self.context)

    def check_invariants(self) -> None:
        for target in self._targets:
            for key in target.written:
                assert self._primary.slots.get(key) is not None, f"{key!r} is remembered although it was evicted"
            assert len(target.queue) <= self.window

    def _review(self) -> None:
        """Queues the watched blocks that were not written while they were watched."""
        too_many = _TOLERATED * self._reserved * len(self._targets)
        wanted = self.window * 2 if self._dropped > too_many else self.window - self.window // 32
        self.window = max(self._least, min(wanted, self._most))
        self._reserved = self._dropped = 0
        self._is_due = False
        watched = self.window - self._primary.slots.num_free
        keys = self._primary.slots.policy.next_victims(watched) if watched > 0 else []
        assert keys is not None, "write-back needs a policy that can name its next victims"
        last_review = self._review_number
        self._review_number += 1
        for target in self._targets:
            written = target.written
            target.queue.clear()
            for key in keys[: max(watched - self._cascades.num_pinned[target.tier], 0)]:
                if written.get(key, -1) == last_review:
                    written[key] = self._review_number
                else:
                    target.queue[key] = _STEPS_TO_FIND_OUT

    def _write(self, target: _Target) -> None:
        missing: list[OffloadKey] = []
        present: list[OffloadKey] = []
        for key, steps in list(islice(target.queue.items(), _PER_STEP)):
            block = self._primary.slots.get(key)
            # A block that was pinned meanwhile is written all the same: another tier may be reading it.
            is_ready = block is not None and block.is_ready
            found = target.tier.lookup(key, self.context) if is_ready else None
            if is_ready and found is None and self._is_closed:
                found = False  # no step is left to find out in; stores write nothing twice
            if is_ready and found is None and steps > 1:
                target.queue[key] = steps - 1
                continue
            del target.queue[key]
            if found is not None:
                target.written[key] = self._review_number
                (present if found else missing).append(key)
        # In the order of eviction: stores take the last block of a job for the most recently used, and the head of a
        # prefix, which is evicted last, shall outlive its tail there too. The jobs are small, since the pins of one
        # last until all of it has ended.
        for start in range(0, len(missing), _PER_JOB):
            keys = missing[start : start + _PER_JOB]
            self._failed(target, self._cascades.submit([target.tier], keys, self.context))
        if present:
            target.tier.touch(present[::-1], self.context)
