# SPDX-License-Identifier: Apache-2.0
"""The control plane of host memory: the blocks in its slots, and the managers that the connector and the lower tiers
use.

``SlotTable`` owns slots, pins and readiness. ``CPUOffloadingManager`` adds requests, the reuse filter and metrics.
``CPUPrimaryTierOffloadingManager`` adds the memory itself and the methods with which lower tiers read and write it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from kvoffload.base import (
    NextUse,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from kvoffload.config import DEFAULTS
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.policies.base import POLICIES, BlockStatus, CachePolicy, Union, with_options
from kvoffload.cpu.reuse import ReuseFilter
from kvoffload.errors import ConfigError
from kvoffload.events import PendingEvents
from kvoffload.lost_blocks import NO_LOSSES, Loss, LostBlocks
from kvoffload.metrics import HOST, Histogram, Stats
from kvoffload.miss import Miss

_IN_FLIGHT = BlockStatus.IN_FLIGHT
_NO_KEYS: frozenset[OffloadKey] = frozenset()
_MIN_USED = 1024
"""The least number of keys remembered for each request, however small host memory is."""
_RUN = 64
"""Number of blocks that ``lookup_prefix`` asks the policy for in one call. A miss at the head of a prefix costs one
such call."""


# ---------------------------------------------------------------------------------------------------------------- slots


class SlotTable:
    """Slots, pins and readiness of the blocks in host memory, on top of a cache policy. One thread; no bytes.

    Reads pin a block, and writes reserve a slot::

        pin(keys) -> slots  ...  unpin(keys)                           as often as it was pinned
        reserve(keys) -> slots, victims  ...  end_write(keys, success)

    A block is *in flight* from ``reserve`` to ``end_write``: it is neither readable nor evictable. A pinned block is
    not evicted.

    The keys of one ``reserve`` are consecutive blocks of a prefix, head first; later blocks are evicted first.

    ``reset`` forgets all blocks at once. The slot of a transfer in flight is reused only after that transfer has ended,
    and the transfer publishes nothing. Until then, its key cannot be reserved again, because the end of a transfer
    names only the key.

    With ``enable_events``, the table records the blocks that appear and leave, in the order in which these changes
    become true. ``clock`` returns seconds and never goes back; it determines the age of blocks. ``lost`` records the
    blocks that leave.
    """

    def __init__(
        self,
        num_blocks: int,
        make_policy: type[CachePolicy],
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        lost: LostBlocks = NO_LOSSES,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}: set a larger host memory.")
        self.num_blocks = num_blocks
        self.policy = policy = make_policy(num_blocks)
        """The order of the blocks. Other code only calls its ``next_victims``; this table makes all changes."""
        self.get = policy.get
        """Return the block with this key, or ``None``. Callers only read it; the table alone changes blocks."""
        self.get_all = policy.get_all
        self.num_stored = 0
        """Number of blocks published since the start."""
        self.num_evicted = 0
        self.touch = with_options(policy.touch, "counts", "next_use")
        """Record that one request used a prefix, from head to tail. ``counts=False``: change only the order, and count
        no new use. ``next_use``: the client's hint about the next use."""
        self._evict = with_options(policy.evict, "incoming")
        self._insert_all = with_options(policy.insert_all, "next_use")
        self._medium = CPULoadStoreSpec.medium()
        self._events = PendingEvents(self._medium) if enable_events else None
        self._slots: list[BlockStatus] = []
        """The slots whose record exists, by id."""
        self._num_used = 0
        """Number of slots used since the last reset that found no busy slot. All other slots are empty, whatever their
        records say."""
        self._free: list[BlockStatus] = []
        """Slots that were used and are free again. The last one is used next."""
        self._orphans: dict[OffloadKey, BlockStatus] = {}
        """Blocks that a reset forgot while they were being read or written, until that transfer has ended."""
        self.num_in_flight = 0
        """Number of slots that are being written, including slots of blocks that a reset forgot."""
        self._num_read = 0
        self._clock = clock
        self._lost = lost
        self._allocations = Histogram("primary_allocation_blocks")
        self._eviction_ages = Histogram("primary_eviction_age_seconds")

    def __repr__(self) -> str:
        return f"SlotTable({len(self.policy)} of {self.num_blocks} blocks, {self.policy!r})"

    def make_records(self) -> None:
        """Create the records of all slots now, instead of at each slot's first use.

        Engines freeze all existing objects after their start (``gc.freeze``), so full collections do not visit these
        records.
        """
        self._slots += map(BlockStatus, range(len(self._slots), self.num_blocks))

    # --------------------------------------------------------------------------------------------- counts

    @property
    def num_free(self) -> int:
        """Number of empty slots that no transfer uses."""
        return self.num_blocks - self._num_used + len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of slots whose block can be evicted."""
        return self._num_used - len(self._free) - self.num_in_flight - self._num_read

    @property
    def num_busy(self) -> int:
        """Number of slots that are being read or written, so that they cannot be evicted."""
        return self.num_in_flight + self._num_read

    # ---------------------------------------------------------------------------------------------- reads

    def pin(self, keys: Collection[OffloadKey]) -> list[int]:
        """Pin blocks and return their slots in order. A key given twice is pinned twice.

        All blocks must be ready. Otherwise this raises ``AssertionError``, because it is a bug of kvoffload, and pins
        nothing.
        """
        blocks = self.get_all(keys)
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
        state = "absent" if self.get(key) is None else "still being written"
        raise AssertionError(f"block {key.hex()} cannot be read: it is {state}")

    def unpin(self, keys: Collection[OffloadKey]) -> None:
        """Release the pins of one ``pin`` of these keys. Ignores unknown keys.

        If a block has no pin, this raises ``AssertionError``, because it is a bug of kvoffload, and releases nothing.
        """
        if self._orphans:
            keys = self._end_forgotten(keys, is_write=False)
        newly_idle = 0
        blocks = self.get_all(keys)
        for at, block in enumerate(blocks):
            if block is None:
                continue
            pins = block.pins - 1
            if pins < 0:
                self._refuse_to_unpin(blocks[:at], block)
            block.pins = pins
            if not pins:
                newly_idle += 1
        self._num_read -= newly_idle
        self.policy.released(keys)

    @staticmethod
    def _refuse_to_unpin(unpinned: Iterable[BlockStatus | None], refused: BlockStatus) -> NoReturn:
        for block in unpinned:
            if block is not None:
                block.pins += 1
        raise AssertionError(f"{refused!r} is given back more often than it was pinned")

    def _end_forgotten(self, keys: Iterable[OffloadKey], *, is_write: bool) -> list[OffloadKey]:
        """End one transfer of each block that a reset forgot, and return the other keys."""
        others: list[OffloadKey] = []
        for key in keys:
            block = self._orphans.get(key)
            if block is None or (block.pins < 0) is not is_write:
                others.append(key)
                continue
            if is_write:
                self.num_in_flight -= 1
            elif block.pins > 1:
                block.pins -= 1
                continue
            else:
                self._num_read -= 1
            del self._orphans[key]
            self._give_back([block])
        return others

    # --------------------------------------------------------------------------------------------- writes

    def reserve(
        self,
        keys: Collection[OffloadKey],
        protected: Collection[OffloadKey] = _NO_KEYS,
        next_use: NextUse = NextUse.UNKNOWN,
    ) -> PrepareStoreOutput | None:
        """Reserve one slot for each absent key of ``keys``, in the order of ``keys``, and put these blocks in flight.

        Evicts as many blocks as necessary, but none of ``keys`` or ``protected`` (which must answer ``in`` in O(1)).
        Returns ``None`` and changes nothing if there are too few idle blocks, or if a transfer from before a reset
        still uses the slot of one of ``keys``. Each call steps over the protected blocks that it meets. If a block
        stays protected for long, pin it, or touch it, which moves it out of the way.
        """
        missing = [key for key, block in zip(keys, self.get_all(keys)) if block is None]
        if not missing:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        if self._orphans and not self._orphans.keys().isdisjoint(missing):
            return None
        if len(missing) > 1 and len(set(missing)) != len(missing):
            missing = list(dict.fromkeys(missing))
        num_victims = len(missing) - self.num_free
        kept: Collection[OffloadKey] = _NO_KEYS
        if num_victims < 0:
            num_victims = 0
        elif num_victims:
            if num_victims > self.num_idle:
                return None
            # ``protected`` may be large and live, so it is never copied. Absent keys need no protection.
            kept = protected if len(missing) == len(keys) else Union(set(keys), protected)
        arrivals = missing[::-1]  # tail first, so that the head is the most recent and outlives the tail
        victims = self._evict(num_victims, kept, incoming=arrivals)
        if victims is None:
            return None
        assert len(victims) == num_victims, "the policy evicted another number of blocks than it was asked for"
        now_s = self._clock()
        self._allocations.observe(len(missing))
        evicted: list[OffloadKey] = []
        if victims:
            self._eviction_ages.observe(now_s - victims[0][1].since_s)
            evicted = [key for key, _ in victims]
            self.num_evicted += num_victims
            if self._events is not None:
                self._events.add(evicted, removed=True)
            self._lost.record(evicted, Miss.EVICTED, HOST)
        if num_victims == len(missing):
            blocks = [block for _, block in victims]
            blocks.reverse()
        else:
            self._free += [block for _, block in victims]
            blocks = self._take_slots(len(missing))
        slots = []
        for key, block in zip(missing, blocks):
            block.key = key
            block.pins = _IN_FLIGHT
            block.since_s = now_s
            slots.append(block.block_id)
        self._insert_all(arrivals, blocks[::-1], next_use=next_use)
        self.num_in_flight += len(slots)
        return PrepareStoreOutput(missing, CPULoadStoreSpec(slots), evicted)

    def end_write(self, keys: Collection[OffloadKey], success: bool) -> None:
        """End the writes of ``keys``. Their blocks become ready, or if not ``success``, their slots are freed."""
        if self._orphans:
            keys = self._end_forgotten(keys, is_write=True)
        if success:
            self._publish(keys)
        else:
            self._abandon(keys)

    def _publish(self, keys: Collection[OffloadKey]) -> None:
        ready: list[OffloadKey] = []
        for key, block in zip(keys, self.get_all(keys)):
            if block is not None and block.pins < 0:
                block.pins = 0
                ready.append(key)
        self.num_in_flight -= len(ready)
        self.num_stored += len(ready)
        if self._events is not None:
            self._events.add(ready, removed=False)
        self.policy.released(ready)

    def _abandon(self, keys: Iterable[OffloadKey]) -> None:
        freed: list[BlockStatus] = []
        for key in keys:
            block = self.get(key)
            if block is not None and block.pins < 0:
                self.policy.remove(key)
                self.num_in_flight -= 1
                freed.append(block)
        freed.reverse()
        self._give_back(freed)

    def _take_slots(self, n: int) -> list[BlockStatus]:
        """Return ``n`` slots: first unused ones in ascending order, then freed ones."""
        first, stop = self._num_used, min(self._num_used + n, self.num_blocks)
        if stop > len(self._slots):
            self._slots += map(BlockStatus, range(len(self._slots), stop))
        blocks = self._slots[first:stop]
        self._num_used = stop
        if rest := n - len(blocks):
            # From the end, because a batch is freed tail first. So it is reused as a run of ascending slots.
            blocks += self._free[: -rest - 1 : -1]
            del self._free[-rest:]
        return blocks

    def _give_back(self, blocks: Collection[BlockStatus]) -> None:
        for block in blocks:
            block.key = None
            block.pins = _IN_FLIGHT
        self._free += blocks

    # ---------------------------------------------------------------------------------------------- whole

    def reset(self) -> None:
        """Forget every block."""
        is_told = self._events is not None or self._lost is not NO_LOSSES
        resident: list[OffloadKey] = []
        idle: list[BlockStatus] = []
        # If no slot is busy and nobody needs the keys, all records become unused without a change, because visiting a
        # million of them takes a tenth of a second.
        for block in self._slots[: self._num_used] if is_told or self.num_busy else ():
            key = block.key
            if key is None or key in self._orphans:
                continue
            if block.pins >= 0:
                resident.append(key)
            if block.pins == 0:
                idle.append(block)
            else:
                self._orphans[key] = block
        self.policy.clear()
        if self.num_busy:
            idle.reverse()
            self._give_back(idle)
        else:
            self._num_used = 0
            self._free.clear()
        if self._events is not None:
            self._events.add(resident, removed=True)
        self._lost.record(resident, Miss.RESET)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call; none without ``enable_events``."""
        return [] if self._events is None else self._events.take()

    def age_s(self, slot: int) -> float:
        """Return the seconds since the block in ``slot`` was reserved."""
        return self._clock() - self._slots[slot].since_s

    def get_stats(self) -> Stats:
        """Return the table's own counts."""
        return {
            ("primary_blocks",): self.num_blocks,
            ("primary_blocks_used",): self.num_blocks - self.num_free,
            ("primary_blocks_pinned",): self.num_busy,
            ("primary_blocks_being_read",): self._num_read,
            ("primary_blocks_being_written",): self.num_in_flight,
            ("primary_blocks_stored",): self.num_stored,
            ("primary_blocks_evicted",): self.num_evicted,
            **self._allocations.stats(),
            **self._eviction_ages.stats(),
            **self.policy.get_stats(),
        }

    def check_invariants(self) -> None:
        """Recompute the table from scratch. Raises ``AssertionError``, which names the difference. For tests:
        O(blocks)."""
        assert self._num_used <= len(self._slots) <= self.num_blocks
        assert [block.block_id for block in self._slots] == list(range(len(self._slots)))
        free = {block.block_id for block in self._free}
        orphans = {block.block_id for block in self._orphans.values()}
        owned = {block.block_id: block for block in self._slots[: self._num_used] if self._is_owner(block)}
        assert len(free) == len(self._free), "a slot is free twice"
        assert len(orphans) == len(self._orphans), "a slot has two old owners"
        assert not any(self.get_all(self._orphans)), "a forgotten block is here again before its transfer has ended"
        assert len(free | orphans | owned.keys()) == len(free) + len(orphans) + len(owned), "a slot has two owners"
        assert len(free) + len(orphans) + len(owned) == self._num_used, "a slot is lost"
        assert len(owned) == len(self.policy), "the policy tracks blocks that own no slot"
        assert all(self._slots[slot].key is None for slot in free)
        busy = [self._slots[slot] for slot in (*owned, *orphans) if self._slots[slot].pins != 0]
        assert all(block.pins >= _IN_FLIGHT for block in busy), "negative pins"
        assert self.num_in_flight == sum(block.pins < 0 for block in busy)
        assert self._num_read == sum(block.pins > 0 for block in busy)
        assert all(block.key == key and block.pins for key, block in self._orphans.items())
        self.policy.check_invariants()

    def _is_owner(self, block: BlockStatus) -> bool:
        return block.key is not None and self.get(block.key) is block


