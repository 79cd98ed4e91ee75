# SPDX-License-Identifier: Apache-2.0
"""The hit of each request: the search for it, what it waits for, and its admission. Scheduler thread only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

from kvoffload.base import NextUse, OffloadingManager, OffloadKey
from kvoffload.config import GroupKind
from kvoffload.connector.groups import AskBlocks, GroupGeometry, find_hit, finest_of, possible_hit
from kvoffload.connector.loads import Loads
from kvoffload.connector.recording import RequestRecording
from kvoffload.connector.requests import UNKNOWN, RequestOffloadState
from kvoffload.metrics import HOST, Histogram, Sample, Stats

__all__ = ["Hits"]


class Hits:
    """Searches for the hits of requests that wait to be admitted, begins their loads, and counts what was found.

    Each request has one ``Hit``: ``find`` answers the engine, now or in a later step, and ``admit`` follows when the
    request has GPU blocks. ``clock`` gives seconds and never goes back.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        geometry: Sequence[GroupGeometry],
        loads: Loads,
        recording: RequestRecording,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._is_hybrid = any(group.kind is not GroupKind.FULL_ATTENTION for group in geometry)
        self._loads = loads
        self._recording = recording
        self._clock = clock
        self._waiting: dict[RequestOffloadState, float] = {}
        """Requests whose last question has no answer yet, and since when."""
        self._wait_seconds = Histogram("lookup_wait_seconds")
        self._counts: dict[Sample, float] = {}

    def __repr__(self) -> str:
        return f"Hits({len(self._waiting)} requests waiting)"

    # ------------------------------------------------------------------------------------------------- the search

    def find(self, state: RequestOffloadState, computed_tokens: int) -> int | None:
        """The tokens that the request can have, ``computed_tokens`` on the device included; ``None``: ask again in a
        later step."""
        tokens: int | None = computed_tokens
        if state.context.reads_cache:
            waits_for = "own transfers"
            # A request may have one load or several stores in flight, never both. So one that was preempted waits for
            # its old transfers.
            if state.job_ids:
                tokens = None
            else:
                tokens = self.search(state, computed_tokens, state.request.num_tokens - 1)
                waits_for = "another load" if self._loads.is_in_flight(state.hit.awaited_job_id) else "tiers"
            if tokens is None:
                self._recording.deferred(state, waits_for)
                self._count(("lookups_deferred",))
                self._waiting.setdefault(state, self._clock())
                return None
            self._end_wait(state)
        state.hit.answer(computed_tokens)
        return tokens

    def _end_wait(self, state: RequestOffloadState) -> None:
        since_s = self._waiting.pop(state, None)
        if since_s is not None:
            state.hit.wait_s += self._clock() - since_s
        self._recording.answered(state)

    def search(self, state: RequestOffloadState, computed_tokens: int, most: int) -> int | None:
        """The longest hit of at most ``most`` tokens, or ``None`` while a lookup has no answer. Lookups promote what
        they find. So where a hit needs windows or states too, no attention is looked up after the last of them that is
        anywhere. Whoever promotes only a part of it learns where that part may end.

        A request whose load failed gets no other. vLLM would count what it still needs as reserved for it, also against
        the next load, and wait for ever if the two do not fit.
        """
        hit = state.hit
        if hit.load_failed:
            return computed_tokens
        state.extend_keys(self._geometry)
        most = min(most, computed_tokens + state.max_load_tokens)
        keys = [group.keys for group in state.groups]
        ask: AskBlocks = functools.partial(self._manager.lookup_prefix, req_context=state.context)
        if self._is_hybrid:
            if hit.possible == UNKNOWN:
                peek: AskBlocks = functools.partial(self._manager.peek, req_context=state.context)
                hit.possible = possible_hit(self._geometry, keys, peek, self._manager.holds, computed_tokens, most)
            tokens, ends = hit.possible
            most = most if tokens is None else min(most, tokens)
            if ends is not None:  # a manager of others may not know it
                ask = functools.partial(self._manager.lookup_prefix, req_context=state.context, ends=ends)
        found = find_hit(self._geometry, keys, ask, computed_tokens, most)
        if found is not None and found > computed_tokens and self._awaits_load(state, computed_tokens, found):
            return None
        return found

    def _awaits_load(self, state: RequestOffloadState, computed_tokens: int, hit_tokens: int) -> bool:
        """Whether another request is loading at least half of these blocks already.

        When that load has ended, the engine's own prefix cache holds them. A request waits for one such load at most,
        so that requests with a shared prefix never form a queue.
        """
        hit = state.hit
        if hit.awaited_job_id is None:
            for group, own in zip(self._geometry, state.groups, strict=True):
                blocks = group.blocks_for_hit(computed_tokens, hit_tokens)
                if blocks:
                    hit.awaited_job_id = self._loads.job_of(own.keys[blocks[len(blocks) // 2]])
                    break
        return self._loads.is_in_flight(hit.awaited_job_id)

    # ------------------------------------------------------------------------------------------------- its admission

    def admit(self, state: RequestOffloadState, num_external_tokens: int) -> None:
        """The request has GPU blocks. Begins a load for ``num_external_tokens``, and touches the prefix."""
        hit = state.hit
        self._wait_seconds.observe(hit.wait_s)
        hit.admit(num_external_tokens)
        hit.tokens_by_tier = {}
        if state.context.reads_cache:
            if num_external_tokens > 0:
                hit.tokens_by_tier = self._tokens_by_tier(state)
            if not hit.is_counted:
                self._count_admission(state, num_external_tokens)
            if num_external_tokens > 0:
                self._loads.begin(state)
            self._touch(state)
        self._recording.admitted(state, hit.tokens_by_tier)

    def _count_admission(self, state: RequestOffloadState, num_external_tokens: int) -> None:
        hit = state.hit
        hit.is_counted = True
        not_computed = max(0, state.request.num_tokens - hit.computed_tokens)
        looked_up = min(not_computed, state.max_load_tokens)
        hinted = "no" if state.context.next_use is NextUse.UNKNOWN else "yes"
        self._count(("lookup_tokens",), looked_up)
        self._count(("lookup_tokens_by_hint", hinted), looked_up)
        self._count(("hit_tokens",), num_external_tokens)
        self._count(("hit_tokens_by_hint", hinted), num_external_tokens)
        for tier, tokens in hit.tokens_by_tier.items():
            self._count(("tier_hit_tokens", tier), tokens)

    def _tokens_by_tier(self, state: RequestOffloadState) -> dict[str, int]:
        """The tokens of a hit by the tier in which their blocks lay when the request came. With several groups, those
        of the group with the smallest blocks count; a state, which is one for all tokens, where there is nothing else.
        """
        first, stop, sources = state.hit.computed_tokens, state.hit.tokens, self._manager.sources(state.context)
        if not sources:
            return {HOST: stop - first}
        attention = [group for group in self._geometry if group.kind is not GroupKind.SINGLE_STATE]
        if not attention:
            (last,) = self._geometry[0].blocks_for_hit(first, stop)
            return {sources.get(state.groups[0].keys[last], HOST): stop - first}
        finest = finest_of(attention)
        keys, size = state.groups[finest.index].keys, finest.block_tokens
        tokens: dict[str, int] = {}
        for block in range(first // size, -(-stop // size)):
            tier = sources.get(keys[block], HOST)
            tokens[tier] = tokens.get(tier, 0) + min(stop, (block + 1) * size) - max(first, block * size)
        return tokens

    def _touch(self, state: RequestOffloadState) -> None:
        """Marks the prefix as used. That includes what the device held: blocks in use there should not age here."""
        keys: list[OffloadKey] = []
        for group, own in zip(self._geometry, state.groups, strict=True):
            blocks = group.blocks_to_find(0, state.hit.tokens)
            keys += own.keys[blocks.start : blocks.stop]
        if keys:
            self._manager.touch(keys, state.context)

    # ----------------------------------------------------------------------------------------------------------------

    def forget(self, state: RequestOffloadState) -> None:
        """The request ended."""
        self._waiting.pop(state, None)
        self._loads.forget(state)

    def get_stats(self) -> Stats:
        own = self._counts | {("requests_waiting",): len(self._waiting)}
        return own | self._wait_seconds.stats() | self._loads.get_stats()

    def _count(self, sample: Sample, value: float = 1) -> None:
        self._counts[sample] = self._counts.get(sample, 0) + value

    def check_invariants(self, requests: Collection[RequestOffloadState]) -> None:
        """For tests. ``requests``: those that have not ended."""
        self._loads.check_invariants()
        assert set(requests).issuperset(self._waiting), "a request that has ended waits for an answer"
        for state in requests:
            assert state.hit.load_job_id is None or state.hit.load_job_id in state.job_ids
