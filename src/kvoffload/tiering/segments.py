# SPDX-License-Identifier: Apache-2.0
"""Segments: the places of consecutive blocks of a hit, as surveyed or as planned, and operations on lists of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Place(NamedTuple):
    """The place of a block of a hit. Tiers are numbers, in the configured order."""

    tiers: tuple[int, ...] = ()
    """The tiers that have it, or the tier from which it is being promoted. If both this and ``unknown`` are empty, the
    block is in host memory, or in flight from the GPU."""
    unknown: tuple[int, ...] = ()
    """The tiers that do not know yet whether they have it."""
    is_arriving: bool = False
    """Whether it is already being promoted."""
    is_overdue: bool = False
    """Whether the read that promotes it is overdue."""

    @property
    def is_unknown(self) -> bool:
        """Whether no tier is known to have it, but some may."""
        return bool(self.unknown) and not self.tiers

    @property
    def is_below(self) -> bool:
        """Whether it may have to be promoted."""
        return not self.is_arriving and bool(self.tiers or self.unknown)


HERE = Place()


class Segment(NamedTuple):
    """Consecutive blocks of a hit in one place. In a plan, the place is one source, or a tier whose answer is
    awaited."""

    place: Place
    num_blocks: int


def split(segments: Sequence[Segment], num_blocks: int) -> tuple[list[Segment], list[Segment]]:
    """Return the segments of the first ``num_blocks`` blocks, and those of the others."""
    head: list[Segment] = []
    for at, (place, count) in enumerate(segments):
        if count > num_blocks:
            tail = [Segment(place, count - num_blocks), *segments[at + 1 :]]
            return ([*head, Segment(place, num_blocks)] if num_blocks else head), tail
        head.append(Segment(place, count))
        num_blocks -= count
    return head, []


def waited_tiers(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Return the tiers whose answers a plan waits for."""
    return tuple({tier for place, _ in segments for tier in place.unknown})


def marks(survey: Sequence[Segment], segments: Sequence[Segment] | None = None) -> list[Segment]:
    """Return the known places of the blocks of ``survey`` that are neither in host memory nor in flight. With
    ``segments``, assume that the blocks of this plan are in flight."""
    return joined(
        (place if place.is_below and (segments is None or chosen.is_unknown) else HERE, num_blocks)
        for place, chosen, num_blocks in side_by_side(survey, survey if segments is None else segments)
    )


def joined(pieces: Iterable[tuple[Place, int]]) -> list[Segment]:
    """Return the same blocks, with neighbours in one place as one segment."""
    return [
        Segment(place, sum([num_blocks for _, num_blocks in group]))
        for place, group in itertools.groupby(pieces, operator.itemgetter(0))
    ]


def side_by_side(one: Iterable[tuple[S, int]], other: Iterable[tuple[T, int]]) -> Iterator[tuple[S, T, int]]:
    """Yield the values of both lists for the same blocks, as far as both lists go."""
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
