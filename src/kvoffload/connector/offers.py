# SPDX-License-Identifier: Apache-2.0
"""Decide which blocks of a request to offer for store, when, and in which portions. Scheduler thread only.

``plan_offer`` and ``select_source`` are pure. ``StoreOffers`` offers the blocks to the manager, and creates store jobs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.base import (
    BlockIDsLoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
)
from kvoffload.config import GroupKind
from kvoffload.connector.engine import ScheduledRequest
from kvoffload.connector.epochs import Epochs
from kvoffload.connector.groups import GroupGeometry, by_position, finest_of, hit_unit_tokens
from kvoffload.connector.jobs import JobTable
from kvoffload.connector.messages import TransferJob
from kvoffload.connector.requests import UNLIMITED, Keys, Request

logger = logging.getLogger(__name__)


_SINGLE_STATE = GroupKind.SINGLE_STATE
_BLOCK_LEVEL = OffloadPolicy.BLOCK_LEVEL
_STORE = Direction.STORE
_REQUESTS_PER_BLOCK = 8
"""While n requests run, each gathers n divided by this many blocks: two blocks if 16 run, eight if 64 run."""
_MOST_GATHERED_TOKENS = 128
"""The most tokens that a request gathers, because a preemption loses them."""


class Offer(NamedTuple):
    """A portion of a request's blocks."""

    keys: list[OffloadKey]
    """The keys of blocks whose bytes are on the GPU and that a hit can need, by position across groups."""
    grouped: list[OffloadKey]
    """The same keys, group by group, each from head to tail. A transfer moves blocks in this order."""
    blocks: list[int]
    """The indices of ``grouped`` in the request."""
    source: Source
    """The GPU blocks to copy from: ``factor`` for each block."""
    next_blocks: list[int]
    """``Keys.next_block`` of each group after this offer is accepted. Blocks that left the GPU, or that no hit can
    need, are skipped for good."""
    largest: int
    """Number of blocks of the group with most blocks, including skipped ones; at least 1."""
    is_last: bool
    """Whether no blocks remain to be offered after this portion."""


class Source(NamedTuple):
    """The arguments of a ``GPULoadStoreSpec``."""

    gpu_block_ids: list[int]
    group_sizes: list[int]
    block_indices: list[int]


