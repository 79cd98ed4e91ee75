# SPDX-License-Identifier: Apache-2.0
"""The free slots, and the slots to overwrite next. It uses no I/O and no lock: the store holds its own lock around each
call.

A slot's number is ``slab * SLAB_STRIDE + index``. So neighbouring slots of a slab get neighbouring numbers, and no run
extends from one slab into another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SLAB_STRIDE = 1 << 20
MAX_SLAB_SLOTS = SLAB_STRIDE - 1
"""Maximum number of slots of a slab. It is one less than the stride, so that the last slot of a slab and the first of
the next are never neighbours."""

_FREE = 0
BUSY = np.iinfo(np.int64).max
"""The time of use of a slot that is being written, or is out of use. Such a slot is never evicted."""
_PLAN_SHARE = 64
"""A plan searches one in this many slots, the least recently used, for runs of neighbours."""
_SAMPLE = 1 << 16
"""Number of sampled slots that determine the limit of a plan."""
_LONG = 64
"""Free runs up to this length are grouped by length."""
_SECTION_BITS = 14
"""The free runs that begin or end within two to this power of slots share a dictionary."""
_GRAIN_SHARE = 64
_MAX_GRAIN = 64
_LOOKED_AT_ONCE = 32
"""Number of planned runs, or slots of one run, to check before releasing the lock for a moment."""


@dataclass(slots=True, order=True)
class Run:
    """Neighbouring slots of one slab. Never changed, but not frozen, because creating a frozen object takes three times
    as long."""

    start: int
    count: int

    @property
    def slab(self) -> int:
        return self.start // SLAB_STRIDE

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def first(self) -> int:
        """The first slot's index in its slab."""
        return self.start % SLAB_STRIDE


def runs_of(slots: Iterable[int]) -> list[Run]:
    """Return ``slots``, which ascend, as runs."""
    runs = list[Run]()
    start = stop = -1
    for slot in slots:
        if slot == stop:
            stop += 1
            continue
        if stop > start:
            runs.append(Run(start, stop - start))
        start, stop = slot, slot + 1
    if stop > start:
        runs.append(Run(start, stop - start))
    return runs


