# SPDX-License-Identifier: Apache-2.0
"""How much of a hit is worth loading: the number of blocks that brings the first token earliest.

Pure functions of plain values. ``load_policy.py`` has the values, from what was measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Choice", "Pace", "Run", "choose"]


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast blocks come from somewhere: n of them in ``first_s + n * block_s`` seconds, and none of them at once.
    What is queued before them is a part of ``first_s``."""

    first_s: float = 0.0
    block_s: float = 0.0

    def seconds(self, num_blocks: int) -> float:
        return self.first_s + num_blocks * self.block_s if num_blocks else 0.0


class Run(NamedTuple):
    """Consecutive blocks of a hit that come from the same source."""

    source: int
    """Index of a ``Pace``."""
    num_blocks: int


class Choice(NamedTuple):
    """The answer: load this many blocks from the head on, and compute the rest."""

    num_blocks: int
    wait_s: float
    """Until all of them are in host memory."""
    saved_s: float
    """By how much the first token comes earlier than if all blocks were computed."""


def choose(
    runs: Sequence[Run],
    sources: Sequence[Pace],
    *,
    block_compute_s: float,
    queue_s: float = 0.0,
    ends: Sequence[int] | None = None,
) -> Choice:
    """The number k of leading blocks for which the first token comes earliest, and of several such k the largest.

    With ``ends``, which rise, k is one of them, or 0.
    Sources work side by side, each in the order of the blocks. The engine is busy with other work for ``queue_s``,
    during which loading costs nothing. Then it computes the other blocks in ``block_compute_s`` each. So the first
    token comes

        max(arrival of the first k blocks, queue_s) + (number of blocks - k) * block_compute_s

    seconds from now, plus what does not depend on k. Within a run this is a convex function of k, with one bend: where
    the run's own source becomes later than the queue and the other sources. So its minimum lies at the bend or at an
    end of the run, and no other k is tried. On either side of the bend it is a straight line. So the least of ``ends``
    lies next to the bend or next to an end of the run. (The first of a run counts too: there may be none at the end of
    the run before.)
    """
    taken = [0] * len(sources)
    best = Choice(0, 0.0, 0.0)
    before, arrived_s = 0, 0.0
    for source, num_blocks in runs:
        pace, first = sources[source], taken[source]
        level_s = max(arrived_s, queue_s)
        bend = 0
        if 0 < pace.block_s < math.inf and pace.first_s < math.inf:
            # Outside of the run its bend does not matter, and might be infinite.
            bend = math.floor(min(max((level_s - pace.first_s) / pace.block_s, 0.0), first + num_blocks)) - first
        if ends is None:
            tried = [at for at in (bend, bend + 1) if 0 < at < num_blocks] + [num_blocks]
        else:
            low, high = bisect_right(ends, before), bisect_right(ends, before + num_blocks)
            after = bisect_right(ends, before + bend)
            near = sorted({low, after - 1, after, high - 1})
            tried = [ends[at] - before for at in near if low <= at < high]
        for at in tried:
            own_s = max(arrived_s, pace.seconds(first + at))
            loaded = before + at
            delay_s = max(own_s, queue_s) - queue_s
            saved_s = loaded * block_compute_s - delay_s
            if saved_s >= best.saved_s:
                best = Choice(loaded, own_s, saved_s)
        before += num_blocks
        taken[source] += num_blocks
        arrived_s = max(arrived_s, pace.seconds(taken[source]))
        if arrived_s == math.inf:
            break
    return best
