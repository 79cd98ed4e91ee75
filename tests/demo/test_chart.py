# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvoffload.cli import main
from kvoffload.demo.chart import chart

SVG = "{http://www.w3.org/2000/svg}"


def figures(**ways: list[float]) -> dict[str, Any]:
    turns = [{"median_s": 0.0}] * max(map(len, ways.values()))
    return {
        "workload": {"turns": len(turns)},
        "ways": [
            {"name": name, "time_to_first_token": {"by_turn": [{"median_s": value} for value in curve]}}
            for name, curve in ways.items()
        ],
    }


def test_each_way_is_a_line_that_ends_with_its_name_and_last_turn() -> None:
    tree = ElementTree.fromstring(
        chart(figures(none=[0.1, 0.2, 0.4], device=[0.1, 0.1, 0.39], offloading=[0.1, 0.05, 0.07]))
    )
    assert [len(line.attrib["d"].split("L")) for line in tree.iter(f"{SVG}path") if line.attrib["class"] == "way"] == [
        3
    ] * 3
    ends = [text for text in tree.iter(f"{SVG}text") if text.attrib.get("class") == "end"]
    assert [end.text for end in ends] == ["none: 400 ms", "device: 390 ms", "offloading: 70 ms"]
    heights = sorted(float(end.attrib["y"]) for end in ends)
    assert all(below - above >= 20 for above, below in pairwise(heights))


def test_lines_have_colors_of_their_own_without_css_variables() -> None:
    """Programs other than browsers ignore variables, and draw no line then."""
    text = chart(figures(a=[0.1, 0.2], b=[0.3, 0.4]))
    assert "var(" not in text
    strokes = re.findall(r"\.w(\d) \.way,[^{]*\{stroke:(#\w+)\}", text.partition("@media")[0])
    assert dict(strokes).keys() >= {"0", "1"}
    assert len(dict(strokes)) == len(set(dict(strokes).values()))


def test_all_of_it_is_within_the_picture() -> None:
    tree = ElementTree.fromstring(chart(figures(a=[0.0003], b=[12.0], c=[0.0])))
    for circle in tree.iter(f"{SVG}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= float(tree.attrib["width"])
        assert 0 <= float(circle.attrib["cy"]) <= float(tree.attrib["height"])


def test_names_are_escaped() -> None:
    assert "<b>" not in chart(figures(**{"<b>": [1.0, 2.0]}))


@pytest.mark.parametrize("name", ["chart.png", "missing/chart.svg"])
def test_a_file_that_cannot_be_drawn_to_is_refused_before_anything_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--out", str(tmp_path / name)])
    assert caught.value.code == 2
    assert Path(name).name in capsys.readouterr().err
