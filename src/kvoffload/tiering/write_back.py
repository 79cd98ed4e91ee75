# SPDX-License-Identifier: Apache-2.0
"""Write-back (``cascade: on_evict``): write blocks to lower tiers shortly before host memory would evict them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.cascades import Cascades
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob

_MOST_WATCHED = 4096
"""Largest size of the window in blocks. A review looks at each of them."""
_PER_STEP = 512
"""Maximum number of blocks that a step looks up in a tier and writes if the tier lacks them. It limits the time of a
step."""
_PER_JOB = 64
"""Number of blocks in a job. A job's pins last until the whole job has ended."""
_STEPS_TO_FIND_OUT = 5
"""Number of steps in which a tier may find out whether it has a block. After that, the block waits for the next
review."""
_TOLERATED = 0.05
"""Share of the reservations that may evict an unwritten block. Above this share, the window doubles."""


class _Target:
    """One tier, with the blocks of host memory that it has and the blocks that it should get."""

    __slots__ = ("dropped", "queue", "tier", "written")

    def __init__(self, tier: GuardedTier) -> None:
        self.tier = tier
        self.written: dict[OffloadKey, int] = {}
        """Blocks of host memory that the tier has or is getting, with the number of the last review that saw each."""
        self.queue: dict[OffloadKey, int] = {}
        """Blocks to write, in the order of eviction, with the number of steps left to find out whether the tier has
        each."""
        self.dropped = 0

    def failed(self, keys: Iterable[OffloadKey]) -> None:
        """Forget blocks that the tier did not take."""
        for key in keys:
            self.written.pop(key, None)


class WriteBack:
    """Watches the blocks that host memory would evict next, and writes them to the tiers that lack them.

    The blocks that the next ``window`` reservations would evict are *watched*. A review looks at them after each
    quarter of a window of reservations, or sooner if blocks were evicted unwritten. A step without reservations costs
    nothing. The window is 1/32 of host memory, because a block that is written too early occupies both tiers. While
    more than 5% of the reservations evict an unwritten block, the window doubles, up to half of host memory and 4096
    blocks. It shrinks again slowly.

    A block is written only once while it stays watched. If it enters the window again later, the tier is asked again,
    because it may have evicted the block. If the tier still has it, this counts as a use: a block that leaves host
    memory now is worth more in the tier than one that left long ago. A failed write is tried again at the next review,
    if the block is still present. This class does not handle tiers that fail repeatedly; their circuit breakers reject
    the jobs.

    No eviction waits for these writes. A block that is evicted unwritten is dropped and counted.

    The jobs belong to ``context`` and not to a client's request. Tiers are informed of its beginning and its end.
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
        # Since the last review: the number of blocks reserved, and of blocks that were evicted unwritten for them.
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
        """Number of blocks evicted from host memory unwritten, summed over tiers."""
        return sum(target.dropped for target in self._targets)

    def on_reserved(self, num_blocks: int, evicted: Collection[OffloadKey]) -> None:
        """Note that host memory reserved ``num_blocks`` slots, and evicted these blocks for them."""
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
        """Submit writes, with a limited number of blocks per tier."""
        if self._is_due:
            self._review()
        for target in self._targets:
            if target.queue:
                self._write(target)

    def end(self, jobs: Sequence[TierJob]) -> None:
        """Note the end of jobs of any requests. Their tiers have the blocks that succeeded."""
        for target, job in itertools.product(self._targets, jobs):
            if target.tier is not job.tier or job.is_stale:
                continue
            if job.req_context is self.context:
                target.failed(job.failed)
            else:
                for key in job.succeeded:
                    target.written.setdefault(key, 0)

    def reset(self) -> None:
        """Forget all blocks, because host memory was reset."""
        for target in self._targets:
            target.written.clear()
            target.queue.clear()
        self._reserved = self._dropped = 0
        self._is_due = False

    def close(self, poll: Callable[[], object], clock: Callable[[], float], seconds: float) -> None:
        """Write the blocks that the tiers lack, the most recently used first, for about ``seconds``, and inform the
        tiers of the end. ``poll`` processes the jobs that have ended. Idempotent."""
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
                    break  # the tier hangs, or is too slow
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
        """Queue the watched blocks that have not been written since they became watched."""
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
        queued = [*itertools.islice(target.queue, _PER_STEP)]
        # A block that was pinned meanwhile is still written, because another tier may be reading it.
        blocks = zip(queued, self._primary.slots.get_all(queued))
        ready = [key for key, block in blocks if block is not None and block.is_ready]
        answers = dict(zip(ready, target.tier.lookup_each(ready, self.context))) if ready else {}
        for key in queued:
            is_ready, found, steps = key in answers, answers.get(key), target.queue[key]
            if is_ready and found is None and self._is_closed:
                found = False  # no step is left to find out, and stores write nothing twice
            if is_ready and found is None and steps > 1:
                target.queue[key] = steps - 1
                continue
            del target.queue[key]
            if found is not None:
                target.written[key] = self._review_number
                (present if found else missing).append(key)
        # In the order of eviction, because stores treat the last block of a job as the most recently used. So the head
        # of a prefix, which is evicted last, also outlives its tail in the tier. The jobs are small, because a job's
        # pins last until the whole job has ended.
        for start in range(0, len(missing), _PER_JOB):
            keys = missing[start : start + _PER_JOB]
            target.failed(self._cascades.submit([target.tier], keys, self.context))
        if present:
            target.tier.touch(present[::-1], self.context)
