# SPDX-License-Identifier: Apache-2.0
"""Which requests go first, which wait, and the steps that the connector gets."""

from __future__ import annotations

import pytest
from tests.engines.reference.inside import tables_of
from tests.engines.reference.zoo import random_prompts, tiny_model

from kvoffload.config import GroupKind, KVGroupLayout, parse_config
from kvoffload.connector import EngineStep, OffloadingConnectorScheduler
from kvoffload.engines.reference import Engine, EngineOptions, Request, SamplingParams, State
from kvoffload.engines.reference.kv_cache import KVCache
from kvoffload.engines.reference.scheduler import Scheduler

OPTIONS = EngineOptions(num_blocks=24, block_tokens=4, max_batch_tokens=24, max_requests=3)
CONFIG = parse_config(
    {
        "cpu_bytes_to_use": "1MiB",
        "spec_name": "DeferringSpec",
        "spec_module_path": "tests.engines.reference.deferring_spec",
    }
)
ONE = SamplingParams(max_tokens=1)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[EngineStep]:
    """Return the list of the steps that the connector receives."""
    steps: list[EngineStep] = []
    build = OffloadingConnectorScheduler.build_connector_meta
    monkeypatch.setattr(
        OffloadingConnectorScheduler,
        "build_connector_meta",
        lambda self, step: (steps.append(step), build(self, step))[1],
    )
    return steps


def test_a_request_that_must_wait_delays_no_other() -> None:
    first, second, third = random_prompts(3, 20, 20)
    with Engine(tiny_model("llama"), OPTIONS, CONFIG) as engine:
        manager = engine._spec.get_manager()  # type: ignore[union-attr]
        manager.put_off = frozenset({"waits"})  # type: ignore[attr-defined]
        waiting = engine.add_request(first, ONE, request_id="waits")
        others = [engine.add_request(prompt, ONE) for prompt in (second, third)]
        for _ in range(20):
            engine.step()
            engine.check_invariants()
        assert all(other.is_done for other in others)
        assert waiting.state is State.WAITING
        manager.put_off = frozenset()  # type: ignore[attr-defined]
        engine.drain()
        assert waiting.state is State.FINISHED


def test_requests_are_admitted_in_order_and_their_number_is_bounded() -> None:
    admitted: list[Request] = []
    with Engine(tiny_model("llama"), OPTIONS) as engine:
        requests = [engine.add_request(prompt, SamplingParams(max_tokens=5)) for prompt in random_prompts(8, 9, 30)]
        while engine.has_requests:
            engine.step()
            running = [request for request in requests if request.state is State.RUNNING]
            assert len(running) <= OPTIONS.max_requests
            admitted += [request for request in requests if request.num_computed_tokens and request not in admitted]
    assert admitted == requests


def test_a_step_computes_no_more_tokens_than_it_may_and_the_connector_gets_all_of_it(steps: list[EngineStep]) -> None:
    tables: dict[str, list[int]] = {}
    with Engine(tiny_model("llama"), OPTIONS, CONFIG) as engine:
        for prompt in random_prompts(9, 10, 60, seed=8):
            engine.add_request(prompt, SamplingParams(max_tokens=12))
        while engine.has_requests:
            before = len(steps)
            plan_tables = {}
            engine.step()
            assert len(steps) == before + 1  # also when nothing is scheduled
            step = steps[-1]
            assert sum(each.num_scheduled_tokens for each in step.scheduled) <= OPTIONS.max_batch_tokens
            for each in step.scheduled:
                known = [] if each.block_table_is_new else tables[each.request_id]
                tables[each.request_id] = known + list(each.new_block_ids[0])
                plan_tables[each.request_id] = tables[each.request_id]
                assert len(tables[each.request_id]) * 4 >= each.num_computed_tokens + each.num_scheduled_tokens
            for request_id, table in plan_tables.items():
                if request_id in tables_of(engine):
                    assert table == tables_of(engine)[request_id][0]
            assert not step.preempted_request_ids & set(plan_tables)
        assert engine.counts.preemptions
        assert any(step.preempted_request_ids for step in steps)


def test_the_request_admitted_last_is_preempted_first() -> None:
    # Each fits alone, and they do not fit together.
    prompts = random_prompts(3, 20, 20, seed=9)
    with Engine(tiny_model("llama"), OPTIONS) as engine:
        requests = [engine.add_request(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
        while engine.has_requests:
            engine.step()
            engine.check_invariants()
        assert [request.num_preemptions > 0 for request in requests] == [False, True, True]


def test_hits_are_counted_once_however_often_a_request_is_admitted() -> None:
    prompts = random_prompts(4, 40, 48, seed=10)
    with Engine(tiny_model("llama"), OPTIONS, CONFIG) as engine:
        for _ in range(2):
            engine.generate(prompts, SamplingParams(max_tokens=20))
        assert engine.counts.preemptions
        assert engine.counts.prompt_tokens == 2 * sum(map(len, prompts))
        assert engine.counts.external_hit_tokens + engine.counts.device_hit_tokens < engine.counts.prompt_tokens
        assert engine.counts.external_hit_tokens


def scheduler_of(num_blocks: int, max_batch_tokens: int = 8, max_requests: int = 2) -> Scheduler:
    group = KVGroupLayout(GroupKind.FULL_ATTENTION, block_tokens=4, page_bytes=64)
    return Scheduler(KVCache((group,), num_blocks), max_batch_tokens, max_requests)


def compute(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Make one step without a model, and return the number of tokens that each request computes in it."""
    plan = scheduler.schedule()
    for each in plan.scheduled:
        scheduler.advance(each)
        if each.yields_token:
            each.request.append(1, 0.0, 0.0)
    scheduler.check_invariants()
    return [(each.request.request_id, each.num_tokens) for each in plan.scheduled]


def test_a_step_spends_its_budget_on_running_requests_first() -> None:
    scheduler = scheduler_of(num_blocks=16)
    for number, (name, length) in enumerate((("a", 10), ("b", 5), ("c", 3))):
        scheduler.add(Request(name, [number] * length, SamplingParams(max_tokens=5), 4))
    assert compute(scheduler) == [("a", 8)]
    assert compute(scheduler) == [("a", 2), ("b", 5)]
    assert compute(scheduler) == [("a", 1), ("b", 1)]  # two requests at most


def test_the_request_admitted_last_gives_its_blocks_back() -> None:
    scheduler = scheduler_of(num_blocks=4, max_batch_tokens=16)
    first, second = (Request(name, [number] * 8, SamplingParams(max_tokens=9), 4) for number, name in enumerate("ab"))
    for request in (first, second):
        scheduler.add(request)
    assert compute(scheduler) == [("a", 8), ("b", 8)]
    assert compute(scheduler) == [("a", 1)]
    assert (second.state, second.num_preemptions) == (State.WAITING, 1)
    scheduler.end(first, State.FINISHED)
    # It computes or finds its prompt again, and the token that it generated before.
    assert compute(scheduler)[0][0] == "b"
    assert second.state is State.RUNNING
