# SPDX-License-Identifier: Apache-2.0
"""One request, one wait, one asked range of blocks. Scheduler thread only.

A *request* waits from its first answer ``None`` until it loads, runs, ends or has no patience left. Its ``Wait`` holds
the ranges that it asked for, each a ``Prefix`` with its answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.miss import Miss
from kvoffload.tiering.tier_jobs import GuardedTier

__all__ = ["Kept", "Prefix", "Request", "Wait"]


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
    """Why blocks that may be somewhere are misses for this request. Some of them may be found by now."""
    open_work: int = 0
    """Blocks between ``prepare_store`` and ``complete_store``, and parked cascades: what may still become a job."""
    is_ending: bool = False
    """It asks no more, and its tiers are not informed of that yet: something begun for it may still become a job."""


class Kept(NamedTuple):
    """The answers of a range, which hold until a tier knows more."""

    progress: tuple[int, ...]
    """Of the tiers, when they were asked."""
    head: int
    stop: int
    untracked: Sequence[int]
    """All of them blocks that no tier knows of yet."""


class Prefix:
    """One range of blocks of one group that a request asked for, with its answers before the first ``False``.

    The claims on its first ``head`` blocks keep their answers up to date. All others were true when the range was asked
    for last.
    """

    __slots__ = ("answers", "head", "kept", "keys", "request", "stop", "untracked")

    def __init__(self, request: Request, keys: list[OffloadKey]) -> None:
        self.request = request
        self.keys = keys
        self.answers: list[bool | None] = []
        self.head = 0
        """Leading blocks that are claimed. Derived from the claims it would cost more than the rest of an ask."""
        self.untracked: Sequence[int] = ()
        """Answers ``None`` that no claim keeps up to date: no tier has answered, or the request may claim no more."""
        self.kept: Kept | None = None
        self.stop: int | None = None
        """Blocks from this one on are declined; ``None``: none."""

    def __repr__(self) -> str:
        return f"Prefix({len(self.keys)} blocks, {len(self.answers)} answers, head={self.head})"


class Wait:
    """One wait of a request, from its first ``None`` to its end."""

    __slots__ = (
        "answered_s",
        "began_s",
        "deadline_s",
        "expected_s",
        "lost",
        "num_claims",
        "num_open",
        "planned_s",
        "prefixes",
        "sources",
    )

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        """Start of the wait, moved forward by any time it was fully answered."""
        self.answered_s: float | None = None
        """Since when all of it is answered. From then on it waits for the engine."""
        self.prefixes: dict[OffloadKey, Prefix] = {}
        """By the first key of each."""
        self.num_open = 0
        """Answers ``None`` of all prefixes."""
        self.num_claims = 0
        """Blocks that it claims, each once."""
        self.sources: dict[OffloadKey, str] = {}
        """Blocks that were promoted while it waits for them, with the tier that they came from."""
        self.lost: set[OffloadKey] = set()
        """Blocks that arrived for it and were evicted again: to promote them once more would be a loop."""
        self.planned_s = self.expected_s = 0.0
        """When it was planned, and how long it was expected to take from then on."""
        self.deadline_s: float | None = None
        """From then on it takes what has arrived; ``None``: it was not planned."""

    def __repr__(self) -> str:
        return f"Wait(open={self.num_open}, claims={self.num_claims}, prefixes={len(self.prefixes)})"

    def waited_s(self, now_s: float) -> float:
        """How long it has waited for answers."""
        return (now_s if self.answered_s is None else self.answered_s) - self.began_s

    def is_late(self, now_s: float) -> bool:
        """Whether it waited for answers beyond its deadline."""
        waited_until_s = now_s if self.answered_s is None else self.answered_s
        return self.deadline_s is not None and waited_until_s >= self.deadline_s

    def add_open(self, count: int, now_s: float) -> None:
        """More answers are ``None`` than before, or with a negative ``count`` fewer."""
        if not count:
            return
        if self.answered_s is not None:
            paused_s, self.answered_s = now_s - self.answered_s, None
            self.began_s += paused_s
            self.planned_s += paused_s
            if self.deadline_s is not None:
                self.deadline_s += paused_s
        self.num_open += count
        if not self.num_open:
            self.answered_s = max(now_s, self.began_s)  # its last block may have arrived before it was asked for
