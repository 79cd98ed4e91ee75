# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler side: turns an engine's steps into loads, stores and flushes. Scheduler thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from kvoffload.base import Direction, OffloadingEvent, OffloadingManager, ReqContext, StepWork
from kvoffload.config import EngineLayout, OffloadingConfig
from kvoffload.connector.ahead import ReadAhead
from kvoffload.connector.engine import (
    BlockIds,
    BoundaryState,
    EngineRequest,
    EngineStep,
    GPUBlockPool,
    ScheduledRequest,
)
from kvoffload.connector.epochs import Epochs
from kvoffload.connector.groups import geometry_of
from kvoffload.connector.hints import Hints
from kvoffload.connector.hits import Hits
from kvoffload.connector.jobs import JobTable
from kvoffload.connector.limits import RequestLimits
from kvoffload.connector.messages import ConnectorMeta, LoadOutcome, TransferJob, WorkerReport
from kvoffload.connector.observer import Observer, Watch
from kvoffload.connector.offers import StoreOffers
from kvoffload.connector.requests import Keys, Request
from kvoffload.connector.short_loads import ShortLoads
from kvoffload.logs import RateLimitedLog
from kvoffload.metrics import Stats, add_stats

logger = logging.getLogger(__name__)

_NO_LOADS = LoadOutcome()
_STORE = Direction.STORE


