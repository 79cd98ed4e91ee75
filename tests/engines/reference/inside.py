# SPDX-License-Identifier: Apache-2.0
"""Access to the inside of a reference engine that offloads, for tests of events within a step and of failed copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from tests.leaks import kept

from kvoffload.base import OffloadingHandler
from kvoffload.connector import OffloadingConnectorScheduler, OffloadingConnectorWorker
from kvoffload.engines.reference import Engine

T = TypeVar("T", bound=OffloadingHandler)


def sides_of(engine: Engine) -> tuple[OffloadingConnectorScheduler, OffloadingConnectorWorker]:
    assert engine._connector is not None and engine._worker is not None
    return engine._connector, engine._worker


def begin_step(engine: Engine) -> int:
    """Submits the loads of a step that computes nothing. The number of requests that would run."""
    connector, worker = sides_of(engine)
    plan = engine._scheduler.schedule()
    worker.start_step(connector.build_connector_meta(plan.for_connector))
    return len(plan.scheduled)


def end_step(engine: Engine) -> None:
    sides_of(engine)[1].end_step()


def take_reports(engine: Engine) -> None:
    """Take the reports of transfers that ended, without a step."""
    connector, worker = sides_of(engine)
    engine._scheduler.take_outcome(connector.update_connector_output(worker.get_report()))


def num_final_stores(engine: Engine) -> int:
    """Stores of requests that have ended, which the next step submits."""
    return len(sides_of(engine)[0]._jobs.final_stores)


def wrap_handlers(engine: Engine, wrap: Callable[[tuple[str, str], OffloadingHandler], T]) -> dict[tuple[str, str], T]:
    """Replace each handler by the result of ``wrap`` for the handler and its media."""
    worker = sides_of(engine)[1]
    wrapped = {media: wrap(media, handler) for media, handler in worker._handlers.items()}
    worker._handlers = dict(wrapped)
    return wrapped


def tables_of(engine: Engine) -> dict[str, tuple[list[int], ...]]:
    """GPU blocks by request and group."""
    return engine._kv_cache._tables


def pools_of(engine: Engine) -> tuple[torch.Tensor, ...]:
    """Return the GPU blocks of each group."""
    return engine._runner.pools


def num_free(engine: Engine) -> list[int]:
    """GPU blocks of each group."""
    return [pool.num_free for pool in engine._kv_cache._pools]


def kept_requests(engine: Engine) -> dict[str, str]:
    """Return the data that an idle engine still keeps for numbered requests.

    This takes the ends of loads from the scheduler side, and leaves the worker's.
    """
    connector, worker = sides_of(engine)
    engine.step()  # the connector knows a step until the next
    worker.take_load_outcome()
    ids = {f"request-{number}" for number in range(next(engine._ids))}
    return kept(ids, connector, worker, engine._scheduler, engine._requests)
