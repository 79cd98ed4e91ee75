# SPDX-License-Identifier: Apache-2.0
"""The search for hits, the waits for them, and their loads, without a scheduler side around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.connector.rig import BT, FULL, SLIDING, STATE, Request, Rig, SpyManager, key

from kvoffload.base import Direction, OffloadKey, ReqContext, TransferResult
from kvoffload.config import EngineLayout, OffloadingConfig
from kvoffload.connector.epochs import FIRST
from kvoffload.connector.groups import geometry_of
from kvoffload.connector.hits import Hits
from kvoffload.connector.jobs import JobTable
from kvoffload.connector.requests import Keys
from kvoffload.connector.requests import Request as OwnRequest
from kvoffload.connector.short_loads import ShortLoads
from kvoffload.errors import TransferError


class Deferring(SpyManager):
    """Promotes for as long as ``is_promoting``."""

    is_promoting = False
    loses = False

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, ends: object = None
    ) -> list[bool | None]:
        found = super().lookup_prefix(keys, req_context)
        return [None if answer and self.is_promoting else answer for answer in found]

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> object:
        if self.loses:
            raise TransferError("gone")
        return super().prepare_load(keys, req_context)


@dataclass
class Desk:
    """Hits of a manager that has the blocks 0 to 7 of the prefix ``p``."""

    manager: Deferring = field(default_factory=lambda: Deferring(16))
    now_s: float = 0.0

    def __post_init__(self) -> None:
        layout = EngineLayout((FULL,), BT, "desk")
        self.geometry = geometry_of(layout, OffloadingConfig(cpu_bytes_to_use=1))
        stored, context = [key(n) for n in range(8)], ReqContext("before")
        self.manager.prepare_store(stored, context)
        self.manager.complete_store(stored, context)
        self.jobs = JobTable(self.geometry, num_ranks=1)
        short_loads = ShortLoads(self.geometry, self.jobs, lambda: self.now_s)
        self.hits = Hits(self.manager, self.geometry, self.jobs, short_loads, None, lambda: self.now_s)
        self.requests: list[OwnRequest] = []

    def arrive(self, num_tokens: int = 33, first_gpu_block: int = 0) -> OwnRequest:
        context = ReqContext(f"r{len(self.requests)}")
        policy = self.manager.on_new_request(context).policy
        groups = tuple(map(Keys, self.geometry))
        state = OwnRequest(Request(context.req_id, num_tokens), context, policy, groups, FIRST)
        state.set_gpu_blocks((range(first_gpu_block, first_gpu_block + 9),))
        self.requests.append(state)
        return state

    def find(self, state: OwnRequest, computed: int = 0) -> int | None:
        tokens = self.hits.find(state, computed)
        self.check()
        return tokens

    def admit(self, state: OwnRequest, external: int) -> None:
        self.hits.admit(state, external)
        self.check()

    def end(self, job_id: int, success: bool = True) -> bool:
        job = self.jobs.record(0, TransferResult(job_id, success))
        assert job is not None
        is_awaited = self.hits.end_load(job)
        self.check()
        return is_awaited

    def forget(self, state: OwnRequest) -> None:
        self.requests.remove(state)
        self.hits.forget(state)
        self.check()

    def check(self) -> None:
        self.hits.check_invariants(self.requests)
        self.jobs.check_invariants()
        self.manager.check_invariants()

    def waiting(self) -> float:
        return self.hits.get_stats()["requests_waiting",]


def test_a_wait_lasts_from_the_first_question_without_an_answer_to_the_answer() -> None:
    desk = Desk()
    state = desk.arrive()
    desk.manager.is_promoting = True
    for desk.now_s in (1.0, 2.0, 4.0):
        assert desk.find(state) is None
        assert desk.waiting() == 1
    desk.manager.is_promoting = False
    desk.now_s = 5.0
    assert desk.find(state) == 32
    assert (desk.waiting(), state.prefix.wait_s) == (0, 4.0)
    desk.now_s = 9.0
    assert desk.find(state) == 32, "it found no GPU blocks meanwhile"
    assert state.prefix.wait_s == 4.0
    desk.admit(state, 32)
    stats = desk.hits.get_stats()
    assert sum(value for sample, value in stats.items() if sample[0] == "lookup_wait_seconds") == 1 + 4.0, "one, of 4 s"
    assert (stats["lookups_deferred",], stats["hit_tokens",], stats["tier_hit_tokens", "CPU"]) == (3, 32, 32)
    assert state.prefix.wait_s == 0.0, "the next admission has a wait of its own"


def test_a_request_that_ends_waits_no_longer() -> None:
    desk = Desk()
    state = desk.arrive()
    desk.manager.is_promoting = True
    assert desk.find(state) is None
    desk.forget(state)
    assert desk.waiting() == 0


def test_a_request_with_transfers_of_its_own_waits_for_them() -> None:
    desk = Desk()
    state = desk.arrive()
    job = desk.jobs.begin(Direction.STORE, state, [key(9)], [3])
    assert desk.find(state) is None
    desk.jobs.remove(job)
    assert desk.find(state) == 32


def test_a_crowd_waits_for_one_load_and_then_no_more() -> None:
    desk = Desk()
    first, second = desk.arrive(), desk.arrive(first_gpu_block=20)
    assert desk.find(first) == 32
    desk.admit(first, 32)
    (load,) = desk.jobs.take(()).loads
    assert desk.find(second) is None
    assert second.prefix.awaited_job_id == load.job_id
    assert desk.end(load.job_id)
    assert first.prefix.computed_tokens == 32
    third = desk.arrive(first_gpu_block=40)
    assert desk.find(third) == 32
    desk.admit(third, 32)
    assert desk.find(second) == 32, "it waits for one load, not for each"


def test_a_load_that_is_not_sent_yet_ends_with_its_request() -> None:
    desk = Desk()
    state, other = desk.arrive(), desk.arrive(first_gpu_block=20)
    assert desk.find(state) == 32
    desk.admit(state, 32)
    assert desk.jobs.new_load(state) is not None
    desk.forget(state)
    assert not desk.jobs.in_flight
    assert desk.jobs.take(()).is_empty()
    assert desk.manager.get_stats()["primary_blocks_pinned",] == 0
    assert desk.find(other) == 32, "no key of it is being loaded"


def test_a_load_that_is_sent_ends_after_its_request_and_gives_its_pins_back() -> None:
    desk = Desk()
    state = desk.arrive()
    assert desk.find(state) == 32
    desk.admit(state, 32)
    (load,) = desk.jobs.take(()).loads
    assert desk.jobs.new_load(state) is None
    desk.forget(state)
    assert desk.manager.get_stats()["primary_blocks_pinned",] == 8
    assert not desk.end(load.job_id), "no request waits for it"
    assert desk.manager.get_stats()["primary_blocks_pinned",] == 0


@pytest.mark.parametrize("external", [32, 31])
def test_without_pins_or_at_no_end_of_a_hit_the_load_is_lost(external: int) -> None:
    desk = Desk()
    state = desk.arrive()
    assert desk.find(state) == 32
    desk.manager.loses = external == 32
    desk.admit(state, external)
    meta = desk.jobs.take(())
    assert [load.source for load in meta.loads] == [None]
    assert desk.end(meta.loads[0].job_id, success=False)
    assert state.prefix.computed_tokens == 0
    desk.manager.loses = False
    assert desk.find(state, 4) == 4, "it gets no other load"


def test_a_request_that_lost_its_gpu_blocks_does_not_take_in_the_end_of_its_load() -> None:
    desk = Desk()
    state = desk.arrive()
    assert desk.find(state) == 32
    desk.admit(state, 32)
    (load,) = desk.jobs.take(()).loads
    state.lose_gpu_blocks()
    assert desk.find(state) is None, "its own transfers"
    assert not desk.end(load.job_id)
    assert state.prefix.computed_tokens == 0
    assert desk.find(state) == 32


def test_a_request_that_was_preempted_is_counted_once() -> None:
    desk = Desk()
    state = desk.arrive()
    for _ in range(3):
        state.set_gpu_blocks((range(9),))
        assert desk.find(state) == 32
        desk.admit(state, 32)
        (load,) = desk.jobs.take(()).loads
        desk.end(load.job_id)
        state.lose_gpu_blocks()
    stats = desk.hits.get_stats()
    assert (stats["lookup_tokens",], stats["hit_tokens",], stats["tier_hit_tokens", "CPU"]) == (33, 32, 32)


def counting(method: Callable[..., Any], count: list[int]) -> Callable[..., Any]:
    """``method``, which counts its calls."""

    def counted(*args: Any, **named: Any) -> Any:
        count[0] += 1
        return method(*args, **named)

    return counted


@pytest.mark.parametrize("num_states", [0, 1])
def test_the_search_for_a_state_takes_a_few_calls_however_many_there_could_be(num_states: int) -> None:
    """4,000 states were looked at one by one."""
    calls = []
    for num_blocks in (100, 900):
        rig = Rig(groups=(FULL, STATE), num_blocks=1000)
        stored = [key(n) for n in range(num_blocks)] + [key(n, group=1) for n in range(num_states)]
        context = ReqContext("seed")
        output = rig.manager.prepare_store(stored, context)
        assert output is not None
        rig.manager.complete_store(stored, context)
        count = [0]
        for name in ("where", "lookup_prefix"):
            setattr(rig.manager, name, counting(getattr(rig.manager, name), count))
        request = rig.arrive(Request("r", num_blocks * BT + 1))
        assert rig.ask(request) == (num_states * BT, num_states > 0)
        calls.append(count[0])
    assert calls[0] == calls[1]


def count_lookups(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    looked: list[int] = []
    real = rig.manager.lookup_prefix
    monkeypatch.setattr(rig.manager, "lookup_prefix", lambda keys, context: looked.append(1) or real(keys, context))
    return looked


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)])
def test_without_tiers_a_hit_that_waits_for_gpu_blocks_is_searched_after_an_event_only(
    groups: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(groups, num_blocks=24)
    rig.store_prefix(16)
    request = rig.arrive(Request("r", 41))
    looked = count_lookups(rig, monkeypatch)

    def ask(tokens: int) -> int:
        before = len(looked)
        for _ in range(3):
            assert rig.ask(request) == (tokens, tokens > 0)
            rig.step()
        return len(looked) - before

    def store(num_blocks: int, stem: str = "p") -> None:
        context = ReqContext("running")
        output = rig.manager.prepare_store(
            [key(n, g, stem) for n in range(num_blocks) for g, _ in enumerate(groups)], context
        )
        assert output is not None
        rig.manager.complete_store(output.keys_to_store, context)

    first = ask(16)
    assert first <= 2 * len(groups), "one search"
    store(2, "other")
    assert ask(16) == 0, "nothing of it was evicted, and nothing behind it was stored"
    store(6)
    assert 0 < ask(24) <= 2 * first, "the missing block was stored"
    store(24 // len(groups), "large")
    ask(0)  # it was evicted
    store(6)
    ask(24)
    rig.scheduler.reset_cache()
    ask(0)


def test_a_manager_that_changes_the_answers_of_host_memory_is_asked_in_each_step() -> None:
    desk, context = Desk(), ReqContext("r")
    desk.manager.is_promoting = True
    assert desk.manager.lookup_prefix([key(0)], context) == [None]
    assert not desk.manager.is_unchanged(context), "it does not know whether its own class has an answer by now"
