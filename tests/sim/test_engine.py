# SPDX-License-Identifier: Apache-2.0
"""One simulated engine by hand. ``tests/integration/test_simulator_agrees.py`` compares it with a real engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.sizes import by_size

from kvoffload.connector import OffloadingConnectorScheduler
from kvoffload.sim.cluster import Machine, simulate
from kvoffload.sim.config import SimConfig
from kvoffload.sim.engine import Engine, Hits
from kvoffload.sim.trace import Trace

TraceOf = Callable[..., Trace]

SERVER = SimConfig(
    cpu_blocks=1000,
    block_bytes=100,
    prefill_tokens_per_s=16.0,
    load_bytes_per_s=1000.0,
    load_latency_s=0.0,
    chunk_tokens=32,
    policy="lru",
)
"""The times: a second to compute a block of 16 tokens, and a tenth of that to load it."""


def asked(trace_of: TraceOf, prompts: list[list[int]], times_s: list[float], outputs: list[int] | None = None) -> Trace:
    """Prompts with one token more than their blocks have."""
    trace = trace_of(prompts)
    return replace(
        trace,
        times_s=np.array(times_s, dtype=float),
        input_tokens=trace.input_tokens + 1,
        output_tokens=np.array(outputs or [1] * len(prompts)),
    )


def first_tokens(trace: Trace, config: SimConfig) -> dict[int, float]:
    found: dict[int, float] = {}
    simulate(trace, config, on_request=lambda request, _, __, time_s: found.update({request: time_s}))
    return found


def hits(trace: Trace, config: SimConfig) -> list[Hits]:
    found: dict[int, Hits] = {}
    simulate(trace, config, on_request=lambda request, _, hit, __: found.update({request: hit}))
    return [found[request] for request in range(len(trace))]


def test_a_prefix_is_served_from_the_highest_tier_that_has_it(trace_of: TraceOf) -> None:
    trace = trace_of([[0, 1, 2], [0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3]])
    trace = replace(trace, times_s=np.arange(4) * 100.0, input_tokens=np.array([48, 64, 48, 64]))
    found = hits(trace, replace(SERVER, gpu_blocks=5))
    # Of the last prompt the device has lost blocks 3 and 2. Its last token is computed, so block 3 is never a hit.
    assert found == [Counter(), Counter(device=3), Counter(), Counter(device=2, host=1)]


def test_a_step_costs_what_it_computes(trace_of: TraceOf) -> None:
    trace = asked(trace_of, [[0, 1, 2]], [5.0], [4])
    config = replace(SERVER, step_s=0.5, decode_s=0.25, prompt_context_s=0.01, decode_context_s=0.001)
    found: dict[str, float] = {}
    result = simulate(trace, config, on_request=lambda _, __, ___, time_s: found.update(first=time_s))
    first_s = 0.5 + 32 / 16 + 0.01 * 32 * 16  # 32 tokens, with half as many before them on average
    second_s = 0.5 + 17 / 16 + 0.01 * 17 * (32 + 8.5)
    assert found["first"] == pytest.approx(5.0 + first_s + second_s)
    decode_s = [0.5 + 0.25 + 0.001 * (49 + generated) for generated in (1, 2, 3)]
    assert result.duration_s == pytest.approx(first_s + second_s + sum(decode_s))


def test_prompts_share_a_step_and_do_not_wait_for_each_other(trace_of: TraceOf) -> None:
    trace = asked(trace_of, [[0], [1]], [0.0, 0.0])
    first, second = first_tokens(trace, replace(SERVER, chunk_tokens=64)).values()
    assert first == second == pytest.approx(34 / 16)
    one_by_one = first_tokens(trace, replace(SERVER, chunk_tokens=64, max_requests=1))
    assert [*one_by_one.values()] == pytest.approx([17 / 16, 34 / 16])


def test_who_waits_for_a_load_does_not_delay_others(trace_of: TraceOf) -> None:
    trace = asked(trace_of, [[0, 1, 2, 3], [0, 1, 2, 3], [9]], [0.0, 100.0, 100.0])
    slow = replace(SERVER, load_bytes_per_s=50.0, chunk_tokens=128)  # 2 s for each block
    found = first_tokens(trace, slow)
    assert found[2] == pytest.approx(100.0 + 17 / 16)
    assert found[1] == pytest.approx(100.0 + 17 / 16 + 8.0 + 1 / 16), "a load starts after its step's forward pass"
    reference = first_tokens(trace, replace(slow, engine="reference"))
    assert reference[1] == pytest.approx(100.0 + 8.0 + 1 / 16)


def test_decoding_and_prompts_share_steps(trace_of: TraceOf) -> None:
    config = replace(SERVER, cpu_blocks=0, decode_s=0.5, chunk_tokens=64)
    trace = asked(trace_of, [[0], [1, 2]], [0.0, 1.1], [100, 1])
    found = first_tokens(trace, config)
    assert found[0] == pytest.approx(17 / 16)
    # The second request arrives while a token is decoded, and then both are in one step.
    assert found[1] == pytest.approx(17 / 16 + 0.5 + 0.5 + 33 / 16)


def test_a_hit_within_a_step_delays_only_that_step(trace_of: TraceOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam for hits within a step: the connector's answer says whether a load is asynchronous."""
    trace = asked(trace_of, [[0, 1], [0, 1], [5]], [0.0, 100.0, 0.0], [1, 1, 200])
    trace = replace(trace, times_s=np.array([0.0, 100.0, 100.0]))
    config = replace(SERVER, decode_s=0.5, chunk_tokens=64)
    between = first_tokens(trace, config)[1]
    answer = OffloadingConnectorScheduler.get_num_new_matched_tokens

    def synchronous(self: Any, request: Any, computed: int) -> tuple[int | None, bool]:
        return answer(self, request, computed)[0], False

    monkeypatch.setattr(OffloadingConnectorScheduler, "get_num_new_matched_tokens", synchronous)
    within = first_tokens(trace, config)[1]
    assert within == pytest.approx(100.0 + 0.2 + (1 + 17) / 16)
    assert within < between


