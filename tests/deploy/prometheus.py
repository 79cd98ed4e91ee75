# SPDX-License-Identifier: Apache-2.0
"""Debian's Prometheus as a test uses it: one process, one target, questions over HTTP; and the dashboard's queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/kvoffload.rules.yml"
DASHBOARD = ROOT / "deploy/grafana/kvoffload.json"
INSTALLED = all(map(shutil.which, ("prometheus", "promtool")))


def queries() -> list[tuple[str, str]]:
    """(panel, query) of the dashboard, with its variables filled in."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$job", ".*").replace("$instance", ".*")
            assert "$" not in query, query
            found.append((panel["title"], query))
    return found


class Prometheus:
    """Scrapes ``target`` (host:port) five times a second, with kvoffload's rules."""

    def __init__(self, directory: Path, target: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "global": dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), "200ms"),
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "kvoffload", "static_configs": [{"targets": [target]}]}],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = directory / "prometheus.log"
        self._output = self.log.open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def ask(self, what: str, **parameters: str) -> Any:
        """``data`` of an answer of the HTTP API."""
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            answer = json.loads(response.read())
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, query: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series now."""
        found = self.ask("query", query=query)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def wait_for(self, query: str, timeout_s: float = 120) -> list[tuple[dict[str, str], float]]:
        """Return the series of ``query`` once there are any."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                break
            try:
                if found := self.query(query):
                    return found
            except (OSError, urllib.error.URLError):
                pass  # not up yet
            time.sleep(0.2)
        raise AssertionError(f"No series for {query}:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()
            self._process.wait(timeout=60)
            self._output.close()
