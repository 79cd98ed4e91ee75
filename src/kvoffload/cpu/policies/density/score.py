# SPDX-License-Identifier: Apache-2.0
"""Score how well hints predict reuse, by comparing models with and without hints on the uses that follow their fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_KEPT = 0.99
"""The factor by which each path fades the earlier score."""
_MOST = 1.0
"""The most that one path adds or subtracts. So a hundred paths can undo the effect of any number of earlier paths."""


_LEAST = 3.0
"""The least score at which the policy uses hints. Meaningless hints often score just above 0 by chance."""


class HintScore:
    """Compares two models' hazards by the uses that follow their fit, path by path.

    Each model assigns a probability that, of all followed keys, the key in question is used next (the partial
    likelihood of D. R. Cox, 1972). A use scores the logarithm of the ratio of the two probabilities. So a model gains
    nothing by expecting more uses of everything. The keys of a path are used together and count as one use, with the
    mean of their scores.
    """

    def __init__(self) -> None:
        self.value = 0.0
        """The score. If it is above 0, recent paths were more likely under the hinted model. About the last hundred
        paths count most."""
        self._gains: npt.NDArray[np.float64] | None = None

    @property
    def favours_hints(self) -> bool:
        return self.value >= _LEAST

    def compare(
        self,
        hinted: npt.NDArray[np.float64],
        unhinted: npt.NDArray[np.float64],
        followed: npt.NDArray[np.float64],
    ) -> None:
        """Score later uses by these hazards.

        ``hinted`` has shape (hints, classes, buckets) and ``unhinted`` has shape (classes, buckets). ``followed`` is
        the number of keys per age in each cell, of the same shape as ``hinted``.
        """
        # Where no key was ever used, both hazards are 0 and neither model is better. The same holds if no use is
        # expected anywhere.
        expected, expected_unhinted = (followed * hinted).sum(), (followed * unhinted).sum()
        ratios = np.divide(
            hinted * expected_unhinted, unhinted * expected, out=np.ones_like(hinted), where=hinted * expected > 0
        )
        self._gains = np.clip(np.log(ratios), -_MOST, _MOST).reshape(-1)

    def add(self, cells: npt.NDArray[np.int64], sizes: Sequence[int]) -> None:
        """Add uses of keys in these cells of the flattened table, path by path. ``sizes`` has each path's key count."""
        if self._gains is None or not sizes:
            return
        lengths = np.asarray(sizes)
        gains = np.add.reduceat(self._gains[cells], np.cumsum(lengths) - lengths) / lengths
        kept = _KEPT ** np.arange(len(gains), -1, -1)
        self.value = float(kept[0] * self.value + kept[1:] @ gains)
