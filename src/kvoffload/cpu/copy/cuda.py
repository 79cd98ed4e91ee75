# SPDX-License-Identifier: Apache-2.0
"""Copy runs between a CUDA device and the region, with one lane for each direction (``lane.py``).

The device's own timeline keeps the order. There, a job waits for the compute that wrote the blocks it reads or that may
still read the blocks it overwrites, and for every open job of the other direction that touches the same slots or GPU
blocks. The stream orders the jobs of one direction. The engine's thread waits only in ``wait``, whose caller is about
to use the memory, and in ``shutdown``, which has a time limit.

A job that fails is reported once its copies have ended. If the device is broken, all later jobs fail at once and every
block is a miss. Stores that it may still be copying are never reported, so nobody reuses their slots.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
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
from kvoffload.cpu.copy.lane import DeviceHealth, EventPools, Job, Lane, Moment
from kvoffload.cpu.copy.numa import node_of_device
from kvoffload.cpu.copy.pinning import PinnedRegion
from kvoffload.cpu.copy.plan import CopyLayout, Extent, Runs, plan_runs
from kvoffload.cpu.copy.self_check import CopiesHang, check_copies
from kvoffload.errors import LayoutError, TransferError
from kvoffload.logs import RateLimitedLog

logger = logging.getLogger(__name__)

_MEMORY_OF_HUNG_DEVICES: list[object] = []
"""Memory that copies may still use, so it is neither freed nor unpinned before the process ends."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device of this process, with its driver and the stream on which the engine computes."""

    driver: Driver
    number: int
    """The index of the device among the devices that this process sees."""
    compute_stream: Callable[[], Stream]
    """A function that returns the stream to which the engine currently submits. Called on the worker's thread."""

    @classmethod
    def of(cls, device: torch.device) -> CudaDevice:
        """Return the device of a tensor.

        Raises ``ConfigError`` without NVIDIA's driver, and ``LayoutError`` for an AMD device, because torch calls AMD
        devices CUDA as well.
        """
        if torch.version.hip is not None:
            raise LayoutError(
                "kvoffload cannot offload KV caches from AMD devices, because it copies with NVIDIA's driver; serve "
                "without kvoffload there."
            )
        number = device.index
        return cls(load_driver(), number, lambda: Stream(torch.cuda.current_stream(number).cuda_stream))


def make_cuda_handlers(
    kv_caches: CanonicalKVCaches, kv_view: memoryview, layout: CopyLayout, device: CudaDevice | None = None
) -> dict[tuple[str, str], OffloadingHandler]:
    """Return the handlers for both directions of one worker, to be used on its thread.

    The handlers share the pinned region and wait for each other's jobs. ``device`` holds the KV caches. Pins all of
    ``kv_view``, which takes about 0.1 s per GB, then copies some blocks out and back, which leaves them unchanged.
    Raises ``CapacityError`` if host memory cannot be pinned, and ``TransferError`` if copies come back wrong.
    """
    device = device or CudaDevice.of(kv_caches.tensors[0].tensor.device)
    with device.driver.on_device(device.number):
        copies = _Copies(kv_caches, kv_view, layout, device)
    store, load = CudaHandler(copies, Direction.STORE), CudaHandler(copies, Direction.LOAD)
    try:
        check_copies(store, load, kv_view, layout)
    except CopiesHang:
        _MEMORY_OF_HUNG_DEVICES.append(copies)  # a shutdown would wait once more
        raise
    except BaseException:
        store.shutdown()
        load.shutdown()
        raise
    return {("GPU", "CPU"): store, ("CPU", "GPU"): load}


