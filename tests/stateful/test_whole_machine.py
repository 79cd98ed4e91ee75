# SPDX-License-Identifier: Apache-2.0
"""Test a whole system with random actions: an engine, both sides of the connector, host memory and two tiers below it.

The other machines each test one part with its own oracle. This one tests combinations: layouts and block sizes, several
ranks, limits of requests, weighed loads, cascades of both kinds, tiers that lose and tear blocks or hang, aborts,
preemption, resets, and a trace. The fake engine is the oracle: a block's bytes are a function of its prefix. They are
checked on the device, in host memory and in the tiers after each step.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.fakes.device import Bytes, page_of
from tests.fakes.engine import FakeEngine, slices_of
from tests.fakes.manual_handler import ManualHandler, ManualSpec
from tests.fakes.request import FakeRequest, Scheduling
from tests.leaks import kept
from tests.sizes import by_size
from tests.stateful.chaos import HASH, LAYOUTS, LENGTHS, MAX_NEW

from kvoffload.base import CanonicalKVCaches, OffloadKey, OffloadPolicy, get_offload_block_hash, get_offload_group_idx
from kvoffload.config import EngineLayout, GroupKind, OffloadingConfig, RankSlice
from kvoffload.connector import OffloadingConnectorWorker
from kvoffload.connector.epochs import Epoch
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.testing.clock import ManualClock
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.tiering import TieringOffloadingManager
from kvoffload.tiering.load_policy import BlockWorth

ROUNDS = 80
OWN = {"kvoffload:write-back", "kvoffload:probe"}
"""Requests of the manager's own, which end at its shutdown."""
LIMITS = (0, 1, 3, 4, 7, 8, 12, 15, 30)


class Memory:
    """Host memory of ``num_slots`` blocks, in slices."""

    def __init__(self, num_slots: int, layout: EngineLayout, factor: int) -> None:
        self.rows: Bytes = np.zeros((num_slots, layout.block_bytes(factor)), dtype=np.uint8)
        size = layout.slice_bytes(factor)
        self.slices = [self.rows[:, rank * size : (rank + 1) * size] for rank in range(layout.slice.num_slices)]

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.rows)


class Engine(FakeEngine):
    """An engine that can be asked not to read its prefix cache."""

    def _device_hit(self, request: FakeRequest) -> tuple[int, list[list[int]]]:
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, [[] for _ in self.groups]
        return super()._device_hit(request)


