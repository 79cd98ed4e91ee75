# SPDX-License-Identifier: Apache-2.0
"""More users than a trace has, without hits that are made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.sim.trace import NO_SESSION, Trace, numbered


def crowd(trace: Trace, copies: int, seed: int = 0) -> Trace:
    """``copies`` of the trace at once, as if as many groups of users did the like.

    Each copy but the first starts somewhere else in the trace and wraps around at its end, so that peaks do not
    coincide. Its blocks are its own, except *common* ones, which any users of the service send: those that two
    sessions used; where the trace knows no sessions, those that one request in a hundred used, which is more than the
    turns of one conversation.

    What this leaves out: users of two copies never send the same new document. Hit rates of what servers share are
    therefore a lower bound.
    """
    if copies < 1:
        raise ConfigError("A crowd has at least one copy of the trace.")
    if copies == 1 or not len(trace):
        return trace
    chance = np.random.default_rng(seed)
    span_s = float(trace.times_s[-1] - trace.times_s[0])
    duration_s = span_s + span_s / max(len(trace) - 1, 1)  # and a mean gap
    is_common = _common(trace)
    counts = np.diff(trace.offsets)
    times = []
    for copy in range(copies):
        shift_s = 0.0 if copy == 0 else float(chance.uniform(0, duration_s))
        since_s = trace.times_s - trace.times_s[0]
        times.append((since_s + shift_s) % duration_s if duration_s else since_s)  # 0: all requests come at once
    all_times = np.concatenate(times)
    sorted_at = np.argsort(all_times, kind="stable")
    copy_of, request_of = sorted_at // len(trace), sorted_at % len(trace)
    lengths = counts[request_of]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    ids = trace.ids[np.repeat(trace.offsets[:-1][request_of], lengths) + position].astype(np.int64)
    own = ids + np.repeat(copy_of, lengths) * trace.num_unique
    sessions = trace.sessions[request_of]
    most = int(trace.sessions.max()) + 1
    return replace(
        trace,
        name=f"{trace.name} x{copies}",
        times_s=all_times[sorted_at] + float(trace.times_s[0]),
        input_tokens=trace.input_tokens[request_of],
        output_tokens=trace.output_tokens[request_of],
        sessions=np.where(sessions == NO_SESSION, NO_SESSION, sessions + copy_of * most),
        offsets=offsets,
        ids=numbered(np.where(is_common[ids], ids, own)),
        next_uses=None if trace.next_uses is None else trace.next_uses[request_of],
    )


def _common(trace: Trace) -> npt.NDArray[np.bool_]:
    """Whether each block is common. Shape (unique,). What comes before a common block is common, by its users."""
    if not (trace.sessions != NO_SESSION).all():
        return np.bincount(trace.ids, minlength=trace.num_unique) * 100 >= len(trace)
    users = np.repeat(trace.sessions, np.diff(trace.offsets))
    pairs = np.unique(trace.ids.astype(np.int64) * (int(users.max()) + 1) + users)
    return np.bincount(pairs // (int(users.max()) + 1), minlength=trace.num_unique) >= 2
