# SPDX-License-Identifier: Apache-2.0
"""The first screen of ``kvoffload plan``: the right answer for cases whose answer is known."""

from __future__ import annotations

import json
import math
import re
import tempfile
from html import escape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from kvoffload.cli import main
from kvoffload.sim.verdict import MOST_LINES, WIDTH
from kvoffload.units import parse_bytes

GIB = 1 << 30
BLOCK_TOKENS = 2048


def documents(path: Path, *, requests: int, gap_s: float, number: int, blocks: int, output: int = 8) -> Path:
    """Questions about documents in turn, so that each comes back after all others. A document has ``blocks`` blocks."""
    lines = []
    for request in range(requests):
        document = request % number
        ids = [1000 * document + block for block in range(blocks)]
        lines.append(
            {
                "timestamp": round(1000 * gap_s * request),
                "input_length": BLOCK_TOKENS * blocks + 100,
                "output_length": output,
                "hash_ids": [*ids, 1_000_000 + request],
                "block_tokens": BLOCK_TOKENS,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plan(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, dict[str, Any]]:
    """(exit code, text, JSON) of a plan."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        with pytest.raises(SystemExit) as caught:
            main(["plan", *map(str, args), "--processes", "1", "--out", str(file)])
        text, told = capsys.readouterr().out, json.loads(file.read_text())
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= WIDTH
    return int(caught.value.code or 0), " ".join(text.split()), told


MACHINE = ("--kv-bytes-per-token", "128KiB", "--prefill-speed", "20000")


@pytest.fixture
def recurring(tmp_path: Path) -> Path:
    """12 documents of 4 blocks (1 GiB each), one each second: half of what a server can compute."""
    return documents(tmp_path / "d.jsonl", requests=120, gap_s=1.0, number=12, blocks=4)


def test_memory_for_what_comes_back(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [recurring, "--hit-rate", "80", "--gpu-kv-tokens", "40000", *MACHINE]
    code, text, told = plan(capsys, *args)
    assert code == 0
    assert text.startswith("Buy ")
    chosen, today = told["chosen"], told["without_offloading"]
    assert chosen["hit_rate"] >= 0.8
    assert chosen["ttft_s"]["p90"] < today["ttft_s"]["p90"]
    assert 11 * GIB <= chosen["cpu_blocks"] * told["block_bytes"] <= 14 * GIB, "twelve documents of 1 GiB"
    assert [row["row"] for row in told["verdict"]["rows"]] == ["today", "goal", "knee", "ceiling"]
    (line,) = [line for line in told["verdict"]["offload_yaml"] if line.startswith("cpu_bytes_to_use: ")]
    assert parse_bytes(line.partition(": ")[2]) >= chosen["cpu_blocks"] * told["block_bytes"]


@pytest.mark.usefixtures("no_loads")
def test_it_never_buys_less_host_memory_than_the_gpu_has(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_tokens = 60_000
    code, _, told = plan(capsys, recurring, "--hit-rate", "30", "--gpu-kv-tokens", str(gpu_tokens), *MACHINE)
    assert code == 0
    assert all(each["cpu_blocks"] * BLOCK_TOKENS > gpu_tokens - BLOCK_TOKENS for each in told["runs"])
    code, text, told = plan(
        capsys, recurring, "--hit-rate", "30", "--gpu-kv-tokens", str(gpu_tokens), "--max-cpu", "1GiB", *MACHINE
    )
    assert code == 1
    assert "less host memory than the GPU's own cache" in text
    assert told["chosen"] is None and told["runs"] == []


@pytest.mark.usefixtures("no_loads")
def test_nothing_is_bought_if_loading_is_slower_than_computing(
    recurring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token of 2 MiB takes 84 us to load and 50 us to compute."""
    args = [recurring, "--hit-rate", "80", "--kv-bytes-per-token", "2MiB", "--prefill-speed", "20000"]
    code, text, told = plan(capsys, *args)
    assert code == 1
    assert text.startswith("Buy nothing: loading is slower than computing")
    assert told["chosen"] is None and told["verdict"]["offload_yaml"] == []


def test_an_overloaded_server_is_said_first_and_nothing_is_bought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each request is new, and one server computes a quarter of them."""
    fresh = documents(tmp_path / "f.jsonl", requests=60, gap_s=0.1, number=1000, blocks=4)
    code, text, told = plan(capsys, fresh, "--hit-rate", "20", *MACHINE)
    assert code == 1
    assert text.startswith("One server is too slow for this load")
    assert text.index("Warning: one server cannot keep up") < text.index(" row ")
    assert told["chosen"] is None
    assert {row["note"] for row in told["verdict"]["rows"]} == {"overload"}


def test_a_goal_below_the_time_of_a_prompt_suggests_no_lower_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prompt is new, and takes 0.4 s to compute."""
    fresh = documents(tmp_path / "f.jsonl", requests=60, gap_s=0.1, number=1000, blocks=4)
    for goal_s, is_possible in (("0.2", False), ("2", True)):
        _, text, told = plan(capsys, fresh, "--ttft", goal_s, *MACHINE)
        assert text.startswith("One server is too slow for this load")
        assert any(told["requests_per_s"].values()) == is_possible
        assert ("Use " in told["verdict"]["answer"], "--ttft" in told["verdict"]["answer"]) == (
            is_possible,
            not is_possible,
        )


def test_an_overloaded_server_says_whether_prompts_are_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU's cache has room for one request, whose prompt takes 0.4 s, and whose answer takes 6 s."""
    for output, is_prompts in ((2, True), (1000, False)):
        trace = documents(tmp_path / f"{output}.jsonl", requests=40, gap_s=0.3, number=1000, blocks=4, output=output)
        _, _, told = plan(capsys, trace, "--hit-rate", "20", "--gpu-kv-tokens", "10000", *MACHINE)
        (said,) = [warning for warning in told["verdict"]["warnings"] if "cannot keep up" in warning]
        assert ("wait because others" not in said) == is_prompts


@pytest.mark.usefixtures("no_loads")
def test_a_goal_above_all_hits_of_the_trace_names_them(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twelve documents of 4 blocks are new, and so is the end of each request."""
    for limit in ("6GiB", "20GiB"):
        args = [recurring, "--hit-rate", "95", "--gpu-kv-tokens", "40000", *MACHINE, "--max-cpu", limit]
        code, _, told = plan(capsys, *args)
        assert code == 1
        assert told["reachable_hit_rate"] < 0.95
        assert all(line.startswith("#") for line in told["verdict"]["offload_yaml"][:1])
        assert f"keeps everything hits {100 * told['reachable_hit_rate']:.1f}%" in told["verdict"]["answer"]


@pytest.mark.usefixtures("no_loads")
def test_a_trace_of_few_requests_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for requests, is_short in ((12, True), (100, False)):
        trace = documents(tmp_path / f"{requests}.jsonl", requests=requests, gap_s=1.0, number=4, blocks=4)
        args = [trace, "--hit-rate", "50", "--gpu-kv-tokens", "40000", *MACHINE]
        _, _, told = plan(capsys, *args)
        assert any("12 requests" in warning for warning in told["verdict"]["warnings"]) == is_short
        for limit, is_cut in ((requests - 1, True), (requests + 1, False)):
            _, _, told = plan(capsys, *args, "--max-requests", str(limit))
            assert any("--max-requests" in warning for warning in told["verdict"]["warnings"]) == is_cut
        fleet = tmp_path / "fleet.json"
        fleet.write_text(json.dumps({"copies": 2}))
        _, _, told = plan(capsys, *args, "--max-requests", str(requests - 1), "--fleet", fleet)
        assert any(f"first {requests - 1} requests" in warning for warning in told["verdict"]["warnings"])


@pytest.mark.usefixtures("no_loads")
def test_no_recommendation_is_overloaded_or_slower_than_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for gap_s in (0.25, 0.5, 2.0):
        trace = documents(tmp_path / f"{gap_s}.jsonl", requests=90, gap_s=gap_s, number=9, blocks=4)
        for speed in ("20000", "60000"):
            args = [trace, "--hit-rate", "50", "--prefill-speed", speed, "--kv-bytes-per-token", "512KiB"]
            _, _, told = plan(capsys, *args, "--gpu-kv-tokens", "60000", "--max-disk", "100GiB")
            if (chosen := told["chosen"]) is not None:
                assert chosen["utilisation"] <= 0.9
                assert chosen["ttft_s"]["p90"] <= told["without_offloading"]["ttft_s"]["p90"]


def test_how_many_requests_a_server_carries(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [recurring, "--ttft", "0.7", "--gpu-kv-tokens", "40000", *MACHINE]
    code, _, told = plan(capsys, *args)
    assert code == 1 or told["chosen"]["ttft_s"]["p90"] <= 0.7
    _, _, by_rate = plan(capsys, recurring, "--hit-rate", "80", "--gpu-kv-tokens", "40000", *MACHINE)
    loads = by_rate["requests_per_s"]
    # A prompt takes 0.42 s to compute, so at most 0.9 of 2.4 requests/s; of a hit 0.04 s are loaded and 0.005 computed.
    assert 1.4 < loads["today"] < 2.4
    assert loads["goal"] > 2 * loads["today"]
    assert "do the work of 100" in by_rate["verdict"]["load"]


def test_tiers_may_save_servers_where_each_of_them_reaches_the_goal(
    recurring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, told = plan(capsys, recurring, "--ttft", "5", "--gpu-kv-tokens", "40000", *MACHINE)
    assert code == 0
    assert text.startswith("Buy nothing: the GPU's own cache reaches the goal")
    loads = told["requests_per_s"]
    assert loads["ceiling"] > 2 * loads["today"] > 0
    assert "do the work of 100" in told["verdict"]["load"]


def test_the_saving_says_above_which_price_of_a_server_it_pays(
    recurring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 servers without tiers cost as much as fewer with tiers, at that price."""
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"prices": {"cpu": 0.5}}))
    args = ["--hit-rate", "80", "--gpu-kv-tokens", "40000", *MACHINE, "--max-cpu", "12GiB", "--fleet", file]
    _, _, told = plan(capsys, recurring, *args)
    loads, said = told["requests_per_s"], told["verdict"]["load"]
    found = re.search(r"In a large fleet, (\d+) servers as in row goal .* costs more than ([\d.]+) ", said)
    assert found is not None
    left, price = int(found[1]), float(found[2])
    assert left == math.ceil(100 * loads["today"] / loads["goal"])
    assert 100 * price == pytest.approx(left * (price + told["price"]), rel=0.01)


