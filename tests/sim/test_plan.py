# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.conftest import leave_out_loads

from kvoffload.errors import ConfigError
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import FleetConfig, Prices, SimConfig
from kvoffload.sim.plan import Goal, Plan, highest_load, make_fleet_plan, make_plan
from kvoffload.sim.result import Result
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import NO_SESSION, Trace
from kvoffload.sim.verdict import sizes_of, verdict_of

BASE = SimConfig(1, 2**20, prefill_tokens_per_s=60_000.0, policy="lru")
PRICES = Prices()
TRACE = synthesize("chat", requests=24, seed=1)


def price(run: Result) -> float:
    return PRICES.of_tiers(run.server)


@cache
def without_disk() -> Plan:
    return make_plan(TRACE, BASE, Goal(hit_rate=0.3), PRICES, max_disk_blocks=0, processes=1)


@pytest.mark.usefixtures("no_loads")
def test_the_cheapest_run_that_meets_the_goal_is_chosen() -> None:
    plan = without_disk()
    assert plan.chosen is not None and plan.goal.is_met(plan.chosen)
    assert plan.price(PRICES) == price(plan.chosen)
    assert plan.price(PRICES) == min(price(run) for run in plan.report.results if plan.goal.is_met(run))
    assert {run.server.disk_blocks for run in plan.report.results} == {0}
    assert len(plan.report.results) == len(plan.report.optimum_rates)
    again = simulate(TRACE.whole_blocks(), replace(BASE, cpu_blocks=plan.chosen.server.cpu_blocks))
    assert again == plan.chosen


@pytest.mark.usefixtures("no_loads")
def test_a_cheap_disk_makes_the_plan_cheaper() -> None:
    with_disk = make_plan(TRACE, BASE, Goal(hit_rate=0.3), PRICES, max_disk_blocks=TRACE.num_unique, processes=1)
    assert with_disk.price(PRICES) < without_disk().price(PRICES)
    assert with_disk.chosen is not None and with_disk.chosen.server.disk_blocks > 0


@pytest.mark.usefixtures("no_loads")
def test_limits_are_kept_and_an_unreachable_goal_says_how_far_one_gets() -> None:
    plan = make_plan(TRACE, BASE, Goal(hit_rate=0.99), PRICES, max_cpu_blocks=100, max_disk_blocks=0, processes=1)
    assert plan.chosen is None
    assert plan.best.hit_rate == max(run.hit_rate for run in plan.report.results)
    plan = make_plan(TRACE, BASE, Goal(hit_rate=0.05), PRICES, max_cpu_blocks=200, max_disk_blocks=0, processes=1)
    assert max(run.server.cpu_blocks for run in plan.report.results) <= 200


@pytest.mark.usefixtures("no_loads")
def test_the_largest_size_tried_holds_the_states_too() -> None:
    trace, base = TRACE.whole_blocks(), replace(BASE, state_slots=10)
    everything = simulate(trace, replace(base, cpu_blocks=20 * trace.num_unique))
    goal = Goal(hit_rate=everything.hit_rate)
    plan = make_plan(trace, base, goal, PRICES, max_disk_blocks=0, processes=1)
    assert plan.chosen is not None and plan.chosen.hit_rate == everything.hit_rate


def test_nothing_is_bought_where_the_device_reaches_the_goal() -> None:
    goal = Goal(hit_rate=0.3)
    enough = replace(BASE, gpu_blocks=TRACE.whole_blocks().num_unique)
    plan = make_plan(TRACE, enough, goal, PRICES, max_disk_blocks=0, processes=1)
    assert plan.chosen is plan.report.without
    assert plan.chosen is not None and plan.chosen.server.cpu_blocks == plan.price(PRICES) == 0
    assert plan.chosen.hit_rate == plan.chosen.hit_blocks["device"] / plan.chosen.accesses >= 0.3
    assert plan.best is plan.chosen and all(plan.goal.is_met(run) for run in plan.report.results)


