# SPDX-License-Identifier: Apache-2.0
"""The primary tier's manager: requests, the reuse filter and metrics in front of a ``SlotTable``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvoffload.base import (
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.policies.base import POLICIES, Union
from kvoffload.cpu.reuse import ReuseFilter
from kvoffload.cpu.slots import SlotTable
from kvoffload.metrics import Stats

__all__ = ["CPUOffloadingManager"]

_NO_KEYS: frozenset[OffloadKey] = frozenset()
_RUN = 64
"""Blocks that ``lookup_prefix`` asks the policy for in one call. A miss at the head of a prefix costs one such call."""


class CPUOffloadingManager(OffloadingManager):
    """Decides which blocks the primary tier's ``num_blocks`` slots hold.

    ``cache_policy`` names a registered policy (``UnknownNameError`` lists the choices). ``enable_events`` records what
    appears and leaves, for ``take_events``. With a ``store_threshold`` of 2 or more, a block is not stored before that
    many requests have asked for it; ``max_tracker_size`` bounds the keys counted (``ReuseFilter``). Raises
    ``ConfigError`` for numbers that cannot work.

    A block is *in flight* from ``prepare_store`` to ``complete_store``: ``lookup`` returns ``None``, and the block is
    neither loaded nor evicted. Each ``prepare_load`` pins a block until its ``complete_load``. A pinned block is not
    evicted.

    The keys of one ``prepare_store`` are consecutive blocks of a prefix, head first; later blocks are evicted first.
    A prefix that takes several calls gets this order when the caller touches all of it.

    ``reset_cache`` forgets all blocks at once; ``SlotTable`` describes what becomes of transfers in flight. The reuse
    filter keeps its counts: they are about requests, not blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
    ) -> None:
        self._filter = ReuseFilter.or_none(store_threshold, max_tracker_size)
        self.slots = SlotTable(num_blocks, POLICIES.get(cache_policy), enable_events)
        """Slots, pins and readiness; tiers below the primary one use it too."""
        self.num_blocks = num_blocks
        self.medium = CPULoadStoreSpec.medium()
        self._used: dict[str, set[OffloadKey]] = {}
        """Keys that each announced request has stored or touched: its later touches are no new uses."""
        self._refused = self._filtered = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.slots!r})"

    # ------------------------------------------------------------------------------------------ requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._filter is not None:
            self._filter.on_new_request(req_context)
        self._used[req_context.req_id] = set()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._filter is not None:
            self._filter.on_request_finished(req_context)
        self._used.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._filter is not None:
            self._filter.looked_up(key, req_context)
        block = self.slots.get(key)
        if block is None:
            return False
        return True if block.pins >= 0 else None

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        # The policy looks up runs of keys, but the filter counts only up to and including the first miss, as a loop of
        # ``lookup`` would.
        get_all, reuse = self.slots.get_all, self._filter
        answers: list[bool | None] = []
        answer = answers.append
        for first in range(0, len(keys), _RUN):
            run = keys[first : first + _RUN]
            for key, block in zip(run, get_all(run)):
                if reuse is not None:
                    reuse.looked_up(key, req_context)
                if block is None:
                    answer(False)
                    return answers
                answer(True if block.pins >= 0 else None)
        return answers

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Marks a prefix as just used. All that an announced request does with a block is one use of it: a block that
        it stored or touched before becomes the most recent again, but policies do not count another use."""
        used = self._used.get(req_context.req_id) if req_context is not None else None
        if used is None:
            self.slots.touch(keys)
            return
        if used.isdisjoint(keys):
            self.slots.touch(keys)
        else:
            self.slots.touch([key for key in keys if key not in used])
            self.slots.touch(keys, counts=False)
        used.update(keys)

    # --------------------------------------------------------------------------------------------- loads

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        return CPULoadStoreSpec(self.slots.pin(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.slots.unpin(keys)

    # -------------------------------------------------------------------------------------------- stores

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, claimed: Collection[OffloadKey] = _NO_KEYS
    ) -> PrepareStoreOutput | None:
        """Evicts blocks in ``claimed`` only if there is no other room. ``claimed`` answers ``in`` in O(1)."""
        if self._filter is None:
            wanted = keys
        else:
            # Counted even if no room is found: the request did ask.
            wanted = self._filter.offered(keys, req_context)
        protected: Collection[OffloadKey] = set(keys) if wanted is not keys else _NO_KEYS
        reserved = self.slots.reserve(wanted, Union(protected, claimed)) if claimed else None
        if reserved is None:
            reserved = self.slots.reserve(wanted, protected)
        if reserved is None:
            self._refused += 1
            return None
        used = self._used.get(req_context.req_id)
        if used is not None:
            used.update(reserved.keys_to_store)
        if wanted is not keys and len(wanted) != len(keys):
            admitted = set(wanted)
            self._filtered += sum(key not in admitted and self.slots.get(key) is None for key in set(keys))
        return reserved

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        self.slots.end_write(keys, success)

    # --------------------------------------------------------------------------------------------- whole

    def reset_cache(self) -> None:
        self.slots.reset()

    def take_events(self) -> list[OffloadingEvent]:
        return self.slots.take_events()

    def get_stats(self) -> Stats:
        slots = self.slots
        return {
            ("primary_blocks",): slots.num_blocks,
            ("primary_blocks_used",): slots.num_blocks - slots.num_free,
            ("primary_blocks_pinned",): slots.num_busy,
            ("primary_blocks_stored",): slots.num_stored,
            ("primary_blocks_evicted",): slots.num_evicted,
            ("primary_stores_refused",): self._refused,
            ("reuse_filtered_blocks",): self._filtered,
        }

    def check_invariants(self) -> None:
        """Recomputes everything from scratch; ``AssertionError`` names what disagrees. For tests: O(blocks)."""
        self.slots.check_invariants()
        if self._filter is not None:
            self._filter.check_invariants()
