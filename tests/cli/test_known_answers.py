# SPDX-License-Identifier: Apache-2.0
"""Questions about public traffic whose answers are known: ``kvoffload plan`` and the simulator must find them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from tests.cli.test_plan import GIB, plan
from tests.sim.conftest import TRACES

from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import SimConfig
from kvoffload.sim.trace_files import load_trace

TOKEN_BYTES = 128 << 10


@pytest.fixture
def traffic() -> Callable[[str], Path]:
    """The file of a shared trace; skips the test where the folder is absent."""

    def find(name: str) -> Path:
        path = TRACES / f"{name}.jsonl.zst"
        if not path.exists():
            pytest.skip(f"needs the shared traces in {TRACES}")
        pytest.importorskip("zstandard")
        return path

    return find


def test_a_disk_as_fast_as_the_engine_takes_work_off_it(traffic: Callable[[str], Path]) -> None:
    """Mooncake's chats on a server that is busy all the time, with and without a disk of 5 GB/s."""
    trace = load_trace(traffic("mooncake_conversation"), max_requests=1500).whole_blocks()
    block_bytes = TOKEN_BYTES * trace.block_tokens
    server = SimConfig(
        cpu_blocks=64 * GIB // block_bytes,
        block_bytes=block_bytes,
        gpu_blocks=250_000 // trace.block_tokens,
        prefill_tokens_per_s=60_000,
        step_s=0.002,
        disk_read_bytes_per_s=5e9,
    )
    without, with_disk = simulate(trace, server), simulate(trace, replace(server, disk_blocks=100_000))
    assert with_disk.hit_rate > 2 * without.hit_rate
    assert with_disk.sum_of("computed_tokens") < 0.95 * without.sum_of("computed_tokens")
    assert with_disk.utilisation < without.utilisation
    for quantile in ("mean", "p50", "p90", "p99"):
        assert with_disk.ttft_s[quantile] < 0.9 * without.ttft_s[quantile]


@pytest.mark.long
def test_nothing_is_bought_where_loading_is_slower(
    traffic: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A token of 512 KiB takes 21 us to load, and 17 us to compute."""
    machine = ["--kv-bytes-per-token", "512KiB", "--prefill-speed", "60000"]
    code, text, told = plan(capsys, traffic("lmcache_agent_b256"), "--hit-rate", "80", *machine)
    assert code == 1
    assert text.startswith("Buy nothing: loading is slower than computing")
    assert told["chosen"] is None and told["verdict"]["offload_yaml"] == []
    today = told["without_offloading"]["ttft_s"]["p90"]
    assert all(run["ttft_s"]["p90"] > today for run in told["runs"] if run["hit_rate"] >= 0.8)


@pytest.mark.long
def test_agents_never_get_less_host_memory_than_the_gpu_has(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_tokens = 20_000
    sizes = ["--gpu-kv-tokens", str(gpu_tokens), "--max-disk", "100GiB", "--max-requests", "60"]
    for rate in ("0.05", "4"):
        code, _, told = plan(capsys, "synthetic:agents", "--hit-rate", "70", *sizes, "--rate", rate)
        assert (code == 0) == (told["chosen"] is not None)
        assert all(run["cpu_blocks"] * 64 >= gpu_tokens - 64 for run in told["runs"])
        if (chosen := told["chosen"]) is not None:
            better = [run for run in told["runs"] if run["utilisation"] <= 0.9]
            assert chosen in better, "it keeps up"
            assert chosen["ttft_s"]["p90"] <= told["without_offloading"]["ttft_s"]["p90"]
    assert told["chosen"] is None, "no size carries four agents' turns a second"


def test_a_load_that_no_server_carries_is_the_answer(
    traffic: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Mooncake's chats at the default speed of 20,000 tokens/s: 43,000 arrive each second."""
    trace = traffic("mooncake_conversation")
    code, text, told = plan(capsys, trace, "--hit-rate", "10", "--max-requests", "400")
    assert code == 1
    assert text.startswith("One server is too slow for this load")
    assert "servers without tiers (0.0% hits), or" in text
    assert text.index("Warning: one server cannot keep up") < text.index(" row ")
    assert told["chosen"] is None


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_prompts_that_keep_partial_tails_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each turn adds one and a half ids of 512 tokens, and later turns repeat the half."""
    lines: list[dict[str, Any]] = []
    for turn in range(12):
        for user in range(6):
            ids = [1000 * user + at for at in range(2 * (turn + 1))]
            line = {"timestamp": 5000 * (6 * turn + user), "output_length": 4, "hash_ids": ids}
            lines.append(line | {"input_length": 768 * (turn + 1)})
    trace = written(tmp_path / "tails.jsonl", lines)
    fleet = tmp_path / "fleet.json"
    fleet.write_text(json.dumps({"block_tokens": 512}))
    code, _, told = plan(capsys, trace, "--hit-rate", "60", "--gpu-kv-tokens", "10000", "--fleet", fleet)
    assert code == 0
    assert told["block_tokens"] == 512
    # Turn n has 768 (n + 1) tokens, of which 768 n were in the turn before; a hit is of whole blocks.
    blocks = [768 * (turn + 1) // 512 for turn in range(12)]
    assert told["accesses"] == 6 * sum(blocks)
    assert told["reachable_hit_rate"] == pytest.approx(sum(blocks[:-1]) / sum(blocks))


def test_aiperfs_turns_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of new tokens: a turn finds its session's earlier turns, but not their answers."""
    lines: list[dict[str, Any]] = []
    for turn in range(8):
        for user in range(6):
            when = {"delay": 60_000} if turn else {"timestamp": 1000 * user}
            ids = [10_000 * turn + 100 * user + at for at in range(4)]
            lines.append({"session_id": f"s{user}", "input_length": 2048, "output_length": 512, "hash_ids": ids} | when)
    trace = written(tmp_path / "aiperf.jsonl", lines)
    code, _, told = plan(capsys, trace, "--hit-rate", "50", "--gpu-kv-tokens", "12000", "--max-cpu", "100GiB")
    assert code == 0
    assert told["accesses"] == 6 * sum(4 * (turn + 1) + turn for turn in range(8))
    # Of turn n, the prompt of turn n - 1 was seen: 4 blocks and, before it, the answers and prompts of earlier turns.
    seen = 6 * sum(5 * turn - 1 for turn in range(1, 8))
    assert told["reachable_hit_rate"] == pytest.approx(seen / told["accesses"])
