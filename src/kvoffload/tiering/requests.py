# SPDX-License-Identifier: Apache-2.0
"""One request, one wait, one question. Scheduler thread only.

A *request* waits from its first answer ``None`` until it loads, runs, ends or has no patience left. Its ``Wait`` has
the answer to each block, and what was planned. ``Waits`` alone writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import inf

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.miss import Miss
from kvoffload.tiering.plans import Chosen, Plan
from kvoffload.tiering.segments import Segment
from kvoffload.tiering.tier_jobs import GuardedTier

_NO_ANSWER = object()


@dataclass(slots=True, eq=False)
class Request:
    """One request, from ``on_new_request`` (or its first call) until its tiers are informed of its end."""

    context: ReqContext
    patience_s: float
    """Seconds of waiting for answers it has left; spent by every wait, never refilled."""
    has_given_up: bool = False
    """It had no patience left for a block that may have come."""
    whole_request_tiers: tuple[GuardedTier, ...] = ()
    """The tiers that asked for ``REQUEST_LEVEL``."""
    wait: Wait | None = None
    verdicts: dict[OffloadKey, Miss] = field(default_factory=dict)
    """Why blocks that may be somewhere are misses for this request. Some of them may be found by now. ``Waits`` alone
    writes them."""
    open_work: int = 0
    """Blocks between ``prepare_store`` and ``complete_store``, and parked cascades: what may still become a job."""
    is_ending: bool = False
    """It asks no more, and its tiers are not informed of that yet: something begun for it may still become a job."""


@dataclass(slots=True, eq=False)
class Question:
    """What a request asked for last, from one block on. Once it is noted, ``Waits`` alone writes it."""

    keys: list[OffloadKey]
    answers: list[bool | None]
    """Up to the first ``False``, as they were then. ``Wait.answers_to`` has those of now."""
    num_unknown: int = 0
    """Answers ``None`` because a tier is waited for that does not know yet whether it has the block: ..."""
    waited: tuple[int, ...] = ()
    """... one of these."""
    progress: tuple[int, ...] | None = None
    """Of the tiers. While it is the same, they know no more of the unknown blocks. ``None``: the request must ask."""
    is_final: bool = False
    """The wait keeps all of the answers up to date, and there are no others worth asking for."""
    num_kept: int = 0
    """Leading answers that the wait keeps up to date."""
    untracked: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks with the answer ``None`` that it does not: no tier has answered, or the request may claim no more, or
    gives way."""
    is_awaited: bool = False
    """The request waits for the untracked ones, too."""
    was_answered: bool = False
    """Their answers were there once, before the request asked for them. If they are not when it asks, that costs
    patience: a tier may go on like this for ever."""
    version: int = 0
    num_arrived: int = 0
    """Of the wait, when it asked."""


@dataclass(slots=True, eq=False)
class Wait:
    """What a request was told since it asked first in a step; from its first ``None`` on, one wait, to its end."""

    request: Request
    began_s: float = 0.0
    """Start of the wait, moved forward by any time it was fully answered."""
    answered_s: float | None = None
    """Since when all of it is answered. From then on it waits for the engine."""
    answers: dict[OffloadKey, bool | None] = field(default_factory=dict)
    """Blocks that are here or on their way, each of which is a claim. Until the wait begins: those that were here
    in this step."""
    version: int = 0
    """Another number whenever an answer is kept no longer, or a block is declined."""
    num_arrived: int = 0
    """Blocks that arrived while it waits."""
    questions: dict[OffloadKey, Question] = field(default_factory=dict)
    """By the first key of each."""
    num_open: int = 0
    """Answers ``None``, those for unknown blocks of questions included."""
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    """Blocks that were promoted while it waits for them, with the tier that they came from."""
    chosen: list[Chosen] = field(default_factory=list)
    """What its plans began to read."""
    lost: set[OffloadKey] = field(default_factory=set)
    """Blocks that arrived for it and were evicted again: to promote them once more would be a loop."""
    declined: set[OffloadKey] = field(default_factory=set)
    """Blocks that are not loaded in this wait, wherever a question begins."""
    plan: Plan | None = None
    """The last one that was made for it; ``None``: nothing was weighed."""
    planned: frozenset[OffloadKey] = frozenset()
    """The blocks that it was made for, ..."""
    marks: Sequence[Segment] = ()
    """... and what was known of those that are not on their way."""
    num_paid: int = 0
    """Leading ones of them that pay for no wait (``SoFar``)."""
    planned_s: float = 0.0
    """Since when it waits by a plan, ..."""
    expected_s: float = 0.0
    """... and how long that was expected to take."""
    deadline_s: float | None = None
    """From then on it takes what has arrived, unless that has earned it more time; ``None``: it has no plan."""
    due_s: float = inf
    """When to see whether its reads are late."""

    def __repr__(self) -> str:
        return f"Wait({self.request.context.req_id!r}, open={self.num_open}, answers={len(self.answers)})"

    @property
    def has_begun(self) -> bool:
        """From its first ``None`` to its end."""
        return self.request.wait is self

    def waited_s(self, now_s: float) -> float:
        """How long it has waited for answers."""
        if not self.has_begun:
            return 0.0
        return (now_s if self.answered_s is None else self.answered_s) - self.began_s

    @property
    def hits(self) -> Collection[OffloadKey]:
        """Blocks that it was answered ``True`` in this step, while it has not begun. In order."""
        return () if self.has_begun else self.answers.keys()

    @property
    def is_open(self) -> bool:
        """Whether some answer is ``None``, those that are asked for anew included."""
        return bool(self.num_open) or any(question.untracked for question in self.questions.values())

    def is_late(self, now_s: float) -> bool:
        """Whether it waited for answers beyond its deadline."""
        waited_until_s = now_s if self.answered_s is None else self.answered_s
        return self.deadline_s is not None and waited_until_s >= self.deadline_s

    def is_planned(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether a plan was made for these blocks, or for some of them: the engine's own cache grows and shrinks."""
        return keys[0] in self.planned or keys[-1] in self.planned

    def kept(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """The answers for the leading ones of ``keys`` that the wait keeps up to date, whatever they were asked
        with."""
        if not self.has_begun:
            return []
        question = self.questions.get(keys[0])
        if question is not None and question.version == self.version and question.keys == keys:
            return self.answers_to(question)[: question.num_kept]
        found = [*map(self.answers.get, keys, repeat(_NO_ANSWER))]
        return found[: found.index(_NO_ANSWER)] if _NO_ANSWER in found else found  # type: ignore[return-value]

    def answers_to(self, question: Question) -> list[bool | None]:
        """Of now. ``question`` was asked in this version of the wait."""
        if question.num_arrived == self.num_arrived or not self.has_begun:
            return [*question.answers]
        kept = map(self.answers.__getitem__, question.keys[: question.num_kept])
        return [*kept, *question.answers[question.num_kept :]]

    def stop_of(self, keys: Sequence[OffloadKey]) -> int:
        """The first of ``keys`` that is declined."""
        if not self.declined or not self.has_begun:
            return len(keys)
        return next((at for at, key in enumerate(keys) if key in self.declined), len(keys))

    def num_open_of(self, keys: Sequence[OffloadKey]) -> int:
        """How many of ``keys`` have the answer ``None``."""
        untracked = {key for question in self.questions.values() for key in question.untracked}
        return sum(self.answers.get(key, True) is None or key in untracked for key in keys)
