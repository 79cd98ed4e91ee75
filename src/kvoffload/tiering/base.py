# SPDX-License-Identifier: Apache-2.0
"""The interface of tiers below host memory: ``SecondaryTierManager``, and the records of its jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from kvoffload.metrics import Stats

CascadeMode = Literal["on_store", "on_evict"]
"""The time at which blocks are written to a tier: as soon as they are stored in host memory (write-through), or shortly
before host memory evicts them (write-back)."""


class JobMetadata:
    """Blocks to move between host memory and one secondary tier.

    ``block_ids[i]`` is the slot of ``keys[i]`` in host memory. The slots belong to the tier from ``submit_*`` until
    ``get_finished_jobs`` returns the job. Until then, they are neither evicted nor reused, however long that takes.
    """

    __slots__ = ("is_overdue", "is_promotion", "job_id", "keys", "req_context", "slots")

    def __init__(
        self,
        job_id: int,
        keys: Sequence[OffloadKey],
        block_ids: list[int] | npt.NDArray[np.int64],
        is_promotion: bool,
        req_context: ReqContext,
    ) -> None:
        self.job_id = job_id
        self.keys = keys
        self.slots: list[int] = block_ids if isinstance(block_ids, list) else block_ids.tolist()
        """The ``block_ids`` as a list. An array is made only for tiers that want one."""
        self.is_promotion = is_promotion
        self.req_context = req_context
        self.is_overdue = False
        """Set by the tier when a call for the job has run longer than its time limit. After that, no further request
        waits for the job's blocks, and other reads are expected as if this job did not exist. The job still ends,
        however late."""

    def __repr__(self) -> str:
        direction = "to the primary tier" if self.is_promotion else "to the tier"
        return f"JobMetadata({self.job_id}, {len(self.keys)} blocks {direction}, {self.req_context.req_id!r})"

    @property
    def block_ids(self) -> npt.NDArray[np.int64]:
        return np.array(self.slots, np.int64)


@dataclass(slots=True)
class JobResult:
    """The end of a job. With ``successful_keys=None``, ``success`` is the outcome of all of its keys; otherwise the
    listed keys succeeded and the others failed."""

    job_id: int
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    ended_s: float | None = field(default=None, compare=False)
    """The time at which the last byte was moved, by the manager's clock; ``None``: the tier does not know. It is used
    to measure the tier's speed; without it, the time at which the result is taken is used."""
    num_dropped: int = field(default=0, compare=False)
    """Number of keys that the tier never tried, because too many waited or writing was off."""

    def succeeded(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the successful ones of ``keys``, which are the job's keys, in order."""
        if self.successful_keys is None:
            return [*keys] if self.success else []
        good = set(self.successful_keys)
        return [key for key in keys if key in good]


class SecondaryTierManager(ABC):
    """A tier below host memory. Every method except ``drain_jobs`` runs on the scheduler's thread and returns at once,
    without I/O and without waiting.

    ``TieringOffloadingManager`` calls these methods::

        on_new_request                       once per request
        lookup* / touch                      while it waits, while it runs
        submit_store / submit_load           each returned once by get_finished_jobs
        on_request_finished                  once, after the request's last submit
        on_schedule_end, get_finished_jobs   every step
        drain_jobs                           before primary memory is reused or unmapped
        shutdown                             last

    ``primary_kv_view`` is the host memory, with the shape (num_blocks, block_bytes) and the format ``B``.
    """

    medium: str | None = None
    """``CPU`` or ``STORAGE``, for requests that choose their tiers; ``None`` if it is not known."""
    locality: str | None = None
    """``LOCAL`` or ``REMOTE``; ``None`` if it is not known."""
    max_backlog_blocks: int | None = None
    """Maximum number of blocks in unfinished stores, which stay pinned in host memory. The manager drops further
    blocks. ``None``: a quarter of host memory, but at least 64 blocks."""

    def __init__(self, primary_kv_view: memoryview, tier_type: str) -> None:
        if primary_kv_view.ndim != 2:
            raise ValueError("primary_kv_view must be two-dimensional: (num_blocks, block_bytes).")
        self.primary_kv_view = primary_kv_view
        self.tier_type = tier_type
        assert primary_kv_view.shape is not None
        self.block_bytes = primary_kv_view.shape[1]
        """Number of bytes of one block."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return ``True`` if a load should succeed, ``False`` if the tier does not have the block, and ``None`` if this
        is not known yet: ask again in the next step."""

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Look up ``keys`` (at least one) in order, up to and including the first ``False``. A tier overrides this only
        to be faster, because a long prompt has thousands of blocks."""
        answers: list[bool | None] = []
        for key in keys:
            answers.append(self.lookup(key, req_context))
            if answers[-1] is False:
                break
        return answers

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Look up each of ``keys``. A tier overrides this only to be faster."""
        return [self.lookup(key, req_context) for key in keys]

    @abstractmethod
    def submit_store(self, job: JobMetadata) -> None:
        """Copy blocks from their (pinned) slots in host memory to the tier. The tier may drop them, which counts as a
        failed job. It may start when the step ends."""

    @abstractmethod
    def submit_load(self, job: JobMetadata) -> None:
        """Copy blocks from the tier to their (reserved) slots in host memory."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, each once."""

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Register a new request, and return whether this tier wants all of its blocks."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Note the end of a request. No submit follows for it, but its jobs may still be in flight."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Note that the blocks of a prefix were used, from head to tail."""

    def on_schedule_end(self) -> None:
        """Note the end of a step, which has now been decided."""

    def has_pending_work(self) -> bool:
        """Return whether more steps are needed until all jobs have been returned. Jobs that hang do not count, because
        an idle engine would otherwise step forever."""
        return False

    def drain_jobs(self) -> None:
        """Wait until no I/O accesses host memory, or until the tier's own deadline. ``get_finished_jobs`` still returns
        the jobs that ended.

        The default does not wait. That is safe, because slots of unfinished jobs stay reserved.
        """

    def call_on_progress(self, call: Callable[[], None]) -> None:
        """Register ``call``, which the tier calls whenever ``lookup`` or ``get_finished_jobs`` may know more. It serves
        callers that wait instead of stepping. Any thread may make the call, which returns soon.

        The default never makes it, for tiers that cannot tell. Callers that wait also ask at intervals.
        """

    def take_news(self) -> Collection[OffloadKey] | None:
        """Return the blocks about which ``lookup`` may know more since the last call. They include each block with the
        answer ``None`` once its answer has changed or it must be asked for again. They need not include blocks of
        ``submit_store``. The manager calls this once before its first lookup, so a tier may record from then on.

        The default, ``None``, is for tiers that cannot tell. Waiting requests ask them again in each step.
        """
        return None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events of blocks that appeared in this tier or left it since the last call. Only some engines ever
        call this, so a tier records events only if it was created with ``enable_events``, or limits their number."""
        return ()

    def get_stats(self) -> Stats:
        """Return the current values of the tier's metrics."""
        return {}

    def is_readable(self) -> bool:
        """Return whether its blocks can be looked up and loaded. The answer is ``False``, for example, while its
        circuit breaker is open."""
        return True

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each block whether it is known to be in the tier, without asking the store."""
        return [False] * len(keys)

    def note_losses(self) -> None:
        """Record the losses of blocks that have happened by now, because the manager is about to explain a miss."""

    def shutdown(self) -> None:
        """Drain the tier, then release threads and files. Idempotent."""
