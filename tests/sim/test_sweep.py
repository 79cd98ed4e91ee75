# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import Prices, SimConfig
from kvoffload.sim.page import draw_reports
from kvoffload.sim.report import best_policy, knee_of, report_as_json, runs_table
from kvoffload.sim.sweep import knee, sweep
from kvoffload.sim.trace import Trace


def test_knee() -> None:
    assert knee([1, 2, 3, 4, 10], [10, 60, 62, 63, 64]) == 1
    assert knee([1, 2, 3], [5, 5, 5]) == 0, "more memory brings nothing"
    assert knee([1], [5]) == 0


def test_whole_blocks_leaves_partial_ones_out(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1, 2], [0, 3], [0, 1, 4]])
    trace.input_tokens[:] = [40, 32, 48]
    whole = trace.whole_blocks()
    assert whole.ids.tolist() == [0, 1, 0, 2, 0, 1, 3]
    assert whole.offsets.tolist() == [0, 2, 4, 7]


def test_reports_of_a_sweep(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1, 2], [0, 3, 4], [0, 1, 2], [0, 3, 4]] * 5)
    configs = [SimConfig(size, 2**30, policy=policy) for policy in ("lru", "arc") for size in (2, 3, 9)]
    reported: list[None] = []
    report = sweep(trace, configs, processes=1, progress=lambda: reported.append(None))
    assert len(reported) == 6
    assert [each.server for each in report.results] == configs
    for result, bound in zip(report.results, report.optimum_rates, strict=True):
        assert result.hit_rate <= bound <= report.reachable_rate
    assert best_policy(report) in ("lru", "arc")
    assert knee_of([run for run in report.results if run.server.policy == "lru"]) in report.results
    table = runs_table(report, Prices())
    assert "disk" not in table.headings
    assert [len(row) for row in table.rows] == [len(table.headings)] * 6
    assert json.loads(json.dumps(report_as_json(report, Prices())))["accesses"] == 60
    assert draw_reports([report], Prices(), is_page=True).count(b"<tr>") == 7


def test_the_knee_is_that_of_the_largest_disk(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1, 2], [3, 4, 5]] * 3)
    report = sweep(trace, [SimConfig(2, 2**30, policy="lru", disk_blocks=size) for size in (4, 16, 8)], processes=1)
    assert knee_of(report.results).server.disk_blocks == 16


def test_replays_give_operators_no_advice(trace_of: Callable[..., Trace], caplog: pytest.LogCaptureFixture) -> None:
    trace = trace_of([[3 * number, 3 * number + 1, 3 * number + 2] for number in range(4)] * 5)
    trace.output_tokens[:] = 3  # the steps that decode show how long a prompt took
    slow = SimConfig(5, 10**6, disk_blocks=16, disk_read_bytes_per_s=1e8, cascade="on_store")
    simulate(trace, slow)
    assert caplog.records
    caplog.clear()
    sweep(trace, [slow], processes=1)
    assert caplog.text == ""
