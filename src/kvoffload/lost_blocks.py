# SPDX-License-Identifier: Apache-2.0
"""Why blocks are not here: a sketch in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey

__all__ = ["Loss", "LostBlocks"]

_AGE_BITS, _CAUSE_BITS = 28, 8
_TAG_BITS = 64 - _AGE_BITS - _CAUSE_BITS
_UNITS_PER_S = 10
_MOST_PENDING = 4096


@dataclass(frozen=True, slots=True)
class Loss:
    """The last known reason why a block is not here, and how long ago it was recorded."""

    cause: str
    seconds_ago: float


class LostBlocks:
    """Remembers for each key the last ``cause`` recorded for it, for example ``"evicted CPU"``. One thread.

    A table of ``2 ** bits`` entries of 8 bytes, without the keys. A key has one place in it, which it shares with
    others: the last one recorded there stays. So of a key that was recorded ``n`` keys ago the cause is still known
    with the probability ``exp(-n / 2 ** bits)``: with the default of 2²⁰ entries, 91 % after 100,000 other keys and
    37 % after a million. An entry has 28 bits of the key's hash beyond its place, so a key that was never recorded gets
    a cause with a probability of 2⁻²⁸ at most. Times are exact to a tenth of a second, and count to 310 days.

    ``record`` keeps the keys of some calls aside, and writes thousands at once: a key costs a few tens of nanoseconds.
    """

    def __init__(self, bits: int = 20, clock: Callable[[], float] = time.monotonic) -> None:
        assert 1 <= bits <= 64 - _TAG_BITS
        self._bits = bits
        self._clock = clock
        self._began_s = clock()
        self._entries: npt.NDArray[np.uint64] = np.zeros(1 << bits, dtype=np.uint64)
        self._causes: dict[str, int] = {}
        """Causes with their numbers, from 1; 0 is an empty entry."""
        self._pending: list[tuple[Collection[OffloadKey], int]] = []
        self._num_pending = 0

    def __repr__(self) -> str:
        return f"LostBlocks({len(self._entries)} entries, {self._num_pending} pending)"

    def record(self, keys: Collection[OffloadKey], cause: str) -> None:
        """``keys`` are lost for ``cause``, or were not stored for it. The collection is this object's from now on.

        There are at most 255 causes; later ones are not recorded.
        """
        number = self._causes.get(cause)
        if number is None:
            if len(self._causes) >= (1 << _CAUSE_BITS) - 1:
                return
            number = self._causes[cause] = len(self._causes) + 1
        age = int((self._clock() - self._began_s) * _UNITS_PER_S) & ((1 << _AGE_BITS) - 1)
        self._pending.append((keys, number << _AGE_BITS | age))
        self._num_pending += len(keys)
        if self._num_pending >= _MOST_PENDING:
            self._write()

    def find(self, keys: Sequence[OffloadKey]) -> list[Loss | None]:
        """The last loss of each of ``keys``; ``None``: it was never recorded, or is forgotten."""
        if not keys:
            return []
        self._write()
        places, tags = self._places(keys)
        entries = self._entries[places]
        known = (entries >> np.uint64(64 - _TAG_BITS) == tags) & (entries & np.uint64((1 << 36) - 1) != 0)
        if not known.any():
            return [None] * len(keys)
        now = int((self._clock() - self._began_s) * _UNITS_PER_S)
        causes = list(self._causes)
        found: list[Loss | None] = []
        for entry, is_known in zip(entries.tolist(), known.tolist(), strict=True):
            if is_known:
                age = (now - entry) & ((1 << _AGE_BITS) - 1)
                cause = causes[(entry >> _AGE_BITS & ((1 << _CAUSE_BITS) - 1)) - 1]
                found.append(Loss(cause, age / _UNITS_PER_S))
            else:
                found.append(None)
        return found

    def _places(self, keys: Collection[OffloadKey]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Each key's index in the table, and further bits of its hash. Python caches the hash of bytes."""
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
        return hashes & np.uint64(len(self._entries) - 1), hashes >> np.uint64(64 - _TAG_BITS)

    def _write(self) -> None:
        if not self._pending:
            return
        keys = [key for batch, _ in self._pending for key in batch]
        numbers = np.fromiter((number for _, number in self._pending), np.uint64, len(self._pending))
        sizes = np.fromiter((len(batch) for batch, _ in self._pending), np.int64, len(self._pending))
        self._pending.clear()
        self._num_pending = 0
        places, tags = self._places(keys)
        # Of several keys in one place, numpy keeps the last, which was recorded last.
        self._entries[places] = tags << np.uint64(64 - _TAG_BITS) | np.repeat(numbers, sizes)
