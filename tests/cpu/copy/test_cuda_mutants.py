# SPDX-License-Identifier: Apache-2.0
"""Removes each wait of the CUDA backend in turn. A scenario must then see wrong bytes, or the fake driver a fault."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import pytest
from tests.cpu.copy.fake_cuda import FakeCuda, cuda
from tests.cpu.copy.scenarios import SCENARIOS

from kvoffload.base import Direction
from kvoffload.cpu.copy import cuda as backend
from kvoffload.cpu.copy import lane
from kvoffload.cpu.copy.cuda import make_cuda_handlers
from kvoffload.cpu.copy.lane import Job, Lane, Moment
from kvoffload.cpu.copy.plan import Extent, Runs

__all__ = ["cuda"]

Mutant = Callable[[pytest.MonkeyPatch], None]


def _compute_before(skipped: Direction) -> Mutant:
    real = backend.CudaHandler._put

    def mutate(patch: pytest.MonkeyPatch) -> None:
        def put(self: backend.CudaHandler, *args: object) -> None:
            with pytest.MonkeyPatch.context() as inner:
                if self._direction is skipped:
                    inner.setattr(backend._Copies, "compute_before", lambda copies: copies.pools.untimed.moment())
                real(self, *args)  # type: ignore[arg-type]

        patch.setattr(backend.CudaHandler, "_put", put)

    return mutate


def _conflicts(keeps: Callable[[Direction, Extent, Job], bool]) -> Mutant:
    real = backend._Copies.conflicting

    def mutate(patch: pytest.MonkeyPatch) -> None:
        def conflicting(self: backend._Copies, direction: Direction, extent: Extent) -> list[Job]:
            return [job for job in real(self, direction, extent) if keeps(direction, extent, job)]

        patch.setattr(backend._Copies, "conflicting", conflicting)

    return mutate


def _replaced(owner: type, name: str, function: Callable[..., object]) -> Mutant:
    return lambda patch: patch.setattr(owner, name, function)


def _shares_slots(extent: Extent, job: Job) -> bool:
    return not extent.slots.isdisjoint(job.extent.slots)


MUTANTS: dict[str, Mutant] = {
    "a store does not wait for compute": _compute_before(Direction.STORE),
    "a load does not wait for compute": _compute_before(Direction.LOAD),
    "a load does not wait for stores": _conflicts(lambda direction, extent, job: direction is Direction.STORE),
    "a store does not wait for loads": _conflicts(lambda direction, extent, job: direction is Direction.LOAD),
    "jobs on one slot overtake each other": _conflicts(lambda direction, extent, job: not _shares_slots(extent, job)),
    "jobs on one GPU block overtake each other": _conflicts(lambda direction, extent, job: _shares_slots(extent, job)),
    "compute does not wait for flushed jobs": _replaced(backend._Copies, "hold_compute", lambda self, lane, job: True),
    "waiting returns when a job is submitted": _replaced(Lane, "wait", Lane.hurry),
    "a job has ended when it is submitted": _replaced(Lane, "has_ended", lambda self, job: job.is_submitted),
    "an event is used again while a job needs it": _replaced(
        Moment, "release", lambda self: self._events.give_back(self.event)
    ),
    "copies cross borders": _replaced(Runs, "cut_at", lambda self, borders: self),
    "a shutdown waits for nothing": _replaced(Lane, "close", lambda self: True),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_scenario_notices(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    MUTANTS[name](monkeypatch)
    monkeypatch.setattr(lane, "DRAIN_S", 1.0)
    caplog.set_level(logging.CRITICAL)
    noticed = []
    for check in SCENARIOS:
        try:
            check(cuda, make_cuda_handlers)
        except Exception as exc:  # noqa: BLE001 - how a mutant fails does not matter
            noticed.append((check.__name__, exc))
            break
    for each in [each for each in gc.get_objects() if isinstance(each, Lane)]:  # a mutant may leave its thread running
        with each._changed:
            each._is_closing = True
            each._changed.notify_all()
        if each._thread is not None:
            each._thread.join(30)
    cuda.reset()
    assert noticed, f"no scenario notices that {name}"
