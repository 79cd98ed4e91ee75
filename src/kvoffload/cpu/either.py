# SPDX-License-Identifier: Apache-2.0
"""Two collections taken as one, without copying either."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from kvoffload.base import OffloadKey

__all__ = ["Either"]


class Either(Collection[OffloadKey]):
    """Keys that are in one of two collections. ``in`` costs what it costs there; a key of both counts twice."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Collection[OffloadKey], second: Collection[OffloadKey]) -> None:
        self._first = first
        self._second = second

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain(self._first, self._second)

    def __len__(self) -> int:
        return len(self._first) + len(self._second)
