# SPDX-License-Identifier: Apache-2.0
"""The control plane of tiering: one primary tier, any number of tiers below it, and the cascades down to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
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
)
from kvoffload.config import DEFAULTS
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.lost_blocks import LostBlocks
from kvoffload.metrics import Stats, add_stats
from kvoffload.tiering.base import CascadeMode, SecondaryTierManager
from kvoffload.tiering.load_policy import BlockWorth, LoadCosts
from kvoffload.tiering.promotions import Claims, Lookups, Promotions, RequestState, WaitingRequests
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob, TierJobs
from kvoffload.tiering.write_back import WriteBack

__all__ = ["Cascades", "TieringOffloadingManager"]

_log = logging.getLogger(__name__)


class TieringOffloadingManager(OffloadingManager):
    """Keeps blocks in host memory and in the tiers below it, and promotes them again. All bytes pass through the
    primary tier; every call is on the scheduler's thread and does no I/O.

    ``lookup_prefix`` equals the loop of ``lookup``, except with ``block_worth``, which weighs the blocks of a call
    together.

    Eight laws hold (``docs/design/0006-tiering.md``). Every stored block is cascaded to every tier. A miss that a tier
    can serve is promoted once, whoever asks. Tiers that want whole requests get them. A tier is informed of a request's
    end after its last job. A failed promotion is a miss. Nobody waits longer than ``max_wait_s``. What a waiting
    request hit stays until it loads. Slots under I/O are nobody else's.

    ``claim_share`` and ``promotion_share`` (of the primary tier's blocks) bound what one waiting request, and all of
    them together, may claim. ``cascade`` has a mode for each secondary tier (default ``"on_store"`` for all, which is
    write-through). ``"on_evict"``, write-back, needs a cache policy that can name its next victims
    (``CachePolicy.next_victims``), and is ``"on_store"`` without one. With ``block_worth``, blocks of lower tiers are
    promoted only where that is expected to be faster than computing them (``load_policy="cost"``); without it all are
    (``"always"``). ``clock`` gives seconds and never goes back.
    Raises ``ConfigError`` for a ``cascade`` that does not fit the tiers.

    A context that was never announced by ``on_new_request`` is a new block-level request, and like any other is
    remembered until ``on_request_finished``.
    """

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager] | None = None,
        *,
        max_wait_s: float = DEFAULTS.max_wait_s,
        claim_share: float = DEFAULTS.claim_share,
        promotion_share: float = DEFAULTS.promotion_share,
        cascade: Sequence[CascadeMode] | None = None,
        block_worth: BlockWorth | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.primary_tier = primary_tier
        self.secondary_tiers: tuple[SecondaryTierManager, ...] = tuple(secondary_tiers or ())
        self._tiers = tuple(GuardedTier(index, tier) for index, tier in enumerate(self.secondary_tiers))
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._jobs = TierJobs()
        self._cascades = Cascades(primary_tier, self._jobs)
        self._on_store_tiers, on_evict_tiers = self._split_by_mode(cascade)
        self._write_back: WriteBack | None = None
        if on_evict_tiers:
            self._write_back = WriteBack(primary_tier, on_evict_tiers, self._submit_write_back)
        self._claims = Claims(primary_tier.num_blocks, claim_share, promotion_share)
        self._waiting = WaitingRequests(self._claims, clock)
        self._costs: LoadCosts | None = None
        if block_worth is not None:
            self._costs = LoadCosts([tier.name for tier in self._tiers], block_worth, clock)
        on_reserved = self._write_back.on_reserved if self._write_back is not None else None
        self._promotions = Promotions(primary_tier, self._claims, self._jobs, on_reserved, self._costs)
        self._lookups = Lookups(
            primary_tier, self._tiers, self._claims, self._promotions, self._waiting, self._poll, self._costs
        )
        self._requests: dict[str, RequestState] = {}
        self._storing: dict[OffloadKey, RequestState] = {}

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
            return  # it ended before, or was never announced: tiers are informed of each end once
        if self._promotions.queue:
            self._promotions.submit(request)
        self._waiting.end(request)
        request.finished = True
        self._finalize(request)

    # -------------------------------------------------------------------------------------------------- reading

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if not self._tiers:
            return self.primary_tier.lookup(key, req_context)
        return self._lookups.one(self._request(req_context), key)

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if not self._tiers:
            return self.primary_tier.lookup_prefix(keys, req_context)
        return self._lookups.prefix(self._request(req_context), keys)

    def peek(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if not self._tiers:
            return self.primary_tier.peek(keys, req_context)
        return self._lookups.peek(self._request(req_context), keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self.primary_tier.prepare_load(keys, req_context)
        # Pinned now: no claims are needed any more.
        request = self._request(req_context)
        if self._costs is not None and request.plan is not None:
            self._costs.count_wait(request.plan, request.answered_since)
        self._waiting.end(request)
        return spec

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
        self._waiting.end(request)  # it runs
        keys = list(keys)
        output = self.primary_tier.prepare_store(keys, req_context, self._claims)
        if output is None:
            return None
        self._claims.note_changed(output.evicted_keys)  # a claim is no pin
        if self._write_back is not None:
            self._write_back.on_reserved(len(output.keys_to_store), output.evicted_keys)
        for key in output.keys_to_store:
            self._storing[key] = request
        request.stores_in_flight += len(output.keys_to_store)
        if request.whole_request_tiers:
            # Blocks that this very request is writing are cascaded in its name when they are complete.
            others = [key for key in dict.fromkeys(keys) if self._storing.get(key) is not request]
            self._cascades.submit_or_park(request, others)
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        keys = list(keys)
        self.primary_tier.complete_store(keys, req_context, success)
        self._end_stores(keys)

    # ----------------------------------------------------------------------------------------------------- steps

    def note_step(self, work: StepWork) -> None:
        if self._costs is not None:
            self._costs.note_step(work)

    def on_schedule_end(self) -> None:
        self._poll()
        self._lookups.end_step(self._clock())
        self._waiting.end_step()
        if self._promotions.queue:
            self._promotions.submit()
        if self._cascades.parked:
            for request in self._cascades.retry_parked():
                self._finalize(request)
        if self._write_back is not None:
            self._write_back.step()
        for tier in self._tiers:
            tier.on_schedule_end()

    def has_pending_work(self) -> bool:
        return (
            bool(self._promotions.queue or self._cascades.parked)
            or (self._write_back is not None and self._write_back.has_queued)
            or any(tier.has_pending_work() for tier in self._tiers)
        )

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [*self.primary_tier.take_events(), *(event for tier in self._tiers for event in tier.take_events())]

    def reset_cache(self) -> None:
        """Forgets every block of the primary tier; the tiers below keep theirs. The connector asks for other keys from
        then on, unless the tiers' blocks are to be used again.

        Tiers are drained first, each until its own deadline. Slots that an unfinished job may still touch
        stay reserved until it ends.
        """
        for tier in self._tiers:
            tier.drain_jobs()
        self._poll()
        self._lookups.forget_found()
        self._waiting.reset()
        self._promotions.reset()
        self._jobs.mark_stale()
        self._claims.clear()
        if self._write_back is not None:
            self._write_back.reset()
        touched = self._cascades.drop_parked()
        for request in self._storing.values():
            request.stores_in_flight = 0
            touched.append(request)
        self._storing.clear()
        self.primary_tier.reset_cache()
        for request in touched:
            self._finalize(request)

    def get_stats(self) -> Stats:
        own: Stats = {("lookups_out_of_patience",): self._lookups.out_of_patience}
        own |= {("promotions", outcome): count for outcome, count in self._promotions.outcomes.items()}
        own |= {("promotions_refused", reason): count for reason, count in self._promotions.refused.items()}
        own |= {("cascades", outcome): count for outcome, count in self._cascades.outcomes.items()}
        own["cascades", "dropped"] = self._write_back.dropped if self._write_back is not None else 0
        own[("cascades_parked",)] = self._cascades.num_parked
        own[("promotions_in_flight",)] = len(self._promotions)
        own[("claimed_blocks",)] = len(self._claims)
        own |= self._waiting.waits.stats()
        if self._costs is not None:
            own |= self._costs.get_stats()
        return add_stats([self.primary_tier.get_stats(), own, *(tier.get_stats() for tier in self._tiers)])

    def watch_losses(self, lost: LostBlocks) -> None:
        self.primary_tier.watch_losses(lost)
        for tier in self._tiers:
            tier.watch_losses(lost)

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        found = self.primary_tier.holds(keys)
        for tier in self._tiers:
            if missing := [key for key, is_here in zip(keys, found, strict=True) if not is_here]:
                below = iter(tier.holds(missing))
                found = [is_here or next(below, False) for is_here in found]
        return found

    def shutdown(self) -> None:
        if self._write_back is not None:
            for tier in self._tiers:
                tier.drain_jobs()
            self._poll()
            self._write_back.close(self._poll, self._clock, self._max_wait_s)
        for tier in self._tiers:
            tier.shutdown()
        self.primary_tier.shutdown()

    def check_invariants(self) -> None:
        """Recomputes every count from scratch. For tests: O(everything)."""
        self.primary_tier.check_invariants()
        self._promotions.check_invariants()
        self._cascades.check_invariants()
        if self._write_back is not None:
            self._write_back.check_invariants(self._jobs.in_flight.values())
        ending = {id(request): request for request in self._storing.values()}
        requests = {id(request): request for request in self._requests.values()} | ending
        for request in requests.values():
            assert request.stores_in_flight == sum(storing is request for storing in self._storing.values())
        self._waiting.check_invariants(requests.values())
        self._lookups.check_invariants(requests.values())
        for key in self._storing:
            block = self.primary_tier.slots.get(key)
            assert block is not None
            assert not block.is_ready
            assert key not in self._promotions
        self._claims.check_invariants(list(requests.values()), set(self._promotions))

    def _request(self, req_context: ReqContext) -> RequestState:
        request = self._requests.get(req_context.req_id)
        if request is None:
            request = self._requests[req_context.req_id] = RequestState(req_context, self._max_wait_s)
        return request

    # ------------------------------------------------------------------------------------------------- job ends

    def _poll(self) -> bool:
        """Takes in the jobs that have ended; returns whether there were any."""
        if not self._jobs.in_flight:
            return False
        finished = self._jobs.take_finished()
        for job in finished:
            if not job.metadata.is_promotion:
                self._cascades.end(job)
            else:
                self._promotions.end(job)
                self._end_stores(job.metadata.keys)
            if self._write_back is not None:
                self._write_back.end(job)
        if not finished:
            return False
        if self._costs is not None:
            self._costs.end_poll()
        now_s = self._clock()
        ended_s = max(now_s if job.ended_s is None else min(job.ended_s, now_s) for job in finished)
        self._lookups.note_arrivals(ended_s)
        return True

    def _end_stores(self, keys: Sequence[OffloadKey]) -> None:
        """Writes of ``keys`` into the primary tier have ended: cascades the blocks that were stored.

        A store has ended when its block is no longer in flight. That may be later than its own end: while a write from
        before a reset overlaps with it, the primary tier publishes neither until both have ended. The last of them may
        be a late promotion.
        """
        self._claims.note_changed(keys)
        written: dict[int, tuple[RequestState, list[OffloadKey]]] = {}
        ending = [key for key in dict.fromkeys(keys) if key in self._storing]
        blocks = self.primary_tier.slots.get_all(ending) if ending else ()
        for key, block in zip(ending, blocks):
            if block is not None and block.pins < 0:
                continue  # still in flight
            request = self._storing.pop(key)
            request.stores_in_flight -= 1
            ready = written.setdefault(id(request), (request, []))[1]
            if block is not None:
                ready.append(key)
        for request, ready in written.values():
            self._cascades.submit(self._tiers_to_store(request), ready, request.context)
        unparked = self._cascades.retry_parked(keys) if self._cascades.parked else []
        for request in (*(request for request, _ in written.values()), *unparked):
            self._finalize(request)

    def _split_by_mode(
        self, cascade: Sequence[CascadeMode] | None
    ) -> tuple[tuple[GuardedTier, ...], tuple[GuardedTier, ...]]:
        """The tiers that get blocks when they are stored, and those that get them before they are evicted."""
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

    def _tiers_to_store(self, request: RequestState) -> Sequence[GuardedTier]:
        """The tiers that get blocks of ``request`` as soon as they are stored."""
        if self._write_back is None:
            return self._tiers
        whole = request.whole_request_tiers
        return [tier for tier in self._tiers if tier in whole or tier in self._on_store_tiers]

    def _submit_write_back(self, tier: GuardedTier, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        assert self._write_back is not None
        for refused in self._cascades.submit([tier], keys, context):
            self._write_back.end(refused)

    def _finalize(self, request: RequestState) -> None:
        """Informs the tiers of the request's end, once it has ended and nothing more can be submitted for it."""
        if not request.finished or request.may_still_submit:
            return
        request.finished = False  # only once
        for tier in self._tiers:
            tier.on_request_finished(request.context)


# ------------------------------------------------------------------------------------------------------------- cascades


class Cascades:
    """Pins blocks, once per tier, and submits them; the end of each job gives its own pins back.

    A request-level tier may ask for a block that is still being written. Such a block is *parked* here until it is
    ready, and then cascaded, or until it is gone, and then dropped.
    """

    def __init__(self, primary: CPUPrimaryTierOffloadingManager, jobs: TierJobs) -> None:
        self._primary = primary
        self._jobs = jobs
        self.parked: dict[OffloadKey, list[RequestState]] = {}
        """Blocks that are being written, with the requests they will be cascaded for. Others only read it."""
        self._blocks_written = 0
        self._blocks_failed = 0

    def __repr__(self) -> str:
        return f"Cascades(parked={self.num_parked})"

    @property
    def num_parked(self) -> int:
        return sum(map(len, self.parked.values()))

    @property
    def outcomes(self) -> dict[str, int]:
        """Blocks whose cascade ended, by outcome."""
        return {"ok": self._blocks_written, "failed": self._blocks_failed}

    def submit(self, tiers: Iterable[GuardedTier], keys: Sequence[OffloadKey], context: ReqContext) -> list[TierJob]:
        """Submits ready blocks to each of ``tiers``, as one job per tier. Returns the jobs that were not taken."""
        not_taken: list[TierJob] = []
        if not keys:
            return not_taken
        for tier in tiers:
            spec = self._primary.prepare_read(keys, context)
            refused = self._jobs.submit(tier, keys, spec.block_ids, context, is_promotion=False)
            if refused is not None:
                self.end(refused)
                not_taken.append(refused)
        return not_taken

    def end(self, job: TierJob) -> None:
        """Gives back the pins of a job that has ended."""
        self._blocks_written += len(job.succeeded)
        self._blocks_failed += len(job.failed)
        self._primary.complete_read(job.metadata.keys, job.metadata.req_context)

    def submit_or_park(self, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        """Submits the ready ones of ``keys`` to the tiers that want the whole of ``request``, and parks those that are
        being written. Absent blocks are skipped: there is nothing to read."""
        ready: list[OffloadKey] = []
        for key in keys:
            block = self._primary.slots.get(key)
            if block is None:
                continue
            if block.is_ready:
                ready.append(key)
            else:
                self.parked.setdefault(key, []).append(request)
                request.parked += 1
        self.submit(request.whole_request_tiers, ready, request.context)

    def retry_parked(self, keys: Iterable[OffloadKey] | None = None) -> list[RequestState]:
        """Looks again at the parked blocks (those of ``keys``, or all); returns the requests that have fewer now."""
        if not self.parked:
            return []
        again: dict[int, tuple[RequestState, list[OffloadKey]]] = {}
        for key in list(self.parked) if keys is None else keys:
            if key not in self.parked:
                continue
            block = self._primary.slots.get(key)
            if block is not None and not block.is_ready:
                continue
            for request in self.parked.pop(key):
                request.parked -= 1
                again.setdefault(id(request), (request, []))[1].append(key)
        for request, ready in again.values():
            self.submit_or_park(request, ready)
        return [request for request, _ in again.values()]

    def drop_parked(self) -> list[RequestState]:
        """Forgets every parked block; returns the requests that had any."""
        requests = {id(request): request for parked in self.parked.values() for request in parked}
        for request in requests.values():
            request.parked = 0
        self.parked.clear()
        return list(requests.values())

    def check_invariants(self) -> None:
        """Every parked block is being written, and every request counts its own."""
        counts: dict[int, int] = {}
        for key, requests in self.parked.items():
            block = self._primary.slots.get(key)
            assert block is not None
            assert not block.is_ready, f"{key!r} is parked although it is ready"
            for request in requests:
                assert request.whole_request_tiers
                counts[id(request)] = counts.get(id(request), 0) + 1
        for requests in self.parked.values():
            for request in requests:
                assert request.parked == counts[id(request)]
