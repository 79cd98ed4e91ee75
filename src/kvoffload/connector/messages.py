# SPDX-License-Identifier: Apache-2.0
"""The only things that travel between the scheduler side and the workers. Plain, picklable, small."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvoffload.base import LoadStoreSpec, TransferResult

__all__ = ["ConnectorMeta", "LoadOutcome", "TransferJob", "WorkerReport"]


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
class WorkerReport:
    """Workers to scheduler: the transfers that ended. Reports of several ranks merge by concatenation."""

    results: tuple[tuple[int, TransferResult], ...] = ()
    """(rank, its result), in the order in which each rank's transfers ended."""

    @staticmethod
    def merge(reports: Iterable[WorkerReport]) -> WorkerReport:
        return WorkerReport(tuple(result for report in reports for result in report.results))


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Loads that ended, by request: on all ranks where the scheduler side returns it, on one where a worker does."""

    loaded_request_ids: frozenset[str] = frozenset()
    """The load succeeded: the request's external tokens are on the device now."""
    failed_loads: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The load failed, and left these GPU blocks undefined: the engine must compute their tokens instead."""

    @property
    def ended_request_ids(self) -> frozenset[str]:
        return self.loaded_request_ids.union(self.failed_loads)

    @property
    def invalid_block_ids(self) -> frozenset[int]:
        """Of all failed loads together."""
        return frozenset[int]().union(*self.failed_loads.values())
