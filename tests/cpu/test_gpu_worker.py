# SPDX-License-Identifier: Apache-2.0
"""The handlers of both backends under the shipped contract, over both kinds of region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.fakes.handler_contract import HandlerContract, HandlerRig

from kvoffload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, SharedPage
from kvoffload.config import RankSlice
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.gpu_worker import copy_layout, make_handlers
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.errors import LayoutError

NUM_GPU_BLOCKS = 16


@dataclass(slots=True)
class TorchRig(HandlerRig):
    tensors: Sequence[torch.Tensor]
    pages: Sequence[int]
    region: SharedOffloadRegion

    def read_page(self, tensor_idx: int, gpu_block: int) -> npt.NDArray[np.uint8]:
        torch.cuda.synchronize() if self.tensors[0].is_cuda else None
        page = self.tensors[tensor_idx][gpu_block, : self.pages[tensor_idx]]
        return page.cpu().numpy().copy()

    def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for tensor in self.tensors:
            tensor.copy_(torch.from_numpy(random.integers(0, 256, tuple(tensor.shape), dtype=np.uint8)))

    def close(self) -> None:
        self.store.shutdown()
        self.load.shutdown()
        self.region.close()


def make_rig(factor: int, device: str = "cpu", rank: int = 0, shared: bool = False, small: bool = False) -> TorchRig:
    """Make two groups over three tensors, one of which both groups use, with padded rows and pages of several sizes."""
    widths, pages = ([96, 200, 64], [64, 200, 64]) if small else ([5000, 70_000, 4096], [4096, 65_536, 4096])
    tensors = [torch.zeros((NUM_GPU_BLOCKS, width), dtype=torch.uint8, device=device) for width in widths]
    groups = [[0, 1], [2, 1]]
    refs = [[CanonicalKVCacheRef(index, pages[index]) for index in group] for group in groups]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(t, p) for t, p in zip(tensors, pages, strict=True)], refs)
    slice_bytes = factor * max(sum(pages[index] for index in group) for group in groups)
    shape = 8, slice_bytes * 2
    region = SharedOffloadRegion.shared("rig", *shape, 1) if shared else SharedOffloadRegion.anonymous(*shape)
    handlers = make_handlers(caches, region.create_kv_memoryview(), factor, RankSlice(rank, 2))
    return TorchRig(handlers["GPU", "CPU"], handlers["CPU", "GPU"], factor, groups, tensors, pages, region)


class TestHostHandlers(HandlerContract):
    def make_rig(self) -> HandlerRig:
        return make_rig(1)


class TestHostHandlersOfSmallPages(HandlerContract):
    def make_rig(self) -> HandlerRig:
        return make_rig(1, small=True)


class TestHostHandlersOfLargeBlocks(HandlerContract):
    def make_rig(self) -> HandlerRig:
        return make_rig(3, rank=1)


class TestHostHandlersOverASharedRegion(HandlerContract):
    def make_rig(self) -> HandlerRig:
        return make_rig(2, shared=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
class TestCudaHandlers(HandlerContract):
    def make_rig(self) -> HandlerRig:
        return make_rig(2, device="cuda")


def test_ranks_keep_to_their_slices() -> None:
    rig = make_rig(1, rank=1, small=True)
    rig.fill(1)
    view = np.asarray(rig.region.create_kv_memoryview())
    rig.store.transfer_async(1, (TestHostHandlers()._spec(rig, 0, [0, 1]), _slots(0, 7)))
    rig.store.wait([1])
    half = view.shape[1] // 2
    assert not view[:, :half].any()
    assert view[0, half:].any()
    assert not view[1:7].any()
    del view
    rig.close()


def _slots(*slots: int) -> CPULoadStoreSpec:

    return CPULoadStoreSpec(slots)


@pytest.mark.parametrize(
    ("tensor", "page", "message"),
    [
        (torch.zeros((4, 64), dtype=torch.float32), 64, "int8 or uint8"),
        (torch.zeros((4, 64), dtype=torch.uint8).T, 4, "contiguous pages"),
        (torch.zeros((4, 64), dtype=torch.uint8), 65, "does not fit a tensor row"),
        (torch.zeros((4, 64, 1), dtype=torch.uint8), 64, "num_blocks, page_bytes"),
        (torch.zeros((4, 256), dtype=torch.uint8), 256, "the engine's layout has only 128"),
    ],
)
def test_layouts_that_cannot_be_copied_are_refused(tensor: torch.Tensor, page: int, message: str) -> None:
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, page)]])
    with pytest.raises(LayoutError, match=message):
        copy_layout(caches, memoryview(bytearray(256)).cast("B", (2, 128)), 1)


def test_a_slice_that_would_overwrite_the_next_one_is_refused() -> None:
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros((4, 65), dtype=torch.uint8), 65)], [[CanonicalKVCacheRef(0, 65)]]
    )
    view = memoryview(bytearray(256)).cast("B", (2, 128))
    with pytest.raises(LayoutError, match="take 65 bytes on this rank, but the engine's layout has only 64"):
        copy_layout(caches, view, 1, RankSlice(0, 2))
    with pytest.raises(LayoutError, match="128 bytes cannot be cut into 3 slices of equal size"):
        copy_layout(caches, view, 1, RankSlice(0, 3))


def test_pages_of_all_ranks_that_would_overwrite_the_next_slot_are_refused() -> None:
    tensor = CanonicalKVCacheTensor(torch.zeros((4, 16), dtype=torch.uint8), 16)
    view = memoryview(bytearray(256)).cast("B", (2, 128))
    for factor, start in ((1, 96), (2, 32)):
        refs = [[CanonicalKVCacheRef(0, 16, SharedPage(start, 32, 16))]]
        layout = copy_layout(CanonicalKVCaches([tensor], refs), view, factor, RankSlice(1, 2))
        assert layout.bytes_in_slot(0)[-1] == slice(112, 128)
        with pytest.raises(
            LayoutError, match=r"blocks take .* bytes on all ranks, but the engine's layout has only 128"
        ):
            copy_layout(CanonicalKVCaches([tensor], refs), view, factor + 1, RankSlice(1, 2))
