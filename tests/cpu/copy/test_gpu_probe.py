# SPDX-License-Identifier: Apache-2.0
"""Programs that measure a GPU, over the fake driver: they run to their ends, so that no time with a GPU is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cpu.copy.fake_cuda import build, missing

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def run(tmp_path: Path, *arguments: str) -> str:
    build(tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", *arguments]
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


def test_the_probe_ends_with_a_table(tmp_path: Path) -> None:
    out = tmp_path / "probe.jsonl"
    said = run(tmp_path, "bench.gpu_probe", "--small", "--out", str(out))
    table = said.partition("what to change\n")[2].splitlines()
    for topic in ("copies in a call", "launches until a call blocks", "between pieces", "a small copy", "pinning"):
        assert any(line.startswith(topic) for line in table), topic
    assert all(json.loads(line).get("ended", "well") == "well" for line in out.read_text().splitlines())


def test_copies_are_measured_by_size_of_page(tmp_path: Path) -> None:
    assert "KiB" in run(tmp_path, "bench", "device_copies", "--short")