@pytest.mark.usefixtures("no_loads")
def test_without_the_gpus_cache_no_row_is_called_today(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, told = plan(capsys, recurring, "--hit-rate", "80", *MACHINE)
    assert told["verdict"]["rows"][0]["row"] == "no cache"
    assert "today" not in told["verdict"]["answer"]
    assert "--gpu-kv-tokens" in told["verdict"]["warnings"][0]


@pytest.mark.usefixtures("no_loads")
def test_guesses_are_the_first_warnings_of_a_purchase(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server without tiers is overloaded, and requests are too long for it; this does not hide the guesses."""
    code, text, told = plan(capsys, recurring, "--hit-rate", "80", "--gpu-kv-tokens", "9000", "--rate", "2.3")
    assert code == 0 and len(told["verdict"]["warnings"]) >= 2
    assert "guess" in told["verdict"]["warnings"][0]
    assert text.index("guess") < text.index(" row ")


@pytest.mark.usefixtures("no_loads")
def test_a_figure_that_misses_the_goal_does_not_look_like_it(
    recurring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [recurring, "--gpu-kv-tokens", "40000", *MACHINE]
    _, _, told = plan(capsys, *args, "--hit-rate", "99")
    reached = max(run["hit_rate"] for run in told["runs"])
    _, _, told = plan(capsys, *args, "--hit-rate", f"{100 * reached + 1e-4}")
    assert told["chosen"] is None
    assert f"just under {100 * reached:.1f}% hits" in told["verdict"]["answer"]


@pytest.mark.usefixtures("no_loads")
def test_options_are_not_broken_at_the_end_of_a_line(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", str(recurring), "--hit-rate", "80", "--processes", "1"])
    words = capsys.readouterr().out.split()
    assert "(--gpu-kv-tokens)," in words and "(--prefill-speed)," in words
    assert not [word for word in words if word.endswith("-") and len(word) > 1]


def test_requests_that_arrive_at_once_are_no_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = documents(tmp_path / "b.jsonl", requests=12, gap_s=0.0, number=4, blocks=2)
    args = [batch, "--hit-rate", "99", "--gpu-kv-tokens", "16000", *MACHINE]
    _, text, told = plan(capsys, *args)
    assert "cannot keep up" not in text
    assert any("--rate" in warning for warning in told["verdict"]["warnings"])
    # Eight prompts of 0.2 s are computed, or more.
    assert 2 < told["requests_per_s"]["today"] < 13
    _, _, told = plan(capsys, *args, "--rate", "0.5")
    assert not any("--rate" in warning for warning in told["verdict"]["warnings"])
    assert told["without_offloading"]["duration_s"] > 22, "they come every two seconds"


def test_a_cache_that_holds_the_whole_trace_needs_no_tiers(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, told = plan(capsys, recurring, "--hit-rate", "99", "--gpu-kv-tokens", "4000000", *MACHINE)
    assert code == 1 and told["runs"] == []
    assert text.startswith("Buy nothing") and "limits" not in text
    assert "has room for all blocks of this trace" in text


@pytest.mark.usefixtures("no_loads")
def test_large_numbers_are_written_out(recurring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"prices": {"cpu": 500}}))
    args = ["--hit-rate", "80", "--gpu-kv-tokens", "40000", *MACHINE, "--fleet", file]
    _, text, _ = plan(capsys, recurring, *args, "--rate", "1200")
    assert "1,200 requests/s" in text and "e+0" not in text


def test_a_rate_of_one_request_in_centuries_is_rejected(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A clock of so many seconds cannot count the milliseconds of a step: a replay would never end."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(recurring), "--hit-rate", "80", "--rate", "1e-15"])
    assert caught.value.code == 2
    assert "--rate" in capsys.readouterr().err


@pytest.mark.usefixtures("no_loads")
def test_the_load_may_be_another(recurring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [recurring, "--hit-rate", "80", "--gpu-kv-tokens", "40000", *MACHINE]
    busy = {}
    for rate in ("0.5", "1.5"):
        _, _, told = plan(capsys, *base, "--rate", rate)
        busy[rate] = told["without_offloading"]["utilisation"]
    assert busy["1.5"] == pytest.approx(3 * busy["0.5"], rel=0.1)


@pytest.mark.usefixtures("no_loads")
def test_a_recorded_trace_leaves_nothing_to_guess(
    recurring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first line has the sizes of the server, and requests that found blocks on a disk have its speed."""
    lines = [json.loads(line) for line in recurring.read_text().splitlines()]
    lines[0]["machine"] = {"block_bytes": BLOCK_TOKENS * 262_144, "device_blocks": 20, "cpu_bytes": 1, "policy": "lru"}
    for line, seconds in zip(lines, (0.1, 0.2, 0.4)):
        line["story"] = {"weighed": [{"tier": "disk", "expected_s": 0.1, "blocks": 10, "computing_s": seconds}]}
    lines[5]["story"] = ["another program's"]
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"prices": {"cpu": 0.1}}))
    _, _, told = plan(capsys, recorded, "--hit-rate", "80", "--fleet", prices)
    assert told["verdict"]["warnings"] == []
    assert told["block_bytes"] == BLOCK_TOKENS * 262_144
    assert told["without_offloading"]["gpu_blocks"] == 20
    without = told["without_offloading"]
    assert without["prefill_s"] == pytest.approx(without["computed_tokens"] / (10 / 0.2 * BLOCK_TOKENS))
    _, _, told = plan(capsys, recorded, "--hit-rate", "80", *MACHINE)
    assert told["block_bytes"] == BLOCK_TOKENS * 131_072


