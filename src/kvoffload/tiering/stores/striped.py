# SPDX-License-Identifier: Apache-2.0
"""Several stores, each on its own disk, as one. A disk that fails, fills up, hangs or vanishes loses only its own
blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError, reason_of
from kvoffload.tiering.circuit_breaker import CircuitBreaker
from kvoffload.tiering.stores.base import BlockStore, DiskStats, LossCause, StoreStats
from kvoffload.tiering.stores.wrappers import JoinedKeys

_log = logging.getLogger(__name__)

_STALL_S = 2.0
"""Seconds after which a disk with a running call gets no other call until that one ends."""
_FULL_SHARE = 16
"""A full disk gets new blocks as if one in this many of its bytes were free, and overwrites its oldest blocks."""
_MOST_CREDIT = 1024
"""Limit on the blocks that a disk may be owed, for instance because it was busy, or may have received in excess."""


class Striped(BlockStore):
    """Blocks over several ``stores``, each on its own disk. This object owns the stores. The new blocks of a call are
    written to one disk, chosen in turn by free space, so that disks of equal age fill up and overwrite together, and a
    new disk catches up. A call reads from each disk the blocks that it contains.

    A disk whose calls keep failing, or with a hanging call, is *out*: its blocks are absent and it gets no new blocks,
    until one of the occasional trial calls succeeds. Calls raise ``StoreError`` only if all disks are out. No disk
    occupies half of the ``threads`` (three or more) for reads, or half of the threads for writes, at once, so that a
    hanging disk does not stop the tier.
    """

    def __init__(
        self,
        stores: Sequence[BlockStore],
        threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        paths: Sequence[str] = (),
        missing: Sequence[str] = (),
    ) -> None:
        """``paths`` are the disks' paths, for people; ``missing`` are the paths of disks that did not open."""
        # One more than all disks have in flight, so that neither of two disks has half of the threads.
        self.requests_in_flight = threads or sum(store.requests_in_flight for store in stores) + 1
        self.batch_blocks = min((store.batch_blocks for store in stores if store.batch_blocks), default=None)
        rescans = [store.rescan_s for store in stores if store.rescan_s is not None]
        self.rescan_s = min(rescans, default=None)
        most_calls = max(1, (self.requests_in_flight - 1) // 2)
        self._disks = [_Disk(store, most_calls, clock) for store in stores]
        self._paths = paths
        self._missing = tuple(DiskStats(path, is_out=True) for path in missing)
        self._lock = threading.Lock()
        if all(store.resident is not None for store in stores):
            self.resident = JoinedKeys(self._resident)

    def __repr__(self) -> str:
        return f"Striped({', '.join(repr(disk.store) for disk in self._disks)})"

    # ------------------------------------------------------------------------------------------------ BlockStore

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        answers = [False] * len(keys)
        for disk in self._disks:
            if disk.reads.is_fit:
                for at in disk.find(keys, [at for at, found in enumerate(answers) if not found]):
                    answers[at] = True
        self._raise_if_all_out(answers, [disk.reads for disk in self._disks])
        return answers

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        answers, left = [False] * len(keys), list(range(len(keys)))

        def write(disk: _Disk, some: Sequence[int]) -> bool:
            outcome = disk.writes.call(lambda: disk.store.write([keys[at] for at in some], [blocks[at] for at in some]))
            for at, is_good in zip(some, outcome or (), strict=False):
                answers[at] = is_good
            return any(outcome or ())

        for disk in self._disks:
            if disk.writes.is_fit and (found := disk.find(keys, left)):
                write(disk, found)  # this counts as a use of these
                left = [at for at in left if not answers[at]]
        tried = list[_Disk]()
        while left and (next_disk := self._next_disk(len(left), tried)) is not None:
            tried.append(next_disk)
            if write(next_disk, left):
                break  # it had no room for the others
        self._raise_if_all_out(answers, [disk.writes for disk in self._disks])
        return answers

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        answers = [False] * len(keys)
        # The disks with the fewest calls first, so that threads with blocks on the same disks do not all begin with one
        # disk.
        for disk in sorted(self._disks, key=lambda disk: disk.reads.num_calls):
            if disk.reads.is_fit:
                some = disk.find(keys, [at for at, is_good in enumerate(answers) if not is_good])
                if not some:
                    continue
                names, into = [keys[at] for at in some], [blocks[at] for at in some]
                outcome = disk.reads.call(partial(disk.store.read_into, names, into))
                for at, is_good in zip(some, outcome or (), strict=False):
                    answers[at] = is_good
        self._raise_if_all_out(answers, [disk.reads for disk in self._disks])
        return answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        for disk in self._disks:
            if found := disk.find(keys, range(len(keys))):
                disk.writes.call(partial(disk.store.discard, [keys[at] for at in found]))

    def close(self) -> None:
        closing = [
            threading.Thread(target=disk.close, name="kvoffload-disk-close", daemon=True) for disk in self._disks
        ]
        for thread in closing:  # a hanging disk does not prevent closing the others
            thread.start()
        for thread in closing:
            thread.join()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        scans = deque((position, disk.store.scan()) for position, disk in enumerate(self._disks))
        num_waiting = 0
        while scans:
            position, scan = scans.popleft()
            try:
                keys = next(scan, None)
            except (StoreError, OSError):
                continue
            if keys is None:
                continue
            if not keys:  # the other disks first, because this one may hang
                scans.append((position, scan))
                if (num_waiting := num_waiting + 1) < len(scans):
                    continue
                yield ()
            num_waiting = 0
            if keys:
                scans.appendleft((position, scan))
                left = list(range(len(keys)))
                for other in self._disks[:position]:  # yield each key once
                    found = set(other.find(keys, left))
                    left = [at for at in left if at not in found]
                if left:
                    yield [keys[at] for at in left]

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        for disk in self._disks:
            with suppress(StoreError, OSError):
                disk.store.touch(keys)

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        lost = {key: cause for disk in self._disks for key, cause in disk.store.take_lost().items()}
        if self.resident is None or not lost:
            return lost
        return {key: cause for key, cause in lost.items() if key not in self.resident}

    def stats(self) -> StoreStats:
        each = [disk.store.stats() for disk in self._disks]
        disks = (disk.stats(path, stats) for path, disk, stats in zip(self._paths, self._disks, each, strict=False))
        return replace(StoreStats.of_all(each), disks=(*disks, *self._missing))

    # ---------------------------------------------------------------------------------------------------- helpers

    def _resident(self) -> Iterator[Collection[OffloadKey]]:
        """Return the keys of each disk that is not out. A key on two disks is counted twice."""
        return (keys for disk in self._disks if disk.reads.is_fit and (keys := disk.store.resident) is not None)

    def _next_disk(self, count: int, tried: Collection[_Disk]) -> _Disk | None:
        """Return the disk for ``count`` new blocks, or ``None`` if no disk can store them. Prefers a disk that is free
        for a call."""
        fit = [disk for disk in self._disks if disk not in tried and disk.writes.is_fit]
        if not fit:
            return None
        wanted = [disk.wanted_bytes() for disk in fit]
        with self._lock:
            for disk, num_bytes in zip(fit, wanted, strict=True):
                disk.credit = min(disk.credit + count * num_bytes / sum(wanted), _MOST_CREDIT)
            chosen = max(fit, key=lambda disk: (disk.writes.is_free, disk.credit))
            chosen.credit = max(chosen.credit - count, -_MOST_CREDIT)
        return chosen

    @staticmethod
    def _raise_if_all_out(answers: Sequence[bool], calls: Sequence[_Calls]) -> None:
        if answers and not any(answers) and not any(each.is_fit for each in calls):
            raise StoreError(f"All {len(calls)} disks are out. {next((each.why for each in calls if each.why), '')}")


class _Disk:
    """A store, and the record of its calls."""

    def __init__(self, store: BlockStore, most_calls: int, clock: Callable[[], float]) -> None:
        self.store = store
        self.reads = _Calls(f"Reading from {store!r}", most_calls, clock)
        self.writes = _Calls(f"Writing to {store!r}", most_calls, clock)
        self.credit = 0.0
        """Number of new blocks that it is owed, beyond those it received. A lock of ``Striped`` guards it."""

    def find(self, keys: Sequence[OffloadKey], asked: Sequence[int]) -> list[int]:
        """Return which of ``asked`` it contains."""
        if not asked:
            return []
        ask = partial(self.store.contains, [keys[at] for at in asked])
        here = self.reads.call(ask) if self.store.resident is None else ask()
        return [at for at, is_here in zip(asked, here or (), strict=False) if is_here]

    def stats(self, path: str, store: StoreStats) -> DiskStats:
        calls = self.reads, self.writes
        is_out = any(each.is_out for each in calls)
        return DiskStats(path, is_out, store.used_bytes or 0, sum(each.num_failed for each in calls))

    def wanted_bytes(self) -> float:
        """Return its weight among the disks for new blocks."""
        stats = self.store.stats()
        rooms = [] if stats.max_bytes is None else [stats.max_bytes - (stats.used_bytes or 0)]
        rooms += [] if stats.free_bytes is None else [stats.free_bytes]
        room = max(0, min(rooms, default=1))
        return room + (room + (stats.used_bytes or 0)) / _FULL_SHARE + 1

    def close(self) -> None:
        try:
            self.store.close()
        except Exception as exc:  # noqa: BLE001 - in a thread of its own, where nothing else would report it
            _log.warning("%r failed to close: %s", self.store, reason_of(exc))


class _Calls:
    """The calls of one kind on a disk: at most ``most`` at once, and none while it is out."""

    def __init__(self, name: str, most: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free = threading.Semaphore(most)
        self._most = most
        self._lock = threading.Lock()
        self._breaker = CircuitBreaker(name, clock=clock)
        self._running: dict[object, float] = {}
        """Start times of the calls, oldest first."""
        self._oldest_s: float | None = None
        self.num_calls = 0
        self.num_failed = 0
        self.why = ""
        """The last failure, for people."""

    @property
    def is_free(self) -> bool:
        """Whether a call could begin at once."""
        return self.num_calls < self._most

    @property
    def is_fit(self) -> bool:
        """Whether the disk is not out, or is due for another trial."""
        return not self._is_stalled and (self._breaker.is_closed or self._breaker.is_probe_due)

    @property
    def is_out(self) -> bool:
        return self._is_stalled or not self._breaker.is_closed

    @property
    def _is_stalled(self) -> bool:
        oldest_s = self._oldest_s
        return oldest_s is not None and self._clock() - oldest_s >= _STALL_S

    def call(self, call: Callable[[], list[bool] | None]) -> list[bool] | None:
        """Return the result of ``call``, or ``None`` if it failed or the disk is out."""
        if not self._begin():
            return None
        token, is_good = object(), False
        error: BaseException | None = None
        with self._lock:
            self._running[token] = self._clock()
            self._note_running()
        try:
            result = call()
            is_good = result is None or any(result)
            return result
        except BaseException as exc:
            error = exc
            if isinstance(exc, StoreError | OSError):
                return None
            raise
        finally:
            with self._lock:
                del self._running[token]
                self._note_running()
                self._record(error, is_good)
            self._free.release()

    def _begin(self) -> bool:
        if not self._free.acquire(timeout=_STALL_S):
            with self._lock:
                self.num_failed += 1
            self.why = f"{self._breaker.name}: its calls hang."
            return False
        with self._lock:
            if self._breaker.is_closed or self._breaker.begin_probe():
                return True
        self._free.release()
        return False

    def _note_running(self) -> None:
        self.num_calls = len(self._running)
        self._oldest_s = next(iter(self._running.values()), None)

    def _record(self, error: BaseException | None, is_good: bool) -> None:
        """Record the end of a call. ``is_good`` says that it produced a result; a call that found or wrote nothing
        proves nothing."""
        name = self._breaker.name
        if error is None:
            if not is_good:
                self._breaker.cancel_probe()
            elif self._breaker.failures and self._breaker.record_success():
                _log.warning("%s works again.", name)
            return
        self.num_failed += 1
        self.why = reason_of(error)
        if self._breaker.record_failure():
            _log.warning("%s fails; the tier continues without that disk until it works again: %s", name, self.why)
