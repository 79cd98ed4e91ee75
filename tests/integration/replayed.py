# SPDX-License-Identifier: Apache-2.0
"""Replay a trace through the real managers, with real bytes and at a pace, and check each block that is loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.base import LoadStoreSpec, OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.sim.config import SimConfig
from kvoffload.sim.engine import Engine, Hits
from kvoffload.sim.trace import Trace
from kvoffload.tiering import CPUPrimaryTierOffloadingManager, TieringOffloadingManager, build_tier
from kvoffload.tiering.base import CascadeMode

MODES: tuple[CascadeMode, ...] = ("on_store", "on_evict")
CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one replay, in blocks."""

    accesses: int
    host_hits: int
    disk_hits: int
    wrong: int
    """The number of loaded blocks with wrong bytes."""
    written: int
    dropped: int
    store_failures: int
    most_used_bytes: int
    quota_bytes: int
    seconds: float


class Memory:
    """Host memory as rows."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.rows = np.zeros((num_blocks, block_bytes // 8), np.uint64)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.rows.view(np.uint8))


class FilledManager(TieringOffloadingManager):
    """A manager that also replaces the worker: it fills stored blocks, and checks loaded blocks."""

    def __init__(self, memory: Memory, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._memory = memory
        self.wrong = 0

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is not None:
            for key, slot in zip(output.keys_to_store, _slots(output.store_spec), strict=True):
                self._memory.rows[slot] = content(key)
        return output

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        for key, slot in zip(keys, _slots(spec), strict=True):
            self.wrong += not bool((self._memory.rows[slot] == content(key)).all())
        return spec


def _slots(spec: LoadStoreSpec) -> Sequence[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    slots: list[int] = spec.block_ids.tolist()
    return slots


def content(key: OffloadKey) -> npt.NDArray[np.uint64]:
    """Return the eight bytes of a key that are repeated over its block."""
    return np.frombuffer(key, np.uint64, 1) ^ np.uint64(0x9E3779B97F4A7C15)


class PacedClock:
    """A real clock that can sleep until a given time."""

    def __call__(self) -> float:
        return time.monotonic()

    def advance_to(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - time.monotonic()))


def replay(
    trace: Trace,
    cascade: CascadeMode,
    num_blocks: int,
    block_bytes: int,
    blocks_per_s: float,
    check: Callable[[TieringOffloadingManager], object] = lambda _: None,
) -> Replayed:
    """Serve ``trace``, one request after the other, with ``num_blocks`` in host memory and as many on disk.

    ``check`` is called after every request.
    """
    memory = Memory(num_blocks, block_bytes)
    primary = CPUPrimaryTierOffloadingManager(num_blocks, memory, "lru")
    quota = num_blocks * block_bytes
    tier = build_tier({"type": "memory", "max_bytes": quota, "exclusive": True}, primary.kv_view)
    manager = FilledManager(memory, primary, [tier], cascade=[cascade])
    clock = PacedClock()
    config = SimConfig(
        num_blocks,
        block_bytes,
        prefill_tokens_per_s=blocks_per_s * trace.block_tokens,
        chunk_tokens=CHUNK_TOKENS,
        load_bytes_per_s=1e15,
        load_latency_s=0.0,
    )
    hits: Hits = Counter()
    engine = Engine(
        trace,
        trace.hashes(),
        config,
        manager,
        clock,
        next_tier_end_s=lambda: clock() + 0.0005 if engine.num_requests else None,
        on_first_token=lambda _, found: hits.update(found),
    )
    start_s = time.monotonic()
    used = 0
    try:
        for request in range(len(trace)):
            engine.add(request)
            while (next_s := engine.begin()) is not None:
                clock.advance_to(next_s)
                engine.end()
            used = max(used, int(tier.get_stats()["tier_bytes", "memory"]))
            check(manager)
        seconds = time.monotonic() - start_s
        tier.drain_jobs()
        manager.on_schedule_end()
        stats = manager.get_stats()
        return Replayed(
            accesses=engine.accesses,
            host_hits=hits["host"],
            disk_hits=hits.total() - hits["device"] - hits["host"],
            wrong=manager.wrong,
            written=int(stats["tier_blocks_stored", "memory"]),
            dropped=int(stats["cascades", "dropped"] + stats["tier_dropped_blocks", "memory"]),
            store_failures=int(stats["tier_store_failures", "memory"]),
            most_used_bytes=max(used, int(stats["tier_bytes", "memory"])),
            quota_bytes=quota,
            seconds=seconds,
        )
    finally:
        manager.shutdown()
