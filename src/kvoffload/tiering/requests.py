# SPDX-License-Identifier: Apache-2.0
"""What the tiering manager remembers of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.tiering.guard import GuardedTier

__all__ = ["RequestState"]


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from ``on_new_request`` (or its first use) until its tiers have been told of its end.

    A request *waits* from its first answer ``None`` until it loads, runs, ends or has no patience left. Only while
    it waits are the blocks it was told of its claims (``kvoffload.tiering.waiting``).
    """

    context: ReqContext
    patience_s: float
    """Seconds of waiting it has left; spent by every wait, never refilled."""
    whole_request_tiers: tuple[GuardedTier, ...] = ()
    """The tiers that asked for ``REQUEST_LEVEL``."""
    waiting_since: float | None = None
    told: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks answered ``True`` in step ``told_step``, in order, while it did not wait."""
    told_step: int = -1
    claims: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks kept for it while it waits, in the order it came to them."""
    promoted: set[OffloadKey] = field(default_factory=set)
    """Blocks promoted for it in this wait: a second time would be a loop, so it is a miss instead."""
    failed: set[OffloadKey] = field(default_factory=set)
    """Blocks whose promotion failed while it waited for them: misses for good."""
    stores_in_flight: int = 0
    """Blocks between ``prepare_store`` and ``complete_store``, each of which may still be cascaded for it."""
    parked: int = 0
    """Request-level cascades that wait for their block to be written."""
    finished: bool = False

    def remember_told(self, key: OffloadKey, step: int) -> None:
        if self.told_step != step:
            self.told.clear()
            self.told_step = step
        self.told[key] = None

    def has_waited_enough(self, now_s: float) -> bool:
        waited_s = 0.0 if self.waiting_since is None else now_s - self.waiting_since
        return waited_s >= self.patience_s

    @property
    def may_still_submit(self) -> bool:
        """Whether something begun for it may yet become a job of a tier."""
        return bool(self.stores_in_flight or self.parked)