@pytest.mark.parametrize(
    "goal", [{}, {"hit_rate": 0.1, "ttft_s": 1.0}, {"hit_rate": 0.0}, {"hit_rate": 1.1}, {"ttft_s": 0.0}]
)
def test_goals_that_make_no_sense(goal: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Goal(**goal)


@pytest.mark.parametrize("ttft_s", [0.2, 1.0])
def test_the_highest_load_is_found_from_far_below(ttft_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server carries the load that is found, and not a fourth more."""
    searched: list[float] = []

    def replayed(trace: Trace, config: SimConfig, **options: Any) -> Result:
        searched.append(trace.requests_per_s)
        return simulate(trace, config, **options)

    monkeypatch.setattr("kvoffload.sim.plan.simulate", replayed)
    trace = synthesize("chat", 300, 4).whole_blocks()
    goal, hashes = Goal(ttft_s=ttft_s), trace.hashes()
    for cpu_blocks in (0, 4000):
        server = replace(BASE, cpu_blocks=cpu_blocks, gpu_blocks=1500, step_s=0.005, decode_s=1e-4)
        at_first = simulate(trace, server)
        assert at_first.utilisation < 0.1
        searched.clear()
        found = highest_load(trace, (at_first, goal, None), hashes=hashes)
        assert len(searched) <= 8
        searched.clear()
        again = highest_load(trace, (at_first, goal, found), hashes=hashes)
        assert len(searched) <= 4, "the search began at the load that was found before"
        assert found <= again
        for load, is_carried in ((again / 1.03, True), (found / 0.8, False)):
            faster = trace.at_rate(load)
            assert goal.is_soon_enough(simulate(faster, server, hashes=hashes)) == is_carried


def prompts(times_s: list[float]) -> Trace:
    """Prompts of 4 blocks that nobody repeats, with one token to answer. They arrive at these times."""
    number = len(times_s)
    return Trace(
        name="prompts",
        block_tokens=1000,
        times_s=np.array(times_s, dtype=float),
        input_tokens=np.full(number, 4000),
        output_tokens=np.ones(number, dtype=np.int64),
        sessions=np.full(number, NO_SESSION),
        offsets=4 * np.arange(number + 1),
        ids=np.arange(4 * number, dtype=np.int32),
    )


def agents() -> Trace:
    """Their number grows to the end: the queue is long before a server is busy all the time."""
    return synthesize("agents", 80, 2).whole_blocks()


def bursts() -> Trace:
    """10 requests at once every minute."""
    return prompts(sorted([60.0 * at for at in range(20)] * 10))


def rush() -> Trace:
    """A request every 20 s, and in the end 10 each second."""
    return prompts([20.0 * at for at in range(50)] + [1000 + 0.1 * at for at in range(50)])


@pytest.mark.parametrize("trace", [agents(), bursts(), rush()], ids=["agents", "bursts", "rush"])
@pytest.mark.parametrize("goal", [Goal(hit_rate=0.7), Goal(ttft_s=5.0)], ids=["hits", "ttft"])
def test_the_highest_load_does_not_depend_on_the_load_that_is_asked(trace: Trace, goal: Goal) -> None:
    server = SimConfig(trace.num_unique, 2**20, gpu_blocks=312, prefill_tokens_per_s=2e4, step_s=0.006, decode_s=2e-5)
    hashes, found = trace.hashes(), []
    for rate in (1e-3, 0.2, 5.0, 1000.0):
        asked = trace.at_rate(rate)
        found.append(highest_load(asked, (simulate(asked, server, hashes=hashes), goal, None), hashes=hashes))
        faster = trace.at_rate(1.12 * found[-1])
        assert goal.is_soon_enough(simulate(trace.at_rate(found[-1]), server, hashes=hashes))
        assert not goal.is_soon_enough(simulate(faster, server, hashes=hashes))
    assert max(found) < 1.12 * min(found)


def test_a_server_that_works_off_a_long_queue_at_the_end_does_not_keep_up() -> None:
    """A prompt takes 4 s. In the first 900 s the server is idle most of the time. Then requests come every 2 s."""
    server, quiet = SimConfig(0, 2**20, prefill_tokens_per_s=1000.0), [20.0 * at for at in range(45)]
    for more, is_overloaded in ((22, False), (50, True)):
        rush = [900 + 2.0 * at for at in range(more)]
        run = simulate(prompts(quiet + rush), server)
        assert run.utilisation < 0.5
        assert run.answering_s - run.arriving_s == pytest.approx(2 * more + 2)
        assert run.is_overloaded == is_overloaded
    # Of a trace of three hours, the same queue counts as if it had lasted one.
    for more, is_overloaded in ((80, False), (120, True)):
        day = [20.0 * at for at in range(540)]
        run = simulate(prompts(day + [day[-1] + 2.0 * at for at in range(more)]), server)
        assert run.utilisation < 0.5 and run.is_overloaded == is_overloaded
    # The last prompt of a server that was idle before it is no queue, however long it takes.
    assert not simulate(prompts([0.0, 5.0, 10.0]), server).is_overloaded


@pytest.mark.usefixtures("no_loads")
def test_a_load_that_no_server_carries_buys_nothing() -> None:
    goal = Goal(hit_rate=0.7)
    trace = synthesize("agents", 80, 2).at_rate(1.0)
    server = SimConfig(1, 2**20, gpu_blocks=312, step_s=0.006, decode_s=2e-5)
    plan = make_plan(trace, server, goal, PRICES, max_disk_blocks=0, processes=1)
    assert any(goal.hit_rate <= run.hit_rate and run.utilisation < 0.9 for run in plan.report.results)
    assert plan.chosen is None


@pytest.mark.parametrize("goal", [Goal(ttft_s=0.5), Goal(ttft_s=0.1)])
def test_a_search_stops_replays_of_loads_that_are_too_high(goal: Goal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stopped replay is repeated to its end: the server does not carry the load there either."""
    trace = synthesize("chat", 300, 4).whole_blocks()
    server = replace(BASE, cpu_blocks=400, gpu_blocks=1500, decode_s=1e-4)
    at_first, ran = simulate(trace, server), list[tuple[Trace, Result]]()

    def replayed(trace: Trace, config: SimConfig, **options: Any) -> Result:
        ran.append((trace, simulate(trace, config, **options)))
        return ran[-1][1]

    monkeypatch.setattr("kvoffload.sim.plan.simulate", replayed)
    highest_load(trace, (at_first, goal, None), hashes=trace.hashes())
    ended = [(each, run) for each, run in ran if run.sum_of("requests") < len(trace)]
    assert ended and len(ran) <= 8
    for faster, so_far in ended:
        whole = simulate(faster, server)
        assert not goal.is_soon_enough(so_far) and not goal.is_soon_enough(whole)
    ran.clear()
    assert highest_load(trace, (at_first, Goal(ttft_s=1e-6), None), hashes=trace.hashes()) == 0
    assert len(ran) == 1, "nothing is faster than an idle server"


@pytest.mark.usefixtures("no_loads")
def test_a_disk_that_costs_more_than_one_that_meets_the_goal_is_not_replayed() -> None:
    trace = TRACE.whole_blocks()

    def tried(hit_rate: float, max_cpu_blocks: int | None, processes: int = 1) -> tuple[Plan, list[Result]]:
        goal, limits = Goal(hit_rate=hit_rate), (max_cpu_blocks, trace.num_unique)
        plan = make_plan(trace, BASE, goal, PRICES, *limits, processes=processes)
        return plan, [run for run in plan.report.results if run.server.disk_blocks]

    _, every = tried(0.99, None)
    plan, some = tried(0.2, None)
    assert tried(0.2, None, processes=2)[1] == some
    assert every[-1] not in some and some[: len(every) - 1] == every[:-1]
    assert plan.goal.is_met(every[-2]) and price(every[-1]) > price(every[-2])
    # Host memory of all blocks shows the ceiling. If less is allowed, the largest disk shows it.
    plan, some = tried(0.2, 40)
    assert max(some, key=price).server.disk_blocks == trace.num_unique
    assert max(some, key=price).hit_rate == max(run.hit_rate for run in tried(0.99, 40)[0].report.results)


def test_first_requests_that_arrive_at_once_do_not_hide_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.sim.plan._CAPACITY_REQUESTS", 8)
    times_s = TRACE.times_s.copy()
    times_s[:8] = times_s[0]
    trace = replace(TRACE, times_s=times_s)
    plan = make_plan(trace, BASE, Goal(hit_rate=0.3), PRICES, max_disk_blocks=0, processes=1)
    assert len(plan.rows) > 2
    assert all(row.requests_per_s is not None and 0 < row.requests_per_s < 1e6 for row in plan.rows)


@pytest.mark.parametrize("prices", [{"cpu": -1.0}, {"link": math.nan}, {"disk": math.inf}])
def test_prices_that_make_no_sense(prices: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Prices(**prices)


@pytest.mark.usefixtures("no_loads")
def test_a_disk_that_does_not_pay_is_not_bought() -> None:
    # It reads 20 MB a second, and the engine computes 16 tokens of 1 MiB in a quarter of a millisecond.
    slow = replace(BASE, disk_read_bytes_per_s=20e6)
    without = without_disk()
    with_disk = make_plan(TRACE, slow, without.goal, PRICES, max_disk_blocks=TRACE.num_unique // 2, processes=1)
    assert with_disk.chosen is not None and without.chosen is not None
    assert replace(slow, cpu_blocks=without.chosen.server.cpu_blocks) == with_disk.chosen.server
    tried = [run for run in with_disk.report.results if run.server.disk_blocks]
    assert all(
        run.sum_of("declined_blocks") for run in tried if run.server.cpu_blocks < without.chosen.server.cpu_blocks
    )


def day(rush: int) -> Trace:
    """Two requests an hour, and ``rush`` more in the thirteenth hour. Each prompt has 4 blocks of 5,000 tokens, and
    begins with the same two."""
    times_s = np.sort(np.concatenate((np.arange(48) * 1800.0, 43_200 + np.arange(rush) * 3600 / rush)))
    number = len(times_s)
    own = 2 + np.arange(2 * number).reshape(number, 2)
    ids = np.hstack((np.tile(np.arange(2), (number, 1)), own)).astype(np.int32)
    return Trace(
        name="day",
        block_tokens=5000,
        times_s=times_s,
        input_tokens=np.full(number, 20_001),
        output_tokens=np.ones(number, dtype=np.int64),
        sessions=np.full(number, NO_SESSION),
        offsets=4 * np.arange(number + 1),
        ids=ids.reshape(-1),
    )


def test_an_overloaded_hour_does_not_hide_in_a_quiet_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt takes 20 s to compute, and 10 s after a hit."""
    server = SimConfig(1, 5 * 2**20, prefill_tokens_per_s=1000.0)
    options: dict[str, Any] = {"max_disk_blocks": 0, "processes": 1}
    with monkeypatch.context() as patched:
        leave_out_loads(patched)
        plan = make_plan(day(240), server, Goal(hit_rate=0.4), PRICES, **options)
    assert plan.without.is_overloaded and plan.without.utilisation == 1
    assert plan.chosen is not None and 0.65 < plan.chosen.utilisation < 0.75
    plan = make_plan(day(400), server, Goal(hit_rate=0.4), PRICES, **options)
    assert plan.chosen is None and all(run.is_overloaded for run in plan.report.results)
    # A server carries 162 requests an hour without tiers, and 324 with host memory.
    verdict = verdict_of(plan, PRICES)
    assert "Use 3 servers without tiers (0.0% hits), or 2 servers with" in verdict.answer
    assert verdict.settings
    assert "in its busiest hour" in verdict.load


@pytest.mark.usefixtures("no_loads")
def test_the_row_that_costs_least_for_its_load_saves_servers() -> None:
    """A search for a load ends within 5%, so a difference of less than 10% between two of them says nothing."""
    plan = make_plan(TRACE, BASE, Goal(hit_rate=0.3), PRICES, max_disk_blocks=TRACE.num_unique, processes=1)
    names = [row.name for row in plan.rows]
    assert names == ["no cache", "goal", "knee", "ceiling"]

    def saving(prices: Prices, *loads: float) -> str:
        rows = (replace(row, requests_per_s=load) for row, load in zip(plan.rows, loads, strict=True))
        return verdict_of(replace(plan, rows=tuple(rows), chosen=chosen), prices).load

    chosen = plan.chosen
    said = saving(PRICES, 1.0, 1.5, 1.6, 2.0)
    assert "67 servers as in row goal or 50 servers as in row ceiling" in said, "the row to buy comes first"
    chosen = None

    assert "row ceiling" in saving(PRICES, 1.0, 1.5, 1.6, 2.0)
    assert "row goal" in saving(replace(PRICES, cpu=10.0), 1.0, 1.95, 1.9, 2.0), "goal costs least"
    assert "row goal" in saving(replace(PRICES, cpu=1e4), 1.0, 1.95, 1.9, 2.0), "all cost more than they save"
    assert "row knee" in saving(PRICES, 1.0, 1.5, 2.0, 0.0)
    for loads in (1.0, 1.05, 1.08, 1.09), (0.0, 1.0, 2.0, 3.0):
        assert "in row" not in saving(PRICES, *loads)
    free = saving(replace(PRICES, cpu=0.0), 1.0, 1.5, 1.6, 2.0)
    assert "row ceiling" in free and "pays" not in free
    late = {name: 10 * seconds for name, seconds in plan.without.ttft_s.items()}
    later = (replace(row, run=replace(row.run, ttft_s=late)) for row in plan.rows[1:])
    plan = replace(plan, rows=(plan.rows[0], *later))
    said = saving(PRICES, 1.0, 1.5, 1.6, 2.0)
    assert "later" in said and "in row" not in said


@pytest.mark.parametrize(("ttft_s", "remedy"), [(0.5, "--ttft"), (10.0, "plan a fleet")])
def test_a_goal_that_no_load_reaches_says_why(ttft_s: float, remedy: str) -> None:
    """A prompt takes 4 s alone, and ten of them 40 s."""
    server = SimConfig(1, 2**20, prefill_tokens_per_s=1000.0)
    plan = make_plan(bursts(), server, Goal(ttft_s=ttft_s), PRICES, max_disk_blocks=0, processes=1)
    assert all(row.requests_per_s == 0 for row in plan.rows)
    verdict = verdict_of(plan, PRICES)
    assert remedy in (verdict.answer + verdict.load)
    assert ("arrive at the same time" in verdict.load + verdict.answer) == (remedy != "--ttft")


@pytest.mark.usefixtures("no_loads")
def test_servers_for_a_load_reach_the_goal_or_cost_least_together() -> None:
    trace = TRACE.at_rate(990.0)
    plan = make_plan(trace, BASE, Goal(hit_rate=0.3), PRICES, max_disk_blocks=trace.num_unique, processes=1)
    assert [row.name for row in plan.rows] == ["no cache", "goal", "knee", "ceiling", "disk"]
    assert all(row.run.is_overloaded for row in plan.rows)
    assert plan.rows[0].run.hit_rate < 0.3 <= plan.rows[1].run.hit_rate
    assert price(plan.rows[1].run) == min(price(run) for run in plan.report.results if run.hit_rate >= 0.3)

    def answer(goal: Goal, *loads: float) -> str:
        rows = (replace(row, requests_per_s=load) for row, load in zip(plan.rows, loads, strict=True))
        return verdict_of(replace(plan, rows=tuple(rows), goal=goal), PRICES).answer

    def sizes(at: int) -> str:
        return f"with {sizes_of(plan.rows[at].run.server)} each"

    hits, soon = Goal(hit_rate=0.3), Goal(ttft_s=1.0)
    assert f"Use 10 servers without tiers (0.0% hits), or 5 servers {sizes(2)}" in answer(hits, 100, 150, 200, 100, 100)
    assert f"Use 10 servers without tiers (0.0% hits), or 10 servers {sizes(1)}" in answer(hits, *[100] * 5)
    assert "Use 10 servers without tiers." in answer(soon, *[100] * 5)
    assert f"Use 7 servers {sizes(1)}" in answer(soon, 0, 150, 100, 100, 100)
    assert "--ttft" in answer(soon, *[0] * 5)
    rows = tuple(replace(row, requests_per_s=100.0 * at) for at, row in enumerate(plan.rows, 1))
    for hit_rate, is_reached in ((0.3, True), (0.99, False)):
        verdict = verdict_of(replace(plan, rows=rows, goal=Goal(hit_rate=hit_rate)), PRICES)
        assert verdict.settings[0].startswith("#") != is_reached


@pytest.mark.parametrize("goal", [Goal(hit_rate=0.01), Goal(ttft_s=1e6)])
def test_nothing_is_bought_if_an_engine_rejects_every_request(goal: Goal) -> None:
    shortest = int((TRACE.input_tokens + TRACE.output_tokens).min())
    small = replace(BASE, gpu_blocks=shortest // TRACE.block_tokens - 1)
    plan = make_plan(TRACE, small, goal, PRICES, max_disk_blocks=0, processes=1)
    fleets = [FleetConfig(replace(small, cpu_blocks=size)) for size in (0, TRACE.num_unique)]
    of_fleet = make_fleet_plan(TRACE.whole_blocks(), fleets, goal, PRICES, 1, 2, 1)
    for each in plan, of_fleet:
        verdict = verdict_of(each, PRICES)
        assert verdict.answer.startswith("Buy nothing: an engine rejects every request")
        assert each.chosen is None and not verdict.settings and not verdict.load
    one_more = replace(BASE, gpu_blocks=shortest // TRACE.block_tokens)
    assert make_plan(TRACE, one_more, goal, PRICES, max_disk_blocks=0, processes=1).chosen is not None
