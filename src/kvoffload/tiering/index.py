# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side knows of a store's content, without asking it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from kvoffload.base import OffloadKey

__all__ = ["BlockIndex"]


class BlockIndex:
    """Keys known to be in a store, and keys lately found absent. A hint on both sides. One thread.

    At most ``max_blocks`` present keys (some 150 bytes each, the key included) and ``max_absent`` absent ones; the
    oldest knowledge is forgotten first, and what is not known is asked for.
    """

    def __init__(
        self,
        max_blocks: int,
        *,
        max_absent: int = 65_536,
        absent_ttl_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_blocks = max_blocks
        self._max_absent = max_absent
        self._absent_ttl_s = absent_ttl_s
        self._clock = clock
        self._present: OrderedDict[OffloadKey, None] = OrderedDict()
        self._absent: OrderedDict[OffloadKey, float] = OrderedDict()
        self.has_forgotten = False
        """Whether a present key had to be forgotten for want of room."""

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._present

    def add(self, key: OffloadKey) -> bool:
        """``key`` is there; whether that is news."""
        self._absent.pop(key, None)
        if key in self._present:
            return False
        if len(self._present) >= self._max_blocks:
            self._present.popitem(last=False)
            self.has_forgotten = True
        self._present[key] = None
        return True

    def remove(self, key: OffloadKey) -> bool:
        """Nothing is known of ``key`` any more; whether it was thought to be there."""
        self._absent.pop(key, None)
        return self._present.pop(key, self) is None

    def note_absent(self, key: OffloadKey) -> None:
        """The store was asked and does not have it."""
        if len(self._absent) >= self._max_absent:
            self._absent.popitem(last=False)
        self._absent[key] = self._clock() + self._absent_ttl_s

    def is_absent(self, key: OffloadKey) -> bool:
        return key in self._absent

    def wants_refresh(self, key: OffloadKey) -> bool:
        """Whether an absent key was asked for so long ago that asking again is worth it; then not again soon."""
        if self._clock() < self._absent[key]:
            return False
        self._absent[key] = self._clock() + self._absent_ttl_s
        return True
