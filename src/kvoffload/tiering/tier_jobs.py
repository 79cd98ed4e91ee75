# SPDX-License-Identifier: Apache-2.0
"""The jobs of secondary tiers, and a guard that turns every exception of a tier into a miss."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from typing import Any

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext
from kvoffload.boundary import Boundary, guarded, up_to_a_miss
from kvoffload.events import checked_events
from kvoffload.metrics import checked_stats
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager

_log = logging.getLogger(__name__)


def _for_each(answers: Sequence[bool | None], keys: Sequence[OffloadKey], *_: object) -> list[Any]:
    """Return the answers, with ``False`` for each missing one."""
    found = [None if answer is None else bool(answer) for answer in answers[: len(keys)]]
    return found + [False] * (len(keys) - len(found))


class GuardedTier(Boundary):
    """Wraps a secondary tier with the same calls, none of which raises.

    A lookup that raises is ``False``, a submit that raises takes no job, and a poll that raises finds nothing. The
    first exception of each call is logged with its traceback; later ones are only counted (``faults``).
    """

    def __init__(self, index: int, tier: SecondaryTierManager) -> None:
        self.index = index
        self.inner = tier
        self.name = tier.tier_type
        self.max_backlog_blocks = None if tier.max_backlog_blocks is None else int(tier.max_backlog_blocks)
        self.faults = 0
        self._reported: set[str] = set()

    def __repr__(self) -> str:
        return f"GuardedTier({self.index}, {self.name!r}, faults={self.faults})"

    def failed(self, name: str, exc: BaseException) -> None:
        self.faults += 1
        if name not in self._reported:
            self._reported.add(name)
            _log.error("Tier %r failed in %s; its blocks count as misses: %s", self.name, name, exc, exc_info=exc)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.lookup_prefix((key,), req_context)[0]

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Ask the tier, unless the request may not load from it."""
        return self._lookup_prefix(keys, req_context) if self.allows(req_context) else [False]

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return self._lookup_each(keys, req_context) if self.allows(req_context) else [False] * len(keys)

    def allows(self, req_context: ReqContext) -> bool:
        """Return whether the request may load from the tier."""
        allowed = req_context.load_tiers
        return allowed is None or allowed.allows(self.inner.medium, self.inner.locality)

    def submit(self, job: JobMetadata) -> bool:
        """Submit ``job``, and return whether the tier took it. A job that it did not take never appears in
        ``get_finished_jobs``."""
        return (self._submit_load(job) if job.is_promotion else self._submit_store(job)) is True

    def wants_whole_request(self, req_context: ReqContext) -> bool:
        """Announce the request, and return whether the tier wants all of its blocks."""
        return self._on_new_request(req_context).policy is OffloadPolicy.REQUEST_LEVEL

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the finished jobs. Invalid results are dropped: such a job keeps its slots, which may still be
        written."""
        return [result for result in self._get_finished_jobs() if self._is_result(result)]

    def _is_result(self, result: object) -> bool:
        try:
            if not isinstance(result, JobResult):
                raise TypeError(f"this is not the end of a job: {result!r:.100}")
            if result.successful_keys is not None:
                result.successful_keys = frozenset(result.successful_keys)
            result.job_id, result.success = operator.index(result.job_id), bool(result.success)
            result.ended_s = None if result.ended_s is None or math.isnan(result.ended_s) else float(result.ended_s)
        except Exception as exc:  # noqa: BLE001 - a part of the boundary
            self.failed("get_finished_jobs", exc)
            return False
        return True

    _lookup_prefix = guarded(SecondaryTierManager.lookup_prefix, lambda *_: [False], up_to_a_miss)
    _lookup_each = guarded(
        SecondaryTierManager.lookup_each,
        lambda keys, *_: [False] * len(keys),
        _for_each,
    )
    _submit_load = guarded(SecondaryTierManager.submit_load, lambda *_: False, lambda *_: True)
    _submit_store = guarded(SecondaryTierManager.submit_store, lambda *_: False, lambda *_: True)
    _on_new_request = guarded(
        SecondaryTierManager.on_new_request,
        lambda *_: RequestOffloadingContext(),
        lambda answer, *_: RequestOffloadingContext(answer.policy),
    )
    _get_finished_jobs = guarded(SecondaryTierManager.get_finished_jobs, list, list)
    take_news = guarded(
        SecondaryTierManager.take_news,
        lambda: None,
        lambda found: None if found is None else [OffloadKey(key) for key in found if isinstance(key, bytes)],
    )
    on_request_finished = guarded(SecondaryTierManager.on_request_finished, lambda *_: None)
    touch = guarded(SecondaryTierManager.touch, lambda *_: None)
    on_schedule_end = guarded(SecondaryTierManager.on_schedule_end, lambda: None)
    has_pending_work = guarded(SecondaryTierManager.has_pending_work, lambda: False, bool)
    drain_jobs = guarded(SecondaryTierManager.drain_jobs, lambda: None)
    take_events = guarded(SecondaryTierManager.take_events, lambda: (), checked_events)
    get_stats = guarded(SecondaryTierManager.get_stats, dict, checked_stats)
    is_readable = guarded(SecondaryTierManager.is_readable, lambda: True, bool)
    holds = guarded(SecondaryTierManager.holds, lambda keys: [False] * len(keys), _for_each)
    note_losses = guarded(SecondaryTierManager.note_losses, lambda: None)
    shutdown = guarded(SecondaryTierManager.shutdown, lambda: None)


class TierJob(JobMetadata):
    """The manager's record of a job of ``tier``. The job is gathered in a step, and then belongs to the tier until it
    ends, once. It gets its id when it is submitted. ``succeeded`` and ``failed`` are filled at its end."""

    __slots__ = ("begun", "ended_s", "failed", "is_stale", "num_dropped", "portion_s", "succeeded", "tier")

    def __init__(
        self,
        tier: GuardedTier,
        req_context: ReqContext,
        keys: Sequence[OffloadKey] = (),
        slots: Sequence[int] = (),
        *,
        is_promotion: bool,
    ) -> None:
        super().__init__(0, [*keys], [*slots], is_promotion, req_context)
        self.tier = tier
        self.portion_s = math.inf
        """While a promotion is gathered: the longest permitted duration of one read. The promotion is cut into such
        jobs."""
        self.begun = 0
        """The ``Link.num_begun`` with the last block of a promotion: its place in the tier's queue."""
        self.is_stale = False
        """Whether it began before a reset of host memory."""
        self.succeeded: Sequence[OffloadKey] = ()
        self.failed: Sequence[OffloadKey] = ()
        self.num_dropped = 0
        """Number of keys in ``failed`` that the tier never tried."""
        self.ended_s: float | None = None
        """The time at which it ended, if the tier knows it."""


