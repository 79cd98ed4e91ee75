# SPDX-License-Identifier: Apache-2.0
"""The jobs that secondary tiers have in hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.tiering.base import JobMetadata, JobResult
from kvoffload.tiering.guard import GuardedTier

__all__ = ["EndedJob", "Transfers"]


@dataclass(frozen=True, slots=True, eq=False)
class EndedJob:
    """A job that a tier told the end of, once."""

    job: JobMetadata
    tier: GuardedTier
    succeeded: list[OffloadKey]
    failed: list[OffloadKey]
    is_stale: bool = False
    """Begun before a reset of the primary tier."""


class Transfers:
    """Hands jobs to tiers and hears of their ends. Each job taken by a tier ends exactly once here.

    A tier that tells of a job twice, of another tier's job, or of one nobody gave it is ignored: a slot that was
    given back on such a word could still be written to.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[JobMetadata, GuardedTier]] = {}
        self._in_hand: Counter[GuardedTier] = Counter()
        self._last_id = 0
        self._first_fresh_id = 1

    def __repr__(self) -> str:
        return f"Transfers(in_flight={len(self._jobs)})"

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobMetadata]:
        return (job for job, _ in self._jobs.values())

    def submit(
        self,
        tier: GuardedTier,
        keys: Sequence[OffloadKey],
        block_ids: npt.NDArray[np.int64] | Sequence[int],
        req_context: ReqContext,
        *,
        is_promotion: bool,
    ) -> EndedJob | None:
        """Gives ``tier`` a job. One that the tier did not take is answered at once, as a failure."""
        self._last_id += 1
        slots = np.asarray(block_ids, dtype=np.int64)
        job = JobMetadata(self._last_id, tuple(keys), slots, is_promotion, req_context)
        # Booked first: a tier may finish a job, and be polled, within its own submit.
        self._jobs[job.job_id] = job, tier
        self._in_hand[tier] += 1
        if tier.submit(job):
            return None
        return self._end(job, tier, JobResult(job.job_id, success=False))

    def ended(self) -> list[EndedJob]:
        """Jobs that ended since the last call. Tiers without a job in hand are not asked."""
        if not self._jobs:
            return []
        ended: list[EndedJob] = []
        for tier in [tier for tier, jobs in self._in_hand.items() if jobs]:
            for result in tier.finished_jobs():
                job, owner = self._jobs.get(result.job_id, (None, None))
                if job is not None and owner is tier:
                    ended.append(self._end(job, tier, result))
        return ended

    def abandon(self) -> None:
        """The jobs in flight are stale from now on."""
        self._first_fresh_id = self._last_id + 1

    def is_stale(self, job: JobMetadata) -> bool:
        return job.job_id < self._first_fresh_id

    def _end(self, job: JobMetadata, tier: GuardedTier, result: JobResult) -> EndedJob:
        del self._jobs[job.job_id]
        self._in_hand[tier] -= 1
        good = set(result.successful_keys if result.successful_keys is not None else job.keys if result.success else ())
        return EndedJob(
            job,
            tier,
            [key for key in job.keys if key in good],
            [key for key in job.keys if key not in good],
            self.is_stale(job),
        )
