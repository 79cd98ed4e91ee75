# SPDX-License-Identifier: Apache-2.0
"""Make the handlers that copy between a worker's KV cache and the region that holds the offloaded blocks."""

from __future__ import annotations

import os

import numpy as np
import torch

from kvoffload.base import CanonicalKVCaches, OffloadingHandler
from kvoffload.config import RankSlice
from kvoffload.cpu.copy.host import make_host_handlers
from kvoffload.cpu.copy.plan import CopyLayout, PageRef
from kvoffload.errors import LayoutError

_WHOLE_SLOT = RankSlice(0, 1)


def make_handlers(
    kv_caches: CanonicalKVCaches,
    kv_view: memoryview,
    factor: int,
    part: RankSlice = _WHOLE_SLOT,
    num_threads: int | None = None,
) -> dict[tuple[str, str], OffloadingHandler]:
    """Return the handlers for both directions between ``kv_caches`` and the slots of ``kv_view``.

    ``kv_view`` is ``SharedOffloadRegion.create_kv_memoryview()``, of shape (num_blocks, block_bytes). ``part`` is this
    rank's part of each slot. ``factor`` is the number of GPU blocks per offloaded block. The handlers keep the tensors
    of ``kv_caches`` and the view alive until ``shutdown``. The ``host`` backend copies KV caches in host memory, and
    the ``cuda`` backend copies KV caches on a CUDA device. Raises ``LayoutError`` for other devices, and as
    ``copy_layout`` does.
    """
    layout = copy_layout(kv_caches, kv_view, factor, part)
    devices = {tensor.tensor.device.type for tensor in kv_caches.tensors}
    if devices == {"cuda"}:
        from kvoffload.cpu.copy.cuda import make_cuda_handlers

        return make_cuda_handlers(kv_caches, kv_view, layout)
    if devices != {"cpu"}:
        raise LayoutError(
            f"KV caches on {sorted(devices)} cannot be offloaded; they must all be on 'cuda' or all on 'cpu'."
        )
    return make_host_handlers(kv_caches, kv_view, layout, num_threads or max(1, min(4, os.cpu_count() or 1)))


def copy_layout(
    kv_caches: CanonicalKVCaches, kv_view: memoryview, factor: int, part: RankSlice = _WHOLE_SLOT
) -> CopyLayout:
    """Return the addresses and strides of both sides.

    Raises ``LayoutError`` if pages do not fit this rank's slice or the slot, because they would overwrite the bytes of
    the next one. Raises it also for tensors of the wrong type or shape.
    """
    shape = kv_view.shape
    assert shape is not None
    num_slots, slot_bytes = shape
    slice_bytes, rest = divmod(slot_bytes, part.num_slices)
    if rest:
        raise LayoutError(f"Slots of {slot_bytes} bytes cannot be cut into {part.num_slices} slices of equal size.")
    groups = []
    for refs in kv_caches.group_data_refs:
        pages = []
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx].tensor
            _check_tensor(tensor, ref.page_size_bytes)
            place = tensor.data_ptr(), tensor.stride(0), tensor.shape[0]
            pages.append(PageRef(*place, ref.page_size_bytes, ref.shared))
        _check_size(factor * sum(page.page_bytes for page in pages if page.shared is None), slice_bytes, "on this rank")
        ends = (page.shared.start + page.shared.num_bytes for page in pages if page.shared is not None)
        _check_size(factor * max(ends, default=0), slot_bytes, "on all ranks")
        groups.append(tuple(pages))
    address = np.frombuffer(kv_view.cast("B"), dtype=np.uint8).ctypes.data if num_slots * slot_bytes else 0
    start = part.index * slice_bytes
    return CopyLayout(tuple(groups), factor, address, slot_bytes, num_slots, start, part.replica, part.num_replicas)


def _check_size(needed: int, room: int, where: str) -> None:
    if needed > room:
        raise LayoutError(
            f"The KV cache's blocks take {needed} bytes {where}, but the engine's layout has only {room}."
        )


def _check_tensor(tensor: torch.Tensor, page_bytes: int) -> None:
    if tensor.dtype not in (torch.int8, torch.uint8) or tensor.dim() != 2 or tensor.stride(1) != 1:
        raise LayoutError(
            f"A KV cache tensor must be (num_blocks, page_bytes) of int8 or uint8 with contiguous pages, not "
            f"{tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}."
        )
    if page_bytes > tensor.shape[1]:
        raise LayoutError(f"A page of {page_bytes} bytes does not fit a tensor row of {tensor.shape[1]} bytes.")
