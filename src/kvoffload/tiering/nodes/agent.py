# SPDX-License-Identifier: Apache-2.0
"""A node's agent, which executes orders on the stores of its node, with its own threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError, errno_of, text_of
from kvoffload.logs import RateLimitedLog
from kvoffload.tiering.nodes.link import AgentLink
from kvoffload.tiering.nodes.messages import Act, Answer, News, Order, Packet
from kvoffload.tiering.nodes.stream import MAX_PACKET_SIZE
from kvoffload.tiering.runner import IoQueue, IoResult, IoStatus, IoTask, TierRunner
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.tier import TierLimits, close_store
from kvoffload.tiering.transfers import slice_blocks

_log = logging.getLogger(__name__)

_SCAN_KEYS = 1024
_KEYS_PER_CALL = 256
_NEWS_S = 1.0
_LOST_AT_ONCE = MAX_PACKET_SIZE - 1
"""The number of losses that fit into a packet. A disk that fails while an engine is idle loses all its blocks before
the next step."""
_QUEUES = {Act.CONTAINS: IoQueue.LOOKUP, Act.READ: IoQueue.LOAD, Act.WRITE: IoQueue.STORE, Act.DISCARD: IoQueue.LOOKUP}


@dataclass(slots=True)
class AgentTier:
    """One tier of a node. The agent owns ``store`` from here on."""

    label: str
    store: BlockStore
    limits: TierLimits = field(default_factory=TierLimits)


class NodeAgent:
    """The agent of node ``node`` over ``view``, the node's region of shape (num_blocks, block_bytes).

    Every method runs on the thread of the node's first worker and returns at once (except ``shutdown``). In each step,
    the agent receives packets from the scheduler and sends packets back, even if there is no I/O. Orders run on the
    threads of one ``TierRunner`` per tier, with the tier's limits. A hanging call is answered when it returns.

    Only one process at a time may be a node's agent. Before another one is started, the previous process must have
    ended, because it may read and write slots until then, whatever state the scheduler assumes.
    """

    def __init__(
        self,
        node: int,
        view: memoryview,
        tiers: Sequence[AgentTier],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = AgentLink(node)
        self._slots: npt.NDArray[np.uint8] | None = np.asarray(view)
        self._tiers = [_Tier(index, tier, clock) for index, tier in enumerate(tiers)]
        self._clock = clock
        self._answers: list[Answer] = []
        """The answers to orders that have ended, until the next packet."""
        self._news_due_s = 0.0
        self._log = RateLimitedLog(_log, clock=clock)

    def __repr__(self) -> str:
        return f"NodeAgent({self._link!r})"

    def receive(self, packets: Iterable[Packet]) -> None:
        """Start the orders in ``packets``. Ignores packets for other agents."""
        session = self._link.session
        orders = self._link.receive(packets, self._is_idle)
        if self._link.session != session:
            self._answers.clear()
        for order in orders:
            try:
                tier, rows = self._tiers[order.tier], self._slots
                if rows is None or (order.slots and not 0 <= min(order.slots) <= max(order.slots) < len(rows)):
                    raise ValueError("the node has no such slots")
                tier.begin(order, rows, self._answers.append)
            except Exception as exc:  # noqa: BLE001 - an order that cannot start has failed
                self._answers.append(Answer(order.number, error=text_of(exc)))

    def take_packets(self) -> tuple[Packet, ...]:
        """Return the packets for the scheduler with this step."""
        for tier in self._tiers:
            tier.take_results()
        if self._link.has_room:
            # News must precede answers, so that the receiver of a failed read already knows of the corrupt block.
            self._put_news()
        for answer in self._answers:
            self._link.put(answer)
        self._answers.clear()
        return tuple(self._link.take_packets())

    def shutdown(self) -> None:
        """Wait for queued and running calls, and abandon them after the tiers' ``drain_timeout_s``. Idempotent."""
        self._slots = None
        tiers, self._tiers = self._tiers, []
        for tier in tiers:
            tier.shutdown()

    def _put_news(self) -> None:
        is_due = self._clock() >= self._news_due_s
        for tier in self._tiers:
            try:
                lost = tier.store.take_lost()
                if lost or is_due:
                    stats, left = tier.store.stats(), iter(lost.items())
                    self._link.put(News(tier.index, stats, dict(islice(left, _LOST_AT_ONCE))))
                    while some := dict(islice(left, _LOST_AT_ONCE)):
                        self._link.put(News(tier.index, stats, some))
            except Exception:  # noqa: BLE001 - a store is foreign code, and this is an engine's step
                self._log.exception(f"{tier.store!r} cannot report its losses and statistics")
        if is_due:
            self._news_due_s = self._clock() + _NEWS_S

    def _is_idle(self) -> bool:
        for tier in self._tiers:
            tier.take_results()
        return not any(tier.is_busy for tier in self._tiers)


