# SPDX-License-Identifier: Apache-2.0
"""A store whose calls are executed by the agents of several nodes, each of them on its part of the block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.lost_blocks import Loss, LostBlocks
from kvoffload.miss import Miss
from kvoffload.tiering.nodes.messages import Act
from kvoffload.tiering.nodes.nodes import Nodes, Pending
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats

_SCAN_NODE = 0
_MAX_REMEMBERED = 4096


class NodesStore(BlockStore):
    """Tier ``tier`` of ``nodes``.

    The store contains a block if every node has its part, and a call has ended when it has ended on every node.

    ``view`` is this node's region, of shape (num_blocks, block_bytes). The blocks of a call are slots of this region.
    The store sends the slot numbers to the nodes, and each node keeps its part of a block in the same slot of its own
    region. An I/O thread waits in each call, for at least two steps of the engine and without using CPU time. So the
    store uses many threads and large batches, which the agents cut for their own threads.
    """

    batch_blocks = 1024
    requests_in_flight = 16

    def __init__(self, nodes: Nodes, tier: int, view: memoryview) -> None:
        assert view.shape is not None
        self._nodes = nodes
        self._tier = tier
        self._num_slots, self._slot_bytes = view.shape
        self._view = view  # while this is alive, no other memory has its addresses
        self._first_address = _address(view.cast("B"))
        self._bad_nodes: dict[OffloadKey, int] = {}
        """The node that lost each of the most recently lost blocks."""

    def __repr__(self) -> str:
        return f"NodesStore(tier={self._tier}, {self._nodes!r})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._call(Act.CONTAINS, keys).outcomes if keys else []

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return self._call(Act.WRITE, keys, self._slots_of(blocks)).outcomes if keys else []

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        if not keys:
            return []
        if len(keys) == 1 and self._slot_of(blocks[0]) is None:  # memory of a probe, which is not in the nodes' regions
            self._call(Act.READ, keys)
            return [False]
        pending = self._call(Act.READ, keys, self._slots_of(blocks))
        for index, node in pending.bad_nodes.items():
            self._remember(keys[index], node)
        return pending.outcomes

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            self._call(Act.DISCARD, keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._nodes.tell(self._tier, Act.TOUCH, keys)

    def close(self) -> None:
        """Do nothing, because the agents close their stores."""

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        """Yield the keys of one node that all other nodes have as well, in batches."""
        act = Act.SCAN_ANEW
        others = [node for node in range(len(self._nodes)) if node != _SCAN_NODE]
        while keys := self._call(act, (), among=[_SCAN_NODE]).keys:
            are_there = self._call(Act.CONTAINS, keys, among=others).outcomes
            yield [key for key, is_there in zip(keys, are_there, strict=True) if is_there]
            act = Act.SCAN

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        lost = self._nodes.take_lost(self._tier)
        for key, (_, node) in lost.items():
            self._remember(key, node)
        return {key: cause for key, (cause, _) in lost.items()}

    def stats(self) -> StoreStats:
        """Return the statistics of all nodes together. The bytes are unknown until every node has reported them."""
        each = self._nodes.stats(self._tier)
        silent = [StoreStats()] * (len(self._nodes) - len(each))
        return StoreStats.of_all([*each, *silent])

    def bad_node(self, key: OffloadKey) -> int | None:
        """Return the node that lost ``key``, or ``None`` if the key was not lost recently."""
        return self._bad_nodes.get(key)

    def _remember(self, key: OffloadKey, node: int) -> None:
        if len(self._bad_nodes) >= _MAX_REMEMBERED:
            self._bad_nodes = {}
        self._bad_nodes[key] = node

    def _call(
        self, act: Act, keys: Sequence[OffloadKey], slots: Sequence[int] = (), among: Iterable[int] | None = None
    ) -> Pending:
        pending = self._nodes.order(self._tier, act, keys, slots, among=among)
        pending.ended.wait()
        if pending.errors:
            cause = OSError(pending.errno, pending.errors[0]) if pending.errno is not None else None
            raise StoreError("; ".join(pending.errors)) from cause
        return pending

    def _slots_of(self, blocks: Sequence[memoryview]) -> list[int]:
        slots = [slot for block in blocks if (slot := self._slot_of(block)) is not None]
        if len(slots) < len(blocks):
            raise StoreError("A block is not a slot of the region, so no other node has its part.")
        return slots

    def _slot_of(self, block: memoryview) -> int | None:
        slot, rest = divmod(_address(block) - self._first_address, self._slot_bytes)
        return slot if not rest and 0 <= slot < self._num_slots and block.nbytes == self._slot_bytes else None


class NodesLosses(LostBlocks):
    """Records losses of ``store`` in ``lost``, with the node that lost the block. One thread."""

    def __init__(self, lost: LostBlocks, store: NodesStore) -> None:
        super().__init__(max_blocks=0)
        self._all = lost
        self._store = store

    def record(self, keys: Iterable[bytes], miss: Miss, place: str = "") -> None:
        for key in keys:
            node = self._store.bad_node(OffloadKey(key))
            self._all.record([key], miss, place if node is None else f"{place} on node {node}")

    def find(self, keys: Sequence[bytes]) -> list[Loss | None]:
        return self._all.find(keys)


def _address(block: memoryview) -> int:
    address: int = np.frombuffer(block, np.uint8).__array_interface__["data"][0]
    return address
