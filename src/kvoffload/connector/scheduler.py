# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler side: turns an engine's steps into loads, stores and flushes. Scheduler thread only."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable

from kvoffload.base import (
    Direction,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    StepWork,
)
from kvoffload.config import EngineLayout, GroupKind, OffloadingConfig
from kvoffload.connector.engine import (
    NO_BLOCK,
    BlockIds,
    BoundaryState,
    EngineRequest,
    EngineStep,
    ScheduledRequest,
)
from kvoffload.connector.epochs import Epoch, Epochs
from kvoffload.connector.groups import AskBlocks, GroupGeometry, find_hit, geometry_of, hit_unit_tokens, possible_hit
from kvoffload.connector.jobs import EndedJobs, JobRecord, JobTable
from kvoffload.connector.limits import RequestLimits
from kvoffload.connector.messages import ConnectorMeta, LoadOutcome, TransferJob, WorkerReport
from kvoffload.connector.offers import StoreOffers
from kvoffload.connector.recording import RequestRecording
from kvoffload.connector.requests import GroupState, RequestOffloadState
from kvoffload.errors import TransferError
from kvoffload.logs import RateLimitedLog
from kvoffload.metrics import HOST, Histogram, Sample, Stats, add_stats

__all__ = ["OffloadingConnectorScheduler"]

logger = logging.getLogger(__name__)

_NOTHING = ConnectorMeta()
_NO_LOADS = LoadOutcome()
_STORE = Direction.STORE


