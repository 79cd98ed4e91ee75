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
"""Blocks of a prefix that one call of the policy looks up: a miss at its head costs no more than this."""


class CPUOffloadingManager(OffloadingManager):
    """Decides which blocks the primary tier's ``num_blocks`` slots hold.

    ``cache_policy`` names a registered policy (``UnknownNameError`` lists the choices). ``enable_events`` records what
    appears and leaves, for ``take_events``. With ``store_threshold`` of 2 or more a block is stored once so many
    requests asked for it; ``max_tracker_size`` bounds the keys counted (``ReuseFilter``). Raises ``ConfigError`` for
    numbers that cannot work.

    A block is *in flight* from ``prepare_store`` to ``complete_store``: ``lookup`` says ``None``, and it is neither
    loaded nor evicted. A block that ``prepare_load`` pinned is not evicted until as many ``complete_load`` came.

    The keys of one ``prepare_store`` are consecutive blocks of a prefix, head first; later blocks are evicted first.
    Across calls the caller's ``touch`` of the whole prefix makes it so.

    ``reset_cache`` forgets all blocks at once; ``SlotTable.reset`` says what becomes of transfers in flight. The reuse
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
        # The policy is asked for runs of keys; the filter counts up to and including the first miss, as the loop of
        # ``lookup`` does.
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
        """Marks a prefix as just used. An announced request uses a block once, as the reuse filter has it: what it
        stored or touched before moves in the order, and policies that count uses do not count it again."""
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
        """``claimed`` (which answers ``in`` in O(1)) holds blocks to evict only if there is no other room."""
        if self._filter is None:
            wanted = keys
        else:
            # Counted even if there is no room below: the request did ask.
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
