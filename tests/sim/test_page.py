# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from kvoffload.sim import page
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import FleetConfig, Prices, SimConfig
from kvoffload.sim.page import draw_fleets, draw_sweeps
from kvoffload.sim.result import Result
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
    assert draw_sweeps([report, report][1 - is_page :], is_page).startswith(magic)


def drawn_marks(results: list[Result], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The axes of the drawing."""
    figures: list[Any] = []
    monkeypatch.setattr(page, "_png", lambda figure: figures.append(figure) or b"")
    draw_fleets([(synthesize("chat", 20, 2), results)], Prices(), is_page=False)
    return figures[0].axes[0]


def test_fleets_at_one_place_are_rings_around_each_other_with_one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = synthesize("chat", 20, 2).whole_blocks()
    server = SimConfig(cpu_blocks=200, block_bytes=1 << 20)
    one = simulate(trace, FleetConfig(server, 1))
    other = replace(one, config=replace(one.config, router="session"))
    axes = drawn_marks([one, other], monkeypatch)
    sizes = [float(mark.get_sizes()[0]) for mark in axes.collections]
    assert len(set(sizes)) == 2 and all(len(mark.get_facecolors()) == 0 for mark in axes.collections)
    assert [text.get_text() for text in axes.texts] == ["1"]


def test_a_logarithmic_axis_says_so_and_looks_it(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    trace = synthesize("chat", 20, 2).whole_blocks()
    axes = drawn_marks([simulate(trace, FleetConfig(SimConfig(200, 1 << 20), 1))], monkeypatch)
    assert axes.get_yscale() == "log" and "logarithmic" in axes.get_ylabel()
    assert len(axes.yaxis.get_minorticklocs()) > len(axes.yaxis.get_majorticklocs())
