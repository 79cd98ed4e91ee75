# SPDX-License-Identifier: Apache-2.0
"""Copies runs between a CUDA device and the region, on a stream per direction.

Order is kept on the device's own timeline. There a job waits for the compute submitted before it, which wrote the
blocks that a store reads, or may still read the blocks that a load overwrites. It also waits for every open job that
touches the same slots or GPU blocks. Nothing here waits on the host except ``wait`` and ``shutdown``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
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
from kvoffload.cpu.copy.plan import CopyLayout, Extent, Runs, plan_runs

__all__ = ["PinnedRegion", "make_cuda_handlers"]

logger = logging.getLogger(__name__)

_LARGEST_PIECE_BYTES = 64 << 30


class PinnedRegion:
    """A region's bytes as a host tensor, page-locked for the device where that works.

    Pinned in pieces of at most 64 GiB, because one call for hundreds of GiB fails. Where pinning fails, the bytes stay
    pageable, which is slower but correct, and the pending device error is cleared. A copy must stay within one piece:
    the runtime refuses ranges that span two registrations (``Runs.cut_at_pieces_of``).
    """

    def __init__(self, kv_view: memoryview, piece_bytes: int = _LARGEST_PIECE_BYTES) -> None:
        self.tensor = torch.from_numpy(np.frombuffer(kv_view.cast("B"), dtype=np.uint8))
        self.piece_bytes = piece_bytes
        self._pieces: list[int] = []
        runtime = torch.cuda.cudart()
        address, size = self.tensor.data_ptr(), self.tensor.numel()
        for start in range(0, size, piece_bytes):
            code = int(runtime.cudaHostRegister(address + start, min(piece_bytes, size - start), 0))
            if code:
                _clear_pending_error()
                logger.warning(
                    "Pinning %d bytes of host memory failed (CUDA error %d); copies use slower, pageable memory.",
                    size,
                    code,
                )
                self.unpin()
                return
            self._pieces.append(address + start)

    @property
    def is_pinned(self) -> bool:
        return bool(self._pieces)

    def unpin(self) -> None:
        """Idempotent; no copy may be running."""
        pieces, self._pieces = self._pieces, []
        for address in pieces:
            torch.cuda.cudart().cudaHostUnregister(address)


def _clear_pending_error() -> None:
    """Raises the runtime's last error here, where it is ignored, and not in the engine's next kernel.

    torch's binding of the runtime has no ``cudaGetLastError``, but every kernel launch calls it, which clears the
    error.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


@dataclass(eq=False, slots=True)
class _SubmittedTransfer:
    job_id: int
    direction: Direction
    extent: Extent
    num_bytes: int
    start: torch.cuda.Event
    end: torch.cuda.Event


