# SPDX-License-Identifier: Apache-2.0
"""Orders over packets that are lost, late, repeated and reordered, to agents that are started again."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.sizes import by_size

from kvoffload.errors import StoreError
from kvoffload.testing.clock import ManualClock
from kvoffload.testing.keys import keys
from kvoffload.tiering.nodes.link import AgentLink
from kvoffload.tiering.nodes.messages import Act, Answer, News, Order, Packet
from kvoffload.tiering.nodes.nodes import Nodes, Pending
from kvoffload.tiering.nodes.stream import MAX_PACKET_SIZE, Stream
from kvoffload.tiering.stores.base import StoreStats

NUM_NODES = 2
FATES = st.lists(st.sampled_from(["arrives", "arrives", "is late"]), min_size=NUM_NODES, max_size=NUM_NODES)


class Agent:
    """The process of one node, which executes its orders when the test says so."""

    def __init__(self, node: int) -> None:
        self.link = AgentLink(node)
        self.running: list[Order] = []

    def receive(self, packet: Packet) -> list[Order]:
        begun = self.link.receive([packet], lambda: not self.running)
        self.running += begun
        return begun


class Network(RuleBasedStateMachine):
    """A scheduler, its nodes, and packets in flight. Each packet arrives never, once or several times, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = Nodes(NUM_NODES, clock=lambda: 0.0)
        self.agents: list[Agent | None] = [Agent(node) for node in range(NUM_NODES)]
        self.down: list[Packet] = []
        self.up: list[Packet] = []
        self.pending: dict[int, Pending] = {}
        self.num_keys: dict[int, int] = {}
        self.begun: set[tuple[int, int]] = set()
        self.done: dict[tuple[int, int], list[bool]] = {}

    # ------------------------------------------------------------------------------------------------- the rules

    @rule(count=st.integers(0, 3))
    def order(self, count: int) -> None:
        number = len(self.pending) + 1
        self.pending[number] = self.nodes.order(0, Act.READ, keys(*range(count)), range(count))
        self.num_keys[number] = count

    @rule(down=FATES, up=FATES, has_news=st.booleans())
    def step(self, down: list[str], up: list[str], has_news: bool) -> None:
        """Make a step. Any packet, delivered or not, may also arrive later."""
        for packet, fate in zip(self.nodes.take_packets(), cycle(down)):
            self.down.append(packet)
            if fate == "arrives":
                self.arrive(packet)
        for agent, fate in zip(self.agents, up, strict=True):
            if agent is None:
                continue
            if has_news and agent.link.has_room:
                agent.link.put(News(0, StoreStats(), {}))
            packets = agent.link.take_packets()
            self.up += packets
            if fate == "arrives":
                self.nodes.receive(packets)

    @rule(data=st.data(), are_all=st.booleans())
    @precondition(lambda self: self.down)
    def reach_a_node(self, data: st.DataObject, are_all: bool) -> None:
        for packet in self.down if are_all else [data.draw(st.sampled_from(self.down))]:
            self.arrive(packet)

    @rule(data=st.data(), are_all=st.booleans())
    @precondition(lambda self: self.up)
    def reach_the_scheduler(self, data: st.DataObject, are_all: bool) -> None:
        self.nodes.receive(self.up if are_all else [data.draw(st.sampled_from(self.up))])

    @rule(data=st.data(), outcome=st.booleans())
    def end_an_order(self, data: st.DataObject, outcome: bool) -> None:
        agents = [agent for agent in self.agents if agent is not None and agent.running]
        if agents:
            agent = data.draw(st.sampled_from(agents))
            self.finish(agent, data.draw(st.sampled_from(agent.running)), outcome)

    @rule(node=st.integers(0, NUM_NODES - 1), is_back=st.booleans())
    def end_a_process(self, node: int, is_back: bool) -> None:
        self.agents[node] = Agent(node) if is_back else None

    @rule()
    def start_again(self) -> None:
        self.agents = [agent or Agent(node) for node, agent in enumerate(self.agents)]

    # --------------------------------------------------------------------------------------------- invariants

    def arrive(self, packet: Packet) -> None:
        agent = self.agents[packet.node]
        if agent is None:
            return
        for order in agent.receive(packet):
            assert (packet.node, order.number) not in self.begun, "an order was begun twice"
            assert packet.node in self.pending[order.number].left, "an order was begun after its end"
            self.begun.add((packet.node, order.number))

    def finish(self, agent: Agent, order: Order, outcome: bool) -> None:
        agent.running.remove(order)
        outcomes = [outcome] * len(order.keys)
        self.done[agent.link.node, order.number] = outcomes
        agent.link.put(Answer(order.number, outcomes))

    @invariant()
    def no_slot_is_free_while_an_agent_uses_it(self) -> None:
        for agent in self.agents:
            for order in agent.running if agent is not None else ():
                assert agent is not None
                assert agent.link.node in self.pending[order.number].left

    @invariant()
    def what_ended_well_ended_so_on_all_nodes(self) -> None:
        for number, pending in self.pending.items():
            assert pending.ended.is_set() == (not pending.left)
            if not pending.left and not pending.errors:
                each = [self.done[node, number] for node in range(NUM_NODES)]
                assert pending.outcomes == [all(outcomes) for outcomes in zip(*each, strict=True)]
                assert set(pending.bad_nodes) == {at for at, good in enumerate(pending.outcomes) if not good}

    def teardown(self) -> None:
        """Once no packets are lost, all orders end. Some earlier packets still arrive, and change nothing."""
        late_down, late_up = self.down[::3], self.up[::3]
        self.start_again()
        for _ in range(12):
            for packet in (*self.nodes.take_packets(), *late_down):
                self.arrive(packet)
            for agent in self.agents:
                assert agent is not None
                for order in list(agent.running):
                    self.finish(agent, order, outcome=True)
                self.nodes.receive([*agent.link.take_packets(), *late_up])
            late_down = late_up = []
            self.what_ended_well_ended_so_on_all_nodes()
        assert [number for number, pending in self.pending.items() if pending.left] == []
        assert self.nodes.take_packets() == (), "nothing is open, and the scheduler sends on"


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=by_size(25, 2000), stateful_step_count=40)


