# SPDX-License-Identifier: Apache-2.0
"""How much of a hit is worth loading, and from where: the number of blocks that brings the first token earliest.

Pure functions of plain values. ``load_policy.py`` has the values.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_PARTS = 8
"""A run of which several sources have the blocks is tried at its ends, at its bends, and at this many parts of it."""
_PORTIONS = 256
"""No portion is smaller than one in so many of all blocks: this bounds how long sharing them out takes."""
_SHARE = 16
"""A portion of a run is one in so many of its blocks that are left, so that the last ones are small."""


class Pace(NamedTuple):
    """How fast blocks come from somewhere: n of them in ``first_s + n * block_s`` seconds, and none of them at once.
    What is queued before them is a part of ``first_s``."""

    first_s: float = 0.0
    block_s: float = 0.0

    def seconds(self, num_blocks: float) -> float:
        return self.first_s + num_blocks * self.block_s if num_blocks else 0.0

    def blocks_by(self, time_s: float) -> float:
        """How many of them come until then."""
        if time_s < self.first_s or self.first_s == math.inf:
            return 0.0
        return (time_s - self.first_s) / self.block_s if self.block_s else math.inf


class Run(NamedTuple):
    """Consecutive blocks of a hit, each of which may come from any of the same sources."""

    sources: tuple[int, ...]
    """Indices of ``Pace``s. None: the blocks are nowhere."""
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
    slack_s: float = math.inf,
    ends: Sequence[int] | None = None,
) -> Choice:
    """The number k of leading blocks for which the first token comes earliest, and of several such k the largest.

    With ``ends``, which rise, k is one of them, or 0. Each of the k blocks arrives at most ``slack_s`` after those
    before it would be computed.
    Sources work side by side, and share the blocks that several of them have as is best. The engine is busy with other
    work for ``queue_s``, during which loading costs nothing. Then it computes the other blocks in ``block_compute_s``
    each. So the first token comes

        max(arrival of the first k blocks, queue_s) + (number of blocks - k) * block_compute_s

    seconds from now, plus what does not depend on k. Within a run whose blocks have one source this is a convex
    function of k, with one bend: where the run's own source becomes later than the queue and the other sources. So its
    minimum lies at the bend or at an end of the run, and no other k is tried. On either side of the bend it is a
    straight line. So the least of ``ends`` lies next to the bend or next to an end of the run. (The first of a run
    counts too: there may be none at the end of the run before.) Where several sources have the blocks there are more
    bends, some of them between a few parts of the run, which are tried too.
    """
    work = _Work(runs, sources)
    best = Choice(0, 0.0, 0.0)
    before, arrived_s = 0, 0.0

    def latest_s(num_blocks: int) -> float:
        return max(slack_s + num_blocks * block_compute_s, 0.0)

    for names, num_blocks in runs:
        if not names:
            break
        loads = work.loads_with(names)
        if max(load.seconds(1) for load in loads) > latest_s(before):
            break
        level_s = max(arrived_s, queue_s)
        bends = {min(max(math.floor(load.room_by(level_s, num_blocks)), 0), num_blocks) for load in loads}
        if any(len(load.paces) > 1 for load in loads):
            bends |= {num_blocks * part // _PARTS for part in range(1, _PARTS)}
        if ends is None:
            tried = sorted({at for bend in bends for at in (bend, bend + 1) if 0 < at < num_blocks} | {num_blocks})
        else:
            low, high = bisect_right(ends, before), bisect_right(ends, before + num_blocks)
            after = {bisect_right(ends, before + bend) for bend in bends}
            near = sorted({low, high - 1, *after, *(at - 1 for at in after)})
            tried = [ends[at] - before for at in near if low <= at < high]
        for at in tried:
            own_s = max([arrived_s, *(load.seconds(at) for load in loads)])
            loaded = before + at
            saved_s = loaded * block_compute_s - (max(own_s, queue_s) - queue_s)
            if saved_s >= best.saved_s and own_s <= latest_s(loaded - 1):
                best = Choice(loaded, own_s, saved_s)
        before += num_blocks
        for load in loads:
            load.num_blocks += num_blocks
            arrived_s = max(arrived_s, load.seconds(0))
        if arrived_s > latest_s(before - 1) or arrived_s == math.inf:
            break
    return best


def spread(
    runs: Sequence[Run],
    sources: Sequence[Pace],
    wait_s: float,
    portions: Sequence[int],
    last: Collection[int] = (),
    *,
    block_compute_s: float = 0.0,
    slack_s: float = math.inf,
) -> list[Run]:
    """Each of ``runs`` cut into one run for each of its sources, so that all end by ``wait_s``, the time that
    ``choose`` found, as nearly as portions allow: by index, a source gets so many blocks at once.

    Each portion goes to the source that would end it first, the first of equals, unless that source has no time left
    beside the blocks that only it and other busy ones have, or ends it more than ``slack_s`` after all blocks up to the
    end of the run would be computed. The fastest source has the head, so that most of what is there is of use if
    another one is late. The sources ``last`` may not have the blocks, and say so with their first: they have the tail.
    """
    if all(len(run.sources) < 2 for run in runs):
        return [*runs]
    work = _Work(runs, sources)
    least = sum([num_blocks for _, num_blocks in runs]) // _PORTIONS
    for names, num_blocks in runs:
        for load in work.loads_with(names):
            load.num_blocks += num_blocks
    taken, found, latest_s = [0] * len(sources), list[Run](), slack_s
    for names, num_blocks in runs:
        latest_s += num_blocks * block_compute_s
        left, shares = num_blocks, Counter[int]()
        while left:
            most = max(least, left // _SHARE) if len(names) > 1 else left
            counts = {name: min(max(portions[name], most), left) for name in names}
            ends_s = {name: sources[name].seconds(taken[name] + count) for name, count in counts.items()}
            order = sorted(names, key=ends_s.__getitem__)
            best = next(
                (
                    name
                    for name in order
                    if ends_s[name] <= latest_s and work.can_take(name, names, counts[name], taken, wait_s)
                ),
                order[0],
            )
            taken[best] += counts[best]
            shares[best] += counts[best]
            left -= counts[best]
            for load in work.loads_with(names):
                load.num_blocks -= counts[best]
        if unsure := [name for name in shares if name in last]:
            # More than comes until then is left to whoever is known to have it by then.
            name = min(unsure, key=lambda name: sources[name].first_s)
            for other in shares.keys() - unsure:
                most = max(portions[other], int(sources[other].blocks_by(sources[name].first_s)))
                shares[name] += max(shares[other] - most, 0)
                shares[other] = min(shares[other], most)
        order = sorted(shares, key=lambda name: (name in last, sources[name].block_s, name))
        found += [Run((name,), shares[name]) for name in order]
    return found


class _Load:
    """Some sources, and the blocks that only these have."""

    def __init__(self, names: frozenset[int], sources: Sequence[Pace]) -> None:
        self.names = names
        self.num_blocks = 0
        self.paces = sorted(sources[name] for name in names if max(sources[name]) < math.inf)

    def seconds(self, num_more: int) -> float:
        """When all of them have come, with ``num_more``, if no source has anything else to do."""
        num_blocks = self.num_blocks + num_more
        if not num_blocks:
            return 0.0
        if len(self.paces) == 1:
            return self.paces[0].seconds(num_blocks)
        rate = credit = 0.0  # blocks by a time are rate * time - credit
        for first_s, block_s in self.paces:
            if rate and (num_blocks + credit) / rate <= first_s:
                break
            if not block_s:
                return first_s
            rate += 1 / block_s
            credit += first_s / block_s
        return (num_blocks + credit) / rate if rate else math.inf

    def room_by(self, time_s: float, most: int) -> float:
        """How many more come until ``time_s``."""
        by_then = sum(pace.blocks_by(time_s) for pace in self.paces)
        return min(by_then - self.num_blocks, most)


class _Work:
    """All sets of sources that have blocks in common. Blocks arrive by a time exactly if for each such set those that
    only it has do (Hall's theorem, for what may be cut as finely as one likes)."""

    def __init__(self, runs: Iterable[Run], sources: Sequence[Pace]) -> None:
        self._sources = sources
        kinds = {frozenset(run.sources) for run in runs if run.sources}
        sets, added = set(kinds), [*kinds] if any(len(kind) > 1 for kind in kinds) else []
        while added:
            one = added.pop()
            new = {one | kind for kind in kinds if one & kind} - sets
            sets |= new
            added += new
        self._loads = [_Load(names, sources) for names in sets]
        self._with: dict[tuple[int, ...], list[_Load]] = {}

    def loads_with(self, names: tuple[int, ...]) -> list[_Load]:
        """Those to which a block counts that ``names`` have."""
        if names not in self._with:
            self._with[names] = [load for load in self._loads if load.names.issuperset(names)]
        return self._with[names]

    def can_take(self, name: int, names: tuple[int, ...], count: int, taken: Sequence[int], wait_s: float) -> bool:
        """Whether a source may take ``count`` of the blocks that ``names`` have, and all others still come in time."""
        for load in self._loads:
            if name in load.names and not load.names.issuperset(names):
                room = sum(max(self._sources[each].blocks_by(wait_s) - taken[each], 0) for each in load.names)
                if load.num_blocks > room - count + 1e-6:
                    return False
        return True
