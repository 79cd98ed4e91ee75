# SPDX-License-Identifier: Apache-2.0
"""Lookups: the answers that a request gets for its blocks, and the reads from lower tiers that they start.

A lookup has four steps. *Ask*: take in the events since the last lookup; a caller who asks ``is_unchanged`` need not
look up again. *Survey* (``Places``): find where each block is. *Plan*: decide how many of them to load. *Reserve*: take
slots, and start the reads. Between two steps, the only state is the wait. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvoffload.base import OffloadKey
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.miss import Miss
from kvoffload.tiering.load_policy import LoadPlanner
from kvoffload.tiering.places import Places
from kvoffload.tiering.plans import Plan, SoFar
from kvoffload.tiering.promotions import Promotions
from kvoffload.tiering.requests import TierRequest, Unanswered, Wait
from kvoffload.tiering.segments import Place, Segment, marks, split, waited_tiers
from kvoffload.tiering.tier_jobs import GuardedTier
from kvoffload.tiering.waits import Waits


class Lookups:
    """Answers requests for their blocks. Blocks that host memory lacks are looked up in ``tiers`` and read from there,
    as many as ``planner`` says. ``poll`` collects the jobs that have ended."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        waits: Waits,
        promotions: Promotions,
        planner: LoadPlanner,
        poll: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._waits = waits
        self._promotions = promotions
        self._planner = planner
        self._poll = poll
        self._clock = clock
        self._places = Places(primary, tiers, waits, promotions, planner, clock)
        self.num_planned_again = 0
        """Number of plans that replaced another plan of the same wait."""
        self.num_ended_early = 0
        """Number of waits that fell too far behind, and ended before all planned blocks had arrived."""
        self._last: TierRequest | None = None
        """The request that asked last, in this step."""
        for tier in tiers:
            tier.take_news()  # A tier records news from its first call on, and a lookup may come before a step ends.

    def ask(
        self, request: TierRequest, keys: Sequence[OffloadKey], ends: Collection[OffloadKey] | None
    ) -> list[bool | None]:
        """Return the answers for ``keys`` in order, up to the first ``False``. Starts reads, and a wait for them. With
        ``ends``, a part of a hit is useful only if its last block is one of them."""
        if not keys:
            return []
        is_first, self._last = request is not self._last, request
        may_wait = request.wait is None and not self._waits.is_over(request)
        if is_first and may_wait and self._is_nowhere(request, keys[0]):
            for tier in self._tiers:
                tier.lookup(keys[0], request.context)  # counts the miss
            self._waits.found_nothing(request, keys[0])
            self._primary.count_lookups(keys[:1], request.context)
            return [False]
        missing = None if is_first else request.missing  # of another group
        self._waits.forget_missing(request)
        self._take_in()
        if self._waits.is_over(request):
            answers = self._answer_at_once(request, keys)
        else:
            wait, is_ahead = self._waits.of(request), request.context.tokens_ahead is not None
            if is_ahead and (is_first or not wait.is_ahead):
                self._waits.look_ahead(wait)
            elif wait.is_ahead and not is_ahead:
                self._waits.take_turn(wait)
            if is_first and wait.is_dirty:
                self._waits.restart(wait)
            answers = self._look_up(wait, keys, ends)
            if missing is not None:
                self._waits.tell(wait, [missing], [False], Unanswered())
        asked = keys if len(answers) == len(keys) else keys[: len(answers)]
        self._primary.count_lookups(asked, request.context)
        return answers

    def is_unchanged(self, request: TierRequest) -> bool:
        """Return whether another lookup of a request that waits would neither end its wait nor start further reads, or
        whether nothing has been heard of the first block of a request that found nothing."""
        wait = request.wait
        if wait is None:  # at its turn, the tiers are asked again, because others may have written to them
            return request.missing is not None and (
                request.context.tokens_ahead is not None or self._is_nowhere(request, request.missing)
            )
        if request.context.tokens_ahead is not None:  # also if it has had its turn, and waits for GPU blocks
            return self._waits.is_settled(wait) and not wait.declined
        if wait.is_ahead:
            return False  # its turn has come
        self._take_in()
        return self._waits.is_settled(wait) and not self._waits.is_over(request) and not self._is_due(wait)

    def where(self, request: TierRequest, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Return for each of ``keys`` whether host memory or a tier has it; ``None``: not known yet. Changes nothing
        except that tiers may ask their stores."""
        answers: list[bool | None] = [block is not None for block in self._primary.slots.get_all(keys)]
        return answers if self._waits.is_over(request) else self._places.where(request, keys, answers)

    def end(self, request: TierRequest) -> None:
        """The request has ended."""
        self._places.end(request)

    def end_step(self) -> None:
        self._last = None
        if self._take_news():
            self._waits.news([*self._waits.watched])
        self._waits.end_step(self._places.is_unanswered)
        self._places.measure()

    def _is_nowhere(self, request: TierRequest, key: OffloadKey) -> bool:
        """Return whether the block is certainly neither in host memory nor in a tier that the request may use. A tier
        that does not know asks its store."""
        if self._primary.slots.get(key) is not None:
            return False
        return all(tier.lookup_each((key,), request.context) == [False] for tier in self._tiers)

    def _take_in(self) -> None:
        """Take in the jobs that have ended and the tiers' news."""
        self._poll()
        if self._waits.watched:
            self._take_news()

    def _take_news(self) -> bool:
        """Mark the waits that news of the tiers concern, and return whether some tier cannot tell what is new."""
        cannot_tell = False
        for tier in self._tiers:
            news = tier.take_news()  # although no request may wait, because a tier keeps its news until they are taken
            if news is None or news:
                self._places.note_news(tier, news)
                self._waits.news(news or ())
                cannot_tell |= news is None
        return cannot_tell

    # -------------------------------------------------------------------------------------------------- answers

    def _answer_at_once(self, request: TierRequest, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Answer a request that may not wait. Every block that is not ready is a miss."""
        answers: list[bool | None] = []
        for key, block in zip(keys, self._primary.slots.get_all(keys), strict=True):
            if block is None or not block.is_ready:
                self._waits.expire(request, key if block is not None else None)
                return [*answers, False]
            answers.append(True)
        return answers

    def _look_up(
        self, wait: Wait, keys: Sequence[OffloadKey], ends: Collection[OffloadKey] | None
    ) -> list[bool | None]:
        """Answer a request that may wait."""
        keys = [*keys]  # the wait keeps them
        request, is_planned = wait.request, wait.is_planned(keys)
        is_due = self._is_due(wait)
        # Without a plan for these blocks (they belong to another group, for example), there is nothing to plan again.
        if is_due and not is_planned and wait.is_late(self._clock()):
            self._stop_late(wait, keys)
        is_due &= is_planned
        stop = wait.stop_of(keys)
        answers: list[bool | None] = []
        unanswered = Unanswered()
        if stop or is_due:
            # Survey.
            survey = self._places.survey(request, keys[:stop])
            # Plan.
            plan: Plan | None = None
            is_nowhere = not survey and wait.plan is None
            if is_nowhere or not self._planner.weighs(keys[0]) or (wait.plan is not None and not is_planned):
                segments = self._planner.sources(survey)
            else:
                # Later blocks are not weighed: the request cannot claim them, so they may be evicted while it waits.
                num_weighed = self._waits.num_claimable(keys, survey)
                weighed, rest = split(survey, num_weighed)
                if not is_due and wait.plan is not None and marks(weighed) == wait.marks:
                    # Nothing new is known, so the request goes on waiting for the same tiers.
                    held = Place((), waited_tiers(wait.plan.segments))
                    segments = tuple(Segment(held if place.is_below else place, count) for place, count in weighed)
                else:
                    plan = self._plan(wait, keys, weighed, ends)
                    segments = plan.segments
                if plan is None or plan.stop == num_weighed:
                    segments += self._planner.sources(rest)
                else:
                    stop = plan.stop
            # Reserve.
            self._reserve(wait, keys[:stop], segments, answers, unanswered)
            if plan is not None:
                if not unanswered.lacks_room:
                    self._waits.note_reads(wait, plan)
                self._probe(wait, keys, plan)
                if is_due:
                    self._look_again(wait)
        if len(answers) < len(keys):
            answers.append(False)
            if not request.readable(keys[len(answers) - 1 : len(answers)]):
                self._waits.let_go(wait, keys[len(answers) :])
        self._waits.tell(wait, keys, answers, unanswered)
        return answers

    def _is_due(self, wait: Wait) -> bool:
        """Return whether the wait needs another plan: its deadline has passed, or one of its reads is late."""
        if wait.elapsed_s(self._clock()) < wait.due_s or not wait.is_awaiting:
            return False
        assert wait.plan is not None
        if wait.is_late(self._clock()) or self._planner.is_late(wait.plan):
            return True
        self._look_again(wait)
        return False

    def _look_again(self, wait: Wait) -> None:
        """Keep the wait's plan for now, and check it again later."""
        assert wait.plan is not None
        assert wait.deadline_s is not None
        left_s = wait.deadline_s - wait.elapsed_s(self._clock())
        self._waits.look_again(wait, min(self._planner.due_s(wait.plan), left_s))

    # ---------------------------------------------------------------------------------------------------- plan

    def _plan(
        self, wait: Wait, keys: Sequence[OffloadKey], survey: Sequence[Segment], ends: Collection[OffloadKey] | None
    ) -> Plan:
        """Plan how many of the surveyed blocks to load, and the tier of each. ``survey`` covers the first ``keys``."""
        request = wait.request
        useful = None if ends is None else [at for at, key in enumerate(keys, 1) if key in ends]
        so_far, seen_s = SoFar(len(keys)), self._clock()
        if wait.plan is not None and wait.deadline_s is not None:
            self.num_planned_again += 1
            seen_s = self._waits.seen_s(wait, is_news=marks(survey) != wait.marks)
            spent_s = seen_s - wait.began_s
            so_far = SoFar(len(keys), spent_s, wait.deadline_s - spent_s, wait.plan.num_paid)
        begun = self._promotions.begun(keys, survey)
        plan = self._planner.plan(survey, keys[0], useful, so_far, request.context, begun)
        self._waits.plan(wait, keys, plan, marks(survey, plan.segments), seen_s)
        rest = split(survey, plan.stop)[1]
        if not rest:
            return plan
        self.num_ended_early += plan.is_lost
        self._waits.decline(wait, keys, plan.stop)
        for tier, reason, blocks, _ in plan.declined:
            new = [key for at in blocks if request.verdicts.get(key := keys[at]) is not Miss.DECLINED]
            self._planner.count_declined(tier, reason, len(new))
            self._waits.refuse(request, new, Miss.DECLINED)
        if not rest[0].place.is_unknown or plan.is_lost:
            self._waits.refuse(request, [keys[plan.stop]], Miss.DECLINED)
        else:
            at = plan.stop
            for place, num_blocks in rest:
                if place.is_unknown:
                    self._waits.refuse(request, keys[at : at + num_blocks], Miss.SLOW_ANSWER)
                at += num_blocks
        return plan

    def _stop_late(self, wait: Wait, keys: Sequence[OffloadKey]) -> None:
        """Let the request use only the blocks that have arrived, because its deadline has passed."""
        stop, ready = wait.stop_of(keys), 0
        for block in self._primary.slots.get_all(keys[:stop]):
            if block is None or not block.is_ready:
                break
            ready += 1
        if ready == stop:
            return
        for place, _ in self._places.survey(wait.request, keys[ready : ready + 1]):
            tier = next(iter(place.tiers or place.unknown), None)
            self._planner.count_declined(tier, "late", wait.num_awaited_of(keys[ready:stop]))
            self._waits.refuse(wait.request, [keys[ready]], Miss.DECLINED)
        self._waits.decline(wait, keys, ready)

    def _probe(self, wait: Wait, keys: Sequence[OffloadKey], plan: Plan) -> None:
        """If the plan declines blocks of a tier that is due for a measurement, read the first of them in the
        background."""
        probed: set[int] = set()
        for _, _, blocks, tiers in plan.declined:
            for tier in tiers:
                if tier not in probed:
                    probed.add(tier)
                    declined = [keys[at] for at in blocks[: self._planner.probe_blocks(tier)]]
                    absent = [key for key in dict.fromkeys(declined) if self._primary.slots.get(key) is None]
                    self._promotions.probe(self._tiers[tier], absent, wait)

    # ------------------------------------------------------------------------------------------------- reserve

    def _reserve(
        self,
        wait: Wait,
        keys: Sequence[OffloadKey],
        segments: Sequence[Segment],
        answers: list[bool | None],
        unanswered: Unanswered,
    ) -> None:
        """Add the answers for ``keys``, whose places are ``segments``, and start their reads. Ends earlier where
        ``segments`` end, or if host memory is full."""
        while segments and len(answers) < len(keys):
            for place, num_blocks in segments:
                first, end = len(answers), min(len(answers) + num_blocks, len(keys))
                if not place.is_below:
                    answers += self._waits.found(wait, keys[first:end])
                elif place.tiers:
                    absent = self._end_of_absent(keys, first, end)
                    begun = self._promotions.begin(self._tiers[place.tiers[0]], wait, keys[first:absent])
                    answers += [None] * begun
                    if first + begun < absent:
                        unanswered.lacks_room = True
                        return
                else:
                    self._waits.begin(wait)
                    answers += [None] * (end - first)
                    unanswered.waited.update(place.unknown)
                if len(answers) < end or end == len(keys):
                    break
            else:
                return
            if len(answers) < len(keys):
                # An earlier read has taken the slot of this block, or the block occurs twice.
                segments = self._planner.sources(self._places.survey(wait.request, keys[len(answers) :]))

    def _end_of_absent(self, keys: Sequence[OffloadKey], start: int, stop: int) -> int:
        """Return the index of the first block that host memory has by now or that occurs twice, or ``stop``."""
        blocks = self._primary.slots.get_all(keys[start:stop])
        stop = next((at for at, block in enumerate(blocks, start) if block is not None), stop)
        if len(set(keys[start:stop])) == stop - start:
            return stop
        seen: set[OffloadKey] = set()
        return next(at for at, key in enumerate(keys[start:stop], start) if key in seen or seen.add(key))  # type: ignore[func-returns-value]
