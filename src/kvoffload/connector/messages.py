# SPDX-License-Identifier: Apache-2.0
"""The only things that travel between the scheduler side and the workers. Plain, picklable, small."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvoffload.base import LoadStoreSpec

__all__ = ["ConnectorMeta", "JobEnd", "StepOutcome", "TransferJob", "WorkerReport"]


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One transfer, done by every rank on its own slice."""

    job_id: int
    request_id: str
    source: LoadStoreSpec
    destination: LoadStoreSpec


@dataclass(frozen=True, slots=True)
class ConnectorMeta:
    """Scheduler to workers, every step."""

    loads: tuple[TransferJob, ...] = ()
    """Start before the forward pass."""
    stores: tuple[TransferJob, ...] = ()
    """Start once the forward pass that writes their blocks has been submitted."""
    flush_job_ids: frozenset[int] = frozenset()
    """Jobs that must have ended before this step's forward pass or loads touch the device: their GPU blocks were
    handed out again. May name jobs submitted in earlier steps only."""

    lost_loads: tuple[TransferJob, ...] = ()
    """Loads whose blocks vanished before they could be pinned: there is nothing to copy (``source`` means nothing), and
    every rank reports a failure at once, so that the engine hears of them as of any failed load."""

    def is_empty(self) -> bool:
        return not (self.loads or self.stores or self.flush_job_ids or self.lost_loads)


@dataclass(frozen=True, slots=True)
class JobEnd:
    """One rank's end of one job."""

    job_id: int
    rank: int
    success: bool
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Workers to scheduler. Reports of several ranks merge by concatenation."""

    ends: tuple[JobEnd, ...] = ()

    @staticmethod
    def merge(reports: Iterable[WorkerReport]) -> WorkerReport:
        return WorkerReport(tuple(end for report in reports for end in report.ends))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the engine must know of the jobs that ended: which waiting requests may run, and what they lack."""

    loaded_request_ids: frozenset[str] = frozenset()
    """Their external tokens are on the device now."""
    failed_loads: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Requests whose load failed, with the GPU blocks whose content is undefined: compute those tokens instead."""
