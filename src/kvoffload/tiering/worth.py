# SPDX-License-Identifier: Apache-2.0
"""Decide how much of a hit to load, and from where, so that the first token comes earliest.

The functions are pure. ``load_policy.py`` provides their arguments.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Pace(NamedTuple):
    """The pace at which blocks arrive from a source: n blocks take ``first_s + n * block_s`` seconds, and no blocks
    take no time. ``first_s`` includes the time until queued blocks have arrived."""

    first_s: float = 0.0
    block_s: float = 0.0

    def seconds(self, num_blocks: float) -> float:
        return self.first_s + num_blocks * self.block_s if num_blocks else 0.0

    def blocks_by(self, time_s: float) -> float:
        """Return the number of blocks that arrive by ``time_s``."""
        if time_s < self.first_s or self.first_s == math.inf:
            return 0.0
        return (time_s - self.first_s) / self.block_s if self.block_s else math.inf


class Run(NamedTuple):
    """Consecutive blocks of a hit with the same possible sources."""

    sources: tuple[int, ...]
    """Indices of ``Pace``s. Empty if no tier has the blocks."""
    num_blocks: int


class Choice(NamedTuple):
    """The decision: load this many leading blocks, and compute the rest."""

    num_blocks: int
    wait_s: float
    """Seconds until all of them are in host memory."""
    saved_s: float
    """Seconds by which the first token comes earlier than if all blocks were computed."""


def assign(runs: Sequence[Run], paces: Sequence[Pace]) -> list[Run]:
    """Give each run one source: the one that ends it first, after earlier runs. If several are equal, use the first."""
    taken: dict[int, int] = {}
    found: list[Run] = []
    for sources, num_blocks in runs:
        if len(sources) > 1:
            ends_s = {source: paces[source].seconds(taken.get(source, 0) + num_blocks) for source in sources}
            sources = (min(sources, key=ends_s.__getitem__),)
        for source in sources:
            taken[source] = taken.get(source, 0) + num_blocks
        found.append(Run(sources, num_blocks))
    return found


def _num_in_time(pace: Pace, earlier: int, num_blocks: int, latest_s: Callable[[int], float]) -> int:
    """Return how many of ``num_blocks`` blocks, which follow ``earlier`` ones of their source, arrive in time.

    The n-th block must arrive by ``latest_s(n)``, which is convex. So the blocks in time fall behind up to some block,
    and catch up after it.
    """

    def spare_s(number: int) -> float:
        return latest_s(number) - pace.seconds(earlier + number)

    if not spare_s(1) >= 0:
        return 0
    low, high = 1, num_blocks
    while low < high:  # the block with the least spare time
        middle = (low + high) // 2
        low, high = (low, middle) if spare_s(middle) <= spare_s(middle + 1) else (middle + 1, high)
    if spare_s(low) >= 0:
        return num_blocks
    return bisect_right(range(1, low), 0.0, key=lambda number: -spare_s(number))


def choose(
    runs: Sequence[Run],
    paces: Sequence[Pace],
    *,
    block_compute_s: float,
    growth_s: float = 0.0,
    queue_s: float = 0.0,
    before_turn: bool = True,
    turn_s: float = 0.0,
    slack_s: float = math.inf,
    ends: Sequence[int] | None = None,
) -> Choice:
    """Return the number k of leading blocks for which the first token comes earliest, or the largest of several such k.

    Each run has at most one source, and sources work in parallel. With ``ends`` (in ascending order), k is one of them,
    or 0. Each of the k blocks arrives at most ``slack_s`` after the time at which the blocks before it would be
    computed. The engine is busy with other work for ``queue_s``, during which loading costs nothing ``before_turn``.
    Then it computes the other blocks. The first n blocks take ``n * block_compute_s + n * n * growth_s / 2``. If the k
    blocks arrive later, other requests overtake the request, which takes ``turn_s``. So the first token comes

        queue_s + (time to compute the blocks from k on), if the first k blocks arrive in time, and otherwise
        max(arrival of the first k blocks, queue_s + turn_s) + (time to compute the blocks from k on)

    seconds from now, plus a time that does not depend on k. Within a run, the time saved by k is convex between at most
    two bends, where the run's source stops being in time, and where it becomes later than the overtaking requests.
    (Both may be earlier, because of the other sources.) So the best k is next to a bend or at an end of the run, and no
    other k is tried. The best of ``ends`` is next to a bend or next to an end of the run. (The first one in a run is
    also tried, because there may be none at the end of the previous run.)
    """
    best, free_s = Choice(0, 0.0, 0.0), queue_s if before_turn else 0.0
    before, arrived_s = 0, 0.0
    taken: dict[int, int] = {}

    def latest_s(num_blocks: int) -> float:
        return max(slack_s + num_blocks * (block_compute_s + growth_s * num_blocks / 2), 0.0)

    for sources, num_blocks in runs:
        if not sources:
            break
        (source,) = sources
        pace, earlier = paces[source], taken.get(source, 0)
        if slack_s == math.inf:
            most = num_blocks
        else:
            most = _num_in_time(pace, earlier, num_blocks, lambda at: latest_s(before + at - 1))  # noqa: B023
        if not most:
            break
        bends = {
            max(math.floor(min(pace.blocks_by(max(arrived_s, time_s)) - earlier, num_blocks)), 0)
            for time_s in {free_s, queue_s + turn_s}
        }
        if ends is None:
            tried = sorted({at for bend in bends for at in (bend, bend + 1) if 0 < at < most} | {most})
        else:
            low, high = bisect_right(ends, before), bisect_right(ends, before + most)
            near = {at for bend in bends for after in [bisect_right(ends, before + bend)] for at in (after - 1, after)}
            tried = [ends[at] - before for at in sorted({low, high - 1, *near}) if low <= at < high]
        for at in tried:
            own_s = max(arrived_s, pace.seconds(earlier + at))
            loaded = before + at
            delay_s = max(own_s - queue_s, turn_s) if own_s > free_s else 0.0
            saved_s = loaded * (block_compute_s + growth_s * loaded / 2) - delay_s
            if saved_s >= best.saved_s:
                best = Choice(loaded, own_s, saved_s)
        before += num_blocks
        taken[source] = earlier + num_blocks
        arrived_s = max(arrived_s, pace.seconds(taken[source]))
        if most < num_blocks or arrived_s == math.inf:
            break
    return best
