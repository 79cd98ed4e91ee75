# SPDX-License-Identifier: Apache-2.0
"""Replay a trace on one cache without a clock or bytes, to measure only a policy's order.

A request's hit is its longest resident prefix when it arrives. Then all of its blocks are used, one by one from tail to
head, and absent blocks are stored at once. The optimum, and cache simulators that replay a flat stream of accesses,
count in the same way, so figures can be compared. The manager and the policy are the production ones.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvoffload.base import OffloadKey, ReqContext, make_offload_key
from kvoffload.config import DEFAULTS
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.sim.trace import Trace

__all__ = ["ReplayResult", "replay_policy"]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The figures of one replay, in blocks."""

    policy: str
    capacity_blocks: int
    accesses: int
    hit_blocks: int
    stored_blocks: int
    evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        """The share of blocks that were hits, from 0 to 1."""
        return self.hit_blocks / self.accesses


def replay_policy(
    trace: Trace,
    policy: str,
    capacity_blocks: int,
    *,
    store_threshold: int = DEFAULTS.store_threshold,
) -> ReplayResult:
    """Replay ``trace`` through a ``CPUOffloadingManager`` of ``capacity_blocks``."""
    manager = CPUOffloadingManager(capacity_blocks, policy, store_threshold=store_threshold)
    # LRU evicts the same blocks in one batch as one by one. Policies that learn do so between two evictions.
    most_at_once = capacity_blocks if policy == "lru" else 1
    table = [make_offload_key(block_hash, 0) for block_hash in trace.hashes()]
    offsets = trace.offsets.tolist()
    hits = 0
    for request, (start, end) in enumerate(itertools.pairwise(offsets)):
        context = ReqContext(str(request), next_use=trace.next_use(request))
        manager.on_new_request(context)
        path = [table[number] for number in trace.ids[start:end].tolist()]
        answers = manager.lookup_prefix(path, context)
        found = len(answers) - (answers[-1] is not True) if answers else 0
        hits += found
        _use(manager, path, found, context, most_at_once)
        manager.on_request_finished(context)
    stats = manager.get_stats()
    return ReplayResult(
        policy=policy,
        capacity_blocks=capacity_blocks,
        accesses=trace.num_accesses,
        hit_blocks=hits,
        stored_blocks=int(stats["primary_blocks_stored",]),
        evicted_blocks=int(stats["primary_blocks_evicted",]),
    )


def _use(
    manager: CPUOffloadingManager, path: list[OffloadKey], found: int, context: ReqContext, most_at_once: int
) -> None:
    """Use every block of ``path`` from tail to head. The first ``found`` blocks are resident.

    A run of resident blocks is touched in one call. That equals single uses, because they evict nothing and ``touch``
    itself works from tail to head. Runs of up to ``most_at_once`` absent blocks are stored in one call.
    """
    end = _store_absent(manager, path, found, len(path), len(path), context, most_at_once)
    if end < len(path):
        # A small cache may have lost part of the hit to its own tail.
        answers = manager.lookup_prefix(path[:found], context)
        if answers and answers[-1] is not True:
            end = _store_absent(manager, path, 0, found, end, context, most_at_once)
    manager.touch(path[:end], context)


def _store_absent(
    manager: CPUOffloadingManager,
    path: list[OffloadKey],
    first: int,
    stop: int,
    end: int,
    context: ReqContext,
    most_at_once: int,
) -> int:
    """Store the absent blocks of ``path[first:stop]``, from tail to head.

    Blocks from ``end`` on were already used. Returns the new ``end``; resident blocks before it are not used yet.
    """
    at = stop
    while at > first:
        if manager.lookup(path[at - 1], context) is True:
            at -= 1
            continue
        start = at - 1
        while start > first and at - start < most_at_once and manager.lookup(path[start - 1], context) is not True:
            start -= 1
        if at < end:
            manager.touch(path[at:end], context)
        reserved = manager.prepare_store(path[start:at], context)
        assert reserved is not None, "a cache with nothing in flight always has room for this many blocks"
        manager.complete_store(reserved.keys_to_store, context)
        at = end = start
    return end
