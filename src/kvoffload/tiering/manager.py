# SPDX-License-Identifier: Apache-2.0
"""The control plane of tiering: host memory, any number of tiers below it, and the transfers between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import get_args

from kvoffload.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    StepWork,
    Weighed,
)
from kvoffload.config import DEFAULTS
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.lost_blocks import Loss
from kvoffload.metrics import Stats, add_stats
from kvoffload.miss import Miss
from kvoffload.tiering.base import CascadeMode, SecondaryTierManager
from kvoffload.tiering.cascades import Cascades
from kvoffload.tiering.load_policy import BlockWorth, LoadPlanner
from kvoffload.tiering.lookups import Lookups
from kvoffload.tiering.promotions import Promotions
from kvoffload.tiering.requests import TierRequest
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob, TierJobs
from kvoffload.tiering.waits import Waits
from kvoffload.tiering.write_back import WriteBack

_log = logging.getLogger(__name__)


class TieringOffloadingManager(OffloadingManager):
    """Keeps blocks in host memory and in the tiers below it, and reads them back into host memory. All bytes pass
    through host memory (the primary tier). Every call runs on the scheduler's thread and does no I/O.

    ``lookup_prefix`` equals the loop of ``lookup``, except with ``block_worth``, which weighs the blocks of a call
    together.

    It obeys eight rules (``docs/design/0006-tiering.md``). Every stored block is written to every tier. If a tier can
    serve a miss, the block is read once, however many requests ask for it. Tiers that want whole requests get them. A
    tier is informed of a request's end after the request's last job. A failed read is a miss. No request waits longer
    than ``max_wait_s``. Blocks that a waiting request has hit stay until it loads them. A slot under I/O is not used
    for another block.

    ``promotion_share`` limits the share of host memory's blocks that waiting requests may claim, one request or all of
    them together. ``cascade`` lists a mode for each secondary tier (default: ``"on_store"`` for all, which is
    write-through). ``"on_evict"`` (write-back) requires a cache policy that can name its next victims
    (``CachePolicy.next_victims``); otherwise it behaves like ``"on_store"``. With ``block_worth``, blocks of lower
    tiers are read only if that is expected to be faster than computing them (``load_policy="cost"``); without it, all
    of them are (``"always"``). ``clock`` returns seconds and never goes back. Raises ``ConfigError`` for a ``cascade``
    that does not fit the tiers.

    A context that was never announced by ``on_new_request`` counts as a new block-level request, and is remembered
    until ``on_request_finished`` like any other.
    """

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager] | None = None,
        *,
        max_wait_s: float = DEFAULTS.max_wait_s,
        promotion_share: float = DEFAULTS.promotion_share,
        cascade: Sequence[CascadeMode] | None = None,
        block_worth: BlockWorth | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.primary_tier = primary_tier
        self.lost = primary_tier.lost
        self.secondary_tiers: tuple[SecondaryTierManager, ...] = tuple(secondary_tiers or ())
        self._tiers = tuple(GuardedTier(index, tier) for index, tier in enumerate(self.secondary_tiers))
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._jobs = TierJobs(self._tiers)
        on_store_tiers, on_evict_tiers = self._split_by_mode(cascade)
        self._cascades = Cascades(primary_tier, self._jobs, on_store_tiers)
        self._write_back = WriteBack(primary_tier, on_evict_tiers, self._cascades) if on_evict_tiers else None
        self._waits = Waits(primary_tier.slots, promotion_share, clock)
        names = [tier.name for tier in self._tiers]
        if block_worth is None:
            # Nothing is weighed. The memory of a simulation contains no bytes.
            block_worth = BlockWorth(max(1, primary_tier.kv_view.nbytes // primary_tier.num_blocks))
        self._planner = LoadPlanner(names, block_worth, clock)
        self._promotions = Promotions(primary_tier, self._waits, self._jobs, self._planner, self._reserved)
        self._lookups = Lookups(
            primary_tier, self._tiers, self._waits, self._promotions, self._planner, self._poll, clock
        )
        self._requests: dict[str, TierRequest] = {}

    def __repr__(self) -> str:
        names = [tier.name for tier in self._tiers]
        return f"TieringOffloadingManager({self.primary_tier!r}, tiers={names}, jobs={len(self._jobs.in_flight)})"

    # ------------------------------------------------------------------------------------------------- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.primary_tier.on_new_request(req_context)
        request = self._request(req_context)
        # Every tier is asked, and only those that want the whole request are remembered.
        wanting = [tier for tier in self._tiers if tier.wants_whole_request(req_context)]
        request.whole_request_tiers = tuple(wanting)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if wanting else OffloadPolicy.BLOCK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.primary_tier.on_request_finished(req_context)
        request = self._requests.pop(req_context.req_id, None)
        if request is None:
            return  # it has already ended or was never announced; tiers are informed of each end once
        if self._promotions.queue:
            self._promotions.submit(request.context)
        self._waits.end(request)
        self._lookups.end(request)
        request.is_ending = True
        self._close_if_done(request)

    # -------------------------------------------------------------------------------------------------- reading

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.lookup_prefix([key], req_context)[0]

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, ends: Collection[OffloadKey] | None = None
    ) -> list[bool | None]:
        return self._lookups.ask(self._request(req_context), keys, ends)

    def reads_ahead(self) -> bool:
        self._poll()
        return bool(self._tiers) and self._waits.room_beside(()) > 0 and self._planner.can_read_ahead()

    def is_unchanged(self, req_context: ReqContext) -> bool:
        return self._lookups.is_unchanged(self._request(req_context))

    def where(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return self._lookups.where(self._request(req_context), keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self.primary_tier.prepare_load(keys, req_context)
        # The blocks are pinned, so claims are no longer needed.
        request = self._request(req_context)
        if (wait := request.wait) is not None:
            self._planner.count_wait(wait.expected_s, wait.elapsed_s(self._clock()) - wait.planned_s)
        self._waits.end(request)
        return spec

    def release(self, req_context: ReqContext) -> None:
        self._waits.end(self._request(req_context))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.primary_tier.complete_load(keys, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.primary_tier.touch(keys, req_context)
        for tier in self._tiers:
            tier.touch(keys, req_context)

    # -------------------------------------------------------------------------------------------------- writing

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        request = self._request(req_context)
        self._poll()
        self._waits.end(request)  # it runs
        keys = list(keys)
        output = self.primary_tier.prepare_store(keys, req_context, self._waits.give_way)
        if output is None:
            return None
        self._reserved(output)
        self._cascades.begin_stores(request, output.keys_to_store, keys)
        return output

    def _reserved(self, output: PrepareStoreOutput) -> None:
        """Note that host memory has reserved slots, for a store or a promotion."""
        self._waits.news(output.keys_to_store)
        if self._write_back is not None:
            self._write_back.on_reserved(len(output.keys_to_store), output.evicted_keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        keys = list(keys)
        try:
            self.primary_tier.complete_store(keys, req_context, success)
        finally:  # a cache policy may be foreign
            self._end_writes(keys)

    # ----------------------------------------------------------------------------------------------------- steps

    def note_step(self, work: StepWork) -> None:
        self._planner.note_step(work)

    def on_schedule_end(self) -> None:
        self._take_in(self._jobs.take_finished())
        self._lookups.end_step()
        if self._promotions.queue:
            self._promotions.submit()
        if self._cascades.parked:
            for request in self._cascades.retry_parked():
                self._close_if_done(request)
        if self._write_back is not None:
            self._write_back.step()
        for tier in self._tiers:
            tier.on_schedule_end()

    def has_pending_work(self) -> bool:
        return (
            bool(self._promotions.queue)
            or (bool(self._cascades.parked) and self._cascades.can_retry)
            or (self._write_back is not None and self._write_back.has_queued)
            or any(tier.has_pending_work() for tier in self._tiers)
        )

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [*self.primary_tier.take_events(), *(event for tier in self._tiers for event in tier.take_events())]

    def reset_cache(self) -> None:
        """Forget every block in host memory; the tiers below keep theirs. The connector then asks for other keys,
        unless the tiers' blocks may be used again.

        The tiers are drained first, each until its own deadline. Slots that an unfinished job may still access stay
        reserved until it ends.
        """
        for tier in self._tiers:
            tier.drain_jobs()
        self._poll()
        self._waits.reset()
        self._promotions.reset()
        self._jobs.mark_stale()
        if self._write_back is not None:
            self._write_back.reset()
        touched = self._cascades.reset()
        self.primary_tier.reset_cache()
        for request in touched:
            self._close_if_done(request)

    def get_stats(self) -> Stats:
        own: Stats = {("lookups_out_of_patience",): self._waits.num_expired}
        own |= {("promotions", outcome): count for outcome, count in self._promotions.outcomes.items()}
        own |= {("promotions_refused", reason): count for reason, count in self._promotions.refused.items()}
        own |= {("cascades", outcome): count for outcome, count in self._cascades.outcomes.items()}
        own["cascades", "dropped"] += 0 if self._write_back is None else self._write_back.dropped
        own |= self._cascades.get_stats()
        own[("cascades_parked",)] = self._cascades.num_parked
        own[("promotions_in_flight",)] = len(self._promotions)
        own[("plans_made_again",)] = self._lookups.num_planned_again
        own[("waits_ended_early",)] = self._lookups.num_ended_early
        own[("claimed_blocks",)] = len(self._waits.claimed)
        own |= self._waits.lengths.stats()
        own |= self._planner.get_stats()
        return add_stats([self.primary_tier.get_stats(), own, *(tier.get_stats() for tier in self._tiers)])

    def sources(self, req_context: ReqContext) -> Mapping[OffloadKey, str]:
        request = self._requests.get(req_context.req_id)
        return {} if request is None or request.wait is None else request.wait.sources

    def weighed(self, req_context: ReqContext) -> Sequence[Weighed]:
        request = self._requests.get(req_context.req_id)
        return [] if request is None or request.wait is None else request.wait.weighed

    def explain(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[Loss | None]:
        # Tiers that may be read come first.
        closed = {tier: self._why_closed(tier, req_context) for tier in self._tiers}
        below: dict[OffloadKey, GuardedTier] = {}
        missing = [key for key, block in zip(keys, self.primary_tier.slots.get_all(keys)) if block is None]
        for tier in sorted(self._tiers, key=lambda tier: closed[tier] is not None):
            if missing:
                tier.note_losses()
                below |= {key: tier for key, is_held in zip(missing, tier.holds(missing)) if is_held}
                missing = [key for key in missing if key not in below]
        losses = self.primary_tier.explain(keys, req_context)
        request = self._requests.get(req_context.req_id)
        verdicts = {} if request is None else request.verdicts
        for at, key in enumerate(keys):
            verdict, tier_below = verdicts.get(key), below.get(key)
            if tier_below is not None:
                losses[at] = None
                verdict = verdict or closed[tier_below]
            # The tier may have found out the reason for a failed promotion meanwhile.
            loss = losses[at]
            is_known = verdict is Miss.PROMOTION_FAILED and loss and loss.miss not in (Miss.NEW, Miss.EVICTED)
            if verdict is not None and not is_known:
                losses[at] = Loss(verdict)
        return losses

    @staticmethod
    def _why_closed(tier: GuardedTier, req_context: ReqContext) -> Miss | None:
        """Return why the request may not read from ``tier`` now, or ``None``."""
        if not tier.allows(req_context):
            return Miss.TIER_LEFT_OUT
        return None if tier.is_readable() else Miss.TIER_OFF

    def shutdown(self) -> None:
        if self._write_back is not None:
            self._write_back.close(self._poll, self._clock, self._max_wait_s)
        self._promotions.close()
        for tier in self._tiers:
            tier.shutdown()
        self.primary_tier.shutdown()

    def check_invariants(self) -> None:
        """Recompute every count from scratch. For tests: O(everything)."""
        self.primary_tier.check_invariants()
        self._promotions.check_invariants()
        requests = self._requests.values()
        self._cascades.check_invariants(requests, self._waits.promoted)
        if self._write_back is not None:
            self._write_back.check_invariants()
        self._waits.check_invariants(requests)

    def _request(self, req_context: ReqContext) -> TierRequest:
        request = self._requests.get(req_context.req_id)
        if request is None:
            request = self._requests[req_context.req_id] = TierRequest(req_context, self._max_wait_s)
        return request

    # ------------------------------------------------------------------------------------------------- job ends

    def _poll(self) -> None:
        """Process the jobs that have ended."""
        if self._jobs.in_flight:
            self._take_in(self._jobs.take_finished())

    def _take_in(self, finished: Sequence[TierJob]) -> None:
        if not finished:
            return
        cascades = []
        for job in finished:
            if not job.is_promotion:
                cascades.append(job)
                continue
            self._promotions.end(job)
            self._waits.news(job.keys)
            if self._cascades.parked:
                self._end_stores(job.keys)
        if cascades:
            self._cascades.end(cascades)
        if self._write_back is not None:
            self._write_back.end(finished)
        self._planner.end_poll()

    def _end_writes(self, keys: Sequence[OffloadKey]) -> None:
        """Record the end of writes of ``keys`` into host memory: ready blocks answer the requests that wait for them,
        and stored blocks are written to the tiers."""
        if self._waits.claimed:
            blocks = self.primary_tier.slots.get_all(keys)
            self._waits.arrived([key for key, block in zip(keys, blocks) if block is not None and block.is_ready])
            self._waits.gone([key for key, block in zip(keys, blocks) if block is None])
        self._waits.news(keys)
        self._end_stores(keys)

    def _end_stores(self, keys: Sequence[OffloadKey]) -> None:
        for request in self._cascades.end_stores(keys):
            self._close_if_done(request)

    def _split_by_mode(
        self, cascade: Sequence[CascadeMode] | None
    ) -> tuple[tuple[GuardedTier, ...], tuple[GuardedTier, ...]]:
        """Return the tiers that get blocks when they are stored, and the tiers that get blocks before they are
        evicted."""
        if cascade is None:
            return self._tiers, ()
        if len(cascade) != len(self._tiers) or not {*cascade} <= {*get_args(CascadeMode)}:
            raise ConfigError(
                f"cascade needs one of {', '.join(get_args(CascadeMode))} for each of {len(self._tiers)} secondary "
                f"tiers, not {list(cascade)}."
            )
        if "on_evict" in cascade and self.primary_tier.slots.policy.next_victims(0) is None:
            _log.warning(
                "The cache policy cannot name its next victims; blocks are written to all tiers when they are stored."
            )
            return self._tiers, ()
        modes = list(zip(self._tiers, cascade))
        return (
            tuple(tier for tier, mode in modes if mode == "on_store"),
            tuple(tier for tier, mode in modes if mode == "on_evict"),
        )

    def _close_if_done(self, request: TierRequest) -> None:
        """Inform the tiers of the request's end, once nothing more can be submitted for it."""
        if not request.is_ending or request.may_submit:
            return
        request.is_ending = False
        for tier in self._tiers:
            tier.on_request_finished(request.context)
