# SPDX-License-Identifier: Apache-2.0
"""A small engine without a model, for testing connectors: requests, scheduling, preemption, device prefix cache.

It uses kvoffload only through ``connector/engine.py``, and frees GPU blocks as soon as it may, even while transfers use
them. Its bytes are real, and ``check`` verifies every GPU block that counts as valid. So a connector that confuses
order, ids or groups is caught by the damaged block.

States exist only where a step ends. If a request continues within a block, its state is overwritten in place. Positions
that a step skips have no GPU block. A step that ends at a block's end leaves a state from which other requests can
continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tests.fakes.device import Bytes, DevicePool, page_of
from tests.fakes.manual_handler import ManualHandler, ManualSpec
from tests.fakes.request import FakeRequest, Scheduling, Status

from kvoffload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
)
from kvoffload.config import EngineLayout, GroupKind, OffloadingConfig, RankSlice
from kvoffload.connector import (
    NO_BLOCK,
    BoundaryState,
    EngineStep,
    OffloadingConnectorScheduler,
    OffloadingConnectorWorker,
    ScheduledRequest,
    WorkerReport,
)
from kvoffload.connector.groups import GroupGeometry, geometry_of
from kvoffload.connector.observer import Watch

__all__ = ["FakeEngine", "FakeRequest", "Scheduling", "Status", "slices_of"]

WorkerFactory = Callable[[int, Bytes], OffloadingConnectorWorker]
"""(rank, its device memory as (GPU blocks, page bytes)) -> its worker, with the memory registered."""


class FakeEngine:
    """Call ``add``, ``abort`` and ``step`` in any order, and ``check`` after each.

    One request computes at most ``chunk_tokens`` in a step. By default every rank has a ``ManualHandler``
    (``handlers[rank]``), whose transfers end when the test runs them; ``make_worker`` makes workers with real ones.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        layout: EngineLayout,
        config: OffloadingConfig,
        *,
        num_gpu_blocks: int,
        num_slots: int,
        chunk_tokens: int = 16,
        max_running: int = 4,
        scheduling: Scheduling = Scheduling.SYNCHRONOUS,
        keeps_all_states: bool = True,
        make_worker: WorkerFactory | None = None,
        watch: Watch | None = None,
    ) -> None:
        """``keeps_all_states``: each state at a block's end is kept, not only the last one of the prompt."""
        self.manager = manager
        self.layout = layout
        self.groups: tuple[GroupGeometry, ...] = geometry_of(layout, config)
        self.connector = OffloadingConnectorScheduler(manager, layout, config, watch=watch)
        self.pool = DevicePool(num_gpu_blocks)
        self.pages = [self._new_pages(num_gpu_blocks) for _ in range(layout.num_ranks)]
        self._factor = layout.block_size_factor(config)
        self.slices = slices_of(layout)
        slice_bytes = layout.slice_bytes(self._factor)
        self.slots = [np.zeros((num_slots, slice_bytes), dtype=np.uint8) for _ in range(layout.slice.num_slices)]
        self.handlers: list[ManualHandler] = []
        self.workers = [(make_worker or self._manual_worker)(rank, pages) for rank, pages in enumerate(self.pages)]
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.finished: list[FakeRequest] = []
        self.computed_total = 0
        """Tokens computed since the start, including those computed again."""
        self.num_preempted = 0
        self.num_undone = 0
        """Requests whose load within a step failed."""
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._scheduling = scheduling
        self._keeps_all_states = keeps_all_states
        # With asynchronous scheduling: the last step's tokens, which the scheduler receives after its next step.
        self._undelivered: list[FakeRequest] = []
        # Preempted between two steps, as an engine does that resets its prefix cache.
        self._preempted: set[str] = set()
        self._moves_cached = False
        self._prefixes: dict[bytes, tuple[FakeRequest, int]] = {}

    def _new_pages(self, num_gpu_blocks: int) -> Bytes:
        return np.zeros((num_gpu_blocks, max(group.page_bytes for group in self.layout.groups)), dtype=np.uint8)

    def _manual_worker(self, rank: int, pages: Bytes) -> OffloadingConnectorWorker:
        widths = tuple(group.page_bytes for group in self.layout.groups)
        part = self.slices[rank]
        self.handlers.append(ManualHandler(pages, self.slots[part.index], widths, self._factor, part))
        worker = OffloadingConnectorWorker(rank)
        worker.register_kv_caches(ManualSpec(self.manager, self.handlers[-1]), CanonicalKVCaches())
        return worker

    # ------------------------------------------------------------------------------------------ requests

    def add(self, request_id: str, tokens: Sequence[int], max_new_tokens: int) -> FakeRequest:
        request = FakeRequest(request_id, list(tokens), max_new_tokens, self.layout.hash_block_tokens)
        most = request.num_tokens + max_new_tokens
        needed = sum(-(-most // group.gpu_block_tokens) for group in self.groups)
        assert needed <= self.pool.num_gpu_blocks, f"{request_id} may need {needed} GPU blocks, more than there are"
        self.connector.on_new_request(request)
        self.waiting.append(request)
        return request

    def abort(self, request: FakeRequest) -> None:
        """Ends a request at any stage. Its GPU blocks are free at once."""
        if request.status is not Status.FINISHED:
            self._finish(request)

    def preempt_all(self) -> None:
        """Between two steps: running requests lose their GPU blocks, and the device its prefix cache. The next step may
        admit them again. So vLLM does when it resets its prefix cache together with running requests."""
        for request in reversed(self.running):
            self._preempt(request)
            self._preempted.add(request.request_id)
        self.pool.forget_all()

    def move_cached(self) -> None:
        """The next step copies a cached GPU block to a free one, which then stands for it. No block table names the
        copy. So vLLM does to keep a state that a request is about to write over."""
        self._moves_cached = True

    def _finish(self, request: FakeRequest) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.connector.request_finished(request)
        self._free_blocks(request)
        request.status = Status.FINISHED
        self.finished.append(request)

    def _free_blocks(self, request: FakeRequest) -> None:
        for table in request.tables:
            for block_id in reversed(table):
                if block_id != NO_BLOCK:
                    self.pool.give_back(block_id)
        request.tables = []

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.connector.has_pending_work())

    # ---------------------------------------------------------------------------------------------- step

    def step(self) -> None:
        """Make one engine step, in the order of real engines: schedule, send to the workers, compute, collect."""
        undelivered, self._undelivered = self._undelivered, []
        preempted: set[str] = set()
        scheduled = self._schedule_running(preempted)
        if not preempted:
            scheduled += self._schedule_waiting()
        preempted |= self._preempted
        self._preempted = set()
        self.num_preempted += len(preempted)
        records = tuple(record for _, record in scheduled)
        states = tuple(state for request, record in scheduled for state in self._states_to_store(request, record))
        copy = self.pool.move_cached() if self._moves_cached else None
        self._moves_cached = False
        copied = [] if copy is None else [copy[1]]
        meta = self.connector.build_connector_meta(EngineStep(records, frozenset(preempted), states, copied))
        for worker in self.workers:
            worker.start_step(meta)
        if any(load.within_step for load in meta.loads):
            self._undo_failed()
            scheduled = [each for each in scheduled if each[0].status is Status.RUNNING]
        if copy is not None:
            for pages in self.pages:
                pages[copy[1]] = pages[copy[0]]
        for request, record in scheduled:
            self._compute(request, record.num_computed_tokens, record.num_scheduled_tokens)
        for worker in self.workers:
            worker.end_step()
        for request, record in scheduled:
            self._advance(request, record.num_scheduled_tokens)
        for request in undelivered:
            self._deliver(request)
        self._collect()

    def _undo_failed(self) -> None:
        """Requests whose load within this step failed are preempted before anything is computed."""
        outcome = self._collect(within_step=True)
        for request in [each for each in self.running if each.request_id in outcome]:
            self._preempt(request)
            self._preempted.add(request.request_id)
            self.num_undone += 1

    def _schedule_running(self, preempted: set[str]) -> list[tuple[FakeRequest, ScheduledRequest]]:
        scheduled: list[tuple[FakeRequest, ScheduledRequest]] = []
        for request in tuple(self.running):
            if request not in self.running:
                continue  # preempted in favour of an earlier one
            n = min(self._chunk_tokens, len(request.tokens) - request.computed_tokens)
            if n == 0 or (request.is_complete and self._scheduling is Scheduling.ASYNCHRONOUS):
                continue  # its last token is on its way
            while (new := self._grow(request, request.computed_tokens + n)) is None:
                if self._reclaim_from_waiting():
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                preempted.add(victim.request_id)
                scheduled = [each for each in scheduled if each[0] is not victim]
                if victim is request:
                    break
            if new is not None:
                scheduled.append((request, self._record(request, new, n)))
        return scheduled

    def _reclaim_from_waiting(self) -> bool:
        """Frees the blocks of a request that still waits after its load, since it could starve the running ones."""
        for request in reversed(self.waiting):
            if request.has_blocks and request.status is Status.WAITING:
                self._free_blocks(request)
                request.computed_tokens = 0
                return True
        return False

    def _preempt(self, victim: FakeRequest) -> None:
        self.running = [each for each in self.running if each is not victim]
        self._free_blocks(victim)
        victim.status, victim.computed_tokens, victim.table_is_new = Status.WAITING, 0, True
        self.waiting.insert(0, victim)

    def _schedule_waiting(self) -> list[tuple[FakeRequest, ScheduledRequest]]:
        scheduled: list[tuple[FakeRequest, ScheduledRequest]] = []
        pool_is_short = False
        for request in tuple(self.waiting):
            if request.status is Status.LOADING or len(self.running) >= self._max_running:
                continue
            # A request that cannot be admitted delays those after it, but none that has loaded blocks already.
            if pool_is_short and not request.has_blocks:
                continue
            external, waits = 0, False
            if not request.has_blocks:
                hit, tables = self._device_hit(request)
                answer, is_async = self.connector.get_num_new_matched_tokens(request, hit)
                if answer is None:
                    continue
                assert not is_async or answer > 0
                external, waits = answer, is_async
                request.tables, request.computed_tokens = tables, hit
                for block_id in (each for table in tables for each in table if each != NO_BLOCK):
                    self.pool.share(block_id)
            left = request.num_tokens - request.computed_tokens - external
            assert left > 0, "a hit must leave a token to compute"
            n = 0 if waits else min(self._chunk_tokens, left)
            until = request.computed_tokens + external + n
            # The windows move to the end of the load before anything is computed, so they end there.
            new = self._grow(request, until, keep_from=request.computed_tokens + external)
            if new is None:
                # Loaded blocks are also freed: if requests kept blocks while they wait for more, all could wait.
                self._free_blocks(request)
                request.computed_tokens = 0
                pool_is_short = True
                continue
            self.connector.update_state_after_alloc(request, self._tables(request), external)
            request.table_is_new = True
            if waits:
                request.status = Status.LOADING
                request.valid_tokens = request.computed_tokens
                request.computed_tokens += external
                continue
            request.computed_tokens += external
            self.waiting.remove(request)
            self.running.append(request)
            request.status = Status.RUNNING
            scheduled.append((request, self._record(request, new, n)))
        return scheduled

    def _record(self, request: FakeRequest, new: list[list[int]], n: int) -> ScheduledRequest:
        is_new, request.table_is_new = request.table_is_new, False
        blocks = self._tables(request) if is_new else tuple(tuple(ids) for ids in new)
        return ScheduledRequest(request.request_id, blocks, request.computed_tokens, n, is_new)

    def _states_to_store(self, request: FakeRequest, record: ScheduledRequest) -> list[BoundaryState]:
        """Return the states at block ends whose tokens the scheduler already knows.

        That is this step's state, and with asynchronous scheduling the previous step's state, which is not overwritten
        yet.
        """
        states = []
        done_tokens = min(record.done_tokens, request.num_tokens)
        for group, table in zip(self.groups, request.tables, strict=True):
            block = done_tokens // group.gpu_block_tokens - 1
            end = (block + 1) * group.gpu_block_tokens
            if group.kind is not GroupKind.SINGLE_STATE or block < 0 or table[block] == NO_BLOCK:
                continue
            if end in (record.num_computed_tokens, record.done_tokens) and self._keeps_state(request, group, end):
                states.append(BoundaryState(request.request_id, group.index, table[block], end))
        return states

    def _keeps_state(self, request: FakeRequest, group: GroupGeometry, num_tokens: int) -> bool:
        last = (request.num_prompt_tokens - 1) // group.gpu_block_tokens * group.gpu_block_tokens
        return self._keeps_all_states or num_tokens == last

    def _tables(self, request: FakeRequest) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(table) for table in request.tables)

    def _device_hit(self, request: FakeRequest) -> tuple[int, list[list[int]]]:
        """Return the longest prefix in the device's cache as (tokens, tables), by trying all."""
        unit = int(np.lcm.reduce([group.gpu_block_tokens for group in self.groups]))
        for hit in range((request.num_tokens - 1) // unit * unit, 0, -unit):
            tables = [self._cached_table(request, group, hit) for group in self.groups]
            if None not in tables:
                return hit, [table for table in tables if table is not None]
        return 0, [[] for _ in self.groups]

    def _cached_table(self, request: FakeRequest, group: GroupGeometry, hit: int) -> list[int] | None:
        size = group.gpu_block_tokens
        table: list[int] = []
        for n in range(hit // size):
            if (n + 1) * size <= group.first_needed_token(hit):
                table.append(NO_BLOCK)
                continue
            block_id = self.pool.cached.get((request.prefix_hash((n + 1) * size), group.index))
            if block_id is None:
                return None
            table.append(block_id)
        return table

    def _grow(self, request: FakeRequest, until: int, keep_from: int | None = None) -> list[list[int]] | None:
        """Free blocks that left the windows, then allocate GPU blocks up to ``until`` tokens, and return the new ones
        by group.

        Returns ``None``, and allocates nothing, if the pool has too few. ``keep_from`` is the number of tokens at which
        the windows end.
        """
        at = request.computed_tokens if keep_from is None else keep_from
        wanted: list[list[bool]] = []
        for group, table in zip(self.groups, request.tables, strict=True):
            size = group.gpu_block_tokens
            for n, block_id in enumerate(table):
                if block_id != NO_BLOCK and (n + 1) * size <= group.first_needed_token(at):
                    self.pool.give_back(block_id)
                    table[n] = NO_BLOCK
            positions = range(len(table), -(-until // size))
            if group.kind is GroupKind.SINGLE_STATE:
                wanted.append([n == positions.stop - 1 for n in positions])
            else:
                wanted.append([(n + 1) * size > group.first_needed_token(at) for n in positions])
        ids = self.pool.take(sum(map(sum, wanted)))
        if ids is None:
            return None
        fresh = iter(ids)
        new = [[next(fresh) if real else NO_BLOCK for real in positions] for positions in wanted]
        for table, added in zip(request.tables, new, strict=True):
            table.extend(added)
        return new

    # ------------------------------------------------------------------------------------------- compute

    def _compute(self, request: FakeRequest, start: int, n: int) -> None:
        self._check_context(request, start)
        self.computed_total += n
        for group, table in zip(self.groups, request.tables, strict=True):
            size = group.gpu_block_tokens
            first, stop = start // size, -(-(start + n) // size)
            for position in range(stop - 1 if group.kind is GroupKind.SINGLE_STATE else first, stop):
                content = request.prefix_hash(min((position + 1) * size, start + n))
                for part, pages in zip(self.slices, self.pages, strict=True):
                    width = self.layout.groups[group.index].page_bytes
                    pages[table[position], :width] = page_of(content, group.index, part.index, width)

    def _advance(self, request: FakeRequest, n: int) -> None:
        request.computed_tokens += n
        self._name_blocks(request)
        if request.computed_tokens < len(request.tokens):
            return
        if self._scheduling is not Scheduling.SYNCHRONOUS:
            self._generate_ahead(request)
            return
        if request.num_tokens - request.num_prompt_tokens >= request.max_new_tokens:
            self._finish(request)
            return
        request.tokens.append(sum(request.tokens) % 7)
        request.extend_hashes()

    def _generate_ahead(self, request: FakeRequest) -> None:
        """Generate the next token on the device, before the scheduler receives it."""
        if request.is_complete:
            return  # the step too many
        if len(request.tokens) - request.num_prompt_tokens < request.max_new_tokens:
            request.tokens.append(sum(request.tokens) % 7)
            request.num_hidden += 1
            request.extend_hashes()
        request.is_complete = len(request.tokens) - request.num_prompt_tokens >= request.max_new_tokens
        self._undelivered.append(request)

    def _deliver(self, request: FakeRequest) -> None:
        """Let the scheduler receive a step's tokens, even if the request was preempted or has ended since."""
        if request.status is Status.FINISHED:
            return
        request.num_hidden = max(request.num_hidden - 1, 0)
        if request.is_complete and request.num_hidden == 0:
            self._finish(request)

    def _name_blocks(self, request: FakeRequest) -> None:
        """Adds full GPU blocks to the device's prefix cache."""
        for group, table in zip(self.groups, request.tables, strict=True):
            size = group.gpu_block_tokens
            full = range(min(request.computed_tokens // size, len(table)))
            if group.kind is GroupKind.SINGLE_STATE:
                is_kept = request.computed_tokens % size == 0 and self._keeps_state(request, group, full.stop * size)
                full = full[-1:] if is_kept else range(0)
            for n in full:
                prefix_hash = request.prefix_hash((n + 1) * size)
                self._prefixes.setdefault(prefix_hash, (request, (n + 1) * size))
                if table[n] != NO_BLOCK:
                    self.pool.name(table[n], prefix_hash, group.index)

    def _collect(self, within_step: bool = False) -> set[str]:
        """``within_step``: before the step is computed. Returns the requests whose load within it failed."""
        report = WorkerReport.merge(worker.get_report() for worker in self.workers)
        assert within_step or not report.undefined_loads
        outcome = self.connector.update_connector_output(report)
        undone = {each.request_id for each in self.running} & outcome.failed_loads.keys()
        by_id = {request.request_id: request for request in self.waiting}
        for request_id in outcome.loaded_request_ids:
            request = by_id[request_id]
            assert request.status is Status.LOADING
            request.status = Status.WAITING
            self._name_blocks(request)
        for request_id, invalid in outcome.failed_loads.items():
            if request_id in undone:
                continue
            request = by_id[request_id]
            assert request.status is Status.LOADING
            request.status, request.computed_tokens = Status.WAITING, request.valid_tokens
            lost = {
                block_id
                for group, table in zip(self.groups, request.tables, strict=True)
                for block_id in table[request.valid_tokens // group.gpu_block_tokens :]
            }
            assert lost - {NO_BLOCK} <= invalid, "a GPU block that was not loaded counts as valid"
            if all(group.kind is GroupKind.FULL_ATTENTION for group in self.groups):
                self._keep_blocks(request, request.valid_tokens)
            else:  # the windows moved to the end of the hit
                self._free_blocks(request)
                request.computed_tokens = 0
        return undone

    def _keep_blocks(self, request: FakeRequest, num_tokens: int) -> None:
        for group, table in zip(self.groups, request.tables, strict=True):
            for block_id in reversed(table[num_tokens // group.gpu_block_tokens :]):
                self.pool.give_back(block_id)
            del table[num_tokens // group.gpu_block_tokens :]

    # --------------------------------------------------------------------------------------------- check

    def _check_context(self, request: FakeRequest, num_tokens: int) -> None:
        """Verifies every GPU block that computing after ``num_tokens`` reads."""
        for group, table in zip(self.groups, request.tables, strict=True):
            size = group.gpu_block_tokens
            for n in range(group.first_needed_token(num_tokens) // size, -(-num_tokens // size)):
                content = request.prefix_hash(min((n + 1) * size, num_tokens))
                self._check_page(table[n], content, group.index, f"{request.request_id} block {n}")

    def _check_page(self, block_id: int, prefix_hash: bytes, group: int, what: str) -> None:
        assert block_id != NO_BLOCK, f"group {group}: {what} has no GPU block"
        width = self.layout.groups[group].page_bytes
        for rank, pages in enumerate(self.pages):
            page = page_of(prefix_hash, group, self.slices[rank].index, width)
            right = pages[block_id, :width].tobytes() == page.tobytes()  # of few bytes, quicker than numpy compares
            assert right, f"wrong bytes: group {group}, rank {rank}, GPU block {block_id}, {what}"

    def check(self) -> None:
        """Verifies all GPU blocks that count as valid, and the invariants of pool and connector."""
        self.pool.check_invariants()
        self.connector.check_invariants()
        for (prefix_hash, group), block_id in self.pool.cached.items():
            self._check_page(block_id, prefix_hash, group, "in the prefix cache")
        for request in self.running:
            self._check_context(request, request.computed_tokens)

    def check_slot(self, key: OffloadKey, slot: int) -> None:
        """Verifies the slot of a ready block, all slices, as far as a hit may read it."""
        group = self.groups[get_offload_group_idx(key)]
        request, end = self._prefixes[get_offload_block_hash(key)]
        block = end // group.block_tokens - 1
        width = self.layout.groups[group.index].page_bytes
        for position in range(group.first_gpu_block(block), (block + 1) * group.factor):
            content = request.prefix_hash((position + 1) * group.gpu_block_tokens)
            within = position % self._factor
            for index, slots in enumerate(self.slots):
                found = slots[slot, within * width : (within + 1) * width]
                assert found.tobytes() == page_of(content, group.index, index, width).tobytes(), (
                    f"wrong bytes in slot {slot}, slice {index}: group {group.index}, block {block}, GPU block "
                    f"{position}"
                )


def slices_of(layout: EngineLayout) -> list[RankSlice]:
    """By rank. Replicas have consecutive ranks."""
    num_slices, num_replicas = layout.slice.num_slices, layout.slice.num_replicas
    return [
        RankSlice(rank // num_replicas, num_slices, rank % num_replicas, num_replicas)
        for rank in range(layout.num_ranks)
    ]
