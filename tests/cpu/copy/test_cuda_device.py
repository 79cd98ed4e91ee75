# SPDX-License-Identifier: Apache-2.0
"""Order on a real device's own timeline, and pinning. The contract itself runs in ``test_gpu_worker.py``, and all rules
over a fake driver in ``test_cuda.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
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
from kvoffload.cpu.copy.driver import load_driver
from kvoffload.cpu.copy.pinning import PinnedRegion
from kvoffload.cpu.gpu_worker import make_handlers
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.errors import CapacityError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]

PAGE_BYTES = 1 << 20
LONG_CYCLES = 200_000_000


@dataclass(slots=True)
class Rig:
    pool: torch.Tensor
    region: SharedOffloadRegion
    store: OffloadingHandler
    load: OffloadingHandler

    def transfer(self, job_id: int, handler: OffloadingHandler, block: int, slot: int) -> None:
        gpu, cpu = GPULoadStoreSpec([block], [1], [0]), CPULoadStoreSpec([slot])
        handler.transfer_async(job_id, (gpu, cpu) if handler is self.store else (cpu, gpu))

    def slot(self, number: int) -> set[int]:
        return set(np.unique(np.asarray(self.region.create_kv_memoryview())[number]).tolist())


@pytest.fixture
def rig() -> Iterator[Rig]:
    pool = torch.zeros((4, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(pool, PAGE_BYTES)], [[CanonicalKVCacheRef(0, PAGE_BYTES)]])
    region = SharedOffloadRegion.anonymous(4, PAGE_BYTES)
    handlers = make_handlers(caches, region.create_kv_memoryview(), factor=1)
    rig = Rig(pool, region, handlers["GPU", "CPU"], handlers["CPU", "GPU"])
    yield rig
    rig.store.shutdown()
    rig.load.shutdown()
    region.close()


def compute_for_long() -> None:
    torch.cuda._sleep(LONG_CYCLES)


def test_a_store_waits_for_the_compute_that_writes_its_blocks(rig: Rig) -> None:
    compute_for_long()
    rig.pool[1].fill_(5)
    rig.transfer(1, rig.store, 1, 2)
    rig.store.wait([1])
    assert rig.slot(2) == {5}


def test_a_load_waits_for_the_compute_that_still_reads_its_blocks(rig: Rig) -> None:
    np.asarray(rig.region.create_kv_memoryview())[0] = 9
    rig.pool[3].fill_(4)
    compute_for_long()
    seen = rig.pool[3].clone()
    rig.transfer(1, rig.load, 3, 0)
    rig.load.wait([1])
    torch.cuda.synchronize()
    assert seen.unique().tolist() == [4]
    assert rig.pool[3].unique().tolist() == [9]


def test_a_load_does_not_wait_for_the_compute_after_it(rig: Rig) -> None:
    np.asarray(rig.region.create_kv_memoryview())[0] = 9
    rig.transfer(1, rig.load, 3, 0)
    compute_for_long()
    busy = torch.cuda.Event()
    busy.record()
    rig.load.wait([1])
    assert not busy.query()
    torch.cuda.synchronize()
    assert rig.pool[3].unique().tolist() == [9]


def test_compute_waits_on_the_device_for_a_flushed_store(rig: Rig) -> None:
    rig.pool[0].fill_(7)
    compute_for_long()
    rig.transfer(1, rig.store, 0, 1)
    rig.store.flush([1])
    rig.pool[0].fill_(8)
    rig.store.wait([1])
    assert rig.slot(1) == {7}


def test_the_next_use_of_a_slot_waits_for_the_transfer_before(rig: Rig) -> None:
    rig.pool[0].fill_(7)
    compute_for_long()
    rig.transfer(1, rig.store, 0, 1)
    rig.transfer(2, rig.load, 2, 1)
    rig.transfer(3, rig.store, 2, 3)
    rig.store.wait([3])
    assert rig.slot(3) == {7}
    torch.cuda.synchronize()
    assert rig.pool[2].unique().tolist() == [7]


def test_small_pages_come_back() -> None:
    layers, page = 64, 4096
    pools = [torch.randint(0, 256, (16, page), dtype=torch.uint8, device="cuda") for _ in range(layers)]
    refs = [CanonicalKVCacheRef(layer, page) for layer in range(layers)]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(pool, page) for pool in pools], [refs])
    region = SharedOffloadRegion.anonymous(8, layers * page)
    view = region.create_kv_memoryview()
    handlers = make_handlers(caches, view, factor=1)
    store, load = handlers["GPU", "CPU"], handlers["CPU", "GPU"]
    slots = [5, 2, 7]
    store.transfer_async(1, (GPULoadStoreSpec([0, 3, 6], [3], [0]), CPULoadStoreSpec(slots)))
    load.transfer_async(2, (CPULoadStoreSpec(slots), GPULoadStoreSpec([9, 12, 10], [3], [0])))
    store.wait([1])
    load.wait([2])
    assert all(result.success for result in (*store.get_finished(), *load.get_finished()))
    for layer, pool in enumerate(pools):
        assert torch.equal(pool[[0, 3, 6]], pool[[9, 12, 10]])
        in_slots = np.asarray(view)[slots, layer * page : (layer + 1) * page]
        np.testing.assert_array_equal(pool[[0, 3, 6]].cpu().numpy(), in_slots)
    store.shutdown()
    load.shutdown()
    region.close()


def test_memory_that_is_pinned_already_is_refused_and_leaves_no_error_behind() -> None:
    driver = load_driver()
    region = SharedOffloadRegion.anonymous(4, PAGE_BYTES)
    first = PinnedRegion(driver, region.create_kv_memoryview())
    with pytest.raises(CapacityError, match="rejected the rest"):
        PinnedRegion(driver, region.create_kv_memoryview())
    assert torch.ones(8, device="cuda").sum().item() == 8
    first.unpin()
    first.unpin()
    PinnedRegion(driver, region.create_kv_memoryview()).unpin()
    region.close()
