# SPDX-License-Identifier: Apache-2.0
"""The hit of each request: the search, the reasons to wait, the admission and the load. Scheduler thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from kvoffload.base import (
    Direction,
    GPULoadStoreSpec,
    LoadStoreSpec,
    NextUse,
    OffloadingManager,
    OffloadKey,
)
from kvoffload.config import GroupKind
from kvoffload.connector.engine import NO_BLOCK
from kvoffload.connector.groups import (
    AskBlocks,
    GroupGeometry,
    by_position,
    find_hit,
    finest_of,
    hit_unit_tokens,
    possible_hit,
)
from kvoffload.connector.jobs import JobRecord, JobTable
from kvoffload.connector.observer import Observer
from kvoffload.connector.requests import Request
from kvoffload.connector.short_loads import ShortLoads
from kvoffload.errors import TransferError
from kvoffload.metrics import HOST, Histogram, Sample, Stats


class Hits:
    """Searches for the hits of requests that wait for admission, and loads them to the GPU.

    Each request has one ``CachedPrefix``: ``find`` answers the engine, at once or in a later step, and ``admit``
    follows when the request has GPU blocks. A load pins its blocks until ``end_load``. The ``observer``, if there is
    one, is informed of each event. ``clock`` returns seconds and never goes back.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        geometry: tuple[GroupGeometry, ...],
        jobs: JobTable,
        short_loads: ShortLoads,
        observer: Observer | None,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._is_hybrid = any(group.kind is not GroupKind.FULL_ATTENTION for group in geometry)
        attention = [group for group in geometry if group.kind is not GroupKind.SINGLE_STATE]
        self._counted = finest_of(attention) if attention else None
        """The group whose blocks divide the tokens of a hit among tiers. ``None`` if there are only states."""
        self._jobs = jobs
        self._short_loads = short_loads
        self._observer = observer
        self._clock = clock
        self._waiting: dict[Request, float] = {}
        """Requests whose last question is unanswered, with the time of the first such question."""
        self._loaded: set[Request] = set()
        """Requests whose load has ended. The engine may have scheduled some of them since."""
        self._loading: dict[OffloadKey, int] = {}
        """Keys that are being loaded to the GPU, with the id of the first job that loads each."""
        self._wait_seconds = Histogram("lookup_wait_seconds")
        self._counts: Counter[Sample] = Counter()

    def __repr__(self) -> str:
        return f"Hits({len(self._waiting)} requests waiting, {len(self._loading)} blocks being loaded)"

    # ------------------------------------------------------------------------------------------------- the search

    def find(self, request: Request, computed_tokens: int, is_alone: bool = False) -> int | None:
        """Return the number of tokens that the request can use, including the ``computed_tokens`` on the GPU. ``None``:
        ask again in a later step. ``is_alone``: the engine has no other request."""
        prefix, tokens = request.prefix, computed_tokens
        if request.context.reads_cache and not request.is_prefilled_elsewhere:
            # A request may have one load or several stores in flight, but never both. So a preempted request waits for
            # its old transfers.
            since_s = self._waiting.get(request, self._clock())
            asked = computed_tokens, request.of_engine.num_tokens, request.max_load_tokens(), request.epoch
            is_ready = not request.job_ids and request.context.tokens_ahead is None
            # If vLLM cannot allocate blocks for a request, it schedules nothing behind it, not even requests that hold
            # blocks since their load has ended. So every second time, this request waits and lets them go first.
            is_stuck = prefix.load_failed or prefix.is_answered
            gives_way = is_stuck and request not in self._waiting and self._others_hold_blocks()
            is_ready &= not gives_way
            if is_ready:
                if prefix.load_failed or prefix.searched != asked or not self._manager.is_unchanged(request.context):
                    prefix.searched, prefix.found = asked, self.search(request, computed_tokens)
                tokens, is_deferred = prefix.found
                is_ready = not is_deferred and not self._awaits_load(request, computed_tokens, tokens)
            if not is_ready:
                self._counts["lookups_deferred",] += 1
                self._waiting[request] = since_s
                if self._observer is not None:
                    is_shared = gives_way or prefix.awaited_job_id in self._jobs.in_flight
                    self._observer.deferred(
                        request, "own transfers" if request.job_ids else "another load" if is_shared else "tiers"
                    )
                return None
            if tokens > computed_tokens or self._observer is not None:
                prefix.sources = prefix.sources or self._manager.sources(request.context)
            if self._waiting.pop(request, None) is not None:
                prefix.wait_s += self._clock() - since_s
            if self._observer is not None:
                self._observer.answered(request)
        prefix.computed_tokens, prefix.is_answered = computed_tokens, True
        prefix.within_step = tokens > computed_tokens and self._short_loads.fits(
            sum(len(group.gpu_blocks_for_hit(computed_tokens, tokens)) for group in self._geometry), is_alone
        )
        return tokens

    def _others_hold_blocks(self) -> bool:
        """Return whether the engine has not scheduled some request since its load ended."""
        self._loaded = {
            other
            for other in self._loaded
            if other.last_scheduled is None and any(own.gpu_block_ids for own in other.groups)
        }
        return bool(self._loaded)

    def has_asked(self, request: Request) -> bool:
        """Return whether the engine has asked for the request, and waits for the answer."""
        return request in self._waiting

    def search(self, request: Request, computed_tokens: int) -> tuple[int, bool]:
        """Return the longest hit that the request may load, and whether a lookup of its blocks has no answer yet.

        Lookups read the blocks that they find from the tiers. So if a hit also needs windows or states, no attention is
        looked up after the last window or state that exists anywhere. The manager learns at which blocks a part of the
        hit may end.

        A request whose load failed gets no second load. vLLM would count the blocks that the request still needs as
        reserved for it, even against the next load, and wait forever if the two do not fit.
        """
        if request.prefix.load_failed:
            return computed_tokens, False
        request.context.tokens_before = computed_tokens
        request.extend_keys()
        most = min(request.of_engine.num_tokens - 1, computed_tokens + request.max_load_tokens())
        keys = [own.keys for own in request.groups]
        manager, context = self._manager, request.context
        ends = None
        if self._is_hybrid:
            where: AskBlocks = lambda part: manager.where(part, context)  # noqa: E731
            tokens, ends = possible_hit(self._geometry, keys, where, computed_tokens, most)
            if tokens is not None:
                most = min(most, tokens)
                if most <= computed_tokens:  # no lookup follows, and blocks that earlier ones found are useless
                    self._manager.release(request.context)
        if ends is None:  # other managers may not know this argument
            ask: AskBlocks = lambda part: manager.lookup_prefix(part, context)  # noqa: E731
        else:
            ask = lambda part: manager.lookup_prefix(part, context, ends)  # noqa: E731
        return find_hit(self._geometry, keys, ask, computed_tokens, most)

    def _awaits_load(self, request: Request, computed_tokens: int, hit_tokens: int) -> bool:
        """Return whether another request is already loading the middle block of this hit, and so about half of it.

        When that load has ended, the engine's own prefix cache contains them. A request waits for at most one such
        load, so that requests with a shared prefix never form a queue.
        """
        prefix = request.prefix
        if hit_tokens <= computed_tokens:
            return False
        if prefix.awaited_job_id is None and self._loading:
            for own in request.groups:
                blocks = own.group.blocks_for_hit(computed_tokens, hit_tokens)
                if blocks:
                    prefix.awaited_job_id = self._loading.get(own.keys[blocks[len(blocks) // 2]])
                    break
        return prefix.awaited_job_id in self._jobs.in_flight

    # ------------------------------------------------------------------------------------- its admission, and its load

    def admit(self, request: Request, num_external_tokens: int) -> None:
        """Begin a load for ``num_external_tokens``, because the request has GPU blocks, and touch the prefix. The touch
        includes the blocks that were on the GPU, because blocks in use there should not age in host memory."""
        prefix = request.prefix
        self._wait_seconds.observe(prefix.wait_s)
        is_first = prefix.tokens_by_tier is None
        prefix.tokens = prefix.computed_tokens + num_external_tokens
        prefix.is_answered, prefix.wait_s, prefix.tokens_by_tier = False, 0.0, {}
        sources, prefix.sources = prefix.sources, {}
        if request.context.reads_cache:
            if num_external_tokens > 0:
                prefix.tokens_by_tier = self._tokens_by_tier(request, sources)
            if is_first:
                self._count_admission(request, num_external_tokens)
            if num_external_tokens > 0:
                self._load(request)
            blocks = [group.blocks_to_find(0, prefix.tokens) for group in self._geometry] if prefix.tokens else ()
            keys = [key for own, part in zip(request.groups, blocks) for key in own.keys[part.start : part.stop]]
            if keys:
                self._manager.touch(by_position(self._geometry, blocks, keys), request.context)
        if self._observer is not None:
            self._observer.admitted(request)
        if prefix.within_step:
            prefix.computed_tokens = prefix.tokens

    def _count_admission(self, request: Request, num_external_tokens: int) -> None:
        """Count a request once, however often it is preempted."""
        not_computed = max(0, request.of_engine.num_tokens - request.prefix.computed_tokens)
        looked_up = min(not_computed, request.max_load_tokens())
        hinted = "no" if request.context.next_use is NextUse.UNKNOWN else "yes"
        counts = self._counts
        counts["lookup_tokens",] += looked_up
        counts["lookup_tokens_by_hint", hinted] += looked_up
        counts["hit_tokens",] += num_external_tokens
        counts["hit_tokens_by_hint", hinted] += num_external_tokens
        for tier, tokens in (request.prefix.tokens_by_tier or {}).items():
            counts["tier_hit_tokens", tier] += tokens

    def _tokens_by_tier(self, request: Request, sources: Mapping[OffloadKey, str]) -> dict[str, int]:
        """Return the tokens of a hit by the tier that contained their blocks when the request arrived. With several
        groups, the blocks of the group with the smallest blocks count. If there are only states, the one state counts
        for all tokens."""
        first, stop = request.prefix.computed_tokens, request.prefix.tokens
        if not sources or any(stop > len(own.keys) * own.group.block_tokens for own in request.groups):
            return {HOST: stop - first}  # or no hit can be so long
        if self._counted is None:
            (last,) = self._geometry[0].blocks_for_hit(first, stop)
            return {sources.get(request.groups[0].keys[last], HOST): stop - first}
        keys, size = request.groups[self._counted.index].keys, self._counted.block_tokens
        tokens: Counter[str] = Counter()
        for block in range(first // size, -(-stop // size)):
            tokens[sources.get(keys[block], HOST)] += min(stop, (block + 1) * size) - max(first, block * size)
        return dict(tokens)

    def _load(self, request: Request) -> None:
        """Load the request's hit to its GPU blocks. If pins or GPU blocks are missing for any part, the load is lost:
        it is sent, and the workers report it as failed."""
        prefix = request.prefix
        keys: list[OffloadKey] = []
        gpu_ids: list[int] = []
        sizes: list[int] = []
        starts: list[int] = []
        # A hit cannot end elsewhere: the tokens after the last whole block would be taken for loaded.
        complete = prefix.tokens % hit_unit_tokens(self._geometry) == 0
        for own in request.groups:
            positions = own.group.gpu_blocks_for_hit(prefix.computed_tokens, prefix.tokens)
            blocks = own.group.blocks_for_hit(prefix.computed_tokens, prefix.tokens)
            ids = own.gpu_block_ids[positions.start : positions.stop]
            complete &= len(ids) == len(positions) and NO_BLOCK not in ids and blocks.stop <= len(own.keys)
            keys += own.keys[blocks.start : blocks.stop]
            gpu_ids += ids
            sizes.append(len(ids))
            starts.append(positions.start)
        destination = GPULoadStoreSpec(gpu_ids, sizes, starts)
        source: LoadStoreSpec | None = None
        if complete:
            try:
                source = self._manager.prepare_load(keys, request.context)
            except TransferError:
                source = None
        if source is None:
            prefix.load_failed = True
            keys = []
        job_id = self._jobs.begin_load(request, keys, source, destination, gpu_ids, prefix.within_step).job_id
        if not prefix.within_step:
            prefix.load_job_id = job_id
        for key in keys:
            self._loading.setdefault(key, job_id)

    def end_load(self, job: JobRecord) -> bool:
        """Release a load that ended on all ranks, and return whether its request waits for it. If not, the request was
        aborted or preempted meanwhile, or the load ended within the step."""
        self._release(job)
        prefix = job.request.prefix
        if job.within_step:
            prefix.load_failed |= not job.success
        if prefix.load_job_id != job.job_id:
            return False
        prefix.load_job_id = None
        if job.success:
            prefix.computed_tokens = prefix.tokens
            self._loaded.add(job.request)
        else:
            prefix.load_failed = True
        return True

    def forget(self, request: Request) -> None:
        """Forget a request that ended. Cancels its load if it was not sent to the workers yet. A running load continues
        to its end; its GPU blocks are fenced."""
        self._waiting.pop(request, None)
        self._loaded.discard(request)
        request.prefix.load_job_id = None
        if (job := self._jobs.cancel_load(request)) is not None:
            self._release(job)

    def _release(self, job: JobRecord) -> None:
        if not job.keys:  # a lost load: nothing was pinned for it
            return
        for key in job.keys:
            # Other requests may ask for the key in this very step, and must not wait for a load that has ended. Entries
            # of another load of the key stay.
            if self._loading.get(key) == job.job_id:
                del self._loading[key]
        self._manager.complete_load(job.keys, job.request.context)

    # ----------------------------------------------------------------------------------------------------------------

    def get_stats(self) -> Stats:
        return {**self._counts, ("requests_waiting",): len(self._waiting), **self._wait_seconds.stats()}

    def check_invariants(self, requests: Collection[Request]) -> None:
        """Check that keys being loaded belong to loads in flight. ``requests`` are all requests that have not ended.
        For tests."""
        assert set(requests).issuperset(self._waiting), "a request that has ended waits for an answer"
        for request in requests:
            assert request.prefix.load_job_id is None or request.prefix.load_job_id in request.job_ids
        for key, job_id in self._loading.items():
            job = self._jobs.in_flight[job_id]
            assert job.direction is Direction.LOAD
            assert key in job.keys
