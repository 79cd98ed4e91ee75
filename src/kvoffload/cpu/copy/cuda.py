# SPDX-License-Identifier: Apache-2.0
"""Copies runs between a CUDA device and the region, on a lane for each direction (``lane.py``).

Order is kept on the device's own timeline. There a job waits for the compute that wrote the blocks that it reads, or
that may still read the blocks that it overwrites, and for every open job of the other direction that touches the same
slots or GPU blocks. The stream itself orders the jobs of one direction. The engine's thread waits in ``wait``, whose
caller is about to use the memory, and in ``shutdown``, which has a bound.

A failure ends a job, once its copies have. A broken device, on which nothing runs any more, ends all jobs at once, and
all that come later: every block is a miss.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from kvoffload.base import (
    CanonicalKVCaches,
    Direction,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TransferResult,
)
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.driver import CudaError, Driver, Stream, load_driver
from kvoffload.cpu.copy.gather import gather_below
from kvoffload.cpu.copy.lane import DeviceHealth, EventPools, Job, Lane, Moment
from kvoffload.cpu.copy.numa import node_of_device
from kvoffload.cpu.copy.pinning import PinnedRegion
from kvoffload.cpu.copy.plan import CopyLayout, Extent, Runs, plan_runs
from kvoffload.cpu.copy.self_check import CopiesHang, check_copies
from kvoffload.errors import LayoutError, TransferError
from kvoffload.logs import RateLimitedLog

logger = logging.getLogger(__name__)

_MEMORY_OF_HUNG_DEVICES: list[object] = []
"""Copies may still run, so it is neither freed nor unpinned before the process ends."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """Where an engine computes."""

    driver: Driver
    number: int
    """Among the devices that this process sees."""
    compute_stream: Callable[[], Stream]
    """The stream that the engine submits to now. Called on the worker's thread."""

    @classmethod
    def of(cls, device: torch.device) -> CudaDevice:
        """``device`` is a tensor's. Raises ``ConfigError`` without NVIDIA's driver, and ``LayoutError`` for a device of
        AMD, which torch calls CUDA too."""
        if torch.version.hip is not None:
            raise LayoutError(
                "KV caches on AMD devices cannot be offloaded, since copies go through NVIDIA's driver; serve without "
                "kvoffload there."
            )
        number = device.index
        return cls(load_driver(), number, lambda: Stream(torch.cuda.current_stream(number).cuda_stream))


def make_cuda_handlers(
    kv_caches: CanonicalKVCaches, kv_view: memoryview, layout: CopyLayout, device: CudaDevice | None = None
) -> dict[tuple[str, str], OffloadingHandler]:
    """Handlers for both directions of one worker, on its thread. They share the pinned region, and wait for each
    other's jobs. ``device`` is where the KV caches lie.

    Pins all of ``kv_view``, which takes some 0.1 s a GB. Copies some blocks out and back, and leaves them as they were.
    Raises ``CapacityError`` where host memory cannot be pinned, and ``TransferError`` where copies come back wrong.
    """
    copies = _Copies(kv_caches, kv_view, layout, device or CudaDevice.of(kv_caches.tensors[0].tensor.device))
    store, load = CudaHandler(copies, Direction.STORE), CudaHandler(copies, Direction.LOAD)
    try:
        check_copies(store, load, kv_view, layout)
    except CopiesHang:
        _MEMORY_OF_HUNG_DEVICES.append(copies)  # what was waited for is not waited for again
        raise
    except BaseException:
        store.shutdown()
        load.shutdown()
        raise
    return {("GPU", "CPU"): store, ("CPU", "GPU"): load}


