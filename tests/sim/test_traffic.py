# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace, parents_of
from kvoffload.sim.traffic import crowd


def test_a_copy_is_the_trace() -> None:
    trace = synthesize("chat", 50, 1)
    assert crowd(trace, 1) is trace
    with pytest.raises(ConfigError):
        crowd(trace, 0)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_crowd_of_requests_that_come_at_once_comes_at_once(num_requests: int) -> None:
    trace = synthesize("chat", num_requests, 1)
    many = crowd(trace.stretched(0.0), 3)
    assert many.times_s.tolist() == [0.0] * 3 * num_requests


@pytest.mark.parametrize("kind", ["chat", "assistants", "agents"])
def test_copies_share_what_is_common_and_nothing_else(kind: str) -> None:
    trace = synthesize(kind, 200, 3)
    many = crowd(trace, 4)
    assert len(many) == 4 * len(trace)
    assert (np.diff(many.times_s) >= 0).all()
    assert many.num_accesses == 4 * trace.num_accesses
    assert many.total_input_tokens == 4 * trace.total_input_tokens
    # Prefix-chained as before: each number has one predecessor, and numbers rise by first appearance.
    parents = parents_of(many.offsets, many.ids)
    pairs = {*zip(many.ids.tolist(), parents.tolist(), strict=True)}
    assert len(pairs) == many.num_unique
    assert (np.maximum.accumulate(many.ids)[1:] - np.maximum.accumulate(many.ids)[:-1] <= 1).all()
    users = np.repeat(trace.sessions, np.diff(trace.offsets))
    common = sum(len(set(users[trace.ids == block].tolist())) > 1 for block in range(trace.num_unique))
    assert many.num_unique == 4 * (trace.num_unique - common) + common


def test_a_trace_without_sessions_has_its_most_used_prefix_in_common(trace_of: Callable[..., Trace]) -> None:
    prompts = [[0, 1, 10 + n, 500 + n] for n in range(200)] + [[400], [400, 401]]
    many = crowd(trace_of(prompts), 3)
    unique = len({block for prompt in prompts for block in prompt})
    assert many.num_unique == 3 * (unique - 2) + 2
