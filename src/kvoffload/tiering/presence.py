# SPDX-License-Identifier: Apache-2.0
"""Remember a store's content as far as a tier knows it, to answer lookups without calling the store."""

from __future__ import annotations

import itertools
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvoffload.base import OffloadingEvent, OffloadKey
from kvoffload.events import PendingEvents

ABSENT_TTL_S = 1.0
"""Seconds until a store to which others write is asked again for a block that it lacked."""
MAX_ABSENT = 65_536
"""The number of blocks that a tier remembers as absent."""

_SHARD_BLOCKS = 4_096
_FORGOTTEN_AT_ONCE = 64
"""To make room in a full shard, one key in this many is forgotten."""
_UNSEEN_AT_ONCE = 256
"""The number of keys that a step forgets after a scan, to bound the time of a step."""
_MIN_EVENT_KEYS = 65_536
"""An exact index keeps events for at least this many keys until somebody takes them."""
_EVENT_SHARE = 8
"""An exact index keeps events for at least one key per this many present keys. Beyond both numbers, it drops the
events, and a scan follows."""


class PresenceIndex:
    """The keys that a store contains or lacks, as far as they are known, and the resulting events. One thread.

    The index is only a hint: the store may have lost a present key, and another process may have written an absent one.
    It remembers at most ``max_blocks`` present keys (``TierLimits.max_index_blocks`` documents their memory) and
    ``max_absent`` absent ones, and forgets the oldest first. The store is asked again for an absent key that is older
    than ``absent_ttl_s``. Events name the store by ``medium``.

    If a store knows its own keys, ``resident`` is that collection (``BlockStore.resident``). In this case the index is
    exact: it remembers nothing, the store is not asked, and a key is present if the store contains it at that moment.

    With ``enable_events``, changes are recorded for ``take_events``. They fold to the keys that are present here. A
    forgotten key is announced as removed, although the store may still contain it.
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
        # Absent keys, each with the time at which the store should be asked for it again.
        self._absent: OrderedDict[OffloadKey, float] = OrderedDict()
        # Keys that a hanging call asks for or reads. No other call is risked for them.
        self._hanging: set[OffloadKey] = set()
        self.to_refresh: list[OffloadKey] = []
        """Absent keys for which the store should be asked again. Callers only test whether there are any."""
        # Keys that a store job is writing. True: an eviction of the key was recorded since the job started.
        self._storing: dict[OffloadKey, bool] = {}
        self.is_exact = self._present.is_exact
        """Whether the store itself lists its keys, so that no key is unknown and no scan is needed."""
        self._enable_events = enable_events
        self._events = self._record()
        """The recorded changes, or ``None`` if changes are not recorded."""

    def __repr__(self) -> str:
        return f"PresenceIndex({self._medium!r}, present={len(self)}, absent={len(self._absent)})"

    def __len__(self) -> int:
        """Return the number of blocks known to be present."""
        return len(self._present)

    def __contains__(self, key: OffloadKey) -> bool:
        return self._present.has(key)

    # -------------------------------------------------------------------------------------------------- questions

    def lookup_each(self, keys: Iterable[OffloadKey], is_complete: bool) -> list[bool | None]:
        """Return the answers of ``lookup_prefix`` for each of ``keys`` alone."""
        present, hanging = self._present.has, self._hanging
        return [True if present(key) and key not in hanging else self._why_not(key, is_complete) for key in keys]

    def lookup_prefix(self, keys: Iterable[OffloadKey], is_complete: bool) -> list[bool | None]:
        """Return whether the store contains each of ``keys``, up to and including the first ``False``.

        ``None`` means unknown, so the caller should ask the store. ``is_complete`` says that every key in the store was
        added here, so that an unknown key is absent.
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
        """Return ``False`` for an absent key and ``None`` for an unknown one."""
        if key in self._hanging:
            return False
        if (refresh_at_s := self._absent.get(key)) is not None:
            if self._clock() >= refresh_at_s:
                # The answer stays False until the store has answered, so that a request is not delayed repeatedly for
                # the same key.
                self._absent[key] = self._clock() + self._absent_ttl_s
                self.to_refresh.append(key)
            return False
        return False if self.is_exact or (is_complete and not self._present.has_forgotten) else None

    def take_to_refresh(self) -> list[OffloadKey]:
        keys, self.to_refresh = self.to_refresh, []
        return keys

    def record_answer(self, key: OffloadKey, is_present: bool) -> None:
        """Record the store's answer for ``key``."""
        if is_present:
            self.add([key])
        elif key not in self:  # otherwise a store job or the scan added it after the store had answered
            if len(self._absent) >= self._max_absent:
                self._absent.popitem(last=False)
            self._absent[key] = self._clock() + self._absent_ttl_s

    def begin_hang(self, keys: Iterable[OffloadKey]) -> None:
        """Treat ``keys`` as absent until ``end_hang``, because a call for them hangs.

        The store is not asked for them.
        """
        self._hanging.update(keys)

    def end_hang(self, keys: Iterable[OffloadKey]) -> None:
        """End the effect of ``begin_hang``, because the call has returned. Ignores keys for which no call hung."""
        if self._hanging:
            self._hanging.difference_update(keys)

    def sample(self, count: int, start: int, besides: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return up to ``count`` present keys that are not in ``besides``. Another ``start`` returns other keys."""
        excluded = set(besides)
        return list(itertools.islice((key for key in self._present.since(start) if key not in excluded), count))

    # ---------------------------------------------------------------------------------------------------- changes

    @property
    def _is_up_to_date(self) -> bool:
        """Whether changes need no work, because the store itself keeps the keys and no events are recorded."""
        return self.is_exact and self._events is None

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Record that ``keys`` are present."""
        if self._absent:
            for key in keys:
                self._absent.pop(key, None)
        if self._is_up_to_date:
            return
        for changed, forgotten in self._present.add(keys):
            self._announce(changed, removed=forgotten)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Make ``keys`` unknown, because they were evicted or could not be read."""
        if self._is_up_to_date:
            return
        for key in keys:
            # The store may evict a block before its store job's result is taken. The mark prevents that late result
            # from adding an evicted key.
            if key in self._storing:
                self._storing[key] = True
        self._announce(self._present.remove(keys), removed=True)

    def begin_store(self, keys: Iterable[OffloadKey]) -> None:
        """Record that a job writes ``keys``. The caller calls ``end_store`` for each key later."""
        if not self.is_exact:
            self._storing.update(dict.fromkeys(keys, False))

    def end_store(self, keys: Sequence[OffloadKey], outcomes: Sequence[bool]) -> None:
        """Record the end of a job.

        A key whose outcome is true is present, unless it was evicted since ``begin_store``.
        """
        if self._is_up_to_date:
            return
        was_evicted = [self._storing.pop(key, False) and not self._present.has(key) for key in keys]
        self.add([key for key, is_written, gone in zip(keys, outcomes, was_evicted) if is_written and not gone])

    # ----------------------------------------------------------------------------------------------------- events

    @property
    def lost_events(self) -> bool:
        """Whether events were dropped since they were last taken.

        If so, the caller who takes events must start a scan of the store, so that all of its keys are announced.
        """
        return self._enable_events and self._events is None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the changes since the last call.

        For an exact index, each change was true when it was recorded. Some may be repeated, or concern other processes'
        blocks that were never announced.
        """
        if self._events is not None:
            return self._events.take()
        self._events = self._record()
        return [OffloadingEvent([], self._medium, removed=True)] if self._enable_events else ()

    def _record(self) -> PendingEvents | None:
        if not self._enable_events:
            return None
        # Events of an exact index may repeat each other, so folding would lose changes. ``_announce`` bounds them.
        return PendingEvents(self._medium, min_keys=sys.maxsize) if self.is_exact else PendingEvents(self._medium)

    def _announce(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if self._events is None:
            return
        self._events.add(keys, removed=removed)
        # Only the store remembers the keys of an exact index, so events that are not taken must not pile up here.
        if self.is_exact and len(self._events) > max(_MIN_EVENT_KEYS, len(self._present) // _EVENT_SHARE):
            self._events = None

    # ------------------------------------------------------------------------------------------------------ scans

    def begin_scan(self) -> None:
        """Start a scan of the store. The caller adds every key that it finds."""
        self._present.begin_scan()

    def end_scan(self) -> None:
        """End the scan. ``forget_unseen`` then removes the keys that were present before it but not added since."""
        self._present.end_scan()

    def forget_unseen(self) -> list[OffloadKey]:
        """Remove and return at most 256 more keys that the last scan did not find.

        Call it repeatedly. It does nothing without a scan.
        """
        unseen = self._present.take_unseen()
        if unseen:
            unseen = [key for key in unseen if key not in self._storing]
            self.remove(unseen)
        return unseen


class _RememberedKeys:
    """The newest ``max_blocks`` keys that were seen in the store.

    They are in shards of about 4,000 keys, so that no call takes long. A large dictionary would stop everything while
    it grows. A shard is a plain dictionary of bytes and numbers, because Python's garbage collector skips those. With
    ordered dictionaries, each full collection visited a million keys and stopped the scheduler's thread for 0.4 s.
    """

    is_exact = False

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        num_shards = 1 << (max_blocks // _SHARD_BLOCKS).bit_length()
        # Each key maps to the number of the scan before or during which it was last seen.
        self._shards: list[dict[OffloadKey, int]] = [{} for _ in range(num_shards)]
        self._mask = num_shards - 1
        self._count = 0
        self._scan = 0
        self._num_swept = num_shards
        """The number of shards that ``take_unseen`` has finished."""
        self.has_forgotten = False

    def __len__(self) -> int:
        return self._count

    def has(self, key: OffloadKey) -> bool:
        return key in self._shards[hash(key) & self._mask]

    def since(self, start: int) -> Iterator[OffloadKey]:
        """Yield all keys, starting at a shard that depends on ``start``."""
        shards = (self._shards[(start + offset) & self._mask] for offset in range(len(self._shards)))
        return (key for shard in shards for key in reversed(shard))

    def add(self, keys: Iterable[OffloadKey]) -> list[tuple[list[OffloadKey], bool]]:
        """Add ``keys``, and return the changes in order, as pairs of keys and a flag.

        The flag is ``True`` for keys that were forgotten to make room, and ``False`` for new keys.
        """
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
        """Remove ``keys``, and return the ones that were present."""
        removed = [key for key in keys if self._shards[hash(key) & self._mask].pop(key, None) is not None]
        self._count -= len(removed)
        return removed

    def begin_scan(self) -> None:
        self._scan += 1
        self._num_swept = len(self._shards)

    def end_scan(self) -> None:
        self._num_swept = 0

    def take_unseen(self) -> list[OffloadKey]:
        """Return some of the keys that the last scan did not find, each once: they count as found from now on."""
        num_looked_at = 0
        while self._num_swept < len(self._shards) and num_looked_at < _SHARD_BLOCKS:
            shard = self._shards[self._num_swept]
            num_looked_at += len(shard)
            # Compare numbers first. Touching each key costs ten times as much, because a million keys fit no CPU cache.
            if set(shard.values()) <= {self._scan}:
                self._num_swept += 1
                continue
            unseen = list(itertools.islice((key for key, scan in shard.items() if scan != self._scan), _UNSEEN_AT_ONCE))
            shard.update(dict.fromkeys(unseen, self._scan))
            return unseen
        return []

    def _forget_oldest(self, shard: dict[OffloadKey, int]) -> list[OffloadKey]:
        """Make room in ``shard``, or in another one if it is empty, and return the forgotten keys.

        It forgets several keys at once, because the search for a dictionary's first key passes over all entries that
        were deleted before it.
        """
        oldest = shard or next(other for other in self._shards if other)
        forgotten = list(itertools.islice(oldest, max(1, len(oldest) // _FORGOTTEN_AT_ONCE)))
        for key in forgotten:
            del oldest[key]
        self._count -= len(forgotten)
        self.has_forgotten = True
        return forgotten


class _ResidentKeys:
    """The keys of a store that lists its own keys. Reported changes are only compared with the store's current keys."""

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
