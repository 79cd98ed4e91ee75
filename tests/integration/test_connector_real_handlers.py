# SPDX-License-Identifier: Apache-2.0
"""The connector with the real data plane: the fake engine's bytes move through the host handlers and one region."""

from __future__ import annotations

import random
import time

import pytest
import torch
from tests.stateful.chaos import LAYOUTS, LENGTHS

from kvoffload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
)
from kvoffload.config import EngineLayout, OffloadingConfig
from kvoffload.connector import OffloadingConnectorWorker
from kvoffload.cpu.gpu_worker import make_handlers
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.testing.fake_device import Bytes
from kvoffload.testing.fake_engine import FakeEngine

NUM_SLOTS = 64


class SharedRegionSpec(OffloadingSpec):
    """One rank's handlers over its slice of a region that all ranks share."""

    def __init__(self, region: SharedOffloadRegion, slice_bytes: int, factor: int, rank: int) -> None:
        self._make = lambda kv: make_handlers(kv, region.create_kv_memoryview(), factor, slice_start=rank * slice_bytes)
        self._handlers: dict[tuple[str, str], OffloadingHandler] = {}

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


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("layout_name", ["full", "all"])
def test_bytes_come_back_right(layout_name: str, factor: int) -> None:
    groups = LAYOUTS[layout_name]
    base = min(group.block_tokens for group in groups)
    layout = EngineLayout(groups, 2, "real-handlers", num_ranks=2)
    config = OffloadingConfig(cpu_bytes_to_use=1 << 20, block_size=base * factor)
    region = SharedOffloadRegion.anonymous(NUM_SLOTS, layout.block_bytes(factor))
    workers: list[OffloadingConnectorWorker] = []

    def make_worker(rank: int, pages: Bytes) -> OffloadingConnectorWorker:
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(torch.from_numpy(pages), pages.shape[1])],
            [[CanonicalKVCacheRef(0, group.page_bytes)] for group in groups],
        )
        workers.append(OffloadingConnectorWorker(rank))
        workers[-1].register_kv_caches(SharedRegionSpec(region, layout.slice_bytes(factor), factor, rank), caches)
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
        for n in range(40):
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
