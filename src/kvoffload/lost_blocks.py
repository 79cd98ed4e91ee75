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
_MOST_PENDING = 16_384
_SHORTEST = 12
"""Bytes of a key that go into its hash: eight at its front, eight before its last four, and these."""
_MIXERS = tuple(np.uint64(mixer) for mixer in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


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

    ``record`` copies the bytes of the keys, and writes thousands of keys at once: a key costs some 150 ns, half of it
    for a random place in 8 MiB. Keys are told apart by their first and last bytes, which suffices for hashes of blocks.
    """

    def __init__(self, bits: int = 20, clock: Callable[[], float] = time.monotonic) -> None:
        assert 1 <= bits <= 64 - _TAG_BITS
        self._bits = bits
        self._clock = clock
        self._began_s = clock()
        self._entries: npt.NDArray[np.uint64] = np.zeros(1 << bits, dtype=np.uint64)
        self._causes: dict[str, int] = {}
        """Causes with their numbers, from 1; 0 is an empty entry."""
        self._pending: list[bytes] = []
        """The keys of each call that was not written yet, joined; each of ``_key_bytes`` bytes."""
        self._calls: list[tuple[int, int]] = []
        """For each of these calls the number of its keys, and the lower bits of their entries."""
        self._num_pending = 0
        self._key_bytes = 0

    def __repr__(self) -> str:
        return f"LostBlocks({len(self._entries)} entries, {self._num_pending} pending)"

    def record(self, keys: Collection[OffloadKey], cause: str) -> None:
        """``keys`` are lost for ``cause``, or were not stored for it. A key is found again if all keys have one length,
        as an engine's have.

        There are at most 255 causes; later ones are not recorded.
        """
        if not keys:
            return
        number = self._causes.get(cause)
        if number is None:
            if len(self._causes) >= (1 << _CAUSE_BITS) - 1:
                return
            number = self._causes[cause] = len(self._causes) + 1
        age = int((self._clock() - self._began_s) * _UNITS_PER_S) & ((1 << _AGE_BITS) - 1)
        self._pending.append(self._join(keys))
        self._calls.append((len(keys), number << _AGE_BITS | age))
        self._num_pending += len(keys)
        if self._num_pending >= _MOST_PENDING:
            self._write()

    def find(self, keys: Sequence[OffloadKey]) -> list[Loss | None]:
        """The last loss of each of ``keys``; ``None``: it was never recorded, or is forgotten."""
        if not keys:
            return []
        joined = self._join(keys)
        self._write()
        places, tags = self._places(joined)
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

    def _join(self, keys: Collection[OffloadKey]) -> bytes:
        """The bytes of ``keys``. Copying them now is cheaper than hashing them later, out of the caches."""
        length = len(next(iter(keys)))
        joined = b"".join(keys)
        if length < _SHORTEST or len(joined) != length * len(keys):
            length = max(_SHORTEST, *map(len, keys))
            joined = b"".join([key.rjust(length, b"\0") for key in keys])
        if length != self._key_bytes:
            self._write()
            self._key_bytes = length
        return joined

    def _places(self, joined: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Each key's index in the table, and further bits of its hash."""
        length = self._key_bytes
        shape, strides = (len(joined) // length,), (length,)
        front = np.ndarray(shape, np.uint64, joined, 0, strides)
        middle = np.ndarray(shape, np.uint64, joined, length - _SHORTEST, strides)
        end = np.ndarray(shape, np.uint32, joined, length - 4, strides)
        hashes = np.zeros(shape, np.uint64)
        for part, mixer in zip((front, middle, end), _MIXERS, strict=True):
            hashes ^= part
            hashes ^= hashes >> np.uint64(32)  # down, where the parts differ in their upper bytes alone
            hashes *= mixer
        hashes ^= hashes >> np.uint64(32)
        places = (hashes & np.uint64(len(self._entries) - 1)).view(np.int64)
        return places, hashes >> np.uint64(64 - _TAG_BITS)

    def _write(self) -> None:
        if not self._pending:
            return
        sizes, numbers = np.array(self._calls, np.uint64).T
        places, tags = self._places(b"".join(self._pending))
        self._pending.clear()
        self._calls.clear()
        self._num_pending = 0
        # Of several keys in one place, numpy keeps the last, which was recorded last.
        self._entries[places] = tags << np.uint64(64 - _TAG_BITS) | np.repeat(numbers, sizes.view(np.int64))
