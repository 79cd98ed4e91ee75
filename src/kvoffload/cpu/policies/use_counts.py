# SPDX-License-Identifier: Apache-2.0
"""How often recently evicted blocks were used, in a few bytes each."""

from __future__ import annotations

from array import array

__all__ = ["UseCounts"]

_COUNT_BITS = 3
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_TAG_MASK = 0xFFFFFFFF & ~_COUNT_MASK


class UseCounts:
    """Small counts (1 to 7) by 64-bit hash, kept for at least the last ``size`` and at most the last 2 · ``size``
    entries remembered.

    Two generations of open-addressed tables of 32-bit words (a 29-bit tag and the count), some 15 bytes per entry
    of ``size``: when the young one is full it becomes the old one, and the old one is forgotten at once. That forgets
    in the order of remembering, which matters here: tails are evicted before their heads, so a head never loses its
    count while its tail keeps it. A table that overwrites at random would do just that, and make tails outlive heads.

    Two hashes with the same tag and nearby places are confused once in some 10⁸ look-ups; a wrong count costs a
    slightly worse order and nothing else.
    """

    __slots__ = ("_held", "_old", "_slots", "_young", "size")

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self._slots = 2 * self.size + 1
        self._young, self._old = self._empty(), self._empty()
        self._held = 0

    def __repr__(self) -> str:
        return f"UseCounts({self._held} of {self.size} in the young generation)"

    def remember(self, digest: int, count: int) -> None:
        if self._held >= self.size:
            self._young, self._old = self._empty(), self._young
            self._held = 0
        table, tag = self._young, digest & _TAG_MASK
        at = (digest >> 32) % self._slots
        if not table[at]:  # nearly always
            self._held += 1
            table[at] = tag | (count if count < _COUNT_MASK else _COUNT_MASK)
            return
        while (word := table[at]) and word & _TAG_MASK != tag:
            at = at + 1 if at + 1 < self._slots else 0
        if not word:
            self._held += 1
        table[at] = tag | (count if count < _COUNT_MASK else _COUNT_MASK)

    def recall(self, digest: int) -> int:
        """The count last remembered, or 0."""
        start = (digest >> 32) % self._slots
        young, old = self._young, self._old
        if young[start] and (count := self._probe(young, start, digest & _TAG_MASK)):
            return count
        return self._probe(old, start, digest & _TAG_MASK) if old[start] else 0

    def _probe(self, table: array[int], at: int, tag: int) -> int:
        while word := table[at]:
            if word & _TAG_MASK == tag:
                return word & _COUNT_MASK
            at = at + 1 if at + 1 < self._slots else 0
        return 0

    def clear(self) -> None:
        self._young, self._old = self._empty(), self._empty()
        self._held = 0

    def _empty(self) -> array[int]:
        return array("I", bytes(4 * self._slots))
