# SPDX-License-Identifier: Apache-2.0
"""The records of a request, of its wait, and of its unanswered questions. Scheduler thread only.

A *request* waits from the first lookup before its turn that finds its first block somewhere, or from its first answer
``None``, until it loads, runs, ends or has used up its time budget. Its ``Wait`` contains its claims and its plan.
``Waits`` alone writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from kvoffload.base import OffloadKey, ReqContext, Weighed
from kvoffload.miss import Miss
from kvoffload.tiering.plans import Plan
from kvoffload.tiering.segments import Segment
from kvoffload.tiering.tier_jobs import GuardedTier


@dataclass(slots=True, eq=False)
class TierRequest:
    """One request, from ``on_new_request`` (or its first call) until the tiers are informed of its end."""

    context: ReqContext
    budget_s: float
    """Number of seconds that it may still wait for answers. Every wait uses some of them."""
    has_given_up: bool = False
    """Whether its time ran out for a block that might have arrived."""
    whole_request_tiers: tuple[GuardedTier, ...] = ()
    """The tiers that asked for ``REQUEST_LEVEL``."""
    wait: Wait | None = None
    missing: OffloadKey | None = None
    """Its first block, if the request does not wait because nobody had this block, until there is news of it."""
    verdicts: dict[OffloadKey, Miss] = field(default_factory=dict)
    """The reasons why blocks that may exist are misses for this request. Some of these blocks may have been found
    since. ``Waits`` alone writes them."""
    may_submit: int = 0
    """Number of blocks between ``prepare_store`` and ``complete_store``, plus parked cascades. Each may still become a
    job."""
    is_ending: bool = False
    """Whether it has ended, but its tiers are not informed yet, because something may still be submitted for it."""

    def readable(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the leading ``keys`` that are read for it if a tier has them. A block is not read again if a read has
        failed, or if the block had arrived for its wait and was evicted again. The reason is in ``verdicts``."""
        verdicts, lost = self.verdicts, self.wait.lost if self.wait is not None else ()
        for at, key in enumerate(keys if verdicts else ()):
            if verdicts.get(key) is Miss.PROMOTION_FAILED or key in lost:
                return keys[:at]
        return keys


@dataclass(slots=True, eq=False)
class Unanswered:
    """The blocks of one question that a request neither got nor claims. An event about its first or its missing block
    marks the wait as dirty."""

    keys: Sequence[OffloadKey] = ()
    """The blocks with the answer ``None``, because no tier has answered or the limit of claims is reached."""
    missing: OffloadKey | None = None
    """The block with the answer ``False``, which another request may store or promote."""
    waited: set[int] = field(default_factory=set)
    """The tiers whose answers the request waits for."""
    is_kept: bool = True
    """Whether an event will report any change of the answers. Otherwise the request is looked up again each time it
    asks."""
    lacks_room: bool = False
    """Whether it waits for room in host memory. No event reports room, but there is none while the limit of claims is
    reached."""
    is_awaited: bool = False
    """Whether the wait's clock runs for the first of ``keys``."""

    @property
    def watched(self) -> OffloadKey | None:
        return self.keys[0] if self.keys else None


@dataclass(slots=True, eq=False)
class Wait:
    """The answers to a request since its first question in a step. From the first ``None`` on, or from a lookup before
    its turn, it is one wait, until the wait ends."""

    request: TierRequest
    began_s: float = 0.0
    """Start of the wait, moved forward by any time in which it had all answers."""
    answered_s: float | None = None
    """The time since which it has all answers, and waits only for the engine."""
    claims: dict[OffloadKey, bool] = field(default_factory=dict)
    """The blocks that it claims, and whether each is ready. Until the wait begins, these are the blocks that were ready
    in this step."""
    is_ahead: bool = False
    """Whether the request's turn has not come, so that its time in the engine's queue does not count as waiting."""
    is_dirty: bool = False
    """Whether an event has concerned a block that it waits for or claims, so that another lookup may find more. Before
    the last block arrives, the arrival of another one changes nothing."""
    asked: dict[OffloadKey, Unanswered] = field(default_factory=dict)
    """The unanswered blocks by the first key of each question of the last lookup."""
    before: dict[OffloadKey, Unanswered] = field(default_factory=dict)
    """The same for the previous lookup."""
    num_awaited: int = 0
    """Number of claimed blocks that are not ready, plus the number of questions for which its clock runs."""
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    """Blocks that were promoted while it waited for them, with their tiers."""
    weighed: list[Weighed] = field(default_factory=list)
    """The reads that its plans began."""
    lost: set[OffloadKey] = field(default_factory=set)
    """Blocks that arrived for it and were evicted again. Promoting them again would cause a loop."""
    declined: set[OffloadKey] = field(default_factory=set)
    """Blocks that this wait does not load, wherever a question begins."""
    plan: Plan | None = None
    """The last plan made for it; ``None``: nothing was weighed."""
    planned: Sequence[OffloadKey] = ()
    """The blocks for which the plan was made."""
    marks: Sequence[Segment] = ()
    """The known places of those blocks that are not in flight."""
    planned_s: float = 0.0
    """Its ``elapsed_s`` when it began to wait by a plan."""
    expected_s: float = 0.0
    """The expected duration of that wait."""
    deadline_s: float | None = None
    """The ``elapsed_s`` at which it takes the blocks that have arrived, unless they have earned it more time; ``None``:
    it has no plan."""
    due_s: float = inf
    """The ``elapsed_s`` at which to check whether its reads are late."""

    def __repr__(self) -> str:
        return f"Wait({self.request.context.req_id!r}, awaited={self.num_awaited}, claims={len(self.claims)})"

    @property
    def has_begun(self) -> bool:
        """Whether the wait has begun (with its first ``None``) and not ended."""
        return self.request.wait is self

    def elapsed_s(self, now_s: float) -> float:
        """Return the number of seconds that it has waited for answers, even before its turn."""
        return (now_s if self.answered_s is None else self.answered_s) - self.began_s

    def waited_s(self, now_s: float) -> float:
        """Return the number of seconds of its request's budget that it has used."""
        return self.elapsed_s(now_s) if self.has_begun and not self.is_ahead else 0.0

    @property
    def hits(self) -> Collection[OffloadKey]:
        """The blocks with the answer ``True`` in this step, in order, until the wait begins."""
        return () if self.has_begun else self.claims.keys()

    @property
    def is_awaiting(self) -> bool:
        """Whether some answer is ``None``, or was ``None`` when its request last asked."""
        return bool(self.num_awaited) or any(each.keys for each in self.asked.values())

    def is_late(self, now_s: float) -> bool:
        """Return whether it has waited for answers beyond its deadline."""
        return self.deadline_s is not None and self.elapsed_s(now_s) >= self.deadline_s

    def is_planned(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether a plan was made for these blocks or some of them, because the engine's own cache grows and
        shrinks."""
        return keys[0] in self.planned or keys[-1] in self.planned  # usually the first key, which is found at once

    def stop_of(self, keys: Sequence[OffloadKey]) -> int:
        """Return the index of the first declined key of ``keys``, or their number."""
        if not self.declined or not self.has_begun:
            return len(keys)
        return next((at for at, key in enumerate(keys) if key in self.declined), len(keys))

    def num_awaited_of(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of ``keys`` have the answer ``None``."""
        unclaimed = {key for each in self.asked.values() for key in each.keys if key not in self.claims}
        return sum(not self.claims.get(key, True) or key in unclaimed for key in keys)
