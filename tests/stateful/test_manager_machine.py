# SPDX-License-Identifier: Apache-2.0
"""Test the manager of host memory against an oracle that knows residents, transfers and slots, but no policy.

The oracle takes each eviction's *choice* from the manager and checks that it was allowed. It predicts everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.sizes import by_size

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu import CPUOffloadingManager
from kvoffload.cpu.policies.arc import ARCCachePolicy
from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.testing import key
from kvoffload.testing.manager_contract import fold_events

NUM_BLOCKS = 6
NAMES = st.sampled_from("abc")
KEYS = st.lists(st.integers(0, 11).map(key), max_size=5)


@dataclass
class Group:
    """The transfers of one slot. Once a reset has forgotten its key, the key is refused until all have ended."""

    slot: int
    outstanding: int = 0
    is_forgotten: bool = False


@dataclass
class Oracle:
    ready: dict[OffloadKey, int] = field(default_factory=dict)
    writing: dict[OffloadKey, int] = field(default_factory=dict)
    reads: dict[OffloadKey, Group] = field(default_factory=dict)
    writes: dict[OffloadKey, Group] = field(default_factory=dict)
    counts: dict[OffloadKey, int] = field(default_factory=dict)
    counted: dict[str, set[OffloadKey]] = field(default_factory=dict)

    def ask(self, one: OffloadKey, name: str, looking: bool) -> None:
        if one not in self.counted.get(name, ()) and (looking or name in self.counted):
            self.counts[one] = self.counts.get(one, 0) + 1
        self.counted.get(name, set()).add(one)

    def answer(self, one: OffloadKey) -> bool | None:
        return True if one in self.ready else None if one in self.writing else False

    def held_slots(self) -> set[int]:
        groups = (*self.reads.values(), *self.writes.values())
        return {*self.ready.values(), *(group.slot for group in groups)}

    def forgotten(self) -> set[OffloadKey]:
        return {one for all_of in (self.reads, self.writes) for one, group in all_of.items() if group.is_forgotten}


class ManagerMachine(RuleBasedStateMachine):
    policy = "lru"
    threshold = 1

    @initialize()
    def start(self) -> None:
        self.manager = CPUOffloadingManager(NUM_BLOCKS, self.policy, True, self.threshold)
        self.oracle = Oracle()
        self.resident: set[OffloadKey] = set()
        self.loads: list[list[OffloadKey]] = []
        self.stores: list[list[OffloadKey]] = []

    @rule(name=NAMES)
    def new_request(self, name: str) -> None:
        self.manager.on_new_request(ReqContext(name))
        self.oracle.counted.setdefault(name, set())

    @rule(name=NAMES)
    def finish_request(self, name: str) -> None:
        self.manager.on_request_finished(ReqContext(name))
        self.oracle.counted.pop(name, None)

    @rule(ask=KEYS, name=NAMES)
    def look_up(self, ask: list[OffloadKey], name: str) -> None:
        for one in ask:
            self.oracle.ask(one, name, looking=True)
            assert self.manager.lookup(one, ReqContext(name)) is self.oracle.answer(one)

    @rule(ask=KEYS, name=NAMES)
    def look_up_prefix(self, ask: list[OffloadKey], name: str) -> None:
        expected: list[bool | None] = []
        for one in ask:
            self.oracle.ask(one, name, looking=True)
            expected.append(self.oracle.answer(one))
            if expected[-1] is False:
                break
        assert self.manager.lookup_prefix(ask, ReqContext(name)) == expected

    @rule(used=KEYS)
    def touch(self, used: list[OffloadKey]) -> None:
        self.manager.touch(used)

    @rule(ask=KEYS)
    def prepare_load(self, ask: list[OffloadKey]) -> None:
        oracle = self.oracle
        loadable = [one for one in ask if one in oracle.ready]
        if len(loadable) < len(ask):
            before = snapshot(self.manager)
            with pytest.raises(AssertionError, match="cannot be read"):
                self.manager.prepare_load(ask, ReqContext("a"))
            assert snapshot(self.manager) == before
        spec = self.manager.prepare_load(loadable, ReqContext("a"))
        assert spec.block_ids.tolist() == [oracle.ready[one] for one in loadable]
        for one in loadable:
            oracle.reads.setdefault(one, Group(oracle.ready[one])).outstanding += 1
        self.loads.append(loadable)

    @rule(which=st.integers(0, 99))
    def complete_load(self, which: int) -> None:
        if not self.loads:
            return
        done = self.loads.pop(which % len(self.loads))
        self.manager.complete_load(done)
        for one in done:
            group = self.oracle.reads[one]
            group.outstanding -= 1
            if not group.outstanding:
                del self.oracle.reads[one]

    @rule(ask=KEYS, name=NAMES)
    def prepare_store(self, ask: list[OffloadKey], name: str) -> None:
        oracle, manager = self.oracle, self.manager
        for one in ask:
            oracle.ask(one, name, looking=False)
        wanted = [one for one in dict.fromkeys(ask) if oracle.answer(one) is False]
        if self.threshold > 1:
            wanted = [one for one in wanted if oracle.counts.get(one, 0) >= self.threshold]
        idle = set(oracle.ready) - set(oracle.reads) - set(ask)
        missing = max(len(wanted) - (NUM_BLOCKS - len(oracle.held_slots())), 0)
        before = snapshot(manager)
        output = manager.prepare_store(ask, ReqContext(name))
        if missing > len(idle) or oracle.forgotten().intersection(wanted):
            assert output is None
            assert snapshot(manager) == before
            return
        assert output is not None
        assert output.keys_to_store == wanted
        assert set(output.evicted_keys) <= idle
        assert len(output.evicted_keys) == len(set(output.evicted_keys)) == missing
        for one in output.evicted_keys:
            del oracle.ready[one]
        slots: list[int] = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
        assert len(set(slots)) == len(slots) == len(wanted)
        assert not oracle.held_slots() & set(slots), "a slot with two owners"
        assert set(slots) <= set(range(NUM_BLOCKS))
        for one, slot in zip(wanted, slots, strict=True):
            oracle.writing[one] = slot
            oracle.writes[one] = Group(slot, 1)
        self.stores.append(wanted)

    @rule(which=st.integers(0, 99), success=st.booleans())
    def complete_store(self, which: int, success: bool) -> None:
        if not self.stores:
            return
        oracle = self.oracle
        done = self.stores.pop(which % len(self.stores))
        self.manager.complete_store(done, None, success)
        for one in done:
            del oracle.writes[one]
            slot = oracle.writing.pop(one, None)
            if slot is not None and success:
                oracle.ready[one] = slot

    @rule()
    def reset(self) -> None:
        self.manager.reset_cache()
        self.oracle.ready.clear()
        self.oracle.writing.clear()
        for group in (*self.oracle.reads.values(), *self.oracle.writes.values()):
            group.is_forgotten = True

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        fold_events(self.resident, self.manager.take_events())
        assert self.resident == set(self.oracle.ready)
        assert self.manager.slots.num_free == NUM_BLOCKS - len(self.oracle.held_slots())

    def teardown(self) -> None:
        """When every transfer has ended, every slot is available again."""
        if not hasattr(self, "manager"):
            return
        for store in self.stores:
            self.manager.complete_store(store)
        for load in self.loads:
            self.manager.complete_load(load)
        self.manager.check_invariants()
        assert self.manager.slots.num_idle + self.manager.slots.num_free == NUM_BLOCKS
        assert self.manager.slots.reserve([key(number) for number in range(100, 100 + NUM_BLOCKS)]) is not None


def snapshot(manager: CPUOffloadingManager) -> Any:
    """All that a refusal must not change."""
    policy = manager.slots.policy
    order: Any
    if isinstance(policy, LRUCachePolicy):
        order = list(policy.recency)
    else:
        assert isinstance(policy, ARCCachePolicy)
        lists = (policy.recent, policy.frequent, policy.recent_ghosts, policy.frequent_ghosts)
        order = [*map(list, lists), policy.target]
    table = manager.slots
    slots = [(block.block_id, block.key, block.pins) for block in table._slots[: table._num_used]]
    free = [block.block_id for block in table._free]
    return (
        order,
        slots,
        free,
        list(table._orphans),
        table.num_in_flight,
        table.num_busy,
        table.num_stored,
        table.num_evicted,
    )


@pytest.mark.parametrize("threshold", [1, 2])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_manager(policy: str, threshold: int) -> None:
    machine = type("Machine", (ManagerMachine,), {"policy": policy, "threshold": threshold})

    run_state_machine_as_test(
        machine, settings=settings(max_examples=by_size(quick=25, thorough=300), stateful_step_count=50)
    )
