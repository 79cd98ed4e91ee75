# SPDX-License-Identifier: Apache-2.0
"""Decide which loads are short enough to run within the step that starts them. Scheduler thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvoffload.base import Direction
from kvoffload.config import GroupKind
from kvoffload.connector.groups import GroupGeometry
from kvoffload.connector.jobs import JobRecord, JobTable

logger = logging.getLogger(__name__)

SHARE = 0.1
"""The largest share of a step that a copy may take if the step waits for it, because the step's other requests also
wait."""
_NEWEST = 0.2
"""Weight of the newest measurement in each mean."""


class ShortLoads:
    """Decides which loads end within the step that starts them, so that their request runs in that step.

    The other requests of the step wait for such a copy. So the copy, after all loads in flight, must end within
    ``SHARE`` of a step, estimated by the means of earlier steps and loads. If a request is the only one in the engine,
    it may wait for any copy.

    The engine's adapter turns this on (``turn_on``). It stays off for models with states, because an engine may move
    the state of a hit before it starts loads. The first such load that fails turns it off for good: an engine can undo
    a step that ran on undefined blocks, but not cheaply.
    """

    def __init__(self, geometry: Sequence[GroupGeometry], jobs: JobTable, clock: Callable[[], float]) -> None:
        self._may_be_on = all(group.kind is not GroupKind.SINGLE_STATE for group in geometry)
        self._is_on = False
        self._jobs = jobs
        self._clock = clock
        self._step_s: float | None = None
        self._block_s: float | None = None
        """Seconds per GPU block of a load on one rank. Until the first load, it is the value of the fastest store."""
        self._knows_loads = False
        self._last_step_s: float | None = None
        """The time when the last step that computes tokens was decided."""

    def __repr__(self) -> str:
        return f"ShortLoads(is_on={self._is_on}, step_s={self._step_s}, block_s={self._block_s})"

    def turn_on(self) -> None:
        self._is_on = self._may_be_on

    def failed(self) -> None:
        """Turn loads within a step off for good, because one failed."""
        logger.warning("A copy to the GPU failed within a step. From now on, requests wait a step for their loads.")
        self._may_be_on = self._is_on = False

    def fits(self, num_gpu_blocks: int, is_alone: bool) -> bool:
        """Return whether a load of ``num_gpu_blocks`` is short. ``is_alone``: the engine has no other request."""
        if not self._is_on or is_alone:
            return self._is_on
        if self._step_s is None or self._block_s is None:
            return False
        return (self._jobs.num_loading_blocks + num_gpu_blocks) * self._block_s <= SHARE * self._step_s

    def step_begins(self, computes: bool, is_continued: bool) -> None:
        """Measure a step, which has just been decided. ``is_continued``: it computes tokens for a request that already
        ran, so the engine has not idled since the previous step."""
        now_s = self._clock()
        if is_continued and self._last_step_s is not None:
            self._step_s = _mean(self._step_s, now_s - self._last_step_s)
        self._last_step_s = now_s if computes else None

    def copied(self, job: JobRecord, num_ranks: int) -> None:
        """Measure a job that has succeeded on all ranks, which copy in parallel. Before the first load, the fastest
        store represents loads, because the first stores of a process are slow."""
        if not job.gpu_block_ids:
            return
        block_s = job.seconds / num_ranks / len(job.gpu_block_ids)
        if job.direction is Direction.LOAD:
            self._block_s = _mean(self._block_s if self._knows_loads else None, block_s)
            self._knows_loads = True
        elif not self._knows_loads:
            self._block_s = block_s if self._block_s is None else min(self._block_s, block_s)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)