class _Copies:
    """Shared by both directions of one worker: the memory on both sides, the jobs in flight, and the device's health.

    On the worker's thread.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, kv_view: memoryview, layout: CopyLayout, device: CudaDevice
    ) -> None:
        self.layout = layout
        self.driver = device.driver
        self.health = DeviceHealth()
        self.pools = EventPools(self.driver)
        self.open: dict[Direction, deque[Job]] = {direction: deque() for direction in Direction}
        self.log = RateLimitedLog(logger)
        self._device = device
        self._kv_caches: CanonicalKVCaches | None = kv_caches
        self._mark: Moment | None = None
        below = gather_below()  # before pinning, which takes minutes
        self.use_device()
        if not self.driver.has_one_address(device.number) and self.driver.has_batch:
            logger.warning("This device has other addresses for pinned memory than the host; copies are made singly.")
            self.driver.copies_per_call = 1
        node = node_of_device(self.driver.pci_bus_id(device.number))
        self.region = PinnedRegion(self.driver, kv_view, node)
        self._spacer = self.driver.allocate(1)
        self.lanes = {
            direction: Lane(
                self.driver, device.number, direction, self.health, self.pools, self._spacer, self.region.borders, below
            )
            for direction in Direction
        }
        self.lanes[Direction.STORE].other = self.lanes[Direction.LOAD]
        self.lanes[Direction.LOAD].other = self.lanes[Direction.STORE]

    def use_device(self) -> None:
        if not self.driver.has_context():
            self.driver.use_device(self._device.number)

    # ----------------------------------------------------------------------------------------------------- order

    def conflicting(self, direction: Direction, extent: Extent) -> list[Job]:
        """Open jobs that must end before a job on ``extent`` starts. The stream orders the jobs of one direction."""
        other = Direction.LOAD if direction is Direction.STORE else Direction.STORE
        return [
            job
            for job in self.open[other]
            if not extent.slots.isdisjoint(job.extent.slots) or not extent.gpu_blocks.isdisjoint(job.extent.gpu_blocks)
        ]

    def compute_before(self, direction: Direction) -> Moment:
        """The end of the compute submitted so far, or, for a load, of that before the mark."""
        if direction is Direction.LOAD and self._mark is not None:
            return self._mark.share()
        now = self.pools.untimed.moment()
        try:
            self.driver.record(now.event, self._device.compute_stream())
        except BaseException:
            now.release()
            raise
        return now

    def mark_compute(self) -> None:
        before, self._mark = self._mark, None
        if before is not None:
            before.release()
        mark = self.pools.untimed.moment()
        self.driver.record(mark.event, self._device.compute_stream())
        self._mark = mark

    def hold_compute(self, job: Job) -> bool:
        """Compute submitted from now on starts after ``job``, which is submitted. ``False`` if its end is not known."""
        if job.has_end:
            self.driver.wait_event(self._device.compute_stream(), job.ended.event)
        return job.has_end

    def take_addresses(self) -> None:
        caches = self._kv_caches
        if caches is not None:
            refs = caches.group_data_refs
            self.layout = self.layout.at(
                [[caches.tensors[ref.tensor_idx].tensor.data_ptr() for ref in group] for group in refs]
            )

    def retire(self, job: Job) -> None:
        """It has ended."""
        if job.started is not None:
            self.pools.timed.give_back(job.started)
        job.ended.release()

    def close(self, direction: Direction, is_over: bool) -> None:
        """With the second direction all is given back, if the copies of both are over."""
        lane = self.lanes.pop(direction)
        if is_over:
            lane.release()
        elif self not in _MEMORY_OF_HUNG_DEVICES:
            logger.error("The CUDA device does not end its copies; their memory is kept until the process ends.")
            _MEMORY_OF_HUNG_DEVICES.append(self)
        if self.lanes or self in _MEMORY_OF_HUNG_DEVICES:
            return
        self.region.unpin()
        if self._mark is not None:
            self._mark.release()
        self.pools.close()
        with contextlib.suppress(CudaError):
            self.driver.free(self._spacer)
        self._mark = self._kv_caches = None


class CudaHandler(OffloadingHandler):
    """One direction between a CUDA device and the region."""

    def __init__(self, copies: _Copies, direction: Direction) -> None:
        self._copies = copies
        self._driver = copies.driver
        self._direction = direction
        self._lane = copies.lanes[direction]
        self._finished: list[TransferResult] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"CudaHandler({self._direction.value}, open={[job.job_id for job in self._open]})"

    @property
    def _open(self) -> deque[Job]:
        return self._copies.open[self._direction]

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        try:
            self._put(job_id, spec)
        except Exception as exc:
            # The boundary to the engine's step: a transfer that cannot be started is a miss.
            self._copies.log.exception(f"transfer {job_id} could not be started")
            if isinstance(exc, CudaError):
                self._lane.check()
            self._finished.append(TransferResult(job_id, success=False))

    def get_finished(self) -> list[TransferResult]:
        while self._open and (result := self._result_of(self._open[0])):
            self._copies.retire(self._open.popleft())
            self._finished.append(result)
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        for job in self._named(job_ids):
            self._lane.wait(job)

    def flush(self, job_ids: Collection[int]) -> None:
        jobs = self._named(job_ids)
        try:
            for job in jobs:
                self._lane.hurry(job)
                if not self._copies.hold_compute(job):
                    self._lane.wait(job)
        except CudaError:
            self._copies.log.exception("compute could not be made to wait for transfers")
            self.wait(job_ids)

    def mark_compute(self) -> None:
        # Both directions share the mark, and only loads use it.
        if self._direction is Direction.LOAD and not self._closed and not self._copies.health.is_broken:
            try:
                self._copies.mark_compute()
            except CudaError:
                self._copies.log.exception("the start of compute could not be recorded")
                self._lane.check()

    def take_addresses(self) -> None:
        self._copies.take_addresses()

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(CudaError):
            self._copies.use_device()
        is_over = self._lane.close()
        self._finished = self.get_finished()
        self._copies.close(self._direction, is_over)

    def _named(self, job_ids: Collection[int]) -> list[Job]:
        return [job for job in self._open if job.job_id in job_ids]

    def _result_of(self, job: Job) -> TransferResult | None:
        """``None`` while it runs."""
        if not self._lane.has_ended(job):
            return None
        if not job.failed and not self._copies.health.is_broken:
            assert job.started is not None
            try:
                seconds = self._driver.seconds_between(job.started, job.ended.event)
                return TransferResult(job.job_id, True, job.num_bytes, seconds)
            except CudaError:
                self._copies.log.exception(f"transfer {job.job_id} failed")
                self._lane.check()
        return TransferResult(job.job_id, success=False)

    def _put(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        gpu, cpu = spec if self._direction is Direction.STORE else spec[::-1]
        assert isinstance(gpu, GPULoadStoreSpec)
        assert isinstance(cpu, CPULoadStoreSpec)
        if self._closed:
            raise TransferError("The handler is shut down.")
        if self._copies.health.is_broken:
            raise TransferError("The device is broken.")
        extent = Extent(frozenset(cpu.block_ids.tolist()), frozenset(gpu.block_ids.tolist()))
        blockers = self._copies.conflicting(self._direction, extent)
        compute, ended = self._copies.compute_before(self._direction), self._copies.pools.timed.moment()
        awaited = [compute, *(blocker.ended.share() for blocker in blockers)]
        job = Job(job_id, extent, functools.partial(self._runs, gpu, cpu), awaited, blockers, ended)
        self._lane.put(job)
        self._open.append(job)

    def _runs(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> Runs:
        return plan_runs(self._copies.layout, gpu, cpu, self._direction)
