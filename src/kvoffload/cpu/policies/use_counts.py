# SPDX-License-Identifier: Apache-2.0
"""How often recently evicted blocks were used, by class."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.base import OffloadKey

__all__ = ["UseCounts"]


class UseCounts:
    """Classes (``hit_density``) by key, kept for at least the last ``size`` remembered and at most about twice as many.

    Two generations: when the young one is full it becomes the old one, and the old one is forgotten at once, though its
    memory is given back little by little. That forgets in the order of remembering, which matters here: tails are
    evicted before their heads, so a head never loses its count while its tail keeps it.
    """

    __slots__ = ("_leaving", "_old", "_young", "size")

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self._young: dict[OffloadKey, int] = {}
        self._old: dict[OffloadKey, int] = {}
        self._leaving: dict[OffloadKey, int] = {}
        """A forgotten generation, of which as many are dropped as are remembered: a million at once would take long."""

    def __repr__(self) -> str:
        return f"UseCounts({len(self._young)} of {self.size} in the young generation)"

    def __len__(self) -> int:
        """Keys held, those that are forgotten but still there included."""
        return len(self._young) + len(self._old) + len(self._leaving)

    def remember(self, keys: Sequence[OffloadKey], classes: Sequence[int]) -> None:
        if len(self._young) >= self.size:
            self._young, self._old, self._leaving = {}, self._young, self._old
        self._young.update(zip(keys, classes))
        leaving = self._leaving
        if leaving:
            drop = leaving.popitem
            for _ in range(min(len(keys), len(leaving))):
                drop()

    def recall(self, keys: Sequence[OffloadKey]) -> list[int]:
        """The classes last remembered of the first of ``keys``, up to one that is not known."""
        young, old = self._young.get, self._old.get
        found: list[int] = []
        for key in keys:
            class_ = young(key)
            if class_ is None:
                class_ = old(key)
                if class_ is None:
                    break
            found.append(class_)
        return found

    def clear(self) -> None:
        self._young, self._old, self._leaving = {}, {}, {}
