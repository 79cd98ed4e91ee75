# SPDX-License-Identifier: Apache-2.0
"""Jobs of secondary tiers, which are guarded: whatever a tier raises becomes a miss."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvoffload.base import OffloadingEvent, OffloadKey, OffloadPolicy, ReqContext
from kvoffload.metrics import Stats
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager

__all__ = ["GuardedTier", "TierJob", "TierJobs"]

_log = logging.getLogger(__name__)

T = TypeVar("T")
_RAISED = object()


class GuardedTier:
    """A secondary tier with the same calls, none of which raises.

    An exception becomes the mildest answer, so that no tier can break an engine step. This includes exceptions that are
    no ``Exception``, such as a native client's panic, but not those that end the process. A lookup that raises is
    ``False``; a submit that raises took no job; a poll that raises found nothing. The first exception of each call is
    logged with its traceback, later ones are only counted (``faults``).
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

    def allows(self, req_context: ReqContext) -> bool:
        """Whether the request may load from the tier."""
        allowed = req_context.load_tiers
        return allowed is None or allowed.allows(self.tier.medium, self.tier.locality)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        # Written out, not through _call: this is the one call that is made per block.
        if req_context.load_tiers is not None and not self.allows(req_context):
            return False
        try:
            return self.tier.lookup(key, req_context)
        except (KeyboardInterrupt, SystemExit):
            raise  # the process is to end
        except BaseException as exc:  # noqa: BLE001 - the boundary where a tier's failure becomes a miss
            self._fault("lookup", exc)
            return False

    def progress(self) -> int | None:
        return self._call("progress", self.tier.progress, None)

    def submit(self, job: JobMetadata) -> bool:
        """Whether the tier took ``job``. One that it did not take never appears in ``get_finished_jobs``."""
        submit: Callable[[JobMetadata], object] = self.tier.submit_load if job.is_promotion else self.tier.submit_store
        return self._call("submit", submit, _RAISED, job) is not _RAISED

    def get_finished_jobs(self) -> list[JobResult]:
        """Without what is no result: a job that ended in another way keeps its slots, which may still be written."""
        nothing: list[JobResult] = []
        results = self._call("get_finished_jobs", lambda: list(self.tier.get_finished_jobs()), nothing)
        return [result for result in results if self._call("get_finished_jobs", _check_result, False, result)]

    def wants_whole_request(self, req_context: ReqContext) -> bool:
        def asked() -> bool:
            return self.tier.on_new_request(req_context).policy is OffloadPolicy.REQUEST_LEVEL

        return self._call("on_new_request", asked, False)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._call("on_request_finished", self.tier.on_request_finished, None, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None) -> None:
        self._call("touch", self.tier.touch, None, keys, req_context)

    def on_schedule_end(self) -> None:
        self._call("on_schedule_end", self.tier.on_schedule_end, None)

    def has_pending_work(self) -> bool:
        return self._call("has_pending_work", self.tier.has_pending_work, False)

    def drain_jobs(self) -> None:
        self._call("drain_jobs", self.tier.drain_jobs, None)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._call("take_events", lambda: list(self.tier.take_events()), [])

    def get_stats(self) -> Stats:
        return self._call("get_stats", self.tier.get_stats, {})

    def is_readable(self) -> bool:
        return self._call("is_readable", self.tier.is_readable, True)

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._call("holds", self.tier.holds, [False] * len(keys), keys)

    def shutdown(self) -> None:
        self._call("shutdown", self.tier.shutdown, None)

    def _call(self, name: str, call: Callable[..., T], otherwise: T, *args: object) -> T:
        try:
            return call(*args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # noqa: BLE001 - the boundary where a tier's failure becomes a miss
            self._fault(name, exc)
            return otherwise

    def _fault(self, name: str, exc: BaseException) -> None:
        self.faults += 1
        if name not in self._reported:
            self._reported.add(name)
            _log.error("Tier %r failed in %s; its blocks count as misses: %s", self.name, name, exc, exc_info=exc)


def _check_result(result: JobResult) -> bool:
    """Raises for what is no result."""
    if not isinstance(result, JobResult):
        raise TypeError(f"this is not the end of a job: {result!r:.100}")
    if result.successful_keys is not None:
        result.successful_keys = frozenset(result.successful_keys)
    result.success = bool(result.success)
    result.ended_s = None if result.ended_s is None else float(result.ended_s)
    return True


@dataclass(slots=True, eq=False)
class TierJob:
    """One job of one tier, from its submit to its end. ``succeeded`` and ``failed`` are filled at its end."""

    metadata: JobMetadata
    tier: GuardedTier
    is_stale: bool = False
    """Begun before a reset of the primary tier."""
    succeeded: Sequence[OffloadKey] = ()
    failed: Sequence[OffloadKey] = ()
    ended_s: float | None = None
    """When it ended, if its tier knows."""


class TierJobs:
    """Submits jobs to tiers and collects their ends. Each job that a tier took ends exactly once.

    A result for a job that has ended, belongs to another tier or was never submitted is ignored: a slot freed on its
    account could still be written to.
    """

    def __init__(self) -> None:
        self.in_flight: dict[int, TierJob] = {}
        """By id. Others only read it."""
        self._num_by_tier: Counter[GuardedTier] = Counter()
        self._last_id = 0

    def __repr__(self) -> str:
        return f"TierJobs(in_flight={len(self.in_flight)})"

    def submit(
        self,
        tier: GuardedTier,
        keys: Sequence[OffloadKey],
        slots: list[int],
        req_context: ReqContext,
        *,
        is_promotion: bool,
    ) -> TierJob | None:
        """Submits a job to ``tier``. Returns it, failed, if the tier did not take it."""
        self._last_id += 1
        job = TierJob(JobMetadata(self._last_id, tuple(keys), slots, is_promotion, req_context), tier)
        # Recorded first: a tier may finish a job, and be polled, within its own submit.
        self.in_flight[self._last_id] = job
        self._num_by_tier[tier] += 1
        if tier.submit(job.metadata):
            return None
        self._end(job, JobResult(job.metadata.job_id, success=False))
        return job

    def take_finished(self) -> list[TierJob]:
        """Jobs that ended since the last call. Tiers without a job are not asked."""
        finished: list[TierJob] = []
        for tier, num_jobs in self._num_by_tier.items():
            for result in tier.get_finished_jobs() if num_jobs else ():
                job = self.in_flight.get(result.job_id)
                if job is not None and job.tier is tier:
                    self._end(job, result)
                    finished.append(job)
        return finished

    def mark_stale(self) -> None:
        """The primary tier was reset: the blocks of all jobs in flight are forgotten."""
        for job in self.in_flight.values():
            job.is_stale = True

    def _end(self, job: TierJob, result: JobResult) -> None:
        del self.in_flight[result.job_id]
        self._num_by_tier[job.tier] -= 1
        keys = job.metadata.keys
        job.succeeded = result.succeeded(keys)
        if len(job.succeeded) < len(keys):
            good = set(job.succeeded)
            job.failed = [key for key in keys if key not in good]
        job.ended_s = result.ended_s
