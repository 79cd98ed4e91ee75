# SPDX-License-Identifier: Apache-2.0
"""Whether hints predict: the model that knows them against the one that does not, on what came after both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_KEPT = 0.99
"""What a path leaves of the score before it."""
_MOST = 1.0
"""The most that a path gains or loses: so a hundred paths can take back what any number gave."""


_LEAST = 3.0
"""The score from which hints are believed. Those that mean nothing often have one just above 0, by chance."""


class HintScore:
    """Compares two sets of hazards by the uses that follow their fit, path by path.

    A use scores the logarithm of how much likelier one model held it than the other: that this key of all keys that
    were followed would be the next (the partial likelihood of D. R. Cox, 1972). So a model gains nothing by expecting
    more uses of everything. The keys of a path come together and count as one, with the mean of their scores.
    """

    def __init__(self) -> None:
        self.value = 0.0
        """Above 0, the hinted model held the recent paths to be likelier. The last hundred or so count most."""
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
        """From now on uses are judged by these hazards, of shape (hints, classes, buckets) and (classes, buckets).
        ``followed``: keys per age in each cell, of the shape of ``hinted``."""
        # Where no key was ever used, both hazards are 0, and no model is better. So it is while no use is expected.
        expected, expected_unhinted = (followed * hinted).sum(), (followed * unhinted).sum()
        ratios = np.divide(
            hinted * expected_unhinted, unhinted * expected, out=np.ones_like(hinted), where=hinted * expected > 0
        )
        self._gains = np.clip(np.log(ratios), -_MOST, _MOST).reshape(-1)

    def add(self, cells: npt.NDArray[np.int64], sizes: Sequence[int]) -> None:
        """Uses of keys in these cells of the flat table, path by path: ``sizes`` has the number of keys of each."""
        if self._gains is None or not sizes:
            return
        lengths = np.asarray(sizes)
        gains = np.add.reduceat(self._gains[cells], np.cumsum(lengths) - lengths) / lengths
        kept = _KEPT ** np.arange(len(gains), -1, -1)
        self.value = float(kept[0] * self.value + kept[1:] @ gains)
