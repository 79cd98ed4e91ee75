# SPDX-License-Identifier: Apache-2.0
"""What a request is told of its blocks: ready, not here, or on the way up from a tier below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from kvoffload.base import OffloadKey
from kvoffload.tiering.guard import GuardedTier
from kvoffload.tiering.primary import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.promotions import Promotions
from kvoffload.tiering.requests import RequestState
from kvoffload.tiering.waiting import Claims
from kvoffload.tiering.waits import Waits

__all__ = ["Lookups"]


class Lookups:
    """Answers from the primary tier; what it lacks is asked of the ``tiers`` below in order, and the first that has it
    brings it up. ``poll`` hears which jobs have ended, and says whether any had."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        claims: Claims,
        promotions: Promotions,
        waits: Waits,
        poll: Callable[[], bool],
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._claims = claims
        self._promotions = promotions
        self._waits = waits
        self._poll = poll
        self.out_of_patience = 0

    def one(self, request: RequestState, key: OffloadKey) -> bool | None:
        return self._answer(request, key, self._primary.lookup(key, request.context))

    def prefix(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """The loop of ``one``, but for that misses in a row which a tier can serve get their slots in one go.

        Such a run ends before anything that its reservations could change: a key of its own, a block that the primary
        tier has, a limit, or the end of the room that is certain to be there.
        """
        look, context = self._primary.lookup, request.context
        is_impatient = self._waits.is_over(request)
        answers = [] if is_impatient else self._held_head(request, keys)
        if was_taken := answers[-1:] == [False]:
            answers.pop()
        run: dict[OffloadKey, GuardedTier] = {}
        room = 0
        for key in keys[len(answers) :]:
            if key in run and not self._promote_run(request, run, answers):
                return answers
            answer = False if was_taken else look(key, context)
            was_taken = False
            tier = None
            if answer is False and not is_impatient:
                if not run:
                    room = self._certain_room(request)
                tier, answer = self._tier_with(request, key)
                if tier is not None and len(run) < room and key not in self._claims:
                    run[key] = tier
                    answers.append(None)
                    continue
                if run and not self._promote_run(request, run, answers):
                    return answers
                if tier is not None:
                    answer = self._promote(request, key, tier)
                elif answer is None:
                    self._waits.begin(request)
            else:
                if run:
                    if not self._promote_run(request, run, answers):
                        return answers
                    answer = self._peek(key)  # the run may have evicted it
                answer = self._answer(request, key, answer)
            answers.append(answer)
            if answer is False:
                return answers
        if run:
            self._promote_run(request, run, answers)
        return answers

    def _held_head(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """The primary tier's answers for the blocks that ``keys`` begins with and ``request`` holds already, up to
        one that was taken from it (``False``). So a long prefix on its way up costs little to ask for in each step."""
        if not request.claims:
            return []
        self._poll()
        return self._primary.lookup_prefix([*takewhile(request.claims.__contains__, keys)], request.context)

    def _answer(self, request: RequestState, key: OffloadKey, answer: bool | None) -> bool | None:
        """What ``request`` is told of ``key``, of which the primary tier says ``answer``."""
        if answer is None and key in self._promotions and self._poll():
            answer = self._peek(key)
        if answer is True:
            self._waits.told_ready(request, key)
            return True
        if self._waits.is_over(request):
            self.out_of_patience += answer is None or request.waiting_since is not None
            self._waits.give_up(request)
            return False
        if answer is None:
            self._waits.begin(request)
            self._claims.claim(request, key)
            return None
        tier, answer = self._tier_with(request, key)
        if tier is not None:
            return self._promote(request, key, tier)
        if answer is None:
            self._waits.begin(request)
        return answer

    def _peek(self, key: OffloadKey) -> bool | None:
        block = self._primary.peek(key)
        return False if block is None else True if block.is_ready else None

    def _tier_with(self, request: RequestState, key: OffloadKey) -> tuple[GuardedTier | None, bool | None]:
        """The first tier that has ``key``; if none has, whether one is still finding out (``None``)."""
        if key in request.failed or key in request.promoted:
            return None, False
        being_found_out = False
        for tier in self._tiers:
            found = tier.lookup(key, request.context)
            if found:
                return tier, None
            being_found_out |= found is None
        return None, None if being_found_out else False

    def _certain_room(self, request: RequestState) -> int:
        """Blocks that find a slot and are within all limits for certain, if promoted for ``request`` now."""
        primary, claims = self._primary, self._claims
        # What it was told becomes its claims once it waits. Held blocks may be idle, but for those in flight.
        told = len(request.told) if request.waiting_since is None else 0
        idle = primary.num_free_blocks + primary.num_idle_blocks - (len(claims) - len(self._promotions))
        limit = min(claims.per_request - len(request.claims), claims.in_all - len(claims))
        return min(idle, limit) - told

    def _promote_run(
        self, request: RequestState, run: dict[OffloadKey, GuardedTier], answers: list[bool | None]
    ) -> bool:
        """Begins the promotions of ``run``, whose answers are the last ones, and empties it. ``False``: the policy
        refused room that was there, and the answers end with that miss."""
        self._waits.begin(request)
        begun = self._promotions.begin_all(request, run)
        if not begun:
            del answers[len(answers) - len(run) + 1 :]
            answers[-1] = False
        run.clear()
        return begun

    def _promote(self, request: RequestState, key: OffloadKey, tier: GuardedTier) -> bool | None:
        was_waiting = request.waiting_since is not None
        self._waits.begin(request)  # first: what it was told so far must not make room for this block
        if self._promotions.begin(request, key, tier):
            return None
        if not was_waiting:
            self._waits.end(request)
        return False
