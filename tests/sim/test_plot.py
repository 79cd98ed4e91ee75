# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from kvoffload.errors import ConfigError
from kvoffload.sim import plot
from kvoffload.sim.driver import SimConfig
from kvoffload.sim.page import check_target
from kvoffload.sim.plot import write_plot
from kvoffload.sim.sweep import Report, sweep
from kvoffload.sim.trace import Trace


@pytest.fixture
def report(trace_of: Callable[..., Trace]) -> Report:
    trace = trace_of([[0, 1, 2], [0, 3, 4], [0, 1, 2], [0, 3, 4]] * 5)
    configs = [SimConfig(size, 2**30, disk_blocks=4, policy=name) for name in ("lru", "arc") for size in (2, 3, 9)]
    return sweep(trace, configs, processes=1)


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.html", b"<!doctype html>")])
def test_a_picture_and_a_page(report: Report, tmp_path: Path, name: str, magic: bytes) -> None:
    write_plot([report, report], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_drawing_that_fails_leaves_the_old_file(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.html").write_text("old")
    monkeypatch.setattr(plot, "as_page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_plot([report], tmp_path / "a.html")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("name", ["a.pdf", "a", "no/such/folder/a.png"])
def test_what_cannot_be_written_is_refused_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        check_target(tmp_path / name)