class Whole:
    """A system whose parts and events follow from ``seed``. Call ``run``."""

    def __init__(self, seed: int, folder: Path) -> None:
        chance = self.chance = random.Random(seed)
        groups = LAYOUTS[chance.choice(sorted(LAYOUTS))]
        self.factor = factor = chance.choice([1, 1, 2, 3])
        num_slots = chance.choice([3, 8, 20, 40])
        num_ranks = chance.choice([1, 1, 2])
        part = RankSlice(0, 1, 0, 2) if num_ranks == 2 and seed % 2 else None
        self.layout = EngineLayout(groups, HASH, "whole", num_ranks=num_ranks, rank_slice=part)
        self.memory = Memory(num_slots, self.layout, factor)
        self.clock = ManualClock()
        self.primary = CPUPrimaryTierOffloadingManager(
            num_slots,
            self.memory,
            chance.choice(["lru", "arc", "density"]),
            enable_events=True,
            store_threshold=chance.choice([1, 1, 1, 2]),
            clock=self.clock,
        )
        self.tiers = [
            FakeTier(
                self.memory.create_kv_memoryview(),
                f"tier {n}",
                policy=chance.choice([OffloadPolicy.BLOCK_LEVEL] * 3 + [OffloadPolicy.REQUEST_LEVEL]),
                at_once=chance.random() < 0.1,
                capacity=chance.choice([None, None, 6, 20]),
            )
            for n in range(chance.choice([1, 2, 2]))
        ]
        self.manager = TieringOffloadingManager(
            self.primary,
            self.tiers,
            max_wait_s=chance.choice([0.5, 5.0]),
            cascade=[chance.choice(["on_store", "on_evict"]) for _ in self.tiers],
            block_worth=self._worth() if chance.random() < 0.5 else None,
            promotion_share=chance.choice([0.4, 0.75, 1.0]),
            clock=self.clock,
        )
        self.trace = folder / "trace.jsonl"
        self.handlers: list[ManualHandler] = []
        pool_tokens = chance.choice([40, 60, 100])
        self.engine = Engine(
            self.manager,
            self.layout,
            OffloadingConfig(
                reset_tiers=seed % 2 == 0,
                cpu_bytes_to_use=num_slots * self.layout.block_bytes(factor),
                block_size=min(group.block_tokens for group in groups) * factor,
                offload_prompt_only=chance.random() < 0.2,
                record_trace=str(self.trace),
            ),
            num_gpu_blocks=sum(-(-pool_tokens // group.block_tokens) for group in groups),
            num_slots=num_slots,
            chunk_tokens=chance.choice([3, 8, 24]),
            max_running=3,
            scheduling=chance.choice(list(Scheduling)),
            keeps_all_states=chance.random() < 0.5,
            make_worker=self._make_worker,
        )
        self.engine.slots = self.memory.slices
        self.engine.pool.reuses_newest = chance.random() < 0.5
        self.copies_take, self.jobs_take = chance.choice([1, 2, 5]), chance.choice([1, 2, 8])
        self.epochs: list[Epoch] = []
        self.resident: set[OffloadKey] = set()
        self.count = 0

    def _worth(self) -> BlockWorth:
        tokens = (
            self.factor * group.block_tokens if group.kind is GroupKind.FULL_ATTENTION else 0
            for group in self.layout.groups
        )
        read = tuple(self.chance.choice([None, 1000.0]) for _ in self.tiers)
        return BlockWorth(self.layout.block_bytes(self.factor), tuple(tokens), self.chance.choice([None, 100.0]), read)

    def _make_worker(self, rank: int, pages: Bytes) -> OffloadingConnectorWorker:
        widths = tuple(group.page_bytes for group in self.layout.groups)
        part = slices_of(self.layout)[rank]
        handler = ManualHandler(pages, self.memory.slices[part.index], widths, self.factor, part)
        self.handlers.append(handler)
        worker = OffloadingConnectorWorker(rank)
        worker.register_kv_caches(ManualSpec(self.manager, handler), CanonicalKVCaches())
        return worker

    def run(self) -> Counter[str]:
        """Run some rounds of random actions, then serve until the engine is idle.

        Returns the counts of actions, for the test's own check.
        """
        for _ in range(ROUNDS):
            if len(self.engine.waiting) < 8 and self.chance.random() < 0.5:
                self._arrive()
            self._disturb()
            self._end_jobs()
            self.clock.advance(self.chance.choice([0.0, 0.01, 0.01, 0.1, 0.3]))
            self.engine.step()
            self._judge()
        self._drain()
        stats = self.engine.connector.get_stats()
        self.engine.connector.shutdown()
        for tier in self.tiers:
            assert tier.is_shut_down
            begun = Counter(call.req_id for call in tier.calls("on_new_request"))
            assert Counter(call.req_id for call in tier.calls("on_request_finished")) == begun
        with pytest.raises(ValueError, match="released"):
            memoryview(self.primary.kv_view)
        self._judge_trace()
        did: Counter[str] = Counter()
        for name, *labels in stats:
            did[name] += int(stats[name, *labels])
        return did

    # ------------------------------------------------------------------------------------------------ events

    def _arrive(self) -> None:
        chance, engine = self.chance, self.engine
        stem, length, fork = chance.randrange(3), chance.choice(LENGTHS), chance.randrange(3)
        tokens = [stem * 100 + n for n in range(length)]
        if fork:
            tokens[-1] = 1000 + fork
        names = ("max_offload_tokens", "max_load_tokens")
        params = {name: chance.choice(LIMITS) for name in names if chance.random() < 0.25}
        request = FakeRequest(f"r{self.count}", tokens, chance.randrange(MAX_NEW + 1), HASH, params or None)
        request.skip_reading_prefix_cache = chance.random() < 0.1
        self.count += 1
        most = request.num_tokens + request.max_new_tokens
        if sum(-(-most // group.gpu_block_tokens) for group in engine.groups) <= engine.pool.num_gpu_blocks:
            engine.connector.on_new_request(request)
            engine.waiting.append(request)

    def _disturb(self) -> None:
        chance, engine = self.chance, self.engine
        tier = chance.choice(self.tiers)
        live = [*engine.waiting, *engine.running]
        match chance.randrange(100):
            case 0 | 1 | 2 if live:
                engine.abort(chance.choice(live))
            case n if 3 <= n < 13:
                engine.pool.forget_all()
            case 13 | 14:
                for each in self.tiers:
                    each.hangs = chance.random() < 0.5
                engine.connector.reset_cache()
                for each in self.tiers:
                    each.hangs = False
            case 15 | 16:
                engine.preempt_all()
            case 17 | 18 | 19:
                chance.choice(self.handlers).refuse_next = True
            case n if 20 <= n < 25 and tier.blocks:
                del tier.blocks[chance.choice(list(tier.blocks))]
            case n if 25 <= n < 30 and tier.blocks:
                tier.answers[chance.choice(list(tier.blocks))] = chance.choice([None, False])
            case n if 30 <= n < 34:
                tier.answers.clear()
            case n if 34 <= n < 40:
                engine.move_cached()

    def _end_jobs(self, *, all_well: bool = False) -> None:
        chance = self.chance
        copies = [(handler, job_id) for handler in self.handlers for job_id in handler.pending]
        chance.shuffle(copies)
        for handler, job_id in copies:
            if all_well or chance.random() * self.copies_take < 1:
                handler.run(job_id, all_well or chance.random() < 0.9)
        for tier in self.tiers:
            job_ids = list(tier.jobs)
            chance.shuffle(job_ids)
            for job_id in job_ids:
                if all_well or chance.random() * self.jobs_take < 1:
                    luck = 1.0 if all_well else chance.random()
                    lost = [chance.choice(list(tier.jobs[job_id].keys))] if luck < 0.2 else []
                    tier.finish([job_id], success=luck >= 0.08, lose=lost, tear=chance.random() < 0.5)

    def _drain(self) -> None:
        for tier in self.tiers:
            tier.answers.clear()
        for _ in range(3000):
            if self.engine.idle:
                break
            self._end_jobs(all_well=True)
            self.clock.advance(0.05)
            self.engine.step()
            self._judge()
        assert self.engine.idle, "it does not drain"
        assert self.engine.pool.num_free == self.engine.pool.num_gpu_blocks
        stats = self.engine.connector.get_stats()
        for gauge in (
            "jobs_in_flight", "requests_tracked", "requests_waiting", "claimed_blocks", "promotions_in_flight",
            "cascades_parked", "primary_blocks_pinned", "primary_blocks_being_read", "primary_blocks_being_written",
        ):  # fmt: skip
            assert stats[(gauge,)] == 0, gauge
        moved = {
            name: sum(len(call.keys) for tier in self.tiers for call in tier.calls(name))
            for name in ("submit_load", "submit_store")
        }
        assert sum(stats["promotions", outcome] for outcome in ("ok", "failed")) == moved["submit_load"]
        dropped = sum(count for name, count in stats.items() if name[0] == "tier_dropped_blocks")
        assert sum(stats["cascades", outcome] for outcome in ("ok", "failed")) == moved["submit_store"]
        assert stats["cascades", "dropped"] >= dropped, "and what was evicted unwritten"
        for tier in self.tiers:
            ended = {call.req_id for call in tier.calls("on_request_finished")}
            assert ended == {call.req_id for call in tier.calls("on_new_request")} - OWN
        self.engine.step()  # the connector knows a step until the next
        for worker in self.engine.workers:
            worker.take_load_outcome()
        assert not kept({f"r{n}" for n in range(self.count)}, self.engine.connector, *self.engine.workers)

    # -------------------------------------------------------------------------------------------------- invariants

    def _judge(self) -> None:
        engine = self.engine
        engine.check()
        self.manager.check_invariants()
        for event in engine.connector.take_events():
            for key in event.keys if event.medium == "CPU" else ():
                assert (key in self.resident) is event.removed, "an event for nothing"
                self.resident ^= {key}
        epoch = engine.connector._epochs.current
        if all(epoch.seed != each.seed for each in self.epochs):  # one that kept its blocks has their keys
            self.epochs.append(epoch)
        for key in self.resident:
            (stored,) = epoch.engine_keys([key])  # its own inverse
            block = self.primary.slots.get(stored)
            assert block is not None
            assert block.is_ready
            self._judge_block(key, self.memory.rows[block.block_id])
        for tier in self.tiers:
            for stored, content in tier.blocks.items():
                keys = [key for each in self.epochs for key in each.engine_keys([stored])]
                (known,) = [key for key in keys if get_offload_block_hash(key) in engine._prefixes]
                self._judge_block(known, np.frombuffer(content, np.uint8))
        stats = engine.connector.get_stats()
        hits = stats.get(("hit_tokens",), 0)
        assert sum(count for name, count in stats.items() if name[0] == "tier_hit_tokens") == hits
        assert hits <= stats.get(("lookup_tokens",), 0)

    def _judge_block(self, key: OffloadKey, row: npt.NDArray[np.uint8]) -> None:
        """All slices of a block, as far as its group fills it."""
        engine = self.engine
        group = engine.groups[get_offload_group_idx(key)]
        request, end = engine._prefixes[get_offload_block_hash(key)]
        block, width = end // group.block_tokens - 1, self.layout.groups[group.index].page_bytes
        slice_bytes = self.layout.slice_bytes(self.factor)
        for position in range(group.first_gpu_block(block), (block + 1) * group.factor):
            content = request.prefix_hash((position + 1) * group.gpu_block_tokens)
            for index in range(self.layout.slice.num_slices):
                begin = index * slice_bytes + position % self.factor * width
                right = row[begin : begin + width].tobytes() == page_of(content, group.index, index, width).tobytes()
                assert right, f"wrong bytes: {group}, slice {index}, block {block}, GPU block {position}"

    def _judge_trace(self) -> None:
        """Check that each token of a prompt was found somewhere or missed for a reason."""
        lines = [json.loads(line) for line in self.trace.read_text().splitlines()]
        assert sum("story" in line for line in lines) > 0
        for line in lines:
            if (story := line.get("story")) is not None:
                tokens = [*story["found"].values(), *story["missed"].values()]
                assert min(tokens, default=0) >= 0, story
                assert sum(tokens) == line["input_length"], story


@pytest.fixture(scope="module")
def did() -> Iterator[Counter[str]]:
    """Yield the counts of actions of all runs in this module.

    A few machines may be too small for a promotion, but not a dozen.
    """
    did: Counter[str] = Counter()
    yield did
    if did["runs"] >= 12:
        assert 2 * did["promotions"] > did["runs"]


@pytest.mark.parametrize("first", range(0, by_size(12, 120), 4))
def test_everything_at_once(first: int, did: Counter[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hit_tokens = did["hit_tokens"]
    for seed in range(first, first + 4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            did.update(Whole(seed, folder).run())
        except Exception as exc:
            exc.add_note(f"seed {seed}")
            raise
        did["runs"] += 1
    assert did["hit_tokens"] > hit_tokens
    assert "Recording" not in caplog.text, "a trace was given up"
