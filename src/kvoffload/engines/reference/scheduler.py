# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: decide which requests compute how many tokens in the next step, and which ones wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvoffload.connector import BoundaryState, EngineStep, LoadOutcome, OffloadingConnectorScheduler, ScheduledRequest
from kvoffload.engines.reference.kv_cache import KVCache
from kvoffload.engines.reference.request import Request, Scheduled, State


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, in the forms that the model and the connector need."""

    scheduled: tuple[Scheduled, ...]
    for_connector: EngineStep


@dataclass(slots=True)
class SchedulerCounts:
    """Counts since the start. Prompt tokens are counted at a request's first admission."""

    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    external_hit_tokens: int = 0
    computed_tokens: int = 0
    """All tokens that the model computed: prompt tokens, generated tokens, and tokens repeated after preemptions and
    failed loads."""
    preemptions: int = 0
    failed_loads: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Step:
    """The step that is being decided."""

    budget: int
    """Number of tokens that the step may still compute."""
    scheduled: list[Scheduled] = field(default_factory=list)
    for_connector: list[ScheduledRequest] = field(default_factory=list)
    states: list[BoundaryState] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)


class Scheduler:
    """First come, first served. Running requests go before waiting ones.

    When GPU blocks run out, the request admitted last is preempted: it releases its blocks, and later finds them in a
    cache or computes them again. A request that loads, or that the connector asks to wait, does not delay the requests
    after it.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        max_batch_tokens: int,
        max_requests: int,
        connector: OffloadingConnectorScheduler | None = None,
    ) -> None:
        self._kv_cache = kv_cache
        self._max_batch_tokens = max_batch_tokens
        self._max_requests = max_requests
        self._connector = connector
        self._waiting: deque[Request] = deque()
        self._loading: dict[str, tuple[Request, int]] = {}  # with its computed tokens once they are loaded
        self._running: list[Request] = []
        self._fresh_tables: set[str] = set()  # no step has reported their tables to the connector yet
        self.counts = SchedulerCounts()

    def __repr__(self) -> str:
        return f"Scheduler({len(self._waiting)} waiting, {len(self._loading)} loading, {len(self._running)} running)"

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._loading or self._running)

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        if self._connector is not None:
            self._connector.on_new_request(request)

    # ------------------------------------------------------------------------------------------------ a step

    def schedule(self) -> StepPlan:
        """Decide the next step, and allocate its GPU blocks."""
        step = _Step(self._max_batch_tokens)
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        self.counts.steps += 1
        return StepPlan(
            tuple(step.scheduled), EngineStep(tuple(step.for_connector), frozenset(step.preempted), tuple(step.states))
        )

    def _schedule_running(self, step: _Step) -> None:
        position = 0
        while position < len(self._running) and step.budget:
            request = self._running[position]
            count = min(step.budget, request.num_tokens - request.num_computed_tokens)
            fresh = self._kv_cache.grow(request, request.num_computed_tokens + count)
            if fresh is None:
                # The victim is not in this step yet, because requests are scheduled from the front of the list.
                self._preempt(self._running.pop(), step)
                continue
            self._put(step, request, count, fresh)
            position += 1

    def _preempt(self, request: Request, step: _Step) -> None:
        self._kv_cache.release(request)
        request.state = State.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._fresh_tables.discard(request.request_id)
        self._waiting.appendleft(request)
        step.preempted.add(request.request_id)
        self.counts.preemptions += 1

    def _admit_waiting(self, step: _Step) -> None:
        passed: list[Request] = []
        while self._waiting and step.budget and len(self._running) + len(self._loading) < self._max_requests:
            request = self._waiting.popleft()
            hit = self._kv_cache.find_prefix(request)
            external: int | None = 0
            waits = False
            if self._connector is not None:
                external, waits = self._connector.get_num_new_matched_tokens(request, hit.num_tokens)
            if external is None:
                passed.append(request)  # ask again in the next step; other requests may continue
                continue
            computed = hit.num_tokens + external
            count = 0 if waits else min(step.budget, request.num_tokens - computed)
            if not self._kv_cache.admit(request, hit, computed, computed + count):
                passed.append(request)
                break
            if not request.num_preemptions:
                request.device_hit_tokens, request.external_hit_tokens = hit.num_tokens, external
                self._count_admission(request)
            if self._connector is not None:
                self._connector.update_state_after_alloc(request, self._kv_cache.table(request), external)
            self._fresh_tables.add(request.request_id)
            if waits:
                request.num_computed_tokens = hit.num_tokens
                request.state = State.LOADING
                self._loading[request.request_id] = (request, computed)
            else:
                request.num_computed_tokens = computed
                self._run(request)
                self._put(step, request, count, ())
        self._waiting.extendleft(reversed(passed))

    def _run(self, request: Request) -> None:
        request.state = State.RUNNING
        self._running.append(request)

    def _put(self, step: _Step, request: Request, count: int, fresh: tuple[list[int], ...]) -> None:
        table = self._kv_cache.table(request)
        is_new = request.request_id in self._fresh_tables
        self._fresh_tables.discard(request.request_id)
        new_blocks = table if is_new else fresh
        computed = request.num_computed_tokens
        step.scheduled.append(Scheduled(request, computed, count, table))
        step.for_connector.append(ScheduledRequest(request.request_id, new_blocks, computed, count, is_new))
        step.states += self._kv_cache.boundary_states(request, computed + count)
        step.budget -= count

    def _count_admission(self, request: Request, times: int = 1) -> None:
        """Count a request's first admission. ``times=-1`` undoes the count after its load has failed."""
        self.counts.prompt_tokens += times * request.num_prompt_tokens
        self.counts.device_hit_tokens += times * request.device_hit_tokens
        self.counts.external_hit_tokens += times * request.external_hit_tokens

    # ----------------------------------------------------------------------------------------- after a step

    def advance(self, each: Scheduled) -> None:
        """Record that the tokens of one scheduled request have been computed."""
        each.request.num_computed_tokens += each.num_tokens
        self.counts.computed_tokens += each.num_tokens
        self._kv_cache.name_computed(each.request)

    def take_outcome(self, outcome: LoadOutcome) -> None:
        """Continue the requests whose load ended. Requests whose load failed start again, without the failed blocks."""
        for request_id in outcome.loaded_request_ids:
            request, num_tokens = self._loading.pop(request_id)
            request.num_computed_tokens = num_tokens
            self._kv_cache.name_computed(request)
            self._run(request)
        for request_id in outcome.failed_loads:
            self._start_over(self._loading.pop(request_id)[0])

    def undo(self, plan: StepPlan, outcome: LoadOutcome) -> StepPlan:
        """Return ``plan`` without the requests whose load within this step failed. They start again in a later step."""
        failed = [each.request for each in plan.scheduled if each.request.request_id in outcome.failed_loads]
        for request in failed:
            self._running.remove(request)
            self._start_over(request)
        left = tuple(each for each in plan.scheduled if each.request not in failed)
        waiting = outcome.failed_loads.keys() - {request.request_id for request in failed}
        others = {each: outcome.failed_loads[each] for each in waiting}
        self.take_outcome(LoadOutcome(outcome.loaded_request_ids, others))
        return StepPlan(left, plan.for_connector)

    def _start_over(self, request: Request) -> None:
        """Return a request whose load failed to the queue. No block of its load is trusted. The connector remembers the
        failed blocks, so the next admission makes progress, and the GPU hit, if any, is found again."""
        self._kv_cache.release(request)
        self._fresh_tables.discard(request.request_id)
        request.num_computed_tokens = 0
        request.state = State.WAITING
        self._waiting.appendleft(request)
        if not request.num_preemptions:
            self._count_admission(request, -1)
        self.counts.failed_loads += 1

    def end(self, request: Request, state: State) -> None:
        """End a request that finished or was aborted, at any stage.

        Its GPU blocks are free at once, because the connector fences the blocks that a transfer still uses.
        """
        match request.state:
            case State.WAITING:
                self._waiting.remove(request)
            case State.LOADING:
                del self._loading[request.request_id]
                self._kv_cache.release(request)
            case State.RUNNING:
                self._running.remove(request)
                self._kv_cache.release(request)
            case _:
                return
        self._fresh_tables.discard(request.request_id)
        request.state = state
        if self._connector is not None:
            self._connector.request_finished(request)

    def check_invariants(self) -> None:
        """Check the scheduler's state, for tests."""
        self._kv_cache.check_invariants({request.request_id for request in self._running} | set(self._loading))
        assert len(self._running) + len(self._loading) <= self._max_requests
        assert self._fresh_tables <= {request.request_id for request in self._running} | set(self._loading)
        assert all(request.state is State.WAITING for request in self._waiting)
        assert all(request.state is State.LOADING for request, _ in self._loading.values())
        assert all(request.state is State.RUNNING for request in self._running)
        assert all(request.num_computed_tokens < request.num_tokens for request in self._running)
