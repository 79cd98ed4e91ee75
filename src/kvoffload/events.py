# SPDX-License-Identifier: Apache-2.0
"""Events that wait for somebody to take them, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.base import OffloadingEvent, OffloadKey

_MIN_KEYS = 65_536


def checked_events(events: Iterable[object]) -> list[OffloadingEvent]:
    """``events``, which are foreign. Raises ``TypeError`` if one is none."""
    found: list[OffloadingEvent] = []
    for event in events:
        if not isinstance(event, OffloadingEvent) or not all(isinstance(key, bytes) for key in event.keys):
            raise TypeError(f"this is not an event: {event!r:.100}")
        found.append(event)
    return found


class PendingEvents:
    """The events of one ``medium`` since they were last taken, in the order in which they became true. One thread.

    Events that are not taken are *folded*, again and again: what is left of them is only how the medium
    differs from what was taken last. That is at most the blocks that it held then and those that it holds now, and a
    taker who comes late still folds to the resident set.
    """

    def __init__(self, medium: str, min_keys: int = _MIN_KEYS) -> None:
        """Up to ``min_keys`` keys wait without being folded."""
        self._medium = medium
        self._min_keys = self._fold_at = min_keys
        self._events: list[OffloadingEvent] = []
        self._num_keys = 0

    def __repr__(self) -> str:
        return f"PendingEvents({self._medium!r}, {self._num_keys} keys)"

    def __len__(self) -> int:
        """Keys in the events that wait."""
        return self._num_keys

    def add(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        """``keys`` have left (``removed``) or appeared."""
        if not keys:
            return
        self._events.append(OffloadingEvent([*keys], self._medium, removed))
        self._num_keys += len(keys)
        if self._num_keys > self._fold_at:
            self._fold()

    def take(self) -> list[OffloadingEvent]:
        """Returns all that wait, and forgets them."""
        events, self._events = self._events, []
        self._num_keys, self._fold_at = 0, self._min_keys
        return events

    def _fold(self) -> None:
        first: dict[OffloadKey, bool] = {}
        last: dict[OffloadKey, bool] = {}
        for event in self._events:
            for key in event.keys:
                first.setdefault(key, event.removed)
                last[key] = event.removed
        # A key whose first change here is that it left was there before.
        gone = [key for key, removed in last.items() if removed and first[key]]
        new = [key for key, removed in last.items() if not removed and not first[key]]
        self._num_keys = len(gone) + len(new)
        changes = ((gone, True), (new, False))
        self._events = [OffloadingEvent(keys, self._medium, removed) for keys, removed in changes if keys]
        # Twice what cannot be folded: each key is looked at twice on average, however late a taker comes.
        self._fold_at = max(self._min_keys, 2 * self._num_keys)
