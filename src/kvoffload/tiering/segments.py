# SPDX-License-Identifier: Apache-2.0
"""Segments: where consecutive blocks of a hit are, as surveyed or as planned, and what is done with lists of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

S = TypeVar("S")
T = TypeVar("T")


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
