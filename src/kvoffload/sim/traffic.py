# SPDX-License-Identifier: Apache-2.0
"""Simulate more users than a trace has, without inventing hits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.sim.trace import NO_SESSION, Trace, numbered


def crowd(trace: Trace, copies: int, seed: int = 0) -> Trace:
    """Return ``copies`` of the trace at once, as if that many groups of users behaved in the same way.

    Each copy except the first starts at another position in the trace and wraps around at its end, so that peaks do not
    coincide. The blocks of a copy are unique to it, except *common* blocks, which any users of the service send. A
    block is common if two sessions used it or, in a trace without sessions, if at least one request in a hundred used
    it, which is more than the turns of one conversation.

    This model is not complete: users of two copies never send the same new document. So hit rates of shared tiers are a
    lower bound.
    """
    if copies < 1:
        raise ConfigError("A crowd must have at least one copy of the trace.")
    if copies == 1 or not len(trace):
        return trace
    chance = np.random.default_rng(seed)
    span_s = float(trace.times_s[-1] - trace.times_s[0])
    duration_s = span_s + span_s / max(len(trace) - 1, 1)  # plus a mean gap
    is_common = _common(trace)
    counts = np.diff(trace.offsets)
    times = []
    for copy in range(copies):
        shift_s = 0.0 if copy == 0 else float(chance.uniform(0, duration_s))
        since_s = trace.times_s - trace.times_s[0]
        times.append((since_s + shift_s) % duration_s if duration_s else since_s)  # 0: all requests arrive at once
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
    """Return for each block whether it is common, with the shape (unique,). All blocks before a common block are also
    common, because its users use them."""
    if not (trace.sessions != NO_SESSION).all():
        return np.bincount(trace.ids, minlength=trace.num_unique) * 100 >= len(trace)
    users = np.repeat(trace.sessions, np.diff(trace.offsets))
    pairs = np.unique(trace.ids.astype(np.int64) * (int(users.max()) + 1) + users)
    return np.bincount(pairs // (int(users.max()) + 1), minlength=trace.num_unique) >= 2
