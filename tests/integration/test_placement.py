# SPDX-License-Identifier: Apache-2.0
"""Test ``cascade`` with real parts: a bounded file store below host memory, real bytes and real threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.engines.reference.zoo import VOCAB, tiny_model
from tests.integration.replayed import MODES, FilledManager, Memory, Replayed, replay
from tests.sizes import by_size
from tests.tiering.rig import prefix, quiesce

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.config import parse_config
from kvoffload.demo.comparison import Way, compare
from kvoffload.demo.workload import ChatWorkload
from kvoffload.engines.reference import EngineOptions
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import SimConfig
from kvoffload.sim.report import moved_blocks
from kvoffload.sim.synthetic import synthesize
from kvoffload.tiering import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import BlockFormat
from kvoffload.tiering.stores.wrappers import StoreWrapper
from kvoffload.tiering.tier import StoreTier, TierLimits

BLOCK_BYTES = 4096


def test_a_trace_under_load_with_real_bytes() -> None:
    """A chat, both ways, over host memory of a twentieth of it and a disk as large; paced, so that the disk is busy and
    not swamped, and catches up now and then, so that some blocks are written in time however slow it is. How many hits,
    and how much is written, depends on the machine; whose bytes they are does not."""
    served = itertools.count(1)

    def check(manager: TieringOffloadingManager) -> None:
        if next(served) % 4 == 0:
            quiesce(manager.secondary_tiers[0])
        manager.check_invariants()

    trace = synthesize("chat", by_size(80, 150), seed=3).whole_blocks()
    found: dict[str, Replayed] = {}
    for mode in MODES:
        num_blocks = trace.num_unique // 20
        found[mode] = replay(trace, mode, num_blocks, BLOCK_BYTES, 3000, check)
    for each in found.values():
        assert each.wrong == 0
        assert each.store_failures == 0
        assert each.most_used_bytes <= each.quota_bytes
        assert each.host_hits > 0
    assert found["on_evict"].disk_hits > 0, "what was evicted comes back from disk"


def test_on_evict_writes_less_to_a_disk_that_is_never_late() -> None:
    """The test runs the same chat in the simulator, where the result does not depend on the machine."""
    trace = synthesize("chat", 150, seed=3).whole_blocks()
    num_blocks = trace.num_unique // 20
    written = {
        mode: moved_blocks(
            simulate(
                trace,
                SimConfig(
                    num_blocks,
                    BLOCK_BYTES,
                    disk_blocks=num_blocks,
                    policy="lru",
                    cascade=mode,
                    disk_read_bytes_per_s=1e15,
                    disk_write_bytes_per_s=1e15,
                    disk_latency_s=0.0,
                    load_policy="always",
                ),
            ),
            "written",
        )
        for mode in MODES
    }
    assert 0 < written["on_evict"] < written["on_store"]


class Gated(StoreWrapper):
    """A store whose writes wait until the gate is open, and then take their time."""

    def __init__(self, inner: FileSystemStore) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.begun = threading.Event()

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self.begun.set()
        assert self.gate.wait(60)
        return super().write(keys, blocks)


class Setup:
    """64 blocks of host memory, a file store as large, and a gate before its writes."""

    def __init__(self, folder: Path) -> None:
        self.memory = Memory(64, BLOCK_BYTES)
        primary = CPUPrimaryTierOffloadingManager(64, self.memory)
        quota = 64 * BlockFormat("", BLOCK_BYTES).file_bytes
        self.store = Gated(FileSystemStore(folder, BLOCK_BYTES, max_bytes=quota))
        self.tier = StoreTier(primary.kv_view, "fs", self.store, TierLimits(threads=1))
        self.manager = FilledManager(self.memory, primary, [self.tier], cascade=["on_evict"], max_wait_s=120.0)
        self.context = ReqContext("r")

    def put(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Store ``keys`` at once, and return the keys that were evicted for them."""
        output = self.manager.prepare_store(keys, self.context)
        assert output is not None, "there is room, whatever the disk does"
        self.manager.complete_store(keys, self.context)
        self.manager.check_invariants()
        return list(output.evicted_keys)

    def step(self, wait: bool = True) -> None:
        self.manager.on_schedule_end()
        if wait:
            quiesce(self.tier)

    @property
    def dropped(self) -> float:
        return self.manager.get_stats()["cascades", "dropped"]


