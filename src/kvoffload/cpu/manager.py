# SPDX-License-Identifier: Apache-2.0
"""The primary tier's manager: slots, pins, readiness, events and the reuse filter. Order is the policy's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn

from kvoffload.base import (
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.orphans import Orphans
from kvoffload.cpu.policies.base import POLICIES, BlockStatus, CachePolicy, Either
from kvoffload.cpu.reuse import ReuseFilter
from kvoffload.errors import ConfigError
from kvoffload.metrics import Stats

__all__ = ["CPUOffloadingManager"]

_IN_FLIGHT = BlockStatus.IN_FLIGHT
_NOBODY: frozenset[OffloadKey] = frozenset()


class CPUOffloadingManager(OffloadingManager):
    """Decides which blocks the primary tier's ``num_blocks`` slots hold.

    A block is *in flight* from ``prepare_store`` to ``complete_store``: ``lookup`` says ``None``, and it is neither
    loaded nor evicted. A block that ``prepare_load`` pinned is not evicted until as many ``complete_load`` came.

    A batch of ``prepare_store`` is taken for a piece of one request's prefix, head first: its tail is evicted before
    its head. Across batches the caller's ``touch`` of the whole prefix makes it so.

    ``reset_cache`` forgets all blocks at once. Slots of transfers in flight are handed out again only after those
    have completed; they publish nothing. A forgotten key may be stored again at once. While old and new
    transfers of the same key and kind overlap, completions cannot be told apart, so they are settled together by the
    last of them (``kvoffload.cpu.orphans``). The reuse filter keeps its counts: they are about requests, not blocks.

    For tiers below (``kvoffload.tiering``), the same operations without request, reuse filter and refusal count:
    ``_pin``/``_unpin`` and ``_reserve``/``_publish``/``_abandon``; ``num_free_blocks``, ``num_idle_blocks`` and
    ``num_in_flight_blocks`` say what is left.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}: give the primary tier more memory.")
        self.num_blocks = num_blocks
        self.medium = CPULoadStoreSpec.medium()
        self._filter = ReuseFilter.or_none(store_threshold, max_tracker_size)
        self._policy: CachePolicy = POLICIES.get(cache_policy)(num_blocks)
        self._get = self._policy.get
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._slots: list[BlockStatus] = []
        """Every slot handed out so far, by its id; those beyond are fresh."""
        self._free: list[BlockStatus] = []
        """Slots handed out before and free now; the last is the next."""
        self._orphans = Orphans()
        self._used: dict[str, set[OffloadKey]] = {}
        """Keys that each announced request has stored or touched: its later touches are no new uses."""
        self._num_in_flight = 0
        self._num_read = 0
        self._stored = self._evicted = self._refused = self._filtered = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._policy)} of {self.num_blocks} blocks, {self._policy!r})"

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
        block = self._get(key)
        if block is None:
            return False
        return True if block.pins >= 0 else None

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        get, reuse = self._get, self._filter
        answers: list[bool | None] = []
        answer = answers.append
        for key in keys:
            if reuse is not None:
                reuse.looked_up(key, req_context)
            block = get(key)
            if block is None:
                answer(False)
                break
            answer(True if block.pins >= 0 else None)
        return answers

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Marks a prefix as just used. An announced request uses a block once, as the reuse filter has it: what it
        stored or touched before moves in the order, and policies that count uses do not count it again."""
        used = self._used.get(req_context.req_id) if req_context is not None else None
        if used is None:
            self._policy.touch(keys)
            return
        if used.isdisjoint(keys):
            self._policy.touch(keys)
        else:
            self._policy.touch([key for key in keys if key not in used])
            self._policy.settle(keys)
        used.update(keys)

    # --------------------------------------------------------------------------------------------- loads

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        return CPULoadStoreSpec(self._pin(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self._unpin(keys)

    def _pin(self, keys: Collection[OffloadKey]) -> list[int]:
        """Pins blocks, each of which must be ready, and returns their slots in order. A key given twice is pinned
        twice. Asking for a block that is not ready is a bug of ours: ``AssertionError``, and nothing is pinned."""
        blocks = self._policy.get_all(keys)
        slots: list[int] = []
        newly_busy = 0
        for block in blocks:
            if block is None or block.pins < 0:
                self._refuse_to_pin(keys, slots)
            pins = block.pins
            if not pins:
                newly_busy += 1
            block.pins = pins + 1
            slots.append(block.block_id)
        self._num_read += newly_busy
        return slots

    def _refuse_to_pin(self, keys: Collection[OffloadKey], pinned: list[int]) -> NoReturn:
        for slot in pinned:
            self._slots[slot].pins -= 1
        key = list(keys)[len(pinned)]
        state = "absent" if self._get(key) is None else "still being written"
        raise AssertionError(f"block {key.hex()} cannot be read: it is {state}")

    def _unpin(self, keys: Collection[OffloadKey]) -> None:
        """Gives back what ``_pin`` of these keys took. Keys forgotten by a reset are settled with their old block;
        unknown ones are ignored."""
        if self._orphans.reads:
            keys = [key for key in keys if not self._unpin_ambiguous(key)]
        newly_idle = 0
        for block in self._policy.get_all(keys):
            if block is None:
                continue
            pins = block.pins - 1
            assert pins >= 0, f"{block!r} is given back more often than it was pinned"
            block.pins = pins
            if not pins:
                newly_idle += 1
        self._num_read -= newly_idle
        self._policy.released(keys)

    def _unpin_ambiguous(self, key: OffloadKey) -> bool:
        """Whether ``key`` has reads from before a reset, and this completion was counted with theirs."""
        debt = self._orphans.reads.get(key)
        if debt is None:
            return False
        block = self._get(key)
        begun_since = max(block.pins, 0) if block is not None else 0
        if debt.settles(begun_since):
            del self._orphans.reads[key]
            self._num_read -= len(debt.slots)
            self._give_back(debt.slots)
            if block is not None and begun_since:
                block.pins = 0
                self._num_read -= 1
                self._policy.released([key])
        return True

    # -------------------------------------------------------------------------------------------- stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        if self._filter is None:
            wanted = keys
        else:
            # Counted even if there is no room below: the request did ask.
            wanted = self._filter.offered(keys, req_context)
        reserved = self._reserve(wanted, set(keys) if wanted is not keys else _NOBODY)
        used = self._used.get(req_context.req_id)
        if used is not None and reserved is not None:
            used.update(reserved.keys_to_store)
        if reserved is None:
            self._refused += 1
        elif wanted is not keys and len(wanted) != len(keys):
            admitted = set(wanted)
            self._filtered += sum(key not in admitted and self._get(key) is None for key in set(keys))
        return reserved

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        if self._orphans.writes:
            keys, failed = self._settle_ambiguous(keys, success)
            self._abandon(failed)
        if success:
            self._publish(keys)
        else:
            self._abandon(keys)

    def _reserve(
        self, keys: Collection[OffloadKey], protected: Collection[OffloadKey] = _NOBODY
    ) -> PrepareStoreOutput | None:
        """Puts those of ``keys`` that are absent in flight, each in a slot of its own, in the order of ``keys``.

        Evicts for it what the policy gives up, but none of ``keys`` or ``protected`` (which answers ``in`` in O(1)).
        ``None``: not enough idle blocks, and nothing was changed. Stepping over a protected block costs time on every
        call, so what stays protected for long is better pinned, or touched, which takes it out of the way.
        """
        missing = [key for key, block in zip(keys, self._policy.get_all(keys), strict=True) if block is None]
        if not missing:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        if len(missing) > 1 and len(set(missing)) != len(missing):
            missing = list(dict.fromkeys(missing))
        num_victims = max(len(missing) - self.num_free_blocks, 0)
        shield: Collection[OffloadKey] = _NOBODY
        if num_victims:
            if num_victims > self.num_idle_blocks:
                return None
            # ``protected`` may be large and live, so it is never copied; what is missing need not be protected.
            shield = protected if len(missing) == len(keys) else Either(set(keys), protected)
        arrivals = missing[::-1]  # tail first, so that the head is the most recent and outlives it
        victims = self._policy.make_room(arrivals, num_victims, shield)
        if victims is None:
            return None
        assert len(victims) == num_victims, "the policy gave up another number of blocks than was asked"
        evicted: list[OffloadKey] = []
        if victims:
            evicted = [key for key, _ in victims]
            self._evicted += num_victims
            self._tell(evicted, removed=True)
        if num_victims == len(missing):
            blocks = [block for _, block in reversed(victims)]
        else:
            self._free += [block for _, block in victims]
            blocks = self._take_slots(len(missing))
        for key, block in zip(missing, blocks):
            block.key = key
            block.pins = _IN_FLIGHT
        self._policy.insert_all(arrivals, blocks[::-1])
        self._num_in_flight += len(blocks)
        return PrepareStoreOutput(missing, CPULoadStoreSpec([block.block_id for block in blocks]), evicted)

    def _publish(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Those of ``keys`` that are in flight become ready, and are returned."""
        ready: list[OffloadKey] = []
        for key, block in zip(keys, self._policy.get_all(keys), strict=True):
            if block is not None and block.pins < 0:
                block.pins = 0
                ready.append(key)
        self._num_in_flight -= len(ready)
        self._stored += len(ready)
        self._policy.released(ready)
        self._tell(ready, removed=False)
        return ready

    def _abandon(self, keys: Iterable[OffloadKey]) -> None:
        """Those of ``keys`` that are in flight vanish, and their slots are free."""
        freed: list[BlockStatus] = []
        for key in keys:
            block = self._get(key)
            if block is not None and block.pins < 0:
                self._policy.remove(key)
                freed.append(block)
        self._num_in_flight -= len(freed)
        freed.reverse()
        self._give_back(freed)

    def _settle_ambiguous(
        self, keys: Collection[OffloadKey], success: bool
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """(keys whose completion means what it says, keys whose new block is lost with the old one's failure)."""
        clear: list[OffloadKey] = []
        lost: list[OffloadKey] = []
        for key in keys:
            debt = self._orphans.writes.get(key)
            if debt is None:
                clear.append(key)
                continue
            block = self._get(key)
            begun_since = block is not None and block.pins < 0
            if debt.settles(int(begun_since), success):
                del self._orphans.writes[key]
                self._num_in_flight -= len(debt.slots)
                self._give_back(debt.slots)
                if begun_since:
                    (lost if debt.failed else clear).append(key)
        return clear, lost

    # --------------------------------------------------------------------------------------------- slots

    @property
    def num_free_blocks(self) -> int:
        """Slots that hold nothing and that no transfer uses."""
        return self.num_blocks - len(self._slots) + len(self._free)

    @property
    def num_idle_blocks(self) -> int:
        """Slots whose block could be evicted now."""
        return len(self._slots) - len(self._free) - self._num_in_flight - self._num_read

    @property
    def num_in_flight_blocks(self) -> int:
        """Slots that are being written, those of forgotten blocks included."""
        return self._num_in_flight

    @property
    def num_busy_blocks(self) -> int:
        """Slots that are being read or written: not evictable now."""
        return self._num_in_flight + self._num_read

    def _take_slots(self, n: int) -> list[BlockStatus]:
        """``n`` slots: the lowest fresh ones first, then freed ones."""
        first = len(self._slots)
        blocks = [BlockStatus(slot) for slot in range(first, min(first + n, self.num_blocks))]
        self._slots += blocks
        if rest := n - len(blocks):
            # From the end: a batch is freed tail first, so it comes back as a run of rising slots.
            blocks += self._free[: -rest - 1 : -1]
            del self._free[-rest:]
        return blocks

    def _give_back(self, blocks: Iterable[BlockStatus]) -> None:
        for block in blocks:
            block.key = None
            block.pins = _IN_FLIGHT
            self._free.append(block)

    def reset_cache(self) -> None:
        resident: list[OffloadKey] = []
        idle: list[BlockStatus] = []
        old = {id(block) for block in self._orphans.slots()}
        for block in self._slots:
            key = block.key
            if key is None or id(block) in old:
                continue
            if block.pins >= 0:
                resident.append(key)
            if block.pins == 0:
                idle.append(block)
            else:
                self._orphans.adopt(key, block)
        self._policy.clear()
        self._give_back(reversed(idle))
        self._tell(resident, removed=True)

    # ------------------------------------------------------------------------------------------- reports

    def _tell(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(list(keys), self.medium, removed))

    def take_events(self) -> list[OffloadingEvent]:
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def get_stats(self) -> Stats:
        return {
            ("primary_blocks",): self.num_blocks,
            ("primary_blocks_used",): self.num_blocks - self.num_free_blocks,
            ("primary_blocks_pinned",): self.num_busy_blocks,
            ("primary_blocks_stored",): self._stored,
            ("primary_blocks_evicted",): self._evicted,
            ("primary_stores_refused",): self._refused,
            ("reuse_filtered_blocks",): self._filtered,
        }

    def check_invariants(self) -> None:
        """Recomputes the books from scratch; ``AssertionError`` names what disagrees. For tests: O(blocks)."""
        assert len(self._slots) <= self.num_blocks
        assert [block.block_id for block in self._slots] == list(range(len(self._slots)))
        free = {block.block_id for block in self._free}
        orphans = {block.block_id for block in self._orphans.slots()}
        owned = {block.block_id: block for block in self._slots if self._is_owner(block)}
        assert len(free) == len(self._free), "a slot is free twice"
        assert len(orphans) == len(self._orphans.slots()), "a slot has two old owners"
        assert len(free | orphans | owned.keys()) == len(free) + len(orphans) + len(owned), "a slot has two owners"
        assert len(free) + len(orphans) + len(owned) == len(self._slots), "a slot is lost"
        assert len(owned) == len(self._policy), "the policy tracks blocks that own no slot"
        assert all(self._slots[slot].key is None for slot in free)
        busy = [self._slots[slot] for slot in (*owned, *orphans) if self._slots[slot].pins != 0]
        assert all(block.pins >= _IN_FLIGHT for block in busy), "negative pins"
        assert self._num_in_flight == sum(block.pins < 0 for block in busy)
        assert self._num_read == sum(block.pins > 0 for block in busy)
        for kind in (self._orphans.reads, self._orphans.writes):
            assert all(debt.slots and debt.begun >= len(debt.slots) for debt in kind.values())
        self._policy.check_invariants()
        if self._filter is not None:
            self._filter.check_invariants()

    def _is_owner(self, block: BlockStatus) -> bool:
        return block.key is not None and self._get(block.key) is block