class _Copies:
    """The state that both directions of one worker share: the memory on both sides, the jobs in flight, and the
    device's health. Used on the worker's thread, inside ``here``."""

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
        if not self.driver.has_one_address(device.number) and self.driver.has_batch:
            logger.warning(
                "This device uses other addresses for pinned memory than the host, so kvoffload makes single copies."
            )
            self.driver.copies_per_call = 1
        node = node_of_device(self.driver.pci_bus_id(device.number))
        self.region = PinnedRegion(self.driver, kv_view, node)
        if not self.region.is_pinned:
            self.driver.copies_per_call = 1  # batches are specified for registered memory
        self._spacer = self.driver.allocate(1)
        self.lanes = {
            direction: Lane(
                self.driver, device.number, direction, self.health, self.pools, self._spacer, self.region.borders
            )
            for direction in Direction
        }
        self.lanes[Direction.STORE].other = self.lanes[Direction.LOAD]
        self.lanes[Direction.LOAD].other = self.lanes[Direction.STORE]

    def here(self) -> AbstractContextManager[None]:
        """Make this device current. The engine's thread may be using another one, to which new events would belong."""
        return self.driver.on_device(self._device.number)

    # ----------------------------------------------------------------------------------------------------- order

    def conflicting(self, direction: Direction, extent: Extent) -> list[Job]:
        """Return the open jobs of the other direction that must end before a job on ``extent`` starts."""
        other = Direction.LOAD if direction is Direction.STORE else Direction.STORE
        return [
            job
            for job in self.open[other]
            if not extent.slots.isdisjoint(job.extent.slots) or not extent.gpu_blocks.isdisjoint(job.extent.gpu_blocks)
        ]

    def compute_before(self) -> Moment:
        """Return the end of the compute submitted so far."""
        now = self.pools.untimed.moment()
        try:
            self.driver.record(now.event, self._device.compute_stream())
        except BaseException:
            now.release()
            raise
        return now

    def hold_compute(self, lane: Lane, job: Job) -> bool:
        """Make compute that is submitted from now on start after the submitted ``job``. Returns ``False`` if CUDA
        cannot record the job's end."""
        has_end = lane.record_end(job)
        if has_end:
            self.driver.wait_event(self._device.compute_stream(), job.ended.event)
        return has_end

    def take_addresses(self) -> None:
        caches = self._kv_caches
        if caches is not None:
            refs = caches.group_data_refs
            self.layout = self.layout.at(
                [[caches.tensors[ref.tensor_idx].tensor.data_ptr() for ref in group] for group in refs]
            )

    def retire(self, job: Job) -> None:
        """Give back the events of a job that has ended."""
        if job.started is not None:
            self.pools.timed.give_back(job.started)
        job.ended.release()

    def close(self, direction: Direction, is_over: bool) -> None:
        """Close one direction. After the second one, give all memory back if all copies of both are over."""
        lane = self.lanes.pop(direction)
        if is_over:
            lane.release()
        elif self not in _MEMORY_OF_HUNG_DEVICES:
            logger.error("The CUDA device may still be copying, so its memory is kept until the process ends.")
            _MEMORY_OF_HUNG_DEVICES.append(self)
        if self.lanes:
            return
        if self in _MEMORY_OF_HUNG_DEVICES:
            if self.health.is_broken:
                self._kv_caches = None  # nobody can use the device's memory again
            return
        self.region.unpin()
        self.pools.close()
        with contextlib.suppress(CudaError):
            self.driver.free(self._spacer)
        self._kv_caches = None


class CudaHandler(OffloadingHandler):
    """Copies in one direction between a CUDA device and the region."""

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
            with self._copies.here():
                self._put(job_id, spec)
        except Exception as exc:
            # This is the boundary to the engine's step: a transfer that cannot be started is a miss.
            self._copies.log.exception(f"transfer {job_id} could not be started")
            if isinstance(exc, CudaError):
                self._lane.check()
            self._finished.append(TransferResult(job_id, success=False))

    def get_finished(self) -> list[TransferResult]:
        with self._copies.here():
            for job in [*self._open]:
                if (result := self._result_of(job)) is not None:
                    self._open.remove(job)
                    self._copies.retire(job)
                    self._finished.append(result)
                elif not self._copies.health.is_broken:
                    break  # the stream ends its jobs in order
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        with self._copies.here():
            for job in self._named(job_ids):
                self._lane.wait(job)

    def flush(self, job_ids: Collection[int]) -> None:
        try:
            with self._copies.here():
                for job in self._named(job_ids):
                    self._lane.hurry(job)
                    # A failure must be known when this returns, as that of a load within the step is.
                    if job.failed or not self._copies.hold_compute(self._lane, job):
                        self._lane.wait(job)
        except CudaError:
            self._copies.log.exception("could not make compute wait for transfers")
            self.wait(job_ids)

    def take_addresses(self) -> None:
        self._copies.take_addresses()

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._copies.here():
            is_over = self._lane.close()
            self._finished = self.get_finished()
            self._copies.close(self._direction, is_over and not self._open)

    def _named(self, job_ids: Collection[int]) -> list[Job]:
        return [job for job in self._open if job.job_id in job_ids]

    def _result_of(self, job: Job) -> TransferResult | None:
        """Return the result of ``job``, or ``None`` while it may run."""
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
        compute, ended = self._copies.compute_before(), self._copies.pools.timed.moment()
        awaited = [compute, *(blocker.ended.share() for blocker in blockers)]
        job = Job(job_id, extent, functools.partial(self._runs, gpu, cpu), awaited, blockers, ended)
        self._lane.put(job)
        self._open.append(job)

    def _runs(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> Runs:
        return plan_runs(self._copies.layout, gpu, cpu, self._direction)