def test_no_eviction_waits_for_a_store_that_does_not_come_back(tmp_path: Path) -> None:
    """The gate is closed. If anything waited for the write, this test would not end."""
    setup = Setup(tmp_path)
    setup.put(prefix(64))
    setup.step()  # asks whether they are below
    setup.step(wait=False)
    assert setup.store.begun.wait(60)
    pinned = setup.manager.get_stats()["primary_blocks_pinned",]
    assert 1 <= pinned <= 2, "the window of 64 blocks"
    evicted = setup.put(prefix(40, of="q"))
    assert len(evicted) == 40
    assert setup.dropped == 40, "none of them was on disk"
    for number in range(20):
        setup.put(prefix(2, of=f"s{number}"))
        setup.step(wait=False)
    setup.store.gate.set()
    quiesce(setup.tier)
    setup.step()
    before = setup.dropped
    for number in range(20):
        for _ in range(3):
            setup.step()
        setup.put(prefix(1, of=f"t{number}"))
    assert setup.dropped == before, "back to writing everything in time"
    setup.manager.shutdown()


def test_a_burst_costs_what_is_counted_and_nothing_else(tmp_path: Path) -> None:
    """Each evicted block is on disk with its bytes, or is counted as dropped."""
    setup = Setup(tmp_path)
    setup.store.gate.set()
    setup.put(prefix(64))
    for _ in range(3):
        setup.step()
    evicted = setup.put(prefix(48, of="q"))
    assert len(evicted) == 48
    below = setup.store.contains(evicted)
    assert 0 < sum(below) < 48
    assert setup.dropped == below.count(False)
    rows = [memoryview(bytearray(BLOCK_BYTES)) for _ in evicted]
    assert setup.store.read_into(evicted, rows) == below
    back = ReqContext("back")
    kept = [key for key, is_below in zip(evicted, below, strict=True) if is_below]
    while None in (answers := setup.manager.lookup_prefix(kept, back)):
        setup.step()
    assert answers == [True] * len(kept)
    setup.manager.prepare_load(kept, back)
    setup.manager.complete_load(kept, back)
    assert setup.manager.wrong == 0
    setup.manager.shutdown()


@pytest.mark.parametrize("cascade", by_size(["on_evict"], MODES))
def test_an_engine_generates_the_same_tokens_and_finds_its_blocks_after_a_restart(cascade: str, tmp_path: Path) -> None:
    """Device, host memory and disk are each smaller than the chat."""
    model = tiny_model("llama")
    workload = ChatWorkload(8, 4, 8, 24, 6, 2, VOCAB, 5)
    tier = {"type": "fs", "path": str(tmp_path), "max_bytes": "1MiB", "cascade": cascade}
    config = parse_config(
        {
            "cpu_bytes_to_use": "300KiB",
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [tier],
            "load_policy": "always",
            "max_wait_s": 120.0,
        }
    )
    restarted = Way("restarted", True, config, after_restart=True)
    ways = (Way("no cache", False), Way("offloading", True, config), restarted)
    options = EngineOptions(num_blocks=96, block_tokens=4, max_batch_tokens=48, max_requests=2)
    comparison = compare(model, options, ways, workload)
    assert comparison.verdict.identical
    _, first, again = comparison.results
    assert first.stats["primary_blocks_evicted",] > 0
    assert first.stats["tier_blocks_stored", "fs"] > 0
    assert again.stats["tier_blocks_loaded", "fs"] > 0
    first_turns = [turn.external_hit_tokens for turn in again.turns if turn.turn == 0]
    assert max(first_turns) > 0, "nobody but the disk can have had it"
