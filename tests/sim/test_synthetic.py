# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from kvoffload.errors import ConfigError, UnknownNameError
from kvoffload.sim.optimum import optimum
from kvoffload.sim.synthetic import KINDS, synthesize
from kvoffload.sim.trace import parents_of


@pytest.mark.parametrize("kind", KINDS)
def test_is_a_trace_like_any_other(kind: str) -> None:
    trace = synthesize(kind, requests=600, seed=3)
    assert len(trace) == 600
    assert (np.diff(trace.times_s) >= 0).all()
    parents = parents_of(trace.offsets, trace.ids)
    known = dict(zip(trace.ids.tolist(), parents.tolist(), strict=True))
    assert all(known[block] == parent for block, parent in zip(trace.ids.tolist(), parents.tolist(), strict=True))
    assert sorted(set(trace.ids.tolist())) == list(range(trace.num_unique))
    (bound,) = optimum(trace, [trace.num_unique])
    assert len(trace.sessions) == 600
    assert 0.3 < bound / trace.num_accesses < 0.99


def test_the_seed_decides() -> None:
    first, again, other = (synthesize("mixed", 300, seed) for seed in (1, 1, 2))
    assert first.ids.tolist() == again.ids.tolist()
    assert first.times_s.tolist() == again.times_s.tolist()
    assert first.ids.tolist() != other.ids.tolist()


def test_unknown_kinds_and_empty_worlds() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'agents'"):
        synthesize("agent")
    with pytest.raises(ConfigError):
        synthesize("chat", requests=0)
