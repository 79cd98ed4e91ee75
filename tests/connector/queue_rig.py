# SPDX-License-Identifier: Apache-2.0
"""A busy engine in virtual time: a queue of prompts over the real scheduler side, the real tiering manager, and tiers
that read at known speeds. Nothing sleeps, so a minute of a saturated server takes a fraction of a second."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.tiering.plan_rig import VirtualTier

from kvoffload.base import OffloadKey, TransferResult, make_offload_key
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.connector.engine import EngineStep, ScheduledRequest
from kvoffload.connector.messages import TransferJob, WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.sim.disk import VirtualMemory
from kvoffload.testing.clock import ManualClock
from kvoffload.tiering.base import JobMetadata, JobResult
from kvoffload.tiering.load_policy import BlockWorth
from kvoffload.tiering.manager import TieringOffloadingManager

BT = 16
"""Tokens per block."""
BLOCK_BYTES = 2 << 20
COPY_S = 1e-4
"""Seconds that a block takes between host memory and the GPU."""


@dataclass(eq=False, slots=True)
class Prompt:
    """A request in the engine's form. ``document`` names its tokens except for the last ``own_tokens``."""

    request_id: str
    document: str
    num_prompt_tokens: int
    own_tokens: int = 8
    arrival_s: float = 0.0
    priority: int = 0
    abort_s: float = math.inf
    kv_transfer_params: dict[str, Any] | None = None
    computed: int = 0
    external: int = 0
    first_token_s: float | None = None
    waits_for_load: bool = False
    is_admitted: bool = False
    block_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        shared = (self.num_prompt_tokens - self.own_tokens) // BT
        stems = [self.document if n < shared else self.request_id for n in range(self.num_prompt_tokens // BT)]
        return [f"{stem}/{n:06}".encode() for n, stem in enumerate(stems)]

    @property
    def keys(self) -> list[OffloadKey]:
        return [make_offload_key(block_hash, 0) for block_hash in self.block_hashes]


class QueueTier(VirtualTier):
    """A tier that stores blocks at once and at no cost, and counts how often each block is read."""

    def __init__(self, name: str, clock: ManualClock, block_s: float, answer_s: float | None = None) -> None:
        super().__init__(name, clock, block_s, answer_s)
        self.reads: Counter[OffloadKey] = Counter()

    def submit_load(self, job: JobMetadata) -> None:
        self.reads.update(job.keys)
        super().submit_load(job)

    def submit_store(self, job: JobMetadata) -> None:
        self.keys.update(job.keys)
        self._ended.append(JobResult(job.job_id, success=True))

    def has_pending_work(self) -> bool:
        return super().has_pending_work() or bool(self._ended)


class QueueRig:
    """An engine that computes ``tokens_per_s`` in steps of at most ``budget`` tokens, which also cost ``step_s``.

    ``disks``: by tier, its reading speed as a multiple of the engine's, and the seconds of an answer or ``None``.
    Each decoding request takes one token of a step. The engine has room for ``most_running`` requests.
    """

    def __init__(
        self,
        disks: Sequence[tuple[float, float | None]] = (),
        *,
        tokens_per_s: float = 2000.0,
        host_blocks: int = 1024,
        policy: str = "cost",
        budget: int = 512,
        step_s: float = 0.002,
        most_running: int = 32,
        output_tokens: int = 2,
        **options: float,
    ) -> None:
        self.clock = ManualClock()
        self.tokens_per_s, self.budget, self.step_s = tokens_per_s, budget, step_s
        self.most_running, self.output_tokens = most_running, output_tokens
        block_s = BT / tokens_per_s
        self.tiers = [
            QueueTier(f"t{at}", self.clock, block_s / speed, answer) for at, (speed, answer) in enumerate(disks)
        ]
        primary = CPUPrimaryTierOffloadingManager(host_blocks, VirtualMemory(), "lru", clock=self.clock)  # type: ignore[arg-type]
        worth = BlockWorth(
            BLOCK_BYTES, (BT,), tokens_per_s, tuple(BLOCK_BYTES / (block_s / speed) for speed, _ in disks)
        )
        self.manager = TieringOffloadingManager(
            primary, self.tiers, block_worth=worth if policy == "cost" else None, clock=self.clock, **options
        )
        layout = EngineLayout((KVGroupLayout(GroupKind.FULL_ATTENTION, BT, BLOCK_BYTES),), BT, "queue")
        config = OffloadingConfig(
            cpu_bytes_to_use=host_blocks * BLOCK_BYTES,
            secondary_tiers=tuple({"type": "memory"} for _ in disks),
            **options,
        )
        self.scheduler = OffloadingConnectorScheduler(self.manager, layout, config, self.clock)
        self.scheduler.load_within_steps()
        self.waiting: deque[Prompt] = deque()
        self.running: list[Prompt] = []
        self._outputs: dict[Prompt, int] = {}
        self._ends: list[tuple[float, TransferJob]] = []
        """The seconds of transfers between host memory and the GPU."""
        self._next_block = 0
        self.tokens = {"computed": 0, "loaded": 0}
        self.check_each: int | None = None
        """Check all invariants after each so many steps."""
        self._num_steps = 0

    # ------------------------------------------------------------------------------------------------ serving

    def serve(self, prompts: Sequence[Prompt]) -> None:
        """Serve prompts, in the order of ``arrival_s`` from now on, until all have ended and nothing moves."""
        start_s = self.clock()
        coming = deque(sorted(prompts, key=lambda prompt: prompt.arrival_s))
        aborts = sorted((p for p in prompts if p.abort_s < math.inf), key=lambda prompt: prompt.abort_s)
        while coming or self.waiting or self.running:
            now_s = self.clock() - start_s
            while coming and coming[0].arrival_s <= now_s:
                self._arrive(coming.popleft())
            while aborts and aborts[0].abort_s <= now_s:
                self._abort(aborts.pop(0))
            if not self.waiting and not self.running:
                if coming:
                    self.idle(max(coming[0].arrival_s - now_s, 1e-6))
                continue
            self.step(start_s)
        while self.scheduler.has_pending_work() or self._ends:
            self.step(start_s)

    def idle(self, seconds: float) -> None:
        """Let time pass while no request is there. An engine steps while the connector has work."""
        end_s = self.clock() + seconds
        while self.scheduler.has_pending_work() and self.clock() < end_s:
            self.step(0.0, end_s)
        self.clock.advance(max(end_s - self.clock(), 0.0))

    def _arrive(self, prompt: Prompt) -> None:
        self.scheduler.on_new_request(prompt)
        self.waiting.append(prompt)
        self._sort()

    def _sort(self) -> None:
        """Sort requests by priority and then by arrival, as vLLM does."""
        self.waiting = deque(sorted(self.waiting, key=lambda prompt: (prompt.priority, prompt.arrival_s)))

    def _abort(self, prompt: Prompt) -> None:
        if prompt in self.waiting:
            self.waiting.remove(prompt)
        elif prompt in self.running:
            self.running.remove(prompt)
        else:
            return
        self._outputs.pop(prompt, None)
        self.scheduler.request_finished(prompt)

    def step(self, start_s: float, most_s: float = math.inf) -> None:
        """Make one step: schedule, compute, collect."""
        scheduled, left = [], self.budget
        for prompt in self.running:
            count = min(left, max(prompt.num_prompt_tokens - prompt.computed, 1))
            if count:
                scheduled.append((prompt, count, False))
                left -= count
        for prompt in [*self.waiting]:
            if left <= 0 or len(self.running) + sum(is_new for *_, is_new in scheduled) >= self.most_running:
                break
            if (count := self._admit(prompt, left)) is not None:
                scheduled.append((prompt, count, True))
                left -= count
        meta = self.scheduler.build_connector_meta(EngineStep(tuple(self._record(*each) for each in scheduled)))
        begin_s = self.clock()
        for job in meta.loads:
            copied = 0 if job.source is None else len(job.destination.block_ids)  # type: ignore[attr-defined]
            self._ends.append((begin_s + copied * COPY_S, job))
        synchronous_s = sum(
            len(job.destination.block_ids) * COPY_S  # type: ignore[attr-defined]
            for job in meta.loads
            if any(prompt.request_id == job.request_id for prompt, *_ in scheduled)
        )
        num_tokens = sum(count for _, count, _ in scheduled)
        work_s = synchronous_s + self.step_s + num_tokens / self.tokens_per_s
        if not num_tokens:  # only transfers run: until the next one ends
            ends = [end_s for end_s, _ in self._ends] + [tier.next_s() for tier in self.tiers]
            work_s = min(max(min(ends, default=begin_s) - begin_s, 0.0) + 1e-6, 0.01, max(most_s - begin_s, 1e-6))
        self.clock.advance(work_s)
        for job in (*meta.final_stores, *meta.stores):
            self._ends.append((self.clock(), job))
        for prompt, count, is_new in scheduled:
            if is_new:
                self.waiting.remove(prompt)
                self.running.append(prompt)
            self._compute(prompt, count, start_s)
        self._collect()
        self._num_steps += 1
        if self.check_each and self._num_steps % self.check_each == 0:
            self.check()

    def _admit(self, prompt: Prompt, left: int) -> int | None:
        """Ask for a waiting request, as an engine does. Returns its tokens in this step, or ``None`` if it waits on."""
        if prompt.waits_for_load:
            return None
        if prompt.is_admitted:  # its load has ended
            self._tell_blocks(prompt, 0)
            return min(left, prompt.num_prompt_tokens - prompt.computed)
        external, is_asynchronous = self.scheduler.get_num_new_matched_tokens(prompt, 0)
        if external is None:
            return None
        prompt.is_admitted = True
        prompt.external = external
        self.tokens["loaded"] += external
        self._tell_blocks(prompt, external)
        if external and is_asynchronous:
            prompt.waits_for_load = True
            return None
        prompt.computed = external
        return min(left, prompt.num_prompt_tokens - prompt.computed)

    def _tell_blocks(self, prompt: Prompt, external: int) -> None:
        if not prompt.block_ids:
            count = -(-(prompt.num_prompt_tokens + self.output_tokens) // BT)
            prompt.block_ids = [*range(self._next_block, self._next_block + count)]
            self._next_block += count
        self.scheduler.update_state_after_alloc(prompt, (prompt.block_ids,), external)

    def _record(self, prompt: Prompt, count: int, is_new: bool) -> ScheduledRequest:
        ids = (prompt.block_ids,) if is_new else ()
        return ScheduledRequest(prompt.request_id, ids, prompt.computed, count, is_new)

    def _compute(self, prompt: Prompt, count: int, start_s: float) -> None:
        is_prompt = prompt.computed < prompt.num_prompt_tokens
        prompt.computed += count
        self.tokens["computed"] += count if is_prompt else 0
        if prompt.computed < prompt.num_prompt_tokens:
            return
        if prompt.first_token_s is None:
            prompt.first_token_s = self.clock() - start_s
        self._outputs[prompt] = self._outputs.get(prompt, 0) + 1
        if self._outputs[prompt] >= self.output_tokens:
            self.running.remove(prompt)
            del self._outputs[prompt]
            self.scheduler.request_finished(prompt)

    def _collect(self) -> None:
        ended = [(end_s, job) for end_s, job in self._ends if end_s <= self.clock()]
        self._ends = [each for each in self._ends if each[0] > self.clock()]
        results = tuple((0, TransferResult(job.job_id, True, BLOCK_BYTES, _copy_s(job))) for _, job in ended)
        outcome = self.scheduler.update_connector_output(WorkerReport(results))
        for prompt in self.waiting:
            if prompt.request_id in outcome.loaded_request_ids:
                prompt.waits_for_load, prompt.computed = False, prompt.external
            elif prompt.request_id in outcome.failed_loads:
                prompt.waits_for_load, prompt.computed = False, 0

    def check(self) -> None:
        self.manager.check_invariants()
        self.scheduler.check_invariants()


def _copy_s(job: TransferJob) -> float:
    return COPY_S * max(len(getattr(side, "block_ids", ())) for side in (job.source, job.destination))


def throughput(prompts: Sequence[Prompt], tokens_per_s: float) -> float:
    """Return the prompt tokens per second as a multiple of the engine's speed."""
    end_s = max(prompt.first_token_s or 0.0 for prompt in prompts)
    return sum(prompt.num_prompt_tokens for prompt in prompts) / end_s / tokens_per_s