class TierJobs:
    """Submits jobs to ``tiers`` and collects their results. Each job that a tier took ends exactly once.
    Scheduler thread only.

    Ignores results for jobs that have ended, belong to another tier or were never submitted, because a slot freed by
    such a result could still be written to.
    """

    def __init__(self, tiers: Sequence[GuardedTier]) -> None:
        self._tiers = tiers
        self.in_flight: dict[int, TierJob] = {}
        """Jobs by id. Other code only reads it."""
        self._last_id = 0

    def __repr__(self) -> str:
        return f"TierJobs(in_flight={len(self.in_flight)})"

    def submit(self, job: TierJob) -> bool:
        """Submit a job to its tier. Returns ``False`` if the tier did not take it, so that it has failed."""
        self._last_id += 1
        job.job_id, job.keys = self._last_id, tuple(job.keys)
        # Recorded first, because a tier may finish a job, and be polled, within its own submit.
        self.in_flight[job.job_id] = job
        if job.tier.submit(job):
            return True
        self._end(job, JobResult(job.job_id, success=False))
        return False

    def take_finished(self) -> list[TierJob]:
        """Return the jobs that ended since the last call. Asks all tiers: if a submit raised, its job counts as failed,
        but the tier may have finished it anyway, and reports pending work until it is asked."""
        finished: list[TierJob] = []
        for tier in self._tiers:
            for result in tier.get_finished_jobs():
                job = self.in_flight.get(result.job_id)
                if job is not None and job.tier is tier:
                    self._end(job, result)
                    finished.append(job)
        return finished

    def mark_stale(self) -> None:
        """Mark all jobs in flight as stale, because a reset of host memory has forgotten their blocks."""
        for job in self.in_flight.values():
            job.is_stale = True

    def _end(self, job: TierJob, result: JobResult) -> None:
        del self.in_flight[result.job_id]
        job.succeeded = result.succeeded(job.keys)
        if len(job.succeeded) < len(job.keys):
            good = set(job.succeeded)
            job.failed = [key for key in job.keys if key not in good]
            job.num_dropped = min(max(result.num_dropped, 0), len(job.failed))
        job.ended_s = result.ended_s
