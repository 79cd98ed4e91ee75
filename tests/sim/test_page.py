# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from kvoffload.sim import page
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import FleetConfig, Prices, SharedStore, SimConfig
from kvoffload.sim.page import draw_reports
from kvoffload.sim.sweep import Report, sweep
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace


@pytest.fixture
def report(trace_of: Callable[..., Trace]) -> Report:
    trace = trace_of([[0, 1, 2], [0, 3, 4], [0, 1, 2], [0, 3, 4]] * 5)
    configs = [SimConfig(size, 2**30, disk_blocks=4, policy=name) for name in ("lru", "arc") for size in (2, 3, 9)]
    return sweep(trace, configs, processes=1)


@pytest.mark.long
@pytest.mark.parametrize(("is_page", "magic"), [(False, b"\x89PNG"), (True, b"<!doctype html>")])
def test_a_picture_and_a_page(report: Report, is_page: bool, magic: bytes) -> None:
    assert draw_reports([report, report][1 - is_page :], Prices(), is_page).startswith(magic)


def test_each_kind_of_run_is_a_line_and_the_server_without_tiers_one_across(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(page, "_png", lambda figure: figures.append(figure) or b"")
    without = simulate(report.trace, SimConfig(0, 2**30))
    draw_reports([replace(report, without=without)], Prices(), is_page=False)
    hits, times = figures[0].axes
    for axes in (hits, times):
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert {"lru, disk", "arc, disk", "without tiers"} <= lines.keys()
        assert [*lines["lru, disk"].get_xdata()] == sorted(lines["lru, disk"].get_xdata())
    assert times.get_yscale() == "log" and "logarithmic" in times.get_ylabel()
    shown = [line for line in hits.get_lines() if line.get_label() == "arc, disk"]
    assert [*shown[0].get_ydata()] == [100 * run.hit_rate for run in report.results if run.server.policy == "arc"]


def test_fleets_are_drawn_by_router_and_shared_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(page, "_png", lambda figure: figures.append(figure) or b"")
    server = SimConfig(cpu_blocks=200, block_bytes=1 << 20)
    fleets = [FleetConfig(server, count, "session", shared) for count in (2, 3) for shared in (None, SharedStore(99))]
    draw_reports([sweep(synthesize("chat", 20, 2), fleets, processes=1)], Prices(), is_page=False)
    labels = {line.get_label() for line in figures[0].axes[1].get_lines()}
    assert labels == {"density, session", "density, session, shared"}
