# SPDX-License-Identifier: Apache-2.0
"""A secondary tier with real bytes, for which the test decides when jobs end and which of them fail."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvoffload.base import (
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager


class TierCall(NamedTuple):
    """One call of the tier: the method, the request's id, and the keys and the job if there are any."""

    name: str
    req_id: str | None
    keys: tuple[OffloadKey, ...] = ()
    job_id: int | None = None


class FakeTier(SecondaryTierManager):
    """A tier that keeps blocks in a dict, and copies real bytes to and from host memory. It uses no threads.

    Jobs wait in ``jobs`` until the test calls ``finish``. With ``at_once=True``, each job ends when it is submitted.
    ``answers`` overrides ``lookup`` for single keys (``None`` means that the tier never finds out). With a
    ``capacity``, the tier evicts its oldest blocks. While ``hangs`` is true, ``drain_jobs`` leaves jobs in flight.
    ``log`` lists every call that concerns a request, in order.
    """

    def __init__(
        self,
        primary_kv_view: memoryview,
        tier_type: str = "fake",
        *,
        policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL,
        at_once: bool = False,
        capacity: int | None = None,
    ) -> None:
        super().__init__(primary_kv_view, tier_type)
        self.policy = policy
        self.at_once = at_once
        self.capacity = capacity
        self.blocks: dict[OffloadKey, bytes] = {}
        self.answers: dict[OffloadKey, bool | None] = {}
        self.jobs: dict[int, JobMetadata] = {}
        self.log: list[TierCall] = []
        self.hangs = False
        self.is_shut_down = False
        self._results: list[JobResult] = []
        self._events: list[OffloadingEvent] = []

    def __repr__(self) -> str:
        return f"FakeTier({self.tier_type!r}, blocks={len(self.blocks)}, jobs={list(self.jobs)})"

    # Methods for the test.

    def put(self, keys: Iterable[OffloadKey], blocks: Iterable[bytes]) -> None:
        """Add blocks to the tier as if an earlier process had stored them."""
        self.blocks.update(zip(keys, blocks, strict=True))

    def finish(
        self,
        job_ids: Iterable[int] | None = None,
        *,
        success: bool = True,
        lose: Collection[OffloadKey] = (),
        tear: bool = False,
        ended_s: float | None = None,
    ) -> list[int]:
        """End jobs (by default all) in the given order, and return their ids.

        ``ended_s`` is the end that the tier reports, if any. With ``success=False``, the jobs fail and nothing is
        copied. Otherwise only the keys in ``lose`` fail, and loads of blocks that the tier does not contain. With
        ``tear``, failed loads leave garbage in their slots, as a torn read does.
        """
        ended = list(self.jobs) if job_ids is None else list(job_ids)
        for job_id in ended:
            job = self.jobs.pop(job_id)
            failed_keys = set(job.keys) if not success else set(lose) & set(job.keys)
            if job.is_promotion:
                failed_keys |= {key for key in job.keys if key not in self.blocks}
            self._copy(job, failed_keys, tear)
            partial = failed_keys and failed_keys != set(job.keys)
            good = tuple(key for key in job.keys if key not in failed_keys)
            self._results.append(JobResult(job_id, not failed_keys, good if partial else None, ended_s))
        return ended

    def calls(self, name: str) -> list[TierCall]:
        """Return the calls of one method, in order."""
        return [call for call in self.log if call.name == name]

    # Methods of a tier.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if key in self.answers:
            return self.answers[key]
        return key in self.blocks

    def submit_store(self, job: JobMetadata) -> None:
        assert not job.is_promotion
        self._submit("submit_store", job)

    def submit_load(self, job: JobMetadata) -> None:
        assert job.is_promotion
        self._submit("submit_load", job)

    def get_finished_jobs(self) -> Sequence[JobResult]:
        results, self._results = self._results, []
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.log.append(TierCall("on_new_request", req_context.req_id))
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.log.append(TierCall("on_request_finished", req_context.req_id))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.log.append(TierCall("touch", req_context.req_id if req_context else None, tuple(keys)))

    def has_pending_work(self) -> bool:
        return bool(self.jobs or self._results)

    def drain_jobs(self) -> None:
        if not self.hangs:
            self.finish()

    def take_events(self) -> Sequence[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def shutdown(self) -> None:
        if not self.is_shut_down:
            self.drain_jobs()
            self.is_shut_down = True

    def _submit(self, name: str, job: JobMetadata) -> None:
        assert len(job.keys) == len(job.block_ids) > 0
        assert not self.is_shut_down
        self.log.append(TierCall(name, job.req_context.req_id, tuple(job.keys), job.job_id))
        self.jobs[job.job_id] = job
        if self.at_once:
            self.finish([job.job_id])

    def _copy(self, job: JobMetadata, failed_keys: set[OffloadKey], tear: bool) -> None:
        size = self.block_bytes
        flat = self.primary_kv_view.cast("B") if self.primary_kv_view.c_contiguous else None
        assert flat is not None, "FakeTier needs host memory without gaps between rows"
        for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True):
            row = flat[slot * size : (slot + 1) * size]
            if key in failed_keys:
                if tear and job.is_promotion:
                    row[: size // 2 or 1] = b"\xa5" * (size // 2 or 1)
            elif job.is_promotion:
                row[:] = self.blocks[key]
            else:
                self._keep(key, bytes(row))

    def _keep(self, key: OffloadKey, block: bytes) -> None:
        if key not in self.blocks:
            self._events.append(OffloadingEvent([key], self.tier_type, removed=False))
        self.blocks[key] = block
        while self.capacity is not None and len(self.blocks) > self.capacity:
            oldest = next(iter(self.blocks))
            del self.blocks[oldest]
            self._events.append(OffloadingEvent([oldest], self.tier_type, removed=True))
