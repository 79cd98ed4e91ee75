# SPDX-License-Identifier: Apache-2.0
"""Run two nodes in one process, each with its own region, agent and stores, and a thread that makes steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvoffload.base import OffloadKey
from kvoffload.tiering.nodes import AgentTier, NodeAgent, Nodes, NodesStore, NodesTier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.wrappers import StoreWrapper
from kvoffload.tiering.tier import TierLimits

LIMITS = TierLimits(threads=2, drain_timeout_s=5.0)


def memory(num_slots: int, slot_bytes: int) -> memoryview:
    return memoryview(bytearray(num_slots * slot_bytes)).cast("B", (num_slots, slot_bytes))


class TwoNodes:
    """``nodes`` and an agent for each of ``stores``. ``views[0]`` is the scheduler's region as well."""

    def __init__(self, stores: Sequence[BlockStore], views: Sequence[memoryview]) -> None:
        self.views = views
        self.nodes = Nodes(len(stores))
        self.agents = [
            NodeAgent(node, view, [AgentTier("mem", store, LIMITS)])
            for node, (store, view) in enumerate(zip(stores, views, strict=True))
        ]
        self.frozen: set[int] = set()
        """Nodes that packets neither reach nor leave."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            self.step()
            time.sleep(0.0003)

    def step(self) -> None:
        packets = self.nodes.take_packets()
        for node, agent in enumerate(self.agents):
            if node not in self.frozen:
                agent.receive(packets)
                self.nodes.receive(agent.take_packets())

    def close(self) -> None:
        self.nodes.close()
        self._ends.set()
        self._thread.join()
        for agent in self.agents:
            agent.shutdown()


class WholeStore(StoreWrapper):
    """Blocks of any buffer in a store of ``TwoNodes``: half of each on either node, by way of free slots."""

    def __init__(self, stores: Sequence[BlockStore], block_bytes: int, num_slots: int = 128) -> None:
        self.two = TwoNodes(stores, [memory(num_slots, block_bytes // 2) for _ in range(2)])
        super().__init__(NodesStore(self.two.nodes, 0, self.two.views[0]))
        self._half = block_bytes // 2
        self._free = list(range(num_slots))
        self._change = threading.Condition()

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        slots = self._take(len(keys))
        for slot, block in zip(slots, blocks, strict=True):
            for node, view in enumerate(self.two.views):
                view.cast("B")[slot * self._half :][: self._half] = block[node * self._half :][: self._half]
        try:
            return self.inner.write(keys, [self._slot(slot) for slot in slots])
        finally:
            self._give(slots)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        slots = self._take(len(keys))
        try:
            outcomes = self.inner.read_into(keys, [self._slot(slot) for slot in slots])
            for slot, block in zip(slots, blocks, strict=True):
                for node, view in enumerate(self.two.views):
                    block[node * self._half :][: self._half] = view.cast("B")[slot * self._half :][: self._half]
            return outcomes
        finally:
            self._give(slots)

    def close(self) -> None:
        self.two.close()

    def _slot(self, slot: int) -> memoryview:
        return self.two.views[0].cast("B")[slot * self._half : (slot + 1) * self._half]

    def _take(self, count: int) -> list[int]:
        with self._change:
            self._change.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def _give(self, slots: Sequence[int]) -> None:
        with self._change:
            self._free += slots
            self._change.notify_all()


class SteppedTier(NodesTier):
    """A tier over ``stores``, with its own nodes."""

    def __init__(self, view: memoryview, stores: Sequence[BlockStore], **options: object) -> None:
        num_slots, slot_bytes = view.shape or (0, 0)
        self.two = TwoNodes(stores, [view, *(memory(num_slots, slot_bytes) for _ in stores[1:])])
        super().__init__(view, "mem", self.two.nodes, 0, LIMITS, **options)

    def shutdown(self) -> None:
        super().shutdown()
        self.two.close()