# --------------------------------------------------------------------------------------------- as the connector sees it


@dataclass(slots=True)
class _Search:
    """The answers to one request's questions in one step."""

    req_id: str
    found: set[OffloadKey] = field(default_factory=set)
    missing: set[OffloadKey] = field(default_factory=set)
    is_final: bool = True
    """Whether no answer was ``None``."""

    def is_changed_by(self, reserved: PrepareStoreOutput) -> bool:
        """Return whether a reservation has changed one of the answers."""
        return not (self.found.isdisjoint(reserved.evicted_keys) and self.missing.isdisjoint(reserved.keys_to_store))


class CPUOffloadingManager(OffloadingManager):
    """Decides which blocks the ``num_blocks`` slots of host memory contain.

    ``cache_policy`` is the name of a registered policy (``UnknownNameError`` lists the choices). ``enable_events``
    records the blocks that appear and leave, for ``take_events``. With a ``store_threshold`` of 2 or more, a block is
    stored only after that many requests have asked for it; ``max_tracker_size`` limits the number of counted keys
    (``ReuseFilter``). Raises ``ConfigError`` for numbers that cannot work. ``clock`` returns seconds and never goes
    back. ``lost`` records the blocks that leave or that the filter rejects.

    A block is *in flight* from ``prepare_store`` to ``complete_store``: ``lookup`` returns ``None``, and the block is
    neither loaded nor evicted. Each ``prepare_load`` pins a block until its ``complete_load``. A pinned block is not
    evicted.

    The keys of one ``prepare_store`` are consecutive blocks of a prefix, head first; later blocks are evicted first. If
    a prefix takes several calls, the caller must touch all of it to get this order.

    A block that has been in flight for ``max_wait_s`` is a miss, because the end of its store may never be reported.

    ``reset_cache`` forgets all blocks at once; ``SlotTable`` describes its effect on transfers in flight. The reuse
    filter keeps its counts, because they concern requests, not blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        *,
        max_wait_s: float = DEFAULTS.max_wait_s,
        clock: Callable[[], float] = time.monotonic,
        lost: LostBlocks = NO_LOSSES,
    ) -> None:
        self.lost = lost
        self._max_wait_s = max_wait_s
        self._filter = ReuseFilter.of(store_threshold, max_tracker_size)
        self.slots = SlotTable(num_blocks, POLICIES.get(cache_policy), enable_events, clock, lost)
        """Slots, pins and readiness. The tiers below host memory also use this table."""
        self.num_blocks = num_blocks
        self._max_used = max(2 * num_blocks, _MIN_USED)
        self._used: dict[str, set[OffloadKey]] = {}
        """For each announced request, the keys that it has stored or touched. Its later touches of these keys do not
        count as new uses."""
        self._newest: _Search | None = None
        """The newest search, until an event changes one of its answers. vLLM asks for the head of its queue in each
        step until it has GPU blocks for it."""
        self._refused = self._filtered = 0
        self._reuse_ages = Histogram("primary_reuse_age_seconds")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if vars(cls).keys() & {"lookup", "lookup_prefix", "where"} and "is_unchanged" not in vars(cls):
            cls.is_unchanged = OffloadingManager.is_unchanged  # type: ignore[method-assign]  # its answers differ

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
        if self._newest is not None and self._newest.req_id == req_context.req_id:
            self._newest = None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.lookup_prefix((key,), req_context)[0]

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, ends: Collection[OffloadKey] | None = None
    ) -> list[bool | None]:
        get_all = self.slots.get_all
        answers: list[bool | None] = []
        for first in range(0, len(keys), _RUN):
            blocks = get_all(keys[first : first + _RUN])
            present = blocks if None not in blocks else blocks[: blocks.index(None)]
            answers += [True if block.pins >= 0 else None for block in present]  # type: ignore[union-attr]
            if present is not blocks:
                answers.append(False)
                break
        self._remember(req_context, keys, answers)
        if None in answers:
            self._cut_at_overdue(keys, answers)
        self.count_lookups(keys[: len(answers)], req_context)
        return answers

    def _remember(self, req_context: ReqContext, keys: Sequence[OffloadKey], answers: Sequence[bool | None]) -> None:
        newest = self._newest
        if newest is None or newest.req_id != req_context.req_id:
            newest = self._newest = _Search(req_context.req_id)
        newest.is_final &= None not in answers
        newest.found.update(itertools.compress(keys, answers))
        newest.missing.update([key for key, answer in zip(keys, answers) if answer is False])

    def is_unchanged(self, req_context: ReqContext) -> bool:
        newest = self._newest
        if newest is not None and newest.req_id == req_context.req_id and newest.is_final:
            return True
        self._newest = None  # another search follows
        return False

    def _cut_at_overdue(self, keys: Sequence[OffloadKey], answers: list[bool | None]) -> None:
        """End the answers with ``False`` at the first block whose store has lasted too long."""
        for at, block in enumerate(self.slots.get_all(keys[: len(answers)])):
            if answers[at] is None and block is not None and self.is_overdue(block):
                answers[at:] = [False]
                return

    def is_overdue(self, block: BlockStatus) -> bool:
        """Return whether ``block`` has been in flight for so long that no request waits for it."""
        return block.pins < 0 and self.slots.age_s(block.block_id) >= self._max_wait_s

    def where(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        answers: list[bool | None] = [block is not None for block in self.slots.get_all(keys)]
        self._remember(req_context, keys, answers)
        return answers

    def count_lookups(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count that the request has looked up ``keys``, in host memory or in a lower tier."""
        if self._filter is not None:
            self._filter.looked_up(keys, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Mark a prefix as just used. An announced request uses each block only once: if it has already stored or
        touched a block, the block becomes the most recent again, but policies do not count another use."""
        used, next_use = None, NextUse.UNKNOWN
        if req_context is not None:
            used, next_use = self._used.get(req_context.req_id), req_context.next_use
        if used is None:
            self.slots.touch(keys, next_use=next_use)
            return
        new = [key for key in keys if key not in used]
        self.slots.touch(new, next_use=next_use)
        if len(new) != len(keys):
            self.slots.touch(keys, counts=False, next_use=next_use)
        if new:
            self._record_use(used, new)

    def _record_use(self, used: set[OffloadKey], keys: Collection[OffloadKey]) -> None:
        used.update(keys)
        if len(used) > self._max_used:
            # Without blocks that have left, a long request remembers no more keys than host memory has slots.
            used.intersection_update([key for key in used if self.slots.get(key) is not None])

    # --------------------------------------------------------------------------------------------- loads

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        slots = self.slots.pin(keys)
        if slots:
            self._reuse_ages.observe(self.slots.age_s(slots[0]))
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.slots.unpin(keys)

    # -------------------------------------------------------------------------------------------- stores

    def prepare_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        give_way: Callable[[int], object] | None = None,
    ) -> PrepareStoreOutput | None:
        """Reserve slots as ``OffloadingManager`` says. ``give_way(n)`` is called if ``n`` of the blocks find no room;
        it may unpin other blocks."""
        # Counted even if there is no room, because the request has asked for the blocks.
        wanted = keys if self._filter is None else self._filter.offered(keys, req_context)
        protected: Collection[OffloadKey] = set(keys) if wanted is not keys else _NO_KEYS
        reserved = self.slots.reserve(wanted, protected, req_context.next_use)
        if reserved is None and give_way is not None and (num_lacking := self._num_lacking(wanted, keys)) > 0:
            give_way(num_lacking)
            reserved = self.slots.reserve(wanted, protected, req_context.next_use)
        if reserved is None:
            self._refused += 1
            return None
        if self._newest is not None and self._newest.is_changed_by(reserved):
            self._newest = None
        used = self._used.get(req_context.req_id)
        if used is not None:
            self._record_use(used, reserved.keys_to_store)
        if wanted is not keys and len(wanted) != len(keys):
            absent = [key for key in set(keys).difference(wanted) if self.slots.get(key) is None]
            self._filtered += len(absent)
            self.lost.record(absent, Miss.FILTERED)
        return reserved

    def _num_lacking(self, wanted: Collection[OffloadKey], offered: Collection[OffloadKey]) -> int:
        """Return the number of blocks of ``wanted`` that find no slot if no block of ``offered`` is evicted."""
        slots = self.slots
        if len(wanted) + len(offered) <= slots.num_free + slots.num_idle:
            return 0
        here = [block for block in slots.get_all({*offered}) if block is not None]
        num_missing = slots.get_all({*wanted}).count(None)
        return num_missing - slots.num_free - slots.num_idle + sum(not block.pins for block in here)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        self.slots.end_write(keys, success)

    # --------------------------------------------------------------------------------------------- whole

    def reset_cache(self) -> None:
        self._newest = None
        self.slots.reset()

    def take_events(self) -> list[OffloadingEvent]:
        return self.slots.take_events()

    def get_stats(self) -> Stats:
        return {
            **self.slots.get_stats(),
            ("primary_stores_refused",): self._refused,
            ("reuse_filtered_blocks",): self._filtered,
            **self._reuse_ages.stats(),
        }

    def explain(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[Loss | None]:
        losses = super().explain(keys, req_context)
        return [None if block is not None else loss for block, loss in zip(self.slots.get_all(keys), losses)]

    def check_invariants(self) -> None:
        """Recompute everything from scratch. Raises ``AssertionError``, which names the difference. For tests:
        O(blocks)."""
        self.slots.check_invariants()
        assert all(len(used) <= self._max_used for used in self._used.values())
        if self._filter is not None:
            self._filter.check_invariants()


# ------------------------------------------------------------------------------------------------ as lower tiers see it


class KVMemory(Protocol):
    """The interface of the memory behind the slots. ``kvoffload.cpu.region.SharedOffloadRegion`` implements it."""

    def create_kv_memoryview(self) -> memoryview:
        """Return a writable view of all slots, of shape (num_blocks, block_bytes) and format ``B``."""


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """A ``CPUOffloadingManager`` with the memory of its slots, and with methods for transfers to and from lower tiers.

    *Load* and *store* move blocks between GPU and host memory; *read* and *write* move them between host memory and the
    tiers below. ``prepare_read`` pins blocks that a tier will read (a cascade), and ``prepare_write`` reserves slots
    that a tier will fill (a promotion). No client causes these calls directly, so the reuse filter neither counts nor
    stops them, and reading for a cascade does not count as a use.

    The constructor asks ``mmap_region`` for its view once. The other parameters are those of ``CPUOffloadingManager``.
    """

    def __init__(
        self,
        num_blocks: int,
        mmap_region: KVMemory,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        *,
        max_wait_s: float = DEFAULTS.max_wait_s,
        clock: Callable[[], float] = time.monotonic,
        lost: LostBlocks = NO_LOSSES,
    ) -> None:
        super().__init__(
            num_blocks,
            cache_policy,
            enable_events,
            store_threshold,
            max_tracker_size,
            max_wait_s=max_wait_s,
            clock=clock,
            lost=lost,
        )
        self._kv_view = mmap_region.create_kv_memoryview()

    @property
    def kv_view(self) -> memoryview:
        """The memory of all slots, of shape (num_blocks, block_bytes). Valid until ``shutdown``."""
        return self._kv_view

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Pin ready blocks for a transfer to a lower tier."""
        return CPULoadStoreSpec(self.slots.pin(keys))

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Release the pins of one ``prepare_read``."""
        self.slots.unpin(keys)

    def prepare_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext, protected: Collection[OffloadKey] = _NO_KEYS
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the absent ``keys``. Returns ``None`` and changes nothing if that would evict a
        ``protected`` block."""
        return self.slots.reserve(keys, protected, req_context.next_use)

    def complete_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        """Publish the blocks that a transfer from a lower tier has written, or free their slots if not ``success``."""
        self.slots.end_write(keys, success)

    def shutdown(self) -> None:
        super().shutdown()
        try:
            self._kv_view.release()
        except BufferError:
            pass  # a tier's thread hangs in I/O on it, so the memory stays mapped while that thread lives
