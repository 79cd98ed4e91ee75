# SPDX-License-Identifier: Apache-2.0
"""The seam for tiers below the primary one: ``SecondaryTierManager``, and the records of its jobs."""

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
"""When blocks are cascaded to a tier: as soon as they are stored (write-through), or shortly before the primary tier
evicts them (write-back)."""


class JobMetadata:
    """Blocks to move between the primary tier and one secondary tier.

    ``block_ids[i]`` is the primary slot of ``keys[i]``. The slots belong to the tier from ``submit_*`` until the
    job is returned by ``get_finished_jobs``: they are neither evicted nor reused before, however long that takes.
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
        """``block_ids``, of which an array is made only for tiers that want one."""
        self.is_promotion = is_promotion
        self.req_context = req_context
        self.is_overdue = False
        """Set by the tier when a call for the job has run for longer than it may. From then on no further request waits
        for the job's blocks, and no other read is expected to end later because of it. It still ends, however late."""

    def __repr__(self) -> str:
        direction = "to the primary tier" if self.is_promotion else "to the tier"
        return f"JobMetadata({self.job_id}, {len(self.keys)} blocks {direction}, {self.req_context.req_id!r})"

    @property
    def block_ids(self) -> npt.NDArray[np.int64]:
        return np.array(self.slots, np.int64)


@dataclass(slots=True)
class JobResult:
    """The end of a job. With ``successful_keys=None``, ``success`` is the outcome of all of its keys; otherwise those
    keys succeeded and the others failed."""

    job_id: int
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    ended_s: float | None = field(default=None, compare=False)
    """When the last byte was moved, by the manager's clock; ``None``: the tier does not know. The tier's speed is
    measured by it, and otherwise by when its result is taken."""
    num_dropped: int = field(default=0, compare=False)
    """Keys that did not succeed because the tier never tried: too many waited, or writing was off."""

    def succeeded(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of ``keys``, which are the job's, that succeeded, in order."""
        if self.successful_keys is None:
            return [*keys] if self.success else []
        good = set(self.successful_keys)
        return [key for key in keys if key in good]


class SecondaryTierManager(ABC):
    """A tier below host memory. Every method runs on the scheduler thread and returns at once: no I/O, no waiting
    (``drain_jobs`` alone excepted).

    Called by ``TieringOffloadingManager``::

        on_new_request                       once per request
        lookup* / touch                      while it waits, while it runs
        submit_store / submit_load           each returned once by get_finished_jobs
        on_request_finished                  once, after the request's last submit
        on_schedule_end, get_finished_jobs   every step
        drain_jobs                           before primary memory is reused or unmapped
        shutdown                             last

    ``primary_kv_view`` is the primary tier's memory, two-dimensional (num_blocks, block_bytes), format ``B``.
    """

    medium: str | None = None
    """``CPU`` or ``STORAGE``, for requests that choose their tiers; ``None``: it is not known."""
    locality: str | None = None
    """``LOCAL`` or ``REMOTE``; ``None``: it is not known."""
    max_backlog_blocks: int | None = None
    """Blocks of stores that have not ended, which stay pinned in the primary tier; the manager drops more. ``None``: a
    quarter of the primary tier, but at least 64."""

    def __init__(self, primary_kv_view: memoryview, tier_type: str) -> None:
        if primary_kv_view.ndim != 2:
            raise ValueError("primary_kv_view must be two-dimensional: (num_blocks, block_bytes).")
        self.primary_kv_view = primary_kv_view
        self.tier_type = tier_type
        assert primary_kv_view.shape is not None
        self.block_bytes = primary_kv_view.shape[1]
        """Bytes of one block."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """``True``: a load should succeed. ``False``: not here. ``None``: not known yet; ask again in the next step."""

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """``lookup`` of ``keys``, of which there is one at least, in order up to and including the first ``False``. A
        tier overrides this only to be faster: a long prompt has thousands of blocks."""
        answers: list[bool | None] = []
        for key in keys:
            answers.append(self.lookup(key, req_context))
            if answers[-1] is False:
                break
        return answers

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """``lookup`` of each of ``keys``. A tier overrides this only to be faster."""
        return [self.lookup(key, req_context) for key in keys]

    @abstractmethod
    def submit_store(self, job: JobMetadata) -> None:
        """Copies blocks from their (pinned) primary slots into the tier. May drop them: that is a failed job. May begin
        when the step ends."""

    @abstractmethod
    def submit_load(self, job: JobMetadata) -> None:
        """Copies blocks from the tier into their (reserved) primary slots."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call, each once."""

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request arrives. Returns whether this tier wants all of its blocks."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No more submits for this request; its jobs may still be in flight."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Blocks of a prefix, head to tail, were used."""

    def on_schedule_end(self) -> None:
        """The step is decided."""

    def has_pending_work(self) -> bool:
        """Whether more steps are needed before all jobs have been returned. Jobs that hang do not count, or an idle
        engine would step for ever."""
        return False

    def drain_jobs(self) -> None:
        """Returns once no I/O touches primary memory any more, or after the tier's own deadline. ``get_finished_jobs``
        still returns the jobs that ended.

        The default waits for nothing, which is safe: slots of unfinished jobs stay reserved.
        """

    def call_on_progress(self, call: Callable[[], None]) -> None:
        """From now on ``call`` is called whenever ``lookup`` or ``get_finished_jobs`` may know more, for callers that
        wait for that instead of stepping. Any thread may make the call, which returns soon.

        The default never makes it, for tiers that cannot tell: callers that wait also ask now and then.
        """

    def take_news(self) -> Collection[OffloadKey] | None:
        """Returns blocks about which ``lookup`` may know more since the last call. Each block that it answered with
        ``None`` is among them once it has another answer, or must be asked for again. Blocks of ``submit_store`` need
        not be.

        The default, ``None``, is for tiers that cannot tell: waiting requests ask them again in each step.
        """
        return None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events of blocks that appeared in or left this tier since the last call. Only some engines ever call it: a
        tier that records events does so only if it was built with ``enable_events``, or bounds them."""
        return ()

    def get_stats(self) -> Stats:
        """Current metric values."""
        return {}

    def is_readable(self) -> bool:
        """Whether its blocks are looked up and loaded now. ``False``: its circuit breaker is open, say."""
        return True

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Which blocks are known to be here; the losses of the others are recorded by now. Asks for nothing."""
        return [False] * len(keys)

    def shutdown(self) -> None:
        """Drains, then releases threads and files. Idempotent."""
