# SPDX-License-Identifier: Apache-2.0
"""kvoffload's tiers for callers that wait: SGLang's threads ask, read and write with calls that have a time limit."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.metrics import Stats, add_stats
from kvoffload.tiering.base import JobMetadata, JobResult
from kvoffload.tiering.options import StoreOptions, build_tier
from kvoffload.tiering.tier_jobs import GuardedTier

Page = Sequence[tuple[int, int]]
"""The place of a page in the caller's memory: address and number of bytes of each of its pieces, in order."""

_JOB_BYTES = 4 << 20
_MAX_JOB_BLOCKS = 64
_MAX_SLOTS = 256
_POLL_S = 0.01
"""Seconds between the questions of a call to tiers that do not report progress."""


@dataclass(slots=True, eq=False)
class _Job:
    """Pages in transfer between staging memory and tiers."""

    at: list[int]
    """Their indices in the call."""
    slots: list[int]
    free: deque[int]
    """The list from which the slots were taken, and to which they return after the last user."""
    is_late: bool = False
    """Whether it is a write whose call has ended before it."""
    num_users: int = 1
    """Number of users: the call, and each tier that has not returned the job."""
    results: list[JobResult] = field(default_factory=list)


class PageTiers:
    """An ordered list of tiers for pages of ``page_bytes`` each. Any thread may call it. A call takes at most
    ``max_wait_s``; pages that were not found, read or written by then are misses.

    Tiers access only kvoffload's own staging memory, and each page is copied once to or from it. A read that hangs may
    end at any later time, but SGLang reuses its pages as soon as a call has returned. If the tier read into such a page
    directly, it would overwrite another prompt's KV, and a write that hangs would store another prompt's KV. So slots
    stay reserved until the tier has returned them, however late (docs/design/0017-sglang.md).
    """

    def __init__(
        self,
        options: Sequence[StoreOptions],
        page_bytes: int,
        namespace: str,
        *,
        max_wait_s: float,
        staging_bytes: int,
    ) -> None:
        num_slots = min(_MAX_SLOTS, max(4, staging_bytes // page_bytes))
        self.namespace = namespace
        self._max_wait_s = max_wait_s
        self._job_pages = max(1, min(_MAX_JOB_BLOCKS, _JOB_BYTES // page_bytes))
        self._region = SharedOffloadRegion.anonymous(num_slots, page_bytes)
        # Keeps the memory mapped for calls that use it while another thread closes.
        view = self._region.create_kv_memoryview()
        self._memory: npt.NDArray[np.uint8] = np.asarray(view)
        self._for_reads, self._for_writes = deque(range(num_slots // 2)), deque(range(num_slots // 2, num_slots))
        self._changed = threading.Condition()
        """Guards the tiers, which are not thread-safe, and all following attributes."""
        self._ids = itertools.count(1)
        self._open: dict[tuple[GuardedTier, int], _Job] = {}
        self._tiers: list[GuardedTier] = []
        self._is_closed = False
        try:
            for index, each in enumerate(options):
                # Guarded, because if a tier raised during a call, the call's slots would never be returned.
                self._tiers.append(GuardedTier(index, build_tier(each, view, namespace)))
                self._tiers[-1].inner.call_on_progress(self._wake)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"PageTiers({self.namespace!r}, {self._tiers!r})"

    # ------------------------------------------------------------------------------------------------------ calls

    def present(self, keys: Sequence[OffloadKey], *, leading: bool = True) -> list[bool]:
        """Return which pages some tier has. ``leading``: return only the pages before the first one that is missing or
        unknown, each as ``True``."""
        deadline_s = time.monotonic() + self._max_wait_s
        context = self._context()
        answers: list[bool | None] = [None] * len(keys)
        with self._changed:
            while not self._is_closed:
                for at, key in enumerate(keys[: len(answers)]):
                    if answers[at] is None:
                        answers[at] = self._lookup(key, context)
                    if leading and answers[at] is False:
                        del answers[at:]
                        break
                self._step()
                if None not in answers or not self._wait(deadline_s):
                    break
        if leading:
            return list(itertools.takewhile(bool, answers))  # type: ignore[arg-type]
        return [answer is True for answer in answers]

    def load(self, keys: Sequence[OffloadKey], pages: Sequence[Page]) -> list[bool]:
        """Fill the pages, each from the first tier that has it. A page with the answer ``False`` keeps its content."""
        deadline_s = time.monotonic() + self._max_wait_s
        outcomes = [False] * len(keys)
        context = self._context()
        for tier in self._tiers:
            with self._changed:
                if self._is_closed:
                    break
                missing = [at for at, is_loaded in enumerate(outcomes) if not is_loaded]
                wanted = deque(at for at in missing if tier.lookup(keys[at], context) is not False)
            self._load_from(tier, wanted, keys, pages, outcomes, context, deadline_s)
        self._touch([key for key, is_loaded in zip(keys, outcomes, strict=True) if is_loaded], context)
        return outcomes

    def store(self, keys: Sequence[OffloadKey], pages: Sequence[Page]) -> list[bool]:
        """Write the pages to each tier that is not known to have them and is not late with earlier ones. Returns for
        each page whether some tier has it."""
        deadline_s = time.monotonic() + self._max_wait_s
        context = self._context()
        with self._changed:
            if self._is_closed:
                return [False] * len(keys)
            self._step()
            held = {tier: tier.holds(keys) for tier in self._tiers}
            late = {tier for (tier, _), job in self._open.items() if job.is_late}
        outcomes = [any(each) for each in zip(*held.values(), strict=True)]
        for tier in late:  # each further page would take another slot from the other tiers
            del held[tier]
        pending = deque(at for at in range(len(keys)) if not all(each[at] for each in held.values()))
        flying: list[_Job] = []
        while pending or flying:
            with self._changed:
                job = self._take(self._for_writes, pending)
            if job is not None:
                for at, slot in zip(job.at, job.slots, strict=True):
                    self._gather(pages[at], slot)
                flying.append(job)
                with self._changed:
                    self._submit_store(job, keys, held, context)
                continue
            with self._changed:
                self._step()
                done = [job for job in flying if job.num_users == 1]
                is_over = not done and not self._wait(deadline_s)
                if is_over:
                    done = list(flying)
                    for job in done:
                        job.is_late = True
            for job in done:
                for result in tuple(job.results):
                    for at in _good(job, result, keys):
                        outcomes[at] = True
            self._end(flying, done)
            if is_over:
                break
        return outcomes

    def stats(self) -> Stats:
        """Return the tiers' metrics."""
        with self._changed:
            return {} if self._is_closed else add_stats(tier.get_stats() for tier in self._tiers)

    def close(self) -> None:
        """End the tiers. Later calls are misses. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            tiers, self._tiers = self._tiers, []
            self._changed.notify_all()
        for tier in tiers:
            tier.shutdown()
        self._region.close()

    # -------------------------------------------------------------------------------------------- with the lock held

    def _lookup(self, key: OffloadKey, context: ReqContext) -> bool | None:
        answer: bool | None = False
        for tier in self._tiers:
            found = tier.lookup(key, context)
            if found:
                return True
            if found is None:
                answer = None
        return answer

    def _step(self) -> None:
        """Start work in the tiers and take their results, as an engine's step would."""
        for tier in self._tiers:
            tier.on_schedule_end()
            for result in tier.get_finished_jobs():
                self._ended(tier, result)

    def _ended(self, tier: GuardedTier, result: JobResult) -> None:
        """Process the end of a tier's job. Ignores results that do not belong to an open job of the tier."""
        job = self._open.pop((tier, result.job_id), None)
        if job is not None:
            job.results.append(result)
            self._release(job)

    def _wait(self, deadline_s: float) -> bool:
        """Wait until something may have changed. Returns ``False`` if the deadline has passed."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or self._is_closed:
            return False
        self._changed.wait(min(left_s, _POLL_S))
        return True

    def _take(self, free: deque[int], pending: deque[int]) -> _Job | None:
        """Return a job of the next ``pending`` pages, as many as there are free slots, or ``None``."""
        count = min(len(pending), self._job_pages, len(free))
        if not count or self._is_closed:
            return None
        return _Job([pending.popleft() for _ in range(count)], [free.popleft() for _ in range(count)], free)

    def _release(self, job: _Job) -> None:
        """Note that one user no longer needs the job's slots."""
        job.num_users -= 1
        if not job.num_users:
            job.free.extend(job.slots)
            self._changed.notify_all()

    def _submit_store(
        self,
        job: _Job,
        keys: Sequence[OffloadKey],
        held: Mapping[GuardedTier, Sequence[bool]],
        context: ReqContext,
    ) -> None:
        """Submit to each tier of ``held`` the pages that it lacks, as far as its backlog has room."""
        for tier, has in () if self._is_closed else held.items():
            chosen = [each for each, at in enumerate(job.at) if not has[at]]
            if tier.max_backlog_blocks is not None:
                writes = [
                    each for (writing, _), each in self._open.items() if writing is tier and each.free is job.free
                ]
                chosen = chosen[: max(tier.max_backlog_blocks - sum(len(each.at) for each in writes), 0)]
            if chosen:
                self._submit(tier, job, chosen, keys, context, is_promotion=False)
        self._step()

    def _submit(
        self,
        tier: GuardedTier,
        job: _Job,
        chosen: Sequence[int],
        keys: Sequence[OffloadKey],
        context: ReqContext,
        *,
        is_promotion: bool,
    ) -> None:
        """Submit to ``tier`` the pages of ``job`` at the positions ``chosen``. The tier is a user of the slots until
        its job has ended."""
        job_id = next(self._ids)
        job.num_users += 1
        self._open[tier, job_id] = job
        slots = np.array([job.slots[each] for each in chosen], np.int64)
        names = [keys[job.at[each]] for each in chosen]
        if not tier.submit(JobMetadata(job_id, names, slots, is_promotion, context)):
            self._ended(tier, JobResult(job_id, success=False))

    # ------------------------------------------------------------------------------------------- without the lock held

    def _load_from(
        self,
        tier: GuardedTier,
        wanted: deque[int],
        keys: Sequence[OffloadKey],
        pages: Sequence[Page],
        outcomes: list[bool],
        context: ReqContext,
        deadline_s: float,
    ) -> None:
        flying: list[_Job] = []
        while wanted or flying:
            with self._changed:
                while job := self._take(self._for_reads, wanted):
                    flying.append(job)
                    self._submit(tier, job, range(len(job.at)), keys, context, is_promotion=True)
                self._step()
                done = [job for job in flying if job.results]
                if not done and not self._wait(deadline_s):
                    break
            for job in done:
                slot_of = dict(zip(job.at, job.slots, strict=True))
                for at in _good(job, job.results[0], keys):
                    self._scatter(slot_of[at], pages[at])
                    outcomes[at] = True
            self._end(flying, done)
        self._end(flying, list(flying))

    def _end(self, flying: list[_Job], ended: Sequence[_Job]) -> None:
        """Detach the call from these jobs. Tiers may still use their slots."""
        with self._changed:
            for job in ended:
                flying.remove(job)
                self._release(job)

    def _gather(self, page: Page, slot: int) -> None:
        address = self._memory[slot].ctypes.data
        for piece, num_bytes in page:
            ctypes.memmove(address, piece, num_bytes)
            address += num_bytes

    def _scatter(self, slot: int, page: Page) -> None:
        address = self._memory[slot].ctypes.data
        for piece, num_bytes in page:
            ctypes.memmove(piece, address, num_bytes)
            address += num_bytes

    def _touch(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        with self._changed:
            for tier in self._tiers:
                tier.touch(keys, context)

    def _context(self) -> ReqContext:
        return ReqContext(f"sglang-{next(self._ids)}")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _good(job: _Job, result: JobResult, keys: Sequence[OffloadKey]) -> list[int]:
    """Return the indices of the pages of ``job`` that a tier has moved, according to its ``result``."""
    good = set(result.succeeded([keys[at] for at in job.at]))
    return [at for at in job.at if keys[at] in good]
