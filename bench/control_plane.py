# SPDX-License-Identifier: Apache-2.0
"""Compare the bookkeeping of host memory, per block, with the same walk on a bare ``OrderedDict``.

The walk keeps a full cache in a steady state. Each step serves one request whose prefix is resident (look up, touch,
pin for a load, unpin) and one whose blocks are new (look up until the first miss, reserve, which evicts as many, and
publish). "Bare" applies these operations to one ``OrderedDict`` of slotted records, without classes, policies or calls
between. It includes making new records.
"""

from __future__ import annotations

import os
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from unittest.mock import patch

from bench.core import Row, thread_medians
from kvoffload.base import OffloadKey, ReqContext, make_offload_key
from kvoffload.config import OffloadingConfig
from kvoffload.cpu import CPUOffloadingManager
from kvoffload.cpu.policies.arc import ARCCachePolicy
from kvoffload.cpu.policies.density import DensityCachePolicy
from kvoffload.lost_blocks import NO_LOSSES, LostBlocks
from kvoffload.metrics import Histogram

BATCH = 64
REQ = ReqContext("bench")
TARGETS = {"lru": "<= 2", "arc": "<= 3", "density": "<= 3"}
MAX_BYTES = 330


class Record:
    """The least data that a cache must keep for a block."""

    __slots__ = ("block_id", "pins")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.pins = -1


class Keys:
    """Batches of new keys, made ahead so that making them is not timed."""

    def __init__(self) -> None:
        self._numbers = count()
        self._salt = os.urandom(24)

    def batch(self, size: int = BATCH) -> list[OffloadKey]:
        return [make_offload_key(self._salt + next(self._numbers).to_bytes(8, "big"), 0) for _ in range(size)]


class Bare:
    """The walk on an ``OrderedDict``."""

    def __init__(self, num_blocks: int, keys: Sequence[Sequence[OffloadKey]]) -> None:
        self.blocks: OrderedDict[OffloadKey, Record] = OrderedDict()
        slots = iter(range(num_blocks))
        for batch in keys:
            for key in reversed(batch):
                self.blocks[key] = Record(next(slots))
                self.blocks[key].pins = 0

    def step(self, known: Sequence[OffloadKey], new: Sequence[OffloadKey]) -> None:
        blocks = self.blocks
        for key in known:
            block = blocks.get(key)
            assert block is not None
            assert block.pins >= 0
        for key in reversed(known):
            blocks.move_to_end(key)
        slots = []
        for key in known:
            block = blocks[key]
            block.pins += 1
            slots.append(block.block_id)
        for key in known:
            blocks[key].pins -= 1
        missing = [key for key in new if key not in blocks]
        freed = []
        for _ in missing:
            _, block = blocks.popitem(last=False)
            assert block.pins == 0
            freed.append(block.block_id)
        for key, slot in zip(reversed(missing), freed):
            blocks[key] = Record(slot)
        for key in missing:
            blocks[key].pins = 0


class Managed:
    """The walk through ``CPUOffloadingManager``."""

    def __init__(
        self,
        policy: str,
        num_blocks: int,
        keys: Sequence[Sequence[OffloadKey]],
        by_prefix: bool,
        lost: LostBlocks = NO_LOSSES,
    ) -> None:
        self.manager = CPUOffloadingManager(num_blocks, policy, lost=lost)
        self.by_prefix = by_prefix
        for batch in keys:
            self.manager.prepare_store(batch, REQ)
            self.manager.complete_store(batch, REQ)

    def step(self, known: Sequence[OffloadKey], new: Sequence[OffloadKey]) -> None:
        manager = self.manager
        if self.by_prefix:
            assert False not in manager.lookup_prefix(known, REQ)
        else:
            for key in known:
                assert manager.lookup(key, REQ)
        manager.touch(known, REQ)
        manager.prepare_load(known, REQ)
        manager.complete_load(known, REQ)
        output = manager.prepare_store(new, REQ)
        assert output is not None
        manager.complete_store(output.keys_to_store, REQ)


