# SPDX-License-Identifier: Apache-2.0
"""Copies runs between a CUDA device and the region, on a stream for each direction, in one call of the driver a job.

Order is kept on the device's own timeline. There a job waits for the compute that wrote the blocks that it reads, or
that may still read the blocks that it overwrites, and for every open job of the other direction that touches the same
slots or GPU blocks. The stream itself orders the jobs of one direction. The host waits in ``wait`` and ``shutdown``
alone, and after an error.

A failure ends a job, once its copies have. A broken device, on which nothing runs any more, ends all jobs at once, and
all that come later: every block is a miss.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
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
from kvoffload.cpu.copy.driver import CudaError, Driver, Event, Stream, load_driver
from kvoffload.cpu.copy.numa import node_of_device
from kvoffload.cpu.copy.pinning import PinnedRegion
from kvoffload.cpu.copy.plan import CopyLayout, Extent, Runs, plan_runs
from kvoffload.cpu.copy.self_check import check_copies
from kvoffload.errors import LayoutError, TransferError
from kvoffload.logs import RateLimitedLog

__all__ = ["CudaDevice", "CudaHandler", "make_cuda_handlers"]

logger = logging.getLogger(__name__)

_ATTEMPTS = 3


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
    except BaseException:
        store.shutdown()
        load.shutdown()
        raise
    return {("GPU", "CPU"): store, ("CPU", "GPU"): load}


@dataclass(eq=False, slots=True)
class _SubmittedTransfer:
    job_id: int
    extent: Extent
    num_bytes: int
    start: Event
    end: Event


class _Copies:
    """Shared by both directions of one worker: the memory on both sides, the jobs in flight, and the device's health.

    On the worker's thread.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, kv_view: memoryview, layout: CopyLayout, device: CudaDevice
    ) -> None:
        self.layout = layout
        self.driver = device.driver
        self.open: dict[Direction, deque[_SubmittedTransfer]] = {direction: deque() for direction in Direction}
        self.is_broken = False
        self.log = RateLimitedLog(logger)
        self._device = device
        self._keep_alive: object = (kv_caches, kv_view)
        self._mark: Event | None = None
        self._spare_events: list[Event] = []
        self._streams: dict[Direction, Stream] = {}
        self.use_device()
        node = node_of_device(self.driver.pci_bus_id(device.number))
        self.region = PinnedRegion(self.driver, kv_view, node)

    def use_device(self) -> None:
        if not self.driver.has_context():
            self.driver.use_device(self._device.number)

    def open_stream(self, direction: Direction) -> Stream:
        self._streams[direction] = self.driver.create_stream()
        return self._streams[direction]

    # ----------------------------------------------------------------------------------------------------- order

    def conflicting(self, direction: Direction, extent: Extent) -> Iterator[_SubmittedTransfer]:
        """Open jobs that must end before a job on ``extent`` starts. The stream orders the jobs of one direction."""
        other = Direction.LOAD if direction is Direction.STORE else Direction.STORE
        for job in self.open[other]:
            if not extent.slots.isdisjoint(job.extent.slots) or not extent.gpu_blocks.isdisjoint(job.extent.gpu_blocks):
                yield job

    def wait_for_compute(self, direction: Direction, stream: Stream) -> None:
        """``stream`` goes on after the compute submitted so far, or, for a load, after that before the mark."""
        if direction is Direction.LOAD and self._mark is not None:
            self.driver.wait_event(stream, self._mark)
            return
        with self.borrowed_event() as now:
            self.driver.record(now, self._device.compute_stream())
            self.driver.wait_event(stream, now)

    def mark_compute(self) -> None:
        mark, self._mark = self._mark or self.take_event(), None
        self.driver.record(mark, self._device.compute_stream())
        self._mark = mark

    def hold_compute(self, jobs: Iterable[_SubmittedTransfer]) -> None:
        """Compute submitted from now on starts after ``jobs``."""
        for job in jobs:
            self.driver.wait_event(self._device.compute_stream(), job.end)

    # ---------------------------------------------------------------------------------------------------- events

    def take_event(self) -> Event:
        return self._spare_events.pop() if self._spare_events else self.driver.create_event()

    def give_back(self, *events: Event) -> None:
        """Nothing will be asked of these any more. Streams that wait for them do so for what they meant so far."""
        self._spare_events += events

    @contextlib.contextmanager
    def borrowed_event(self) -> Iterator[Event]:
        event = self.take_event()
        try:
            yield event
        finally:
            self.give_back(event)

    # -------------------------------------------------------------------------------------------------- failures

    def drain(self, direction: Direction) -> None:
        """Returns when nothing of this direction runs. Blocks; for errors and for the end."""
        for _ in range(_ATTEMPTS):
            if self.is_broken:
                return
            with contextlib.suppress(CudaError):
                self.driver.synchronize(self._streams[direction])
                return
            self.check_device(direction)
        self._set_broken()

    def check_device(self, direction: Direction) -> None:
        """After an error: is it that of one call, or is the device broken?"""
        if not self.is_broken and not self.driver.is_usable(self._streams[direction]):
            self._set_broken()

    def _set_broken(self) -> None:
        self.is_broken = True
        logger.error("The CUDA device is broken; nothing is offloaded or loaded any more.")

    def close(self, direction: Direction) -> None:
        """The jobs of this direction have ended. With the second one all is given back."""
        with contextlib.suppress(CudaError):
            self.driver.destroy_stream(self._streams.pop(direction))
        if self._streams:
            return
        self.region.unpin()
        for event in (*self._spare_events, *([] if self._mark is None else [self._mark])):
            with contextlib.suppress(CudaError):
                self.driver.destroy_event(event)
        self._spare_events, self._mark, self._keep_alive = [], None, None


