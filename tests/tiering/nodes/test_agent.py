# SPDX-License-Identifier: Apache-2.0
"""Test how an agent executes orders, and how the scheduler's store combines the answers of two agents."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from tests.tiering.nodes.rig import LIMITS, TwoNodes, memory

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.lost_blocks import LostBlocks
from kvoffload.miss import Miss
from kvoffload.testing import GatedStore
from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.health import _reason_of
from kvoffload.tiering.nodes import AgentTier, NodeAgent, Nodes, NodesStore
from kvoffload.tiering.nodes.messages import Act
from kvoffload.tiering.nodes.store import NodesLosses
from kvoffload.tiering.nodes.stream import MAX_PACKET_SIZE
from kvoffload.tiering.stores.base import BlockStore, LossCause
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.wrappers import StoreWrapper

SLOT_BYTES = 64


class FullDisk(StoreWrapper):
    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        raise StoreError("no room") from OSError(errno.ENOSPC, "No space left on device")


Opened = tuple[NodesStore, TwoNodes]


@contextmanager
def opened(*stores: BlockStore, num_slots: int = 8) -> Iterator[Opened]:
    two = TwoNodes(stores, [memory(num_slots, SLOT_BYTES) for _ in stores])
    try:
        yield NodesStore(two.nodes, 0, two.views[0]), two
    finally:
        two.close()


def slots(two: TwoNodes, *numbers: int) -> list[memoryview]:
    return [two.views[0].cast("B")[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] for slot in numbers]


def test_a_full_disk_on_one_node_fails_the_call_and_is_named() -> None:
    with opened(MemoryStore(SLOT_BYTES), FullDisk(MemoryStore(SLOT_BYTES))) as (store, two):
        with pytest.raises(StoreError, match="node 1: no room") as caught:
            store.write(keys_of(1), slots(two, 0))
        assert _reason_of(caught.value) == "ENOSPC"
        assert store.contains(keys_of(1)) == [False], "one part is none"


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class Unprintable(StoreWrapper):
    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        raise _Unprintable


def test_an_error_that_cannot_be_printed_fails_its_call_and_no_step() -> None:
    with opened(MemoryStore(SLOT_BYTES), Unprintable(MemoryStore(SLOT_BYTES))) as (store, two):
        with pytest.raises(StoreError, match="node 1: _Unprintable"):
            store.write(keys_of(1), slots(two, 0))
        assert store.contains(keys_of(1)) == [False], "steps go on"


@pytest.mark.parametrize("numbers", [(-1,), (0, 8)])
def test_slots_that_a_node_lacks_are_a_failure(numbers: tuple[int, ...]) -> None:
    with opened(MemoryStore(SLOT_BYTES)) as (_, two):
        pending = two.nodes.order(0, Act.READ, keys_of(*range(len(numbers))), numbers)
        assert pending.ended.wait(30)
        assert pending.errors == ["node 0: the node has no such slots"]


def test_a_tier_that_a_node_lacks_is_a_failure() -> None:
    with opened(MemoryStore(SLOT_BYTES)) as (_, two):
        pending = two.nodes.order(1, Act.CONTAINS, keys_of(1))
        assert pending.ended.wait(30)
        assert len(pending.errors) == 1


def test_a_scan_finds_what_all_nodes_have() -> None:
    first, second = MemoryStore(SLOT_BYTES), MemoryStore(SLOT_BYTES)
    with opened(first, second, num_slots=8) as (store, _):
        names = keys_of(*range(2100))
        for each in (first, second):
            each.write(names, [memoryview(bytes(SLOT_BYTES))] * len(names))
        first.discard(names[:10])
        second.discard(names[5:20])
        for _ in range(2):  # a later scan starts from the beginning
            assert [key for batch in store.scan() for key in batch] == names[20:]


def test_a_scan_that_another_process_began_fails() -> None:
    """Its end would say that all other blocks are gone."""
    with opened(MemoryStore(SLOT_BYTES), MemoryStore(SLOT_BYTES)) as (_, two):
        pending = two.nodes.order(0, Act.SCAN, (), among=[0])
        assert pending.ended.wait(30)
        assert pending.errors == ["node 0: another process started the scan"]


def test_a_use_reaches_all_nodes() -> None:
    names = keys_of(1, 2, 3)
    with opened(*(MemoryStore(SLOT_BYTES, 2 * SLOT_BYTES) for _ in range(2))) as (store, two):
        assert store.write(names[:2], slots(two, 0, 1)) == [True, True]
        store.touch(names[1:2])
        store.touch(names[:1])
        assert store.contains(names[:1]) == [True]
        assert store.write(names[2:], slots(two, 2)) == [True]
        assert store.contains(names) == [True, False, True]
        assert store.take_lost() == {names[1]: "evicted"}
        assert store.bad_node(names[1]) in (0, 1)


def test_a_loss_is_recorded_with_its_node() -> None:
    lost, names = LostBlocks(), keys_of(1, 2)
    second = MemoryStore(SLOT_BYTES)
    with opened(MemoryStore(SLOT_BYTES), second) as (store, two):
        store.write(names[:1], slots(two, 0))
        second.discard(names)
        assert store.read_into(names[:1], slots(two, 0)) == [False]
        losses = NodesLosses(lost, store)
        losses.record(names, Miss.REMOVED, "disk")
    for found in (lost.find(names), losses.find(names)):
        assert [loss and loss.cause for loss in found] == ["removed disk on node 1", "removed disk"]


def test_of_lost_blocks_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiering.nodes.store._MAX_REMEMBERED", 2)
    names, second = keys_of(1, 2, 3), MemoryStore(SLOT_BYTES)
    with opened(MemoryStore(SLOT_BYTES), second) as (store, two):
        store.write(names, slots(two, 0, 1, 2))
        second.discard(names)
        for name in names:
            store.read_into([name], slots(two, 0))
        assert [store.bad_node(name) for name in names] == [None, None, 1]


class Emptied(StoreWrapper):
    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner)
        self.lost: dict[OffloadKey, LossCause] = {}

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        lost, self.lost = self.lost, {}
        return lost


def test_losses_come_in_parts_that_a_step_can_carry_and_not_all_are_kept() -> None:
    """If a disk fails while an engine is idle, it loses all blocks between two steps."""
    store, nodes, sizes = Emptied(MemoryStore(SLOT_BYTES)), Nodes(1), list[int]()
    agent = NodeAgent(0, memory(2, SLOT_BYTES), [AgentTier("mem", store, LIMITS)])

    def step() -> None:
        agent.receive(nodes.take_packets())
        packets = agent.take_packets()
        sizes.extend(sum(item.size for item in packet.items) for packet in packets)
        nodes.receive(packets)

    pending = nodes.order(0, Act.CONTAINS, keys_of(1))

    def has_ended() -> bool:
        step()
        return pending.ended.wait(0.001)

    wait(has_ended)
    names = keys_of(*range(70_000))
    store.lost = dict.fromkeys(names, "removed")
    for _ in range(12):
        step()
    assert max(sizes) <= MAX_PACKET_SIZE
    assert sum(sizes) > len(names)
    assert nodes.take_lost(0) == dict.fromkeys(names[: 1 << 16], ("removed", 0))
    agent.shutdown()


def test_stats_are_those_of_all_nodes_once_all_have_spoken() -> None:
    with opened(MemoryStore(SLOT_BYTES, 1 << 10), MemoryStore(SLOT_BYTES, 1 << 10)) as (store, two):
        assert store.stats().max_bytes is None
        store.write(keys_of(1, 2), slots(two, 0, 1))
        assert store.stats().max_bytes == 2 << 10


def test_a_tier_can_probe_with_memory_of_its_own() -> None:
    class Broken(StoreWrapper):
        def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
            if is_broken:
                raise StoreError("gone")
            return super().read_into(keys, blocks)

    with opened(MemoryStore(SLOT_BYTES), Broken(MemoryStore(SLOT_BYTES))) as (store, two):
        store.write(keys_of(1), slots(two, 0))
        foreign = bytearray(b"x" * SLOT_BYTES)
        is_broken = True
        with pytest.raises(StoreError, match="node 1: gone"):
            store.read_into(keys_of(1), [memoryview(foreign)])
        is_broken = False
        assert store.read_into(keys_of(1), [memoryview(foreign)]) == [False], "it has no bytes of node 1"
        assert foreign == b"x" * SLOT_BYTES


def test_a_call_that_hangs_on_one_node_holds_up_no_other_call() -> None:
    gate = GatedStore(MemoryStore(SLOT_BYTES))
    with opened(MemoryStore(SLOT_BYTES), gate) as (store, two):
        store.write(keys_of(1), slots(two, 0))
        gate.close_gate("read_into")
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.extend(store.read_into(keys_of(1), slots(two, 1))))
        thread.start()
        gate.wait_for_arrivals(1)
        assert store.contains(keys_of(1)) == [True]
        assert thread.is_alive(), "the slot is not free while a node may write to it"
        gate.open_gate()
        thread.join(30)
        assert answers == [True]


def test_another_scheduler_gets_nothing_before_orders_of_the_last_have_ended() -> None:
    gate = GatedStore(MemoryStore(SLOT_BYTES))
    gate.close_gate("contains")
    agent = NodeAgent(0, memory(2, SLOT_BYTES), [AgentTier("mem", gate, LIMITS)])

    def step(nodes: Nodes) -> None:
        agent.receive(nodes.take_packets())
        nodes.receive(agent.take_packets())

    first, second = Nodes(1), Nodes(1)
    first.order(0, Act.CONTAINS, keys_of(1))
    for _ in range(3):
        step(first)
    gate.wait_for_arrivals(1)
    pending = second.order(0, Act.DISCARD, keys_of(1))
    for _ in range(10):
        step(second)
    assert not pending.ended.is_set()
    gate.open_gate()

    def has_ended() -> bool:
        step(second)
        return pending.ended.wait(0.001)

    wait(has_ended)
    assert pending.errors == []
    agent.shutdown()
    agent.shutdown()


def test_its_stores_are_closed_with_it() -> None:
    closed: list[str] = []

    class Closed(MemoryStore):
        def close(self) -> None:
            closed.append("once")

    agent = NodeAgent(0, memory(2, SLOT_BYTES), [AgentTier(name, Closed(SLOT_BYTES), LIMITS) for name in "ab"])
    agent.shutdown()
    agent.shutdown()
    assert closed == ["once", "once"]


def wait(is_so: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if is_so():
            return
    raise AssertionError("it never became so")
