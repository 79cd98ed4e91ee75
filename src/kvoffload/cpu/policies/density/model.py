# SPDX-License-Identifier: Apache-2.0
"""Learn the value of a cached block from the traffic: the expected hits per unit of cache space and time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import cache
from itertools import repeat, starmap

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus
from kvoffload.cpu.policies.density.classes import NUM_CLASSES, NUM_GROUPS, NUM_USES, SHARED
from kvoffload.cpu.policies.density.score import HintScore

_BUCKETS_PER_OCTAVE = 2
_FINEST = 64
"""The capacity divided by the width of the first bucket of ages."""
_HORIZON = 32
"""The time that the model waits for another use of a key, in capacities of block uses."""
_SAMPLES = 4096
_EVENTS_PER_FIT = 500
_EVENTS_PER_EARLY_FIT = 100
"""The number of events per fit while the gap still widens. The history is short at that time, so values that are half
as old as the history would not fit it."""
_DECAY = 0.95
"""The factor by which a fit after ``_EVENTS_PER_FIT`` events fades earlier counts."""
_PRIOR = 5.0
"""The number of paths of evidence at which a class's own hazard counts as much as the hazard of all classes
together."""
_LEAST_CAPACITY = 128
_MOST_LIKELY = 0.95
_RANDOM_END = 1 << 31


class HitDensity:
    """The value of a block by class and age, where the age is the number of block uses since its own last use.

    The model follows sampled keys, resident or not, until each is used again or the horizon has passed. From these it
    estimates the hazard of each class: the chance of a use at each age. The keys that it still follows count as well,
    up to their current age (E. L. Kaplan and P. Meier, "Nonparametric estimation from incomplete observations", 1958).
    So the model recognises a class that is never reused as soon as its blocks are old. Many caches are not in use long
    enough to wait for the horizon.

    At ages where a class has little evidence, the model shrinks its hazard towards the hazard of all classes together,
    times one factor for the class: proportional hazards (D. R. Cox, "Regression models and life-tables", 1972). So
    evidence from a class's young blocks counts when its blocks are old for the first time, which is when a cache first
    becomes full. Blocks of one path are used together, so evidence is counted in paths, and a class with a few long
    prompts has little evidence.

    The value of a block is the ratio of expected hits to the space-time spent, for the waiting time at which this ratio
    is best. It is the Gittins index (J. Gittins, "Bandit processes and dynamic allocation indices", 1979), the optimal
    rank for choosing which of many such wagers to keep. N. Beckmann, H. Chen and A. Cidon call it hit density ("LHD:
    Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018).

    The model forces values to fall with age and to rise with use. A block's predecessors are never older or less used
    than the block, so the block is never worth more than they are. So a prefix is always evicted from its tail.

    A cache below ``_LEAST_CAPACITY`` blocks (a few prompts) provides too little to learn from, so the order stays LRU.
    Memory is constant: the model follows about ``_SAMPLES`` keys, whatever the capacity.

    The defaults of ``horizon`` (in capacities) and ``prior`` (in paths) were chosen by replays of mixed traces.
    """

    def __init__(self, capacity: int, horizon: int = _HORIZON, prior: float = _PRIOR) -> None:
        self._learns = capacity >= _LEAST_CAPACITY
        self._horizon = horizon * capacity
        self._prior = prior
        octaves = (horizon * _FINEST - 1).bit_length()
        steps = np.arange(octaves * _BUCKETS_PER_OCTAVE + 1)
        self.bounds: list[float] = (capacity / _FINEST * 2.0 ** (steps / _BUCKETS_PER_OCTAVE)).tolist()
        """The ages at which the next bucket starts: a block of age ``a`` is in bucket ``bisect_right(bounds, a)``."""
        self._whole_bounds = np.ceil(self.bounds).astype(np.int64)
        """``bounds`` rounded up to whole ages."""
        self.youngest = [0.0, *self.bounds]
        """The least age in each bucket."""
        self._widths = np.diff([0.0, *self.bounds, 2 * self.bounds[-1]])
        self._samples: dict[OffloadKey | None, int] = {}
        """For each followed key, the use since which it is followed, least recent first. The number is the time of that
        use, times ``NUM_CLASSES``, plus the key's class after it. One number instead of two makes a fit faster."""
        self._follows: deque[tuple[int, OffloadKey | None]] = deque()
        """The same uses in order of time, up to the horizon, including entries of keys that are no longer followed."""
        self._widest_gap = max(-(-self._horizon // _SAMPLES), 1)
        self.clear()

    def clear(self) -> None:
        shape = NUM_CLASSES, len(self.bounds) + 1
        self._used = np.zeros(shape)
        """The number of followed keys that were used again, by their class and age at that use."""
        self._lost = np.zeros(shape)
        """The number of followed keys that were not used again within the horizon."""
        self._used_ages: list[int] = []
        """Uses that ``_used`` does not count yet, each as age times ``NUM_CLASSES`` minus the class."""
        self._lost_ages: list[int] = []
        self._num_events = 0
        """The number of keys that ceased to be followed since the last fit."""
        self._used_sizes: list[int] = []
        """The number of entries that each path added to ``_used_ages``."""
        self._score = HintScore()
        self._num_again = self._num_again_paths = 0.0
        """The number of followed keys that were used again, and the number of paths that used them. Both fade as the
        counts do."""
        self._samples.clear()
        self._follows.clear()
        self._num_followed = 0
        self._set_gap(1)
        self._draw = 1
        self._window = 1
        self._next_pick = 1
        recency = (1.0 / np.cumsum(self._widths)).tolist()
        self.values: list[list[float]] = [recency] * NUM_CLASSES
        """``values[class][bucket]``. Values fall with age (bucket) and rise with uses (class)."""
        self.uses_hints = False
        """Whether the values of classes with different hints may differ."""

    @property
    def hint_score(self) -> float:
        """The recent advantage of predictions with hints over those without. Below 3, hints change no value."""
        return self._score.value

    def _set_gap(self, gap: int) -> None:
        self._gap = gap
        """The model starts to follow the key of one use, chosen at random, in each ``_gap`` consecutive uses. The gap
        doubles as the history grows, up to ``_widest_gap``, so ``_SAMPLES`` keys are spread over the history or over
        the horizon, whichever is shorter."""
        self._events_per_fit = _EVENTS_PER_EARLY_FIT if gap < self._widest_gap else _EVENTS_PER_FIT

    def used(
        self, keys: Collection[OffloadKey | None], blocks: Sequence[BlockStatus], begin: int, all_count: bool = True
    ) -> None:
        """Learn that ``blocks``, which already have their new classes, were used one by one, the first at time
        ``begin``.

        ``keys`` contains their keys, and possibly others. If ``all_count`` is false, uses of blocks in flight do not
        count.
        """
        if not self._learns:
            return
        samples, now = self._samples, begin + len(blocks)
        if not all_count or len(keys) != len(blocks):
            keys = [block.key for block in blocks if all_count or block.pins >= 0]
        again = samples.keys() & keys
        if again:
            stamp, pop = now * NUM_CLASSES, samples.pop
            self._used_ages += [stamp - pop(key) for key in again]
            self._num_events += len(again)
            self._used_sizes.append(len(again))
            self._num_again += len(again)
            self._num_again_paths += 1
        if self._next_pick < now:
            self._follow_some(blocks, begin, now, all_count)
        if self._num_events >= self._events_per_fit:
            self._fit(now)

    def _random(self) -> int:
        """Return the next pseudo-random number, at least 0 and less than ``_RANDOM_END``."""
        self._draw = (self._draw * 1103515245 + 12345) % _RANDOM_END
        return self._draw

    def _follow_some(self, blocks: Sequence[BlockStatus], begin: int, now: int, all_count: bool) -> None:
        samples, follows, stamp = self._samples, self._follows, now * NUM_CLASSES
        while self._next_pick < now:
            if self._next_pick >= begin:
                block = blocks[self._next_pick - begin]
                if all_count or block.pins >= 0:
                    samples[block.key] = since = stamp + block.policy_state.class_
                    follows.append((since, block.key))
                    self._num_followed += 1
                    if self._num_followed >= _SAMPLES and self._gap < self._widest_gap:
                        self._widen_gap()
            self._window = max(self._window + self._gap, begin)
            self._next_pick = self._window + (self._random() >> 8) % self._gap
        oldest_alive = (now - self._horizon) * NUM_CLASSES
        while follows and follows[0][0] < oldest_alive:
            since, key = follows.popleft()
            if samples.get(key) == since:
                del samples[key]
                self._lost_ages.append(stamp - since)
                self._num_events += 1

    def _widen_gap(self) -> None:
        """Double the gap, and forget the same share of earlier findings, so that all uses have the same weight."""
        gap = min(2 * self._gap, self._widest_gap)
        kept = self._gap / gap
        self._set_gap(gap)
        self._num_followed = int(kept * self._num_followed)
        self._num_events = int(kept * self._num_events)
        self._num_again *= kept
        self._count_ages()
        self._used *= kept
        self._lost *= kept
        for key in [key for key in self._samples if self._random() >= kept * _RANDOM_END]:
            del self._samples[key]
        self._follows.clear()
        self._follows.extend((since, key) for key, since in self._samples.items())

    def _count_ages(self) -> None:
        """Bring ``_used``, ``_lost`` and the score up to date."""
        at = self._cells(self._used_ages)
        self._score.add(at, self._used_sizes)
        self._used += self._counted(at)
        self._lost += self._counted(self._cells(self._lost_ages))
        self._used_ages.clear()
        self._used_sizes.clear()
        self._lost_ages.clear()

    def _cells(self, ages: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the index in the flattened table (class, bucket) for each age.

        ``ages`` holds ages times ``NUM_CLASSES``, minus the class.
        """
        packed = np.asarray(ages, np.int64)
        classes = -packed % NUM_CLASSES
        buckets = np.searchsorted(self._whole_bounds, (packed + classes) // NUM_CLASSES, side="right")
        return classes * self._used.shape[1] + buckets

    def _counted(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        return np.bincount(cells, minlength=self._used.size).reshape(self._used.shape)

    def _fit(self, now: int) -> None:
        self._count_ages()
        since = np.fromiter(self._samples.values(), np.int64, len(self._samples))
        followed = self._counted(self._cells(now * NUM_CLASSES - since))
        left = self._lost + followed
        keys_per_path = max(self._num_again / max(self._num_again_paths, 1.0), 1.0)
        prior = self._prior * keys_per_path
        shape = NUM_GROUPS, NUM_USES, -1
        by_uses = hazards(self._used.reshape(shape).sum(axis=0), left.reshape(shape).sum(axis=0), prior)
        values = densities(by_uses, self._widths)
        self.uses_hints = False
        if self._used[NUM_USES:].any() or left[NUM_USES:].any():
            by_class = hinted_hazards(self._used.reshape(shape), left.reshape(shape), prior)
            self._score.compare(by_class, by_uses, (followed / self._widths).reshape(shape))
            self.uses_hints = self._score.favours_hints
        if self.uses_hints:
            # Computing the densities of all hints at once would need four times the memory.
            hinted = [densities(hazard, self._widths) for hazard in by_class[:SHARED]]
            # A shared prompt must outlive the blocks that any of its clients has after it.
            shared = np.max([values, *hinted], axis=0)
            self.values = np.concatenate([*hinted, shared]).tolist()
        else:
            self.values = values.tolist() * NUM_GROUPS
        # A gap that is still small causes more events in the same time, so each fit fades the counts by less.
        fade = _DECAY ** (self._gap / self._widest_gap * self._events_per_fit / _EVENTS_PER_FIT)
        self._num_events = 0
        self._used *= fade
        self._lost *= fade
        self._num_again *= fade
        self._num_again_paths *= fade

    def hinted_anew(self, blocks: Sequence[BlockStatus], begin: int) -> None:
        """Learn that these blocks were refreshed one by one, the first at time ``begin``.

        Blocks whose class changed are followed from this time on. For the old class, they count as not used again.
        """
        samples, stamp = self._samples, (begin + len(blocks)) * NUM_CLASSES
        for block in blocks:
            since = samples.get(block.key)
            if since is not None and since % NUM_CLASSES != block.policy_state.class_:
                del samples[block.key]
                self._lost_ages.append(stamp - since)
                samples[block.key] = since = stamp + block.policy_state.class_
                self._follows.append((since, block.key))

    def forget(self, key: OffloadKey) -> None:
        """Stop following ``key``. Its store failed, so its last use did not happen."""
        self._samples.pop(key, None)


Table = npt.NDArray[np.float64]


def hazards(used: Table, left: Table, prior: float) -> Table:
    """Return the chance of a use at each age, by class.

    ``used`` counts the blocks that were used again at each age, and ``left`` counts the blocks that were last seen
    unused at that age. Both have shape (classes, buckets).

    Where a class has more blocks at risk than ``prior``, its own hazard dominates. Elsewhere the hazard of all classes
    together dominates, times a factor for the class: the ratio of its actual uses to the uses that the common hazard
    predicts at the ages where the class was seen.
    """
    at_risk = _at_risk(used, left)
    return _shrunk(used, at_risk, used.sum(axis=0) / (at_risk.sum(axis=0) + 1), prior)


def hinted_hazards(used: Table, left: Table, prior: float) -> Table:
    """Return the hazards by hint and class. All tables have shape (hints, classes, buckets).

    A class with little evidence gets the hazard of its hint, and a hint with little evidence gets the hazard of all
    classes together.
    """
    of_hints = hazards(used.sum(axis=1), left.sum(axis=1), prior)
    return _shrunk(used, _at_risk(used, left), of_hints[:, None, :], prior)


def _at_risk(used: Table, left: Table) -> Table:
    # A block that left a bucket was at risk for half of it, on average.
    reached: Table = np.cumsum((used + left)[..., ::-1], axis=-1)[..., ::-1]
    return reached - left / 2


def _shrunk(used: Table, at_risk: Table, towards: Table, prior: float) -> Table:
    expected = (towards * at_risk).sum(axis=-1)
    times_as_likely = (used.sum(axis=-1) + prior) / (expected + prior)
    likely = np.minimum(times_as_likely[..., None] * towards, _MOST_LIKELY)
    hazard: Table = (used + prior * likely) / (at_risk + prior)
    return hazard


def densities(hazard: Table, widths: Table) -> Table:
    """Return the hit densities, of the same shape as ``hazard``: (..., classes, buckets).

    ``widths`` contains the length of each bucket.
    """
    alive = np.ones_like(hazard)
    np.cumprod(1 - hazard[..., :-1], axis=-1, out=alive[..., 1:])
    # Future hits and space-time from each bucket on. The difference of two entries is the amount between them.
    hits = _sums_ahead(alive * hazard)
    spent = _sums_ahead(alive * widths * (1 - hazard / 2))
    # ``later[i, j]``: bucket j ends after bucket i starts.
    later = _later(hazard.shape[-1])
    gained = hits[..., :-1, None] - hits[..., None, 1:]
    paid = spent[..., :-1, None] - spent[..., None, 1:]
    values = np.divide(gained, paid, out=np.zeros_like(gained), where=later).max(axis=-1)
    falling: Table = np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]
    monotone: Table = np.maximum.accumulate(falling, axis=-2)
    return monotone


@cache
def _later(buckets: int) -> npt.NDArray[np.bool_]:
    return np.tri(buckets, dtype=np.bool_).T


def _sums_ahead(terms: Table) -> Table:
    """Return the sums of each term and all terms after it along the last axis, with a final column of zeros."""
    sums = np.zeros((*terms.shape[:-1], terms.shape[-1] + 1))
    np.cumsum(terms[..., ::-1], axis=-1, out=sums[..., -2::-1])
    return sums


class UseCounts:
    """The classes of evicted blocks by key: at least the last ``size`` keys, and at most about twice as many.

    There are two generations. When the young one is full, it becomes the old one. The previous old generation is
    forgotten at once, but its memory is freed gradually. So keys are forgotten in the order in which they were
    remembered. Tails are evicted before their heads, so a head never loses its class while its tail keeps it.
    """

    __slots__ = ("_leaving", "_old", "_young", "size")

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self._young: dict[OffloadKey, int] = {}
        self._old: dict[OffloadKey, int] = {}
        self._leaving: dict[OffloadKey, int] = {}
        """A forgotten generation. Each remembered key removes one entry, because freeing a million at once is slow."""

    def __repr__(self) -> str:
        return f"UseCounts({len(self._young)} of {self.size} in the young generation)"

    def __len__(self) -> int:
        """Return the number of keys in memory, including forgotten keys that are not freed yet."""
        return len(self._young) + len(self._old) + len(self._leaving)

    def remember(self, keys: Sequence[OffloadKey], classes: Sequence[int]) -> None:
        if len(self._young) >= self.size:
            self._young, self._old, self._leaving = {}, self._young, self._old
        self._young.update(zip(keys, classes))
        leaving = self._leaving
        if leaving:
            deque(starmap(leaving.popitem, repeat((), min(len(keys), len(leaving)))), maxlen=0)

    def recall(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the remembered classes of ``keys``, up to the first unknown key."""
        young, old = self._young.get, self._old.get
        found: list[int] = []
        for key in keys:
            class_ = young(key)
            if class_ is None:
                class_ = old(key)
                if class_ is None:
                    break
            found.append(class_)
        return found

    def clear(self) -> None:
        self._young, self._old, self._leaving = {}, {}, {}
