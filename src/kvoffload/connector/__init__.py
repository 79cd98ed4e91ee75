# SPDX-License-Identifier: Apache-2.0
"""The interface through which an engine offloads: one class in its scheduler, one in each worker, and their messages.

``engine.py`` documents the types that an engine must provide, and the order of its calls.
"""

from __future__ import annotations

from kvoffload.connector.engine import (
    NO_BLOCK,
    BlockIds,
    BoundaryState,
    EngineRequest,
    EngineStep,
    ScheduledRequest,
)
from kvoffload.connector.guard import GuardedManager
from kvoffload.connector.messages import ConnectorMeta, LoadOutcome, TransferJob, WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.connector.worker import OffloadingConnectorWorker

__all__ = [
    "NO_BLOCK",
    "BlockIds",
    "BoundaryState",
    "ConnectorMeta",
    "EngineRequest",
    "EngineStep",
    "GuardedManager",
    "LoadOutcome",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "ScheduledRequest",
    "TransferJob",
    "WorkerReport",
]
