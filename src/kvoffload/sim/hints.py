# SPDX-License-Identifier: Apache-2.0
"""Add hints to traces that lack them: the hints that clients would give about the next use of their blocks, some of
them wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvoffload.base import NextUse
from kvoffload.errors import ConfigError
from kvoffload.sim.optimum import next_uses
from kvoffload.sim.trace import NO_SESSION, Trace

_SOON_S, _LATER_S = 60.0, 600.0


def hinter(text: str) -> Callable[[Trace], Trace]:
    """Return a function that adds hints to a trace: ``oracle`` adds true hints, and ``noisy:P`` replaces a share P (0
    to 1) of them by wrong ones."""
    if text == "oracle":
        return true_hints
    name, _, share = text.partition(":")
    with suppress(ValueError):
        if name == "noisy" and 0 <= (wrong := float(share)) <= 1:
            return lambda trace: wrong_hints(true_hints(trace), wrong)
    raise ConfigError(f"hints must be oracle, or noisy:P with a share P from 0 to 1, not {text!r}.")


def true_hints(trace: Trace) -> Trace:
    """Return the trace with the true hint of every client: the time of its session's next request.

    For requests without a session, it is the next request that uses their last whole block. A client that returns after
    more than ten minutes gives no hint.
    """
    gap_s = _gaps_s(trace)
    hints = np.select(
        [gap_s <= _SOON_S, gap_s <= _LATER_S, np.isinf(gap_s)],
        [NextUse.SOON, NextUse.LATER, NextUse.NEVER],
        NextUse.UNKNOWN,
    )
    return replace(trace, next_uses=hints.astype(np.int8))


def wrong_hints(trace: Trace, share: float, seed: int = 0) -> Trace:
    """Return the trace with a random ``share`` of its hints replaced by one of the other two."""
    if trace.next_uses is None:
        return trace
    random = np.random.default_rng(seed)
    hints = trace.next_uses.copy()
    wrong = (random.random(len(hints)) < share) & (hints != NextUse.UNKNOWN)
    hints[wrong] = (hints[wrong] - 1 + random.integers(1, 3, wrong.sum())) % 3 + 1
    return replace(trace, next_uses=hints)


def _gaps_s(trace: Trace) -> npt.NDArray[np.float64]:
    """Return the seconds from each request until its client returns; infinite if it never does."""
    requests = len(trace)
    following = np.full(requests, requests)
    whole = trace.num_whole
    some = np.flatnonzero(whole)
    following[some] = next_uses(trace)[trace.offsets[some] + whole[some] - 1]
    latest: dict[int, int] = {}
    for request in range(requests - 1, -1, -1):
        session = int(trace.sessions[request])
        if session != NO_SESSION:
            following[request] = latest.get(session, requests)
            latest[session] = request
    gaps_s: npt.NDArray[np.float64] = np.append(trace.times_s, np.inf)[following] - trace.times_s
    return gaps_s
