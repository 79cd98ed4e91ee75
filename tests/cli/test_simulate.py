# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from kvoffload.cli import main
from kvoffload.cli.machine import device_blocks, load_one
from kvoffload.sim.hints import true_hints
from kvoffload.sim.report import format_seconds
from kvoffload.sim.synthetic import synthesize
from kvoffload.tiering.options import parse_tier


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three sessions that grow, turn after turn."""
    path = tmp_path / "chat.jsonl"
    lines: list[dict[str, Any]] = []
    for turn in range(1, 41):
        session = turn % 3
        ids = [0, *(100 * session + block for block in range(1, turn + 1))]
        lines.append(
            {
                "timestamp": 1000 * turn,
                "input_length": 512 * len(ids),
                "output_length": 9,
                "hash_ids": ids,
                "session": session,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_what_hints_would_be_worth(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["simulate", "synthetic:chat:1", "--max-requests", "700", "--policy", "density", "--cpu", "5%"]
    rates = []
    for hints in ([], ["--hints", "noisy:0.3"], ["--hints", "oracle"]):
        code, _, _ = run(capsys, *common, *hints, "--processes", "1", "--json", tmp_path / "o.json")
        assert code == 0
        (report,) = json.loads((tmp_path / "o.json").read_text())
        rates.append(report["runs"][-1]["hit_rate"])
    assert rates == sorted(set(rates))
    code, _, err = run(capsys, *common, "--hints", "perfect")
    assert code == 2
    assert "--hints is oracle, or noisy:P" in err


def test_hints_of_a_trace_count_in_simulate_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = true_hints(synthesize("chat", 400, 1))
    results = {}
    for name, trace in (("with", made), ("without", replace(made, next_uses=None))):
        lines = [
            {
                "timestamp": 1000 * float(trace.times_s[request]),
                "input_length": int(trace.input_tokens[request]),
                "output_length": 1,
                "block_tokens": trace.block_tokens,
                "hash_ids": trace.blocks(request).tolist(),
                **({"next_use": use.name.lower()} if (use := trace.next_use(request)) else {}),
            }
            for request in range(len(trace))
        ]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        common = ["--policy", "density", "--gpu-blocks", "5", "--processes", "1", "--json", tmp_path / "o.json"]
        rates = []
        for command in (["simulate", path, "--cpu", "5%"], ["plan", path, "--hit-rate", "99"]):
            run(capsys, *command, *common)
            figures = json.loads((tmp_path / "o.json").read_text())
            runs = (figures[0] if command[0] == "simulate" else figures)["runs"]
            size = max(1, int(0.05 * trace.num_unique))
            rates += [each["hit_rate"] for each in runs if abs(each["cpu_blocks"] - size) <= 2][:1]
        results[name] = rates
    assert [len(rates) for rates in results.values()] == [2, 2]
    assert all(hinted > plain for hinted, plain in zip(results["with"], results["without"], strict=True))


def test_a_sweep_with_table_json_and_plots(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    common = ["simulate", trace, "--policy", "lru,density", "--gpu-blocks", "5", "--processes", "1"]
    code, out, _ = run(
        capsys,
        *common,
        "--cpu",
        "10%,30%,3GiB",
        "--disk",
        "50%",
        "--json",
        tmp_path / "o.json",
        "--plot",
        tmp_path / "o.png",
    )
    assert code == 0
    (title,) = [line for line in out.splitlines() if line.startswith("chat: 40 requests")]
    assert title.endswith("within reach"), "in one line, however narrow the table"
    assert "best overall is" in out
    (report,) = json.loads((tmp_path / "o.json").read_text())
    assert [(each["policy"], each["cpu_blocks"]) for each in report["runs"]] == [
        (policy, blocks) for policy in ("lru", "density") for blocks in (11, 35, 48)
    ]
    for each in report["runs"]:
        assert 0 < each["hit_rate"] <= each["optimum_hit_rate"] <= report["reachable_hit_rate"] < 1
    assert (tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"
    code, _, _ = run(capsys, *common, "--plot", tmp_path / "o.html")
    page = (tmp_path / "o.html").read_text()
    assert code == 0
    assert page.count("<svg") == 1
    assert "<td>density</td>" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.jsonl", "o.html", "o.json", "o.png"]


@pytest.mark.parametrize(
    "command", [["simulate", "--cpu", "30%", "--policy", "lru"], ["plan", "--hit-rate", "10", "--max-cpu", "3GiB"]]
)
def test_the_device_is_that_of_the_trace(
    command: list[str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, target = tmp_path / "recorded.jsonl", tmp_path / "o.json"
    first, *others = trace.read_text().splitlines(keepends=True)
    line = json.loads(first) | {"machine": {"block_bytes": 7, "device_blocks": 5}}
    recorded.write_text("".join([json.dumps(line) + "\n", *others]))
    found = []
    for path, more in ((recorded, []), (trace, ["--gpu-blocks", "5"]), (recorded, ["--gpu-blocks", "0"]), (trace, [])):
        assert run(capsys, *command, path, "--processes", "1", "--json", target, *more)[0] == 0
        told = json.loads(target.read_text())
        found.append(
            [
                (each["gpu_blocks"], each["gpu_hit_blocks"])
                for each in (told[0] if isinstance(told, list) else told)["runs"]
            ]
        )
    assert found[0] == found[1] != found[2] == found[3]


def test_processes_do_not_change_results(trace: Path, tmp_path: Path) -> None:
    """In a process of its own, as users run it: workers are spawned from the real entry point."""
    found = []
    for processes in ("1", "2"):
        target = tmp_path / f"{processes}.json"
        options = ["--cpu", "10%,40%", "--processes", processes, "--json", str(target)]
        subprocess.run(
            [sys.executable, "-m", "kvoffload", "simulate", str(trace), *options],
            check=True,
            capture_output=True,
        )
        found.append(json.loads(target.read_text()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policy", "lur"], "Unknown cache policy: 'lur'. Did you mean 'lru'?"),
        (["--policy", ","], "--policy needs at least one policy"),
        (["--cpu", "1MiB"], "--cpu: 1MiB is less than one block of 64 MiB"),
        (["--cpu", "12parsecs"], "'12parsecs' is not a size"),
        (["--cpu", "ten%"], "'ten%' is not a share"),
        (["--cpu", "inf%"], "'inf%' is not a share"),
        (["--cpu", "0%"], "less than one block"),
        (["--cpu", "0"], "--cpu must be positive"),
        (["--gpu-blocks", "1", "--gpu-kv-tokens", "1"], "both give the device's cache"),
        (["--disk", "1KiB"], "--disk: 1KiB is less than one block"),
        (["--stretch", "0"], "--stretch must be positive"),
        (["--stretch", "nan"], "--stretch must be positive, not nan"),
        (["--prefill-speed", "0"], "--prefill-speed must be positive, not 0"),
        (["--prefill-speed", "inf"], "--prefill-speed must be positive, not inf"),
        (["--cascade", "on_stor"], "--cascade is on_store, on_evict or both, not 'on_stor'"),
        (["--load-speed", "fast"], "--load-speed: 'fast' is not a size"),
        (["--model", "/nowhere/config.json"], "is not a readable model config"),
        (["--block-tokens", "7"], "line 1: 2 hash_ids do not fit input_length 1024"),
        (["--plot", "out.jpeg"], "A plot is a .png or .html file"),
        (["--plot", "/nowhere/out.png"], "There is no folder '/nowhere'"),
        (["--json", "/nowhere/out.json"], "--json: There is no folder '/nowhere'"),
        (["--json", "/"], "--json: '/' is a folder"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    target = tmp_path / "out.json"
    code, out, err = run(capsys, "simulate", trace, "--json", target, *args)
    assert code == 2
    assert words in err
    assert err.startswith("kvoffload: ")
    assert err.count("\n") == 1
    assert out == ""
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 50, b'{"timestamp": 1}\n'], ids=["empty", "binary", "fields"])
def test_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    for command in (["simulate", path], ["plan", path, "--hit-rate", "10"]):
        code, _, err = run(capsys, *command)
        assert code == 2
        assert str(path) in err
        assert err.count("\n") == 1


def test_synthetic_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--max-requests", "200", "--processes", "1"]
    code, out, _ = run(capsys, "simulate", "synthetic:chat:7", *small, "--policy", "lru")
    assert code == 0
    assert "synthetic-chat-7: 200 requests" in out
    code, _, _ = run(capsys, "plan", "synthetic:agents", *small, "--hit-rate", "20")
    assert code == 0
    for command in (["simulate"], ["plan", "--hit-rate", "20"]):
        code, _, err = run(capsys, *command, "synthetic:chat", *small, "--block-tokens", "16")
        assert code == 2
        assert "--block-tokens is for traces in files" in err
    for name, words in (("synthetic:poems", "Unknown kind"), ("synthetic:chat:x", "seed is a number")):
        code, _, err = run(capsys, "simulate", name)
        assert code == 2
        assert words in err


def test_plan_buys_what_reaches_the_goal(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096})
    )
    goal = ["plan", trace, "--processes", "1", "--hit-rate"]
    by_config = run(capsys, *goal, "60", "--model", config)
    by_numbers = run(capsys, *goal, "60", "--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    assert by_config == by_numbers
    code, out, _ = by_config
    assert code == 0
    assert "Buy " in out
    code, out, _ = run(capsys, *goal, "99")
    assert code == 1
    assert "all that this trace offers" in " ".join(out.split())
    assert "24 MiB" not in out and out.count("│") > 50, "the table shows what was tried"
    code, out, _ = run(capsys, *goal, "60%", "--gpu-kv-tokens", "1000000")
    assert code == 0
    assert "Buy nothing: the GPU's own cache reaches the goal" in out
    code, out, _ = run(capsys, "plan", trace, "--processes", "1", "--ttft", "0.5", "--max-disk", "10GiB")
    assert code == 0
    assert "of host memory" in out


def test_a_plan_shows_what_more_money_brings_and_all_that_was_tried_if_asked(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", trace, "--processes", "1", "--hit-rate", "40", "--max-disk", "10GiB"]

    def rows(out: str) -> list[list[str]]:
        return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]

    code, out, _ = run(capsys, *args)
    assert code == 0
    hits = [float(row[2]) for row in rows(out) if row[-1] != "<- chosen"]
    assert hits == sorted(set(hits))
    wide = rows(run(capsys, *args, "--wide")[1])
    assert f"Not shown: {len(wide) - len(rows(out))} that cost more" in out
    assert len(wide) > len(rows(out)) > 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Give one goal"),
        (["--hit-rate", "10", "--ttft", "1"], "Give one goal"),
        (["--hit-rate", "101"], "between 0 and 100 %"),
        (["--hit-rate", "0.6"], "write 60 for 60 %, or 0.6% if that is meant"),
        (["--hit-rate", "most"], "a number of percent such as 60, not 'most'"),
        (["--hit-rate", "10", "--load-policy", "never"], "--load-policy is cost or always"),
        (["--hit-rate", "10", "--disk-read-speed", "fast"], "--disk-read-speed: 'fast' is not a size"),
        (["--hit-rate", "10", "--quantile", "p42"], "--quantile is p50, p90 or p99"),
        (["--hit-rate", "10", "--layers", "3"], "belong together"),
        (["--hit-rate", "10", "--cpu-price", "-1"], "must not be negative"),
        (["--hit-rate", "10", "--max-cpu", "1KiB"], "--max-cpu: 1KiB is less than one block"),
        (["--hit-rate", "10", "--policy", "nope"], "Unknown cache policy"),
        (["--hit-rate", "10", "--prefill-speed", "0"], "--prefill-speed must be positive, not 0"),
        (["--hit-rate", "10", "--cascade", "both"], "--cascade is on_store or on_evict, not 'both'"),
        (["--hit-rate", "10", "--json", "/nowhere/out.json"], "--json: There is no folder '/nowhere'"),
        (
            ["--hit-rate", "1", "--layers", "1", "--kv-heads", "1", "--head-dim", "1", "--dtype", "int3"],
            "Unknown dtype 'int3'",
        ),
        (["--hit-rate", "1", "--dtype", "fp8"], "--dtype belongs to --model or --layers"),
        (["--hit-rate", "1", "--dtype", "fp8", "--kv-bytes-per-token", "1KiB"], "--dtype belongs to --model or"),
        (["--hit-rate", "1", "--max-disk", "1KiB"], "--max-disk: 1KiB is less than one block of 64 MiB"),
        (["--hit-rate", "1", "--cpu-price", "nan"], "Prices must be finite"),
        (["--hit-rate", "1", "--disk-price", "inf"], "Prices must be finite"),
        (["--ttft", "nan"], "must be positive, not nan"),
    ],
)
def test_mistakes_in_plan(trace: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    code, _, err = run(capsys, "plan", trace, *args)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_plan_counts_the_cache_of_the_dtype(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, target = tmp_path / "config.json", tmp_path / "plan.json"
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    config.write_text(json.dumps(sizes | {"torch_dtype": "float32"}))
    plan = ["plan", trace, "--processes", "1", "--hit-rate", "60", "--json", target]
    layers = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]
    found = []
    for options in (["--model", config], layers):
        for dtype in ([], ["--dtype", "fp8"]):
            assert run(capsys, *plan, *options, *dtype)[0] == 0
            found.append(json.loads(target.read_text())["block_bytes"] // 512)
    assert found == [4 * 65536, 65536, 2 * 65536, 65536]
    code, _, err = run(capsys, *plan, "--model", config, "--dtype", "int3")
    assert code == 2
    assert err.startswith("kvoffload: Unknown dtype 'int3'")
    assert err.count("\n") == 1


def test_both_cascades_are_rows_of_their_own(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    common = ["simulate", trace, "--policy", "lru", "--cpu", "10%", "--processes", "1", "--json", target]
    code, out, _ = run(capsys, *common, "--disk", "20%", "--cascade", "both")
    assert code == 0
    assert "lru, on_store" in out
    assert "lru, on_evict" in out
    assert {each["cascade"] for each in json.loads(target.read_text())[0]["runs"]} == {"on_store", "on_evict"}
    run(capsys, *common, "--disk", "20%", "--cascade", "on_evict, on_store")
    assert [each["cascade"] for each in json.loads(target.read_text())[0]["runs"]] == ["on_store", "on_evict"]


def test_without_cascade_the_sizes_decide_as_in_serving(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    args = ["simulate", trace, "--policy", "lru", "--cpu", "640MiB", "--disk", "0,1216MiB,1280MiB", "--json", target]
    assert run(capsys, *args, "--processes", "1")[0] == 0
    found = {each["disk_blocks"]: each["cascade"] for each in json.loads(target.read_text())[0]["runs"]}
    expected = {
        size: parse_tier({"type": "memory", "max_bytes": f"{size * 64}MiB"}).cascade_above(640 << 20)
        for size in (19, 20)
    }
    assert found == expected | {0: "on_store"}
    assert expected == {19: "on_evict", 20: "on_store"}


def test_assumptions_come_first(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["simulate", trace, "--cpu", "10%", "--policy", "lru"], ["plan", trace, "--hit-rate", "60"]):
        _, out, _ = run(capsys, *command, "--processes", "1")
        assert out.startswith("Assumptions\n  KV per token   128 KiB, a guess")
        assert "what follows is an upper bound" in out
        given = ["--kv-bytes-per-token", "131072", "--gpu-kv-tokens", "2560", "--prefill-speed", "7000"]
        _, out, _ = run(capsys, *command, "--processes", "1", *given)
        head = out[: out.index("┏")]
        assert "128 KiB\n" in head and "2,560 tokens" in head and "7,000 tokens/s" in head
        assert "upper bound" not in out


def test_a_run_without_offloading_shows_what_is_gained(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "o.json"
    args = ["simulate", trace, "--policy", "lru", "--cpu", "3GiB", "--gpu-blocks", "5", "--processes", "1"]
    _, out, _ = run(capsys, *args, "--json", target)
    (report,) = json.loads(target.read_text())
    alone, (with_memory,) = report["without_offloading"], report["runs"]
    assert alone["cpu_hit_blocks"] == alone["stored_bytes"] == 0 < alone["gpu_hit_blocks"]
    assert alone["gpu_hit_blocks"] <= with_memory["gpu_hit_blocks"]
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert rows[0].split("│")[1].strip() == "none"
    gained_s = alone["ttft_s"]["mean"] - with_memory["ttft_s"]["mean"]
    assert gained_s > 0
    assert rows[1].split("│")[-2].strip() == format_seconds(gained_s)
    headings = next(line for line in out.splitlines() if line.startswith("┃"))
    assert len(headings) <= 80
    _, out, _ = run(capsys, *args, "--wide")
    assert "saved prefill" in out


def test_saturation_is_said_in_words(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["simulate", trace, "--cpu", "10%", "--policy", "lru"], ["plan", trace, "--hit-rate", "60"]):
        assert "cannot keep up" in run(capsys, *command, "--processes", "1", "--prefill-speed", "2000")[1]
        assert "cannot keep up" not in run(capsys, *command, "--processes", "1", "--prefill-speed", "1e7")[1]


def test_a_model_by_its_name_comes_from_the_hubs_cache(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    config.write_text(json.dumps(sizes))
    asked: list[tuple[str, ...]] = []

    def download(*names: str) -> str:
        asked.append(names)
        if names[0] != "org/m":
            raise OSError("no such name")
        return str(config)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    args = ["simulate", trace, "--policy", "lru", "--cpu", "10%", "--processes", "1", "--model", "org/m"]
    code, out, _ = run(capsys, *args)
    assert code == 0
    assert "KV per token   128 KiB\n" in out
    code, _, err = run(capsys, *args[:-1], "org/other")
    assert code == 2
    assert "There is no file org/other, and no config.json of that name can be had" in err
    assert asked == [("org/m", "config.json"), ("org/other", "config.json")]
    assert run(capsys, *args[:-1], "models/confg.json")[0] == 2
    assert len(asked) == 2, "a file with a typing error is not asked of the Hub"


def test_a_plan_as_json(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    common = ["plan", trace, "--processes", "1", "--max-disk", "10GiB", "--json", target]
    code, out, _ = run(capsys, *common, "--hit-rate", "60", "--cascade", "on_evict")
    assert code == 0
    made = json.loads(target.read_text())
    assert made["goal"] == {"hit_rate": 0.6, "ttft_s": None, "quantile": "p90"}
    assert made["prices"] == {"cpu_per_gib": 4.0, "disk_per_gib": 0.1}
    assert made["chosen"] in made["runs"]
    assert made["chosen"]["hit_rate"] >= 0.6
    assert {each["cascade"] for each in made["runs"]} == {"on_evict"}
    assert f"price {made['price']:,.2f}" in out
    assert out.count("<- chosen") == 1
    # A block that is stored at its second request is hit by the third at the earliest.
    reached = [json.loads(target.read_text())["runs"]]
    assert run(capsys, *common, "--hit-rate", "30", "--cascade", "on_evict", "--store-threshold", "2")[0] == 0
    reached.append(json.loads(target.read_text())["runs"])
    unfiltered, filtered = (max(each["hit_rate"] for each in runs) for runs in reached)
    assert filtered < unfiltered


def test_progress_is_lines_where_the_output_is_no_terminal(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "simulate", trace, "--processes", "1", "--policy", "lru", "--cpu", "10%,20%,30%")
    counts = [line.rpartition(",")[0] for line in err.splitlines()]
    assert counts == [f"chat: {runs} of 4 runs" for runs in (1, 2, 3, 4)]


def test_the_device_by_blocks_or_by_tokens(trace: Path) -> None:
    loaded = load_one(trace, None, None)
    assert loaded.block_tokens == 512
    assert device_blocks(loaded, None, None) == 0
    assert device_blocks(loaded, 7, None) == 7
    assert device_blocks(loaded, None, 512 * 7 + 511) == 7


def test_a_fleet(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "fleet.html"
    fleet = ["--servers", "2,3", "--router", "round-robin,session", "--shared", "none", "--shared", "50%,link=10GB"]
    common = ["simulate", trace, "--cpu", "10%", "--processes", "1", *fleet]
    code, out, _ = run(capsys, *common, "--json", tmp_path / "fleet.json", "--plot", page, "--copies", "2")
    assert code == 0
    assert "chat.jsonl x2" in out or "chat x2" in out
    found = json.loads((tmp_path / "fleet.json").read_text())
    assert len(found["fleets"]) == 2 * 2 * 2
    assert {fleet["config"]["servers"] for fleet in found["fleets"]} == {2, 3}
    with_shared = [fleet for fleet in found["fleets"] if fleet["config"]["shared"]]
    assert max(fleet["hit_rate"] for fleet in found["fleets"]) > 0.5
    assert {fleet["config"]["shared"]["server_bytes_per_s"] for fleet in with_shared} == {10e9}
    assert "<svg" in page.read_text()
    assert "http" not in page.read_text().replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", ""), "self-contained"


def test_one_server_has_the_figures_of_one_server(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["simulate", trace, "--cpu", "20%", "--policy", "density", "--gpu-kv-tokens", "10000", "--processes", "1"]
    run(capsys, *common, "--json", tmp_path / "one.json")
    run(capsys, *common, "--servers", "1", "--json", tmp_path / "fleet.json")
    (report,) = json.loads((tmp_path / "one.json").read_text())
    (fleet,) = json.loads((tmp_path / "fleet.json").read_text())["fleets"]
    (alone,) = report["runs"]
    assert fleet["ttft_s"] == alone["ttft_s"]
    assert fleet["hit_rate"] == alone["hit_rate"]


def test_what_happens_to_a_fleet(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "fleet.html"
    common = ["simulate", trace, "--servers", "3", "--shared", "50%,away=10:15,ttl=1h", "--wide", "--plot", page]
    code, out, _ = run(capsys, *common, "--death", "1@5:20", "--prefill-servers", "1", "--events", "delay=0.1,loss=0.5")
    assert code == 0
    for said in ("before / meanwhile / after", "server 1", "a decoding server finds"):
        assert said in out
        assert said in page.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--servers", "many"], "a list of numbers such as 4,8"),
        (["--servers", "1:8"], "a list of numbers such as 4,8"),
        (["synthetic:chat", "--servers", "2", "--json", "x.json"], "one trace at a time"),
        (["synthetic:chat", "--servers", "2", "--plot", "x.html"], "one trace at a time"),
        (["--servers", "2", "--router", "round"], "Did you mean 'round-robin'"),
        (["--servers", "2", "--shared", "50%,speed=3"], "'speed=3' is not one of link=, store=, latency=, ttl=, away="),
        (["--servers", "2", "--shared", "1KiB"], "less than one block"),
        (["--servers", "2", "--shared", "nan%"], "is not a share"),
        (["--servers", "2", "--death", "one"], "SERVER@FROM:TO"),
        (["--servers", "2", "--death", "1@9:3"], "FROM:TO in seconds"),
        (["--servers", "2", "--hour-prices", "gpu=3"], "'gpu=3' is not one of server="),
    ],
)
def test_mistakes_in_a_fleet(options: list[str], said: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "simulate", trace, *options)
    assert code == 2
    assert said in " ".join(err.split())


def test_the_cheapest_fleet(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", trace, "--servers", "1:6", "--shared", "none", "--shared", "50%", "--processes", "1"]
    code, out, _ = run(capsys, *common, "--hit-rate", "5", "--json", tmp_path / "plan.json")
    assert code == 0
    assert "1 server, no shared tier" in out
    code, out, _ = run(capsys, *common, "--ttft", "0.000001")
    assert code == 1
    assert "No fleet within the limits reaches the goal" in out
