# SPDX-License-Identifier: Apache-2.0
"""The offline optimum: the most hits that any policy could have, if it knew the future.

The rule is Belady's with bypass, on prefix blocks: of all blocks that could stay, drop the one whose next use is
furthest in the future, and keep none that is never used again. (L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966.)

It is a bound *and* reachable here. A request that uses a block also uses the block's predecessors, so a predecessor's
next use is never later than its successor's. Dropping the furthest next use, the deepest block first among equals,
therefore never leaves a block without its predecessor, and every resident block of a request counts as a hit. Without
the prefix rule this is the classic problem of choosing the most intervals, each from one use to the next, with at most
``capacity`` of them at a time. The rule solves that exactly.

The same argument makes it fast. The resident blocks whose next use is request ``t`` are a run on ``t``'s path, and the
deepest is dropped first. So their *number* is enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.sim.trace import Trace


def optimum(trace: Trace, capacities: Sequence[int]) -> list[int]:
    """Return the most blocks that a cache of each capacity (in blocks) can hit.

    O(accesses · log) once, then O(different next uses) per capacity.
    """
    plan = _plan(trace)
    return [_solve(plan, capacity) for capacity in capacities]


def next_uses(trace: Trace) -> npt.NDArray[np.int64]:
    """For each access the index of the next request that uses the same block; ``len(trace)`` where none does."""
    order = np.argsort(trace.ids, kind="stable")
    sorted_ids = trace.ids[order]
    request = np.repeat(np.arange(len(trace), dtype=np.int64), np.diff(trace.offsets))[order]
    following = np.full(len(order), len(trace), dtype=np.int64)
    same = sorted_ids[1:] == sorted_ids[:-1]
    following[:-1][same] = request[1:][same]
    found = np.empty_like(following)
    found[order] = following
    return found


_Plan = list[list[tuple[int, int]]]


def _plan(trace: Trace) -> _Plan:
    """Per request: (next request, number of its blocks used again there), for blocks that are used again."""
    following = next_uses(trace)
    new_run = np.ones(len(following), dtype=bool)
    new_run[1:] = following[1:] != following[:-1]
    new_run[trace.offsets[:-1][np.diff(trace.offsets) > 0]] = True
    starts = np.flatnonzero(new_run)
    lengths = np.diff(np.append(starts, len(following)))
    owners = np.searchsorted(trace.offsets, starts, side="right") - 1
    plan: _Plan = [[] for _ in range(len(trace))]
    never = len(trace)
    for owner, target, length in zip(owners.tolist(), following[starts].tolist(), lengths.tolist(), strict=True):
        if target != never:
            plan[owner].append((target, length))
    return plan


def _solve(plan: _Plan, capacity: int) -> int:
    kept = [0] * len(plan)  # resident blocks by the request that needs them next
    furthest: list[int] = []  # heap of -request; may name requests whose count fell to 0
    resident = hits = 0
    for request, needs in enumerate(plan):
        hits += kept[request]
        resident -= kept[request]
        for target, count in needs:
            if not kept[target]:
                heapq.heappush(furthest, -target)
            kept[target] += count
            resident += count
        while resident > capacity:
            target = -furthest[0]
            dropped = min(kept[target], resident - capacity)
            kept[target] -= dropped
            resident -= dropped
            if not kept[target]:
                heapq.heappop(furthest)
    return hits