@pytest.mark.usefixtures("no_loads")
def test_placeholder_prices_are_warned_about_once(
    recurring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [recurring, "--hit-rate", "80", "--gpu-kv-tokens", "40000", *MACHINE]
    file = tmp_path / "prices.json"
    for prices, is_warned in (({}, True), ({"currency": "EUR"}, True), ({"disk": 0.001}, False)):
        file.write_text(json.dumps({"prices": prices}))
        _, _, told = plan(capsys, *args, "--fleet", file)
        assert sum("prices" in warning for warning in told["verdict"]["warnings"]) == is_warned
    _, _, told = plan(capsys, recurring, "--hit-rate", "1", "--gpu-kv-tokens", "4000000", *MACHINE)
    assert told["runs"] == told["verdict"]["warnings"] == [], "no price decides"


@pytest.mark.usefixtures("no_loads")
def test_times_that_may_be_in_seconds_are_pointed_out(
    recurring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in recurring.read_text().splitlines()]
    for line in lines:
        line["timestamp"] /= 1000
    timed, file = tmp_path / "timed.jsonl", tmp_path / "stretch.json"
    timed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file.write_text(json.dumps({"stretch": 1000}))
    args = ["--hit-rate", "80", "--gpu-kv-tokens", "40000", *MACHINE]
    _, _, told = plan(capsys, timed, *args)
    assert any("stretch: 1000" in warning for warning in told["verdict"]["warnings"])
    _, _, told = plan(capsys, timed, *args, "--fleet", file)
    assert not any("stretch" in warning for warning in told["verdict"]["warnings"])
    _, _, at_once = plan(capsys, recurring, *args)
    assert told["chosen"]["cpu_blocks"] == at_once["chosen"]["cpu_blocks"]


@pytest.mark.usefixtures("no_loads")
def test_the_currency_is_the_users(recurring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"prices": {"currency": "EUR", "cpu": 0.1}}))
    args = [recurring, "--hit-rate", "80", "--gpu-kv-tokens", "40000", *MACHINE, "--fleet", file]
    _, text, told = plan(capsys, *args)
    assert f"{told['price']:.3g} EUR an hour" in text
    assert told["price"] == pytest.approx(told["chosen"]["cpu_blocks"] / 4 * 0.1)
    assert "EUR/h" in text


@pytest.mark.usefixtures("no_loads")
def test_json_pages_and_pictures_have_the_verdict_too(
    recurring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    outs = [word for name in ("o.png", "o.html") for word in ("--out", tmp_path / name)]
    _, text, told = plan(capsys, recurring, "--hit-rate", "80", *outs)
    with pytest.raises(SystemExit):
        main(["plan", str(recurring), "--hit-rate", "80", "--processes", "1", "--json"])
    assert json.loads(capsys.readouterr().out) == told
    assert told["verdict"]["answer"] in text
    assert any("guess" in warning for warning in told["verdict"]["warnings"])
    assert any("KV per token" in line for line in told["assumptions"])
    page = (tmp_path / "o.html").read_text()
    assert escape(told["verdict"]["answer"]) in page and "KV per token" in page and "without tiers" in page
    assert (tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"
