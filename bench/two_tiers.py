# SPDX-License-Identifier: Apache-2.0
"""Compare loading a prompt from a ``disk`` and a ``redis`` tier at once with loading it from the faster tier alone.

Both stores are real, and each reads at most ``TIER_BYTES_PER_S``, so that the ratio shows how well a plan shares work
between equal tiers, independent of this machine's speed. It has the same requirements as ``tests.redis_server``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tests.redis_server import PATIENT_OPTIONS, RedisServer

from bench.core import Row
from bench.stores import Link, Linked
from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.testing.keys import keys as make_keys
from kvoffload.tiering import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from kvoffload.tiering.load_policy import BlockWorth
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.tier import StoreTier

BLOCK_BYTES = 256 << 10
TIER_BYTES_PER_S = 40_000_000
TOKENS = 16
"""The number of tokens in a block."""
TOKENS_PER_S = 100.0
"""The engine's speed, which is so low that all blocks are worth loading."""


class Server:
    """A manager over some of the stores."""

    def __init__(self, options: Sequence[dict[str, object]], num_blocks: int, bytes_per_s: float) -> None:
        region = SharedOffloadRegion.anonymous(2 * num_blocks, BLOCK_BYTES)
        primary = CPUPrimaryTierOffloadingManager(2 * num_blocks, region)
        stores = [parse_tier(each).open_store(BLOCK_BYTES, "bench") for each in options]
        names = [str(each["type"]) for each in options]
        tiers = [
            StoreTier(primary.kv_view, name, Linked(store, Link(bytes_per_s)))
            for name, store in zip(names, stores, strict=True)
        ]
        worth = BlockWorth(BLOCK_BYTES, (TOKENS,), TOKENS_PER_S)
        self.manager = TieringOffloadingManager(primary, tiers, block_worth=worth, max_wait_s=60.0, promotion_share=1.0)
        self._num_requests = 0

    def load(self, keys: Sequence[OffloadKey]) -> tuple[float, int, dict[str, int]]:
        """Return the seconds until the blocks are in host memory, their number, and the number from each tier."""
        self._num_requests += 1
        context = ReqContext(f"r{self._num_requests}")
        self.manager.on_new_request(context)
        begun_s = time.perf_counter()
        while None in (answers := self.manager.lookup_prefix(keys, context)):
            self.manager.on_schedule_end()
            time.sleep(0.001)
        seconds = time.perf_counter() - begun_s
        sources = [*self.manager.sources(context).values()]
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end()
        self.manager.reset_cache()
        return seconds, answers.count(True), {name: sources.count(name) for name in sorted({*sources})}


def run(short: bool) -> list[Row]:
    num_blocks, repeats = (32, 1) if short else (256, 5)
    bytes_per_s = (10 if short else 1) * TIER_BYTES_PER_S
    keys = make_keys(*range(num_blocks))
    with tempfile.TemporaryDirectory() as name:
        redis = RedisServer(Path(name))
        try:
            disk_options = {"type": "disk", "path": f"{name}/kv", "max_bytes": 4 * num_blocks * BLOCK_BYTES}
            redis_options = {"type": "redis", "url": redis.url, **PATIENT_OPTIONS}
            block = memoryview(np.ones(BLOCK_BYTES, np.uint8))
            for options in (disk_options, redis_options):
                store = parse_tier(options).open_store(BLOCK_BYTES, "bench")
                for start in range(0, num_blocks, 16):
                    portion = keys[start : start + 16]
                    if not all(store.write(portion, [block] * len(portion))):
                        raise RuntimeError(f"{store!r} did not keep all blocks")
                store.close()
            ways = {"disk": [disk_options], "redis": [redis_options], "both": [disk_options, redis_options]}
            servers = {way: Server(options, num_blocks, bytes_per_s) for way, options in ways.items()}
            try:
                for server in servers.values():  # speeds become known: of the last block, a tier that nobody measured
                    for _ in range(5):
                        server.load(keys)
                times: dict[str, list[float]] = {way: [] for way in ways}
                for _ in range(repeats):
                    for way, server in servers.items():
                        seconds, num_found, sources = server.load(keys)
                        if num_found < num_blocks:
                            raise RuntimeError(f"{way}: {num_found} of {num_blocks} blocks were found")
                        times[way].append(seconds)
            finally:
                for server in servers.values():
                    server.manager.shutdown()
        finally:
            redis.stop()
    medians = {way: statistics.median(seconds) for way, seconds in times.items()}
    best = min(medians["disk"], medians["redis"])
    case = f"{num_blocks} blocks of 256 KiB that two equal tiers have ({sources})"
    return [Row(case, medians["both"], "s", f"the faster alone: {best:.2f}", best / medians["both"], ">= 1.6")]
