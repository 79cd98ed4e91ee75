# SPDX-License-Identifier: Apache-2.0
"""Copies runs within host memory without holding the GIL: the backend for CPU engines.

With llvmlite installed, a whole plan is one native call (``native.py``), from shortly after the first copy on. Without
it, every run is one ``memmove`` through ctypes, which costs about a microsecond and so matters below 64 KiB a run.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from kvoffload.base import (
    CanonicalKVCaches,
    Direction,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TransferResult,
)
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.native import CompiledLater, compile_mover
from kvoffload.cpu.copy.plan import CopyLayout, Runs, plan_parts
from kvoffload.cpu.copy.queue import CopyPlan, Extent, TransferQueue

__all__ = ["MOVER", "copy_to_device", "copy_to_host", "make_host_handlers", "move_one_by_one"]

CopyRuns = Callable[[Runs], None]
Int64s = npt.NDArray[np.int64]


def make_host_handlers(
    kv_caches: CanonicalKVCaches, kv_view: memoryview, layout: CopyLayout, num_threads: int
) -> dict[tuple[str, str], OffloadingHandler]:
    """Both directions for one worker, over one queue of ``num_threads`` threads. They keep both memories alive."""
    keep_alive = (kv_caches, kv_view)
    queue = TransferQueue(num_threads)
    store = HostHandler(queue, Direction.STORE, layout, copy_to_host, keep_alive)
    load = HostHandler(queue, Direction.LOAD, layout, copy_to_device, keep_alive)
    return {("GPU", "CPU"): store, ("CPU", "GPU"): load}


class HostHandler(OffloadingHandler):
    """One direction of copies within host memory, over a queue that both directions share.

    A CPU engine computes on the worker's own thread, so compute submitted before ``transfer_async`` has ended.
    """

    def __init__(
        self, queue: TransferQueue, direction: Direction, layout: CopyLayout, copy_runs: CopyRuns, keep_alive: object
    ) -> None:
        self._queue = queue
        self._direction = direction
        self._layout = layout
        self._copy_runs = copy_runs
        self._keep_alive: object = keep_alive

    def __repr__(self) -> str:
        return f"HostHandler({self._direction.value}, {self._queue!r})"

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        gpu, cpu = spec if self._direction is Direction.STORE else spec[::-1]
        if not isinstance(gpu, GPULoadStoreSpec) or not isinstance(cpu, CPULoadStoreSpec):
            raise TypeError(f"A {self._direction.value} goes between GPU and CPU blocks, not {spec!r}.")
        extent = Extent(frozenset(cpu.block_ids.tolist()), frozenset(gpu.block_ids.tolist()))
        self._queue.submit(job_id, self._direction, extent, lambda: self._plan(gpu, cpu))

    def get_finished(self) -> list[TransferResult]:
        return self._queue.take_finished(self._direction)

    def wait(self, job_ids: Collection[int]) -> None:
        self._queue.wait(job_ids)

    def shutdown(self) -> None:
        self._queue.shutdown()
        self._keep_alive = None

    def _plan(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> CopyPlan:
        parts, num_bytes = plan_parts(self._layout, gpu, cpu, self._direction, self._queue.num_threads)
        return CopyPlan([functools.partial(self._copy_runs, part) for part in parts], num_bytes)


def copy_to_host(runs: Runs) -> None:
    """Device to region; the caller keeps both sides alive."""
    _move(runs.host, runs.device, runs.lengths)


def copy_to_device(runs: Runs) -> None:
    """Region to device; the caller keeps both sides alive."""
    _move(runs.device, runs.host, runs.lengths)


def _move(destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
    if len(lengths):
        MOVER(destinations, sources, lengths)


def move_one_by_one(destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
    """One ctypes call per run. Each releases the GIL."""
    for destination, source, length in zip(destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(destination, source, length)


MOVER = CompiledLater(move_one_by_one, compile_mover)
"""Moves the runs of every queue of this process."""
