# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time

import pytest
import torch

from kvoffload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
)
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.gpu_worker import make_handlers
from kvoffload.cpu.region import SharedOffloadRegion


def finish(handler: OffloadingHandler, count: int) -> dict[int, bool]:
    found: dict[int, bool] = {}
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        found |= {result.job_id: result.success for result in handler.get_finished()}
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("factor", [1, 3])
def test_blocks_go_down_and_come_back_elsewhere(factor: int) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randint(0, 256, (12, 96), dtype=torch.uint8, generator=generator) for _ in range(3)]
    refs = [CanonicalKVCacheRef(index, 64) for index in range(3)]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64) for tensor in tensors], [refs])
    region = SharedOffloadRegion.anonymous(5, 64 * 3 * factor)
    handlers = make_handlers(caches, region.create_kv_memoryview(), factor)
    store, load = handlers["GPU", "CPU"], handlers["CPU", "GPU"]
    before = [tensor.clone() for tensor in tensors]
    rows = -(-4 // factor)
    store.transfer_async(1, (GPULoadStoreSpec([2, 3, 4, 0], [4], [0]), CPULoadStoreSpec([4, 1, 3, 0][:rows])))
    load.transfer_async(2, (CPULoadStoreSpec([4, 1, 3, 0][:rows]), GPULoadStoreSpec([8, 9, 11, 10], [4], [0])))
    load.wait([2])
    assert finish(store, 1) == {1: True}
    assert finish(load, 1) == {2: True}
    for now, then in zip(tensors, before, strict=True):
        assert torch.equal(now[[8, 9, 11, 10], :64], then[[2, 3, 4, 0], :64])
        assert torch.equal(now[:8], then[:8])
        assert torch.equal(now[:, 64:], then[:, 64:])
    store.transfer_async(3, (GPULoadStoreSpec([99], [1], [0]), CPULoadStoreSpec([0])))
    store.transfer_async(4, (GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([5])))
    assert finish(store, 2) == {3: False, 4: False}
    for handler in handlers.values():
        handler.shutdown()
        handler.shutdown()
    region.close()