class Walk:
    """Feeds a stepper: ``known`` cycles through a hot quarter of the cache, and ``new`` contains new keys."""

    def __init__(self, num_blocks: int, stepper: Callable[..., Bare | Managed]) -> None:
        self.keys = Keys()
        stored = [self.keys.batch() for _ in range(num_blocks // BATCH)]
        self.stepper = stepper(len(stored) * BATCH, stored)
        self.hot = stored[: max(len(stored) // 4, 1)]
        self.turn = 0
        self.plan: list[tuple[list[OffloadKey], list[OffloadKey]]] = []
        for batch in self.hot:
            self.stepper.step(batch, [])

    def prepare(self, num_steps: int) -> None:
        """Make the keys of the next steps."""
        self.plan = []
        for _ in range(num_steps):
            self.plan.append((self.hot[self.turn % len(self.hot)], self.keys.batch()))
            self.turn += 1

    def run(self) -> None:
        step = self.stepper.step
        for known, new in self.plan:
            step(known, new)


def run(short: bool) -> list[Row]:
    rows: list[Row] = []
    for num_blocks in (2_000,) if short else (10_000, 100_000, 1_000_000):
        rows += _walk_rows(num_blocks, steps=5 if short else 150, repeats=3 if short else 15)
    for policy in TARGETS:
        rows.append(_memory_row(policy, 5_000 if short else 700_000))
    for policy in ("lru", OffloadingConfig(cpu_bytes_to_use=0).eviction_policy):
        rows += _watching_rows(policy, 2_000 if short else 100_000, 5 if short else 150, 3 if short else 31)
    return rows


def _walk_rows(num_blocks: int, steps: int, repeats: int) -> list[Row]:
    cases: dict[str, Walk] = {"bare": Walk(num_blocks, Bare)}
    for policy in TARGETS:
        for by_prefix in (False, True):
            stepper = partial(Managed, policy, by_prefix=by_prefix)
            cases[f"{policy}, lookup{'_prefix' if by_prefix else ''}"] = Walk(num_blocks, stepper)

    def prepare_all() -> None:
        for walk in cases.values():
            walk.prepare(steps)

    _, bare, *managed = thread_medians(prepare_all, *(walk.run for walk in cases.values()), repeats=repeats)
    scale = 1e9 / steps / BATCH
    rows = [Row(f"bare walk, {num_blocks:,} blocks", bare * scale, "ns/block")]
    for case, seconds in zip(list(cases)[1:], managed, strict=True):
        name = f"{case}, {num_blocks:,} blocks"
        target = TARGETS[case.split(",")[0]]
        rows.append(Row(name, seconds * scale, "ns/block", "bare OrderedDict", seconds / bare, target))
    return rows


def _watching_rows(policy: str, num_blocks: int, steps: int, repeats: int) -> list[Row]:
    """Time the walk with losses recorded, as during a recorded trace, and the walk without histograms."""
    walks = [
        Walk(num_blocks, partial(Managed, policy, by_prefix=True, lost=lost))
        for lost in (NO_LOSSES, LostBlocks(), NO_LOSSES)
    ]

    def prepare_all() -> None:
        for walk in walks:
            walk.prepare(steps)

    def run_without_histograms() -> None:
        with patch.object(Histogram, "observe", lambda histogram, value: None):
            walks[2].run()

    _, usual, kept, bare = thread_medians(
        prepare_all, walks[0].run, walks[1].run, run_without_histograms, repeats=repeats
    )
    name, scale = f"{num_blocks:,} blocks", 1e9 / steps / BATCH
    return [
        Row(
            f"{policy}, lookup_prefix, losses recorded, {name}",
            kept * scale,
            "ns/block",
            "losses not recorded",
            kept / usual,
            "<= 1.05",
        ),
        Row(
            f"{policy}, lookup_prefix, histograms, {name}",
            usual * scale,
            "ns/block",
            "histograms that do nothing",
            usual / bare,
            "<= 1.05",
        ),
    ]


def _memory_row(policy: str, num_blocks: int) -> Row:
    """Measure the bytes per tracked key, including the key, of a cache that was filled once.

    Evicted keys that a policy remembers also count as tracked keys.
    """
    value, tracked = _tracked_bytes(policy, num_blocks // BATCH)
    name = f"{policy}, memory, filled once, {tracked:,} keys"
    return Row(name, value, "bytes/key", f"{MAX_BYTES} bytes", value / MAX_BYTES, "<= 1")


def _tracked_bytes(name: str, batches: int) -> tuple[float, int]:
    tracemalloc.start()
    try:
        manager = CPUOffloadingManager(batches * BATCH, name)
        keys = Keys()
        for number in range(batches):
            batch = keys.batch()
            output = manager.prepare_store(batch, REQ)
            assert output is not None
            manager.complete_store(batch)
            if number < batches // 2:
                manager.touch(batch)
        del output, batch
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tracked = batches * BATCH
    policy = manager.slots.policy
    if isinstance(policy, ARCCachePolicy):
        tracked += len(policy.recent_ghosts) + len(policy.frequent_ghosts)
    elif isinstance(policy, DensityCachePolicy):
        tracked += len(policy._past_uses)
    return used / tracked, tracked
