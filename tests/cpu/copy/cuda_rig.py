# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend over the fake driver. Tensors that the fake driver adopts replace device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tests.cpu.copy.fake_cuda import FakeCuda
from tests.fakes.handler_contract import HandlerRig

from kvoffload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
    SharedPage,
)
from kvoffload.config import RankSlice
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.cuda import make_cuda_handlers
from kvoffload.cpu.copy.driver import Stream
from kvoffload.cpu.copy.plan import CopyLayout
from kvoffload.cpu.gpu_worker import copy_layout
from kvoffload.cpu.region import SharedOffloadRegion

NUM_GPU_BLOCKS, NUM_SLOTS = 16, 8
PAGES = (4096, 65_536, 4096)

Bytes = npt.NDArray[np.uint8]
Make = Callable[..., dict[tuple[str, str], OffloadingHandler]]


def layout_of(handler: OffloadingHandler) -> CopyLayout:
    return handler._copies.layout  # type: ignore[attr-defined,no-any-return]


@dataclass(slots=True)
class CudaRig(HandlerRig):
    cuda: FakeCuda
    tensors: Sequence[torch.Tensor]
    pages: Sequence[int]
    region: SharedOffloadRegion
    compute: Stream

    def read_page(self, tensor_idx: int, gpu_block: int) -> Bytes:
        return self.tensors[tensor_idx][gpu_block, : self.pages[tensor_idx]].numpy().copy()

    def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for tensor in self.tensors:
            tensor.numpy()[:] = random.integers(0, 256, tuple(tensor.shape), dtype=np.uint8)

    @property
    def slots(self) -> Bytes:
        return np.asarray(self.region.create_kv_memoryview())

    def close(self) -> None:
        self.store.shutdown()
        self.load.shutdown()
        self.cuda.driver.synchronize(self.compute)
        self.cuda.disown(*self.tensors)
        self.region.close()
        self.cuda.driver.destroy_stream(self.compute)

    # --------------------------------------------------------------------------- for tests of the order of things

    def start(self, job_id: int, handler: OffloadingHandler, block: int, slot: int) -> None:
        """Submit a transfer of one GPU block of the first group before returning."""
        self.submit(job_id, handler, [block], [slot])

    def submit(self, job_id: int, handler: OffloadingHandler, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Submit a transfer of GPU blocks of the first group before returning, so that only the device orders it."""
        self.put(job_id, handler, blocks, slots)
        open_jobs = handler._open  # type: ignore[attr-defined]
        if open_jobs and open_jobs[-1].job_id == job_id:
            handler._lane.hurry(open_jobs[-1])  # type: ignore[attr-defined]

    def put(self, job_id: int, handler: OffloadingHandler, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Queue a transfer of GPU blocks of the first group, which the lane's thread submits."""
        gpu, cpu = GPULoadStoreSpec(blocks, [len(blocks), 0], [0, 0]), CPULoadStoreSpec(slots)
        handler.transfer_async(job_id, (gpu, cpu) if handler is self.store else (cpu, gpu))

    def compute_fills(self, block: int, value: int) -> None:
        page = self.tensors[0][block]
        self.cuda.driver.fill(page.data_ptr(), value, page.numel(), self.compute)

    def stream_of(self, handler: OffloadingHandler) -> Stream:
        return Stream(handler._lane.stream)  # type: ignore[attr-defined]

    @property
    def layout(self) -> CopyLayout:
        return layout_of(self.store)

    def in_block(self, block: int) -> set[int]:
        return set(np.unique(self.read_page(0, block)).tolist())

    def in_slot(self, slot: int) -> set[int]:
        return set(np.unique(self.slots[slot, : self.pages[0]]).tolist())


def make_rig(
    cuda: FakeCuda,
    factor: int = 1,
    rank: int = 0,
    small: bool = False,
    plain: bool = False,
    shared: bool = False,
    layered: bool = False,
    make: Make = make_cuda_handlers,
) -> CudaRig:
    """The same as in ``test_gpu_worker.py``: two groups over three tensors, one of which both groups use.

    With ``plain``, both groups use one tensor, whose pages fill whole slots. With ``shared``, each page belongs to two
    ranks. With ``layered``, small pages fill slots before and after a large one.
    """
    widths, pages = ([96, 200, 64], [64, 200, 64]) if small else ([5000, 70_000, 4096], list(PAGES))
    groups = [[0, 1], [2, 1]]
    num_ranks = 2
    if plain:
        widths, pages, groups, num_ranks = [65_536], [65_536], [[0], [0]], 1
    if layered:
        pages = [4096, 4096, 65_536, 4096, 4096]
        widths, groups, num_ranks = [page + 128 for page in pages], [[0, 1, 2, 3, 4], [3, 1]], 1
    tensors = [torch.zeros((NUM_GPU_BLOCKS, width), dtype=torch.uint8) for width in widths]
    starts = [[2 * sum(pages[index] for index in group[:n]) for n in range(len(group))] for group in groups]
    refs = [
        [
            CanonicalKVCacheRef(
                index,
                pages[index],
                SharedPage(start, 2 * pages[index], rank * pages[index]) if shared else None,
            )
            for index, start in zip(group, of_group, strict=True)
        ]
        for group, of_group in zip(groups, starts, strict=True)
    ]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(t, p) for t, p in zip(tensors, pages, strict=True)], refs)
    slice_bytes = factor * max(sum(pages[index] for index in group) for group in groups)
    region = SharedOffloadRegion.anonymous(NUM_SLOTS, slice_bytes * num_ranks)
    view = region.create_kv_memoryview()
    layout = copy_layout(caches, view, factor, RankSlice(rank, num_ranks))
    cuda.driver.use_device(0)
    compute = cuda.driver.create_stream()
    cuda.adopt(*tensors)
    try:
        handlers = make(caches, view, layout, cuda.device(compute))
    except BaseException:
        cuda.disown(*tensors)
        region.close()
        raise
    store, load = handlers["GPU", "CPU"], handlers["CPU", "GPU"]
    return CudaRig(store, load, factor, groups, cuda, tensors, pages, region, compute)
