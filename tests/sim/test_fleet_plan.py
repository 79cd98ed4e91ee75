# SPDX-License-Identifier: Apache-2.0
"""Test the cost of fleets, and the choice of the cheapest one."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.sim import sweep
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import FleetConfig, Prices, SharedStore, SimConfig
from kvoffload.sim.plan import Goal, Plan, make_fleet_plan
from kvoffload.sim.report import frontier, runs_table
from kvoffload.sim.sweep import report_of
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.verdict import verdict_of

SERVER = SimConfig(cpu_blocks=200, block_bytes=1 << 20, prefill_tokens_per_s=2000.0)


def test_the_price_of_an_hour() -> None:
    shared = SharedStore(4096, server_bytes_per_s=2e9)
    config = FleetConfig(replace(SERVER, cpu_blocks=1024, disk_blocks=2048), 3, shared=shared)
    prices = Prices(server=10, cpu=1, disk=0.5, shared=2, link=0.25)
    assert prices.of_fleet(config) == pytest.approx(3 * (10 + 1 + 1) + 4 * 2 + 3 * 2 * 0.25)
    with pytest.raises(ConfigError):
        Prices(server=-1)


def test_the_cheapest_fleet_that_meets_a_goal_is_the_smallest_where_servers_decide() -> None:
    trace = synthesize("chat", 120, 2).whole_blocks().stretched(0.02)
    goal, prices = Goal(ttft_s=6.0), Prices()
    made = make_fleet_plan(trace, [FleetConfig(SERVER, router="least-load")], goal, prices, 1, 16, 1)
    counts = (count for count in range(1, 17) if goal.is_met(simulate(trace, FleetConfig(SERVER, count, "least-load"))))
    assert made.chosen is not None
    assert 1 < made.chosen.config.servers == next(counts)
    never = make_fleet_plan(trace, [FleetConfig(SERVER)], Goal(ttft_s=1e-9), prices, 1, 2, 1)
    assert never.chosen is None
    assert verdict_of(never, prices).answer.startswith("No fleet")


def test_the_advice_names_what_was_not_needed() -> None:
    trace = synthesize("chat", 20, 2).whole_blocks()
    many = simulate(trace, FleetConfig(SERVER, 2))
    few = simulate(trace, FleetConfig(replace(SERVER, cpu_blocks=800), 1))
    report = report_of(trace, [many, few], are_fleets=True)
    for chosen, may_share, said in (
        (few, True, "1 server, no shared tier, fewer servers with more memory."),
        (many, False, "2 servers."),
    ):
        made = Plan(Goal(hit_rate=0.1), chosen, report, chosen, may_share=may_share)
        assert verdict_of(made, Prices()).answer.startswith(said)


def test_no_fleet_of_the_frontier_is_dearer_and_slower_than_another() -> None:
    trace = synthesize("chat", 80, 2).whole_blocks()
    results = [simulate(trace, FleetConfig(SERVER, count, "least-load")) for count in (1, 2, 4, 8)]
    prices = Prices()
    best = frontier(results, prices)
    keeping_up = [result for result in results if not result.is_overloaded]
    assert best[0] is min(keeping_up, key=lambda each: each.cost_per_million_tokens(prices))
    for one in best:
        for other in keeping_up:
            is_dearer = one.cost_per_million_tokens(prices) > other.cost_per_million_tokens(prices)
            assert not (is_dearer and one.ttft_s["p90"] > other.ttft_s["p90"])
    table = runs_table(report_of(trace, results, are_fleets=True), prices)
    assert {len(row) for row in table.rows} == {len(table.headings)}


def test_a_fleet_that_cannot_keep_up_is_not_on_the_frontier() -> None:
    trace = synthesize("chat", 80, 2).whole_blocks().stretched(0.01)
    results = [simulate(trace, FleetConfig(SERVER, count)) for count in (1, 2)]
    assert all(result.is_overloaded for result in results)
    assert frontier(results, Prices()) == []


@pytest.mark.long
def test_all_waves_of_a_plan_run_in_the_same_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[ProcessPoolExecutor] = []

    def make(*arguments: Any, **named: Any) -> ProcessPoolExecutor:
        pools.append(ProcessPoolExecutor(*arguments, **named))
        return pools[-1]

    monkeypatch.setattr(sweep, "ProcessPoolExecutor", make)
    trace = synthesize("chat", 20, 2).whole_blocks()
    goal = Goal(ttft_s=1e-9)
    in_pool = make_fleet_plan(trace, [FleetConfig(SERVER)], goal, Prices(), 1, 8, 2)
    assert len(pools) == 1
    here = make_fleet_plan(trace, [FleetConfig(SERVER)], goal, Prices(), 1, 8, 1)
    assert in_pool.report.results == here.report.results
