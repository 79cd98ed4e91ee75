# SPDX-License-Identifier: Apache-2.0
"""What a cached block is worth, learned from the traffic: expected hits per unit of cache space and time."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus

__all__ = ["CERTAIN", "NUM_CLASSES", "NUM_DRAWS", "RISEN", "HitDensity", "UseCounts"]

_LEAST_USES = (1, 2, 3, 4, 6, 10, 18, 34)
NUM_CLASSES = len(_LEAST_USES)
"""Classes of blocks by number of uses: 1, 2, 3, about 4, about 6, ... , 34 or more."""
_TOP = NUM_CLASSES - 1
_STEPS = [more - less for less, more in pairwise(_LEAST_USES)]
NUM_DRAWS = max(_STEPS)
RISEN = [
    tuple(class_ + (class_ < _TOP and draw % _STEPS[class_] == 0) for class_ in range(NUM_CLASSES))
    for draw in range(NUM_DRAWS)
]
"""``RISEN[draw][class]``: the class after one more use. Beyond 4 uses only some uses raise the class, at random
(R. Morris, "Counting large numbers of events in small registers", 1978), so blocks need no counters. Where a class
rises, all below it rise too: with one draw for all blocks of a path, a head never falls behind its tail."""
CERTAIN = 1
"""The draw in which only those classes rise that rise in every draw."""

_BUCKETS_PER_OCTAVE = 2
_FINEST = 64
"""The first bucket of ages is 1/64 of the capacity wide."""
_HORIZON = 12
"""A use more than this many capacities after the previous one is not waited for."""
_SAMPLES = 4096
_EVENTS_PER_FIT = 500
_DECAY = 0.95
_PRIOR = 50.0
_LEAST_CAPACITY = 256


class HitDensity:
    """Value of a block by (class, age), where age is the number of block uses since its own last use.

    The model follows sampled keys, resident or not. Each is either used again at some age, or not within the horizon.
    From these counts it estimates the hazard of each class: the chance of a use at each age. Where a class has few
    counts, its hazard is shrunk towards that of all classes together. The value of a block is a ratio: expected hits to
    space-time spent, for the waiting time at which this ratio is best. It is the Gittins index (J. Gittins, "Bandit
    processes and dynamic allocation indices", 1979), the optimal rank for choosing which of many such wagers to keep.
    N. Beckmann, H. Chen and A. Cidon call it hit density ("LHD: Improving Cache Hit Rate by Maximizing Hit Density",
    NSDI 2018).

    Values are made to fall with age and to rise with use. A block's predecessors are never older or less used than the
    block, so it is never worth more than they are: a prefix is evicted from its tail, whatever was learned.

    Below ``_LEAST_CAPACITY`` blocks (a few prompts) there is too little to learn from, and the order stays that of
    recency. Memory is constant: the model follows some 8,000 keys, whatever the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._horizon = _HORIZON * capacity
        octaves = (_HORIZON * _FINEST - 1).bit_length()
        steps = np.arange(octaves * _BUCKETS_PER_OCTAVE + 1)
        self.bounds: list[float] = (capacity / _FINEST * 2.0 ** (steps / _BUCKETS_PER_OCTAVE)).tolist()
        """Ages at which the next bucket begins: a block of age ``a`` is in bucket ``bisect_right(bounds, a)``."""
        self.youngest = [0.0, *self.bounds]
        """The least age in each bucket."""
        self._widths = np.diff([0.0, *self.bounds, 2 * self.bounds[-1]])
        self._samples: OrderedDict[OffloadKey | None, tuple[int, int]] = OrderedDict()
        """Class and time of the use since which a key is followed, least recent first."""
        self._gap = max(-(-self._horizon // _SAMPLES), 1)
        """One use in each ``_gap`` consecutive uses, chosen at random, begins to be followed."""
        self.clear()

    def clear(self) -> None:
        shape = NUM_CLASSES, len(self.bounds) + 1
        self._used = np.zeros(shape)
        self._lost = np.zeros(shape)
        self._num_events = 0
        self._samples.clear()
        self._draw = 1
        self._window = 1
        self._next_pick = 1
        recency = (1.0 / np.cumsum(self._widths)).tolist()
        self.values: list[list[float]] = [recency] * NUM_CLASSES
        """``values[class][bucket]``. Falls with age (bucket), rises with uses (class)."""

    def used(
        self, keys: Collection[OffloadKey | None], blocks: Sequence[BlockStatus], begin: int, all_count: bool = True
    ) -> None:
        """``blocks`` were used one after the other, the first at time ``begin``, and have their new classes already.
        ``keys`` has their keys, and perhaps others. Without ``all_count``, uses of blocks in flight do not count."""
        samples, now = self._samples, begin + len(blocks)
        if not all_count or len(keys) != len(blocks):
            keys = [block.key for block in blocks if all_count or block.pins >= 0]
        for key in samples.keys() & keys:
            class_, since = samples.pop(key)
            self._used[class_, bisect_right(self.bounds, now - since)] += 1
            self._num_events += 1
        while self._next_pick < now:
            if self._next_pick >= begin:
                block = blocks[self._next_pick - begin]
                if all_count or block.pins >= 0:
                    self._follow(block.key, block.policy_state.class_, now)
            self._draw = (self._draw * 1103515245 + 12345) & 0x7FFFFFFF
            self._window += self._gap
            if self._window < begin:
                self._window = begin
            self._next_pick = self._window + (self._draw >> 8) % self._gap
        if self._num_events >= _EVENTS_PER_FIT and self._capacity >= _LEAST_CAPACITY:
            self._num_events = 0
            self.values = densities(self._used, self._lost, self._widths).tolist()
            self._used *= _DECAY
            self._lost *= _DECAY

    def _follow(self, key: OffloadKey | None, class_: int, now: int) -> None:
        samples = self._samples
        samples[key] = class_, now
        oldest_alive = now - self._horizon
        while (oldest := next(iter(samples.items())))[1][1] < oldest_alive:
            old_key, (old_class, last) = oldest
            del samples[old_key]
            self._lost[old_class, bisect_right(self.bounds, now - last)] += 1
            self._num_events += 1

    def forget(self, key: OffloadKey) -> None:
        """Stops following ``key``: its store failed, so its last use did not happen."""
        self._samples.pop(key, None)


def densities(
    used: npt.NDArray[np.float64], lost: npt.NDArray[np.float64], widths: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Values by (class, age bucket). ``used`` counts the blocks that were used again at each age, ``lost`` those that
    were given up at it.

    Both have shape (classes, buckets); ``widths`` is the length of each bucket.
    """
    at_risk = np.cumsum((used + lost)[:, ::-1], axis=1)[:, ::-1]
    everyone = used.sum(axis=0) / (at_risk.sum(axis=0) + 1)
    hazard = (used + _PRIOR * everyone) / (at_risk + _PRIOR)
    alive = np.ones_like(hazard)
    np.cumprod(1 - hazard[:, :-1], axis=1, out=alive[:, 1:])
    # Hits to come and space to spend from each bucket on; the difference of two is what lies between.
    hits = _sums_ahead(alive * hazard)
    spent = _sums_ahead(alive * widths * (1 - hazard / 2))
    first, end = np.triu_indices(hazard.shape[1])
    end += 1
    ratios = np.zeros((*hazard.shape, hazard.shape[1]))
    ratios[:, first, end - 1] = (hits[:, first] - hits[:, end]) / (spent[:, first] - spent[:, end])
    values = ratios.max(axis=2)
    falling: npt.NDArray[np.float64] = np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
    monotone: npt.NDArray[np.float64] = np.maximum.accumulate(falling, axis=0)
    return monotone


def _sums_ahead(terms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Along each row, the sums of each term and all after it. One more column, of zeros, stands for no terms."""
    sums = np.zeros((terms.shape[0], terms.shape[1] + 1))
    np.cumsum(terms[:, ::-1], axis=1, out=sums[:, -2::-1])
    return sums


class UseCounts:
    """The classes of evicted blocks by key, of at least the last ``size`` remembered and at most about twice as many.

    There are two generations. When the young one is full it becomes the old one. The old one is forgotten at once, but
    its memory is freed little by little. So keys are forgotten in the order in which they were remembered. Tails are
    evicted before their heads, so a head never loses its class while its tail keeps it.
    """

    __slots__ = ("_leaving", "_old", "_young", "size")

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self._young: dict[OffloadKey, int] = {}
        self._old: dict[OffloadKey, int] = {}
        self._leaving: dict[OffloadKey, int] = {}
        """A forgotten generation. Each key remembered drops one of these: to free a million at once would take long."""

    def __repr__(self) -> str:
        return f"UseCounts({len(self._young)} of {self.size} in the young generation)"

    def __len__(self) -> int:
        """Keys in memory, forgotten ones that are still there included."""
        return len(self._young) + len(self._old) + len(self._leaving)

    def remember(self, keys: Sequence[OffloadKey], classes: Sequence[int]) -> None:
        if len(self._young) >= self.size:
            self._young, self._old, self._leaving = {}, self._young, self._old
        self._young.update(zip(keys, classes))
        leaving = self._leaving
        if leaving:
            drop = leaving.popitem
            for _ in range(min(len(keys), len(leaving))):
                drop()

    def recall(self, keys: Sequence[OffloadKey]) -> list[int]:
        """The classes remembered for ``keys``, up to the first key that is not known."""
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
