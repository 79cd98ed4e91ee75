# SPDX-License-Identifier: Apache-2.0
"""Segments: where consecutive blocks of a hit are, as surveyed or as planned, and what is done with lists of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "HERE",
    "MOST_PIECES",
    "Place",
    "Segment",
    "cut",
    "gathered",
    "marks",
    "scattered",
    "side_by_side",
    "waited_tiers",
]

MOST_PIECES = 64
"""A plan takes some 30 us for each of its pieces. Surveys of more are gathered into about so many."""
_LEAST_STRETCHES = 8


class Place(NamedTuple):
    """Where a block of a hit is. Tiers are numbers, in the configured order."""

    tiers: tuple[int, ...] = ()
    """Those that have it, or the one that it is being promoted from. None: host memory, or on its way there from the
    device, unless some are ..."""
    unknown: tuple[int, ...] = ()
    """... those that do not know yet whether they have it."""
    is_arriving: bool = False
    """It is being promoted already, ..."""
    is_overdue: bool = False
    """... by a read that is overdue."""

    @property
    def is_unknown(self) -> bool:
        """No tier is known to have it, and some may."""
        return bool(self.unknown) and not self.tiers

    @property
    def is_below(self) -> bool:
        """It may have to be promoted."""
        return not self.is_arriving and bool(self.tiers or self.unknown)


HERE = Place()


class Segment(NamedTuple):
    """Consecutive blocks of a hit in one place. In a plan: from one source, or from a tier that is waited for."""

    place: Place
    num_blocks: int


def cut(segments: Sequence[Segment], num_blocks: int) -> list[Segment]:
    """Without the first ``num_blocks``."""
    left: list[Segment] = []
    for place, count in segments:
        if count > num_blocks:
            left.append(Segment(place, count - max(num_blocks, 0)))
        num_blocks -= min(count, num_blocks)
    return left


def waited_tiers(segments: Sequence[Segment]) -> tuple[int, ...]:
    """The tiers whose answers a plan waits for."""
    return tuple({tier for place, _ in segments for tier in place.unknown})


def marks(survey: Sequence[Segment], segments: Sequence[Segment] | None = None) -> list[Segment]:
    """What is known of the blocks of ``survey`` that are not here and not on their way. With ``segments``, once those
    of a plan are on their way."""
    found: list[Segment] = []
    last, total = HERE, 0
    for place, chosen, num_blocks in side_by_side(survey, survey if segments is None else segments):
        mark = place if place.is_below and (segments is None or chosen.is_unknown) else HERE
        if mark is not last and mark != last:
            if total:
                found.append(Segment(last, total))
            last, total = mark, 0
        total += num_blocks
    if total:
        found.append(Segment(last, total))
    return found


def gathered(
    survey: Sequence[Segment], cuts: Sequence[int], ends: Sequence[int] | None
) -> tuple[list[Segment], list[int]]:
    """The blocks of ``survey`` in stretches, in each of which those in one place come together; and the ``ends``, which
    rise (``None``: any), at which a stretch ends. One does at each of ``cuts``, before the first block of each place,
    and after the last block of all."""
    firsts: dict[Place, int] = {}
    total = 0
    for place, num_blocks in survey:
        firsts.setdefault(place, total)
        total += num_blocks
    num_stretches = max(_LEAST_STRETCHES, MOST_PIECES // len(firsts))
    stops = {*cuts, *firsts.values(), *(total * part // num_stretches for part in range(1, num_stretches)), total} - {0}
    useful = stops
    if ends is not None:
        useful = {ends[at - 1] for stop in stops if (at := bisect_right(ends, stop))}
    found: list[Segment] = []
    together: dict[Place, int] = {}
    at, rest = 0, iter(sorted({*stops, *useful}))
    stop = next(rest)
    for place, num_blocks in survey:
        while at + num_blocks >= stop:
            count = stop - at
            if count:
                together[place] = together.get(place, 0) + count
                num_blocks -= count
            found += map(Segment._make, together.items())
            together = {}
            at, stop = stop, next(rest, total + 1)
        if num_blocks:
            together[place] = together.get(place, 0) + num_blocks
            at += num_blocks
    return found, sorted(useful)


def scattered(survey: Sequence[Segment], pieces: Sequence[Segment], segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The leading blocks of ``survey`` with the sources that ``segments`` have for ``pieces``, into which it was
    gathered: as many as ``segments`` are."""
    shares: dict[Place, list[tuple[Place, int]]] = {}
    for place, chosen, num_blocks in side_by_side(pieces, segments):
        shares.setdefault(place, []).append((chosen, num_blocks))
    for each in shares.values():
        each.reverse()
    found: list[Segment] = []
    last, total = HERE, 0
    left = sum([num_blocks for _, num_blocks in segments])
    for place, num_blocks in survey:
        if num_blocks > left:
            num_blocks = left
        left -= num_blocks
        while num_blocks:
            chosen, count = shares[place].pop()
            if count > num_blocks:
                shares[place].append((chosen, count - num_blocks))
                count = num_blocks
            num_blocks -= count
            if chosen is not last and chosen != last:
                if total:
                    found.append(Segment(last, total))
                last, total = chosen, 0
            total += count
        if not left:
            break
    if total:
        found.append(Segment(last, total))
    return tuple(found)


def side_by_side(one: Sequence[Segment], other: Sequence[Segment]) -> Iterator[tuple[Place, Place, int]]:
    """The places of the same blocks, as far as both lists go."""
    rest = iter(other)
    second, left = HERE, 0
    for first, num_blocks in one:
        while num_blocks:
            if not left:
                second, left = next(rest, (HERE, 0))
                if not left:
                    return
            count = left if left < num_blocks else num_blocks
            num_blocks -= count
            left -= count
            yield first, second, count
