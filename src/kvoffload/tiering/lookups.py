# SPDX-License-Identifier: Apache-2.0
"""Lookups: the answers that a request gets for its blocks, and the promotions that these begin.

An ask goes through three steps. *Survey* (``Places``) says where each block is. *Plan* says how many of them to load.
*Reserve* begins the promotions, and leaves the answers in the request's ``Prefix``. A request that waits and asks again
gets its answers as a slice, and only what no claim keeps up to date is surveyed again. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvoffload.base import OffloadKey
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.miss import Miss
from kvoffload.tiering.claims import Claims
from kvoffload.tiering.load_policy import LoadPlanner, Place, Plan
from kvoffload.tiering.places import Places, Survey
from kvoffload.tiering.promotions import Promotions
from kvoffload.tiering.requests import Kept, Prefix, Request, Wait
from kvoffload.tiering.tier_jobs import GuardedTier
from kvoffload.tiering.waits import Waits

__all__ = ["Lookups"]


class Lookups:
    """Answers from the primary tier. A block that it lacks is looked up in ``tiers``, in order, and promoted from the
    first that has it, as far as ``planner`` says. ``poll`` takes in the jobs that have ended."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        claims: Claims,
        waits: Waits,
        promotions: Promotions,
        planner: LoadPlanner,
        poll: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._claims = claims
        self._waits = waits
        self._promotions = promotions
        self._planner = planner
        self._poll = poll
        self._clock = clock
        self._places = Places(primary, tiers, claims, promotions)
        self._asking: Request | None = None
        """The request that asked last, in this step."""
        self._plan: Plan | None = None
        """Its plan, in case it will wait for blocks of other groups."""

    def ask(
        self, request: Request, keys: Sequence[OffloadKey], ends: Collection[OffloadKey] | None
    ) -> list[bool | None]:
        """The answers for ``keys`` in order, up to the first ``False``. With ``ends``, a hit that is cut off is of use
        only if its last block is one of them."""
        if not keys:
            return []
        self._take_turn(request)
        self._poll()
        if self._waits.is_over(request):
            answers = self._answer_at_once(request, keys)
        else:
            answers = self._answer(request, keys, ends)
        asked = keys if len(answers) == len(keys) else keys[: len(answers)]
        self._primary.count_lookups(asked, request.context)
        return answers

    def peek(self, request: Request, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """What is somewhere of ``keys``, up to the first ``False``. Only tiers and the reuse filter notice. A block on
        its way is there."""
        self._take_turn(request)
        may_wait = not self._waits.is_over(request)
        answers: list[bool | None] = []
        for key, block in zip(keys, self._primary.slots.get_all(keys), strict=True):
            answer: bool | None = block is not None
            if not answer and may_wait:
                answer = self._places.peek(request, key)
            answers.append(answer)
            if answer is False:
                break
        self._primary.count_peek(keys[: len(answers)], request.context)
        return answers

    def end_step(self) -> None:
        self._waits.end_step(self._places.is_answered)
        if self._asking is not None:
            self.forget()

    def forget(self) -> None:
        """What was found holds no longer: the step has ended, or the cache was reset."""
        self._asking = self._plan = None
        self._places.forget()

    def _take_turn(self, request: Request) -> None:
        """``request`` asks. What another request found in this step is forgotten: its plan and what it peeked at."""
        if request is self._asking:
            return
        self.forget()
        self._asking = request
        if request.wait is not None:  # what it does not ask for again in this step it does not wait for
            for prefix in request.wait.prefixes.values():
                self._waits.set_untracked(prefix, ())

    # -------------------------------------------------------------------------------------------------- answers

    def _answer_at_once(self, request: Request, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """For a request that may not wait: what is not ready is a miss."""
        answers: list[bool | None] = []
        for key, block in zip(keys, self._primary.slots.get_all(keys), strict=True):
            if block is None or not block.is_ready:
                self._waits.expire(request, key if block is not None else None)
                return [*answers, False]
            answers.append(True)
        return answers

    def _answer(
        self, request: Request, keys: Sequence[OffloadKey], ends: Collection[OffloadKey] | None
    ) -> list[bool | None]:
        """For a request that may wait. A range is planned when it is asked for first, and keeps its ``stop``. Once the
        wait has a deadline, its further ranges are not planned."""
        prefix, wait = self._prefix_of(request, keys), request.wait
        survey: Survey | None = None
        declined: Plan | None = None
        if prefix is None:
            prefix = Prefix(request, [*keys])
            self._waits.add(prefix)
            # A prefetch has nothing to weigh: what it does not find is not needed yet.
            if (wait is None or wait.deadline_s is None) and not request.context.is_prefetch:
                survey = self._places.survey(request, keys)
                declined = self._make_plan(prefix, survey, ends)
        if wait is not None and wait.is_late(self._clock()):
            self._stop_late(prefix, wait)
        stop = len(keys) if prefix.stop is None else min(prefix.stop, len(keys))
        if prefix.head >= stop or self._holds(prefix, stop):
            end = stop
        else:
            end = self._reserve(prefix, stop, survey)
        if self._plan is not None and request.wait is not None and request.wait.deadline_s is None:
            now_s = request.wait.planned_s = self._clock()
            request.wait.expected_s = self._plan.wait_s
            request.wait.deadline_s = now_s + self._plan.deadline_s
        if declined is not None:
            self._probe(prefix, declined)
        answers = prefix.answers[:end]
        if prefix.kept is None and False in answers:  # a tier refused a job at once
            return answers[: answers.index(False) + 1]
        return answers if end == len(keys) else [*answers, False]

    def _prefix_of(self, request: Request, keys: Sequence[OffloadKey]) -> Prefix | None:
        """The waiting request's range that has the first of ``keys``, or whose first block is one of ``keys``, from the
        first of ``keys`` to the last; ``None``: it has none. Where it went on with other blocks, those become a range
        of their own."""
        wait = request.wait
        if wait is None:
            return None
        prefix = wait.prefixes.get(keys[0]) or self._move(wait, keys)
        if prefix is None:
            return None
        if prefix.keys == keys:
            return prefix
        prefix.kept = None
        common = min(len(prefix.keys), len(keys))
        if prefix.keys[:common] != [*keys[:common]]:
            common = next(at for at, (old, new) in enumerate(zip(prefix.keys, keys)) if old != new)
            self._claims.split(wait, prefix, common)
            self._waits.set_untracked(prefix, ())
            prefix.keys += keys[common:]
        elif common < len(keys):
            prefix.keys += keys[common:]
        return prefix

    def _move(self, wait: Wait, keys: Sequence[OffloadKey]) -> Prefix | None:
        """The engine's own cache grew or shrank, so that a range begins later than before, or earlier. What was
        declined of it stays declined. (Ranges that are not weighed begin where the search for a window looks.)"""
        if not self._planner.weighs(keys[0]):
            return None
        for old in list(wait.prefixes.values()):
            if keys[0] in old.keys:
                begin = old.keys.index(keys[0])
                new, shift = Prefix(old.request, old.keys[begin:]), -begin
            elif old.keys[0] in keys:
                shift = keys.index(old.keys[0])
                new = Prefix(old.request, [*keys[:shift], *old.keys])
            else:
                continue
            new.stop = None if old.stop is None else max(0, old.stop + shift)
            self._waits.set_untracked(old, ())
            self._claims.release(wait, old, 0)
            del wait.prefixes[old.keys[0]]
            self._waits.add(new)
            return new
        return None

    def _make_plan(self, prefix: Prefix, survey: Survey, ends: Collection[OffloadKey] | None) -> Plan | None:
        """Decides how much of ``prefix`` is loaded. Returns the plan if it declines the rest."""
        keys, verdicts = prefix.keys, prefix.request.verdicts
        useful = None if ends is None else [at for at, key in enumerate(keys, 1) if key in ends]
        plan = self._planner.plan(survey.segments, keys[0], useful)
        if self._planner.weighs(keys[0]):
            self._plan = plan
        if plan.stop == survey.num_blocks:
            return None
        prefix.stop = plan.stop
        for place, reason, blocks in plan.declined:
            new = [key for key in keys[blocks.start : blocks.stop] if verdicts.get(key) is not Miss.DECLINED]
            self._planner.count_declined(place.tier, reason, len(new))
            verdicts.update(dict.fromkeys(new, Miss.DECLINED))
        if not survey.place_at(plan.stop).is_unknown:
            verdicts[keys[plan.stop]] = Miss.DECLINED
        return plan

    def _stop_late(self, prefix: Prefix, wait: Wait) -> None:
        """The deadline has passed: the request takes what has arrived."""
        ready = 0
        for block in self._primary.slots.get_all(prefix.keys[: prefix.stop]):
            if block is None or not block.is_ready:
                break
            ready += 1
        if ready == (len(prefix.keys) if prefix.stop is None else prefix.stop):
            return
        key = prefix.keys[ready]
        is_here = self._primary.slots.get(key) is not None
        place = self._promotions.place_of(key) if is_here else self._places.below(prefix.request, key)
        if place is not None:
            self._planner.count_declined(place.tier, "late", prefix.answers[ready:].count(None))
            prefix.request.verdicts[key] = Miss.DECLINED
        prefix.stop = ready
        self._claims.release(wait, prefix, ready)
        self._waits.set_untracked(prefix, ())

    # ------------------------------------------------------------------------------------------------- reserve

    def _reserve(self, prefix: Prefix, stop: int, survey: Survey | None) -> int:
        """Answers for the blocks of ``prefix`` from its head up to ``stop``, and begins their promotions. Returns how
        many blocks have an answer before the first miss."""
        at = prefix.head
        progress = self._places.progress()
        untracked: list[int] = []
        num_unknown = 0
        prefix.kept = None
        while at < stop:
            if survey is None:
                survey = self._places.survey(prefix.request, prefix.keys[at:stop], at)
            for place, num_blocks in survey.segments:
                if at == stop:
                    break  # the rest is declined
                end = min(at + num_blocks, stop)
                if place.is_unknown or self._gives_way(prefix.request, place):
                    self._waits.begin(prefix)
                    prefix.answers[at:end] = [None] * (end - at)
                    untracked += range(at, end)
                    num_unknown += (end - at) * place.is_unknown
                    at = end
                elif place.tier is None or place.is_arriving:
                    at = self._take_resident(prefix, at, end, untracked)
                else:
                    absent = self._end_of_absent(prefix.keys, at, end)
                    at = self._promotions.begin(self._tiers[place.tier], prefix, at, absent)
                    if at < absent:
                        return self._settle(prefix, at, untracked)
                if at < end:
                    break  # a promotion begun meanwhile has changed where the next block is
            else:
                if survey.is_end:
                    return self._settle(prefix, at, untracked)
            survey = None
        if num_unknown and num_unknown == len(untracked) and progress is not None:
            prefix.kept = Kept(progress, prefix.head, stop, untracked)
        return self._settle(prefix, at, untracked)

    def _holds(self, prefix: Prefix, stop: int) -> bool:
        """Whether the answers of ``prefix`` up to ``stop`` still hold: no tier knows more of its unknown blocks."""
        kept = prefix.kept
        if kept is None or kept.stop != stop or kept.head != prefix.head or kept.progress != self._places.progress():
            return False
        self._waits.set_untracked(prefix, kept.untracked)
        return True

    def _gives_way(self, request: Request, place: Place) -> bool:
        """Whether blocks in ``place`` are not to be promoted yet, because others wait for what is being read."""
        is_below = place.tier is not None and not place.is_arriving
        return request.context.is_prefetch and is_below and self._promotions.are_waited_for()

    def _settle(self, prefix: Prefix, end: int, untracked: list[int]) -> int:
        """The first ``end`` blocks of ``prefix`` have answers: all that were asked for, or those before a miss. Records
        which of them no claim keeps up to date, and returns ``end``."""
        wait = prefix.request.wait
        if wait is not None:
            self._waits.set_untracked(prefix, untracked)
        return end

    def _take_resident(self, prefix: Prefix, start: int, stop: int, untracked: list[int]) -> int:
        """Answers for blocks of the primary tier, ready or on their way. Returns the first that is no longer there."""
        wait = prefix.request.wait
        for at, block in enumerate(self._primary.slots.get_all(prefix.keys[start:stop]), start):
            if block is None:
                return at
            prefix.answers[at : at + 1] = [block.is_ready or None]
            if wait is None and not block.is_ready:
                wait = self._waits.begin(prefix)
            if wait is not None:
                if self._claims.claim(wait, prefix, at):
                    prefix.head += prefix.head == at
                elif not block.is_ready and not self._claims.is_held(prefix, at):
                    untracked.append(at)
        return stop

    def _end_of_absent(self, keys: Sequence[OffloadKey], start: int, stop: int) -> int:
        """The first of these blocks that the primary tier has by now, or that is named twice."""
        blocks = self._primary.slots.get_all(keys[start:stop])
        stop = next((at for at, block in enumerate(blocks, start) if block is not None), stop)
        if len(set(keys[start:stop])) == stop - start:
            return stop
        seen: set[OffloadKey] = set()
        return next(at for at, key in enumerate(keys[start:stop], start) if key in seen or seen.add(key))  # type: ignore[func-returns-value]

    def _probe(self, prefix: Prefix, plan: Plan) -> None:
        """Measures each tier of which blocks are declined, if that is due, with the first of them."""
        probed: set[int] = set()
        for place, _, blocks in plan.declined:
            if place.tier is not None and place.tier not in probed:
                probed.add(place.tier)
                keys = prefix.keys[blocks.start : blocks.stop][: self._planner.probe_blocks(place.tier)]
                keys = [key for key in dict.fromkeys(keys) if self._primary.slots.get(key) is None]
                self._promotions.probe(self._tiers[place.tier], keys, prefix.request)
