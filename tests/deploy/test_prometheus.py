# SPDX-License-Identifier: Apache-2.0
"""Test the dashboard and the alert rules, against the table of metrics and against Debian's Prometheus."""

from __future__ import annotations

import json
import math
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.deploy.prometheus import DASHBOARD, INSTALLED, ROOT, RULES, Prometheus, queries
from tests.integration.served_tiers import ServedTiers

from kvoffload.metrics import METRICS, Kind
from kvoffload.tiering.options import build_tier

needs_prometheus = pytest.mark.skipif(not INSTALLED, reason="needs Debian's prometheus; `make test-remote` installs it")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedTiers]:
    options = {"type": "disk", "path": [str(tmp_path / "a"), str(tmp_path / "b")], "max_bytes": ServedTiers.disk_bytes}
    served = ServedTiers(tmp_path, num_blocks=16, make_tier=partial(build_tier, options))
    yield served
    served.close()


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bkvoffload_(\w+)", text))


def exported() -> set[str]:
    names: set[str] = set()
    for metric in METRICS.values():
        match metric.kind:
            case Kind.COUNTER:
                names.add(f"{metric.name}_total")
            case Kind.GAUGE:
                names.add(metric.name)
            case Kind.HISTOGRAM:
                names |= {f"{metric.name}_{part}" for part in ("bucket", "count", "sum")}
    return names


def test_queries_name_metrics_of_the_table() -> None:
    assert names_in(DASHBOARD.read_text()) <= exported()
    assert names_in(RULES.read_text()) <= exported()


def test_the_dashboard_shows_every_metric_that_says_how_it_goes() -> None:
    shown = {re.sub(r"_(total|bucket)$", "", name) for name in names_in(DASHBOARD.read_text())}
    # Successful jobs, blocks by answer, and facts that other panels show in another unit.
    left_out = {"lookups_deferred", "load_seconds", "store_seconds", "tier_blocks", "tier_free_bytes", "tier_healthy"}
    left_out |= {"tier_lookups", "primary_blocks_pinned", "tier_breaker_last_trip_timestamp_seconds"}
    left_out |= {"cache_resets"}  # an operator's action
    assert METRICS.keys() - shown == left_out


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_alert_has_its_runbook() -> None:
    page = (ROOT / "docs/operating.md").read_text()
    headings = set(re.findall(r"^#+ (\w+)$", page, re.MULTILINE))
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    assert len(alerts) == len(set(alerts)) > 5
    assert set(alerts) <= headings
    assert re.findall(r"runbook: docs/operating.md#(\w+)", RULES.read_text()) == [name.lower() for name in alerts]


@needs_prometheus
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_names_follow_the_conventions(served: ServedTiers) -> None:
    """``promtool`` reads an engine's metrics, and rejects abbreviated units, counters without ``_total``, and metrics
    without help."""
    served.serve(rounds=1)
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=10) as response:
        text = response.read().decode()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """Series by hand, as promtool's tests of rules have them."""
    tier = 'job="k",instance="a",tier="disk"'
    good = {
        f'kvoffload_tier_breaker_open{{{tier},direction="write"}}': "0x200",
        f"kvoffload_tier_corrupt_blocks_total{{{tier}}}": "5x200",
        'kvoffload_load_jobs_total{job="k",instance="a",outcome="failed"}': "3x200",
        'kvoffload_promotions_total{job="k",instance="a",outcome="failed"}': "0+1x200",
        'kvoffload_promotions_total{job="k",instance="a",outcome="ok"}': "0+100x200",
        f"kvoffload_tier_dropped_blocks_total{{{tier}}}": "0+1x200",
        f"kvoffload_tier_blocks_stored_total{{{tier}}}": "0+100x200",
        'kvoffload_lookups_out_of_patience_total{job="k",instance="a"}': "4x200",
        'kvoffload_primary_stores_refused_total{job="k",instance="a"}': "0+1x200",
        'kvoffload_primary_eviction_age_seconds_bucket{job="k",instance="a",le="60.0"}': "0+1x200",
        'kvoffload_primary_eviction_age_seconds_bucket{job="k",instance="a",le="+Inf"}': "0+100x200",
        'kvoffload_primary_reuse_age_seconds_bucket{job="k",instance="a",le="60.0"}': "0+90x200",
        'kvoffload_primary_reuse_age_seconds_bucket{job="k",instance="a",le="+Inf"}': "0+100x200",
    }
    turned = ["1x200", "0+1x200", "0+9x200", "0+10x200", "0+100x200", "0+50x200", "0+100x200", "0+9x200", "0+99x200"]
    turned += ["0+90x200", "0+100x200", "0+1x200", "0+100x200"]
    bad = dict(zip(good, turned, strict=True))
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    tests = []
    for series, should_fire in ((good, False), (bad, True)):
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                        "eval_time": "180m",
                        "exp_samples": [{"labels": "{}", "value": 1}] if should_fire else [],
                    }
                    for alert in alerts
                ],
            }
        )
    path = tmp_path / "tests.json"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_every_query_of_the_dashboard_returns_series(served: ServedTiers, tmp_path: Path) -> None:
    prometheus = Prometheus(tmp_path / "prometheus", f"127.0.0.1:{served.port}")
    try:
        prometheus.wait_for("kvoffload_primary_blocks")
        served.serve(rounds=2)
        # A rate needs one scrape before the measured events and one after them.
        expected = served.engine.connector.get_stats()["hit_tokens",]
        prometheus.wait_for(f"kvoffload_hit_tokens_total == {expected}")
        for _, query in queries():
            prometheus.wait_for(query)
        rates = dict(queries())
        hits = prometheus.query(rates["Prompt tokens by source"])
        assert {labels["tier"] for labels, share in hits if share > 0} == {"CPU", "disk"}
        (wait, *_) = [query for panel, query in queries() if panel == "Wait for lower tiers"]
        ((_, seconds),) = prometheus.query(wait)
        assert math.isfinite(seconds)
        health = prometheus.ask("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in health} <= {"ok", "unknown"}
    finally:
        prometheus.stop()
