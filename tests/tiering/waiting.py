# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of a request that waits for a store that must be asked for all of its blocks, and does not answer:
``python -m tests.tiering.waiting [BLOCKS [TIERS]]``.

The figure is the CPU time of the scheduler's thread, as the median of a thousand steps. The request asks in each step.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Sequence

from tests.tiering.rig import BLOCK_BYTES, prefix

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.tier import StoreTier

NUM_STEPS = 1_000


class Mute(BlockStore):
    """A store that answers once ``speaks`` is set."""

    def __init__(self) -> None:
        self.speaks = threading.Event()

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        self.speaks.wait()
        return [False] * len(keys)

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return [False] * len(keys)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return [False] * len(keys)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        pass

    def close(self) -> None:
        pass


def main(num_blocks: int = 4_000, num_tiers: int = 1) -> None:
    blocks = prefix(num_blocks)
    region = SharedOffloadRegion.anonymous(4 * num_blocks, BLOCK_BYTES)
    primary = CPUPrimaryTierOffloadingManager(4 * num_blocks, region)
    stores = [Mute() for _ in range(num_tiers)]
    tiers = [StoreTier(primary.kv_view, f"mute{number}", store) for number, store in enumerate(stores)]
    manager, context = TieringOffloadingManager(primary, tiers, max_wait_s=3600), ReqContext("r")
    manager.on_new_request(context)
    seconds = list[float]()
    for _ in range(NUM_STEPS):
        begin_s = time.thread_time()
        answers = manager.lookup_prefix(blocks, context)
        manager.on_schedule_end()
        seconds.append(time.thread_time() - begin_s)
        assert answers == [None] * num_blocks
    first_ms, usual_ms = 1e3 * seconds[0], 1e3 * statistics.median(seconds)
    print(f"{num_blocks:,} unknown blocks, {num_tiers} tiers: {usual_ms:.3f} ms a step, {first_ms:.1f} ms the first")
    for store in stores:
        store.speaks.set()
    manager.on_request_finished(context)
    manager.shutdown()
    region.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
