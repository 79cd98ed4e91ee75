# SPDX-License-Identifier: Apache-2.0
"""``kvoffload explain`` on a trace that a server recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.served_tiers import ServedTiers

from kvoffload.cli import main


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recorded")
    served = ServedTiers(root, num_blocks=16, record_trace=str(root / "t.jsonl"))
    served.serve(rounds=2)
    served.close()
    return root / "t.jsonl"


def explain(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["explain", *arguments])
    return int(caught.value.code or 0)


def test_in_text_in_json_and_as_a_page(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    code = explain(*(str(trace), "--processes", "1"), *("--out", str(page), "--out", str(figures)))
    assert code == 0
    text = capsys.readouterr().out
    for words in ("Where the tokens came from", "host memory", "disk", "new", "twice the disk", "as it was"):
        assert words in text
    waits = text.partition("Waits of requests")[2]
    assert " ms" in waits
    assert "0.00" not in waits
    told = json.loads(figures.read_text())
    assert sum(told["found"].values()) + sum(told["missed"].values()) == told["tokens"]
    assert told["found"]["disk"] > 0
    assert {each["change"] for each in told["what_if"]} >= {"as it was", "twice the host memory", "policy arc"}
    assert "twice the disk" in page.read_text()


def test_the_machine_may_be_another(trace: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ("--disk", "0", "--processes", "1", "--out", str(figures))
    assert explain(str(trace), *options) == 0
    (as_it_was, *_) = json.loads(figures.read_text())["what_if"]
    assert (as_it_was["cpu_blocks"], as_it_was["disk_blocks"]) == (16, 0)


def test_a_server_with_an_unbounded_disk_is_not_told_to_buy_one(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = trace.read_text().splitlines(keepends=True)
    line = json.loads(first)
    line["machine"]["tiers"][0] = {"type": "disk"}  # as older versions wrote it
    recorded, figures = tmp_path / "t.jsonl", tmp_path / "figures.json"
    recorded.write_text("".join([json.dumps(line) + "\n", *others]))
    assert explain(str(recorded), "--processes", "1", "--out", str(figures)) == 0
    as_it_was, *changes = json.loads(figures.read_text())["what_if"]
    assert as_it_was["disk_hit_tokens"] > 0
    assert not [each["change"] for each in changes if "disk" in each["change"]]
    assert "as it was, unbounded disk" in capsys.readouterr().out


def test_how_much_a_servers_memory_holds_is_asked_for(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = trace.read_text().splitlines(keepends=True)
    line = json.loads(first)
    line["machine"]["tiers"].append({"type": "redis", "max_bytes": None})
    recorded, figures = tmp_path / "t.jsonl", tmp_path / "figures.json"
    recorded.write_text("".join([json.dumps(line) + "\n", *others]))
    assert explain(str(recorded), "--processes", "1") == 2
    assert "the size of its 'redis' tier; give --disk" in capsys.readouterr().err
    assert explain(str(recorded), "--processes", "1", "--disk", "64KiB", "--out", str(figures)) == 0
    assert "twice the disk" in [each["change"] for each in json.loads(figures.read_text())["what_if"]]


def test_mistakes_are_one_sentence(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(str(trace), "--out", str(tmp_path / "page.pdf")) == 2
    assert "not 'page.pdf'" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n')
    assert explain(str(other)) == 2
    assert "contains no explanations" in capsys.readouterr().err


def test_it_ends_with_one_recommendation_and_shows_sizes_within_80_columns(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert explain(str(trace), "--processes", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > 80]
    last = " ".join(lines[max(at for at, line in enumerate(lines) if line.startswith("Recommendation: ")) :])
    assert last.startswith(("Recommendation: Change nothing", "Recommendation: Set "))
    (heading,) = [line for line in lines if line.startswith("change ")]
    assert "memory + disk" in heading, "the sizes are not left out"


def test_the_speed_is_what_the_server_measured_unless_it_is_given(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = [json.loads(line) for line in trace.read_text().splitlines()]
    weighed = [{"tier": "disk", "blocks": 3, "expected_s": 0.5, "computing_s": 0.25}]
    tokens = first["input_length"]
    first["story"] = {"found": {}, "missed": {"new": tokens}, "weighed": weighed}
    for line in others:
        line.get("story", {}).pop("weighed", None)
    changed = tmp_path / "t.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in [first, *others]))
    speed = 3 * first["block_tokens"] / 0.25
    assert explain(str(changed), "--processes", "1") == 0
    assert f"at {speed:,.0f} tokens/s (as the server measured it)" in capsys.readouterr().out
    assert explain(str(changed), "--processes", "1", "--prefill-speed", "7000") == 0
    assert "at 7,000 tokens/s (--prefill-speed)" in capsys.readouterr().out


def test_the_steps_that_the_server_measured_are_those_of_the_simulation(trace: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for at, line in enumerate(lines):
        tokens, decoding = 100 * (at % 7), 1 + at % 3
        line["steps"] = [[2.0 + 0.001 * tokens + 0.1 * decoding, tokens, decoding]] * 2
    assert len(lines) > 10
    changed, figures = tmp_path / "t.jsonl", tmp_path / "figures.json"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert explain(str(changed), "--processes", "1", "--out", str(figures)) == 0
    as_it_was = json.loads(figures.read_text())["what_if"][0]
    assert as_it_was["ttft_s"]["p50"] > 2.0
    assert as_it_was["prefill_s"] == pytest.approx(0.001 * as_it_was["computed_tokens"])