class OffloadingConnectorScheduler:
    """Decides which blocks to look up, load and offer for each request. Tracks jobs, fences and metrics.

    ``connector/engine.py`` describes the call sequence. The engine never delays freeing GPU blocks: jobs that still use
    them are fenced, and flushed when the blocks are allocated again (or earlier, see ``hold_sources``). ``manager``
    should not raise; adapters wrap it in ``connector.guard.GuardedManager``, which turns exceptions into misses.
    ``clock`` returns seconds and never goes back. ``leaves_out`` returns whether a request neither loads nor stores
    anything, because its block hashes are ambiguous. This may change during a request, so it is asked whenever it
    matters. ``watch`` receives explanations of the requests that it selects. ``weights_name`` is for ``Epochs``.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        layout: EngineLayout,
        config: OffloadingConfig,
        clock: Callable[[], float] = time.monotonic,
        leaves_out: Callable[[EngineRequest], bool] | None = None,
        watch: Watch | None = None,
        weights_name: Callable[[], str | None] = str,
    ) -> None:
        self._manager = manager
        self._leaves_out = leaves_out
        self._geometry = geometry = geometry_of(layout, config)
        self._requests: dict[str, Request] = {}
        self._epochs = epochs = Epochs(config, weights_name)
        self._num_ranks = layout.num_ranks
        self._jobs = jobs = JobTable(geometry, layout.num_ranks)
        self._observer: Observer | None = None
        if config.record_trace or watch is not None:
            self._observer = Observer(manager, geometry, layout, config, epochs, clock, watch)
        num_slots = layout.num_slots(config)
        self._offers = StoreOffers(manager, geometry, jobs, epochs, config.offload_prompt_only, num_slots)
        self._short_loads = ShortLoads(geometry, jobs, clock)
        self._hits = Hits(manager, geometry, jobs, self._short_loads, self._observer, clock)
        most_s = config.max_wait_s if config.secondary_tiers else 0.0
        self._ahead = ReadAhead(manager, self._hits, epochs, clock, most_s)
        self._hints = Hints()
        self._log = RateLimitedLog(logger)

    def __repr__(self) -> str:
        return f"OffloadingConnectorScheduler({len(self._requests)} requests, {self._jobs})"

    def hold_sources(self, pool: GPUBlockPool) -> None:
        """Let ``pool`` hold the GPU blocks of each store until the store is flushed or has ended. Call it before the
        first step."""
        self._jobs.pool = pool

    def load_within_steps(self) -> None:
        """Allow short loads to run within the step that needs them (``ShortLoads``). Call it only for engines that can
        undo a step after a failed load. Does nothing for models with recurrent states."""
        self._short_loads.turn_on()

    # --------------------------------------------------------------------------------------------- requests

    def on_new_request(self, request: EngineRequest) -> None:
        """Track a request that has arrived. A second call for the same object does nothing, and the engine may even
        omit the call."""
        self._request_of(request)

    def _request_of(self, of_engine: EngineRequest) -> Request:
        request = self._known(of_engine)
        if request is not None:
            return request
        earlier = self._requests.get(of_engine.request_id)
        if earlier is not None:  # the engine uses the id again, without request_finished
            self._finish(earlier)
        params = of_engine.kv_transfer_params
        limits, problems = RequestLimits.parse(params)
        if problems:
            self._log.warning(" ".join(problems))
        next_use, is_prefetch = self._hints.of_request(
            of_engine.request_id, params, getattr(of_engine, "kv_hints", None)
        )
        context = ReqContext(
            of_engine.request_id,
            params if isinstance(params, dict) else None,
            not getattr(of_engine, "skip_reading_prefix_cache", False),
            limits.load_tiers,
            next_use,
        )
        policy = self._manager.on_new_request(context).policy
        groups = tuple(map(Keys, self._geometry))
        request = Request(of_engine, context, policy, groups, self._epochs.current, limits, self._leaves_out)
        self._requests[context.req_id] = request
        self._ahead.arrive(request, only_reads=is_prefetch)
        if self._observer is not None:
            self._observer.arrived(request)
        return request

    def _known(self, of_engine: EngineRequest) -> Request | None:
        """Return the tracked request, or ``None`` if the engine's request is not tracked (even if another one has its
        id)."""
        request = self._requests.get(of_engine.request_id)
        return request if request is not None and request.of_engine is of_engine else None

    def request_finished(self, request: EngineRequest) -> None:
        """End a request at any stage. The engine may free its GPU blocks at once. Ignores unknown requests, even if
        another request has the same id.

        Blocks that could not be stored yet are offered a last time, before their content is overwritten. The next
        step's meta contains the stores.
        """
        own = self._known(request)
        if own is not None:
            if own.prefix.load_job_id is None:
                # With asynchronous scheduling, these include its last full block: the step that fills it is scheduled
                # before its last token is known, and the request ends when that token arrives.
                self._jobs.add_final_stores(self._offers.offer_rest(own))
            self._finish(own)

    def _finish(self, request: Request) -> None:
        del self._requests[request.context.req_id]
        if self._observer is not None:
            self._observer.finished(request, self._offers.max_tokens(request), request in self._offers.refused)
        self._offers.forget(request)
        self._hits.forget(request)
        self._ahead.leave(request)
        if any(own.gpu_block_ids for own in request.groups) and (keys := request.keys_in_use()):
            # The head must outlive the tail. But portions were stored head first, so the tail is the most recent.
            self._manager.touch(keys, request.context)
        self._manager.on_request_finished(request.context)

    # ------------------------------------------------------------------------------------------------- hits

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens beyond ``num_computed_tokens`` that can be loaded, and whether by an asynchronous
        load, which the request waits for.

        ``(None, False)``: ask again in a later step. ``(n > 0, True)``: n tokens, by an asynchronous load that starts
        after ``update_state_after_alloc``. ``(n > 0, False)``: n tokens, by a load within the step: the engine computes
        the request's other tokens in this very step, which waits for the load (``load_within_steps``). ``(0, False)``:
        none. The last token is never part of a hit, since the engine must compute something.
        """
        if self._epochs.can_be_named:
            self._name_weights()
        own = self._request_of(request)
        epoch = self._epochs.use()
        if own.epoch is not epoch:
            # This may be a preempted request, which the engine reports only with the step.
            self._offers.forget(own)
            own.enter(epoch)
        self._ahead.ask(own)
        tokens = self._hits.find(own, num_computed_tokens, is_alone=len(self._requests) == 1)
        self._ahead.finds(own, own.prefix.found[0] if tokens is None else tokens)
        if tokens is None:
            return None, False
        return tokens - num_computed_tokens, tokens > num_computed_tokens and not own.prefix.within_step

    def update_state_after_alloc(self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Admit a request, for which the engine has allocated GPU blocks. ``block_ids`` lists all its blocks in order.

        Call it at every admission, even with zero external tokens. This step's meta contains the load for
        ``num_external_tokens``: as many as the last answer promised, or none. A number at which a hit cannot end makes
        a failed load.
        """
        own = self._request_of(request)
        self._epochs.use()
        self._flush_users(block_ids, own.prefix.computed_tokens)
        own.set_gpu_blocks(block_ids)
        self._ahead.admit(own, loads=num_external_tokens > 0)
        if own.prefix.is_answered:
            self._hits.admit(own, num_external_tokens)
            self._offers.admit(own, own.prefix.tokens)
        else:  # the second call, after a load, or a session continues: only the blocks are new
            own.extend_keys()

    def hit_tokens_by_tier(self, request: EngineRequest) -> Mapping[str, int]:
        """Return the external tokens of the request's last admission, by the tier that had their blocks."""
        own = self._known(request)
        return {} if own is None else own.prefix.tokens_by_tier or {}

    # ------------------------------------------------------------------------------------------------- steps

    def build_connector_meta(self, step: EngineStep) -> ConnectorMeta:
        """Return the workers' part of this step. Call it in every step, even if nothing is scheduled."""
        # A request that is preempted and scheduled in the same step has been admitted again in between.
        readmitted = {each.request_id for each in step.scheduled} if step.preempted_request_ids else ()
        for request_id in step.preempted_request_ids:
            preempted = self._requests.get(request_id)
            # A load that was not sent yet belongs to this step: the request has been admitted again.
            if preempted is not None and self._jobs.new_load(preempted) is None:
                self._jobs.flush_for_request(preempted)
                self._offers.forget(preempted)
                preempted.lose_gpu_blocks()
                if request_id not in readmitted:
                    self._ahead.arrive(preempted, comes_first=True)
        if step.needed_block_ids:
            self._jobs.flush_for_blocks(step.needed_block_ids)
        named = self._take_states(step.boundary_states) if step.boundary_states else ()
        stores: list[TransferJob] = []
        num_scheduled = tokens = len(step.scheduled)  # one token each, while a request decodes
        prompt_tokens = queued_tokens = context_tokens = num_new_tables = 0
        requests = self._requests
        self._offers.newest_step = step.scheduled
        for scheduled in step.scheduled:
            request_id, new_ids, computed_tokens, num_tokens, table_is_new = scheduled
            try:
                request = requests[request_id]
            except KeyError:  # rare: it has ended meanwhile. This is faster than ``get`` for all other requests.
                request = None
            if num_tokens != 1:
                tokens += num_tokens - 1
                if request is not None:
                    left = max(request.of_engine.num_prompt_tokens - computed_tokens, 0)
                    new = min(num_tokens, left)
                    prompt_tokens += new
                    queued_tokens += left - new
                    context_tokens += new * (2 * computed_tokens + new) // 2
            if new_ids and (table_is_new or any(new_ids)):
                num_new_tables += table_is_new
                self._take_new_blocks(request, scheduled)
            if request is None:
                continue
            request.last_scheduled = scheduled
            if computed_tokens + num_tokens >= request.next_offer_tokens and request.prefix.load_job_id is None:
                stores += self._offers.offer(request)
        if self._offers.refused:
            stores += self._offers.retry()
        for own in named:
            own.states.clear()  # even rejected states, because the engine may overwrite them later
        is_continued = num_new_tables < num_scheduled
        self._short_loads.step_begins(num_scheduled > 0, is_continued)
        work = StepWork(tokens, prompt_tokens, queued_tokens, is_continued, context_tokens)
        self._manager.note_step(work)
        if self._observer is not None:
            self._observer.step(work)
        self._ahead.step(tokens, queued_tokens)
        self._manager.on_schedule_end()
        return self._jobs.take(stores)

    def _take_states(self, boundary_states: Iterable[BoundaryState]) -> list[Keys]:
        """Let requests offer the states that the engine names in this step. Return their groups."""
        named: list[Keys] = []
        for each in boundary_states:
            request, size = self._requests.get(each.request_id), self._geometry[each.group].block_tokens
            if request is None or each.num_tokens % size:  # it has ended meanwhile, or a hit cannot end there
                continue
            own = request.groups[each.group]
            own.states[each.num_tokens // size - 1] = each.gpu_block_id
            request.next_offer_tokens = 0
            named.append(own)
        return named

    def _take_new_blocks(self, request: Request | None, scheduled: ScheduledRequest) -> None:
        is_new = scheduled.block_table_is_new
        # Blocks of computed tokens are shared and only read, or their jobs were flushed when a load filled them.
        self._flush_users(scheduled.new_block_ids, scheduled.num_computed_tokens if is_new else 0)
        if request is None:
            return
        if is_new:
            request.set_gpu_blocks(scheduled.new_block_ids)
            return
        for own, ids in zip(request.groups, scheduled.new_block_ids, strict=True):
            own.gpu_block_ids += ids

    def _flush_users(self, block_ids: BlockIds, computed_tokens: int) -> None:
        """Flush the jobs that still use GPU blocks that the engine will write: those of the tokens from
        ``computed_tokens`` on.

        Blocks of earlier tokens are prefix hits, which the engine and stores only read. A load does not write them
        either, because a block is a prefix hit only after its load has ended.
        """
        if self._jobs.fences:
            for group, ids in zip(self._geometry, block_ids, strict=True):
                self._jobs.flush_for_blocks(ids[computed_tokens // group.gpu_block_tokens :])

    # ------------------------------------------------------------------------------------------ ends of jobs

    def update_connector_output(self, report: WorkerReport) -> LoadOutcome:
        """Record the jobs that ended on the workers. A job ends when all ranks have reported it, and fails if one
        failed.

        Returns the ended loads for requests that still wait for them, and the failed loads within the step. After such
        a failure, the engine preempts each request that the step computed with these blocks, drops the tokens, and
        forgets the step's results.
        """
        if not (report.results or report.undefined_loads):
            return _NO_LOADS
        loaded: set[str] = set()
        failed = self._step_is_void(report.undefined_loads) if report.undefined_loads else {}
        for rank, result in report.results:
            job = self._jobs.record(rank, result)
            if job is None:
                continue
            self._epochs.job_ended(job.epoch)
            if job.success:
                self._short_loads.copied(job, self._num_ranks)
            request = job.request
            if job.direction is _STORE:
                if not job.success and self._observer is not None:
                    self._observer.store_failed(job)
                self._manager.complete_store(job.keys, request.context, success=job.success)
                continue
            if self._observer is not None:
                self._observer.load_ended(job)
            if not self._hits.end_load(job):
                continue
            if job.success:
                loaded.add(request.context.req_id)
            else:
                request.begin_offers(request.prefix.computed_tokens)
                failed[request.context.req_id] = frozenset(job.gpu_block_ids)
        return LoadOutcome(frozenset(loaded), failed)

    def _step_is_void(self, undefined_loads: Collection[int]) -> dict[str, frozenset[int]]:
        """Store nothing that the step computed, because loads within it failed. Return their GPU blocks by request."""
        undefined: dict[str, frozenset[int]] = {}
        for job_id in self._jobs.in_flight.keys() & undefined_loads:
            job = self._jobs.in_flight[job_id]
            job.success, job.request.prefix.load_failed = False, True
            if self._known(job.request.of_engine) is not None:
                undefined[job.request.context.req_id] = frozenset(job.gpu_block_ids)
        self._short_loads.failed()
        self._jobs.fail_stores()
        self._forget_computed()
        return undefined

    def blocks_are_undefined(self, gpu_block_ids: Collection[int]) -> None:
        """Record that a load failed and the engine computes these GPU blocks again. Call it before you record the
        report of the same step.

        If another connector loaded them, requests may already have used them. So all stores in flight fail, and no
        token computed until now is stored later. Stores that have ended did not read these blocks.
        """
        own = (job.gpu_block_ids for job in self._jobs.in_flight.values() if job.direction is Direction.LOAD)
        if set(gpu_block_ids).difference(*own):
            self._jobs.fail_stores()
            self._forget_computed()

    def _forget_computed(self) -> None:
        for request in self._requests.values():
            self._offers.forget(request)
            request.forget_computed()

    # ---------------------------------------------------------------------------------------- the whole cache

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, with the engine's own hashes in their keys. In events of earlier
        epochs, the hashes match no block."""
        return self._epochs.take_events(self._manager.take_events())

    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping although it has nothing to compute."""
        return bool(self._jobs.in_flight) or self._manager.has_pending_work()

    def is_idle(self) -> bool:
        """Return whether no request is tracked, and nothing is pending."""
        return not self._requests and not self.has_pending_work()

    def reset_cache(self, device_is_empty: bool = True) -> bool:
        """Begin another epoch. Earlier blocks are no longer found in host memory, nor in the tiers below unless
        ``Epochs`` keeps them. Jobs in flight become stale, and end as usual.

        A request with blocks on the GPU stays in the old epoch, and stores nothing until it is admitted again; if both
        epochs have the same keys, it continues in the new one. A load in flight still copies the right bytes, because
        its slots stay pinned until it ends.

        ``device_is_empty``: neither the engine's requests nor its own prefix cache have an earlier block. Otherwise,
        nothing is stored until ``open_epoch``.

        Returns whether the blocks of the tiers below are still found.
        """
        return self._begin_epoch(self._epochs.reset, device_is_empty)

    def change_weights(self, device_is_empty: bool) -> bool:
        """Do the same as ``reset_cache`` for weights that may have changed without a new name, so that earlier names
        are wrong for them."""
        return self._begin_epoch(self._epochs.change, device_is_empty)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is stored, because the GPU may have KV of earlier weights."""
        return self._epochs.current.is_closed

    def open_epoch(self) -> None:
        """Allow stores again, because all blocks from before the epoch have left the GPU."""
        self._epochs.open()

    def _name_weights(self) -> None:
        """Begin an epoch for named weights. Earlier blocks are not found, but they are good. So host memory is not
        reset and nobody waits for a drain: the cache policy evicts them in time."""
        ended = self._epochs.current
        self._epochs.name(self._manager.take_events())
        if self._observer is not None:
            self._observer.reset(ended)

    def undo_reset(self) -> None:
        """Undo the last ``reset_cache``, because its cause did not change the weights: tiers keep their blocks. Does
        nothing if the weights may have changed, or if a request has been looked up since."""
        self._epochs.undo_reset(self._manager.take_events())
        self._enter_equal_epoch()

    def _begin_epoch(self, begin: Callable[[Iterable[OffloadingEvent], bool], None], device_is_empty: bool) -> bool:
        self._forget_computed()
        if self._epochs.is_used:  # otherwise, the manager is empty, and a reset would only wait for tiers that may hang
            self._manager.reset_cache()
        ended = self._epochs.current
        begin(self._manager.take_events(), device_is_empty)
        if self._observer is not None:
            self._observer.reset(ended)
        self._enter_equal_epoch()
        return ended.seed == self._epochs.current.seed

    def _enter_equal_epoch(self) -> None:
        for request in self._requests.values():
            if request.epoch.seed == self._epochs.current.seed:
                request.enter(self._epochs.use())

    def get_stats(self) -> Stats:
        parts = self._jobs, self._hits, self._epochs, self._hints
        own: Stats = {("requests_tracked",): len(self._requests)}
        return add_stats([own, *(part.get_stats() for part in parts), self._manager.get_stats()])

    def shutdown(self) -> None:
        if self._observer is not None:
            self._observer.close()
        self._manager.shutdown()

    def check_invariants(self) -> None:
        """Assert everything that must hold between two calls. For tests."""
        self._jobs.check_invariants()
        self._ahead.check_invariants()
        self._hits.check_invariants(self._requests.values())
        live = set(self._requests.values())
        for job in self._jobs.in_flight.values():
            jobs = map(self._jobs.in_flight.__getitem__, job.request.job_ids)
            siblings = [each for each in jobs if not each.within_step]
            loads = [each for each in siblings if each.direction is Direction.LOAD]
            assert not loads or len(siblings) == 1, f"a load beside other jobs: {siblings}"
            waits = job.request.prefix.load_job_id is not None
            assert not waits or job.request in live, f"{job} belongs to a half-dropped request"
        for request in live:
            assert all(job_id in self._jobs.in_flight for job_id in request.job_ids)
            for own in request.groups:
                assert own.next_block >= 0
