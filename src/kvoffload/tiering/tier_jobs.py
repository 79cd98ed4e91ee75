# SPDX-License-Identifier: Apache-2.0
"""A secondary tier as the manager holds it: the same calls, none of which raises.

The jobs that secondary tiers have in hand.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadingEvent, OffloadKey, OffloadPolicy, ReqContext
from kvoffload.metrics import Stats
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager

__all__ = ["EndedJob", "GuardedTier", "Transfers"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedTier:
    """Turns whatever a tier raises into its mildest answer, so that no tier can break an engine step.

    A lookup that raises is ``False``; a submit that raises was not taken; a poll that raises told nothing. The
    first exception of each call is logged with its trace, later ones are only counted (``faults``).
    """

    __slots__ = ("_reported", "faults", "index", "name", "tier")

    def __init__(self, index: int, tier: SecondaryTierManager) -> None:
        self.index = index
        self.tier = tier
        self.name = tier.tier_type
        self.faults = 0
        self._reported: set[str] = set()

    def __repr__(self) -> str:
        return f"GuardedTier({self.index}, {self.name!r}, faults={self.faults})"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        # Written out, not through _call: this is the one call that is made per block.
        try:
            return self.tier.lookup(key, req_context)
        except Exception as exc:  # noqa: BLE001 - the boundary where a tier's trouble becomes a miss
            self._fault("lookup", exc)
            return False

    def submit(self, job: JobMetadata) -> bool:
        """Whether the tier took ``job``; if not, it never will be told by ``finished_jobs``."""
        submit = self.tier.submit_load if job.is_promotion else self.tier.submit_store

        def taken() -> bool:
            submit(job)
            return True

        return self._call("submit", taken, False)

    def finished_jobs(self) -> list[JobResult]:
        return self._call("get_finished_jobs", lambda: list(self.tier.get_finished_jobs()), [])

    def wants_whole_request(self, req_context: ReqContext) -> bool:
        def asked() -> bool:
            return self.tier.on_new_request(req_context).policy is OffloadPolicy.REQUEST_LEVEL

        return self._call("on_new_request", asked, False)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._call("on_request_finished", lambda: self.tier.on_request_finished(req_context), None)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None) -> None:
        self._call("touch", lambda: self.tier.touch(keys, req_context), None)

    def on_schedule_end(self) -> None:
        self._call("on_schedule_end", self.tier.on_schedule_end, None)

    def has_pending_work(self) -> bool:
        return self._call("has_pending_work", self.tier.has_pending_work, False)

    def drain_jobs(self) -> None:
        self._call("drain_jobs", self.tier.drain_jobs, None)

    def events(self) -> Iterable[OffloadingEvent]:
        return self._call("take_events", lambda: list(self.tier.take_events()), [])

    def stats(self) -> Stats:
        return self._call("get_stats", self.tier.get_stats, {})

    def shutdown(self) -> None:
        self._call("shutdown", self.tier.shutdown, None)

    def _call(self, name: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as exc:  # noqa: BLE001 - the boundary where a tier's trouble becomes a miss
            self._fault(name, exc)
            return otherwise

    def _fault(self, name: str, exc: Exception) -> None:
        self.faults += 1
        if name not in self._reported:
            self._reported.add(name)
            _log.error("Tier %r failed in %s; its blocks count as misses: %s", self.name, name, exc, exc_info=exc)


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
