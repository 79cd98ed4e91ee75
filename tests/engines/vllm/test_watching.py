# SPDX-License-Identifier: Apache-2.0
"""Test an operator's tools for ``vllm serve``:

``kvoffload top``, the dashboard's queries at a real Prometheus, and the stories of served requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy.prometheus import INSTALLED, Prometheus, queries
from tests.engines.greedy import Prompt
from tests.engines.models import SmallModel
from tests.engines.vllm.prompts import long_prompts
from tests.engines.vllm.server import Server, ask, client_of

from kvoffload.cli import main
from kvoffload.sim.explain import read_explanations

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture
def server(llama: SmallModel, tmp_path: Path) -> Iterator[Server]:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        # Two, as some panels show disks one by one.
        "secondary_tiers": [
            {
                "type": "disk",
                "path": [str(tmp_path / name) for name in "ab"],
                "cascade": "on_store",
                "max_bytes": "1GiB",
            }
        ],
        "load_policy": "always",
        "max_wait_s": 60.0,
        "record_trace": str(tmp_path / "trace.jsonl"),
    }
    server = Server(llama.path, tmp_path, **extra)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def test_a_served_disk_tier_is_seen_by_top_by_prometheus_and_in_stories(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.metrics()
    assert before["tier_healthy|disk"] == 1, "before the first request"
    assert before["tier_breaker_open|write|disk"] == 0
    assert before["tier_batch_seconds_count|read|disk"] == 0
    client = client_of(server.url)
    prometheus = Prometheus(tmp_path / "prometheus", server.url.removeprefix("http://")) if INSTALLED else None
    try:
        if prometheus is not None:
            prometheus.wait_for("kvoffload_primary_blocks")
        prompts = long_prompts()
        for round_prompts in (prompts, prompts, prompts[:2]):
            for prompt in round_prompts:
                ask(client, prompt)
        ask(client, Prompt("last", prompts[0].token_ids[:40]))  # its steps bring the reports of the ones before
        metrics = server.metrics()
        with pytest.raises(SystemExit) as caught:
            main(["top", server.url, "--once", "--json", "--interval", "0.1"])
        view = json.loads(capsys.readouterr().out)
        if prometheus is not None:
            prometheus.wait_for(f"kvoffload_hit_tokens_total >= {metrics['hit_tokens']}")
            for panel, query in queries():
                assert prometheus.query(query), f"{panel}: no series for {query}"
    finally:
        client.close()
        if prometheus is not None:
            prometheus.stop()

    assert metrics["tier_hit_tokens|disk"] > 0
    assert metrics["tier_hit_tokens|disk"] + metrics["tier_hit_tokens|CPU"] == metrics["hit_tokens"]
    assert metrics["tier_batch_seconds_count|read|disk"] > 0
    assert metrics["promotion_wait_seconds_count"] > 0
    assert metrics["load_job_seconds_count"] == metrics["load_jobs|ok"]
    assert caught.value.code == 0
    assert view["hit_rate_total"] == pytest.approx(metrics["hit_tokens"] / metrics["lookup_tokens"])
    assert [tier["name"] for tier in view["tiers"]] == ["host memory", "disk"]

    server.stop()
    stories = read_explanations(tmp_path / "trace.jsonl")
    assert stories.explained == 2 * len(prompts) + 3
    assert stories.found["disk"] == metrics["tier_hit_tokens|disk"]
    assert stories.missed["new"] >= len(prompts) * 992
    assert stories.machine is not None
    assert stories.machine.tiers[0].type == "disk"
