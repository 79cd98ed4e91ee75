# SPDX-License-Identifier: Apache-2.0
"""What a server's steps cost, from the steps that it measured while it recorded a trace."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_LEAST_STEPS = 20
"""The fewest steps that show their costs."""


def fit_steps(steps: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the seconds of a step, of each of its prompt tokens and of each request that decodes in it, from rows of
    (seconds, prompt tokens, decoding requests). They are zeros if there are too few steps to tell.

    Fits relative errors by least squares, so that long steps do not count for more. No cost is negative.
    """
    steps = steps[steps[:, 0] > 0]
    costs = np.zeros(3)
    if len(steps) >= _LEAST_STEPS:
        parts = np.column_stack((np.ones(len(steps)), steps[:, 1:])) / steps[:, :1]
        used = np.flatnonzero(parts.any(axis=0))
        while len(used):
            found = np.linalg.lstsq(parts[:, used], np.ones(len(steps)), rcond=None)[0]
            if found.min() >= 0:
                costs[used] = found
                break
            used = np.delete(used, found.argmin())
    step_s, token_s, decode_s = costs.tolist()
    return step_s, token_s, decode_s
