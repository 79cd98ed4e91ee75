# SPDX-License-Identifier: Apache-2.0
"""A scheduler side over a real primary-tier manager, driven by hand: one small request type and short step calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvoffload.base import (
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
    make_offload_key,
)
from kvoffload.config import DEFAULTS, EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.connector.engine import NO_BLOCK, BlockIds, BoundaryState, EngineStep, ScheduledRequest
from kvoffload.connector.messages import ConnectorMeta, LoadOutcome, TransferJob, WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.cpu.manager import CPUOffloadingManager

BT = 4
"""Tokens per GPU block (and per hash) of the usual layout."""

FULL = KVGroupLayout(GroupKind.FULL_ATTENTION, BT, 64)
SLIDING = KVGroupLayout(GroupKind.SLIDING_WINDOW, BT, 64, sliding_window_tokens=6)
STATE = KVGroupLayout(GroupKind.SINGLE_STATE, BT, 64)


@dataclass
class Request:
    """A request in an engine's form. Its block hashes replace tokens."""

    request_id: str
    num_tokens: int
    stem: str = "p"
    num_prompt_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    hash_tokens: int = BT

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or self.num_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        return [block_hash(self.stem, n) for n in range(self.num_tokens // self.hash_tokens)]


def block_hash(stem: str, n: int) -> bytes:
    return f"{stem}/{n}".encode()


def key(n: int, group: int = 0, stem: str = "p") -> OffloadKey:
    return make_offload_key(block_hash(stem, n), group)


class SpyManager(CPUOffloadingManager):
    """The real manager, which also records the calls whose order the tests check."""

    def __init__(
        self,
        num_blocks: int,
        policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL,
        eviction_policy: str = DEFAULTS.eviction_policy,
    ) -> None:
        super().__init__(num_blocks, eviction_policy, enable_events=True)
        self.policy = policy
        self.calls: list[tuple[str, str]] = []
        self.touched: list[list[OffloadKey]] = []
        self.offered: list[list[OffloadKey]] = []
        self.schedule_ends = 0

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.calls.append(("on_new_request", req_context.req_id))
        super().on_new_request(req_context)
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.calls.append(("on_request_finished", req_context.req_id))
        super().on_request_finished(req_context)

    def touch(self, keys: Any, req_context: ReqContext | None = None) -> None:
        self.touched.append(list(keys))
        super().touch(keys, req_context)

    def prepare_store(self, keys: Any, req_context: ReqContext) -> Any:
        self.calls.append(("prepare_store", req_context.req_id))
        self.offered.append(list(keys))
        return super().prepare_store(keys, req_context)

    def prepare_load(self, keys: Any, req_context: ReqContext) -> Any:
        self.calls.append(("prepare_load", req_context.req_id))
        return super().prepare_load(keys, req_context)

    def on_schedule_end(self) -> None:
        self.schedule_ends += 1
        super().on_schedule_end()


@dataclass
class Rig:
    """``rig.step(...)`` is one engine step. Jobs end when the test calls ``end``."""

    groups: tuple[KVGroupLayout, ...] = (FULL,)
    num_blocks: int = 64
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
    eviction_policy: str = DEFAULTS.eviction_policy
    num_ranks: int = 1
    block_size: int | None = None
    prompt_only: bool = False
    record_trace: str | None = None
    reset_tiers: bool = True
    left_out: frozenset[str] = frozenset()
    """Requests whose hashes are wrong."""
    running: dict[str, int] = field(default_factory=dict)
    weights_name: Callable[[], str | None] = str

    def __post_init__(self) -> None:
        self.layout = EngineLayout(self.groups, BT, "rig", num_ranks=self.num_ranks)
        slot_bytes = self.layout.block_bytes((self.block_size or BT) // BT)
        config = OffloadingConfig(
            cpu_bytes_to_use=self.num_blocks * slot_bytes,
            block_size=self.block_size,
            offload_prompt_only=self.prompt_only,
            record_trace=self.record_trace,
            reset_tiers=self.reset_tiers,
        )
        self.manager = SpyManager(self.num_blocks, self.policy, self.eviction_policy)
        self.scheduler = OffloadingConnectorScheduler(
            self.manager,
            self.layout,
            config,
            leaves_out=lambda request: request.request_id in self.left_out,
            weights_name=self.weights_name,
        )

    # one engine call each, then everything is checked

    def arrive(self, request: Request) -> Request:
        self.scheduler.on_new_request(request)
        return request

    def ask(self, request: Request, computed: int = 0) -> tuple[int | None, bool]:
        answer = self.scheduler.get_num_new_matched_tokens(request, computed)
        self.check()
        return answer

    def alloc(self, request: Request, *ids: Iterable[int], external: int = 0) -> None:
        self.scheduler.update_state_after_alloc(request, self.blocks(*ids), external)
        self.check()

    def step(
        self,
        *scheduled: ScheduledRequest,
        preempted: Iterable[str] = (),
        states: Iterable[BoundaryState] | None = None,
        copied: Iterable[int] = (),
    ) -> ConnectorMeta:
        """``states``: by default the last one at a block's end of each request whose table is new."""
        named = [state for each in scheduled for state in self.last_states(each)] if states is None else states
        step = EngineStep(tuple(scheduled), frozenset(preempted), tuple(named), tuple(copied))
        meta = self.scheduler.build_connector_meta(step)
        self.check()
        return meta

    def end(self, *jobs: TransferJob, success: bool = True, ranks: Iterable[int] | None = None) -> LoadOutcome:
        which = range(self.num_ranks) if ranks is None else ranks
        results = tuple((rank, TransferResult(job.job_id, success, 10, 0.5)) for job in jobs for rank in which)
        outcome = self.scheduler.update_connector_output(WorkerReport(results))
        self.check()
        return outcome

    def finish(self, request: Request) -> None:
        self.scheduler.request_finished(request)
        self.check()

    # shorthands

    def last_states(self, scheduled: ScheduledRequest) -> list[BoundaryState]:
        blocks = scheduled.done_tokens // BT
        return [
            BoundaryState(scheduled.request_id, index, table[blocks - 1], blocks * BT)
            for index, (group, table) in enumerate(zip(self.groups, scheduled.new_block_ids, strict=False))
            if group.kind is GroupKind.SINGLE_STATE and 0 < blocks <= len(table) and table[blocks - 1] != NO_BLOCK
        ]

    def blocks(self, *ids: Iterable[int]) -> BlockIds:
        return tuple(list(each) for each in ids) if ids else tuple([] for _ in self.groups)

    def run(
        self, request: Request, *ids: Iterable[int], computed: int = 0, tokens: int | None = None, new: bool = True
    ):
        """Return a ``ScheduledRequest`` that computes up to ``tokens`` (default: all tokens)."""
        tokens = request.num_tokens if tokens is None else tokens
        return ScheduledRequest(request.request_id, self.blocks(*ids), computed, tokens - computed, new)

    def admit(self, request: Request, *ids: Iterable[int], computed: int = 0) -> ConnectorMeta:
        """Arrival, a miss and the whole prefill in one step."""
        self.arrive(request)
        assert self.ask(request, computed) == (0, False)
        self.alloc(request, *ids)
        return self.step(self.run(request, *ids, computed=computed))

    def store_prefix(self, tokens: int, stem: str = "p", first_gpu_block: int = 100) -> None:
        """Store a prefix in host memory, through a request that computes it and finishes."""
        request = Request(f"seed-{stem}", tokens, stem)
        tables = [range(first_gpu_block, first_gpu_block + tokens // g.block_tokens) for g in self.groups]
        meta = self.admit(request, *tables)
        self.end(*meta.stores)
        self.finish(request)
        self.manager.calls.clear()
        self.manager.offered.clear()
        self.manager.touched.clear()

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.manager.check_invariants()

    def assert_drained(self) -> None:
        stats = self.scheduler.get_stats()
        assert stats["jobs_in_flight",] == stats["requests_tracked",] == stats["primary_blocks_pinned",] == 0
        assert not self.scheduler.has_pending_work()
