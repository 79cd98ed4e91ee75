# SPDX-License-Identifier: Apache-2.0
"""Keep events in bounded memory until somebody takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.base import OffloadingEvent, OffloadKey

_MIN_KEYS = 65_536


def checked_events(events: Iterable[object]) -> list[OffloadingEvent]:
    """Return ``events``, which foreign code made, as a list. Raises ``TypeError`` if one of them is not an event."""
    found: list[OffloadingEvent] = []
    for event in events:
        if not isinstance(event, OffloadingEvent) or not all(isinstance(key, bytes) for key in event.keys):
            raise TypeError(f"this is not an event: {event!r:.100}")
        found.append(event)
    return found


class PendingEvents:
    """The events of one ``medium`` since they were last taken, in the order in which they became true. One thread.

    Events that nobody takes are *folded* repeatedly: only the difference between the medium's current blocks and the
    blocks at the last ``take`` is kept. It lists at most the blocks of these two states, and a caller who takes events
    late still folds them to the resident set.
    """

    def __init__(self, medium: str, min_keys: int = _MIN_KEYS) -> None:
        """Create an empty collection that keeps up to ``min_keys`` keys before it folds events."""
        self._medium = medium
        self._min_keys = self._fold_at = min_keys
        self._events: list[OffloadingEvent] = []
        self._num_keys = 0

    def __repr__(self) -> str:
        return f"PendingEvents({self._medium!r}, {self._num_keys} keys)"

    def __len__(self) -> int:
        """Return the number of keys in the waiting events."""
        return self._num_keys

    def add(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        """Record that ``keys`` have left the medium (``removed``) or appeared in it."""
        if not keys:
            return
        self._events.append(OffloadingEvent([*keys], self._medium, removed))
        self._num_keys += len(keys)
        if self._num_keys > self._fold_at:
            self._fold()

    def take(self) -> list[OffloadingEvent]:
        """Return all waiting events and forget them."""
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
        # A key whose first change is a removal was present at the last ``take``.
        gone = [key for key, removed in last.items() if removed and first[key]]
        new = [key for key, removed in last.items() if not removed and not first[key]]
        self._num_keys = len(gone) + len(new)
        changes = ((gone, True), (new, False))
        self._events = [OffloadingEvent(keys, self._medium, removed) for keys, removed in changes if keys]
        # Fold again at twice the remaining size, so that folding looks at each key about twice, however rarely events
        # are taken.
        self._fold_at = max(self._min_keys, 2 * self._num_keys)
