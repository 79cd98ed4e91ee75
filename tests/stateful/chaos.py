# SPDX-License-Identifier: Apache-2.0
"""The fake engine with everything that may happen to it, and a judge. Driven by Hypothesis and by plain chance."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.fakes.engine import FakeEngine, FakeRequest, Scheduling

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig, RankSlice
from kvoffload.connector import ConnectorMeta, EngineStep
from kvoffload.cpu.manager import CPUOffloadingManager

HASH = 2
FULL = KVGroupLayout(GroupKind.FULL_ATTENTION, 4, 8)
FINE = KVGroupLayout(GroupKind.FULL_ATTENTION, 2, 6)
SLIDING = KVGroupLayout(GroupKind.SLIDING_WINDOW, 4, 8, sliding_window_tokens=7)
NARROW = KVGroupLayout(GroupKind.SLIDING_WINDOW, 2, 5, sliding_window_tokens=3)
STATE = KVGroupLayout(GroupKind.SINGLE_STATE, 4, 7)
HEAD = KVGroupLayout(GroupKind.FULL_ATTENTION, 4, 8, lookahead_tokens=1)
NARROW_HEAD = KVGroupLayout(GroupKind.SLIDING_WINDOW, 2, 5, sliding_window_tokens=3, lookahead_tokens=1)

LAYOUTS = {
    "full": (FULL,),
    "sliding": (SLIDING,),
    "state": (STATE,),
    "full+sliding": (FULL, SLIDING),
    "full+state": (FULL, STATE),
    "full+states": (FINE, STATE, STATE),
    "full+sliding+state": (FULL, SLIDING, STATE),
    "two sizes": (FULL, NARROW),
    "all": (FINE, SLIDING, STATE),
    "speculative head": (HEAD,),
    "speculative heads of two sizes": (HEAD, NARROW_HEAD),
}
LENGTHS = (1, 8, 13, 20, 21, 33)
MAX_NEW = 6
PROBE = ReqContext("probe")


@dataclass(frozen=True)
class Setup:
    layout: str = "full"
    factor: int = 1
    num_ranks: int = 1
    num_replicas: int = 1
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
    num_slots: int = 40
    pool_tokens: int = 60
    chunk: int = 8
    prompt_only: bool = False
    scheduling: Scheduling = Scheduling.SYNCHRONOUS
    reuses_newest: bool = False
    keeps_all_states: bool = True
    loads_within_steps: bool = False

    @staticmethod
    def random(chance: random.Random) -> Setup:
        num_ranks, num_replicas = chance.choice([(1, 1), (1, 1), (2, 1), (2, 2)])
        return Setup(
            layout=chance.choice(sorted(LAYOUTS)),
            factor=chance.choice([1, 1, 2, 3]),
            num_ranks=num_ranks,
            num_replicas=num_replicas,
            policy=chance.choice(list(OffloadPolicy)),
            num_slots=chance.choice([3, 8, 40]),
            pool_tokens=chance.choice([40, 60, 100]),
            chunk=chance.choice([3, 8, 24]),
            prompt_only=chance.random() < 0.2,
            scheduling=chance.choice(list(Scheduling)),
            reuses_newest=chance.random() < 0.5,
            keeps_all_states=chance.random() < 0.5,
            loads_within_steps=chance.random() < 0.5,
        )


class PolicyManager(CPUOffloadingManager):
    """Host memory that asks for one offload policy."""

    def __init__(self, num_blocks: int, policy: OffloadPolicy) -> None:
        super().__init__(num_blocks, enable_events=True)
        self._offload_policy = policy

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        super().on_new_request(req_context)
        return RequestOffloadingContext(self._offload_policy)


class Chaos:
    """``judge`` after whatever was done; ``drain`` at the end."""

    def __init__(self, setup: Setup) -> None:
        groups = LAYOUTS[setup.layout]
        self._orders_prefixes = setup.num_slots < 32  # whoever stores touches its whole prefix
        base = min(group.block_tokens for group in groups)
        self.manager = PolicyManager(setup.num_slots, setup.policy)
        part = RankSlice(0, setup.num_ranks // setup.num_replicas, 0, setup.num_replicas)
        layout = EngineLayout(groups, HASH, "chaos", num_ranks=setup.num_ranks, rank_slice=part)
        self.engine = FakeEngine(
            self.manager,
            layout,
            OffloadingConfig(
                cpu_bytes_to_use=setup.num_slots * layout.block_bytes(setup.factor),
                block_size=base * setup.factor,
                offload_prompt_only=setup.prompt_only,
            ),
            num_gpu_blocks=sum(-(-setup.pool_tokens // group.block_tokens) for group in groups),
            num_slots=setup.num_slots,
            chunk_tokens=setup.chunk,
            max_running=3,
            scheduling=setup.scheduling,
            keeps_all_states=setup.keeps_all_states,
        )
        self.engine.pool.reuses_newest = setup.reuses_newest
        if setup.loads_within_steps:
            self.engine.connector.load_within_steps()
            self.engine.connector._short_loads.failed = lambda: None  # type: ignore[method-assign] # it goes on
        self.loads_within_steps = 0
        self.stopped = 0
        """Requests that ended by a string: the frontend found it, and aborted them while they were running."""
        self.orders_judged = 0
        """Running requests with at least two blocks that can be evicted."""
        self.final_stores = 0
        self.final_stores_flushed = 0
        """Those whose GPU blocks were handed out again in the step that started them."""
        self.states_stored = 0
        self.states_loaded = 0
        self.flushed_for_copies = 0
        """Jobs in flight whose GPU blocks the engine wrote with its own copy."""
        self._build_meta = self.engine.connector.build_connector_meta
        self.engine.connector.build_connector_meta = self._count_jobs  # type: ignore[method-assign]
        self.resident: dict[OffloadKey, None] = {}
        self.count = 0

    def _count_jobs(self, step: EngineStep) -> ConnectorMeta:
        fences = self.engine.connector._jobs.fences
        fenced = [job_id for block_id in step.needed_block_ids for job_id in fences.get(block_id, ())]
        meta = self._build_meta(step)
        self.flushed_for_copies += len(meta.flush_job_ids.intersection(fenced))
        for group in (each.index for each in self.engine.groups if each.kind is GroupKind.SINGLE_STATE):
            self.states_stored += sum(job.source.group_sizes[group] for job in meta.stores)
            self.states_loaded += sum(job.destination.group_sizes[group] for job in meta.loads)
        self.loads_within_steps += sum(load.within_step for load in meta.loads)
        self.final_stores += len(meta.final_stores)
        self.final_stores_flushed += sum(job.job_id in meta.flush_job_ids for job in meta.final_stores)
        return meta

    def arrive(self, stem: int, length: int, new: int, fork: int) -> None:
        """Add a request of a small alphabet, so that prefixes are shared.

        Stems differ at once, and forks in the last token.
        """
        tokens = [stem * 100 + n for n in range(length)]
        if fork:
            tokens[-1] = 1000 + fork
        self.engine.add(f"r{self.count}", tokens, new)
        self.count += 1

    def pending(self) -> list[tuple[int, int]]:
        """(rank, job) of transfers that were started and have not run."""
        return [(rank, job) for rank, each in enumerate(self.engine.handlers) for job in each.pending]

    def live(self) -> list[FakeRequest]:
        return [*self.engine.waiting, *self.engine.running]

    def generating(self) -> list[FakeRequest]:
        return [request for request in self.engine.running if request.num_tokens > request.num_prompt_tokens]

    def stop(self, request: FakeRequest) -> None:
        """End the request by a stop string, without telling the scheduler."""
        self.stopped += 1
        self.engine.abort(request)

    def end_some_jobs(self, chance: random.Random, lag: int, failures: float) -> None:
        """Run each pending transfer with probability 1 / ``lag``, in any order, and let some of them fail."""
        pending = self.pending()
        chance.shuffle(pending)
        for rank, job in pending:
            if chance.random() * lag < 1:
                self.engine.handlers[rank].run(job, chance.random() >= failures)

    def step(self) -> None:
        self.engine.step()
        self.judge()

    def judge(self) -> None:
        """Check all bytes that count as valid, all bookkeeping, and that the events add up to the loadable blocks."""
        self.engine.check()
        self.manager.check_invariants()
        for event in self.engine.connector.take_events():
            for key in event.keys:
                if event.removed:
                    del self.resident[key]
                else:
                    self.resident[key] = None
        for key in self.resident:
            stored = self.engine.connector._epochs.current.engine_keys([key])  # its own inverse
            slot = self.manager.prepare_load(stored, PROBE).block_ids[0]
            self.engine.check_slot(key, int(slot))
            self.manager.complete_load(stored, PROBE)
        if self._orders_prefixes:
            self._judge_eviction_order()

    def _judge_eviction_order(self) -> None:
        """Check that the next victim of a running request is the tail of its remaining blocks, because its head is part
        of all later hits.

        For a window or a state, a hit needs only the last blocks, and touches no others.
        """
        victims = self.manager.slots.policy.next_victims(self.manager.num_blocks)
        assert victims is not None
        order = {key: n for n, key in enumerate(victims)}
        for request in self.engine.running:
            for group in (each for each in self.engine.groups if each.kind is GroupKind.FULL_ATTENTION):
                keys: list[OffloadKey] = []
                group.extend_keys(keys, request.block_hashes, self.engine.connector._epochs.current)
                ages = [order[key] for key in keys if key in order]
                assert ages == sorted(ages, reverse=True), f"{request.request_id}: {ages}"
                self.orders_judged += len(ages) > 1

    def drain(self) -> None:
        """Let all transfers and requests end, and check that nothing is left: no jobs, states, pins or fences."""
        steps = 0
        while not self.engine.idle:
            for rank, job in self.pending():
                self.engine.handlers[rank].run(job)
            self.step()
            steps += 1
            assert steps < 2000, "the engine does not drain"
        assert self.engine.pool.num_free == self.engine.pool.num_gpu_blocks
        stats = self.engine.connector.get_stats()
        assert stats["jobs_in_flight",] == stats["requests_tracked",] == stats["primary_blocks_pinned",] == 0
