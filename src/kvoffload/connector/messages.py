# SPDX-License-Identifier: Apache-2.0
"""All messages between the scheduler side and the workers. They are plain, small and picklable.

They are values that are never changed. They are not frozen, because a frozen dataclass takes three times as long to
make, and each step makes several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvoffload.base import LoadStoreSpec, TransferResult


@dataclass(slots=True)
class TransferJob:
    """One transfer, which every rank performs on its own slice."""

    job_id: int
    request_id: str
    source: LoadStoreSpec | None
    """``None``: a load whose blocks were lost before they could be pinned. There is nothing to copy, and every rank
    reports a failure at once, so that the engine handles it like any failed load."""
    destination: LoadStoreSpec
    within_step: bool = False
    """A load that the forward pass of its step waits for. No request waits for its end."""


@dataclass(slots=True)
class ConnectorMeta:
    """The message from the scheduler to the workers, once per step."""

    loads: tuple[TransferJob, ...] = ()
    """Loads to start before the forward pass. The worker starts loads within the step first."""
    stores: tuple[TransferJob, ...] = ()
    """Stores to start after the forward pass that writes their blocks has been submitted."""
    final_stores: tuple[TransferJob, ...] = ()
    """The last stores of requests that ended since the last step. Earlier steps computed their blocks, and this step
    may overwrite them for other requests. So they start first, before the flush, which may name them."""
    flush_job_ids: frozenset[int] = frozenset()
    """Jobs of earlier steps and final stores that must end before this step's loads or forward pass touch the device,
    because their GPU blocks were allocated again."""

    def is_empty(self) -> bool:
        return not (self.loads or self.stores or self.final_stores or self.flush_job_ids)


@dataclass(slots=True)
class WorkerReport:
    """The message from the workers to the scheduler: the transfers that ended.

    Reports of several ranks are merged by concatenation.
    """

    results: tuple[tuple[int, TransferResult], ...] = ()
    """Pairs of a rank and a result. Each rank's results are ordered by the ends of its transfers."""
    undefined_loads: frozenset[int] = frozenset()
    """Loads within this step that failed on a rank: the step computed with undefined blocks, and all that it computed
    is void. Their ends are in ``results``, of this step or a later one."""

    @staticmethod
    def merge(reports: Iterable[WorkerReport]) -> WorkerReport:
        reports = list(reports)
        return WorkerReport(
            tuple(result for report in reports for result in report.results),
            frozenset[int]().union(*(report.undefined_loads for report in reports)),
        )


@dataclass(slots=True)
class LoadOutcome:
    """Loads that ended, by request: on all ranks if the scheduler side reports it, or on one worker's rank."""

    loaded_request_ids: frozenset[str] = frozenset()
    """Requests whose load succeeded, so that their external tokens are on the device."""
    failed_loads: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Requests whose load failed, with the GPU blocks that it left undefined. The engine must compute those tokens."""

    @property
    def ended_request_ids(self) -> frozenset[str]:
        return self.loaded_request_ids.union(self.failed_loads)

    @property
    def invalid_block_ids(self) -> frozenset[int]:
        """The undefined GPU blocks of all failed loads."""
        return frozenset[int]().union(*self.failed_loads.values())
