# SPDX-License-Identifier: Apache-2.0
"""Which requests wait, and for how long they still may. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf

from kvoffload.base import OffloadKey
from kvoffload.cpu.manager import SlotTable
from kvoffload.metrics import Histogram
from kvoffload.miss import Miss
from kvoffload.tiering.claims import Claims
from kvoffload.tiering.requests import Prefix, Request, Wait

__all__ = ["Waits"]


class Waits:
    """Which requests wait, and for how long they still may.

    Patience is one budget for the whole life of a request: each wait for answers is taken off it. Once it has its
    answers, it waits for the engine, which costs no patience. Its claims end all the same when the wait has lasted as
    long as it had patience for, and it may wait for answers again.
    """

    def __init__(self, slots: SlotTable, claims: Claims, clock: Callable[[], float]) -> None:
        self._slots = slots
        self._claims = claims
        self._clock = clock
        self._waiting: dict[Request, Wait] = {}
        self._untracked: dict[Prefix, None] = {}
        """The ranges that wait for answers which no claim keeps up to date."""
        self._due_s = inf
        """Before this time, no wait becomes as long as its request has patience."""
        self._surveyed: dict[Request, dict[OffloadKey, Prefix]] = {}
        """What requests that do not wait asked for in this step."""
        self.lengths = Histogram("promotion_wait_seconds")
        """How long the waits that have ended were."""
        self.num_expired = 0
        """Requests that gave up blocks because they had waited too long."""

    def __repr__(self) -> str:
        return f"Waits({len(self._waiting)})"

    def add(self, prefix: Prefix) -> None:
        """The request of ``prefix`` asks for it. If it begins to wait in this step, the hits become claims."""
        wait = prefix.request.wait
        prefixes = self._surveyed.setdefault(prefix.request, {}) if wait is None else wait.prefixes
        prefixes[prefix.keys[0]] = prefix

    def hits_of(self, request: Request) -> Collection[OffloadKey]:
        """Blocks that the request was answered ``True`` in this step, while it did not wait. Each once, in order."""
        surveyed = self._surveyed.get(request, {}).values()
        return dict.fromkeys(key for prefix in surveyed for key, answer in zip(prefix.keys, prefix.answers) if answer)

    def open_keys(self) -> Iterator[OffloadKey]:
        """Blocks that requests other than prefetches wait for."""
        for request, wait in self._waiting.items():
            if wait.num_open and not request.context.is_prefetch:
                for prefix in wait.prefixes.values():
                    yield from (key for key, answer in zip(prefix.keys, prefix.answers) if answer is None)

    def begin(self, prefix: Prefix) -> Wait:
        """The request of ``prefix`` waits from now on, if it does not yet, and its hits of this step become claims."""
        request = prefix.request
        wait = request.wait
        if wait is None:
            now_s = self._clock()
            wait = request.wait = self._waiting[request] = Wait(now_s)
            self._due_s = min(self._due_s, now_s + request.patience_s)
            wait.prefixes = self._surveyed.pop(request, {})
            for surveyed in wait.prefixes.values():
                blocks = self._slots.get_all(surveyed.keys[: len(surveyed.answers)])
                for at, (block, answer) in enumerate(zip(blocks, surveyed.answers)):
                    if answer and (block is None or not block.is_ready):
                        del surveyed.answers[at:]  # another request evicted it meanwhile
                        break
                    if self._claims.claim(wait, surveyed, at) and surveyed.head == at:
                        surveyed.head += 1
        return wait

    def set_untracked(self, prefix: Prefix, untracked: Sequence[int]) -> None:
        """These answers of ``prefix``, whose request waits, are ``None`` and no claim keeps them up to date."""
        wait, before, prefix.untracked = prefix.request.wait, prefix.untracked, untracked
        if not before and not untracked:
            return
        assert wait is not None
        wait.add_open(len(untracked) - len(before), self._clock())
        if untracked:
            self._untracked[prefix] = None
        else:
            del self._untracked[prefix]

    def is_over(self, request: Request) -> bool:
        """Whether ``request`` has no patience left: it may neither begin to wait nor go on."""
        waited_s = 0.0 if request.wait is None else request.wait.waited_s(self._clock())
        return waited_s >= request.patience_s

    def end(self, request: Request) -> None:
        """Ends the wait and its claims, if it waits. Its hits of this step become no claims."""
        wait = request.wait
        if wait is None:
            self._surveyed.pop(request, None)
            return
        waited_s = wait.waited_s(self._clock())
        self.lengths.observe(waited_s)
        request.patience_s -= waited_s
        self._release_all(wait)
        request.wait = None
        del self._waiting[request]

    def expire(self, request: Request, key: OffloadKey | None = None) -> None:
        """Ends the wait for good: ``request`` has no patience left. What it waited for is a miss, and so is the block
        ``key``, which is on its way. A request that gives up any block counts once."""
        given_up = [] if key is None else [key]
        if request.wait is not None:
            for prefix in request.wait.prefixes.values():
                given_up += [key for key, answer in zip(prefix.keys, prefix.answers) if answer is None]
        request.verdicts.update(dict.fromkeys(given_up, Miss.OUT_OF_PATIENCE))
        self.num_expired += bool(given_up) and not request.has_given_up
        request.has_given_up |= bool(given_up)
        self.end(request)
        request.patience_s = 0.0

    def reset(self) -> None:
        """The cache was reset: every wait ends. Until its request asks again, nothing is on its way to it."""
        self._surveyed.clear()
        for request in list(self._waiting):
            self.end(request)

    def _release_all(self, wait: Wait) -> None:
        for prefix in wait.prefixes.values():
            self.set_untracked(prefix, ())
            self._claims.release(wait, prefix, 0)
        wait.prefixes.clear()

    def end_step(self, is_answered: Callable[[Prefix], bool]) -> None:
        """Ends the waits that have lasted as long as their requests have patience. ``is_answered`` says whether
        all untracked answers of a range are known by now: an engine may not ask for many steps."""
        self._surveyed.clear()
        if not self._waiting:
            return
        if self._untracked:
            for prefix in [prefix for prefix in self._untracked if is_answered(prefix)]:
                self.set_untracked(prefix, ())
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = inf
        for request, wait in list(self._waiting.items()):
            if now_s - wait.began_s < request.patience_s:
                self._due_s = min(self._due_s, wait.began_s + request.patience_s)
            elif wait.answered_s is None:
                self.expire(request)
            else:
                self.end(request)

    def check_invariants(self, requests: Collection[Request]) -> None:
        """``requests``: all there are."""
        assert {id(request) for request in self._waiting} == {id(r) for r in requests if r.wait is not None}
        for request, wait in self._waiting.items():
            assert request.wait is wait
            assert (wait.answered_s is None) or not wait.num_open
        waiting = [prefix for wait in self._waiting.values() for prefix in wait.prefixes.values()]
        assert self._untracked.keys() == {prefix for prefix in waiting if prefix.untracked}
