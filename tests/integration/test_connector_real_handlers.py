# SPDX-License-Identifier: Apache-2.0
"""The connector with the real data plane: the fake engine's bytes move through real handlers. Those of the CUDA backend
run over a fake driver, which copies late and in any order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import product

import pytest
import torch
from tests.cpu.copy.fake_cuda import FakeCuda, cuda
from tests.fakes.device import Bytes
from tests.fakes.engine import FakeEngine, slices_of
from tests.sizes import by_size
from tests.stateful.chaos import LAYOUTS, LENGTHS

from kvoffload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
)
from kvoffload.config import EngineLayout, OffloadingConfig, RankSlice
from kvoffload.connector import OffloadingConnectorWorker
from kvoffload.cpu.copy.cuda import make_cuda_handlers
from kvoffload.cpu.gpu_worker import copy_layout, make_handlers
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.cpu.region import SharedOffloadRegion

__all__ = ["cuda"]

NUM_SLOTS = 64

Handlers = dict[tuple[str, str], OffloadingHandler]
MakeHandlers = Callable[[CanonicalKVCaches, memoryview, RankSlice], Handlers]
"""(KV caches, region, start of the rank's slice) -> its handlers"""


class SharedRegionSpec(OffloadingSpec):
    """One rank's handlers over its slice of a region that all ranks share."""

    def __init__(self, make: MakeHandlers, region: SharedOffloadRegion, part: RankSlice) -> None:
        self._make = lambda kv: make(kv, region.create_kv_memoryview(), part)

    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
        return self._make(kv_caches)


def drain(engine: FakeEngine) -> None:
    give_up_s = time.monotonic() + 120
    while not engine.idle:
        assert time.monotonic() < give_up_s, "the engine does not drain"
        engine.step()
        engine.check()
        time.sleep(0.0005)  # lets the copying threads run; nothing depends on it


@pytest.mark.parametrize(
    ("layout_name", "factor", "num_replicas"),
    by_size(
        [("full", 1, 1), ("full", 3, 2), ("all", 1, 2), ("all", 3, 1)], [*product(["full", "all"], [1, 3], [1, 2])]
    ),
)
def test_bytes_come_back_right(layout_name: str, factor: int, num_replicas: int) -> None:
    def make(caches: CanonicalKVCaches, view: memoryview, part: RankSlice) -> Handlers:
        return make_handlers(caches, view, factor, part)

    _serve(layout_name, factor, num_replicas, make)


@pytest.mark.parametrize(
    ("layout_name", "factor"), by_size([("full", 3), ("all", 1)], [*product(["full", "all"], [1, 3])])
)
def test_bytes_come_back_right_over_a_fake_driver(layout_name: str, factor: int, cuda: FakeCuda) -> None:
    cuda.pace(seed=factor, longest_pause_us=1000)
    idle = cuda.driver.create_stream()  # the engine computes on the host

    def make(caches: CanonicalKVCaches, view: memoryview, part: RankSlice) -> Handlers:
        cuda.adopt(*(tensor.tensor for tensor in caches.tensors))
        assert view.shape is not None
        # One for each rank: in one process, no memory can be registered twice.
        own_view = SharedOffloadRegion.anonymous(*view.shape).create_kv_memoryview()
        return make_cuda_handlers(caches, own_view, copy_layout(caches, own_view, factor, part), cuda.device(idle))

    _serve(layout_name, factor, 1, make)
    assert cuda.count("copies") > 100
    assert cuda.count("pageable") == 0
    cuda.driver.destroy_stream(idle)


def _serve(layout_name: str, factor: int, num_replicas: int, make: MakeHandlers) -> None:
    groups = LAYOUTS[layout_name]
    base = min(group.block_tokens for group in groups)
    part = RankSlice(0, 2 // num_replicas, 0, num_replicas)
    layout = EngineLayout(groups, 2, "real-handlers", num_ranks=2, rank_slice=part)
    config = OffloadingConfig(cpu_bytes_to_use=1 << 20, block_size=base * factor)
    region = SharedOffloadRegion.anonymous(NUM_SLOTS, layout.block_bytes(factor))
    workers: list[OffloadingConnectorWorker] = []

    def make_worker(rank: int, pages: Bytes) -> OffloadingConnectorWorker:
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(torch.from_numpy(pages), pages.shape[1])],
            [[CanonicalKVCacheRef(0, group.page_bytes)] for group in groups],
        )
        workers.append(OffloadingConnectorWorker(rank))
        spec = SharedRegionSpec(make, region, slices_of(layout)[rank])
        workers[-1].register_kv_caches(spec, caches, flushes_on_host=True)
        return workers[-1]

    engine = FakeEngine(
        CPUOffloadingManager(NUM_SLOTS),
        layout,
        config,
        num_gpu_blocks=sum(-(-60 // group.block_tokens) for group in groups),
        num_slots=NUM_SLOTS,
        chunk_tokens=12,  # steps end where blocks of all groups do, so that there are states to hit
        make_worker=make_worker,
    )
    try:
        chance = random.Random(7)
        for n in range(by_size(20, 40)):
            tokens = [chance.randrange(2) * 100 + i for i in range(chance.choice(LENGTHS))]
            engine.add(f"r{n}", tokens, chance.randrange(6))
            if chance.random() < 0.4:
                engine.pool.forget_all()
            engine.step()
            engine.check()
        drain(engine)
        for n in range(7):  # alone, so that nothing but the first can keep it from being loaded
            engine.pool.forget_all()
            engine.add(f"again{n}", list(range(33)), 2)
            drain(engine)
    finally:
        for worker in workers:
            worker.shutdown()
        region.close()
    stats = engine.connector.get_stats()
    assert stats["load_jobs", "ok"] >= 6
    assert stats["load_jobs", "failed"] == 0
    assert stats["store_jobs", "failed"] == 0
    assert stats["primary_blocks_pinned",] == 0
