# SPDX-License-Identifier: Apache-2.0
"""Segments: where consecutive blocks of a hit are, as surveyed or as planned, and what is done with lists of them."""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

S = TypeVar("S")
T = TypeVar("T")

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
    return joined(
        (place if place.is_below and (segments is None or chosen.is_unknown) else HERE, num_blocks)
        for place, chosen, num_blocks in side_by_side(survey, survey if segments is None else segments)
    )


def gathered(
    survey: Sequence[Segment], cuts: Sequence[int], ends: Sequence[int] | None
) -> tuple[list[Segment], list[int]]:
    """A survey of many segments as one of few, to plan with.

    The blocks are cut into stretches. Each stretch has one segment for each place: its blocks there, counted. A stretch
    ends at each of ``cuts``, before the first block of each place, and after the last block.

    Also returns where a hit may end: those of ``ends``, which rise, at which a stretch ends; without ``ends``, all ends
    of stretches.
    """
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

    def sources() -> Iterator[tuple[Place, int]]:
        left = sum([num_blocks for _, num_blocks in segments])
        for place, num_blocks in survey:
            num_blocks = min(num_blocks, left)
            left -= num_blocks
            while num_blocks:
                chosen, count = shares[place].pop()
                if count > num_blocks:
                    shares[place].append((chosen, count - num_blocks))
                    count = num_blocks
                num_blocks -= count
                yield chosen, count
            if not left:
                return

    return tuple(joined(sources()))


def joined(pieces: Iterable[tuple[Place, int]]) -> list[Segment]:
    """The same blocks, with neighbours in one place as one segment."""
    return [
        Segment(place, sum([num_blocks for _, num_blocks in group]))
        for place, group in itertools.groupby(pieces, operator.itemgetter(0))
    ]


def side_by_side(one: Iterable[tuple[S, int]], other: Iterable[tuple[T, int]]) -> Iterator[tuple[S, T, int]]:
    """What either list has for the same blocks, as far as both lists go."""
    rest, left = iter(other), 0
    for first, num_blocks in one:
        while num_blocks:
            if not left:
                pair = next(rest, None)
                if pair is None or not pair[1]:
                    return
                second, left = pair
            count = left if left < num_blocks else num_blocks
            num_blocks -= count
            left -= count
            yield first, second, count
