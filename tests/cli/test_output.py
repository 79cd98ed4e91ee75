# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("typer")
from kvoffload.cli.output import check_out, positive, print_table, progress, write_json
from kvoffload.errors import ConfigError
from kvoffload.sim.table import Table


def lines_of(capsys: pytest.CaptureFixture[str], name: str, total: int | None, count: int) -> list[str]:
    with progress(name, total, "runs") as advance:
        for _ in range(count):
            advance()
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_long_task_has_ten_lines_and_one_without_a_total_one_in_ten(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "long", 1234, 1234)
    assert len(lines) == 10
    assert lines[0].startswith("long: 124 of 1,234 runs,") and lines[0].endswith(" s left)")
    assert lines[9].startswith("long: 1,234 of 1,234 runs,") and "left" not in lines[9], "it is done"
    assert [line.rpartition(",")[0] for line in lines_of(capsys, "open", None, 25)] == [
        "open: 10 runs",
        "open: 20 runs",
    ]
    assert [line.rpartition(",")[0] for line in lines_of(capsys, "[red]", 1, 1)] == ["[red]: 1 of 1 runs"]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes any output a terminal
    with progress("way", 3, "turns") as advance:
        advance()
    assert "\x1b[" in capsys.readouterr().err


def test_a_terminal_shows_the_columns_that_it_holds_and_names_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table(["name", "size", "note", "unused"], [["one", "8", "long " * 4, "-"], ["eleven", "12", "short", "-"]])
    monkeypatch.setenv("COLUMNS", "20")
    print_table(table)
    head, _, one, eleven, left_out = capsys.readouterr().out.splitlines()
    assert (head.split(), one.split(), eleven.split()) == (["name", "size"], ["one", "8"], ["eleven", "12"])
    assert one.index("8") == eleven.index("2"), "figures stand at the right"
    assert left_out == "Not shown: note. --json has all."
    print_table(table, is_wide=True)
    assert capsys.readouterr().out.splitlines()[0].split() == ["name", "size", "note", "unused"]


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe.json", tmp_path / "link.json", tmp_path / "target.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    link.symlink_to(target)
    for path in (pipe, link):
        check_out(path)
        write_json(7, path)
    assert os.read(reader, 100) == b"7\n"
    os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert target.read_text() == "7\n"


def test_a_json_file_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with pytest.raises(TypeError):
        write_json({"set": {1}}, target)
    assert list(tmp_path.iterdir()) == []
    write_json([1], target)
    assert json.loads(target.read_text()) == [1]
    assert list(tmp_path.iterdir()) == [target]
    write_json({"set": {1}}, None)


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    check_out(None)
    check_out(tmp_path / "new.json")
    for target, words in ((tmp_path / "a" / "out.json", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=f"--out: .*{words}"):
            check_out(target)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_numbers_that_are_not_positive(value: float) -> None:
    with pytest.raises(ConfigError, match="--speed must be positive"):
        positive(value, "--speed")
    assert positive(2.5, "--speed") == 2.5


def test_a_loop_of_links_as_output_is_one_sentence(tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    check_out(loop, suffixes=(".json",))
    with pytest.raises(OSError, match="symbolic links"):
        write_json({}, loop)
    with pytest.raises(ConfigError, match="no folder"):
        check_out(loop / "out.json")
