# SPDX-License-Identifier: Apache-2.0
"""A tiering manager over real memory and fake tiers, and the actions of an engine that the tests of laws need."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext, make_offload_key
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.metrics import Stats
from kvoffload.testing.clock import ManualClock
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.tiering.base import SecondaryTierManager
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.tier import StoreTier

BLOCK_BYTES = 16


def content(key: OffloadKey) -> bytes:
    """Return the only bytes that may ever be served as ``key``."""
    return hashlib.blake2b(key, digest_size=BLOCK_BYTES).digest()


def keys(*numbers: int, of: str = "p") -> list[OffloadKey]:
    return [make_offload_key(f"{of}{number:06}".encode(), 0) for number in numbers]


def prefix(num_blocks: int, of: str = "p") -> list[OffloadKey]:
    return keys(*range(num_blocks), of=of)


class Memory:
    """The interface of a region that host memory needs: rows of ``BLOCK_BYTES``."""

    def __init__(self, num_blocks: int) -> None:
        self.bytes = bytearray(num_blocks * BLOCK_BYTES)
        self.num_blocks = num_blocks

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.bytes).cast("B", (self.num_blocks, BLOCK_BYTES))

    def read(self, slot: int) -> bytes:
        return bytes(self.bytes[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES])

    def write(self, slot: int, block: bytes) -> None:
        self.bytes[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = block


def stats_of_blocks(stats: Stats) -> Stats:
    """Return ``stats`` without counts of calls, which differ if the same blocks arrive in fewer calls."""
    of_calls = ("primary_allocation_blocks", "primary_eviction_age_seconds")
    return {sample: value for sample, value in stats.items() if sample[0] not in of_calls}


def quiesce(tier: SecondaryTierManager) -> None:
    """Returns when the threads of a ``StoreTier`` have nothing left to do, lookups and the scan included, as if its
    stores began at once."""
    assert isinstance(tier, StoreTier)
    tier._transfers.submit_stores()
    while tier._runner.num_open_slices:
        time.sleep(0.0002)
        tier._take_results()
        if tier._scan is not None:
            tier._scan.take_in()


class Rig:
    """``policies`` has one entry per fake tier. ``manager_options`` go to the manager, the clock is manual."""

    def __init__(
        self,
        num_blocks: int = 8,
        policies: Sequence[OffloadPolicy] = (OffloadPolicy.BLOCK_LEVEL,),
        *,
        cache_policy: str = "lru",
        primary_options: dict[str, Any] | None = None,
        backlogs: Sequence[int | None] = (),
        **manager_options: Any,
    ) -> None:
        self.memory = Memory(num_blocks)
        self.clock = ManualClock()
        self.primary = CPUPrimaryTierOffloadingManager(
            num_blocks, self.memory, cache_policy=cache_policy, enable_events=True, **(primary_options or {})
        )
        self.tiers = [
            FakeTier(self.memory.create_kv_memoryview(), f"tier{index}", policy=policy)
            for index, policy in enumerate(policies)
        ]
        for tier, backlog in zip(self.tiers, backlogs):
            tier.max_backlog_blocks = backlog
        self.manager = TieringOffloadingManager(self.primary, self.tiers, clock=self.clock, **manager_options)

    @property
    def tier(self) -> FakeTier:
        return self.tiers[0]

    def start(self, req_id: str) -> ReqContext:
        context = ReqContext(req_id)
        self.manager.on_new_request(context)
        return context

    def write(self, blocks: Iterable[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """``prepare_store`` and the copy from the device; ``complete_store`` is left to the test."""
        output = self.manager.prepare_store(list(blocks), context)
        assert output is not None
        for key, slot in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
            self.memory.write(slot, content(key))
        return output.keys_to_store

    def store(self, blocks: Iterable[OffloadKey], context: ReqContext, *, finish: bool = True) -> None:
        """Make a complete store; with ``finish``, also its cascades."""
        self.manager.complete_store(self.write(blocks, context), context)
        if finish:
            self.finish()

    def below(self, blocks: Iterable[OffloadKey], tier: int = 0) -> None:
        """Blocks that an earlier process left in a tier."""
        blocks = list(blocks)
        self.tiers[tier].put(blocks, map(content, blocks))

    def finish(self, **how: Any) -> None:
        """Ends every job of every tier, and has the manager take that in."""
        for tier in self.tiers:
            tier.finish(**how)
        self.step()

    def step(self) -> None:
        self.manager.on_schedule_end()
        self.manager.check_invariants()

    def ask(
        self, blocks: Sequence[OffloadKey], context: ReqContext, ends: Collection[OffloadKey] | None = None
    ) -> list[bool | None]:
        answers = self.manager.lookup_prefix(blocks, context, ends)
        assert False not in answers[:-1], "the first miss ends the answers"
        assert len(answers) == len(blocks) or answers[-1] is False
        self.manager.check_invariants()
        return answers

    def load(self, blocks: Sequence[OffloadKey], context: ReqContext) -> None:
        """``prepare_load``, a look at every byte, ``complete_load``."""
        spec = self.manager.prepare_load(blocks, context)
        for key, slot in zip(blocks, spec.block_ids.tolist(), strict=True):
            assert self.memory.read(slot) == content(key), f"wrong bytes for {key!r}"
        self.manager.check_invariants()
        self.manager.complete_load(blocks, context)

    def wait_for_prefix(self, blocks: Sequence[OffloadKey], context: ReqContext, max_steps: int = 8) -> int:
        """Asks step after step, as an engine does, with I/O that takes one step; answers the blocks of the hit."""
        for _ in range(max_steps):
            answers = self.ask(blocks, context)
            if None not in answers:
                return answers.index(False) if False in answers else len(answers)
            self.step()
            self.finish()
        raise AssertionError(f"{context.req_id} is still deferred after {max_steps} steps")