def plan_offer(
    groups: Sequence[Keys], unit_tokens: int, computed_tokens: int, limit_tokens: int, max_blocks: int
) -> Offer | None:
    """Return the next blocks to offer, at most ``max_blocks`` of each group, or ``None`` if no group has any.

    A block can be offered if its tokens are computed by the end of this step (``limit_tokens``), and if its key and its
    GPU blocks are known. ``computed_tokens`` is the number of tokens computed before this step. Blocks that no hit can
    need are skipped; hits end at multiples of ``unit_tokens`` (``hit_unit_tokens``).

    A state is offered together with the full blocks of the other groups before its end, or after them, because it is
    useless without them. A portion contains at most one state of a group, because the slots of a job are filled at
    consecutive positions.
    """
    next_blocks: list[int] = []
    largest = 0
    is_last = True
    offered_tokens = limit_tokens
    for own in groups:
        group, stop = own.group, own.next_block
        if group.kind is not _SINGLE_STATE:
            ready = min(limit_tokens // group.block_tokens, len(own.keys), len(own.gpu_block_ids) // group.factor)
            if ready > stop:
                stop = min(ready, stop + max_blocks)
                largest = max(largest, stop - own.next_block)
                if stop < ready:
                    is_last = False
                    offered_tokens = min(offered_tokens, stop * group.block_tokens)
        next_blocks.append(stop)
    grouped: list[OffloadKey] = []
    blocks: list[Sequence[int]] = []
    source = Source([], [], [])
    for own, stop in zip(groups, next_blocks):
        group = own.group
        found: Sequence[int] = ()
        ids: Sequence[int] = ()
        if group.kind is not _SINGLE_STATE:
            found, ids = group.blocks_to_store(
                range(own.next_block, stop), own.gpu_block_ids, computed_tokens, unit_tokens
            )
        elif own.states:
            states = _states_to_offer(own, offered_tokens // group.block_tokens, unit_tokens)
            largest = max(largest, len(states[:1]))
            is_last &= len(states) <= 1
            found = states[:1]
            ids = [own.states[block] for block in found]
        grouped += map(own.keys.__getitem__, found)
        blocks.append(found)
        source.gpu_block_ids.extend(ids)
        source.group_sizes.append(len(ids))
        source.block_indices.append(found[0] * group.factor if found else 0)
    if not largest:
        return None
    keys = by_position([own.group for own in groups], blocks, grouped)
    return Offer(keys, grouped, [*itertools.chain(*blocks)], source, next_blocks, largest, is_last)


def _states_to_offer(own: Keys, stop: int, unit_tokens: int) -> list[int]:
    """Return the blocks of the group before ``stop`` that end at a state which the engine named. It excludes blocks of
    a hit, which are already stored."""
    return [
        block
        for block in sorted(own.states)
        if own.next_block <= block < min(stop, len(own.keys)) and own.group.is_reachable(block, unit_tokens)
    ]


def select_source(
    geometry: Sequence[GroupGeometry], offer: Offer, keys_to_store: Sequence[OffloadKey]
) -> tuple[Source, list[int]] | None:
    """Return the GPU blocks of ``keys_to_store``, group after group, and the index in ``keys_to_store`` of each block.

    Return ``None`` if one of the keys was not offered or occurs twice.
    """
    source = Source([], [], [])
    order: list[int] = []
    wanted = {key: at for at, key in enumerate(keys_to_store)}
    first = first_id = 0
    for group, size in zip(geometry, offer.source.group_sizes):
        begin = len(source.gpu_block_ids)
        index = 0
        for at in range(first, first + size // group.factor):
            if (position := wanted.get(offer.grouped[at])) is not None:
                order.append(position)
                if len(source.gpu_block_ids) == begin:
                    index = offer.blocks[at] * group.factor
                own_id = first_id + (at - first) * group.factor
                source.gpu_block_ids.extend(offer.source.gpu_block_ids[own_id : own_id + group.factor])
        source.group_sizes.append(len(source.gpu_block_ids) - begin)
        source.block_indices.append(index)
        first += size // group.factor
        first_id += size
    return (source, order) if len(order) == len(keys_to_store) else None


class Turnover:
    """Counts the blocks that all requests store, and decides when a running request must touch its prefix again.

    A request touches its prefix at admission and at its end. In between, new blocks are more recent than its head. So a
    long request would lose the head, which every later hit needs.

    A request is due if it stores, and half of the cache has been stored since its last touch, because its head is then
    halfway to eviction. Touching earlier would protect blocks that are also on the GPU, and evict idle prefixes that
    have no other copy. In a cache smaller than ``FEW_BLOCKS``, a request is due at each store, because another prompt
    may store half of the cache at once.

    Requests that are due in the same step take turns: each stored block permits ``KEYS_PER_STORED`` touched keys, and
    at most ``MOST_KEYS`` may be permitted in advance.
    """

    FEW_BLOCKS = 64
    """Roughly the number of blocks of two prompts."""
    KEYS_PER_STORED = 8
    """Enough for a turn of every request, if running requests have at most four times as many blocks as the cache."""
    MOST_KEYS = 2048
    """About a millisecond of the scheduler's thread."""

    def __init__(self, num_blocks: int) -> None:
        """Create the counter for ``num_blocks`` slots of host memory."""
        self._period = num_blocks // 2 if num_blocks >= self.FEW_BLOCKS else 1
        self._stored = 0
        self._paid_keys = self.MOST_KEYS

    def __repr__(self) -> str:
        return f"Turnover({self._stored} blocks stored, a touch every {self._period})"

    def count(self, num_blocks: int) -> None:
        """Count ``num_blocks`` blocks that were accepted for store."""
        self._stored += num_blocks
        self._paid_keys = min(self.MOST_KEYS, self._paid_keys + num_blocks * self.KEYS_PER_STORED)

    def is_due(self, request: Request) -> bool:
        """Return whether a request that has just stored must touch its prefix."""
        return self._stored - request.touched_at >= self._period and self._paid_keys > 0

    def touched(self, request: Request, num_keys: int = 0) -> None:
        """Record a touch of the request's prefix, at its admission or with ``num_keys`` keys because it was due."""
        request.touched_at = self._stored
        self._paid_keys -= num_keys


class StoreOffers:
    """Offers the full blocks of requests to the manager, and decides when a request can next have blocks to offer.

    A block is offered in the step that fills it (``offer``). But while 16 or more requests run, each gathers blocks of
    its generated tokens and offers several at once, because a store costs the scheduler's thread much more than another
    block in it. So the number of stores in a step hardly grows with the number of requests. Models with windows gather
    nothing, since blocks leave the window. A state that the engine names is offered at once, with all blocks before it.

    A rejected block is offered again in later steps (``retry``). When the request ends, all blocks that are not stored
    yet, perhaps because their keys were unknown, are offered once more (``offer_rest``).
    """

    def __init__(
        self,
        manager: OffloadingManager,
        geometry: tuple[GroupGeometry, ...],
        jobs: JobTable,
        epochs: Epochs,
        prompt_only: bool,
        num_slots: int,
    ) -> None:
        self._manager = manager
        self._jobs = jobs
        self._epochs = epochs
        self._turnover = Turnover(num_slots)
        self._prompt_only = prompt_only
        self._geometry = geometry
        self._unit_tokens = hit_unit_tokens(geometry)
        self._least_tokens = finest_of(geometry).block_tokens
        attention = [group for group in geometry if group.kind is not _SINGLE_STATE]
        self._most_gathered = 1
        if attention and all(group.window_tokens is None for group in attention):
            self._most_gathered = max(_MOST_GATHERED_TOKENS // finest_of(attention).block_tokens, 1)
        self.refused: dict[Request, None] = {}
        """Requests whose blocks found no room, in the order of their last rejections. Other code only reads it."""
        self._refused_in_step = False
        self.newest_step: Sequence[ScheduledRequest] = ()
        """The requests that the newest step computes. The code that builds the step sets it."""

    def __repr__(self) -> str:
        return f"StoreOffers({len(self.refused)} requests refused)"

    def offer(self, request: Request) -> list[TransferJob]:
        """Offer the blocks that are full at the end of this step, which computes ``request.last_scheduled``.

        Returns the stores, which start at the end of the step. It also decides when the request can next have blocks to
        offer.
        """
        last = request.last_scheduled
        assert last is not None
        # Drafts may follow the known tokens.
        limit = min(last.done_tokens, request.of_engine.num_tokens)
        if limit < request.next_offer_tokens:  # an asynchronous step, whose last token is not known yet
            return []
        stores = self._offer(request, limit, last.num_computed_tokens)
        if request in self.refused:
            self._refused_in_step = True
        return stores

    def offer_rest(self, request: Request) -> list[TransferJob]:
        """Offer all blocks that earlier steps filled and that were not accepted yet, and return the stores. The list is
        empty if the request has no such blocks on the GPU."""
        last = request.last_scheduled
        if last is None:
            return []
        # In a later step, the engine may have tried to schedule the request without success, but freed the blocks that
        # left the window.
        is_newest = last in self.newest_step
        return self._offer(request, request.ready_tokens, last.num_computed_tokens if is_newest else last.done_tokens)

    def retry(self) -> list[TransferJob]:
        """Offer rejected blocks again, once at the end of each step, oldest rejection first, until an offer is rejected
        again.

        So a full cache costs one call of one block per step, and no request can block the others.
        """
        stores: list[TransferJob] = []
        refused, self._refused_in_step = self._refused_in_step, False
        while self.refused and not refused:
            request = next(iter(self.refused))
            del self.refused[request]
            stores += self.offer_rest(request)
            refused = request in self.refused
        return stores

    def admit(self, request: Request, hit_tokens: int) -> None:
        """Start to offer blocks of a request, which has received GPU blocks and has touched its prefix of
        ``hit_tokens``."""
        self.forget(request)
        self._turnover.touched(request)
        request.begin_offers(hit_tokens)

    def forget(self, request: Request) -> None:
        """Drop a request from the queue, because it ended or lost the GPU blocks that it computed."""
        self.refused.pop(request, None)

    def _offer(self, request: Request, limit: int, computed_tokens: int) -> list[TransferJob]:
        """Offer the blocks before token ``limit``, except blocks that the engine frees when ``computed_tokens`` have
        been computed."""
        request.offered_tokens = limit
        most = self.max_tokens(request)
        limit = min(limit, most)
        request.extend_keys()
        stores: list[TransferJob] = []
        self.refused.pop(request, None)
        if not self._offer_portions(request, computed_tokens, limit, stores):
            self.refused[request] = None
            # A new block does not wait for its turn among the rejected ones.
            assert request.last_scheduled is not None
            least = self._least_tokens
            request.next_offer_tokens = (request.last_scheduled.done_tokens // least + 1) * least
        elif not request.max_blocks or limit == most:
            request.next_offer_tokens = UNLIMITED
        elif limit < request.num_prompt_tokens:
            request.wait_for_blocks(1)
        else:
            wanted = len(self.newest_step) // _REQUESTS_PER_BLOCK
            request.wait_for_blocks(max(min(wanted, self._most_gathered), 1))
        if stores and self._turnover.is_due(request):
            keys = request.keys_in_use()
            self._manager.touch(keys, request.context)
            self._turnover.touched(request, len(keys))
        return stores

    def max_tokens(self, request: Request) -> int:
        """Return the number of tokens of the request, from the first one on, that may be stored."""
        if self._epochs.is_over(request.epoch):
            return 0
        most = request.of_engine.num_prompt_tokens if self._prompt_only else UNLIMITED
        limit = request.limits().max_offload_tokens
        return most if limit is None else min(most, limit)

    def _offer_portions(
        self, request: Request, computed_tokens: int, limit_tokens: int, stores: list[TransferJob]
    ) -> bool:
        """Offer the blocks, head first, in portions that find room. Returns ``False`` if there was no room for the
        rest.

        ``prepare_store`` takes a whole portion or nothing, and the head is worth more than the tail. So a rejected
        portion is cut to a quarter and offered again, and after an accepted one, the next may be four times larger. If
        host memory is nearly full, a long prompt needs logarithmically many calls, and each later call offers one
        block.
        """
        accepted = False
        while request.max_blocks:
            offer = plan_offer(request.groups, self._unit_tokens, computed_tokens, limit_tokens, request.max_blocks)
            if offer is None:
                break
            output = self._manager.prepare_store(offer.keys, request.context) if offer.keys else None
            if offer.keys and output is None:
                request.max_blocks = max(1, offer.largest // 4)
                # The available room is used up. The rest is offered again in a later step.
                if accepted or offer.largest == 1:
                    return False
                continue
            accepted = True
            for own, next_block, size, first in zip(request.groups, offer.next_blocks, *offer.source[1:]):
                own.next_block = next_block
                if size and own.states:
                    own.states.pop(first, None)
            request.max_blocks = min(UNLIMITED, request.max_blocks * 4)
            if output is not None and output.keys_to_store:
                self._begin_store(request, offer, output, stores)
                evicted = output.evicted_keys
                if evicted and request.policy is _BLOCK_LEVEL and any(own.owns_any(evicted) for own in request.groups):
                    # It is larger than the cache. Its tail is useless without the evicted head.
                    request.max_blocks = 0
            if offer.is_last:
                break
        return True

    def _begin_store(
        self, request: Request, offer: Offer, output: PrepareStoreOutput, stores: list[TransferJob]
    ) -> None:
        keys, source = output.keys_to_store, offer.source
        destination: LoadStoreSpec | None = output.store_spec
        if keys != offer.grouped:
            selected = select_source(self._geometry, offer, keys)
            destination = None
            if selected is not None:
                source, destination = selected[0], _in_order(output.store_spec, selected[1])
        if destination is None:
            logger.error(
                "A manager prepared blocks that were not offered, or not one slot for each; they are not stored."
            )
            self._manager.complete_store(keys, request.context, success=False)
            return
        if not request.context.reads_cache:
            request.stored.update(keys)
        self._turnover.count(len(keys))
        job = self._jobs.begin(_STORE, request, keys, source.gpu_block_ids)
        stores.append(TransferJob(job.job_id, request.context.req_id, GPULoadStoreSpec(*source), destination))


def _in_order(spec: LoadStoreSpec, order: list[int]) -> LoadStoreSpec | None:
    """Return ``spec`` with its blocks in this order, which names each of them once. Returns ``None`` if the manager's
    spec cannot be reordered or lists a different number of blocks."""
    if order == [*range(len(order))]:
        return spec
    return spec.in_order(order) if isinstance(spec, BlockIDsLoadStoreSpec) else None
