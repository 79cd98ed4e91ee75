# SPDX-License-Identifier: Apache-2.0
"""What a tier knows of its store's content, for answers that need no call of the store."""

from __future__ import annotations

import itertools
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvoffload.base import OffloadingEvent, OffloadKey
from kvoffload.events import PendingEvents

ABSENT_TTL_S = 1.0
"""Seconds for which a store that others write to is not asked again for a block that it lacked."""
MAX_ABSENT = 65_536
"""Blocks that a tier remembers as absent."""

_SHARD_BLOCKS = 4_096
_FORGOTTEN_AT_ONCE = 64
"""The part of a full shard that is forgotten to make room: one key in this many."""
_UNSEEN_AT_ONCE = 256
"""Keys that a step forgets after a scan: a bound on the time of a step."""
_MIN_EVENT_KEYS = 65_536
"""Keys of an exact index that wait for somebody to take their events, or ..."""
_EVENT_SHARE = 8
"""... one for so many present ones, if these are more. Beyond them the events are dropped, and a scan follows."""


class PresenceIndex:
    """Which keys a store has and which it lacks, as far as that is known, and the events that follow. One thread.

    It is a hint in both directions: the store may have lost a present key, and another process may have written an
    absent one. It remembers at most ``max_blocks`` present keys (``TierLimits.max_index_blocks`` has their bytes) and
    ``max_absent`` absent ones, and forgets old ones first. An absent key is asked for again once it is older than
    ``absent_ttl_s``. Events name the store by ``medium``.

    A store that knows its own keys gives them as ``resident`` (``BlockStore.resident``). Then nothing is remembered
    here, nothing is asked, and a key is present or absent as the store has it at that moment.

    With ``enable_events`` changes are recorded for ``take_events``. They fold to the keys that are present here. A key
    that is forgotten is announced as removed, although the store may have it.
    """

    def __init__(
        self,
        medium: str,
        max_blocks: int,
        *,
        resident: Collection[OffloadKey] | None = None,
        enable_events: bool = False,
        max_absent: int = MAX_ABSENT,
        absent_ttl_s: float = ABSENT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._medium = medium
        self._max_absent = max_absent
        self._absent_ttl_s = absent_ttl_s
        self._clock = clock
        self._present = _RememberedKeys(max_blocks) if resident is None else _ResidentKeys(resident)
        # Absent keys, and from when on each is worth asking for again.
        self._absent: OrderedDict[OffloadKey, float] = OrderedDict()
        # Keys that a call which hangs asks for or reads: no other call is risked for them.
        self._hanging: set[OffloadKey] = set()
        self.to_refresh: list[OffloadKey] = []
        """Absent keys to ask the store for again. Others only test whether there are any."""
        # Keys that a store job is writing. True: an eviction of the key was recorded meanwhile.
        self._storing: dict[OffloadKey, bool] = {}
        self.is_exact = self._present.is_exact
        """The store itself says what it has: no key is unknown, and no scan is needed."""
        self._enable_events = enable_events
        self._events = self._record()
        """``None``: changes are not recorded."""

    def __repr__(self) -> str:
        return f"PresenceIndex({self._medium!r}, present={len(self)}, absent={len(self._absent)})"

    def __len__(self) -> int:
        """Blocks known to be present."""
        return len(self._present)

    def __contains__(self, key: OffloadKey) -> bool:
        return self._present.has(key)

    # -------------------------------------------------------------------------------------------------- questions

    def lookup_prefix(self, keys: Iterable[OffloadKey], is_complete: bool) -> list[bool | None]:
        """Whether the store has each of ``keys``, up to and including the first ``False``. ``None``: unknown, so the
        store is to be asked for it.

        ``is_complete``: every key in the store was added here, so that an unknown key is absent.
        """
        present, hanging = self._present.has, self._hanging
        answers: list[bool | None] = []
        for key in keys:
            answer = True if present(key) and key not in hanging else self._why_not(key, is_complete)
            answers.append(answer)
            if answer is False:
                break
        return answers

    def _why_not(self, key: OffloadKey, is_complete: bool) -> bool | None:
        """``False`` for an absent key, ``None`` for one that is unknown."""
        if key in self._hanging:
            return False
        if (refresh_at_s := self._absent.get(key)) is not None:
            if self._clock() >= refresh_at_s:
                # The answer stays False meanwhile: a request must not be put off again and again for the same key.
                self._absent[key] = self._clock() + self._absent_ttl_s
                self.to_refresh.append(key)
            return False
        return False if self.is_exact or (is_complete and not self._present.has_forgotten) else None

    def take_to_refresh(self) -> list[OffloadKey]:
        keys, self.to_refresh = self.to_refresh, []
        return keys

    def record_answer(self, key: OffloadKey, is_present: bool) -> None:
        """The store was asked for ``key``."""
        if is_present:
            self.add([key])
        elif key not in self:  # else a store or the scan added it after the store had answered
            if len(self._absent) >= self._max_absent:
                self._absent.popitem(last=False)
            self._absent[key] = self._clock() + self._absent_ttl_s

    def begin_hang(self, keys: Iterable[OffloadKey]) -> None:
        """A call for ``keys`` hangs. Until ``end_hang`` they are absent, and not asked for."""
        self._hanging.update(keys)

    def end_hang(self, keys: Iterable[OffloadKey]) -> None:
        """The call has returned. Does nothing for keys of which no call hung."""
        if self._hanging:
            self._hanging.difference_update(keys)

    def sample(self, count: int, start: int, besides: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Up to ``count`` present keys, none of ``besides``; others for another ``start``."""
        excluded = set(besides)
        return list(itertools.islice((key for key in self._present.since(start) if key not in excluded), count))

    # ---------------------------------------------------------------------------------------------------- changes

    @property
    def _is_up_to_date(self) -> bool:
        """Whether a change is nothing to do: the store itself has added or removed the key, and no event is made."""
        return self.is_exact and self._events is None

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """``keys`` are present."""
        if self._absent:
            for key in keys:
                self._absent.pop(key, None)
        if self._is_up_to_date:
            return
        for changed, forgotten in self._present.add(keys):
            self._announce(changed, removed=forgotten)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """``keys`` were evicted, or could not be read: they are unknown from now on."""
        if self._is_up_to_date:
            return
        for key in keys:
            # The store may evict a block before its store job's result is taken. The mark keeps that late result from
            # adding a key that is gone.
            if key in self._storing:
                self._storing[key] = True
        self._announce(self._present.remove(keys), removed=True)

    def begin_store(self, keys: Iterable[OffloadKey]) -> None:
        """A job writes ``keys``; ``end_store`` follows for each."""
        if not self.is_exact:
            self._storing.update(dict.fromkeys(keys, False))

    def end_store(self, keys: Sequence[OffloadKey], outcomes: Sequence[bool]) -> None:
        """The job has written those of ``keys`` whose outcome is true. They are present, unless an eviction of them was
        recorded since ``begin_store``."""
        if self._is_up_to_date:
            return
        was_evicted = [self._storing.pop(key, False) and not self._present.has(key) for key in keys]
        self.add([key for key, is_written, gone in zip(keys, outcomes, was_evicted) if is_written and not gone])

    # ----------------------------------------------------------------------------------------------------- events

    @property
    def lost_events(self) -> bool:
        """Events were dropped since they were last taken. Whoever takes them has the store scanned, so that all of its
        keys follow."""
        return self._enable_events and self._events is None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Changes since the last call. Of an exact index: each was true when it was recorded, and some may be repeated
        or concern blocks of other processes that were never announced."""
        if self._events is not None:
            return self._events.take()
        self._events = self._record()
        return [OffloadingEvent([], self._medium, removed=True)] if self._enable_events else ()

    def _record(self) -> PendingEvents | None:
        if not self._enable_events:
            return None
        # Of an exact index some repeat others, so that folding would lose changes. ``_announce`` bounds them.
        return PendingEvents(self._medium, min_keys=sys.maxsize) if self.is_exact else PendingEvents(self._medium)

    def _announce(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if self._events is None:
            return
        self._events.add(keys, removed=removed)
        # Only the store remembers the keys of an exact index: events that are not taken must not pile them up here.
        if self.is_exact and len(self._events) > max(_MIN_EVENT_KEYS, len(self._present) // _EVENT_SHARE):
            self._events = None

    # ------------------------------------------------------------------------------------------------------ scans

    def begin_scan(self) -> None:
        """A scan of the store begins. Every key that it finds will be added."""
        self._present.begin_scan()

    def end_scan(self) -> None:
        """The scan has found everything. Keys that were present before it, and were not added since it began, are gone;
        ``forget_unseen`` removes them."""
        self._present.end_scan()

    def forget_unseen(self) -> list[OffloadKey]:
        """Removes the next such keys, at most 256, and returns them. Call it again and again; without a scan it does
        nothing."""
        unseen = self._present.take_unseen()
        if unseen:
            unseen = [key for key in unseen if key not in self._storing]
            self.remove(unseen)
        return unseen


class _RememberedKeys:
    """Keys that the store was seen to have: the newest ``max_blocks`` of them.

    They lie in shards of some 4,000, so that no call takes long: a large dictionary stops everything while it grows. A
    shard is a plain dictionary of bytes and numbers, as Python's garbage collector passes over those: with ordered
    dictionaries, each full collection visited a million keys for 0.4 s, and stopped the scheduler's thread for it.
    """

    is_exact = False

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        num_shards = 1 << (max_blocks // _SHARD_BLOCKS).bit_length()
        # Each key with the number of the scan before or during which it was last seen.
        self._shards: list[dict[OffloadKey, int]] = [{} for _ in range(num_shards)]
        self._mask = num_shards - 1
        self._count = 0
        self._scan = 0
        self._num_swept = num_shards
        """Shards that ``take_unseen`` is done with."""
        self.has_forgotten = False

    def __len__(self) -> int:
        return self._count

    def has(self, key: OffloadKey) -> bool:
        return key in self._shards[hash(key) & self._mask]

    def since(self, start: int) -> Iterator[OffloadKey]:
        """All keys, from another one on for another ``start``."""
        shards = (self._shards[(start + offset) & self._mask] for offset in range(len(self._shards)))
        return (key for shard in shards for key in reversed(shard))

    def add(self, keys: Iterable[OffloadKey]) -> list[tuple[list[OffloadKey], bool]]:
        """Returns what changed, in order: (keys, whether they were forgotten to make room); the others are new."""
        changes: list[tuple[list[OffloadKey], bool]] = []
        added: list[OffloadKey] = []
        for key in keys:
            shard = self._shards[hash(key) & self._mask]
            if key in shard:
                shard[key] = self._scan
                continue
            if self._count >= self._max_blocks:
                changes += [(added, False), (self._forget_oldest(shard), True)]
                added = []
            shard[key] = self._scan
            self._count += 1
            added.append(key)
        changes.append((added, False))
        return changes

    def remove(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Returns those that were present."""
        removed = [key for key in keys if self._shards[hash(key) & self._mask].pop(key, None) is not None]
        self._count -= len(removed)
        return removed

    def begin_scan(self) -> None:
        self._scan += 1
        self._num_swept = len(self._shards)

    def end_scan(self) -> None:
        self._num_swept = 0

    def take_unseen(self) -> list[OffloadKey]:
        """Some of the keys that the last scan did not find. They count as found from now on, so that no call returns
        them again."""
        num_looked_at = 0
        while self._num_swept < len(self._shards) and num_looked_at < _SHARD_BLOCKS:
            shard = self._shards[self._num_swept]
            num_looked_at += len(shard)
            # Numbers first: to touch each key costs ten times as much, as a million of them are in no cache.
            if set(shard.values()) <= {self._scan}:
                self._num_swept += 1
                continue
            unseen = list(itertools.islice((key for key, scan in shard.items() if scan != self._scan), _UNSEEN_AT_ONCE))
            shard.update(dict.fromkeys(unseen, self._scan))
            return unseen
        return []

    def _forget_oldest(self, shard: dict[OffloadKey, int]) -> list[OffloadKey]:
        """Makes room in ``shard``, or in another one if it is empty, and returns what is forgotten: several keys at
        once, since the search for a dictionary's first key passes over all that were deleted before it."""
        oldest = shard or next(other for other in self._shards if other)
        forgotten = list(itertools.islice(oldest, max(1, len(oldest) // _FORGOTTEN_AT_ONCE)))
        for key in forgotten:
            del oldest[key]
        self._count -= len(forgotten)
        self.has_forgotten = True
        return forgotten


class _ResidentKeys:
    """The same of a store that knows its own keys. What is reported is only compared with what the store has now."""

    is_exact = True
    has_forgotten = False

    def __init__(self, keys: Collection[OffloadKey]) -> None:
        self._keys = keys
        self.has = keys.__contains__

    def __len__(self) -> int:
        return len(self._keys)

    def since(self, start: int) -> Iterator[OffloadKey]:
        first = start % max(1, len(self._keys))
        return itertools.chain(itertools.islice(self._keys, first, None), itertools.islice(self._keys, first))

    def add(self, keys: Iterable[OffloadKey]) -> list[tuple[list[OffloadKey], bool]]:
        return [([key for key in keys if key in self._keys], False)]

    def remove(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        return [key for key in keys if key not in self._keys]

    def begin_scan(self) -> None:
        return

    def end_scan(self) -> None:
        return

    def take_unseen(self) -> list[OffloadKey]:
        return []
