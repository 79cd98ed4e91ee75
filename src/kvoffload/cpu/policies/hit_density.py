# SPDX-License-Identifier: Apache-2.0
"""Learns what a cached block is worth: hits to expect per unit of cache space and time."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey

__all__ = ["NUM_CLASSES", "HitDensity"]

NUM_CLASSES = 8
"""Blocks are told apart by how often they were used: once, twice, ... , eight times or more."""

_BUCKETS_PER_OCTAVE = 2
_FINEST = 64
"""The youngest ages told apart are 1/64 of the capacity."""
_HORIZON = 12
"""A use more than this many capacities after the previous one is not waited for."""
_SAMPLES = 8192
_EVENTS_PER_FIT = 500
_DECAY = 0.95
_PRIOR = 50.0
_LEAST_CAPACITY = 256


class HitDensity:
    """Value of a block by (class, age), where age is the number of block uses since its own last use.

    The fate of sampled keys, resident or not, is followed: either they are used again at some age, or not within the
    horizon. From these, per class, comes the hazard (chance of a use at each age), shrunk towards that of all classes
    together where evidence is thin, and from it the value: the best ratio, over all times one might choose to
    wait, of hits to expect to space-time to spend. That ratio is the Gittins index (J. Gittins, "Bandit processes and
    dynamic allocation indices", 1979), the optimal rank for choosing which of many such wagers to keep; "hit
    density" is what N. Beckmann, H. Chen and A. Cidon call it ("LHD: Improving Cache Hit Rate by Maximizing Hit
    Density", NSDI 2018).

    Values are made to fall with age and to rise with use. A block's predecessors are never older or less
    used than it is, so it is never worth more than they are: a prefix is evicted from its tail, whatever was learned.

    Below ``_LEAST_CAPACITY`` blocks (a few prompts) nothing is learned: there is too little to learn from, and the
    order stays that of recency. Memory is constant: some 8,000 keys are followed, whatever the capacity.
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
        self._samples: OrderedDict[OffloadKey, tuple[int, int]] = OrderedDict()
        """Class and time of the last use, least recent first."""
        self.sample_mask = (1 << max(self._horizon // _SAMPLES, 0).bit_length()) - 1
        """A key is followed if its hash has none of these bits."""
        self.clear()

    def clear(self) -> None:
        shape = NUM_CLASSES, len(self.bounds) + 1
        self._used = np.zeros(shape)
        self._lost = np.zeros(shape)
        self._num_events = 0
        self._samples.clear()
        recency = (1.0 / np.cumsum(self._widths)).tolist()
        self.values: list[list[float]] = [recency] * NUM_CLASSES
        """``values[class][bucket]``. Falls along both rows (age) and up columns (fewer uses)."""

    def used(self, key: OffloadKey, class_: int, now: int) -> None:
        """A sampled key was used, and is of ``class_`` from now on."""
        before = self._samples.pop(key, None)
        if before is not None:
            self._used[before[0], bisect_right(self.bounds, now - before[1])] += 1
            self._num_events += 1
        self._samples[key] = class_, now
        oldest_alive = now - self._horizon
        while (oldest := next(iter(self._samples.items())))[1][1] < oldest_alive:
            old_key, (old_class, last) = oldest
            del self._samples[old_key]
            self._lost[old_class, bisect_right(self.bounds, now - last)] += 1
            self._num_events += 1
        if self._num_events >= _EVENTS_PER_FIT and self._capacity >= _LEAST_CAPACITY:
            self._num_events = 0
            self.values = densities(self._used, self._lost, self._widths).tolist()
            self._used *= _DECAY
            self._lost *= _DECAY

    def forget(self, key: OffloadKey) -> None:
        """The last use did not come about."""
        self._samples.pop(key, None)


def densities(
    used: npt.NDArray[np.float64], lost: npt.NDArray[np.float64], widths: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Values by (class, age bucket) from counts of both ends a block's wait can have, each at its age.

    ``used`` and ``lost`` have shape (classes, buckets); ``widths`` is the length of each bucket.
    """
    at_risk = np.cumsum((used + lost)[:, ::-1], axis=1)[:, ::-1]
    everyone = used.sum(axis=0) / (at_risk.sum(axis=0) + 1)
    hazard = (used + _PRIOR * everyone) / (at_risk + _PRIOR)
    values = np.empty_like(hazard)
    for start in range(hazard.shape[1]):
        ahead = hazard[:, start:]
        alive = np.ones_like(ahead)
        np.cumprod(1 - ahead[:, :-1], axis=1, out=alive[:, 1:])
        hits = np.cumsum(alive * ahead, axis=1)
        spent = np.cumsum(alive * widths[start:] * (1 - ahead / 2), axis=1)
        values[:, start] = (hits / spent).max(axis=1)
    falling: npt.NDArray[np.float64] = np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
    monotone: npt.NDArray[np.float64] = np.maximum.accumulate(falling, axis=0)
    return monotone