def test_a_full_pool_preempts_who_came_last_and_all_are_served(trace_of: TraceOf) -> None:
    prompts = [[10 * request + block for block in range(3)] for request in range(4)]
    trace = asked(trace_of, prompts, [0.0] * 4, [60] * 4)
    config = replace(SERVER, cpu_blocks=0, gpu_blocks=18, decode_s=0.01, chunk_tokens=512)
    served: list[int] = []
    result = simulate(trace, config, on_request=lambda request, *_: served.append(request))
    assert sorted(served) == [0, 1, 2, 3]
    assert result.sum_of("preemptions") > 0
    assert result.sum_of("computed_tokens") > trace.total_input_tokens, "what was lost is computed again"
    roomy = simulate(trace, replace(config, gpu_blocks=40))
    assert roomy.sum_of("preemptions") == 0
    assert roomy.sum_of("computed_tokens") == trace.total_input_tokens


def test_a_request_larger_than_the_pool_is_served_alone(trace_of: TraceOf) -> None:
    trace = asked(trace_of, [[*range(50)], [60], [*range(50)]], [0.0, 0.0, 500.0])
    served: list[int] = []
    config = replace(SERVER, cpu_blocks=4, gpu_blocks=3, disk_blocks=100, chunk_tokens=160)
    result = simulate(trace, config, on_request=lambda request, *_: served.append(request))
    assert sorted(served) == [0, 1, 2]
    assert result.hit_blocks["device"] == 1, "of the head's three blocks the other request took two"
    assert result.sum_of("refused_stores") > 0


def random_trace(trace_of: TraceOf, seed: int) -> Trace:
    chance = random.Random(seed)
    prompts = []
    for _ in range(30):
        family = chance.randrange(4)
        prompts.append([100 * family + block for block in range(chance.randint(1, 12))])
    times = sorted(chance.uniform(0, chance.choice([5, 60, 400])) for _ in prompts)
    return asked(trace_of, prompts, times, [chance.choice([1, 1, 2, 30, 90]) for _ in prompts])


def random_config(seed: int) -> SimConfig:
    chance = random.Random(-seed)
    return replace(
        SERVER,
        cpu_blocks=chance.choice([0, 3, 20, 200]) or 8,
        gpu_blocks=chance.choice([0, 6, 15, 40, 200]),
        disk_blocks=chance.choice([0, 0, 30, 300]),
        prefill_tokens_per_s=chance.choice([16.0, 200.0]),
        step_s=chance.choice([0.0, 0.02]),
        decode_s=chance.choice([0.001, 0.01]),
        decode_context_s=chance.choice([0.0, 1e-5]),
        chunk_tokens=chance.choice([16, 64, 1024]),
        max_requests=chance.choice([1, 3, 64]),
        disk_read_bytes_per_s=chance.choice([50.0, 5000.0]),
        disk_write_bytes_per_s=chance.choice([50.0, 5000.0]),
        load_policy=chance.choice(["cost", "always"]),
        state_slots=chance.choice([0, 0, 2]),
    )


@pytest.mark.parametrize("seed", range(by_size(12, 60)))
def test_any_traffic_is_served_once_and_nothing_is_left(seed: int, trace_of: TraceOf) -> None:
    trace, config = random_trace(trace_of, seed), random_config(seed)
    first: list[tuple[int, Hits, float]] = []
    ended: list[int] = []
    machine = Machine(
        trace,
        config,
        trace.hashes(),
        on_first_token=lambda number, hits: first.append((number, hits, machine.clock.now_s)),
        on_end=ended.append,
    )
    engine, clock = machine.engine, machine.clock
    arrivals = [*enumerate(trace.times_s.tolist())]
    next_s: float | None = None
    while arrivals or next_s is not None:
        if arrivals and (next_s is None or arrivals[0][1] < next_s):
            number, time_s = arrivals.pop(0)
            engine.add(number)
            if engine.is_stepping:
                next_s = engine.interrupt(time_s) or next_s
                continue
            clock.advance_to(time_s)
        else:
            assert next_s is not None and next_s >= clock.now_s
            clock.advance_to(next_s)
            engine.end()
        engine.check_invariants()
        next_s = engine.begin()
        engine.check_invariants()
    everyone = [*range(len(trace))]
    assert sorted(number for number, _, _ in first) == sorted(ended) == everyone
    assert engine.num_requests == 0
    assert all(time_s >= trace.times_s[number] for number, _, time_s in first)
    found = sum(hits.total() for _, hits, _ in first) * trace.block_tokens
    lost = engine.computed_tokens + found - trace.total_input_tokens
    assert lost >= 0 if engine.preemptions else lost == 0


@pytest.mark.parametrize("seed", range(by_size(8, 40)))
def test_many_steps_at_once_are_the_same_steps_one_by_one(
    seed: int, trace_of: TraceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tier, whose blocks the connector would look for at other times."""
    trace, config = random_trace(trace_of, seed), replace(random_config(seed), cpu_blocks=0, disk_blocks=0)
    at_once = simulate(trace, config)
    monkeypatch.setattr(Engine, "_only_decodes", lambda self, now_s: None)
    one_by_one = simulate(trace, config)
    assert at_once.ttft_s == pytest.approx(one_by_one.ttft_s)
    assert at_once.duration_s == pytest.approx(one_by_one.duration_s)
    assert at_once.servers[0].preemptions == one_by_one.servers[0].preemptions