class CudaHandler(OffloadingHandler):
    """One direction between a CUDA device and the region."""

    def __init__(self, copies: _Copies, direction: Direction) -> None:
        self._copies = copies
        self._driver = copies.driver
        self._direction = direction
        self._stream = copies.open_stream(direction)
        self._finished: list[TransferResult] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"CudaHandler({self._direction.value}, open={[job.job_id for job in self._open]})"

    @property
    def _open(self) -> deque[_SubmittedTransfer]:
        return self._copies.open[self._direction]

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        try:
            self._submit(job_id, spec)
        except Exception as exc:
            # The boundary to the engine's step: a transfer that cannot be submitted is a miss.
            self._copies.log.exception(f"transfer {job_id} could not be submitted")
            if isinstance(exc, CudaError):
                self._copies.check_device(self._direction)
            self._finished.append(TransferResult(job_id, success=False))

    def get_finished(self) -> list[TransferResult]:
        while self._open and (result := self._result_of(self._open[0])):
            job = self._open.popleft()
            self._copies.give_back(job.start, job.end)
            self._finished.append(result)
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        for job in self._named(job_ids):
            if self._copies.is_broken:
                return
            try:
                self._driver.synchronize_event(job.end)
            except CudaError:
                self._copies.drain(self._direction)

    def flush(self, job_ids: Collection[int]) -> None:
        try:
            self._copies.hold_compute(self._named(job_ids))
        except CudaError:
            self._copies.log.exception("compute could not be made to wait for transfers")
            self.wait(job_ids)

    def mark_compute(self) -> None:
        # Both directions share the mark, and only loads use it.
        if self._direction is Direction.LOAD and not self._closed and not self._copies.is_broken:
            try:
                self._copies.mark_compute()
            except CudaError:
                self._copies.log.exception("the start of compute could not be recorded")
                self._copies.check_device(self._direction)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(CudaError):
            self._copies.use_device()
        self._copies.drain(self._direction)
        self._finished = self.get_finished()
        self._copies.close(self._direction)

    def _named(self, job_ids: Collection[int]) -> list[_SubmittedTransfer]:
        return [job for job in self._open if job.job_id in job_ids]

    def _result_of(self, job: _SubmittedTransfer) -> TransferResult | None:
        """``None`` while it runs."""
        failed = TransferResult(job.job_id, success=False)
        if self._copies.is_broken:
            return failed
        try:
            if not self._driver.is_done(job.end):
                return None
            return TransferResult(job.job_id, True, job.num_bytes, self._driver.seconds_between(job.start, job.end))
        except CudaError:
            self._copies.log.exception(f"transfer {job.job_id} failed")
            self._copies.drain(self._direction)  # it is reported as ended, so it must have
            return failed

    def _submit(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        gpu, cpu = spec if self._direction is Direction.STORE else spec[::-1]
        assert isinstance(gpu, GPULoadStoreSpec)
        assert isinstance(cpu, CPULoadStoreSpec)
        if self._closed:
            raise TransferError("The handler is shut down.")
        if self._copies.is_broken:
            raise TransferError("The device is broken.")
        extent = Extent(frozenset(cpu.block_ids.tolist()), frozenset(gpu.block_ids.tolist()))
        runs = plan_runs(self._copies.layout, gpu, cpu, self._direction)
        num_bytes = runs.num_bytes
        runs = runs.cut_at(self._copies.region.borders)
        start, end = self._copies.take_event(), self._copies.take_event()
        try:
            self._copies.wait_for_compute(self._direction, self._stream)
            for job in self._copies.conflicting(self._direction, extent):
                self._driver.wait_event(self._stream, job.end)
            self._driver.record(start, self._stream)
            self._copy(runs)
            self._driver.record(end, self._stream)
        except BaseException:
            # Copies may run already. The failure may be reported only when they have ended.
            self._copies.drain(self._direction)
            self._copies.give_back(start, end)
            raise
        self._open.append(_SubmittedTransfer(job_id, extent, num_bytes, start, end))

    def _copy(self, runs: Runs) -> None:
        if self._direction is Direction.STORE:
            self._driver.copy_runs(runs.host, runs.device, runs.lengths, self._stream)
        else:
            self._driver.copy_runs(runs.device, runs.host, runs.lengths, self._stream)
