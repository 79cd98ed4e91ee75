# SPDX-License-Identifier: Apache-2.0
"""Run a small engine over host memory and a real disk tier, in real time, and serve its metrics over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tests.fakes.device import Bytes
from tests.fakes.engine import FakeEngine, FakeRequest, Status
from tests.fakes.manual_handler import ManualHandler, ManualSpec
from tests.ports import free_port

from kvoffload.base import CanonicalKVCaches
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.connector import OffloadingConnectorWorker
from kvoffload.connector.observer import Watch
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.exporter import PrometheusExporter
from kvoffload.lost_blocks import NO_LOSSES, LostBlocks
from kvoffload.tiering.base import SecondaryTierManager
from kvoffload.tiering.load_policy import BlockWorth
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.options import build_tier

BLOCK_TOKENS = 4
PAGE_BYTES = 4096


class _Region:
    def __init__(self, num_blocks: int) -> None:
        self.rows = np.zeros((num_blocks, PAGE_BYTES), dtype=np.uint8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.rows)


class ServedTiers:
    """``num_blocks`` slots of host memory above the tier that ``make_tier(view, lost=…)`` makes over them, by default
    one called ``disk``; ``None``: no tier. Call ``serve``, then ``close``.

    Every step publishes the stats, which are at ``/metrics`` of ``port``, with a label ``engine``. ``config`` are
    options of the configuration and of the tiering manager.
    """

    block_bytes = PAGE_BYTES
    disk_bytes = 4 << 20

    def __init__(
        self,
        root: Path,
        num_blocks: int,
        make_tier: Callable[..., SecondaryTierManager] | Literal["disk"] | None = "disk",
        clock: Callable[[], float] = time.monotonic,
        block_worth: BlockWorth | None = None,
        watch: Watch | None = None,
        **config: Any,
    ) -> None:
        region = _Region(num_blocks)
        config = {"max_wait_s": 120.0} | config
        if make_tier == "disk":
            config["secondary_tiers"] = ({"type": "disk", "max_bytes": self.disk_bytes},)
        parsed = OffloadingConfig(cpu_bytes_to_use=num_blocks * PAGE_BYTES, eviction_policy="lru", **config)
        lost = LostBlocks(clock=clock) if parsed.record_trace or watch else NO_LOSSES
        primary = CPUPrimaryTierOffloadingManager(
            num_blocks, region, "lru", store_threshold=parsed.store_threshold, clock=clock, lost=lost
        )
        options = {"type": "disk", "path": str(root / "blocks"), "max_bytes": self.disk_bytes, "exclusive": True}
        if make_tier == "disk":
            make_tier = partial(build_tier, options)
        self.tiers = [make_tier(primary.kv_view, lost=lost)] if make_tier is not None else []
        self.manager = TieringOffloadingManager(
            primary,
            self.tiers,
            max_wait_s=parsed.max_wait_s,
            promotion_share=parsed.promotion_share,
            block_worth=block_worth,
            clock=clock,
        )
        self.handlers: list[ManualHandler] = []

        def make_worker(rank: int, pages: Bytes) -> OffloadingConnectorWorker:
            self.handlers.append(ManualHandler(pages, region.rows, (PAGE_BYTES,), 1))
            worker = OffloadingConnectorWorker(rank)
            worker.register_kv_caches(ManualSpec(self.manager, self.handlers[-1]), CanonicalKVCaches())
            return worker

        self.engine = FakeEngine(
            self.manager,
            EngineLayout((KVGroupLayout(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, PAGE_BYTES),), BLOCK_TOKENS, "test"),
            parsed,
            num_gpu_blocks=12,
            num_slots=num_blocks,
            make_worker=make_worker,
            watch=watch,
        )
        self._exporter = PrometheusExporter(["disk"], {"engine": "0"})
        self.port = free_port()
        self._close = self._exporter.serve(self.port)
        self._num_requests = 0

    def serve(self, rounds: int, num_prompts: int = 4, num_blocks: int = 8) -> None:
        """Serves ``num_prompts`` prompts, ``rounds`` times, each a second time after the next one. Two of them are more
        than the device holds, and all of them more than host memory."""
        for _ in range(rounds):
            for first in range(num_prompts):
                for again in (first, first - 1):
                    self.finish(self.ask(max(again, 0), num_blocks))
            self.drain()

    def ask(self, first_token: int, num_blocks: int) -> FakeRequest:
        """Serve a request with a prompt of ``num_blocks`` full blocks and one more token."""
        self._num_requests += 1
        return self.engine.add(f"r{self._num_requests}", prompt(first_token, num_blocks), max_new_tokens=1)

    def finish(self, request: FakeRequest) -> None:
        deadline_s = time.monotonic() + 120
        while request.status is not Status.FINISHED:
            assert time.monotonic() < deadline_s, f"{request.request_id} is {request.status}"
            self.step()

    def drain(self) -> None:
        deadline_s = time.monotonic() + 120
        while not self.engine.idle:
            assert time.monotonic() < deadline_s
            self.step()

    def step(self) -> None:
        self.engine.step()
        for handler in self.handlers:
            for job_id in handler.pending:
                handler.run(job_id)
        self.engine.check()
        self._exporter.publish(self.engine.connector.get_stats())
        time.sleep(0.0005)

    def close(self) -> None:
        self._close()
        self.engine.connector.shutdown()


def prompt(first_token: int, num_blocks: int) -> list[int]:
    """``num_blocks`` full blocks of tokens and one more."""
    return [first_token] + [n % 11 for n in range(num_blocks * BLOCK_TOKENS)]
