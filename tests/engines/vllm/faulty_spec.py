# SPDX-License-Identifier: Apache-2.0
"""A spec whose transfers fail, lag or corrupt on plan: named by ``spec_name`` and ``spec_module_path`` in the tests.

The real spec's handlers do the work; this wraps them. A load that fails leaves garbage in the GPU blocks it should have
filled, as a half-done copy would, so that an engine which does not recompute them answers wrongly.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

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
from kvoffload.cpu.spec import CPUOffloadingSpec


@dataclass
class Plan:
    """The faults and their probabilities.

    Scenarios change them if the engine runs in their own process. If workers are other processes, the environment
    variable ``KVOFFLOAD_TEST_FAULTS`` ("rank:probability") sets them.
    """

    fail_load: float = 0.0
    fail_store: float = 0.0
    refuse_to_start: float = 0.0
    """Transfers that raise when they are started."""
    lag_polls: int = 0
    """Results are withheld for up to this many polls."""
    corrupt_loads: int = 0
    """This many of the next loads succeed with wrong bytes in their first GPU block."""
    corrupt_blocks: int = 1
    """The number of GPU blocks of each group to damage, instead of only the first."""
    corrupt_layers: slice = field(default_factory=lambda: slice(None))
    """The indices of the group's stretches of memory to damage: one stretch per layer if layers are separate."""
    corrupt_from_group: int = 0
    """Not in groups before this one."""
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability


PLAN = Plan()


class FaultySpec(OffloadingSpec):
    def __init__(self, config: OffloadingConfig, layout: EngineLayout) -> None:
        self._inner = CPUOffloadingSpec(config, layout)
        faults = os.environ.get("KVOFFLOAD_TEST_FAULTS")
        if faults:
            rank, probability = faults.split(":")
            if int(rank) == layout.rank:
                PLAN.fail_load = PLAN.fail_store = float(probability)

    def get_manager(self) -> OffloadingManager:
        return self._inner.get_manager()

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
        inner = self._inner.get_handlers(kv_caches)
        return {media: FaultyHandler(handler, kv_caches) for media, handler in inner.items()}

    def shutdown(self) -> None:
        self._inner.shutdown()


class FaultyHandler(OffloadingHandler):
    def __init__(self, inner: OffloadingHandler, kv_caches: CanonicalKVCaches) -> None:
        self._inner = inner
        self._caches = kv_caches
        self._corrupt: dict[int, GPULoadStoreSpec] = {}
        self._withheld: list[tuple[int, TransferResult]] = []

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        destination = spec[1]
        is_load = isinstance(destination, GPULoadStoreSpec)
        if PLAN.happens(PLAN.refuse_to_start):
            raise OSError("this transfer could not be started, on plan")
        if PLAN.happens(PLAN.fail_load if is_load else PLAN.fail_store):
            if isinstance(destination, GPULoadStoreSpec):
                self._scribble(destination, len(destination.block_ids))
            self._withhold(TransferResult(job_id, success=False))
            return
        if isinstance(destination, GPULoadStoreSpec) and PLAN.corrupt_loads > 0:
            PLAN.corrupt_loads -= 1
            self._corrupt[job_id] = destination
        self._inner.transfer_async(job_id, spec)

    def _scribble(self, spec: GPULoadStoreSpec, count: int, layers: slice = slice(None), from_group: int = 0) -> None:
        """Other numbers in the first GPU blocks, finite ones: NaN would be a different, easier fault."""
        position = 0
        for group, size in enumerate(spec.group_sizes):
            for block in spec.block_ids[position : position + size][: count if group >= from_group else 0]:
                for ref in self._caches.group_data_refs[group][layers]:
                    page = self._caches.tensors[ref.tensor_idx].tensor[int(block), : ref.page_size_bytes]
                    page.copy_(torch.flip(page, (0,)) ^ 0x15)
                    page.view(torch.float32).nan_to_num_(0.5, 1.0, -1.0).clamp_(-3.0, 3.0)
            position += size

    def _withhold(self, result: TransferResult) -> None:
        self._withheld.append((PLAN.random.randint(0, PLAN.lag_polls), result))

    def _collect(self) -> None:
        for result in self._inner.get_finished():
            if result.job_id in self._corrupt:
                destination = self._corrupt.pop(result.job_id)
                self._scribble(destination, PLAN.corrupt_blocks, PLAN.corrupt_layers, PLAN.corrupt_from_group)
            self._withhold(result)

    def get_finished(self) -> list[TransferResult]:
        self._collect()
        ready = [result for polls, result in self._withheld if polls <= 0]
        self._withheld = [(polls - 1, result) for polls, result in self._withheld if polls > 0]
        return ready

    def wait(self, job_ids: Collection[int]) -> None:
        self._inner.wait(job_ids)
        self._collect()

    def shutdown(self) -> None:
        self._inner.shutdown()
