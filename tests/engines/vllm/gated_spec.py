# SPDX-License-Identifier: Apache-2.0
"""A spec whose loads end only while a gate is open: named by ``spec_name`` and ``spec_module_path`` in the tests."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from kvoffload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    TransferResult,
)
from kvoffload.config import EngineLayout, OffloadingConfig
from kvoffload.connector.short_loads import ShortLoads
from kvoffload.cpu.spec import CPUOffloadingSpec

GATE = "KVOFFLOAD_TEST_GATE"
"""The environment variable with the gate's folder."""


class Gate:
    """Closed while ``closed`` exists in its folder; ``held`` exists once a load waits there."""

    def __init__(self, folder: Path) -> None:
        self.closed, self.held = folder / "closed", folder / "held"

    def close(self) -> None:
        self.held.unlink(missing_ok=True)
        self.closed.touch()

    def open(self) -> None:
        self.closed.unlink()


class GatedSpec(OffloadingSpec):
    def __init__(self, config: OffloadingConfig, layout: EngineLayout) -> None:
        self._inner = CPUOffloadingSpec(config, layout)
        self._gate = Gate(Path(os.environ[GATE]))

    def get_manager(self) -> OffloadingManager:
        ShortLoads.turn_on = lambda self: None  # type: ignore[method-assign]  # a load that waits holds up no step
        return self._inner.get_manager()

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
        inner = self._inner.get_handlers(kv_caches)
        return {media: GatedHandler(handler, self._gate) for media, handler in inner.items()}

    def shutdown(self) -> None:
        self._inner.shutdown()


class GatedHandler(OffloadingHandler):
    def __init__(self, inner: OffloadingHandler, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate
        self._loads: set[int] = set()
        self._ended: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        if isinstance(spec[1], GPULoadStoreSpec):
            self._loads.add(job_id)
        self._inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        self._ended += self._inner.get_finished()
        held = self._loads if self._gate.closed.exists() else set()
        ready = [result for result in self._ended if result.job_id not in held]
        self._ended = [result for result in self._ended if result.job_id in held]
        if self._ended:
            self._gate.held.touch()
        return ready

    def wait(self, job_ids: Collection[int]) -> None:
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        self._inner.shutdown()
