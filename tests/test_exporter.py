# SPDX-License-Identifier: Apache-2.0
"""The exporter over HTTP, with stats of real managers, read by Prometheus' own parser."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.served_tiers import ServedTiers
from tests.ports import free_port

from kvoffload.errors import ConfigError
from kvoffload.exporter import PrometheusExporter
from kvoffload.metrics import METRICS, Kind


def scrape(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_a_tiering_manager_that_served_requests(tmp_path: Path) -> None:
    served = ServedTiers(tmp_path, num_blocks=16)
    try:
        before = scrape(served.port)
        served.serve(rounds=2)
        after = scrape(served.port)
    finally:
        served.close()
    for metric in METRICS.values():
        suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}[metric.kind]
        if metric.values or not metric.labels:
            assert before[f"kvoffload_{metric.name}{suffix}"], f"{metric.name} is not there from the start"
    on_disk, in_host = (("engine", "0"), ("tier", "disk")), (("engine", "0"), ("tier", "CPU"))
    assert before["kvoffload_tier_healthy"][on_disk] == 1
    hits = after["kvoffload_tier_hit_tokens_total"]
    assert hits[on_disk] > 0
    assert hits[on_disk] + hits[in_host] == sum(after["kvoffload_hit_tokens_total"].values())
    for direction in ("read", "write"):
        labels = (("direction", direction), ("engine", "0"), ("tier", "disk"))
        moved = after["kvoffload_tier_io_bytes_total"][labels]
        blocks = after[f"kvoffload_tier_blocks_{'loaded' if direction == 'read' else 'stored'}_total"][on_disk]
        assert moved == blocks * served.block_bytes > 0
        assert after["kvoffload_tier_io_seconds_total"][labels] > 0
        assert after["kvoffload_tier_batch_seconds_count"][labels] > 0
    for name in ("promotion_wait", "lookup_wait", "load_job", "store_job", "primary_eviction_age", "primary_reuse_age"):
        (count,) = after[f"kvoffload_{name}_seconds_count"].values()
        assert count > 0, name
        unbounded = after[f"kvoffload_{name}_seconds_bucket"][(("engine", "0"), ("le", "+Inf"))]
        assert unbounded == count
    assert after["kvoffload_tier_quota_bytes"][on_disk] == served.disk_bytes


def test_scrapes_beside_an_engine_that_publishes() -> None:
    exporter = PrometheusExporter()
    stop = threading.Event()

    def publish() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            exporter.publish({("hit_tokens",): count, ("load_jobs", "ok"): count, ("private",): 1})

    engine = threading.Thread(target=publish)
    engine.start()
    try:
        for _ in range(50):
            families = {family.name: family for family in exporter.collect()}
            (tokens,) = families["kvoffload_hit_tokens"].samples
            ok = [s.value for s in families["kvoffload_load_jobs"].samples if s.labels == {"outcome": "ok"}]
            assert [tokens.value] == ok
    finally:
        stop.set()
        engine.join()


def test_an_address_in_use_is_said_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot be served at"):
            PrometheusExporter().serve(taken.getsockname()[1])


def test_a_port_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"cannot be served at 127\.0\.0\.1:70000"):
        PrometheusExporter().serve(70000)


def test_the_code_of_the_page_runs() -> None:
    page = (Path(__file__).parents[1] / "docs/operating.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    port = free_port()
    code = code.replace("9400", str(port)).replace("close()", f"found = scrape({port})\nclose()")
    space: dict[str, Any] = {"scrape": scrape}
    exec(code, space)
    assert space["found"]["kvoffload_hit_tokens_total"] == {(("engine", "0"),): 512}
