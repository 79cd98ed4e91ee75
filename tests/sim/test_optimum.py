# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.sim.optimum import next_uses, optimum
from kvoffload.sim.trace import Trace


def best_by_trying_everything(paths: Sequence[Sequence[int]], capacity: int) -> int:
    """Every sequence of resident sets: after a request any part of (resident + its blocks) that fits may stay.

    A hit is the longest resident prefix, so the test also tries sets that are not closed under predecessors.
    """
    best = {frozenset[int](): 0}
    for path in paths:
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            now = hits + sum(1 for _ in itertools.takewhile(resident.__contains__, path))
            pool = resident | set(path)
            for size in range(min(capacity, len(pool)) + 1):
                for kept in itertools.combinations(sorted(pool), size):
                    state = frozenset(kept)
                    after[state] = max(after.get(state, 0), now)
        best = after
    return max(best.values())


@st.composite
def prefix_paths(draw: st.DrawFn) -> list[list[int]]:
    """Paths from the root in a random tree of at most 6 blocks."""
    parents = [-1]
    parents += [draw(st.integers(-1, block - 1)) for block in range(1, draw(st.integers(2, 6)))]
    paths = []
    for leaf in draw(st.lists(st.integers(0, len(parents) - 1), min_size=1, max_size=8)):
        path, block = [], leaf
        while block != -1:
            path.append(block)
            block = parents[block]
        paths.append(path[::-1])
    return paths


@settings(max_examples=60)
@given(paths=prefix_paths(), capacity=st.integers(1, 4))
def test_equals_brute_force(trace_of: Callable[..., Trace], paths: list[list[int]], capacity: int) -> None:
    (found,) = optimum(trace_of(paths), [capacity])
    assert found == best_by_trying_everything(paths, capacity)


def test_a_block_never_used_again_is_not_kept(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0], [1], [0], [2], [0]])
    assert optimum(trace, [1])[0] == 2


def test_next_uses(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1], [0, 2], [0, 1]])
    assert next_uses(trace).tolist() == [1, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        pytest.param("mooncake_conversation", [24.64, 36.64, 36.64, 36.64, 36.64], marks=pytest.mark.long),
        ("lmcache_agent_b256", [54.16, 84.48, 89.90, 89.90, 89.90]),
    ],
)
def test_reproduces_the_published_rows(shared_trace: Callable[..., Trace], name: str, published: list[float]) -> None:
    trace = shared_trace(name)
    found = optimum(trace, [trace.num_unique * percent // 100 for percent in (1, 5, 10, 20, 50)])
    assert [round(100 * each / trace.num_accesses, 2) for each in found] == published