class OffloadingConnectorScheduler:
    """Decides for each request what to look up, load and offer for store. Tracks jobs, fences and metrics.

    ``connector/engine.py`` has the call sequence. The engine never delays freeing GPU blocks: jobs that still use them
    are fenced, and flushed when the blocks are allocated again. ``manager`` is expected not to raise; adapters wrap it
    in ``connector.guard.GuardedManager``, where exceptions become misses. ``clock`` gives seconds and never goes back.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        layout: EngineLayout,
        config: OffloadingConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._geometry: tuple[GroupGeometry, ...] = geometry_of(layout, config)
        self._is_hybrid = any(group.kind is not GroupKind.FULL_ATTENTION for group in self._geometry)
        self._unit_tokens = hit_unit_tokens(self._geometry)
        self._requests: dict[str, RequestOffloadState] = {}
        self._jobs = JobTable(layout.num_ranks)
        num_blocks = config.cpu_bytes // layout.block_bytes(layout.block_size_factor(config))
        self._offers = StoreOffers(manager, self._geometry, self._jobs, config.offload_prompt_only, num_blocks)
        self._recording: RequestRecording | None = None
        if config.record_trace:
            self._recording = RequestRecording(config.record_trace, manager, self._geometry, layout, config, clock)
        self._log = RateLimitedLog(logger)
        self._epochs = Epochs(config)
        self._events: list[OffloadingEvent] = []
        """Those of before the last reset, which nobody has taken."""
        # Decided since the last build_connector_meta, and sent with the next one.
        self._loads: list[TransferJob] = []
        self._lost_loads: list[TransferJob] = []
        self._final_stores: list[TransferJob] = []
        self._flushes: set[int] = set()
        # Keys that are being loaded to the device, with the job that loads them: the first, if several load the key.
        self._loading: dict[OffloadKey, int] = {}
        self._counts: dict[Sample, float] = {}
        self._num_waiting = 0
        """Requests whose last lookup has no answer yet."""
        self._lookup_waits = Histogram("lookup_wait_seconds")
        self._loads_ended = EndedJobs(Direction.LOAD, self._geometry, layout.num_ranks)
        self._stores_ended = EndedJobs(Direction.STORE, self._geometry, layout.num_ranks)

    def __repr__(self) -> str:
        return f"OffloadingConnectorScheduler({len(self._requests)} requests, {self._jobs})"

    # --------------------------------------------------------------------------------------------- requests

    def on_new_request(self, request: EngineRequest) -> None:
        """The request arrived. A second call for the same object does nothing, and the engine may even omit the
        call."""
        self._state_of(request)

    def _state_of(self, request: EngineRequest) -> RequestOffloadState:
        state = self._requests.get(request.request_id)
        if state is not None and state.request is request:
            return state
        if state is not None:  # the engine uses the id again, without request_finished
            self._finish(state)
        params = request.kv_transfer_params
        limits, problems = RequestLimits.parse(params)
        if problems:
            self._log.warning(" ".join(problems))
        reads_cache = not getattr(request, "skip_reading_prefix_cache", False)
        context = ReqContext(request.request_id, params if isinstance(params, dict) else None, reads_cache)
        policy = self._manager.on_new_request(context).policy
        groups = tuple(GroupState() for _ in self._geometry)
        state = RequestOffloadState(request, context, policy, groups, limits, self._epochs.current)
        self._requests[request.request_id] = state
        if self._recording is not None:
            self._recording.arrived(state)
        return state

    def request_finished(self, request: EngineRequest) -> None:
        """The request ended, at any stage. The engine may free its GPU blocks at once. Ignores unknown requests.

        Blocks that could not be stored yet are offered a last time. The next step's meta has the stores.
        """
        state = self._requests.get(request.request_id)
        if state is not None:
            self._offer_last_time(state)
            self._finish(state)

    def _finish(self, state: RequestOffloadState) -> None:
        del self._requests[state.context.req_id]
        state.finished = True
        if state.deferred_since_s is not None:
            self._num_waiting -= 1
        if self._recording is not None:
            self._recording.finished(state, self._offers.max_tokens(state), state in self._offers.refused)
        self._offers.forget(state)
        self._cancel_load(state)
        if any(group.gpu_block_ids for group in state.groups) and (keys := state.keys_in_use()):
            # The head must outlive the tail, but portions were stored head first, so that the tail is the most recent.
            self._manager.touch(keys, state.context)
        self._manager.on_request_finished(state.context)

    def _offer_last_time(self, state: RequestOffloadState) -> None:
        """Offers what is left of an ended request, while its GPU blocks still have their content.

        With asynchronous scheduling that is its last full block: the step that fills it is scheduled before its last
        token is known, and when that token arrives, the request ends.
        """
        if state.load_job_id is None:
            stores = self._offers.offer_rest(state)
            self._final_stores += stores
            for transfer in stores:
                self._jobs.in_flight[transfer.job_id].submitted = True

    def _cancel_load(self, state: RequestOffloadState) -> None:
        """Ends a load that was not sent to the workers yet. One that runs is left to end; its GPU blocks are fenced."""
        own = [self._jobs.in_flight[job_id] for job_id in sorted(state.job_ids)]
        for job in [job for job in own if not job.submitted]:
            self._loads = [load for load in self._loads if load.job_id != job.job_id]
            self._lost_loads = [load for load in self._lost_loads if load.job_id != job.job_id]
            self._jobs.remove(job)
            self._end_load(job)

    # ------------------------------------------------------------------------------------------------- hits

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The number of tokens beyond ``num_computed_tokens`` that can be loaded.

        ``(None, False)``: ask again in a later step. ``(n > 0, True)``: n tokens, by an asynchronous load that starts
        after ``update_state_after_alloc``. ``(0, False)``: none. The last token is never part of a hit, since the
        engine must compute something.
        """
        state = self._state_of(request)
        # A preempted request too: the engine reports that only with the step.
        self._enter(state, self._epochs.use())
        if not state.context.reads_cache:
            state.computed_tokens = num_computed_tokens
            state.asked = True
            return 0, False
        hit: int | None = None
        waits_for = "own transfers"
        # A request may have one load or several stores in flight, never both. So one that was preempted waits for its
        # old transfers.
        if not state.job_ids:
            hit = self._find_hit(state, num_computed_tokens)
            waits_for = "tiers" if state.awaited_job_id not in self._jobs.in_flight else "another load"
        if hit is None:
            if self._recording is not None:
                self._recording.deferred(state, waits_for)
            self._count(("lookups_deferred",))
            if state.deferred_since_s is None:
                state.deferred_since_s = self._clock()
                self._num_waiting += 1
            return None, False
        self._record_wait(state)
        state.computed_tokens = num_computed_tokens
        state.asked = True
        return hit - num_computed_tokens, hit > num_computed_tokens

    def _enter(self, state: RequestOffloadState, epoch: Epoch) -> None:
        """The request is to be admitted, and reads and stores blocks of ``epoch`` from now on."""
        if state.epoch is not epoch:
            self._offers.forget(state)
            state.enter(epoch)

    def _record_wait(self, state: RequestOffloadState) -> None:
        """The lookup has an answer."""
        state.possible_hit = state.hit_ends = None
        if state.deferred_since_s is not None:
            state.lookup_wait_s += self._clock() - state.deferred_since_s
            state.deferred_since_s = None
            self._num_waiting -= 1
        if self._recording is not None:
            self._recording.answered(state)

    def _find_hit(self, state: RequestOffloadState, computed_tokens: int) -> int | None:
        """The longest hit, or ``None`` while a lookup has no answer. Lookups promote what they find. So where a hit
        needs windows or states too, no attention is looked up behind the last of them that is anywhere. Whoever
        promotes only a part of it learns where that part may end.

        A request whose load failed gets no other. vLLM would count what it still needs as reserved for it, also against
        the next load, and wait for ever if the two do not fit.
        """
        if state.load_failed:
            return computed_tokens
        state.extend_keys(self._geometry)
        most = min(state.request.num_tokens - 1, computed_tokens + self._max_load_tokens(state))
        keys = [group.keys for group in state.groups]
        if self._is_hybrid:
            if state.possible_hit is None:
                peek: AskBlocks = functools.partial(self._manager.peek, req_context=state.context)
                state.possible_hit, state.hit_ends = possible_hit(
                    self._geometry, keys, peek, self._manager.holds, computed_tokens, most
                )
            most = most if state.possible_hit is None else min(most, state.possible_hit)
        ask: AskBlocks = functools.partial(self._manager.lookup_prefix, req_context=state.context)
        if state.hit_ends is not None:  # a manager of others may not know it
            ask = functools.partial(self._manager.lookup_prefix, req_context=state.context, ends=state.hit_ends)
        hit = find_hit(self._geometry, keys, ask, computed_tokens, most)
        if hit is not None and hit > computed_tokens and self._should_await_load(state, computed_tokens, hit):
            return None
        return hit

    def _max_load_tokens(self, state: RequestOffloadState) -> int:
        most = state.limits.max_load_tokens
        return state.request.num_tokens if most is None else most

    def _should_await_load(self, state: RequestOffloadState, computed_tokens: int, hit_tokens: int) -> bool:
        """Whether another request is loading at least half of these blocks already.

        When that load has ended, the engine's own prefix cache holds them. A request waits for one such load at most,
        so that requests with a shared prefix never form a queue.
        """
        if state.awaited_job_id is not None:
            return state.awaited_job_id in self._jobs.in_flight
        if not self._loading:
            return False
        for group, group_state in zip(self._geometry, state.groups, strict=True):
            blocks = group.blocks_for_hit(computed_tokens, hit_tokens)
            if blocks:
                state.awaited_job_id = self._loading.get(group_state.keys[blocks[len(blocks) // 2]])
                break
        return state.awaited_job_id is not None

    def update_state_after_alloc(self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        """The engine allocated GPU blocks. ``block_ids`` are all that the request has, in order.

        To be called at every admission, also with zero external tokens. A load for ``num_external_tokens`` is sent with
        this step's meta. They are as many as the last answer promised, or none: a number at which no hit can end is a
        failed load.
        """
        state = self._state_of(request)
        self._fence(block_ids, state.computed_tokens)
        state.set_gpu_blocks(block_ids)
        if not state.asked:
            # The second call, after a load: only the blocks are new. Or a session goes on.
            state.extend_keys(self._geometry)
            return
        state.asked = False
        self._lookup_waits.observe(state.lookup_wait_s)
        state.lookup_wait_s = 0.0
        hit_tokens = state.hit_tokens = state.computed_tokens + num_external_tokens
        hits: dict[str, int] = {}
        if state.context.reads_cache:
            not_computed = max(0, request.num_tokens - state.computed_tokens)
            self._count(("lookup_tokens",), min(not_computed, self._max_load_tokens(state)))
            self._count(("hit_tokens",), num_external_tokens)
            if num_external_tokens > 0:
                hits = self._tokens_by_tier(state, hit_tokens)
                for tier, tokens in hits.items():
                    self._count(("tier_hit_tokens", tier), tokens)
                self._begin_load(state, hit_tokens)
            self._touch(state, hit_tokens)
        if self._recording is not None:
            self._recording.admitted(state, hits)
        self._offers.admit(state, hit_tokens)

    def _tokens_by_tier(self, state: RequestOffloadState, hit_tokens: int) -> dict[str, int]:
        """The tokens of a hit by the tier in which their blocks lay when the request came. With several groups, those
        of the group with the smallest blocks count; a state, which is one for all tokens, where there is nothing else.
        """
        first, sources = state.computed_tokens, self._manager.sources(state.context)
        if not sources:
            return {HOST: hit_tokens - first}
        attention = [group for group in self._geometry if group.kind is not GroupKind.SINGLE_STATE]
        if not attention:
            (last,) = self._geometry[0].blocks_for_hit(first, hit_tokens)
            tier = sources.get(state.groups[0].keys[last], HOST)
            return {tier: hit_tokens - first}
        finest = min(attention, key=lambda group: group.block_tokens)
        keys, size = state.groups[finest.index].keys, finest.block_tokens
        tokens: dict[str, int] = {}
        for block in range(first // size, -(-hit_tokens // size)):
            tier = sources.get(keys[block], HOST)
            count = min(hit_tokens, (block + 1) * size) - max(first, block * size)
            tokens[tier] = tokens.get(tier, 0) + count
        return tokens

    def _touch(self, state: RequestOffloadState, hit_tokens: int) -> None:
        """Marks the prefix as used. That includes what the device held: blocks in use there should not age here."""
        keys: list[OffloadKey] = []
        for group, group_state in zip(self._geometry, state.groups, strict=True):
            blocks = group.blocks_to_find(0, hit_tokens)
            keys += group_state.keys[blocks.start : blocks.stop]
        if keys:
            self._manager.touch(keys, state.context)

    def _begin_load(self, state: RequestOffloadState, hit_tokens: int) -> None:
        keys: list[OffloadKey] = []
        gpu_ids: list[int] = []
        sizes: list[int] = []
        starts: list[int] = []
        # Elsewhere no hit can end, and the tokens behind the last whole block would be taken for loaded.
        complete = hit_tokens % self._unit_tokens == 0
        for group, group_state in zip(self._geometry, state.groups, strict=True):
            positions = group.gpu_blocks_for_hit(state.computed_tokens, hit_tokens)
            blocks = group.blocks_for_hit(state.computed_tokens, hit_tokens)
            ids = group_state.gpu_block_ids[positions.start : positions.stop]
            complete &= len(ids) == len(positions) and NO_BLOCK not in ids
            keys += group_state.keys[blocks.start : blocks.stop]
            gpu_ids += ids
            sizes.append(len(ids))
            starts.append(positions.start)
        destination = GPULoadStoreSpec(gpu_ids, sizes, starts)
        source: LoadStoreSpec | None = None
        if complete:
            try:
                source = self._manager.prepare_load(keys, state.context)
            except TransferError:
                source = None
        fenced = [block_id for block_id in gpu_ids if block_id != NO_BLOCK]
        job = self._jobs.begin(Direction.LOAD, state, keys if source is not None else (), fenced)
        state.load_job_id = job.job_id
        if source is None:
            state.fail_load(keys)
            self._lost_loads.append(TransferJob(job.job_id, state.context.req_id, destination, destination))
            return
        for key in keys:
            self._loading.setdefault(key, job.job_id)
        self._loads.append(TransferJob(job.job_id, state.context.req_id, source, destination))

    # ------------------------------------------------------------------------------------------------- steps

    def build_connector_meta(self, step: EngineStep) -> ConnectorMeta:
        """The workers' part of this step. To be called in every step, also when nothing is scheduled."""
        for request_id in step.preempted_request_ids:
            preempted = self._requests.get(request_id)
            # A load that was not sent yet is of this step: the request has been admitted again since.
            if preempted is not None and not self._has_new_load(preempted):
                self._flush(self._jobs.flush_for_request(preempted))
                self._offers.forget(preempted)
                preempted.lose_gpu_blocks()
        if step.copied_block_ids:
            self._flush(self._jobs.flush_for_blocks(step.copied_block_ids))
        named = self._take_states(step.boundary_states) if step.boundary_states else []
        stores: list[TransferJob] = []
        tokens = len(step.scheduled)  # one each, while a request decodes
        prompt_tokens = queued_tokens = num_new_tables = 0
        requests = self._requests
        for scheduled in step.scheduled:
            try:
                state = requests[scheduled.request_id]
            except KeyError:  # rare: it has ended meanwhile. Faster than ``get`` for all the others.
                state = None
            num_tokens = scheduled.num_scheduled_tokens
            if num_tokens != 1:
                tokens += num_tokens - 1
                if state is not None:
                    left = max(state.request.num_prompt_tokens - scheduled.num_computed_tokens, 0)
                    prompt_tokens += min(num_tokens, left)
                    queued_tokens += max(left - num_tokens, 0)
            if (new_ids := scheduled.new_block_ids) and (scheduled.block_table_is_new or any(new_ids)):
                num_new_tables += scheduled.block_table_is_new
                self._take_new_blocks(state, scheduled)
            if state is None:
                continue
            state.last_scheduled = scheduled
            done_tokens = scheduled.num_computed_tokens + num_tokens
            if done_tokens >= state.next_offer_tokens and state.load_job_id is None:
                stores += self._offers.offer(state)
        if self._offers.refused:
            stores += self._offers.retry()
        for group_state in named:
            group_state.states.clear()  # refused ones too: later the engine may write over them
        is_continued = num_new_tables < len(step.scheduled)
        self._manager.note_step(StepWork(tokens, prompt_tokens, queued_tokens, is_continued))
        self._manager.on_schedule_end()
        if not (stores or self._loads or self._lost_loads or self._final_stores or self._flushes):
            return _NOTHING
        meta = ConnectorMeta(
            tuple(self._loads),
            tuple(stores),
            tuple(self._final_stores),
            frozenset(self._flushes),
            tuple(self._lost_loads),
        )
        for transfer in (*meta.loads, *meta.stores, *meta.lost_loads):
            self._jobs.in_flight[transfer.job_id].submitted = True
        self._loads, self._lost_loads, self._final_stores, self._flushes = [], [], [], set()
        return meta

    def _take_states(self, boundary_states: Iterable[BoundaryState]) -> list[GroupState]:
        """Lets requests offer the states that the engine names in this step. Returns their groups."""
        named: list[GroupState] = []
        for each in boundary_states:
            state, group = self._requests.get(each.request_id), self._geometry[each.group]
            if state is None or each.num_tokens % group.block_tokens:  # ended meanwhile, or no hit can end there
                continue
            state.groups[each.group].states[each.num_tokens // group.block_tokens - 1] = each.gpu_block_id
            state.next_offer_tokens = 0
            named.append(state.groups[each.group])
        return named

    def _has_new_load(self, state: RequestOffloadState) -> bool:
        return state.load_job_id is not None and not self._jobs.in_flight[state.load_job_id].submitted

    def _take_new_blocks(self, state: RequestOffloadState | None, scheduled: ScheduledRequest) -> None:
        if scheduled.block_table_is_new:
            # Blocks under computed tokens are shared and only read, or were fenced when they were allocated for a load.
            self._fence(scheduled.new_block_ids, scheduled.num_computed_tokens)
            if state is not None:
                state.set_gpu_blocks(scheduled.new_block_ids)
        else:
            self._fence(scheduled.new_block_ids, 0)
            if state is not None:
                state.add_gpu_blocks(scheduled.new_block_ids)

    def _fence(self, block_ids: BlockIds, computed_tokens: int) -> None:
        """Flushes the jobs that still use GPU blocks which the engine will write, those from ``computed_tokens`` on.

        Blocks of earlier tokens are prefix hits. The engine only reads them, and so does a store. No load writes them
        either: a block that a load fills is nobody's prefix hit before the load has ended.
        """
        if not self._jobs.fences:
            return
        for group, ids in zip(self._geometry, block_ids, strict=True):
            self._flush(self._jobs.flush_for_blocks(ids[computed_tokens // group.gpu_block_tokens :]))

    def _flush(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            self._flushes.add(job_id)
            self._count(("fenced_jobs",))

    # ------------------------------------------------------------------------------------------ ends of jobs

    def update_connector_output(self, report: WorkerReport) -> LoadOutcome:
        """Records what ended on the workers. A job ends when all ranks have reported it, and fails if one failed.

        Returns the loads that ended for requests which still wait for them.
        """
        if not report.results:
            return _NO_LOADS
        loaded: set[str] = set()
        failed: dict[str, frozenset[int]] = {}
        for rank, result in report.results:
            job = self._jobs.record(rank, result)
            if job is None:
                continue
            self._count_end(job)
            if self._recording is not None:
                self._recording.job_ended(job)
            if job.direction is _STORE:
                self._manager.complete_store(job.keys, job.request.context, success=job.success)
                continue
            self._end_load(job)
            state = job.request
            if state.finished or state.load_job_id != job.job_id:
                continue  # aborted or preempted meanwhile: no request waits for it
            state.load_job_id = None
            if job.success:
                state.computed_tokens = state.hit_tokens
                loaded.add(state.context.req_id)
            else:
                state.fail_load(job.keys)
                state.start_offers_after(state.computed_tokens, self._geometry)
                failed[state.context.req_id] = job.gpu_block_ids
        return LoadOutcome(frozenset(loaded), failed)

    def _end_load(self, job: JobRecord) -> None:
        # A lost load has no keys: nothing was pinned for it.
        if job.keys:
            for key in job.keys:
                # Other requests may ask for the key in this very step, and must not wait for a load that has ended. An
                # entry of another load of the key stays.
                if self._loading.get(key) == job.job_id:
                    del self._loading[key]
            self._manager.complete_load(job.keys, job.request.context)

    def _count_end(self, job: JobRecord) -> None:
        if job.direction is _STORE:
            self._stores_ended.count(job)
        else:
            self._loads_ended.count(job)
        if job.epoch is not self._epochs.current:
            self._count(("stale_jobs",))

    # ---------------------------------------------------------------------------------------- the whole cache

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call, with the engine's own hashes in their keys. Those of blocks of earlier epochs
        have hashes that no block has."""
        events, self._events = self._events, []
        return [*events, *self._epochs.current.engine_events(self._manager.take_events())]

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although it has nothing to compute."""
        return bool(self._jobs.in_flight) or self._manager.has_pending_work()

    def reset_cache(self) -> None:
        """Begins another epoch: no block of before is found any more, neither in host memory nor, unless ``Epochs``
        keeps them, in the tiers below. Jobs in flight become stale: they end as usual.

        A request that has blocks on the device is of the old epoch, and stores nothing, until it is admitted anew. A
        load in flight still brings the bytes that it was to bring, since its slots stay pinned until it ends.
        """
        for state in self._requests.values():
            self._offers.forget(state)
            state.forget_computed()
        self._manager.reset_cache()
        self._events = list(self.take_events())
        ended = self._epochs.current
        self._epochs.reset()
        if self._recording is not None:
            self._recording.reset(ended)
        for state in self._requests.values():
            state.is_outdated = True
            if state.epoch.seed == self._epochs.current.seed:
                state.enter(self._epochs.current)

    def get_stats(self) -> Stats:
        own: Stats = {
            ("jobs_in_flight",): len(self._jobs.in_flight),
            ("requests_tracked",): len(self._requests),
            ("requests_waiting",): self._num_waiting,
        }
        own |= self._lookup_waits.stats() | self._loads_ended.stats() | self._stores_ended.stats()
        own |= self._epochs.get_stats()
        return add_stats([self._counts, own, self._manager.get_stats()])

    def shutdown(self) -> None:
        if self._recording is not None:
            self._recording.close()
        self._manager.shutdown()

    def _count(self, sample: Sample, value: float = 1) -> None:
        self._counts[sample] = self._counts.get(sample, 0) + value

    def check_invariants(self) -> None:
        """For tests: asserts everything that must hold between two calls."""
        self._jobs.check_invariants()
        live = {id(state) for state in self._requests.values()}
        for job in self._jobs.in_flight.values():
            assert job.request.finished != (id(job.request) in live), f"{job} belongs to a half-dropped request"
            siblings = [self._jobs.in_flight[each].direction for each in job.request.job_ids]
            assert Direction.LOAD not in siblings or len(siblings) == 1, f"a load beside other jobs: {siblings}"
        assert all(key in self._jobs.in_flight[job_id].keys for key, job_id in self._loading.items())
        for state in self._requests.values():
            assert not state.finished
            assert state.load_job_id is None or state.load_job_id in state.job_ids
            assert all(job_id in self._jobs.in_flight for job_id in state.job_ids)
            for group_state in state.groups:
                assert group_state.cursor >= 0
