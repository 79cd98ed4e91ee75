# SPDX-License-Identifier: Apache-2.0
"""One request, one wait, and the answers that a request was told. Scheduler thread only.

A *request* waits from its first answer ``None`` until it loads, runs, ends or has used up its time budget. Its ``Wait``
has its claims and its plan. ``Waits`` alone writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.miss import Miss
from kvoffload.tiering.plans import Chosen, Plan
from kvoffload.tiering.segments import Segment
from kvoffload.tiering.tier_jobs import GuardedTier


@dataclass(slots=True, eq=False)
class Request:
    """One request, from ``on_new_request`` (or its first call) until its tiers are informed of its end."""

    context: ReqContext
    budget_s: float
    """Seconds that it may still wait for answers. Every wait uses some of them."""
    has_given_up: bool = False
    """It had no time left for a block that might have come."""
    whole_request_tiers: tuple[GuardedTier, ...] = ()
    """The tiers that asked for ``REQUEST_LEVEL``."""
    wait: Wait | None = None
    verdicts: dict[OffloadKey, Miss] = field(default_factory=dict)
    """Why blocks that may be somewhere are misses for this request. Some of them may be found by now. ``Waits`` alone
    writes them."""
    open_work: int = 0
    """Blocks between ``prepare_store`` and ``complete_store``, and parked cascades: each may still become a job."""
    is_ending: bool = False
    """It asks no more, but its tiers are not informed of that yet: something begun for it may still become a job."""


@dataclass(slots=True, eq=False)
class Told:
    """The answers that a request was told for some blocks. They hold until an event marks its wait as dirty."""

    keys: list[OffloadKey]
    answers: list[bool | None]
    """Up to the first ``False``."""
    is_kept: bool
    """An event will tell if they change. Otherwise the request is looked up again each time that it asks."""
    watched: OffloadKey | None = None
    """The first block with the answer ``None`` that the request does not claim, because no tier has answered or it may
    claim no more."""
    missing: OffloadKey | None = None
    """The block with the answer ``False``: the request is looked up again if somebody stores or promotes it."""
    waited: tuple[int, ...] = ()
    """The tiers whose answers the request waits for."""
    is_open: bool = False
    """The request waits for ``watched``."""


@dataclass(slots=True, eq=False)
class Wait:
    """What a request was told since it asked first in a step; from its first ``None`` on, one wait, to its end."""

    request: Request
    began_s: float = 0.0
    """Start of the wait, moved forward by any time in which it had all answers."""
    answered_s: float | None = None
    """Since when it has all answers. From then on it waits for the engine."""
    claims: dict[OffloadKey, bool] = field(default_factory=dict)
    """Blocks that it claims, each with whether it is ready. Until the wait begins: those that were ready in this
    step."""
    is_ahead: bool = False
    """The request's turn has not come, so that its time in the engine's queue does not count as waiting."""
    is_dirty: bool = False
    """Something has happened to a block that it waits for or claims, so its answers may have changed."""
    told: dict[OffloadKey, Told] = field(default_factory=dict)
    """By the first key of each question."""
    num_open: int = 0
    """Claimed blocks that are not ready, and open ``Told``."""
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    """Blocks that were promoted while it waits for them, with the tier that they came from."""
    chosen: list[Chosen] = field(default_factory=list)
    """The reads that its plans began."""
    lost: set[OffloadKey] = field(default_factory=set)
    """Blocks that arrived for it and were evicted again: promoting them once more would be a loop."""
    declined: set[OffloadKey] = field(default_factory=set)
    """Blocks that are not loaded in this wait, wherever a question begins."""
    plan: Plan | None = None
    """The last one that was made for it; ``None``: nothing was weighed."""
    planned: Sequence[OffloadKey] = ()
    """The blocks that it was made for, ..."""
    marks: Sequence[Segment] = ()
    """... and where those of them were known to be that are not on their way."""
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
        return f"Wait({self.request.context.req_id!r}, open={self.num_open}, claims={len(self.claims)})"

    @property
    def has_begun(self) -> bool:
        """From its first ``None`` to its end."""
        return self.request.wait is self

    def waited_s(self, now_s: float) -> float:
        """How long it has waited for answers."""
        if not self.has_begun or self.is_ahead:
            return 0.0
        return (now_s if self.answered_s is None else self.answered_s) - self.began_s

    @property
    def hits(self) -> Collection[OffloadKey]:
        """Blocks that it was answered ``True`` in this step, while it has not begun. In order."""
        return () if self.has_begun else self.claims.keys()

    @property
    def is_open(self) -> bool:
        """Whether some answer is ``None``, or was when its request asked last."""
        return bool(self.num_open) or any(told.watched is not None for told in self.told.values())

    def is_late(self, now_s: float) -> bool:
        """Whether it waited for answers beyond its deadline."""
        waited_until_s = now_s if self.answered_s is None else self.answered_s
        return self.deadline_s is not None and waited_until_s >= self.deadline_s

    def is_planned(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether a plan was made for these blocks, or for some of them: the engine's own cache grows and shrinks."""
        return keys[0] in self.planned or keys[-1] in self.planned  # mostly the first one, which is found at once

    def stop_of(self, keys: Sequence[OffloadKey]) -> int:
        """The first of ``keys`` that is declined."""
        if not self.declined or not self.has_begun:
            return len(keys)
        return next((at for at, key in enumerate(keys) if key in self.declined), len(keys))

    def unclaimed(self, told: Told) -> list[OffloadKey]:
        """The blocks of ``told`` with the answer ``None`` that it does not claim."""
        return [key for key, answer in zip(told.keys, told.answers) if answer is None and key not in self.claims]

    def num_open_of(self, keys: Sequence[OffloadKey]) -> int:
        """How many of ``keys`` have the answer ``None``."""
        unclaimed = {key for told in self.told.values() for key in self.unclaimed(told)}
        return sum(not self.claims.get(key, True) or key in unclaimed for key in keys)