class _Tier:
    """One tier's store, its threads and its open orders."""

    def __init__(self, index: int, tier: AgentTier, clock: Callable[[], float]) -> None:
        self.index = index
        self.store = tier.store
        self._label = tier.label
        self._drain_timeout_s = tier.limits.drain_timeout_s
        threads = tier.limits.threads or tier.store.requests_in_flight
        self._runner = TierRunner(f"{tier.label}-agent", threads, timeout_s=tier.limits.timeout_s, clock=clock)
        self._scan: Iterator[OffloadKey] | None = None

    @property
    def is_busy(self) -> bool:
        return self._runner.num_open_slices > 0

    def take_results(self) -> None:
        for result in self._runner.take_results():
            if result.status is not IoStatus.OVERDUE:  # the call's end follows, or the order never ends
                result.task.on_result(result)

    def begin(self, order: Order, rows: npt.NDArray[np.uint8], put: Callable[[Answer], None]) -> None:
        """Start ``order``. Its answer is passed to ``put`` when its results are taken."""
        keys = order.keys
        if order.act in (Act.SCAN, Act.SCAN_ANEW):
            found: list[OffloadKey] = []
            self._submit(order, IoQueue.UPKEEP, 1, 1, lambda start, stop: self._scan_on(order.act, found), put, found)
        elif order.act is Act.TOUCH:
            self._submit(order, IoQueue.UPKEEP, 1, 1, lambda start, stop: self._touch(keys), put)
        elif not keys:
            put(Answer(order.number))
        else:
            size = slice_blocks(self.store, rows.shape[1]) if order.slots else _KEYS_PER_CALL
            size = min(size, -(-len(keys) // self._runner.num_threads))
            call = self._call_of(order, rows)
            self._submit(order, _QUEUES[order.act], len(keys), max(size, 1), call, put)

    def shutdown(self) -> None:
        self._runner.drain(self._drain_timeout_s)
        if self._runner.shutdown(self._drain_timeout_s) or not close_store(
            self.store, self._label, self._drain_timeout_s
        ):
            _log.warning("Tier %r: calls of its store hang on this node and are abandoned.", self._label)

    def _call_of(self, order: Order, rows: npt.NDArray[np.uint8]) -> Callable[[int, int], list[bool]]:
        store, keys, slots = self.store, order.keys, order.slots

        def discard(start: int, stop: int) -> list[bool]:
            store.discard(keys[start:stop])
            return [True] * (stop - start)

        def blocks(start: int, stop: int) -> list[memoryview]:
            if not slots:
                return [memoryview(bytearray(rows.shape[1])) for _ in range(start, stop)]
            return [memoryview(rows[slot]) for slot in slots[start:stop]]

        match order.act:
            case Act.CONTAINS:
                return lambda start, stop: store.contains(keys[start:stop])
            case Act.READ:
                return lambda start, stop: store.read_into(keys[start:stop], blocks(start, stop))
            case Act.WRITE:
                return lambda start, stop: store.write(keys[start:stop], blocks(start, stop))
            case _:
                return discard

    def _scan_on(self, act: Act, found: list[OffloadKey]) -> list[bool]:
        if act is Act.SCAN_ANEW:
            self._scan = chain.from_iterable(self.store.scan())
        if self._scan is None:  # an answer without keys would mean that the scan is complete
            raise StoreError("another process started the scan")
        found += islice(self._scan, _SCAN_KEYS)
        return [True]

    def _touch(self, keys: Sequence[OffloadKey]) -> list[bool]:
        self.store.touch(keys)
        return [True]

    def _submit(
        self,
        order: Order,
        queue: IoQueue,
        num_items: int,
        slice_items: int,
        work: Callable[[int, int], list[bool]],
        put: Callable[[Answer], None],
        found: list[OffloadKey] | None = None,
    ) -> None:
        outcomes = [False] * num_items
        failures: list[BaseException] = []

        def on_result(result: IoResult) -> None:
            outcomes[result.start : result.stop] = result.outcomes
            if result.status is not IoStatus.DONE:
                failures.append(result.error or StoreError("the call was queued for too long"))
            if not result.is_last or not order.number:
                return
            if failures:
                put(Answer(order.number, error=text_of(failures[0]), errno=errno_of(failures[0])))
            else:
                put(Answer(order.number, outcomes[: len(order.keys)], found or ()))

        self._runner.submit(IoTask(queue, num_items, work, order.keys, on_result), slice_items)