def test_a_packet_is_bounded_and_a_large_item_goes_alone() -> None:
    here, there = Stream(), Stream()
    items = [Order(n, 0, Act.CONTAINS, keys(*range(MAX_PACKET_SIZE // 2 - 1))) for n in range(1, 4)]
    items.append(Order(4, 0, Act.CONTAINS, keys(*range(2 * MAX_PACKET_SIZE))))
    for item in items:
        here.put(item)
    arrived = []
    sizes = []
    while here.is_due:
        packet = here.packet(0, 1, 1)
        sizes.append(len(packet.items))
        arrived += there.receive(packet)
        here.receive(there.packet(0, 1, 1))
    assert arrived == items
    assert sizes == [2, 1, 1]
    assert here.num_kept == 0


def test_what_was_not_acknowledged_goes_again_only_when_it_was_lost() -> None:
    here, there = Stream(), Stream()
    here.put(Order(1, 0, Act.TOUCH))
    assert len(here.packet(0, 1, 1).items) == 1  # lost
    assert not here.is_due, "nothing says yet that it was lost"
    assert there.receive(here.packet(0, 1, 1)) == ()
    here.receive(there.packet(0, 1, 1))
    assert [item.number for item in there.receive(here.packet(0, 1, 1)) if isinstance(item, Order)] == [1]
    here.receive(there.packet(0, 1, 1))
    assert here.packet(0, 1, 1).items == ()


def speak(nodes: Nodes, agent: AgentLink) -> list[Order]:
    """Make one step without lost packets, and return the orders."""
    orders = agent.receive(nodes.take_packets(), lambda: True)
    nodes.receive(agent.take_packets())
    return orders


def test_a_silent_agent_is_asked_for_nothing_more_until_it_speaks() -> None:
    clock = ManualClock()
    nodes, agent = Nodes(1, clock), AgentLink(0)
    first = nodes.order(0, Act.READ, keys(1), [0])
    assert speak(nodes, agent) == []  # it introduces itself
    assert len(speak(nodes, agent)) == 1
    for _ in range(40):
        nodes.take_packets()
    nodes.order(0, Act.CONTAINS, keys(2))  # its steps may have taken no time
    clock.advance(3.0)
    with pytest.raises(StoreError, match="node 0"):
        nodes.order(0, Act.CONTAINS, keys(3))
    assert not first.ended.is_set(), "it may still write to the slot"
    nodes.receive(agent.take_packets())
    for _ in range(3):
        speak(nodes, agent)
    nodes.order(0, Act.CONTAINS, keys(3))


def test_a_silent_agent_is_spoken_to_also_when_nothing_is_open() -> None:
    """Else nothing would ever end its silence. It fell silent while another node's call took long."""
    clock = ManualClock()
    nodes, slow, silent = Nodes(2, clock), AgentLink(0), AgentLink(1)
    pending = nodes.order(0, Act.CONTAINS, keys(1))

    def step(*heard: AgentLink) -> None:
        packets = nodes.take_packets()
        for agent in heard:
            for order in agent.receive(packets, lambda: True):
                if agent is silent:
                    agent.put(Answer(order.number, [True]))
            nodes.receive(agent.take_packets())

    for _ in range(4):
        step(slow, silent)
    for _ in range(40):
        step(slow)
    clock.advance(3.0)
    slow.put(Answer(1, [True]))
    step(slow)
    assert pending.ended.is_set()
    with pytest.raises(StoreError, match="node 1"):
        nodes.order(0, Act.CONTAINS, keys(2))
    step(slow, silent)
    nodes.order(0, Act.CONTAINS, keys(2))


def test_an_answer_that_makes_no_sense_is_a_failure() -> None:
    nodes, agent = Nodes(1), AgentLink(0)
    pending = nodes.order(0, Act.READ, keys(1, 2), [0, 1])
    speak(nodes, agent)
    (order,) = speak(nodes, agent)
    agent.put(Answer(order.number, [True]))
    agent.put(Answer(order.number + 7, [True]))
    speak(nodes, agent)
    assert pending.ended.is_set()
    assert pending.errors == ["node 0: 1 outcomes for 2 keys"]


def test_hints_for_a_busy_node_are_dropped() -> None:
    nodes, agent = Nodes(1), AgentLink(0)
    for _ in range(1000):
        nodes.tell(0, Act.TOUCH, keys(1))
    speak(nodes, agent)
    assert len(speak(nodes, agent)) == 64


def test_the_engine_ends() -> None:
    nodes = Nodes(NUM_NODES)
    pending = nodes.order(0, Act.WRITE, keys(1), [0])
    nodes.close()
    assert pending.ended.is_set()
    assert len(pending.errors) == NUM_NODES
    with pytest.raises(StoreError):
        nodes.order(0, Act.WRITE, keys(1), [0])


def test_the_first_words_of_a_dead_process_change_nothing_once_another_has_spoken() -> None:
    nodes, dead, agent = Nodes(1), AgentLink(0), AgentLink(0)
    pending = nodes.order(0, Act.READ, keys(1), [0])
    dead.receive(nodes.take_packets(), lambda: True)
    late = dead.take_packets()
    speak(nodes, agent)
    (order,) = speak(nodes, agent)
    nodes.receive(late)
    assert not pending.ended.is_set(), "the other one does it"
    agent.put(Answer(order.number, [True]))
    speak(nodes, agent)
    assert pending.outcomes == [True]
    assert not pending.errors


def test_late_packets_of_another_scheduler_change_nothing() -> None:
    first, second, agent = Nodes(1), Nodes(1), AgentLink(0)
    first.order(0, Act.CONTAINS, keys(1))
    speak(first, agent)
    late = first.take_packets()
    agent.receive(late, lambda: True)
    second.order(0, Act.CONTAINS, keys(2))
    speak(second, agent)
    assert [order.keys for order in speak(second, agent)] == [tuple(keys(2))]
    assert agent.receive(late, lambda: True) == []
    second.order(0, Act.CONTAINS, keys(3))
    assert [order.keys for order in speak(second, agent)] == [tuple(keys(3))]


def test_an_answer_that_was_lost_comes_again() -> None:
    nodes, agent = Nodes(1), AgentLink(0)
    pending = nodes.order(0, Act.READ, keys(1), [0])
    speak(nodes, agent)
    (order,) = speak(nodes, agent)
    agent.put(Answer(order.number, [True]))
    assert len(agent.take_packets()) == 1  # lost
    for _ in range(3):
        speak(nodes, agent)
    assert pending.ended.is_set()
