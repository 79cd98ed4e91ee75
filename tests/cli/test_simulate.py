# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from kvoffload.cli import main
from kvoffload.cli.scenario import device_blocks
from kvoffload.sim.hints import true_hints
from kvoffload.sim.report import format_seconds
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace_files import load_trace
from kvoffload.tiering.options import parse_tier


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three sessions that grow, turn after turn."""
    path = tmp_path / "chat.jsonl"
    lines: list[dict[str, Any]] = []
    for turn in range(1, 25):
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


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., list[str]]:
    """Writes the file of ``--fleet`` with these keys, and gives the option."""

    def write(**keys: Any) -> list[str]:
        path = tmp_path / "fleet.json"
        path.write_text(json.dumps(keys))
        return ["--fleet", str(path)]

    return write


Fleet = Callable[..., list[str]]


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_what_hints_would_be_worth(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["simulate", "synthetic:chat:1", "--max-requests", "400", "--policy", "density", "--cpu", "5%"]
    rates = []
    for keys in ({}, {"hints": "noisy:0.3"}, {"hints": "oracle"}):
        code, out, _ = run(capsys, *common, *fleet(**keys), "--processes", "1", "--json")
        assert code == 0
        (report,) = json.loads(out)
        rates.append(report["runs"][-1]["hit_rate"])
    assert rates == sorted(set(rates))
    code, _, err = run(capsys, *common, *fleet(hints="perfect"))
    assert code == 2
    assert "oracle, or noisy:P" in err


@pytest.mark.long
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
        common = ["--gpu-kv-tokens", str(5 * trace.block_tokens), "--processes", "1", "--json"]
        plan = json.loads(run(capsys, "plan", path, "--hit-rate", "99", *common)[1])
        rates = {each["cpu_blocks"]: each["hit_rate"] for each in plan["runs"]}
        middle = sorted(rates)[len(rates) // 2]
        cpu = f"{middle * plan['block_bytes'] >> 20}MiB"
        (report,) = json.loads(run(capsys, "simulate", path, "--cpu", cpu, "--policy", "density", *common)[1])
        assert report["runs"][-1]["cpu_blocks"] == middle
        results[name] = rates[middle], report["runs"][-1]["hit_rate"]
    assert all(hinted > plain for hinted, plain in zip(results["with"], results["without"], strict=True))


def test_a_sweep_with_table_json_and_plots(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    common = ["simulate", trace, "--policy", "lru,density", "--gpu-kv-tokens", "2560", "--processes", "1"]
    outs = [word for name in ("o.json", "o.png", "o.html") for word in ("--out", tmp_path / name)]
    code, out, _ = run(capsys, *common, "--cpu", "10%,30%,3GiB", "--disk", "50%", *outs)
    assert code == 0
    (title,) = [line for line in out.splitlines() if line.startswith("chat: 24 requests")]
    assert "a cache without limits hits" in title
    assert "best overall is" in out
    (report,) = json.loads((tmp_path / "o.json").read_text())
    assert [(each["policy"], each["cpu_blocks"]) for each in report["runs"]] == [
        (policy, blocks) for policy in ("lru", "density") for blocks in (7, 21, 48)
    ]
    for each in report["runs"]:
        assert 0 < each["hit_rate"] <= each["optimum_hit_rate"] <= report["reachable_hit_rate"] < 1
    assert (tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "o.html").read_text()
    assert page.count("<svg") == 1
    assert "<td>density</td>" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.jsonl", "o.html", "o.json", "o.png"]


@pytest.mark.parametrize(
    "command", [["simulate", "--cpu", "30%", "--policy", "lru"], ["plan", "--hit-rate", "10", "--max-cpu", "3GiB"]]
)
@pytest.mark.usefixtures("no_loads")
def test_the_device_is_that_of_the_trace(
    command: list[str],
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = tmp_path / "recorded.jsonl"
    first, *others = trace.read_text().splitlines(keepends=True)
    line = json.loads(first) | {"machine": {"block_bytes": 64 << 20, "device_blocks": 5}}
    recorded.write_text("".join([json.dumps(line) + "\n", *others]))
    found = []
    size = "--gpu-kv-tokens"
    for path, more in ((recorded, []), (trace, [size, "2560"]), (recorded, [size, "0"]), (trace, [])):
        code, out, _ = run(capsys, *command, path, "--processes", "1", "--json", *more)
        assert code == 0
        told = json.loads(out)
        found.append(
            [
                (each["gpu_blocks"], each["gpu_hit_blocks"])
                for each in (told[0] if isinstance(told, list) else told)["runs"]
            ]
        )
    assert found[0] == found[1] != found[2] == found[3]


@pytest.mark.long
def test_processes_do_not_change_results(trace: Path) -> None:
    """The command runs in its own process, as for users: workers are spawned from the real entry point."""
    found = []
    for processes in ("1", "2"):
        options = ["--cpu", "10%,40%", "--processes", processes, "--json"]
        command = [sys.executable, "-m", "kvoffload", "simulate", str(trace), *options]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policy", "lur"], "Unknown cache policy: 'lur'. Did you mean 'lru'?"),
        (["--policy", ","], "--policy needs at least one policy"),
        (["--cpu", "1MiB"], "--cpu: 1MiB has no room for one block of chat, which takes 64 MiB"),
        (["--cpu", "12parsecs"], "--cpu must be a size"),
        (["--cpu", "ten%"], "'ten%' is not a percentage"),
        (["--cpu", "inf%"], "'inf%' is not a percentage"),
        (["--cpu", "0%"], "has no room for one block"),
        (["--cpu", "0"], "--cpu must be positive"),
        (["--disk", "1KiB"], "--disk: 1KiB has no room for one block"),
        (["--prefill-speed", "0"], "--prefill-speed must be positive, not 0"),
        (["--prefill-speed", "inf"], "--prefill-speed must be positive, not inf"),
        (["--model", "/nowhere/config.json"], "cannot be read: No such file or directory"),
        (["--out", "out.jpeg"], "--out must name a file that ends with .json, .html, .png, not 'out.jpeg'"),
        (["--out", "/nowhere/out.png"], "because there is no folder '/nowhere'"),
        (["--fleet", "/nowhere/fleet.yaml"], "/nowhere/fleet.yaml cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    target = tmp_path / "out.json"
    code, out, err = run(capsys, "simulate", trace, "--out", target, *args)
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


@pytest.mark.long
def test_synthetic_traffic(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--max-requests", "200", "--processes", "1"]
    code, out, _ = run(capsys, "simulate", "synthetic:chat:7", *small, "--policy", "lru")
    assert code == 0
    assert "synthetic-chat-7: 200 requests" in out
    code, _, _ = run(capsys, "plan", "synthetic:agents", *small, "--hit-rate", "20")
    assert code == 0
    for command in (["simulate"], ["plan", "--hit-rate", "20"]):
        code, _, err = run(capsys, *command, "synthetic:chat", *small, *fleet(block_tokens=16))
        assert code == 2
        assert "block_tokens" in err and "traces in files" in err
    for name, words in (("synthetic:poems", "Unknown kind"), ("synthetic:chat:x", "synthetic:chat:7")):
        code, _, err = run(capsys, "simulate", name)
        assert code == 2
        assert words in err


def rows(out: str) -> list[list[str]]:
    """Return the cells of the only table in ``out``."""
    lines = out.splitlines()
    (rule,) = [at for at, line in enumerate(lines) if line.startswith("─")]
    widths = [len(part) for part in lines[rule].split()]
    found = []
    for line in lines[rule + 1 :]:
        cells = [line[sum(widths[:at]) + 2 * at :][:width] for at, width in enumerate(widths)]
        if "  ".join(cells).rstrip() != line:
            break
        found.append([cell.strip() for cell in cells])
    return found


def test_plan_buys_what_reaches_the_goal(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goal = ["plan", trace, "--processes", "1", "--hit-rate"]
    code, out, _ = run(capsys, *goal, "60")
    assert code == 0
    assert out.startswith("Buy ")
    code, out, _ = run(capsys, *goal, "99", "--wide")
    assert code == 1
    assert out.startswith("Nothing ") and len(rows(out)) > 5, "the table shows what was tried"
    code, out, _ = run(capsys, *goal, "60%", "--gpu-kv-tokens", "1000000", "--wide")
    assert code == 0
    assert out.startswith("Buy nothing: the GPU's own cache reaches the goal")
    assert len(rows(out)) == 1, "and nothing else was tried"
    code, out, _ = run(capsys, "plan", trace, "--processes", "1", "--ttft", "0.5")
    assert code == 0
    assert "of host memory" in out


def test_a_goal_that_is_reached_without_any_cache_is_not_credited_to_one(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "plan", trace, "--processes", "1", "--ttft", "1000", "--gpu-kv-tokens", "0")
    assert code == 0
    assert "Buy nothing: computing every prompt reaches the goal" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "needs one goal"),
        (["--hit-rate", "10", "--ttft", "1"], "needs one goal"),
        (["--hit-rate", "101"], "hit rate must be"),
        (["--hit-rate", "0.6"], "Write 60 if you mean 60%, or 0.6% if you mean that"),
        (["--hit-rate", "most"], "must be a percentage such as 60, not 'most'"),
        (["--hit-rate", "10", "--quantile", "p42"], "--quantile must be p50, p90 or p99"),
        (["--hit-rate", "10", "--max-cpu", "1KiB"], "--max-cpu: 1KiB has no room for one block"),
        (["--hit-rate", "10", "--prefill-speed", "0"], "--prefill-speed must be positive, not 0"),
        (["--hit-rate", "10", "--out", "/nowhere/out.json"], "because there is no folder '/nowhere'"),
        (
            ["--hit-rate", "1", "--max-disk", "1KiB"],
            "--max-disk: 1KiB has no room for one block of chat, which takes 64 MiB",
        ),
        (["--ttft", "nan"], "must be positive, not nan"),
    ],
)
def test_mistakes_in_plan(trace: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    code, _, err = run(capsys, "plan", trace, *args)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"cascade": "on_stor"}, "Did you mean 'on_store'"),
        ({"load_speed": "fast"}, "load_speed of the file of --fleet must be a size"),
        ({"load_polcy": "cost"}, "Unknown key 'load_polcy' in the file of --fleet. Did you mean 'load_policy'?"),
        ({"load_policy": "never"}, "must be one of 'cost', 'always'"),
        ({"policy": "lur"}, "Did you mean 'lru'"),
        ({"stretch": 0}, "stretch of the file of --fleet must be from"),
        ({"stretch": 1e300}, "stretch of the file of --fleet must be from"),
        ({"copies": 10**9}, "copies of the file of --fleet must be from"),
        ({"servers": [10**30]}, "a list such as [4, 8]"),
        ({"servers": 10**9}, "a list such as [4, 8]"),
        ({"servers": int("9" * 400)}, "too large for any machine"),
        ({"servers": 2, "shared": {"size": "50%", "ttl_s": math.nan}}, "must be positive"),
        ({"hints": "a\0"}, "NUL"),
        ({"block_tokens": 7}, "line 1: 2 hash_ids do not fit input_length 1024"),
        ({"kv_dtype": "fp8"}, "kv_dtype works only with --model"),
        ({"copies": 0}, "copies of the file of --fleet must be from 1"),
        ({"prices": {"cpu": -1}}, "not negative"),
        ({"prices": {"gpu": 1}}, "Unknown key 'gpu' in prices"),
        ({"routers": ["session"]}, "has routers, but no fleet; add servers"),
        ({"shared": {"size": "1TiB"}}, "has shared, but no fleet"),
        ({"pool": {"size": "1TiB"}}, "has pool, but no fleet"),
        (
            {"prefill_servers": 1, "servers_per_machine": 2},
            "has servers_per_machine, prefill_servers",
        ),
        ({"servers": "many"}, "or a list such as [4, 8]"),
        ({"servers": "1:8"}, "only plan accepts a range"),
        ({"servers": 0}, "or a list"),
        ({"servers": 2, "routers": "round"}, "Did you mean 'round-robin'"),
        ({"servers": 2, "routers": []}, "must name at least one"),
        ({"servers": 2, "shared": {"size": "50%", "speed": 3}}, "Unknown key 'speed' in shared of the file of --fleet"),
        ({"servers": 2, "shared": {"link": "1GB"}}, "Shared of the file of --fleet lacks 'size'"),
        ({"servers": 2, "shared": {"size": "1KiB"}}, "has no room for one block"),
        ({"servers": 2, "shared": {"size": "nan%"}}, "is not a percentage"),
        ({"servers": 2, "shared": {"size": "10%,20%"}}, ": write several stores as a list"),
        ({"servers": 2, "shared": ["1TiB"]}, "must be a mapping with a size, or none"),
    ],
)
def test_mistakes_in_the_file_of_a_fleet(
    keys: dict[str, Any], words: str, trace: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "simulate", trace, *fleet(**keys))
    assert (code, out) == (2, "")
    assert words in err
    assert "(server=" not in err, "no value of ours is shown as Python writes it"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"servers": [4, 6]}, "a range such as 1:64"),
        ({"servers": "8:4"}, "a range such as 1:64"),
        ({"servers": "2:8", "prefill_servers": 1}, "works only with simulate"),
        ({"cascade": ["on_store", "on_evict"]}, "one policy and one cascade"),
    ],
)
def test_what_a_plan_cannot_take_is_refused(
    keys: dict[str, Any], words: str, trace: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "plan", trace, "--hit-rate", "10", *fleet(**keys))
    assert code == 2
    assert words in err


def test_the_cache_of_a_dtype(trace: Path, tmp_path: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    config.write_text(json.dumps(sizes | {"torch_dtype": "float32"}))
    plan = ["plan", trace, "--processes", "1", "--hit-rate", "60", "--json", "--model", config]
    found = []
    for keys in ({}, {"kv_dtype": "fp8"}):
        code, out, _ = run(capsys, *plan, *fleet(**keys))
        assert code == 0
        found.append(json.loads(out)["block_bytes"] // 512)
    assert found == [4 * 65536, 65536]
    code, _, err = run(capsys, *plan, *fleet(kv_dtype="int3"))
    assert code == 2
    assert err.startswith("kvoffload: Unknown dtype 'int3'")


def test_both_cascades_are_rows_of_their_own(trace: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["simulate", trace, "--policy", "lru", "--cpu", "10%", "--processes", "1", "--disk", "20%"]
    options = fleet(cascade=["on_evict", "on_store"])
    code, out, _ = run(capsys, *common, *options)
    assert code == 0
    assert {row[3] for row in rows(out)[1:]} == {"on_store", "on_evict"}
    told = json.loads(run(capsys, *common, *options, "--json")[1])
    assert [each["cascade"] for each in told[0]["runs"]] == ["on_evict", "on_store"]


def test_without_cascade_the_sizes_decide_as_in_serving(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", trace, "--policy", "lru", "--cpu", "640MiB", "--disk", "0,1216MiB,1280MiB", "--json"]
    code, out, _ = run(capsys, *args, "--processes", "1")
    assert code == 0
    found = {each["disk_blocks"]: each["cascade"] for each in json.loads(out)[0]["runs"]}
    expected = {
        size: parse_tier({"type": "memory", "max_bytes": f"{size * 64}MiB"}).cascade_above(640 << 20)
        for size in (19, 20)
    }
    assert found == expected | {0: "on_store"}
    assert expected == {19: "on_evict", 20: "on_store"}


def test_assumptions_come_first_or_when_asked_for(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, plan = ["simulate", trace, "--cpu", "10%", "--policy", "lru"], ["plan", trace, "--hit-rate", "60"]
    given = ["--kv-bytes-per-token", "131072", "--gpu-kv-tokens", "2560", "--prefill-speed", "7000"]
    for command in (sweep, [*plan, "--verbose"]):
        _, out, _ = run(capsys, *command, "--processes", "1")
        assert "Assumptions\n  KV per token   128 KiB, a guess" in out
        assert out.startswith("Assumptions") == (command is sweep)
        assert "hits are an upper bound" in " ".join(out.split())
        _, out, _ = run(capsys, *command, "--processes", "1", *given)
        head = out[out.index("Assumptions") :]
        assert "128 KiB\n" in head and "2,560 tokens" in head and "7,000 tokens/s" in head
        assert "upper bound" not in out
    assert "Assumptions" not in run(capsys, *plan, "--processes", "1")[1], "the verdict comes first"


def test_a_run_without_offloading_shows_what_is_gained(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    args = ["simulate", trace, "--policy", "lru", "--cpu", "3GiB", "--gpu-kv-tokens", "2560", "--processes", "1"]
    (report,) = json.loads(run(capsys, *args, "--json")[1])
    _, out, _ = run(capsys, *args)
    alone, (with_memory,) = report["without_offloading"], report["runs"]
    assert alone["cpu_hit_blocks"] == alone["stored_bytes"] == 0 < alone["gpu_hit_blocks"]
    assert alone["gpu_hit_blocks"] <= with_memory["gpu_hit_blocks"]
    shown = rows(out)
    assert shown[0][0] == "none"
    saved_s = alone["ttft_s"]["mean"] - with_memory["ttft_s"]["mean"]
    assert saved_s > 0
    assert format_seconds(saved_s) in shown[1]
    assert len(out.split("─")[0].splitlines()[-1]) <= 80
    assert "Not shown: " in out and "price/h" in out.partition("Not shown: ")[2]
    _, out, _ = run(capsys, *args, "--wide")
    assert "Not shown" not in out and "price/h" in out


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
    assert "There is no file org/other, and the config.json of a model of this name cannot be loaded" in err
    assert asked == [("org/m", "config.json"), ("org/other", "config.json")]
    assert run(capsys, *args[:-1], "models/confg.json")[0] == 2
    assert len(asked) == 2, "a file with a typing error is not asked of the Hub"


def test_a_plan_as_json(trace: Path, tmp_path: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    common = ["plan", trace, "--processes", "1", "--max-disk", "1GiB", "--out", target]
    code, out, _ = run(capsys, *common, "--hit-rate", "60", *fleet(cascade="on_evict"))
    assert code == 0
    made = json.loads(target.read_text())
    assert made["goal"] == {"hit_rate": 0.6, "ttft_s": None, "quantile": "p90"}
    assert made["chosen"] in made["runs"]
    assert made["chosen"]["hit_rate"] >= 0.6
    assert {each["cascade"] for each in made["runs"]} == {"on_evict"}
    assert f"{made['price']:,.3g} an hour" in " ".join(out.split())
    assert " ".join(out.split()).startswith(made["verdict"]["answer"])
    # A block that is stored at its second request is hit by the third at the earliest.
    reached = [json.loads(target.read_text())["runs"]]
    assert run(capsys, *common, "--hit-rate", "30", *fleet(cascade="on_evict", store_threshold=2))[0] == 0
    reached.append(json.loads(target.read_text())["runs"])
    unfiltered, filtered = (max(each["hit_rate"] for each in runs) for runs in reached)
    assert filtered < unfiltered


def test_progress_is_lines_where_the_output_is_no_terminal(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "simulate", trace, "--processes", "1", "--policy", "lru", "--cpu", "10%,20%,30%")
    counts = [line.rpartition(",")[0] for line in err.splitlines()]
    assert counts == [f"chat: {runs} of 4 runs" for runs in (1, 2, 3, 4)]


def test_the_device_by_tokens(trace: Path) -> None:
    loaded = load_trace(trace)
    assert loaded.block_tokens == 512
    assert device_blocks(loaded, None) == 0
    assert device_blocks(loaded, 512 * 7 + 511) == 7


def test_a_fleet(trace: Path, tmp_path: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    options = fleet(
        servers=[2, 3], routers=["round-robin", "session"], shared=["none", {"size": "50%", "link": "10GB"}], copies=2
    )
    common = ["simulate", trace, "--cpu", "10%", "--processes", "1", *options]
    code, out, _ = run(capsys, *common, "--out", tmp_path / "fleet.json")
    assert code == 0
    assert "chat x2" in out and "not as a forecast" in out
    ((found),) = json.loads((tmp_path / "fleet.json").read_text())
    assert len(found["runs"]) == 2 * 2 * 2
    assert {each["config"]["servers"] for each in found["runs"]} == {2, 3}
    with_shared = [each for each in found["runs"] if each["config"]["shared"]]
    assert max(each["hit_rate"] for each in found["runs"]) > 0.3
    assert {each["config"]["shared"]["server_bytes_per_s"] for each in with_shared} == {10e9}


def test_fleets_that_differ_by_a_link_alone_differ_in_the_table_and_by_name(
    trace: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stores = [{"size": "50%", "link": link} for link in ("1GB", "3GB", "10GB")]
    args = ["simulate", trace, "--processes", "1", *fleet(servers=1, shared=stores)]
    code, out, _ = run(capsys, *args)
    assert code == 0
    shown = rows(out)
    assert len({tuple(row[:3]) for row in shown}) == 3
    assert all(f"{speed} GB/s" in out for speed in (1, 3, 10))
    for line in out.splitlines()[out.splitlines().index("") :]:
        assert len(line) <= 80 or not line.startswith(("servers", "1 ")), line


def test_one_server_has_the_figures_of_one_server(
    trace: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["simulate", trace, "--cpu", "20%", "--policy", "density", "--gpu-kv-tokens", "10000", "--processes", "1"]
    (report,) = json.loads(run(capsys, *common, "--json")[1])
    ((one),) = json.loads(run(capsys, *common, *fleet(servers=1), "--json")[1])[0]["runs"]
    (alone,) = report["runs"]
    assert one["ttft_s"] == alone["ttft_s"]
    assert one["hit_rate"] == alone["hit_rate"]


def test_what_happens_to_a_fleet(trace: Path, tmp_path: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "fleet.html"
    options = fleet(
        servers=3,
        shared={"size": "50%", "ttl_s": "1h"},
        prefill_servers=1,
    )
    code, out, _ = run(capsys, "simulate", trace, *options, "--wide", "--out", page)
    assert code == 0
    assert "handed over %" in out
    assert "handed over %" in page.read_text()
    assert "<svg" in page.read_text()
    assert "http" not in page.read_text().replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", ""), "self-contained"


def test_the_cheapest_fleet(trace: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    options = fleet(servers="1:6", shared=["none", {"size": "50%"}])
    common = ["plan", trace, *options, "--processes", "1"]
    code, out, _ = run(capsys, *common, "--hit-rate", "5")
    assert code == 0
    assert "1 server, no shared tier" in out
    code, out, _ = run(capsys, *common, "--ttft", "0.000001", "--json")
    assert code == 1
    assert "No fleet within the limits reaches the goal" in json.loads(out)["verdict"]["answer"]