class _Device:
    """Shared by both directions of one worker: the memory on both sides, and the jobs in flight."""

    def __init__(self, kv_caches: CanonicalKVCaches, kv_view: memoryview, layout: CopyLayout) -> None:
        self.layout = layout
        self.region = PinnedRegion(kv_view)
        self.kv_caches = kv_caches
        self.device = kv_caches.tensors[0].tensor.device
        self.open: dict[Direction, deque[_SubmittedTransfer]] = {direction: deque() for direction in Direction}
        self._storages = _flat_storages(kv_caches)

    def conflicting(self, job_direction: Direction, extent: Extent) -> list[_SubmittedTransfer]:
        """Open jobs that must end before a job on ``extent`` starts. The stream orders the jobs of one direction."""
        other = Direction.LOAD if job_direction is Direction.STORE else Direction.STORE
        return [
            job
            for job in self.open[other]
            if not extent.slots.isdisjoint(job.extent.slots) or not extent.gpu_blocks.isdisjoint(job.extent.gpu_blocks)
        ]

    def views(self, runs: Runs) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device bytes, host bytes) of each run."""
        host_base = self.region.tensor.data_ptr()
        runs = runs.cut_at_pieces_of(self.region.piece_bytes, host_base)
        pairs = []
        for device, host, length in zip(runs.device.tolist(), runs.host.tolist(), runs.lengths.tolist(), strict=True):
            pairs.append((self._device_bytes(device, length), self.region.tensor[host - host_base :][:length]))
        return pairs

    def _device_bytes(self, address: int, length: int) -> torch.Tensor:
        for flat in self._storages:
            offset = address - flat.data_ptr()
            if 0 <= offset <= flat.numel() - length:
                return flat[offset : offset + length]
        raise AssertionError(f"no KV cache tensor holds address {address:#x}")


def _flat_storages(kv_caches: CanonicalKVCaches) -> list[torch.Tensor]:
    """Every distinct allocation under the KV caches, as one flat byte tensor."""
    flat: dict[int, torch.Tensor] = {}
    for cache in kv_caches.tensors:
        storage = cache.tensor.untyped_storage()
        if storage.data_ptr() not in flat:
            whole = torch.empty(0, dtype=torch.uint8, device=cache.tensor.device)
            flat[storage.data_ptr()] = whole.set_(storage)
    return list(flat.values())


class CudaHandler(OffloadingHandler):
    """One direction between a CUDA device and the region."""

    def __init__(self, device: _Device, direction: Direction) -> None:
        self._device = device
        self._direction = direction
        self._stream = torch.cuda.Stream(device=device.device)
        self._failed: list[int] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"CudaHandler({self._direction.value}, open={[job.job_id for job in self._open]})"

    @property
    def _open(self) -> deque[_SubmittedTransfer]:
        return self._device.open[self._direction]

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        try:
            self._submit(job_id, spec)
        except Exception:
            # The boundary to the engine's step: a transfer that cannot be submitted is a miss.
            logger.exception("Transfer %d failed.", job_id)
            self._failed.append(job_id)

    def get_finished(self) -> list[TransferResult]:
        results = [TransferResult(job_id, success=False) for job_id in self._failed]
        self._failed = []
        while self._open:
            job = self._open[0]
            try:
                if not job.end.query():
                    break
                result = TransferResult(job.job_id, True, job.num_bytes, job.start.elapsed_time(job.end) / 1e3)
            except RuntimeError:
                # A broken device answers every query with its first error. Whatever that was, the transfer failed.
                logger.exception("Transfer %d failed.", job.job_id)
                result = TransferResult(job.job_id, success=False)
            self._open.popleft()
            results.append(result)
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        for job in self._open:
            if job.job_id in job_ids:
                with contextlib.suppress(RuntimeError):  # get_finished reports it
                    job.end.synchronize()

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stream.synchronize()
        if all(job.end.query() for jobs in self._device.open.values() for job in jobs):
            self._device.region.unpin()

    def _submit(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        gpu, cpu = spec if self._direction is Direction.STORE else spec[::-1]
        assert isinstance(gpu, GPULoadStoreSpec)
        assert isinstance(cpu, CPULoadStoreSpec)
        if self._closed:
            raise RuntimeError("the handler is shut down")
        runs = plan_runs(self._device.layout, gpu, cpu)
        pairs = self._device.views(runs)
        extent = Extent(frozenset(cpu.block_ids.tolist()), frozenset(gpu.block_ids.tolist()))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        compute = torch.cuda.Event()
        compute.record(torch.cuda.current_stream(self._device.device))
        self._stream.wait_event(compute)
        for job in self._device.conflicting(self._direction, extent):
            self._stream.wait_event(job.end)
        job = _SubmittedTransfer(job_id, self._direction, extent, runs.num_bytes, start, end)
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            try:
                for device_bytes, host_bytes in pairs:
                    if self._direction is Direction.STORE:
                        host_bytes.copy_(device_bytes, non_blocking=True)
                    else:
                        device_bytes.copy_(host_bytes, non_blocking=True)
            except Exception:
                # Copies started before this one still run. The failure may be reported only when they have ended.
                self._stream.synchronize()
                raise
            end.record(self._stream)
        self._open.append(job)


def make_cuda_handlers(
    kv_caches: CanonicalKVCaches, kv_view: memoryview, layout: CopyLayout
) -> dict[tuple[str, str], OffloadingHandler]:
    """Handlers for both directions of one worker. They share the pinned region, and wait for each other's jobs."""
    device = _Device(kv_caches, kv_view, layout)
    return {
        ("GPU", "CPU"): CudaHandler(device, Direction.STORE),
        ("CPU", "GPU"): CudaHandler(device, Direction.LOAD),
    }
