# SPDX-License-Identifier: Apache-2.0
"""A handler over numpy arrays. The test runs its transfers: late, in another order, or with a failure."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from kvoffload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    TransferResult,
)
from kvoffload.config import RankSlice

__all__ = ["ManualHandler", "ManualSpec"]

Bytes = npt.NDArray[np.uint8]

_GARBAGE = 0xEE


class ManualHandler(OffloadingHandler):
    """Copies between GPU blocks and slots, in both directions, one GPU block at a time.

    ``gpu`` is (GPU blocks, page bytes), ``slots`` is (slots, bytes of this rank's slice), and ``part`` says which slots
    the rank stores. A transfer reads and writes
    in ``run`` or ``wait``, not when it is started. So bytes that were overwritten in between are wrong, as with a
    slow device queue.
    """

    def __init__(
        self,
        gpu: Bytes,
        slots: Bytes,
        page_bytes: tuple[int, ...],
        factor: int,
        part: RankSlice = RankSlice(0, 1),  # noqa: B008 - a value
    ) -> None:
        self._gpu = gpu
        self._part = part
        self._slots = slots
        self._page_bytes = page_bytes
        self._factor = factor
        self._pending: dict[int, tuple[LoadStoreSpec, LoadStoreSpec]] = {}
        self._finished: list[TransferResult] = []
        self.refuse_next = False
        """Makes the next ``transfer_async`` raise, as with a broken device."""
        self.fail_next_wait = False
        """Make the transfers fail that the next ``wait`` or ``flush`` waits for."""

    @property
    def pending(self) -> list[int]:
        return list(self._pending)

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        if self.refuse_next:
            self.refuse_next = False
            raise RuntimeError("refused on plan")
        self._pending[job_id] = spec

    def run(self, job_id: int, success: bool = True) -> None:
        """Ends a pending transfer now. If it fails, its destination has garbage."""
        source, destination = self._pending.pop(job_id)
        num_bytes = 0
        for read, write in self._pages(source, destination):
            write[:] = read if success else _GARBAGE
            num_bytes += len(read)
        self._finished.append(TransferResult(job_id, success, num_bytes if success else 0))

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        success, self.fail_next_wait = not self.fail_next_wait, False
        for job_id in [each for each in self._pending if each in job_ids]:
            self.run(job_id, success)

    def shutdown(self) -> None:
        self._pending.clear()

    def _pages(self, source: LoadStoreSpec, destination: LoadStoreSpec) -> list[tuple[Bytes, Bytes]]:
        """(bytes to read, bytes to write) for each GPU block."""
        stores = isinstance(source, GPULoadStoreSpec)
        gpu, slots = (source, destination) if stores else (destination, source)
        assert isinstance(gpu, GPULoadStoreSpec)
        assert isinstance(slots, BlockIDsLoadStoreSpec)
        pages: list[tuple[Bytes, Bytes]] = []
        gpu_ids, slot_ids = iter(gpu.block_ids.tolist()), iter(slots.block_ids.tolist())
        for group, size in enumerate(gpu.group_sizes):
            width = self._page_bytes[group]
            slot: int | None = None
            for position in range(gpu.block_indices[group], gpu.block_indices[group] + size):
                within = position % self._factor
                if slot is None or within == 0:
                    slot = next(slot_ids)
                on_gpu = self._gpu[next(gpu_ids), :width]
                if stores and slot % self._part.num_replicas != self._part.replica:
                    continue
                in_slot = self._slots[slot, within * width : (within + 1) * width]
                pages.append((on_gpu, in_slot) if stores else (in_slot, on_gpu))
        assert next(slot_ids, None) is None, "more slots than the GPU blocks fill"
        return pages


class ManualSpec(OffloadingSpec):
    """One rank's manual handler as a spec, for the real worker."""

    def __init__(self, manager: OffloadingManager, handler: ManualHandler) -> None:
        self._manager = manager
        self._handler = handler

    def get_manager(self) -> OffloadingManager:
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
        return {("GPU", "CPU"): self._handler, ("CPU", "GPU"): self._handler}
