# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side knows of a store's content, without asking it.

What a tier knows of its store's content, what it has yet to ask, and the events that tell of changes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvoffload.base import OffloadingEvent, OffloadKey

__all__ = ["BlockIndex", "Knowledge"]


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


_MOST_ASKED = 262_144


class Knowledge:
    """Answers from an index; a key that is not there is to be asked of the store, once, and answers ``None`` meanwhile.

    What was found absent is ``False`` for a while, and asked again in the background then. One thread.
    """

    def __init__(self, medium: str, max_blocks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._medium = medium
        self._index = BlockIndex(max_blocks, clock=clock)
        self._asking: set[OffloadKey] = set()
        self._to_ask: list[OffloadKey] = []
        # Keys whose store is under way; True once they were evicted in the middle of it.
        self._storing: dict[OffloadKey, bool] = {}
        self._events: list[OffloadingEvent] = []

    def __repr__(self) -> str:
        return f"Knowledge({self._medium!r}, known={len(self._index)}, asking={len(self._asking)})"

    def __len__(self) -> int:
        """Blocks known to be there."""
        return len(self._index)

    def answer(self, key: OffloadKey, is_scanned: bool) -> bool | None:
        """``is_scanned``: all that is there was told here, so that what the index lacks is absent."""
        if key in self._index:
            return True
        if key in self._asking:
            return None
        if self._index.is_absent(key):
            if self._index.wants_refresh(key):
                self._to_ask.append(key)
                # Still False to whoever asked before: a request must not be put off again and again.
            return False
        if (is_scanned and not self._index.has_forgotten) or len(self._asking) >= _MOST_ASKED:
            return False
        self._asking.add(key)
        self._to_ask.append(key)
        return None

    @property
    def has_questions(self) -> bool:
        return bool(self._to_ask)

    @property
    def is_asking(self) -> bool:
        """Somebody was answered ``None`` and the store has not said yet."""
        return bool(self._to_ask or self._asking)

    def take_questions(self) -> list[OffloadKey]:
        """What to ask the store for; ``answered`` or ``unanswered`` must follow for each."""
        keys, self._to_ask = self._to_ask, []
        return keys

    def answered(self, key: OffloadKey, is_there: bool) -> None:
        self._asking.discard(key)
        if is_there:
            self.learn([key])
        elif key not in self._index:  # else a store or the scan has taught us better meanwhile
            self._index.note_absent(key)

    def unanswered(self, keys: Iterable[OffloadKey]) -> None:
        """The store could not say; they are asked for again if somebody comes back for them."""
        self._asking.difference_update(keys)

    def store_begins(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._storing[key] = False

    def store_ends(self, key: OffloadKey) -> bool:
        """Whether ``key``, if it was written, is still there: it may have been evicted since."""
        return not self._storing.pop(key, False)

    def learn(self, keys: Sequence[OffloadKey]) -> None:
        """They are in the store."""
        if news := [key for key in keys if self._index.add(key)]:
            self._events.append(OffloadingEvent(news, self._medium, removed=False))

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """They are not, or not known to be, in the store any more."""
        for key in keys:
            if key in self._storing:
                self._storing[key] = True
        if gone := [key for key in keys if self._index.remove(key)]:
            self._events.append(OffloadingEvent(gone, self._medium, removed=True))

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events
