# SPDX-License-Identifier: Apache-2.0
"""The waits of requests and their claims. Scheduler thread only.

A reverse index lists, for each block, the waits that claim it, that wait for a tier's answer about it, or whose hit
ends because it is missing, and the requests that do not wait because it is missing. An event that concerns a block
marks these waits as dirty. The request of a dirty wait is looked up again the next time it asks; any other request gets
its last answers. ``Waits`` alone writes a ``Wait``; other parts report events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from math import ceil, inf

from kvoffload.base import OffloadKey
from kvoffload.cpu.manager import SlotTable
from kvoffload.metrics import Histogram
from kvoffload.miss import Miss
from kvoffload.tiering.plans import Plan
from kvoffload.tiering.requests import TierRequest, Unanswered, Wait
from kvoffload.tiering.segments import HERE, Segment


class Waits:
    """Records which requests wait, for which blocks, and for how long they may continue to wait.

    A block is *claimed* while a waiting request has hit it or is promoting it, and while its promotion is in flight,
    even if no request waits for it any longer. Each request that waits for a shared block claims it, but the block
    counts once. At most ``most_claimed`` blocks are claimed, by one request or by all of them. A claimed block that is
    ready is *held*: one pin protects it, however many requests claim it. So each wait makes progress: blocks that a
    request has hit stay until it has its whole prefix or reaches the limit. Beyond the limit, the answer is ``False``.
    If a running request's store finds no other room, the newest claims give way, because waiting requests must never
    starve running ones.

    A request has one time budget for its whole life, and each wait for answers uses some of it. Once it has its
    answers, it waits for the engine, which costs none of the budget. But once its turn has come, its claims end when
    the wait has lasted as long as the budget, and the request may then wait for answers again.
    """

    def __init__(self, slots: SlotTable, share: float, clock: Callable[[], float]) -> None:
        # Rounded up, because otherwise little could be promoted into a tiny cache. One block is left for running
        # requests, unless the share permits claims on all blocks, or there is only one block.
        num_blocks, left = slots.num_blocks, 0 if share >= 1 else 1
        self.most_claimed = max(1, min(ceil(num_blocks * share), num_blocks - left))
        self._slots = slots
        self._clock = clock
        self._claims: dict[OffloadKey, dict[Wait, None]] = {}
        """Each claimed block, with the waits that claim it."""
        self.claimed: Collection[OffloadKey] = self._claims.keys()
        """The claimed blocks, in the order of the claims; `in` is O(1)."""
        self.promoted: Collection[OffloadKey] = ()
        """Blocks whose promotions are in flight, which are claimed with or without a wait. ``Promotions`` owns this
        collection."""
        self._held: OrderedDict[OffloadKey, None] = OrderedDict()
        """The claimed blocks that are ready, in the order in which they were pinned. Each has one pin."""
        self._waiting: dict[TierRequest, Wait] = {}
        self._asking: dict[TierRequest, Wait] = {}
        """The records of requests that asked in this step and do not wait."""
        self._watchers: dict[OffloadKey, dict[Unanswered | TierRequest, Wait | None]] = {}
        """Each watched block, with the questions whose answers an event about it may change, and with the requests that
        do not wait because it is missing."""
        self._with_news: dict[Wait, None] = {}
        """Waits that watch a block about which there has been news since the last step."""
        self._looked_s = 0.0
        """The time at which the last step ended."""
        self._due_s = inf
        """Before this time, no wait becomes as long as its request's budget."""
        self.lengths = Histogram("promotion_wait_seconds")
        """The lengths of ended waits, without those in which the request neither waited nor got a block from a tier."""
        self.num_expired = 0
        """Number of requests that gave up blocks because they had waited too long."""

    def __repr__(self) -> str:
        return f"Waits({len(self._waiting)} requests, {len(self._claims)} of {self.most_claimed} blocks claimed)"

    # -------------------------------------------------------------------------------------------------- questions

    @property
    def watched(self) -> Collection[OffloadKey]:
        """The watched blocks: the first unknown block and the first missing block of each question, and the first block
        of each request that found nothing."""
        return self._watchers.keys()

    def of(self, request: TierRequest) -> Wait:
        """Return the request's wait, or a record that may become one in this step."""
        if request.wait is not None:
            return request.wait
        wait = self._asking.get(request)
        if wait is None:
            wait = self._asking[request] = Wait(request)
        return wait

    def is_over(self, request: TierRequest) -> bool:
        """Return whether ``request`` has used up its time, so that it may neither begin nor continue to wait."""
        waited_s = 0.0 if request.wait is None else request.wait.waited_s(self._clock())
        return waited_s >= request.budget_s

    def is_settled(self, wait: Wait) -> bool:
        """Return whether nothing has made another lookup useful since the wait's answers were given."""
        is_full = self.is_full
        return not wait.is_dirty and all(
            rest.is_kept and (is_full or not rest.lacks_room) for rest in wait.asked.values()
        )

    @property
    def is_full(self) -> bool:
        """Whether the limit of claims is reached."""
        return len(self._claims) >= self.most_claimed

    def room_beside(self, hits: Collection[OffloadKey]) -> int:
        """Return how many unclaimed blocks may be promoted in addition to ``hits``, which a request will claim when it
        begins to wait."""
        return max(0, self.most_claimed - len(self._claims) - sum(key not in self._claims for key in hits))

    def num_claimable(self, keys: Sequence[OffloadKey], survey: Iterable[Segment]) -> int:
        """Return how many of the surveyed blocks, the first of ``keys``, one request could claim now. Unknown blocks
        have no claims, and leading blocks that are ready need none."""
        room, at = self.room_beside(()), 0
        for place, num_blocks in survey:
            if not place.is_unknown:
                new = [n for n in range(num_blocks) if place.is_below or keys[at + n] not in self._claims]
                if len(new) > room and (at or place != HERE):
                    return at + new[room]
                room = max(room - len(new), 0)
            at += num_blocks
        return at

    # ------------------------------------------------------------------------------------- a request's answers

    def found_nothing(self, request: TierRequest, key: OffloadKey) -> None:
        """Record that no tier has the request's first block ``key``, so that the request need not wait."""
        self.forget_missing(request)
        request.missing = key
        self._watchers.setdefault(key, {})[request] = None

    def forget_missing(self, request: TierRequest) -> None:
        """Stop watching the request's first block, because somebody may have it by now, or the request asks again."""
        if request.missing is not None:
            self._watch_no_more(request.missing, request)
            request.missing = None

    def begin(self, wait: Wait) -> None:
        """Begin the wait, if it has not begun yet. The request's hits of this step become claims."""
        if wait.has_begun:
            return
        request, now_s = wait.request, self._clock()
        wait.began_s = wait.answered_s = now_s
        request.wait = self._waiting[request] = wait
        self._asking.pop(request, None)
        self._due_s = min(self._due_s, now_s + request.budget_s)
        hits, wait.claims = wait.claims, {}
        # Another request may have evicted some of them meanwhile.
        here = [key for key, block in zip(hits, self._slots.get_all(hits)) if block is not None and block.is_ready]
        self._hold([key for key in here if self._claim(wait, key, True)])
        self._set_deadline(wait, now_s)

    def look_ahead(self, wait: Wait) -> None:
        """Prepare to look up a request before its turn, as if it had just arrived. The wait begins, so its hits are
        claimed."""
        if wait.has_begun:
            wait.request.budget_s -= wait.waited_s(self._clock())  # it had its turn, and is back in the queue
            self._plan_anew(wait)
        else:
            self.begin(wait)
        wait.is_ahead = True

    def take_turn(self, wait: Wait) -> None:
        """Note that the request's turn has come. Its blocks that have not arrived are weighed as if it had just
        arrived."""
        wait.is_ahead = False
        wait.began_s = self._clock()
        self._due_s = min(self._due_s, wait.began_s + wait.request.budget_s)
        if wait.answered_s is not None:
            wait.answered_s = wait.began_s
        self._plan_anew(wait)

    def _plan_anew(self, wait: Wait) -> None:
        wait.plan, wait.planned, wait.marks = None, (), ()
        wait.deadline_s, wait.due_s = None, inf
        wait.declined.clear()
        wait.is_dirty = True

    def found(self, wait: Wait, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Return the answers for blocks that are in host memory, ready or in flight, up to the first one that is not.
        If the wait has begun, these blocks are claimed as far as the limit allows. The first block that is not ready
        begins the wait."""
        answers: list[bool | None] = []
        claimed: list[OffloadKey] = []
        for key, block in zip(keys, self._slots.get_all(keys), strict=True):
            if block is None:
                break
            answer = True if block.pins >= 0 else None
            answers.append(answer)
            if key in wait.claims:
                continue
            if answer and not wait.has_begun:
                wait.claims[key] = True
                continue
            self.begin(wait)
            if self._claim(wait, key, bool(answer)) and answer:
                claimed.append(key)
        self._hold(claimed)
        return answers

    def _claim(self, wait: Wait, key: OffloadKey, is_ready: bool) -> bool:
        """Claim a block that is ready (which the caller then holds) or in flight. Returns ``False`` beyond the limit,
        which leaves the block unprotected."""
        if key in wait.claims:
            return True
        claim = self._claims.get(key)
        if claim is None:
            if self.is_full:
                return False
            claim = self._claims[key] = {}
        claim[wait] = None
        wait.claims[key] = is_ready
        if not is_ready:
            self._add_awaited(wait, 1, self._clock())
        return True

    def _hold(self, keys: Iterable[OffloadKey]) -> None:
        """Pin the ``keys``, which are claimed and ready, unless they are already held."""
        new = [key for key in keys if key not in self._held]
        self._slots.pin(new)
        self._held.update(dict.fromkeys(new))

    def give_way(self, num_blocks: int) -> None:
        """Make room for ``num_blocks`` blocks of a running request's store: end the newest claims on blocks that only
        claims protect. For the requests that wait for these blocks, this is an eviction."""
        given: list[OffloadKey] = []
        for key in reversed(self._held):
            block = self._slots.get(key)
            if block is not None and block.pins == 1:
                given.append(key)
                if len(given) == num_blocks:
                    break
        self.gone(given)

    def promote(self, keys: Sequence[OffloadKey], wait: Wait | None) -> None:
        """Claim ``keys``, whose promotions begin, for ``wait`` or (with ``None``) for no request. The caller has
        checked the limits, and that no request claims these blocks yet."""
        for key in keys:
            self._claims[key] = {} if wait is None else {wait: None}
        if wait is not None:
            wait.claims.update(dict.fromkeys(keys, False))
            self._add_awaited(wait, len(keys), self._clock())

    def restart(self, wait: Wait) -> None:
        """Start a new lookup, because the request asks again in a later step. It stops waiting for answers that it does
        not ask for in this step."""
        wait.is_dirty = False
        wait.before, wait.asked = wait.asked, {}
        for rest in wait.before.values():
            self._unwatch(wait, rest)

    def tell(self, wait: Wait, keys: Sequence[OffloadKey], answers: Sequence[bool | None], rest: Unanswered) -> None:
        """Record the answers that the request gets for ``keys``; ``rest`` records the blocks that it waits for without
        a claim."""
        if not wait.has_begun:
            return
        claims = wait.claims
        loose: Sequence[int] = range(len(answers))
        if claims:
            loose = [at for at, key in enumerate(keys[: len(answers)]) if key not in claims]
        if len(loose) == len(answers) == answers.count(None):
            rest.keys = keys
        else:
            rest.is_kept = rest.is_kept and not any(answers[at] for at in loose)
            rest.keys = [keys[at] for at in loose if answers[at] is None]
        if answers[-1] is False and (key := keys[len(answers) - 1]) not in wait.declined:
            rest.missing = key
        before = wait.asked.get(keys[0]) or wait.before.get(keys[0])
        wait.asked[keys[0]] = rest
        if before is not None:
            self._unwatch(wait, before)
        if before is not None and before.watched == rest.watched is not None and not wait.num_awaited:
            # A tier had an answer for this block while nobody asked, and has lost it since. The time in between still
            # counts.
            wait.answered_s = None
        self._watch(wait, rest)

    def _watch(self, wait: Wait, rest: Unanswered) -> None:
        for key in {rest.watched, rest.missing} - {None}:
            assert key is not None
            self._watchers.setdefault(key, {})[rest] = wait
        if rest.keys:
            rest.is_awaited = True
            self._add_awaited(wait, 1, self._clock())

    def _unwatch(self, wait: Wait, rest: Unanswered) -> None:
        """Stop watching the blocks of this question, and stop its clock."""
        for key in {rest.watched, rest.missing} - {None}:
            assert key is not None
            self._watch_no_more(key, rest)
        if rest.is_awaited:
            rest.is_awaited = False
            self._add_awaited(wait, -1, self._clock())

    def _watch_no_more(self, key: OffloadKey, watcher: Unanswered | TierRequest) -> None:
        watchers = self._watchers.get(key, {})
        watchers.pop(watcher, None)
        if not watchers:
            self._watchers.pop(key, None)

    def plan(self, wait: Wait, keys: Sequence[OffloadKey], plan: Plan, marks: Sequence[Segment], seen_s: float) -> None:
        """Record a plan made for ``keys``. ``marks`` are the places of blocks that are not in flight. The plan's times
        count from ``seen_s``."""
        wait.plan, wait.planned, wait.marks = plan, keys, marks
        if wait.has_begun:
            self._set_deadline(wait, seen_s)
        elif wait.declined:
            wait.declined.difference_update(keys)  # by an earlier question; this one may wait for them

    def note_reads(self, wait: Wait, plan: Plan) -> None:
        """Add the reads of a plan to the explanation of the wait, because they have begun."""
        wait.weighed += plan.weighed

    def _set_deadline(self, wait: Wait, seen_s: float) -> None:
        if wait.plan is None:
            return
        if wait.deadline_s is None:
            wait.planned_s, wait.expected_s = wait.elapsed_s(self._clock()), wait.plan.wait_s
        wait.due_s = seen_s - wait.began_s  # at the next question, because its reads begin when the step ends
        wait.deadline_s = wait.due_s + wait.plan.deadline_s

    def look_again(self, wait: Wait, seconds: float) -> None:
        """Make no new plan before ``seconds`` have passed or an answer has come."""
        wait.due_s = wait.elapsed_s(self._clock()) + seconds

    def seen_s(self, wait: Wait, *, is_news: bool) -> float:
        """Return the time until which tiers have kept the request waiting, usually the current time. With ``is_news``,
        an answer has come since the last step. It may have come at once, so the time since that step counts as the
        engine's."""
        now_s = self._clock() if wait.answered_s is None else wait.answered_s
        return max(min(now_s, self._looked_s), wait.began_s) if is_news else now_s

    def decline(self, wait: Wait, keys: Sequence[OffloadKey], stop: int) -> None:
        """Decline ``keys[stop:]`` for this wait, and end its claims on them."""
        wait.declined.difference_update(keys[:stop])
        declined = keys[stop:]
        wait.declined.update(declined)
        self.let_go(wait, declined)

    def let_go(self, wait: Wait, keys: Sequence[OffloadKey]) -> None:
        """End the wait's claims on ``keys``, because a block before them is missing."""
        if wait.has_begun and wait.claims:
            self._release(wait, [key for key in dict.fromkeys(keys) if key in wait.claims])

    def _release(self, wait: Wait, keys: Collection[OffloadKey]) -> None:
        num_awaited = 0
        for key in keys:
            num_awaited += not wait.claims.pop(key)
            del self._claims[key][wait]
        self._drop_unclaimed(keys)
        self._add_awaited(wait, -num_awaited, self._clock())

    def _add_awaited(self, wait: Wait, count: int, now_s: float) -> None:
        """Add ``count`` (which may be negative) to the number of answers that are ``None``."""
        if not count:
            return
        if wait.answered_s is not None:
            wait.began_s += now_s - wait.answered_s
            wait.answered_s = None
        wait.num_awaited += count
        if not wait.num_awaited:
            wait.answered_s = max(now_s, wait.began_s)  # its last block may have arrived earlier

    # --------------------------------------------------------------------------- events of claimed blocks

    def arrived(self, keys: Collection[OffloadKey], source: str | None = None, ended_s: float | None = None) -> None:
        """Record that blocks became ready, promoted from ``source`` or stored, at ``ended_s`` if that time is known."""
        now_s = self._clock() if ended_s is None else min(ended_s, self._clock())
        claimed = [key for key in keys if key in self._claims] if self._claims else ()
        if not claimed:
            return
        num_arrived: dict[Wait, int] = {}
        for key in claimed:
            for wait in self._claims[key]:
                num_arrived[wait] = num_arrived.get(wait, 0) + (not wait.claims[key])
                wait.claims[key] = True
                if source is not None:
                    wait.sources[key] = source
        for wait, count in num_arrived.items():
            self._add_awaited(wait, -count, now_s)
            wait.is_dirty |= bool(count) and not wait.num_awaited
        self._hold([key for key in claimed if self._claims[key]])
        self._drop_unclaimed(claimed)

    def news(self, keys: Iterable[OffloadKey]) -> None:
        """Mark the waits that watch ``keys`` as dirty, because more may be known about these blocks, or because they
        are in flight or ready."""
        watchers = self._watchers
        for key in keys if watchers else ():
            if (waits := watchers.get(key)) is not None:
                for watcher, wait in [*waits.items()]:
                    if wait is not None:
                        wait.is_dirty = True
                        self._with_news[wait] = None
                    elif isinstance(watcher, TierRequest):
                        self.forget_missing(watcher)

    def gone(self, keys: Iterable[OffloadKey], verdict: Miss | None = None, ended_s: float | None = None) -> None:
        """End all claims on blocks that were evicted or did not arrive. With a ``verdict``, they are misses for each
        request that waited for them. A block that had arrived for a wait is not promoted for it again."""
        if not self._claims:
            return
        now_s = self._clock() if ended_s is None else min(ended_s, self._clock())
        released: list[OffloadKey] = []
        num_awaited: dict[Wait, int] = {}
        for key in keys:
            claim = self._claims.pop(key, None)
            if claim is None:
                continue
            if key in self._held:
                del self._held[key]
                released.append(key)
            for wait in claim:
                num_awaited[wait] = num_awaited.get(wait, 0) + (not wait.claims.pop(key))
                wait.is_dirty = True
                if verdict is not None:
                    wait.request.verdicts[key] = verdict
                elif wait.sources.pop(key, None) is not None:
                    wait.lost.add(key)
                    wait.request.verdicts[key] = Miss.NO_ROOM
        for wait, count in num_awaited.items():
            self._add_awaited(wait, -count, now_s)
        self._slots.unpin(released)

    def refuse(self, request: TierRequest, keys: Iterable[OffloadKey], verdict: Miss) -> None:
        """Make these blocks misses for the request, until another request stores or promotes them."""
        request.verdicts.update(dict.fromkeys(keys, verdict))

    def _drop_unclaimed(self, keys: Iterable[OffloadKey]) -> None:
        """End the protection of those ``keys`` that no request claims and that are not being promoted."""
        released: list[OffloadKey] = []
        for key in keys:
            if not self._claims[key] and key not in self.promoted:
                del self._claims[key]
                if key in self._held:
                    del self._held[key]
                    released.append(key)
        self._slots.unpin(released)

    # ------------------------------------------------------------------------------------------------------- ends

    def end(self, request: TierRequest) -> None:
        """End the request's wait and its claims, if it waits. Its hits of this step do not become claims."""
        wait = request.wait
        if wait is None:
            self._asking.pop(request, None)
            self.forget_missing(request)
            return
        waited_s = wait.waited_s(self._clock())
        if waited_s or wait.sources:
            self.lengths.observe(waited_s)
        request.budget_s -= waited_s
        self.restart(wait)
        self._with_news.pop(wait, None)
        self._release(wait, [*wait.claims])
        request.wait = None
        del self._waiting[request]

    def expire(self, request: TierRequest, key: OffloadKey | None = None) -> None:
        """End the wait for good, because ``request`` has used up its time.

        The blocks that it waited for are misses, and so is the block ``key``, which is in flight. A request that gives
        up any block counts once.
        """
        given_up = [] if key is None else [key]
        if request.wait is not None:
            given_up += [key for key, is_ready in request.wait.claims.items() if not is_ready]
            for rest in request.wait.asked.values():
                given_up += [key for key in rest.keys if rest.is_awaited and key not in request.wait.claims]
        self.refuse(request, given_up, Miss.OUT_OF_PATIENCE)
        self.num_expired += bool(given_up) and not request.has_given_up
        request.has_given_up |= bool(given_up)
        self.end(request)
        request.budget_s = 0.0

    def end_step(self, is_unanswered: Callable[[TierRequest, Unanswered], bool]) -> None:
        """End the waits that have lasted as long as their requests' budgets. ``is_unanswered`` returns whether a
        request still waits for its watched block. It is needed because an engine may not ask for many steps, but time
        counts only until the answer arrives."""
        self._asking.clear()
        now_s = self._looked_s = self._clock()
        if not self._waiting:
            return
        for wait in [*self._with_news]:
            for rest in wait.asked.values():
                if rest.is_awaited and not is_unanswered(wait.request, rest):
                    self._unwatch(wait, rest)
        self._with_news.clear()
        if now_s < self._due_s:
            return
        self._due_s = inf
        for request, wait in list(self._waiting.items()):
            if wait.is_ahead:
                continue
            if now_s - wait.began_s < request.budget_s:
                self._due_s = min(self._due_s, wait.began_s + request.budget_s)
            elif wait.answered_s is None:
                self.expire(request)
            else:
                self.end(request)

    def reset(self) -> None:
        """End every wait and every claim, because the cache was reset. No block is in flight to a request until it asks
        again."""
        self._asking.clear()
        for request in list(self._waiting):
            self.end(request)
        self._claims.clear()
        self.news([*self._watchers])

    def check_invariants(self, requests: Collection[TierRequest]) -> None:
        """Recompute the claims from all ``requests``, the promotions in flight, and the blocks in host memory."""
        assert {id(request) for request in self._waiting} == {id(r) for r in requests if r.wait is not None}
        assert {*self.promoted} <= self._claims.keys()
        ready = [block for block in self._slots.get_all(self._claims) if block is not None and block.is_ready]
        assert self._held.keys() == {block.key for block in ready}, (
            "the held blocks are the claimed ones that are ready"
        )
        assert all(block.pins for block in ready)
        assert len(self._claims) <= self.most_claimed
        for key, claim in self._claims.items():
            assert claim or key in self.promoted
            assert all(key in wait.claims for wait in claim)
        for request, wait in self._waiting.items():
            assert request.wait is wait
            assert wait.request is request
            assert (wait.answered_s is None) or not wait.num_awaited
            for key, is_ready in wait.claims.items():
                assert wait in self._claims[key]
                block = self._slots.get(key)
                assert block is not None
                assert is_ready == block.is_ready, f"{key!r} is claimed as {is_ready}"
            num_awaited = sum(rest.is_awaited for rest in wait.asked.values()) + [*wait.claims.values()].count(False)
            assert wait.num_awaited == num_awaited, wait
        assert all(r.missing is None or r in self._watchers[r.missing] for r in requests)
        for request, asking in self._asking.items():
            assert request.wait is None
            assert asking.request is request
        watching: Wait | None
        for key, watchers in self._watchers.items():
            block = self._slots.get(key)
            for rest, watching in watchers.items():
                if watching is None:
                    assert isinstance(rest, TierRequest)
                    assert (rest.missing, rest.wait, block) == (key, None, None)
                    continue
                assert isinstance(rest, Unanswered)
                assert rest in watching.asked.values()
                assert key in (rest.watched, rest.missing)
                assert block is None or not block.is_ready or watching.is_dirty, "a block that is here is watched"
        for wait in self._waiting.values():
            for rest in wait.asked.values():
                watched = {rest.watched} if rest.is_awaited else set()
                if rest.is_kept and not wait.is_dirty:
                    watched |= {rest.watched, rest.missing}
                assert all(rest in self._watchers[key] for key in watched if key is not None)