def is_held(used_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which slots contain a block."""
    held: npt.NDArray[np.bool_] = (used_ns != _FREE) & (used_ns != BUSY)
    return held


def free_runs(slab: int, used_ns: npt.NDArray[np.int64]) -> list[Run]:
    """Return the free slots of a slab."""
    is_free = np.concatenate(([False], used_ns == _FREE, [False]))
    ends = (np.flatnonzero(is_free[1:] != is_free[:-1]) + slab * SLAB_STRIDE).tolist()
    return [Run(start, stop - start) for start, stop in zip(ends[::2], ends[1::2], strict=True)]


def last_use(used_ns: npt.NDArray[np.int64]) -> int:
    """Return the latest time of use of the slots with a block, or 0 without any."""
    return int(np.max(used_ns, where=used_ns != BUSY, initial=_FREE))


class FreeRuns:
    """Free slots as maximal runs. A request gets the shortest run that is long enough, so that long runs stay whole.
    Runs of over ``_LONG`` slots are not compared: one of the latest is used. Adding or taking a run takes the same time
    for any number of runs, because nothing is sorted. No dictionary covers more than a *section* of slots, because a
    large one blocks all threads whenever it grows."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By section, the length of the run at each start."""
        self._starts: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By section, the start of the run before each end."""
        self._by_count: list[defaultdict[int, dict[int, None]]] = [defaultdict(dict) for _ in range(_LONG + 2)]
        """Starts of runs by length and by section. The last entry of the list is for all longer runs. Only the list
        itself may have empty entries."""
        self._counts_here = 0
        """A bit for each length that some run has."""
        self._begun: Run | None = None
        """The rest of the run that was taken from last, which is in no dictionary, so that a single slot costs little.
        No other free run touches it."""
        self._num_slots_of: defaultdict[int, int] = defaultdict(int)
        """Number of free slots by slab."""
        self.num_slots = 0

    def add(self, run: Run) -> None:
        start, count = run.start, run.count
        self.num_slots += count
        self._num_slots_of[start // SLAB_STRIDE] += count
        end = start + count
        if (begun := self._begun) is not None and begun.start <= end and start <= begun.start + begun.count:
            self._put_back()
        starts, counts = self._starts.get(start >> _SECTION_BITS), self._counts.get(end >> _SECTION_BITS)
        if starts and (before := starts.pop(start, None)) is not None:
            self._unlist(before, self._counts[before >> _SECTION_BITS].pop(before))
            start = before
        if counts and (after := counts.pop(end, None)) is not None:
            self._unlist(end, after)
            end += after
        self._starts[end >> _SECTION_BITS][end] = start
        self._list(start, end - start)

    def take(self, count: int) -> list[Run]:
        """Take ``count`` slots in as few runs as possible; fewer slots if not enough are free."""
        if (begun := self._begun) is not None:
            if begun.count > count:
                start = begun.start
                begun.start += count
                begun.count -= count
                self.num_slots -= count
                self._num_slots_of[start // SLAB_STRIDE] -= count
                return [Run(start, count)]
            self._put_back()
        taken = []
        while count > 0 and self._counts_here:
            shortest = count if count <= _LONG else _LONG + 1
            if longer := self._counts_here >> shortest:
                at = shortest + (longer & -longer).bit_length() - 1
            else:
                at = self._counts_here.bit_length() - 1
            sections = self._by_count[at]
            section = next(reversed(sections))
            starts = sections[section]
            start, _ = starts.popitem()
            if not starts:
                del sections[section]
                if not sections:
                    self._counts_here ^= 1 << at
            have = used = self._counts[section].pop(start)
            end = start + have
            if have > count:
                used = count
                self._begun = Run(start + used, have - used)
            del self._starts[end >> _SECTION_BITS][end]
            taken.append(Run(start, used))
            self.num_slots -= used
            self._num_slots_of[start // SLAB_STRIDE] -= used
            count -= used
        return taken

    def drop_slab(self, slab: int) -> object:
        """Remove a slab's runs. Returns objects to free without the lock, because that may take long."""
        self._put_back()
        self.num_slots -= self._num_slots_of.pop(slab, 0)
        sections = range(slab * SLAB_STRIDE >> _SECTION_BITS, (slab + 1) * SLAB_STRIDE >> _SECTION_BITS)
        every: tuple[dict[int, Any], ...] = (self._counts, self._starts, *self._by_count)
        freed = [runs.pop(section, None) for runs in every if runs for section in sections]
        self._counts_here = sum(1 << at for at, runs in enumerate(self._by_count) if runs)
        return freed

    def runs(self) -> list[Run]:
        self._put_back()
        return sorted(Run(start, count) for runs in self._counts.values() for start, count in runs.items())

    def _put_back(self) -> None:
        if (begun := self._begun) is not None:
            self._begun = None
            end = begun.start + begun.count
            self._starts[end >> _SECTION_BITS][end] = begun.start
            self._list(begun.start, begun.count)

    def _list(self, start: int, count: int) -> None:
        at, section = count if count <= _LONG else _LONG + 1, start >> _SECTION_BITS
        self._counts[section][start] = count
        self._by_count[at][section][start] = None
        self._counts_here |= 1 << at

    def _unlist(self, start: int, count: int) -> None:
        at, section = count if count <= _LONG else _LONG + 1, start >> _SECTION_BITS
        sections = self._by_count[at]
        starts = sections[section]
        del starts[start]
        if not starts:
            del sections[section]
            if not sections:
                self._counts_here ^= 1 << at


@dataclass(slots=True, eq=False)
class _Plan:
    """The runs to evict next, in this order, as arrays, so that a large plan is created and dropped without one object
    for each run."""

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    used_ns: Mapping[int, npt.NDArray[np.int64]]
    """Times of use of the slabs that the plan covers."""
    last_ns: int
    """Time limit of the plan: slots that were used later stay."""
    num_left: int
    replan_at: int


_NO_PLAN = _Plan(np.empty(0, np.int64), np.empty(0, np.int64), {}, 0, 0, 0)


class Allocator:
    """The slots that this process may write: free, used at some time, or busy. The least recently used slots are
    evicted, in runs. A *plan* contains one in 64 of all slots, the least recently used. Its longest runs are evicted
    first, and slots that are used meanwhile are removed from it. When half of the plan is evicted, a new plan is made.
    Short runs wait for it, because their neighbours may have aged by then. A store of a few slots makes plans of one
    slot, which is plain LRU."""

    def __init__(self) -> None:
        self.free = FreeRuns()
        self._used_ns: dict[int, npt.NDArray[np.int64]] = {}
        self._num_slots = 0
        self._plan = _NO_PLAN
        self._next_run = 0
        self._left: list[Run] = []
        """The rest of planned runs that were too long for the call that started them."""

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def add_slab(self, slab: int, used_ns: npt.NDArray[np.int64]) -> None:
        """Add a slab. ``used_ns`` contains the time of last use of each slot, 0 for a free one; pass these to
        ``add_free``. Its owner records uses in it."""
        self._used_ns[slab] = used_ns
        self._num_slots += len(used_ns)

    def add_free(self, used_ns: npt.NDArray[np.int64], runs: Sequence[Run]) -> None:
        """Add some of the ``free_runs`` of a slab with these times, unless it was dropped."""
        if runs and self._used_ns.get(runs[0].slab) is used_ns:
            for run in runs:
                self.free.add(run)

    def drop_slab(self, slab: int) -> object:
        """Remove a slab whose slots this process may no longer write. Ignores a slab of another process. Returns
        objects to free without the lock."""
        if (used_ns := self._used_ns.pop(slab, None)) is None:
            return None
        self._num_slots -= len(used_ns)
        return self.free.drop_slab(slab)

    def grain_of(self, count: int) -> int:
        """Return the number of slots to evict if ``count`` are needed: more than one, so that free space consists of
        runs."""
        return max(count, min(_MAX_GRAIN, self._num_slots // _GRAIN_SHARE))

    def evict(
        self,
        count: int,
        before_ns: int,
        unlocked: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        num_wanted: int = 0,
    ) -> list[Run]:
        """Evict up to ``count`` slots whose last use was by ``before_ns``. They are busy afterwards, and ``release``
        makes them free. In ``unlocked`` contexts others may change anything but the plan; no such context is entered
        after a slot is chosen. A caller who evicts ``num_wanted`` slots in parts passes that number, so that a plan
        that is hardly longer is used up by them."""
        if not (evicted := self._evict_planned(count, before_ns, self._plan.replan_at, unlocked)):
            used_ns = dict(self._used_ns)
            with unlocked():
                self._plan, self._next_run, self._left = _NO_PLAN, 0, []
                self._plan = _make_plan(used_ns, max(count, num_wanted))
                if 2 * self._plan.num_left < 3 * num_wanted:
                    self._plan.replan_at = 0
            evicted = self._evict_planned(count, before_ns, 0, unlocked)
        return evicted

    def take(self, count: int) -> list[Run]:
        """Take at most ``count`` free slots, and make them busy."""
        runs = self.free.take(count)
        for run in runs:
            self._set(run, BUSY)
        return runs

    def release(self, run: Run) -> bool:
        """Make busy or used slots free. Returns ``False``, and does nothing, for an unknown slab."""
        if run.slab not in self._used_ns:
            return False
        self._set(run, _FREE)
        self.free.add(run)
        return True

    def use(self, slot: int, stamp_ns: int) -> bool:
        """Record that a slot contains a block, used at this time. Returns ``False`` for another process's slot."""
        used_ns = self._used_ns.get(slot // SLAB_STRIDE)
        if used_ns is None:
            return False
        used_ns[slot % SLAB_STRIDE] = stamp_ns
        return True

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if free runs and times of use disagree."""
        free = self.free.runs()
        assert free == runs_of([slot for run in free for slot in range(run.start, run.stop)]), "runs are not maximal"
        assert sum(run.count for run in free) == self.free.num_slots
        expected = [
            slot
            for slab in sorted(self._used_ns)
            for slot in (np.flatnonzero(self._used_ns[slab] == _FREE) + slab * SLAB_STRIDE).tolist()
        ]
        assert free == runs_of(expected), "free slots are lost, or not free"
        assert self._num_slots == sum(len(used_ns) for used_ns in self._used_ns.values())
        left = int(self._plan.counts[self._next_run :].sum()) + sum(run.count for run in self._left)
        assert self._plan.num_left == left

    def _set(self, run: Run, value: int) -> None:
        first = run.first
        if run.count == 1:
            self._used_ns[run.slab][first] = value
        else:
            self._used_ns[run.slab][first : first + run.count] = value

    def _evict_planned(
        self, lacking: int, before_ns: int, num_kept: int, unlocked: Callable[[], AbstractContextManager[object]]
    ) -> list[Run]:
        """Evict slots of the plan until ``num_kept`` are left in it, or many runs were checked."""
        evicted, plan, num_looked_at = list[Run](), self._plan, 0
        while lacking > 0 and plan.num_left > num_kept:
            if (num_looked_at := num_looked_at + 1) % _LOOKED_AT_ONCE == 0:
                if evicted:
                    break
                with unlocked():
                    pass
            if self._left:
                run = self._left.pop()
            else:
                run = Run(int(plan.starts[self._next_run]), int(plan.counts[self._next_run]))
                self._next_run += 1
            if run.count > _LOOKED_AT_ONCE:
                self._left.append(Run(run.start + _LOOKED_AT_ONCE, run.count - _LOOKED_AT_ONCE))
                run = Run(run.start, _LOOKED_AT_ONCE)
            plan.num_left -= run.count
            for part in self._unused_parts(run, before_ns):
                used = part
                if part.count > lacking:
                    used = Run(part.start, lacking)
                    self._left.append(Run(part.start + lacking, part.count - lacking))
                    plan.num_left += part.count - lacking
                if used.count:
                    evicted.append(used)
                    self._set(used, BUSY)
                    lacking -= used.count
        return evicted

    def _unused_parts(self, run: Run, before_ns: int) -> list[Run]:
        """Return the slots of a planned run that still contain a block and were not used since."""
        limit_ns, slab = min(self._plan.last_ns, before_ns), self._used_ns.get(run.slab)
        if slab is None or slab is not self._plan.used_ns[run.slab]:
            return []  # dropped meanwhile
        if run.count == 1:  # a fast path: if uses are scattered, all runs are like this
            return [run] if _FREE < slab[run.first] <= limit_ns else []
        used_ns = slab[run.first : run.first + run.count]
        fit = (used_ns != _FREE) & (used_ns <= limit_ns)
        if fit.all():
            return [run]
        return runs_of((np.flatnonzero(fit) + run.start).tolist())


def _make_plan(used_ns: Mapping[int, npt.NDArray[np.int64]], count: int) -> _Plan:
    """Plan at least ``count`` evictions, if that many blocks exist. Times may change meanwhile, so each slot is checked
    again before it is evicted."""
    # A sample determines the limit, because sorting 17 million slots takes a second. For a small store, the sample is
    # all slots.
    stride = max(1, sum(map(len, used_ns.values())) // _SAMPLE)
    sample = np.concatenate([np.empty(0, np.int64), *(times[::stride] for times in used_ns.values())])
    held = sample[(sample != _FREE) & (sample != BUSY)]
    size = min(max(-(-count // stride), len(sample) // _PLAN_SHARE), len(held))
    if not size:
        return _NO_PLAN
    held.partition(size - 1)
    last_ns = int(held[size - 1])
    starts, counts, oldest = list[npt.NDArray[np.int64]](), list[npt.NDArray[np.int64]](), list[npt.NDArray[np.int64]]()
    for slab, times in used_ns.items():
        old = np.flatnonzero((times <= last_ns) & (times != _FREE))
        if not len(old):
            continue
        firsts = np.concatenate(([0], np.flatnonzero(old[1:] - old[:-1] != 1) + 1))
        starts.append(old[firsts] + slab * SLAB_STRIDE)
        counts.append(np.diff(firsts, append=len(old)))
        oldest.append(np.minimum.reduceat(times[old], firsts))
    if not starts:
        return _NO_PLAN
    every = np.concatenate(counts)
    # The longest run first, by powers of two; among equals, the one with the oldest use.
    order = np.lexsort((np.concatenate(oldest), -np.frexp(np.minimum(every, _MAX_GRAIN))[1]))
    num_slots = int(every.sum())
    return _Plan(np.concatenate(starts)[order], every[order], used_ns, last_ns, num_slots, num_slots // 2)
